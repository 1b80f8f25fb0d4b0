"""Mixed requests at a real server, each answer checked, and the server's memory.

python benchmarks/load.py --requests 100000 --minutes 35 --json docs/benchmarks/load.json

docs/deployment.md, "On CPUs", has the settings without which the engine grows on a CPU. The client is vLLM's own `vllm
bench serve`; only what one request does is ours, since it has to read the answer. The set is the film titles of the
examples, with their years; the model is tiny and random. Answers with items are compared with the titles, keys, years
and order that they must have, JSON is judged by `jsonschema`. A request that should be refused must get HTTP 400, all
others 200; some clients leave before the answer. Memory is what the server's processes hold themselves, every two
seconds. Sets that requests bring may take `--inline-mib` of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from runner import Report, Row, parser, server, tiny_model

import itemset

SINCE = 1990
WORDS = ("red", "quiet", "lost", "golden", "last", "broken", "silver", "brave", "hidden", "little", "electric", "wild")
KNOWN = [[f"{word} {other}" for other in WORDS] for word in WORDS]  # inline lists that come again and again
FILM = {"type": "string", "item_set": "films"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def record(**properties: Any) -> Row:
    known = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties} | known


SCHEMAS = (
    record(film=FILM, also=FILM, n=COUNT),
    {"type": "array", "items": FILM, "uniqueItems": True, "minItems": 5, "maxItems": 5},
    record(user=record(liked={"type": "array", "items": FILM, "maxItems": 2}), next=record(film=FILM, n=COUNT)),
    {"$defs": {"film": FILM}, **record(a={"$ref": "#/$defs/film"}, b={"$ref": "#/$defs/film"})},
)
REFUSED = (
    {"item_set": "flims"},
    {"item_set": "films", "item_filter": {"yaer": 1}},
    {"item_set": "films", "structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": []}},
    {"item_set": "films", "draws": 0},
    {"item_set": ["films"]},
)
Made = tuple[
    Row, Callable[[Any], int]
]  # a request's body, and what checks the answer and returns how many items it has


class WrongError(Exception):
    """What is wrong with an answer."""


def holds(true: bool, what: str) -> None:
    if not true:
        raise WrongError(what)


@dataclass
class Films:
    """The catalogue: the titles' keys, and the year of each."""

    key_of: dict[str, int]
    years: dict[str, int]

    @cached_property
    def judges(self) -> list[Any]:
        """Of answers in JSON, by an enum of all titles in the set's place."""
        import jsonschema

        enum = json.dumps({"enum": list(self.key_of)})
        schemas = [json.loads(json.dumps(schema).replace(json.dumps(FILM), enum)) for schema in SCHEMAS]
        return [jsonschema.Draft202012Validator(schema) for schema in schemas]

    def legal(self, text: str, item: Any, *, since: int = 0) -> None:
        holds(text in self.key_of, f"{text!r} is no title")
        holds(item is not None and item["key"] == self.key_of[text], f"{text!r} has the item {item}")
        holds(self.years[text] >= since, f"{text!r} is older than {since}")


def item(random: random.Random, films: Films) -> Made:
    def check(answer: Any) -> int:
        for choice in answer["choices"]:
            films.legal(choice["text"], choice["item"])
        return len(answer["choices"])

    temperature = random.choice((0, 0.7, 1, 2))
    n = random.choice((1, 1, 2, 4)) if temperature else 1
    return {"item_set": "films", "n": n, "temperature": temperature}, check


def filtered(random: random.Random, films: Films) -> Made:
    without = random.sample(list(films.key_of), random.choice((0, 3, 40)))

    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        films.legal(choice["text"], choice["item"], since=SINCE)
        holds(choice["text"] not in without, f"{choice['text']!r} was excluded")
        return 1

    excluded = {"exclude_keys": [films.key_of[title] for title in without]} if without else {}
    return {"item_set": "films", "item_filter": {"year": {"$gte": SINCE}}, "temperature": 1, **excluded}, check


def inline(random: random.Random, films: Films) -> Made:
    texts = random.choice(KNOWN)
    if random.random() < 0.5:
        texts = [f"{random.choice(WORDS)} {random.randrange(10**6)}" for _ in range(random.choice((2, 10, 200)))]

    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        holds(choice["text"] in texts, f"{choice['text']!r} is not in the list")
        holds(choice["item"] is not None and texts[choice["item"]["key"]] == choice["text"], f"item {choice['item']}")
        return 1

    return {"structured_outputs": {"choice": texts}, "temperature": 1}, check


