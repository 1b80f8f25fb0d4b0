"""Puts mixed traffic on a real vLLM server by vLLM's own `vllm bench serve`, and checks every answer.

python benchmarks/load.py --requests 100000 --json docs/benchmarks/load.json

docs/deployment.md, "On CPUs", has the settings without which the engine grows on a CPU.

The client is `vllm.benchmarks.serve.benchmark`; only what one request does is ours, since it has to read the answer.
The set is the film titles of the examples, with their years; the model is tiny and random, so that the server's own
work is what is measured. Answers with items are held against the titles, keys, years and order that they must have;
JSON is judged by `jsonschema`. A request that should be refused must get HTTP 400, all others 200; some clients leave
before the answer. Memory is what the processes of the server hold themselves (USS), every two seconds. Sets that
requests bring may take 32 MiB of it, which they do after a quarter of 100,000 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil

import itemset

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

SINCE = 1990
WORDS = ("red", "quiet", "lost", "golden", "last", "broken", "silver", "brave", "hidden", "little", "electric", "wild")
KNOWN = [[f"{word} {other}" for other in WORDS] for word in WORDS]  # inline lists that come again and again
FILM = {"type": "string", "item_set": "films"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {"film": FILM, "also": FILM, "n": COUNT},
    "required": ["film", "also", "n"],
    "additionalProperties": False,
}
REFUSED = (
    {"item_set": "flims"},
    {"item_set": "films", "item_filter": {"yaer": 1}},
    {"item_set": "films", "structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": []}},
    {"item_set": "films", "draws": 0},
    {"item_set": ["films"]},
)
Body = dict[str, Any]


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
    def judge(self) -> Any:
        """Of answers in JSON, by an enum of all titles in the set's place."""
        film = {"enum": list(self.key_of)}
        return jsonschema.Draft202012Validator(SCHEMA | {"properties": {"film": film, "also": film, "n": COUNT}})

    def legal(self, text: str, item: Any, *, since: int = 0) -> None:
        holds(text in self.key_of, f"{text!r} is no title")
        holds(item is not None and item["key"] == self.key_of[text], f"{text!r} has the item {item}")
        holds(self.years[text] >= since, f"{text!r} is older than {since}")


def item(random: random.Random, films: Films) -> tuple[Body, Callable[[Any], int]]:
    def check(answer: Any) -> int:
        for choice in answer["choices"]:
            films.legal(choice["text"], choice["item"])
        return len(answer["choices"])

    temperature = random.choice((0, 0.7, 1, 2))
    n = random.choice((1, 1, 2, 4)) if temperature else 1
    return {"item_set": "films", "n": n, "temperature": temperature}, check


def filtered(random: random.Random, films: Films) -> tuple[Body, Callable[[Any], int]]:
    without = random.sample(list(films.key_of), random.choice((0, 3, 40)))

    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        films.legal(choice["text"], choice["item"], since=SINCE)
        holds(choice["text"] not in without, f"{choice['text']!r} was excluded")
        return 1

    excluded = {"exclude_keys": [films.key_of[title] for title in without]} if without else {}
    return {"item_set": "films", "item_filter": {"year": {"$gte": SINCE}}, "temperature": 1, **excluded}, check


def inline(random: random.Random, films: Films) -> tuple[Body, Callable[[Any], int]]:
    if random.random() < 0.5:
        texts = random.choice(KNOWN)
    else:
        texts = [f"{random.choice(WORDS)} {random.randrange(10**6)}" for _ in range(random.choice((2, 10, 200)))]

    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        holds(choice["text"] in texts, f"{choice['text']!r} is not in the list")
        holds(choice["item"] is not None and texts[choice["item"]["key"]] == choice["text"], f"item {choice['item']}")
        return 1

    return {"structured_outputs": {"choice": texts}, "temperature": 1}, check


def ranked(random: random.Random, films: Films) -> tuple[Body, Callable[[Any], int]]:
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


