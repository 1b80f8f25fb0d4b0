"""How the requests of `cells` are asked of a server, and of an engine in its own process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cell_checks import Got
from cells import CELLS, Cell
from inside_cases import sets as files_of

from itemset import published

ROOM = 64  # tokens
WAYS = {
    "vllm": "completions chat responses batch stream offline",
    "sglang": "completions chat responses stream generate params custom offline",
}
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "batch": "/v1/chat/completions/batch",
    "stream": "/v1/chat/completions",
    **dict.fromkeys(("generate", "params", "custom"), "/generate"),
}
"""`generate` has the words beside SGLang's fields, `params` in its `sampling_params`, `custom` in their
`custom_params`."""


class Ask(NamedTuple):
    cell: Cell
    way: str
    client: str


@cache
def asks(engine: str, *, offline: bool = False) -> dict[str, Ask]:
    """Every cell of an engine in every way, by a name: over HTTP as JSON and by the `openai` client, or offline."""
    found = {}
    for i, cell in enumerate(CELLS):
        for way in cell.ways.split() if engine in cell.engines else ():
            if way in WAYS[engine].split() and (way == "offline") == offline:
                clients = ("json", "openai") if way in ("completions", "chat", "responses", "stream") else ("json",)
                found |= {f"{i} {cell.row}, {way}, {client}": Ask(cell, way, client) for client in clients}
    return found


@cache
def answers(server: Any, engine: str) -> dict[str, Future[list[Got]]]:
    """All that a server is asked over HTTP, by the names of `asks`: many at a time, and once."""
    pool = ThreadPoolExecutor(16)
    return {name: pool.submit(over_http, server, one) for name, one in asks(engine).items()}


def check(server: Any, engine: str, name: str) -> None:
    """Whether the answer to one of them is what it must be."""
    asks(engine)[name].cell.check(answers(server, engine)[name].result())


def over_http(server: Any, asked: Ask) -> list[Got]:
    """What its choices are. Raises AssertionError with the answer if it is no 200."""
    body, path = _body(asked.cell, asked.way), PATHS[asked.way]
    if asked.client == "openai":
        answer = _by_client(server.client, path, body)
    elif asked.way == "stream":
        answer = server.events(path, body)
    else:
        status, answer = server.post(path, body)
        assert status == 200, answer
    if asked.way == "stream":
        return _streamed(answer)
    if path == "/v1/responses":
        (text,) = [part["text"] for one in answer["output"] for part in one.get("content") or ()]
        return [Got(text, *_told(answer))]
    if path == "/generate":
        return of_sglang(answer)
    return [Got(one["text"] if "text" in one else one["message"]["content"], *_told(one)) for one in answer["choices"]]


def _body(cell: Cell, way: str) -> dict[str, Any]:
    words, chat = {**cell.words}, [{"role": "user", "content": "a film"}]
    if PATHS[way] == "/generate":
        within = {"generate": {}, "params": words, "custom": {"custom_params": words}}[way]
        beside = words if way == "generate" else {}
        return {"text": "p", "sampling_params": {"max_new_tokens": ROOM, **within}, **beside}
    prompts: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "p", "max_tokens": ROOM},
        "responses": {"input": "p", "max_output_tokens": ROOM},
        "batch": {"messages": [chat, chat], "max_tokens": ROOM},
        "stream": {"messages": chat, "max_tokens": ROOM, "stream": True},
    }
    prompt = prompts.get(way, {"messages": chat, "max_tokens": ROOM})
    return {"model": "tiny", **prompt, **cell.options, **words}


def _by_client(client: Any, path: str, body: dict[str, Any]) -> Any:
    """What the `openai` client knows it is given, the rest goes into its `extra_body`."""
    endpoints = {
        "/v1/completions": client.completions,
        "/v1/chat/completions": client.chat.completions,
        "/v1/responses": client.responses,
    }
    create = endpoints[path].create
    known = body.keys() & inspect.signature(create).parameters.keys()
    extra = {key: value for key, value in body.items() if key not in known}
    answer = create(**{key: body[key] for key in known}, extra_body=extra)
    return [event.model_dump() for event in answer] if body.get("stream") else answer.model_dump()


def _told(choice: Mapping[str, Any]) -> tuple[Any, Any]:
    return choice.get("item", "none"), choice.get("items", "none")


def _streamed(events: Sequence[Mapping[str, Any]]) -> list[Got]:
    texts: dict[int, str] = {}
    told: dict[int, tuple[Any, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        if choice.get("finish_reason"):
            told[choice["index"]] = _told(choice)
    return [Got(text, *told[index]) for index, text in sorted(texts.items())]


def of_sglang(answer: Any) -> list[Got]:
    """What SGLang's own answer says, over HTTP or offline."""
    if isinstance(answer, list):
        return [got for one in answer for got in of_sglang(one)]
    if "beam_results" not in answer["meta_info"]:
        return [Got(answer["text"], *_told(answer["meta_info"]))]
    found = []
    for one in answer["meta_info"]["beam_results"]:
        info, score = one["meta_info"], one["meta_info"]["sequence_score"]
        found.append(Got(one["text"], info | {"score": score, "logprob": score}))
    return found


def offline_vllm(llm: Any, words: Mapping[str, Any]) -> list[Got]:
    """In the engine's process, by the calls of the docs."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_static.front.list_requests import DrawParams, RankingParams

    extra = {**words}
    brought = extra.pop("structured_outputs", None)
    structured = StructuredOutputsParams(**brought) if brought else None
    given: dict[str, Any] = {"max_tokens": ROOM, "extra_args": extra, "structured_outputs": structured}
    if "draws" in extra:
        params, place = DrawParams(**given), "draw"
    elif extra.pop("use_beam_search", False):
        params, place = RankingParams(beam_width=extra.pop("n"), **given), "rank"
    else:
        (output,) = llm.generate(["p"], SamplingParams(**given), use_tqdm=False)
        return [Got(one.text, *_told(vars(one))) for one in output.outputs]
    (output,) = llm.beam_search([{"prompt": "p"}], params)
    took = {name: value for name, value in vars(output).items() if name != "sequences"}
    return [
        Got(
            one.text.removeprefix("p"),
            took
            | vars(one)
            | {place: number, "score": getattr(one, "score", one.cum_logprob), "logprob": one.cum_logprob},
        )
        for number, one in enumerate(output.sequences, 1)
    ]


def offline_sglang(engine: Any, words: Mapping[str, Any]) -> list[Got]:
    """In the engine's process."""
    return of_sglang(engine.generate("p", {"max_new_tokens": ROOM, **words}))


def options(folder: Path, tokenizer: Any) -> dict[str, dict[str, str]]:
    """The plugin's options that register the sets that are asked for: files and a published set."""
    from demo_checks import source

    files = files_of(folder, tokenizer)
    published.publish(files["titles"], folder / "live")
    others = {"live": str(folder / "live"), "films": source(folder)}
    return {"item_sets": files | others}


def in_process(given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same for an engine in this process, where a set may be a list: the films, whose keys are their places."""
    from demo_checks import TITLE_OF

    return {**given, "item_sets": {**given["item_sets"], "films": [*TITLE_OF.values()]}}


def flags(given: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A server's flags of the same."""
    return ["--item-set", *(f"{name}={value}" for name, value in given["item_sets"].items())]
