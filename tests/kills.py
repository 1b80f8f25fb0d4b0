"""Builds on disk that are ended by a signal at random moments, and what each of them leaves behind.

Run as a program, this file forks the builds: all is imported and compiled then, so a signal hits the build itself.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import itemset
from itemset import cli

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class End:
    """How a build ended: its exit status (negative for a signal), the seconds from its folder on, what it said on
    stderr, the bytes of the index that is there, and the other files in the folder."""

    status: int
    seconds: float
    errors: str
    index: bytes | None
    litter: list[str]


def end_builds(folder: Path, times: int, seed: int, *, items: int = 200_000) -> Counter[str]:
    """Start `times` builds and end each at a moment drawn evenly from the length of a whole build.

    Before every second one there is another index at the output. Raises AssertionError where a build leaves neither
    that nor the new one whole, where an interrupted one does not say how to go on, or where one leaves litter that the
    next does not remove. Returns how often each end was seen.
    """
    chosen = random.Random(seed)
    source, output = folder / "items.npy", folder / "index" / "items.itemset"
    output.parent.mkdir()
    np.save(source, np.random.default_rng(seed).integers(0, 2048, (items, 8), dtype=np.uint16))
    old = itemset.build([[1, 2, 3]]).to_bytes()
    seen: Counter[str] = Counter()
    with fork_server() as server:
        whole = end_build(server, source, output)
        new = itemset.build(np.load(source)).to_bytes()
        assert (whole.status, whole.index, whole.litter) == (0, new, []), whole.errors
        for number in range(times):
            before = old if number % 2 else None
            output.unlink(missing_ok=True)
            if before is not None:
                output.write_bytes(before)
            by = chosen.choice(SIGNALS)
            end = end_build(server, source, output, chosen.uniform(0, 1.1 * whole.seconds), by)
            written = end.index == new
            assert len(end.litter) <= (end.status == -by)  # at most its folder, and none of an earlier build
            assert written or end.index == before
            assert end.status in (0, 130 if by == signal.SIGINT else -by), (end.status, end.errors)
            if end.status == 0:
                assert written
            elif by == signal.SIGINT:
                assert end.errors in ("", "itemset: interrupted\n"), end.errors
            name = "finished before it" if end.status == 0 else by.name
            seen[f"{name}: {'new index' if written else 'index as before'}"] += 1
        assert end_build(server, source, output).litter == []
    return seen


def end_build(
    server: subprocess.Popen[str],
    source: Path,
    output: Path,
    seconds: float | None = None,
    by: signal.Signals = signal.SIGKILL,
) -> End:
    """Build on disk, and send the signal `seconds` after the build has made its folder, where it has not ended.

    From then on no folder of an earlier build is there.
    """
    assert server.stdin is not None
    assert server.stdout is not None
    errors = output.parent.parent / "errors"
    os.mkfifo(errors)
    earlier = set(os.listdir(output.parent))
    print(json.dumps([str(errors), "build", str(source), "--memory", "1MB", "-o", str(output)]), file=server.stdin)
    server.stdin.flush()
    with errors.open() as pipe:
        pid = int(server.stdout.readline())
        while set(os.listdir(output.parent)) <= earlier and not select.select([server.stdout], [], [], 0.001)[0]:
            pass
        start = time.perf_counter()
        if not select.select([server.stdout], [], [], seconds)[0]:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(pid, by)
        status = int(server.stdout.readline())
        took = time.perf_counter() - start
        said = pipe.read()
    errors.unlink()
    litter = [name for name in os.listdir(output.parent) if name != output.name]
    return End(status, took, said, output.read_bytes() if output.exists() else None, litter)


@contextmanager
def fork_server() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(Path(itemset.__file__).parents[1])}
    command = [sys.executable, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes) as server:  # type: ignore[call-overload]
        yield server


def serve() -> None:
    with tempfile.TemporaryDirectory() as folder:  # compiles what a build runs
        np.save(f"{folder}/a.npy", np.array([[2, 1], [1, 2]], np.uint16))
        itemset.build_external(f"{folder}/a.npy", folder=folder)
    cli.parse(["build", "a.npy", "-o", "a.itemset"])  # imports what a build runs
    for line in sys.stdin:
        errors, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(errors, os.O_WRONLY), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = 130  # of a Ctrl-C before or after all that `main` does
            try:
                status = cli.main(arguments)
            finally:
                os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
