"""Measures what ranked lists do to a server's other requests: /health and small requests, idle and beside 20 lists.

python benchmarks/stalls.py                      # vLLM's V1: rounds of requests
python benchmarks/stalls.py --engine vllm-v2     # lists inside a step; without a GPU in Triton's interpreter
python benchmarks/stalls.py --engine sglang      # in SGLang's environment: a list is one request

A real server of a tiny random Llama and 10^6 random semantic IDs of 8 tokens. 20 clients in a process of their own ask
for lists without pause; those that leave give up after two seconds each and ask again. A small request asks for one of
four labels. Each column of one table comes from one server, so that ratios hold on a busy machine too. Times are in
milliseconds, memory is what all processes of the server hold beside the index.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
LISTS, SECONDS, LEAVE, PAUSE = 20, 20.0, 2.0, 0.1
LENGTH = 8
PROMPT = list(range(100, 140))


def post(url: str, body: dict[str, Any], timeout: float = 300) -> float:
    """Seconds until the answer is there."""
    started = time.perf_counter()
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        response.read()
    return time.perf_counter() - started


def ask_on(url: str, body: dict[str, Any], leave: float | None, until: float, lists: int, told: Any) -> None:
    """The clients of the lists, in a process of their own."""

    def client() -> None:
        while time.time() < until:
            try:
                told.put(post(url, body, leave or 300))
            except OSError:  # it left
                continue

    threads = [threading.Thread(target=client, daemon=True) for _ in range(lists)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.time()) + 30)
    os._exit(0)


def probe(url: str, small: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Seconds of /health, and of small requests, each asked for as soon as the last one has come."""
    times: dict[str, list[float]] = {"health": [], "small": []}
    until = time.time() + seconds

    def health() -> None:
        while time.time() < until:
            started = time.perf_counter()
            with urllib.request.urlopen(f"{url}/health", timeout=300) as response:
                response.read()
            times["health"].append(time.perf_counter() - started)
            time.sleep(PAUSE)

    def small_one() -> None:
        while time.time() < until:
            times["small"].append(post(f"{url}/v1/completions", small))
            time.sleep(PAUSE)

    threads = [threading.Thread(target=asker) for asker in (health, small_one)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def memory(root: int) -> float:
    """MB that a process and its children hold, without what they share with files."""
    total, children = 0, {root}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    for _ in range(8):
        children |= {pid for pid, parent in parents.items() if parent in children}
    for pid in children:
        try:
            lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total / 1024


def server(engine: str, file: str, few: str, flags: dict[str, Any]) -> Any:
    sys.path.append(str(ROOT / "tests"))
    sys.path.append(str(ROOT / "tests" / "sglang"))
    from models import cached_tiny_llama

    sets = ("--item-set", f"ids={file}", f"few={few}")
    if engine == "sglang":
        from sglang_servers import Server

        arguments, quiet = ("--grammar-backend", "static", *sets), {"TESTS_SGLANG_REPORTS": "0"}
        given = {"max_running_requests": 1024, "max_total_tokens": 40_000, **flags}
        return Server(cached_tiny_llama(), arguments=arguments, env=quiet, forked=False, **given)
    from servers import Server as VllmServer

    given = {"max_num_seqs": None, "kv_cache_memory_bytes": 256 << 20, **flags}
    arguments = ("--guided-decoding-backend", "static", *sets)
    return VllmServer(engine.partition("-")[2] or "v1", cached_tiny_llama(), arguments=arguments, forked=False, **given)


def row(name: str, times: dict[str, list[float]], idle: dict[str, list[float]] | None) -> dict[str, Any]:
    of: dict[str, Any] = {"case": name}
    for kind, taken in times.items():
        ms = sorted(1e3 * one for one in taken)
        of[kind] = statistics.median(ms)
        of[f"{kind} 95 %"] = ms[int(0.95 * (len(ms) - 1))]
        of[f"{kind} worst"] = ms[-1]
    of["x idle"] = statistics.median(times["small"]) / statistics.median((idle or times)["small"])
    return of


def table(rows: list[dict[str, Any]]) -> str:
    columns = [name for name in rows[0] if name != "case"]
    columns += [name for name in rows[-1] if name not in columns and name != "case"]
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for of in rows:
        cells = ["" if of.get(name) is None else f"{of[name]:,.1f}" for name in columns]
        lines.append(f"| {of['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm-v1", "vllm-v2", "sglang"), default="vllm-v1")
    parser.add_argument("--items", type=int, default=10**6)
    parser.add_argument("--lists", type=int, default=LISTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--widths", type=int, nargs="*", help="lists of these lengths, in place of the usual ones")
    parser.add_argument("--leaving", action="store_true", help="also proofs whose clients leave")
    parser.add_argument("--flags", type=json.loads, default={}, help="of the server, as JSON")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import itemset

    with tempfile.TemporaryDirectory() as directory:
        codes = np.random.default_rng(0).integers(100, 2_000, (arguments.items, LENGTH), dtype=np.uint16)
        file, few = str(Path(directory) / "ids.itemset"), str(Path(directory) / "few.itemset")
        itemset.build(codes).save(file)
        itemset.build([[200, 201], [202, 203], [204, 205], [206, 207]]).save(few)
        with server(arguments.engine, file, few, arguments.flags) as running:
            rows = measured(running, arguments)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"engine": arguments.engine, "rows": rows}, indent=1) + "\n")


def measured(running: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    url, pid = running.url, running._process._popen.pid
    completions = f"{url}/v1/completions"
    small = {"model": "tiny", "prompt": [5, 6, 7], "item_set": "few", "max_tokens": 4, "temperature": 0}
    asked = {"model": "tiny", "prompt": PROMPT, "item_set": "ids", "use_beam_search": True, "max_tokens": LENGTH + 1}
    widths = arguments.widths or [300]
    cases = [(f"{arguments.lists} of {n:,}", {"n": n}, None) for n in widths]
    leaving = {"n": widths[-1], "exact": True}
    if arguments.leaving:
        cases.append((f"{arguments.lists} of {widths[-1]:,}, exact, left after {LEAVE:.0f} s", leaving, LEAVE))
    for body in (small, asked | {"n": 10}):
        post(completions, body)  # compiles what is to be compiled
    idle = probe(url, small, arguments.seconds / 2)
    rows = [row("idle", idle, None) | {"memory, MB": memory(pid)}]
    for n in widths:
        alone = [post(completions, asked | {"n": n, "prompt": [1, *PROMPT]}) for _ in range(3)]
        rows.append({"case": f"one list of {n:,} alone", "s a list": min(alone), "lists": 3})
        print(rows[-1], file=sys.stderr, flush=True)
    for name, more, leave in cases:
        told = multiprocessing.SimpleQueue()  # whose writers wait: they may end at any time
        until = time.time() + arguments.seconds
        given = (completions, asked | more, leave, until, arguments.lists, told)
        clients = multiprocessing.Process(target=ask_on, args=given)
        began = time.perf_counter()
        clients.start()
        time.sleep(1)
        times = probe(url, small, arguments.seconds - 1)
        took = []
        while not told.empty():
            took.append(told.get())
        per_second = len(took) / (time.perf_counter() - began)
        held = memory(pid)
        clients.kill()
        clients.join()
        rows.append(row(name, times, idle) | {"memory, MB": held, "lists": len(took), "lists a second": per_second})
        rows[-1]["s a list"] = statistics.median(took) if took else None
        time.sleep(2)
        after = probe(url, small, 2)
        rows[-1]["health, 2 s later, worst"] = 1e3 * max(after["health"])
        rows[-1]["MB later"] = memory(pid)
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
