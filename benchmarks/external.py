"""Measures a build on disk: random items are made, built by the command line in a child process and watched.

Reports the time of each stage, how good the bar's estimates were, peak memory (all of it, and without the pages of
mapped files, which the system can take back), peak room on the disk beside the input, and the size of the index; then
what `itemset verify`, 10^6 lookups and a masked step on the host take, in a table with a row for each size.
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
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

import itemset
from itemset.masking.host import HostState, fill_bitmasks

CHUNK = 1_000_000
LOOKUPS, ROWS = 10**6, 140  # items that are looked up, and rows of a masked step


@dataclass
class Seen:
    """What was seen of the child while it ran. Times are in seconds from its start, sizes in bytes."""

    begun: dict[str, float] = field(default_factory=dict)  # when each stage was first shown
    estimates: list[tuple[float, float]] = field(default_factory=list)  # when, and the seconds said to be left
    anonymous: int = 0
    disk: int = 0
    wall: float = 0
    cpu: float = 0
    resident: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=lambda text: int(float(text)), nargs="+", default=[10**8])
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an item")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--memory", default="4GB", help="as for `itemset build`")
    parser.add_argument("--parquet", action="store_true", help="the items are in a Parquet file, not a matrix")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where input, index and temporary files go")
    parser.add_argument("--compare", action="store_true", help="build in memory, too, and compare the files")
    args = parser.parse_args()
    rows = []
    for items in args.items:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder = Path(name)
            source = folder / ("items.parquet" if args.parquet else "items.npy")
            output = folder / "index" / "items.itemset"
            output.parent.mkdir()
            make_items(source, items, args.tokens, args.vocab)
            print(f"input: {items:,} x {args.tokens}, {source.stat().st_size / 1e9:.2f} GB", flush=True)
            seen = run(source, output, args.memory)
            if args.compare:
                again = output.with_name("again.itemset")
                run(source, again, "1000TB")
                print(f"the same bytes: {filecmp.cmp(output, again, shallow=False)}")
            source.unlink()
            rows.append(row_of(items, args.tokens, args.vocab, output, seen))
            print(rows[-1], flush=True)
    print("\n".join([HEAD, "|--:" * (HEAD.count("|") - 1) + "|", *rows]))


HEAD = (
    "| items | build (s) | CPU time (s) | peak memory, without mapped files (GB) | peak disk (GB) | tables (B/item) | "
    "verify (s) | lookup (µs) | masked step of 140 rows (µs) |"
)


def row_of(items: int, tokens: int, vocab: int, output: Path, seen: Seen) -> str:
    """Ask the index, and return its row of the table."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "itemset", "verify", str(output)], check=True, env=environment())
    verify = time.perf_counter() - started
    s = itemset.load(output)
    chunks = -(-items // CHUNK)
    each = -(-LOOKUPS // chunks)
    parts = [
        (i * CHUNK, chunk_of(i, min(CHUNK, items - i * CHUNK), tokens, vocab)[:each].copy()) for i in range(chunks)
    ]
    asked, keys = np.concatenate([part for _, part in parts]), [np.arange(at, at + len(part)) for at, part in parts]
    asked, expected = asked[:LOOKUPS], np.concatenate(keys)[:LOOKUPS]
    s.lookup(asked[:1000])
    started = time.perf_counter()
    wrong = int(np.count_nonzero(s.lookup(asked) > expected))  # of equal items, the first is found
    lookup = time.perf_counter() - started
    if wrong:
        sys.exit(f"{wrong} of {LOOKUPS:,} lookups are wrong")
    step = masked_step(s, asked, vocab)
    return (
        f"| {items:,} | {seen.wall:.1f} | {seen.cpu:.1f} | {seen.anonymous / 1e9:.2f} | "
        f"{seen.disk / 1e9:.2f} | {s.nbytes / items:.2f} | {verify:.1f} | {lookup / len(asked) * 1e6:.2f} | "
        f"{step * 1e6:.0f} |"
    )


def masked_step(s: itemset.ItemSet, asked: NDArray[np.integer], vocab: int) -> float:
    """Seconds of a step that takes a token of each of 140 random items, and masks what may follow: the median of all
    steps of 7,000 batches of items, none of which is seen twice."""
    bitmask, took = np.zeros((ROWS, -(-vocab // 32)), np.int32), []
    hosts, rows = [HostState(s, ()) for _ in range(ROWS)], list(range(ROWS))
    order = np.random.default_rng(1).permutation(len(asked))
    for start in range(0, len(asked) - ROWS, ROWS):
        batch = asked[order[start : start + ROWS]].tolist()
        for host in hosts:
            host.reset()
        for depth in range(len(batch[0]) - 1):
            started = time.perf_counter()
            for host, item in zip(hosts, batch, strict=True):
                host.accept(item[depth : depth + 1])
            fill_bitmasks(hosts, [host.state for host in hosts], rows, bitmask)
            took.append(time.perf_counter() - started)
    return float(np.median(took))


def make_items(path: Path, items: int, tokens: int, vocab: int) -> None:
    chunks = (chunk_of(i, min(CHUNK, items - i * CHUNK), tokens, vocab) for i in range(-(-items // CHUNK)))
    dtype = np.uint16 if vocab <= 2**16 else np.uint32
    if path.suffix == ".npy":
        matrix = open_memmap(path, "w+", dtype, (items, tokens))
        for i, chunk in enumerate(chunks):
            matrix[i * CHUNK : i * CHUNK + len(chunk)] = chunk
        matrix.flush()
        return
    schema = pa.schema([pa.field("item", pa.list_(pa.from_numpy_dtype(dtype), tokens), nullable=False)])
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for chunk in chunks:
            column = pa.FixedSizeListArray.from_arrays(pa.array(chunk.reshape(-1)), tokens)
            writer.write_batch(pa.record_batch([column], schema=schema))


def chunk_of(number: int, items: int, tokens: int, vocab: int) -> NDArray[np.integer]:
    dtype = np.uint16 if vocab <= 2**16 else np.uint32
    return np.random.default_rng(number).integers(0, vocab, (items, tokens), dtype=dtype)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(itemset.__file__).parents[1])}


def run(source: Path, output: Path, memory: str) -> Seen:
    command = [sys.executable, "-m", "itemset", "build", str(source), "--memory", memory, "-o", str(output)]
    terminal, theirs = pty.openpty()  # the bar is shown on terminals only, and those that have a size
    termios.tcsetwinsize(theirs, (24, 100))
    seen, start = Seen(), time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment(), text=True)
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
    wall = seen.wall = time.perf_counter() - start
    seen.resident, seen.cpu = 1024 * usage.ru_maxrss, usage.ru_utime + usage.ru_stime
    threads[0].join()
    print(out)
    if status:
        sys.exit(f"the build failed with status {status}")
    stages = [*seen.begun.items(), ("", wall)]
    for (stage, begun), (_, end) in zip([("start", 0.0), *stages], stages, strict=False):
        print(f"{stage:<10} {end - begun:7.1f} s")
    print(f"{'wall':<10} {wall:7.1f} s, CPU {seen.cpu:.1f} s")
    for share in (0.25, 0.5, 0.75) if seen.estimates else ():
        when, left = min(seen.estimates, key=lambda pair: abs(pair[0] - share * wall))
        print(f"{'estimate':<10} {left:7.1f} s left, at {when:.1f} s; in truth {wall - when:.1f} s")
    print(f"{'peak':<10} {seen.resident / 1e9:7.2f} GB resident, {seen.anonymous / 1e9:.2f} GB without mapped files")
    print(f"{'peak':<10} {seen.disk / 1e9:7.2f} GB on disk beside the input, the new index counted")
    print(f"left in the folder: {', '.join(sorted(os.listdir(output.parent)))}")
    return seen


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
            if "RssAnon:" not in status:  # it has ended
                return
            seen.anonymous = max(seen.anonymous, 1024 * int(status.partition("RssAnon:")[2].split()[0]))
            seen.disk = max(seen.disk, disk_use(pid, output))
            time.sleep(0.3)  # a look costs milliseconds


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
