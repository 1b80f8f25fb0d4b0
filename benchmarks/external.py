"""Builds on disk: random items are built by the command line, which is watched; the index is verified and asked.

python benchmarks/external.py --items 1e8 --memory 4GB --json docs/benchmarks/external.json

A row has the seconds, peak memory (all of it, and without the pages of mapped files, which the system can
take back), peak room on the disk beside the input, and what `itemset verify`, 10^6 lookups and a masked step take.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from runner import Report, Row, checkouts, isolated, ms_of, parser, whole

import itemset
from itemset.masking.host import HostState, fill_bitmasks

CHUNK = 1_000_000
LOOKUPS, ROWS = 10**6, 140  # items that are looked up, and rows of a masked step


@dataclass
class Seen:
    """What was seen of a build. Times are in seconds, sizes in bytes."""

    anonymous: int = 0
    disk: int = 0
    wall: float = 0
    cpu: float = 0
    resident: int = 0


def measure(folder: str, items: int, arguments: Row) -> Row:
    """Make the items, build, verify and ask: one row."""
    home, vocabulary, tokens = Path(folder), arguments["vocab"], arguments["tokens"]
    source = home / ("items.parquet" if arguments["parquet"] else "items.npy")
    output = home / "index" / "items.itemset"
    output.parent.mkdir()
    make_items(source, items, tokens, vocabulary)
    seen = run(source, output, arguments["memory"])
    row: Row = {"items": items, "build, s": seen.wall, "processor, s": seen.cpu}
    row |= {"peak without mapped files, GB": seen.anonymous / 1e9, "peak, GB": seen.resident / 1e9}
    row["peak disk, GB"] = seen.disk / 1e9
    source.unlink()
    command = [sys.executable, "-m", "itemset", "verify", str(output)]
    verify = ms_of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)) / 1e3
    s, chunks = itemset.load(output), -(-items // CHUNK)
    each = -(-min(LOOKUPS, items) // chunks)
    parts = [(i * CHUNK, chunk_of(i, min(CHUNK, items - i * CHUNK), tokens, vocabulary)[:each]) for i in range(chunks)]
    asked = np.concatenate([part for _, part in parts])
    expected = np.concatenate([np.arange(at, at + len(part)) for at, part in parts])
    s.lookup(asked[:1000])
    found: list[Any] = []
    lookup = ms_of(lambda: found.append(s.lookup(asked)))
    if wrong := int(np.count_nonzero(found[0] > expected)):  # of equal items, the first is found
        sys.exit(f"{wrong} of {len(asked):,} lookups are wrong")
    row |= {"tables, bytes an item": s.nbytes / items, "verify, s": verify, "lookup, µs": 1e3 * lookup / len(asked)}
    return row | {"masked step of 140 rows, µs": masked_step(s, asked, vocabulary) * 1e6}


def masked_step(s: itemset.ItemSet, asked: NDArray[np.integer], vocab: int) -> float:
    """Median seconds of a step that takes a token of each of 140 random items, none of which is seen twice, and masks
    what may follow."""
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


def run(source: Path, output: Path, memory: str) -> Seen:
    command = [sys.executable, "-m", "itemset", "build", str(source), "--memory", memory, "-o", str(output)]
    seen, start = Seen(), time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    threading.Thread(target=watch_process, args=(child.pid, output, seen), daemon=True).start()
    _, status, usage = os.wait4(child.pid, 0)
    seen.wall = time.perf_counter() - start
    seen.resident, seen.cpu = 1024 * usage.ru_maxrss, usage.ru_utime + usage.ru_stime
    if status:
        sys.exit(f"the build failed with status {status}")
    return seen


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


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=whole, nargs="+", default=[10**8])
    options.add_argument("--tokens", type=int, default=8, help="tokens of an item")
    options.add_argument("--vocab", type=int, default=2048)
    options.add_argument("--memory", default="4GB", help="as for `itemset build`")
    options.add_argument("--parquet", action="store_true", help="the items are in a Parquet file, not a matrix")
    options.add_argument("--folder", default=tempfile.gettempdir(), help="where input, index and temporary files go")
    arguments = options.parse_args()
    names, rows = ("tokens", "vocab", "memory", "parquet"), []
    for items in arguments.items:
        for code, checkout in checkouts(arguments):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                given = {name: getattr(arguments, name) for name in names}
                rows.append(code | isolated(measure, folder, items, given, checkout=checkout))
    Report(arguments).add("builds", rows)


if __name__ == "__main__":
    main()
