"""What a server's start pays for a private copy of an index file, beside opening the file itself.

python benchmarks/held.py --items 2e7

Items are uniform random semantic IDs, 8 tokens of 2,048 codes, with their row numbers as keys. Each time is the least
of three, with the file in the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from index import semantic_ids

import itemset
from itemset.serving import held


def least(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(3):
        before()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=float, default=2e7)
    parser.add_argument("--folder", help="where the file and its copy lie (default: the folder for temporary files)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        path, copies = Path(name, "items.itemset"), Path(name, "copies")
        itemset.build(semantic_ids(int(args.items))).save(path)
        opened = least(lambda: itemset.load(path))
        first = least(
            lambda: held.open_copy(str(path), str(copies)),
            before=lambda: [copy.unlink() for copy in copies.glob("[0-9a-f]*")],
        )
        _, version = held.open_copy(str(path), str(copies))
        again = least(lambda: held.open_copy(str(path), str(copies)))
        other = least(lambda: held.open_copy(str(path), str(copies), version))
        print(f"{path.stat().st_size / 1e6:,.0f} MB")
        print(f"itemset.load                         {1000 * opened:7.0f} ms")
        print(f"first start: check, copy, check      {1000 * first:7.0f} ms   {first / opened:.1f} x")
        print(f"a start after it: check both         {1000 * again:7.0f} ms   {again / opened:.1f} x")
        print(f"each other process: check the copy   {1000 * other:7.0f} ms   {other / opened:.1f} x")


if __name__ == "__main__":
    main()
