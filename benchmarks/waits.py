"""What a person waits for: the first start of a machine and the second, builds of texts, small commands, a first list.

python benchmarks/waits.py --model DIR --json docs/benchmarks/waits.json

Each step is a process, or a server, of its own: seconds until it has ended or is ready, and processor seconds of it and
its children. "Cold" finds no compiled loops, "warm" those that the cold one has saved. --model: a folder with a small
model and its tokenizer; the page's are of SmolLM2-135M-Instruct. The server is vLLM's or SGLang's, whose environment
this runs in; --parts leaves steps out.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from runner import Report, Row, make_names, parser

PARTS = ("commands", "builds", "starts")
PORT = 8_731
LIST = {"item_set": "films", "use_beam_search": True, "n": 10, "prompt": "A film:", "max_tokens": 1}
BOTH = "import itemset.serving.warm_up as w; w.compile_all()"


def measured(work: Callable[[], None]) -> Row:
    """Seconds, and those of all processors, of what it starts and waits for."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before, began = spent(), time.monotonic()
    work()
    return {"seconds": time.monotonic() - began, "processor seconds": spent() - before}


def run(*command: str | Path, cache: Path, processes: int = 1) -> Row:
    """The same of a Python program, or of several at once. cache: of Numba's loops."""

    def work() -> None:
        environment, words = os.environ | {"NUMBA_CACHE_DIR": str(cache)}, [sys.executable, *map(str, command)]
        running = [subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) for _ in range(processes)]
        if sum(one.wait() != 0 for one in running):
            raise RuntimeError(f"{words} has failed")

    return measured(work)


def spent_by(server: int) -> float:
    """Processor seconds of a process and of all that it has started."""
    fields = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    family, last = {server}, 0
    while len(family) > last:
        last = len(family)
        family |= {pid for pid, of in fields.items() if int(of[1]) in family}
    return sum(int(time) for pid in family for time in fields[pid][11:15]) / os.sysconf("SC_CLK_TCK")


def start(model: Path, texts: Path, cache: Path) -> Iterator[Row]:
    """Of a server: until it is ready, then of its first and second list."""
    flags = ["--model", str(model), "--port", str(PORT), "--dtype", "float32"]
    command = [sys.executable, "-m", "itemset", "serve", f"films={texts}", *flags]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    before, began = 0.0, time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as server:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1)
                    break
                except OSError:
                    if server.poll() is not None:
                        raise RuntimeError("the server has ended") from None
                    time.sleep(0.1)
            seconds, before = time.monotonic() - began, spent_by(server.pid)
            yield {"step": "until it is ready", "seconds": seconds, "processor seconds": before}
            for step in ("first list", "second list"):
                began, body = time.monotonic(), json.dumps(LIST | {"model": str(model)}).encode()
                request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body)
                request.add_header("Content-Type", "application/json")
                with urllib.request.urlopen(request, timeout=300) as answer:
                    assert len(json.load(answer)["choices"]) == LIST["n"]
                seconds, spent = time.monotonic() - began, spent_by(server.pid)
                yield {"step": step, "seconds": seconds, "processor seconds": spent - before}
                before = spent
        finally:
            os.killpg(server.pid, signal.SIGINT)
            server.wait(60)


def steps(model: Path, parts: list[str], folder: Path) -> Iterator[Row]:
    warm, names, index = folder / "warm", folder / "names.txt", folder / "names.itemset"
    names.write_text("\n".join(make_names(2_000)))
    loops = {"step": "compiled loops: three processes at once"}
    yield loops | {"loops": "cold"} | run("-c", BOTH, cache=warm, processes=3)
    yield loops | {"loops": "warm"} | run("-c", BOTH, cache=warm, processes=3)
    build = ("-m", "itemset", "build", names, "--tokenizer", model, "-o", index)
    yield {"step": "itemset build of 2,000 texts", "loops": "warm"} | run(*build, cache=warm)
    if "commands" in parts:
        for words in (["--help"], ["info", str(index)]):
            yield {"step": f"itemset {words[0]}", "loops": "warm"} | run("-m", "itemset", *words, cache=warm)
    if "builds" in parts:
        many = folder / "many.txt"
        many.write_text("\n".join(make_names(10**6)))
        build = ("-m", "itemset", "build", many, "--tokenizer", model, "-o", index)
        yield {"step": "itemset build of 1,000,000 texts", "loops": "warm"} | run(*build, cache=warm)
    if "starts" in parts:
        for loops_are, cache in (("cold", folder / "cold"), ("warm", folder / "cold")):
            for row in start(model, names, cache):
                yield {"step": f"server, {row.pop('step')}", "loops": loops_are} | row


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = arguments.parse_args()
    report, name = Report(given), "waits" if find_spec("vllm") else "sglang"
    with tempfile.TemporaryDirectory() as folder:
        report.add(name, list(steps(given.model.resolve(), list(given.parts), Path(folder))))