def ranked(random: random.Random, films: Films) -> Made:
    n, recent = random.choice((3, 10)), random.random() < 0.3

    def check(answer: Any) -> int:
        choices = answer["choices"]
        holds(len(choices) == n == len({choice["text"] for choice in choices}), f"{len(choices)} choices for {n}")
        for choice in choices:
            films.legal(choice["text"], choice["item"], since=SINCE * recent)
        scores = [choice["item"]["score"] for choice in choices]
        holds(scores == sorted(scores, reverse=True), f"not in order: {scores}")
        return n

    body = {"item_set": "films", "use_beam_search": True, "n": n}
    return body | ({"item_filter": {"year": {"$gte": SINCE}}} if recent else {}), check


def in_json(random: random.Random, films: Films) -> Made:
    which = random.randrange(len(SCHEMAS))

    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        for one in choice["items"]:
            films.legal(one["text"], one)
        if choice["finish_reason"] == "stop":
            given = json.loads(choice["text"])
            error = next(films.judges[which].iter_errors(given), None)
            holds(error is None, f"jsonschema: {error}")
            named = [text for text in _strings(given) if text in films.key_of]
            holds([one["text"] for one in choice["items"]] == named, f"items {choice['items']}")
        return len(choice["items"])

    return {"structured_outputs": {"json": SCHEMAS[which]}, "temperature": 1, "max_tokens": 250}, check


def _strings(value: Any) -> list[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for one in inner for text in _strings(one)]


def free_text(random: random.Random, films: Films) -> Made:
    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        holds("item" not in choice and answer["usage"]["completion_tokens"] >= 1, "an item, or nothing")
        return 0

    return {"temperature": 1, "max_tokens": random.choice((4, 16, 40))}, check


def refusal(random: random.Random, films: Films) -> Made:
    def check(answer: Any) -> int:
        holds(len(answer["error"]["message"]) > 20, f"no reason: {answer}")
        return 0

    return dict(random.choice(REFUSED)), check


@dataclass(frozen=True)
class Kind:
    """Requests of one kind: how many of a hundred, what makes one, and how its answer comes."""

    share: int
    make: Callable[[random.Random, Films], Made]
    stream: bool = False
    leaves: bool = False
    status: int = 200


KINDS: Mapping[str, Kind] = {
    "sampled items": Kind(25, item),
    "sampled items, streamed": Kind(15, filtered, stream=True),
    "filters and exclusions": Kind(10, filtered),
    "inline lists": Kind(15, inline),
    "ranked lists": Kind(7, ranked),
    "items in JSON": Kind(8, in_json),
    "free text": Kind(8, free_text),
    "refusals": Kind(6, refusal, status=400),
    "clients that leave": Kind(6, item, leaves=True),
}


