"""Measures what one client's inline sets cost the others: a real server, large lists, and what waits meanwhile.

python benchmarks/inline_load.py --json docs/benchmarks/inline_load.json

In SGLang's virtual environment it measures SGLang, else vLLM (model runner V1), with a tiny random model. Three loads
come one after another: many large lists at once, all different; the same number of requests with one and the same
large list; and one item of ten million characters. Meanwhile one client asks for /health, one for a set of two items
that the server knows, and one for sets of two items that it does not know. At the end a client brings large lists and
goes away: the processor time that the server spends afterwards was spent for nobody.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "sglang")]
PROBES = ("/health", "known set of two items", "new set of two items")
PAUSE = 0.1  # seconds between two requests of a probe
PATIENCE = 900.0


def sglang_is_here() -> bool:
    try:
        distribution("sglang")
    except PackageNotFoundError:
        return False
    return True


def start() -> Any:
    from models import cached_tiny_llama

    if sglang_is_here():
        import sglang_servers

        return sglang_servers.Server(cached_tiny_llama(), forked=False, grammar_backend="static")
    import servers

    return servers.Server("v1", cached_tiny_llama(), arguments=("--guided-decoding-backend", "static"))


def body(texts: Sequence[str]) -> bytes:
    request = {"model": "tiny", "prompt": "p", "max_tokens": 40, "structured_outputs": {"choice": list(texts)}}
    return json.dumps(request).encode()


def ask(address: str, data: bytes) -> tuple[float, int]:
    """Seconds until the answer, and its status."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    if data:
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    else:
        connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    connection.close()
    return time.perf_counter() - started, response.status


class Processes:
    """The server's processes."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._all = [root, *root.children(recursive=True)]

    def memory(self) -> int:
        return sum(process.memory_info().rss for process in self._all)

    def seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._all)


def under(load: Callable[[], Any], address: str, processes: Processes) -> dict[str, Any]:
    """Run a load beside the probes: every probe's times in seconds, the load's own, and the memory it added."""
    done = threading.Event()
    times: dict[str, list[float]] = {probe: [] for probe in PROBES}
    before, most = processes.memory(), 0

    def probe(name: str) -> None:
        count = 0
        while not done.is_set():
            data = {PROBES[0]: b"", PROBES[1]: body(["yes", "no"])}.get(name)
            seconds, status = ask(address, body([f"yes {count}", "no"]) if data is None else data)
            if status != 200:
                raise RuntimeError(f"{name}: HTTP {status}")
            times[name].append(seconds)
            count += 1
            done.wait(PAUSE)

    def watch() -> None:
        nonlocal most
        while not done.wait(PAUSE):
            most = max(most, processes.memory() - before)

    with ThreadPoolExecutor(len(PROBES) + 1) as pool:
        running = [pool.submit(probe, name) for name in PROBES] + [pool.submit(watch)]
        time.sleep(5 * PAUSE)
        started = time.perf_counter()
        try:
            statuses = load()
        finally:
            ended = time.perf_counter() - started
            done.set()
        for one in running:
            one.result()
    return {"probes": times, "seconds": ended, "memory": most, "statuses": statuses}


def all_of(address: str, bodies: Sequence[bytes]) -> list[int]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [status for _, status in pool.map(lambda data: ask(address, data), bodies)]


def wasted(address: str, bodies: Sequence[bytes], processes: Processes) -> float:
    """Processor seconds that the server spends after clients have sent these and left, until it rests."""
    connections = []
    for data in bodies:
        connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        connections.append(connection)
    time.sleep(2)  # they have been read, and encoding has begun
    for connection in connections:
        connection.close()
    begun = last = processes.seconds()
    resting, idle = 0, 0.6  # an engine's loops take a part of a processor for themselves
    while resting < 3:
        time.sleep(1)
        now = processes.seconds()
        resting = resting + 1 if now - last < idle else 0
        last = now
    return last - begun


def measure(lists: int, items: int) -> dict[str, Any]:
    with start() as server:
        address = server.url.removeprefix("http://")
        processes = Processes(server._process._popen.pid)
        ask(address, body(["yes", "no"]))
        different = [body([f"label {i} of list {k}" for i in range(items)]) for k in range(lists)]
        equal = [body([f"equal label {i}" for i in range(items)])] * lists
        idle = under(lambda: time.sleep(5), address, processes)
        results = {"nothing": idle, "different lists": under(lambda: all_of(address, different), address, processes)}
        results["equal lists"] = under(lambda: all_of(address, equal), address, processes)
        giant = [body(["xy" * 5_000_000])]
        results["one item of 10,000,000 characters"] = under(lambda: all_of(address, giant), address, processes)
        leaving = [body([f"left {i} of list {k}" for i in range(items)]) for k in range(lists // 5)]
        return {
            "engine": "SGLang" if sglang_is_here() else "vLLM",
            "lists": lists,
            "items": items,
            "loads": results,
            "wasted": wasted(address, leaving, processes),
        }


def table(result: dict[str, Any]) -> str:
    head = f"| {result['engine']}, ms: median (longest) | " + " | ".join(PROBES) + " | the load, s | memory, MiB |"
    lines = [head, "|---|" + "--:|" * (len(PROBES) + 2)]
    for name, load in result["loads"].items():
        times = [[1e3 * seconds for seconds in load["probes"][probe]] for probe in PROBES]
        cells = [f"{median(each):,.0f} ({max(each):,.0f})" for each in times]
        own = "" if load["statuses"] is None else f"{load['seconds']:,.1f}"
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {own} | {load['memory'] / 2**20:,.0f} |")
    return "\n".join([*lines, "", f"Processor seconds after the clients left: {result['wasted']:.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=int, default=50)
    parser.add_argument("--items", type=int, default=50_000, help="of each list")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    args = parser.parse_args()
    result = measure(args.lists, args.items)
    print(table(result))
    for name, load in result["loads"].items():
        print(f"{name}: HTTP {sorted(set(load['statuses'] or []))}")
    if args.json:
        Path(args.json).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
