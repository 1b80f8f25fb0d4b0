"""Measures a build on disk: random items are made, built by the command line in a child process and watched.

Reports the time of each stage, how good the bar's estimates were, peak memory (all of it, and without the pages of
mapped files, which the system can take back), peak room on the disk beside the input, and the size of the index.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

import itemset

CHUNK = 1_000_000


@dataclass
class Seen:
    """What was seen of the child while it ran. Times are in seconds from its start, sizes in bytes."""

    begun: dict[str, float] = field(default_factory=dict)  # when each stage was first shown
    estimates: list[tuple[float, float]] = field(default_factory=list)  # when, and the seconds said to be left
    anonymous: int = 0
    disk: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=lambda text: int(float(text)), default=10**8)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an item")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--memory", default="4GB", help="as for `itemset build`")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where input, index and temporary files go")
    parser.add_argument("--compare", action="store_true", help="build in memory, too, and compare the files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source, output = folder / "items.npy", folder / "index" / "items.itemset"
        output.parent.mkdir()
        make_items(source, args.items, args.tokens, args.vocab)
        print(f"input: {args.items:,} x {args.tokens}, {source.stat().st_size / 1e9:.2f} GB", flush=True)
        run(source, output, args.memory)
        if args.compare:
            again = output.with_name("again.itemset")
            run(source, again, "1000TB")
            print(f"the same bytes: {filecmp.cmp(output, again, shallow=False)}")


def make_items(path: Path, items: int, tokens: int, vocab: int) -> None:
    dtype = np.uint16 if vocab <= 2**16 else np.uint32
    matrix = open_memmap(path, "w+", dtype, (items, tokens))
    random = np.random.default_rng(0)
    for start in range(0, items, CHUNK):
        part = matrix[start : start + CHUNK]
        part[:] = random.integers(0, vocab, part.shape, dtype=dtype)
    matrix.flush()


def run(source: Path, output: Path, memory: str) -> None:
    command = [sys.executable, "-m", "itemset", "build", str(source), "--memory", memory, "-o", str(output)]
    environment = os.environ | {"PYTHONPATH": str(Path(itemset.__file__).parents[1])}
    terminal, theirs = pty.openpty()  # the bar is shown on terminals only, and those that have a size
    termios.tcsetwinsize(theirs, (24, 100))
    seen, start = Seen(), time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True)
    os.close(theirs)
    threads = [
        threading.Thread(target=watch_bar, args=(terminal, seen, start)),
        threading.Thread(target=watch_process, args=(child.pid, output, seen), daemon=True),
    ]
    for thread in threads:
        thread.start()
    assert child.stdout is not None
    out = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    threads[0].join()
    print(out)
    if status:
        sys.exit(f"the build failed with status {status}")
    stages = [*seen.begun.items(), ("", wall)]
    for (stage, begun), (_, end) in zip([("start", 0.0), *stages], stages, strict=False):
        print(f"{stage:<10} {end - begun:7.1f} s")
    print(f"{'wall':<10} {wall:7.1f} s, CPU {usage.ru_utime + usage.ru_stime:.1f} s")
    for share in (0.25, 0.5, 0.75) if seen.estimates else ():
        when, left = min(seen.estimates, key=lambda pair: abs(pair[0] - share * wall))
        print(f"{'estimate':<10} {left:7.1f} s left, at {when:.1f} s; in truth {wall - when:.1f} s")
    print(f"{'peak':<10} {usage.ru_maxrss / 1e6:7.2f} GB resident, {seen.anonymous / 1e9:.2f} GB without mapped files")
    print(f"{'peak':<10} {seen.disk / 1e9:7.2f} GB on disk beside the input, the new index counted")
    print(f"left in the folder: {', '.join(sorted(os.listdir(output.parent)))}")


def watch_bar(terminal: int, seen: Seen, start: float) -> None:
    with suppress(OSError), open(terminal, "rb", buffering=0) as file:  # the end of a terminal is an error
        while data := file.read(4096):
            for bar in re.finditer(rb"(\w+) +\d+%\|[^|]*\| [\d:]+, about ([\d:]+|\?) left", data):
                now = time.perf_counter() - start
                seen.begun.setdefault(bar[1].decode(), now)
                if bar[2] != b"?":
                    parts = [int(part) for part in bar[2].split(b":")]
                    seen.estimates.append((now, sum(part * 60**i for i, part in enumerate(reversed(parts)))))


def watch_process(pid: int, output: Path, seen: Seen) -> None:
    with suppress(OSError):  # until it is gone
        while True:
            status = Path(f"/proc/{pid}/status").read_text()
            seen.anonymous = max(seen.anonymous, 1024 * int(status.partition("RssAnon:")[2].split()[0]))
            seen.disk = max(seen.disk, disk_use(pid, output))
            time.sleep(0.1)


def disk_use(pid: int, output: Path) -> int:
    """Bytes of the files in the output's folder and of those without a name that the process has open or mapped."""
    files: dict[int, int] = {}
    for file in [
        *output.parent.rglob("*"),
        *Path(f"/proc/{pid}/fd").iterdir(),
        *Path(f"/proc/{pid}/map_files").iterdir(),
    ]:
        with suppress(OSError):
            state = file.stat()
            if file.is_file() and (state.st_nlink == 0 or output.parent in file.parents):
                files[state.st_ino] = state.st_blocks * 512
    return sum(files.values())


if __name__ == "__main__":
    main()