@dataclass
class Tally:
    """What has come of the requests of each kind."""

    films: Films
    total: int
    until: float
    kinds: list[str]
    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)
    done: int = 0

    async def ask(self, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        """What `vllm bench serve` calls for each request: see `vllm.benchmarks.lib.endpoint_request_func`."""
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

        given = request_func_input
        number = given.extra_body["number"]
        draw = random.Random(number)
        (name,) = draw.choices(self.kinds, [KINDS[name].share for name in self.kinds])
        kind = KINDS[name]
        body, check = kind.make(draw, self.films)
        prompt = f"{number % 97}: a film for {draw.choice(WORDS)} evenings:"
        sent = {"model": given.model_name or given.model, "prompt": prompt, "max_tokens": 100, "seed": number} | body
        output, counts = RequestFuncOutput(prompt_len=given.prompt_len, success=True), self.counts[name]
        output.start_time = started = time.perf_counter()
        if started > self.until:
            return output
        try:
            answering = self._answer(given.api_url, session, sent | ({"stream": True} if kind.stream else {}), output)
            if kind.leaves:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(answering, draw.uniform(0.001, 0.05))
            else:
                status, answer = await answering
                holds(status == kind.status, f"HTTP {status}: {answer}")
                counts["items"] += check(answer)
        except Exception as error:
            counts["faults"] += 1
            self.faults.append(f"{name} {number}: {type(error).__name__}: {str(error)[:300]} {sent}")
            output.error = str(error)
        output.latency = time.perf_counter() - started
        output.ttft = output.ttft or output.latency
        output.success = not output.error
        counts["requests"] += 1
        self.seconds[name].append(output.latency)
        self.done += 1
        if pbar is not None:
            pbar.update(1)
        return output

    async def _answer(self, url: str, session: Any, body: Row, output: Any) -> tuple[int, Any]:
        """Status and answer. A stream's pieces are put together."""
        started = time.perf_counter()
        async with session.post(url, json=body) as response:
            if not body.get("stream"):
                return response.status, await response.json()
            text, last = "", None
            async for line in response.content:
                output.ttft = output.ttft or time.perf_counter() - started
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    event = json.loads(data)
                    if "choices" not in event:
                        return response.status, event
                    text, last = text + event["choices"][0]["text"], event["choices"][0]
            return response.status, {"choices": [{"text": text, "item": (last or {}).get("item")}]}

    def rows(self) -> list[Row]:
        found = []
        for name in (*self.kinds, "all"):
            kinds = self.kinds if name == "all" else [name]
            counts = sum((self.counts[kind] for kind in kinds), Counter[str]())
            times = [1e3 * one for kind in kinds for one in self.seconds[kind]] or [0.0]
            row: Row = {"requests of": name, **{key: counts[key] for key in ("requests", "items", "faults")}}
            found.append(row | {f"p{p}, ms": float(np.percentile(times, p)) for p in (50, 90, 99)})
        return found


@contextlib.contextmanager
def memory(pid: int, tally: Tally, rows: list[Row]) -> Any:
    """Sample what a server's large processes hold. Adds to rows the MiB of each, by quarter of the requests."""
    import psutil

    root, over, samples = psutil.Process(pid), threading.Event(), list[tuple[int, list[int]]]()
    processes = [one for one in (root, *root.children(recursive=True)) if one.memory_full_info().uss > 1 << 27]
    names = ["engine" if "Engine" in f"{one.name()} {one.cmdline()}" else "front end" for one in processes]

    def watch() -> None:
        while not over.wait(2):
            samples.append((tally.done, [process.memory_full_info().uss for process in processes]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    for quarter in range(4):
        held = [one for done, one in samples if quarter <= 4 * done / max(1, tally.done) < quarter + 1]
        sizes = (np.mean(held, 0) / 2**20).tolist() if held else []
        rows.append(
            {"quarter of the requests": quarter + 1, **{f"{n}, MiB": m for n, m in zip(names, sizes, strict=False)}}
        )


def catalogue(folder: Path) -> tuple[Path, Films]:
    from films_data import titles_by_key
    from transformers import AutoTokenizer

    key_of: dict[str, int] = {}
    for key, title in titles_by_key().items():
        key_of.setdefault(title, key)
    years = {title: int(title[-5:-1]) if title[-5:-1].isdigit() else 0 for title in key_of}
    path = folder / "films.itemset"
    keys, attributes = list(key_of.values()), {"year": list(years.values())}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    itemset.build_text(list(key_of), tokenizer, keys=keys, attributes=attributes, escape="json").save(path)
    return path, Films(key_of, years)


async def send(running: Any, tally: Tally, concurrency: int) -> None:
    """All requests, by vLLM's own client."""
    from vllm.benchmarks import serve
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS

    ASYNC_REQUEST_FUNCS["checked"] = tally.ask
    requests = [
        SampleRequest(prompt="a film", prompt_len=8, expected_output_len=8, request_overrides={"number": number})
        for number in range(tally.total)
    ]
    url, model = running.url, running.model_name
    rates: Row = {"request_rate": float("inf"), "burstiness": 1.0, "max_concurrency": concurrency, "num_warmups": 0}
    chosen: Row = {"selected_percentile_metrics": ["ttft"], "selected_percentiles": [99.0], "goodput_config_dict": {}}
    absent = dict.fromkeys(("tokenizer", "logprobs", "lora_modules", "extra_headers", "extra_body"))
    flags: Row = {"disable_tqdm": False, "profile": False, "ignore_eos": False, "ready_check_timeout_sec": 0}
    with contextlib.redirect_stdout(io.StringIO()):
        await serve.benchmark(
            task_type=serve.TaskType.GENERATION, endpoint_type="checked", api_url=f"{url}/v1/completions", base_url=url,
            model_id=model, model_name=model, input_requests=requests, **rates, **chosen, **absent, **flags,
        )  # fmt: skip


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--only", nargs="+", choices=KINDS, help="kinds of requests")
    options.add_argument("--minutes", type=float, default=600, help="after which no more are sent")
    options.add_argument("--concurrency", type=int, default=64)
    options.add_argument("--inline-mib", type=int, default=32, help="that sets which requests bring may take")
    arguments = options.parse_args()
    report = Report(arguments)
    with tempfile.TemporaryDirectory() as folder:
        index, films = catalogue(Path(folder))
        until = time.perf_counter() + arguments.minutes * 60
        tally, rows = Tally(films, arguments.requests, until, arguments.only or list(KINDS)), list[Row]()
        given = {"inline_set_host_memory": arguments.inline_mib << 20}
        with server("vllm-v1", {"films": index}, options=given, max_num_seqs=64, max_model_len=512) as running:
            started = time.perf_counter()
            with memory(running._process._popen.pid, tally, rows):
                asyncio.run(send(running, tally, arguments.concurrency))
            seconds = time.perf_counter() - started
    report.add("mixed", tally.rows())
    report.add("memory", rows)
    print(f"\n{seconds:,.0f} s, {tally.done / seconds:,.0f} requests a second", *tally.faults[:20], sep="\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
