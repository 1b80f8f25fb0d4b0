"""Sets that come with a request: first and later requests beside xgrammar's `choice`, and what one client's large lists
cost the others.

python benchmarks/choice.py --sizes 100 1000 10000 100000 --json docs/benchmarks/choice.json
python benchmarks/choice.py --forms enum regex --sizes 5000 100000 --largest 5000 --json docs/benchmarks/enums.json
python benchmarks/choice.py --forms tools tags --sizes 1908 --json docs/benchmarks/tools.json
python benchmarks/choice.py --parts load --engine vllm-v1

requests: a real vLLM engine (model runner V1, in one process, two of SmolLM2's layers, so that the forward pass hides
little) for each backend and size: ms to the first token of a request with a new list, of later ones with the same
list, and of one without; MiB that the list adds at its peak. With --forms the list is an `enum` in a JSON schema, a
regex (a|b|c), or tools as vLLM has them for `tool_choice="required"`: a JSON schema, or with --tool-call-parser hermes
tags; and no item set is named.
load: a real server gets many large lists at once, then equal ones, then one item of ten million characters, while
others ask for /health, a set of two items that the server knows, and new ones.
"""

from __future__ import annotations

import ctypes
import gc
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import runner
from runner import (
    ENGINES,
    Report,
    Row,
    checkouts,
    held,
    isolated,
    make_names,
    make_texts,
    ms_of,
    parser,
    resident,
    server,
)

TEXTS = {"articles": make_texts, "words": make_names}
PROBES = ("/health", "known set of two items", "new set of two items")
PAUSE, PATIENCE = 0.1, 900.0  # seconds between two requests of a probe, and for an answer


ARGUMENTS: list[dict[str, Any]] = [
    {"type": "string", "description": "what it is about, in the words of whoever asks"},
    {"type": "integer", "description": "how many at most"},
    {"enum": ["open", "closed", "pending"]},
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "properties": {"from": {"type": "string"}, "to": {"type": "number"}}, "required": ["from"]},
]


def tools(form: str, texts: Sequence[str]) -> dict[str, Any]:
    """A call of one or several of as many tools as texts, with one to five arguments each."""
    calls, tags = list[Any](), list[Any]()
    for i, text in enumerate(texts):
        name = f"{re.sub(r'[^A-Za-z0-9]+', '_', text)[:50]}_{i}"
        properties = {f"{name[:6]}_{k}": ARGUMENTS[(i + k) % len(ARGUMENTS)] for k in range(1 + i % 5)}
        schema = {"type": "object", "properties": properties, "required": [*properties][: 1 + i % 2]}
        call = {"name": {"type": "string", "enum": [name]}, "parameters": schema}
        calls.append({"properties": call, "required": [*call]})
        content = {"type": "json_schema", "json_schema": schema}
        for space in ("\n", ""):
            begin = f'<tool_call>{space}{{"name": "{name}", "arguments": '
            tags.append({"type": "tag", "begin": begin, "content": content, "end": f"}}{space}</tool_call>"})
    if form == "tools":
        return {"json": {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}}
    listed = {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": listed})}


def structured(form: str, texts: Sequence[str]) -> dict[str, Any]:
    """The words of `StructuredOutputsParams` for one of these texts."""
    if form in ("tools", "tags"):
        return tools(form, texts)
    if form == "enum":
        schema = {"type": "object", "properties": {"name": {"enum": list(texts)}}, "required": ["name"]}
        return {"json": schema}
    return {"choice": list(texts)} if form == "choice" else {"regex": f"({'|'.join(map(re.escape, texts))})"}


def requests(backend: str, count: int, texts: str, form: str) -> Row:
    """All figures of one backend at one size."""
    from films_data import model_dir
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    items, tiny = TEXTS[texts](count), TEXTS[texts](count + 20)[count:]
    engine: Row = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 2}, "dtype": "bfloat16"}
    engine |= {"enforce_eager": True, "enable_prefix_caching": False, "kv_cache_memory_bytes": 32 << 20}
    engine |= {"max_model_len": 256, "max_num_seqs": 8, "structured_outputs_config": {"backend": backend}}
    llm = LLM(str(model_dir()), **engine)

    def first_token(choice: list[str] | None) -> float:
        given = None if choice is None else StructuredOutputsParams(**structured(form, choice))
        params = SamplingParams(max_tokens=1, temperature=0.0, structured_outputs=given)
        return ms_of(lambda: llm.generate(["Something that is sold in this shop:"], params, use_tqdm=False))

    for choice in (None, tiny, tiny, None):
        first_token(choice)
    row: Row = {"without a set, ms": median(first_token(None) for _ in range(20))}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    row["first request, ms"] = first_token(items)
    row["later request, ms"] = median(first_token(items) for _ in range(5))
    return row | {"peak, MiB": (resident("VmHWM") - before) / 2**20}