def in_json(random: random.Random, films: Films) -> tuple[Body, Callable[[Any], int]]:
    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        said = [one["text"] for one in choice["items"]]
        for one in choice["items"]:
            films.legal(one["text"], one)
        if choice["finish_reason"] == "stop":
            given = json.loads(choice["text"])
            error = next(films.judge.iter_errors(given), None)
            holds(error is None, f"jsonschema: {error}")
            holds(said == [given["film"], given["also"]], f"items {said}")
        return len(said)

    return {"structured_outputs": {"json": SCHEMA}, "temperature": 1, "max_tokens": 200}, check


def free_text(random: random.Random, films: Films) -> tuple[Body, Callable[[Any], int]]:
    def check(answer: Any) -> int:
        (choice,) = answer["choices"]
        holds("item" not in choice and answer["usage"]["completion_tokens"] >= 1, "an item, or nothing")
        return 0

    return {"temperature": 1, "max_tokens": random.choice((4, 16, 40))}, check


def refusal(random: random.Random, films: Films) -> tuple[Body, Callable[[Any], int]]:
    def check(answer: Any) -> int:
        holds(len(answer["error"]["message"]) > 20, f"no reason: {answer}")
        return 0

    return dict(random.choice(REFUSED)), check


@dataclass(frozen=True)
class Kind:
    """Requests of one kind: how many of a hundred, what makes one, and how its answer comes."""

    share: int
    make: Callable[[random.Random, Films], tuple[Body, Callable[[Any], int]]]
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
        prompt = f"{number % 97}: a film for {draw.choice(WORDS)} evenings: "
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

    async def _answer(self, url: str, session: Any, body: Body, output: Any) -> tuple[int, Any]:
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


class Memory:
    """What a server's processes hold, by the share of the requests that are done."""

    def __init__(self, pid: int, tally: Tally, heap: Callable[[], list[int]]) -> None:
        """heap: MiB that stand beside those of the processes."""
        root = psutil.Process(pid)
        each = (root, *root.children(recursive=True))
        self._processes = [one for one in each if one.memory_full_info().uss > 1 << 27]
        self.names = [_name(process) for process in self._processes]
        self._tally, self._over, self._heap = tally, threading.Event(), heap
        self.samples: list[tuple[int, list[int]]] = []
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(2):
            held = [process.memory_full_info().uss for process in self._processes]
            self.samples.append((self._tally.done, held + [mib << 20 for mib in self._heap()]))

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def quarters(self) -> list[list[float]]:
        """MiB of each process, on average in each quarter of the requests."""
        found = []
        for quarter in range(4):
            held = [one for done, one in self.samples if quarter <= 4 * done / self._tally.done < quarter + 1]
            found.append((np.mean(held, 0) / 2**20).tolist() if held else [])
        return found


def _name(process: psutil.Process) -> str:
    """vLLM names its engine's process; the other large one is the front end."""
    return "engine" if "Engine" in process.name() or "Engine" in " ".join(process.cmdline()) else "front end"


def catalogue(folder: Path, model: Path) -> tuple[Path, Films]:
    from films_data import titles_by_key
    from transformers import AutoTokenizer

    key_of: dict[str, int] = {}
    for key, title in titles_by_key().items():
        key_of.setdefault(title, key)
    years = {title: int(title[-5:-1]) if title[-5:-1].isdigit() else 0 for title in key_of}
    path = folder / "films.itemset"
    tokenizer = AutoTokenizer.from_pretrained(model)
    keys, attributes = list(key_of.values()), {"year": list(years.values())}
    itemset.build_text(list(key_of), tokenizer, keys=keys, attributes=attributes, escape="json").save(path)
    return path, Films(key_of, years)