def body(texts: Sequence[str]) -> bytes:
    request = {"model": "tiny", "prompt": "p", "max_tokens": 40, "structured_outputs": {"choice": list(texts)}}
    return json.dumps(request).encode()


def sent(address: str, data: bytes) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    if data:
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    else:
        connection.request("GET", "/health")
    return connection


def status(address: str, data: bytes) -> int:
    connection = sent(address, data)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def under(load: Callable[[], Any], address: str, pid: int) -> Row:
    """Run a load beside the probes. Returns their ms, the load's own seconds, and the MiB that it adds."""
    done = threading.Event()
    times: dict[str, list[float]] = {probe: [] for probe in PROBES}
    before, most = held(pid), 0.0

    def probe(name: str) -> None:
        while not done.is_set():
            texts = ["yes" if name == PROBES[1] else f"yes {len(times[name])}", "no"]
            data, got = b"" if name == PROBES[0] else body(texts), []
            times[name].append(ms_of(lambda: got.append(status(address, data))))  # noqa: B023
            if got != [200]:
                raise RuntimeError(f"{name}: HTTP {got}")
            done.wait(PAUSE)

    def watch() -> None:
        nonlocal most
        while not done.wait(PAUSE):
            most = max(most, held(pid) - before)

    with ThreadPoolExecutor(len(PROBES) + 1) as pool:
        running = [pool.submit(probe, name) for name in PROBES] + [pool.submit(watch)]
        time.sleep(5 * PAUSE)
        try:
            took = ms_of(load) / 1e3
        finally:
            done.set()
        for one in running:
            one.result()
    row: Row = {"the load, s": took, "memory, MiB": most}
    for name, taken in times.items():
        row |= {f"{name}, ms": median(taken), f"{name}, longest": max(taken)}
    return row


def load(engine: str, lists: int, items: int) -> list[Row]:
    def at_once(address: str, bodies: Sequence[bytes]) -> None:
        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(lambda data: status(address, data), bodies))

    with server(engine, {}) as running:
        address, pid = running.url.removeprefix("http://"), running._process._popen.pid
        status(address, body(["yes", "no"]))
        loads: dict[str, list[bytes]] = {
            "nothing": [],
            "different lists": [body([f"label {i} of list {k}" for i in range(items)]) for k in range(lists)],
            "equal lists": [body([f"equal label {i}" for i in range(items)])] * lists,
            "one item of 10,000,000 characters": [body(["xy" * 5_000_000])],
        }
        rows = []
        for name, bodies in loads.items():
            work = lambda: at_once(address, bodies) if bodies else time.sleep(5)  # noqa: B023, E731
            rows.append({"load": name} | under(work, address, pid))
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=("requests", "load"), default=["requests"])
    options.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000])
    options.add_argument(
        "--texts", choices=TEXTS, default="articles", help="articles of a shop, or 2 to 4 of 4,000 words"
    )
    options.add_argument("--forms", nargs="+", choices=("choice", "enum", "regex", "tools", "tags"), default=["choice"])
    options.add_argument("--largest", type=int, default=10_000, help="items up to which xgrammar runs")
    options.add_argument("--repeats", type=int, default=1, help="processes a figure, which is their median")
    options.add_argument("--engine", choices=ENGINES, default="vllm-v1", help="of the load")
    options.add_argument("--lists", type=int, default=50, help="of the load")
    options.add_argument("--items", type=int, default=50_000, help="of each of its lists")
    arguments = options.parse_args()
    report, env = Report(arguments), runner.environment_of("vllm-v1")
    if "requests" in arguments.parts:
        rows = []
        ways = [("static", *one) for one in checkouts(arguments)]
        ways += [] if arguments.before else [("xgrammar", *one) for one in checkouts(arguments)]
        for form, count in product(arguments.forms, arguments.sizes):
            runs: dict[int, list[Row]] = {
                i: [] for i, way in enumerate(ways) if way[0] == "static" or count <= arguments.largest
            }
            for _ in range(arguments.repeats):
                for i in runs:
                    runs[i].append(
                        isolated(requests, ways[i][0], count, arguments.texts, form, env=env, checkout=ways[i][2])
                    )
            for i, found in runs.items():
                middle = {name: median(run[name] for run in found) for name in found[0]}
                of_form = {} if arguments.forms == ["choice"] else {"form": form}
                rows.append(of_form | {"items": count, "backend": ways[i][0], **ways[i][1]} | middle)
        name = "requests" if arguments.texts == "articles" else f"requests of {arguments.texts}"
        report.add(name, rows, x="items", y="first request, ms", by="backend")
    if "load" in arguments.parts:
        report.add("load", load(arguments.engine, arguments.lists, arguments.items))


if __name__ == "__main__":
    main()