async def run(server: Any, tally: Tally, concurrency: int) -> Any:
    """The requests, by vLLM's own client. Returns what it says of them."""
    from vllm.benchmarks import serve
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS

    ASYNC_REQUEST_FUNCS["checked"] = tally.ask
    requests = [
        SampleRequest(prompt="a film", prompt_len=8, expected_output_len=8, request_overrides={"number": number})
        for number in range(tally.total)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        return await serve.benchmark(
            task_type=serve.TaskType.GENERATION,
            endpoint_type="checked",
            api_url=f"{server.url}/v1/completions",
            base_url=server.url,
            model_id=server.model_name,
            model_name=server.model_name,
            tokenizer=None,
            input_requests=requests,
            logprobs=None,
            request_rate=float("inf"),
            burstiness=1.0,
            disable_tqdm=False,
            num_warmups=0,
            profile=False,
            selected_percentile_metrics=["ttft", "e2el"],
            selected_percentiles=[50.0, 90.0, 99.0],
            ignore_eos=False,
            goodput_config_dict={},
            max_concurrency=concurrency,
            lora_modules=None,
            extra_headers=None,
            extra_body=None,
            ready_check_timeout_sec=0,
        )


def table(result: Mapping[str, Any]) -> str:
    columns = ("requests", "items", "faults", "p50_ms", "p90_ms", "p99_ms")
    lines = ["| | requests | items checked | faults | p50, ms | p90, ms | p99, ms |", "|---|" + "--:|" * len(columns)]
    lines += [f"| {name} | {' | '.join(f'{row[c]:,.0f}' for c in columns)} |" for name, row in result["kinds"].items()]
    names, quarters = result["processes"], result["quarters_mib"]
    lines += ["", f"| MiB, by quarter of the requests | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    lines += [f"| {i} | {' | '.join(f'{mib:,.0f}' for mib in held)} |" for i, held in enumerate(quarters, 1)]
    seconds, requests = result["seconds"], result["requests"]
    return "\n".join([*lines, "", f"{seconds:,.0f} s, {requests / seconds:,.0f} requests a second"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="kinds of requests")
    parser.add_argument("--minutes", type=float, default=600, help="after which no more are sent")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--inline-mib", type=int, default=32, help="that sets which requests bring may take")
    parser.add_argument("--heap", action="store_true", help="also what of the engine's heap is in use, and free")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from models import cached_tiny_llama
    from servers import Server

    model = cached_tiny_llama()
    with tempfile.TemporaryDirectory() as folder:
        index, films = catalogue(Path(folder), model)
        # A random model would write spaces alone where they are allowed.
        answers = {"backend": "static", "disable_any_whitespace": True}
        flags = ("--structured-outputs-config", json.dumps(answers), "--item-set", f"films={index}")
        tally = Tally(films, args.requests, time.perf_counter() + args.minutes * 60, args.only or list(KINDS))
        options: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 512}
        options["additional_config"] = {"inline_set_host_memory": args.inline_mib << 20}
        if args.heap:
            path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
            os.environ |= {"PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
            options["worker_extension_cls"] = "heap.Heap"
        with Server("v1", model, arguments=flags, forked=False, **options) as server:

            def heap() -> list[int]:
                if not args.heap:
                    return []
                (found,) = server.post("/collective_rpc", {"method": "heap_in_mib"})[1]["results"]
                return [found["used"], found["free"]]

            with Memory(server._process._popen.pid, tally, heap) as memory:
                started = time.perf_counter()
                asyncio.run(run(server, tally, args.concurrency))
                seconds = time.perf_counter() - started
            _, metrics = server.get("/metrics")
    kinds = {}
    for name in KINDS:
        times = tally.seconds[name] or [0.0]
        counts = {column: tally.counts[name][column] for column in ("requests", "items", "faults")}
        kinds[name] = counts | {f"p{p}_ms": 1e3 * float(np.percentile(times, p)) for p in (50, 90, 99)}
    total = {column: sum(row[column] for row in kinds.values()) for column in ("requests", "items", "faults")}
    every = [one for times in tally.seconds.values() for one in times]
    kinds["all"] = total | {f"p{p}_ms": 1e3 * float(np.percentile(every, p)) for p in (50, 90, 99)}
    result = {
        "kinds": kinds,
        "processes": memory.names + ["its heap: used", "free"] * args.heap,
        "quarters_mib": memory.quarters(),
        "seconds": seconds,
    }
    result["requests"] = tally.done
    print(table(result))
    ours = [line for line in str(metrics).splitlines() if line.startswith("item_set:") and "_total" in line]
    print(*[line for line in ours if "refused" in line or "illegal" in line], sep="\n")
    print(*tally.faults[:20], sep="\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return bool(tally.faults)


if __name__ == "__main__":
    raise SystemExit(main())
