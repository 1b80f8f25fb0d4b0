"""What changes to a set take, beside building the changed set from its sorted rows.

python benchmarks/update.py --items 1e7 --changes 1e5

Items are uniform random semantic IDs, 8 tokens of 2,048 codes; half of the changes are removals, half are new items.
An update opens the old index with its checksums ("read"), changes it and writes the new one ("save"). "Build" is of the
sorted rows that the changed set has, in memory already; "write" is writing that. Of each the best of several rounds, in
which all take turns. The two files are compared byte for byte.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from index import CODES, LENGTH, sorted_ids

import itemset

BAR = 1.5


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=float, default=1e7)
    parser.add_argument("--changes", type=float, default=1e5)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    items, half = int(args.items), int(args.changes) // 2
    draw = np.random.default_rng(1)
    before = sorted_ids(items)
    gone = draw.choice(items, half, replace=False)
    new = draw.integers(0, CODES, (half, LENGTH), dtype=np.uint16)
    keys = np.arange(items, items + half)
    # The changed set's rows, sorted, with their keys: what a build of it is given.
    kept = np.ones(items, bool)
    kept[gone] = False
    rows = np.concatenate((before[kept], new))
    row_keys = np.concatenate((np.flatnonzero(kept), keys))
    order = np.lexsort(rows.T[::-1])
    rows, row_keys = np.ascontiguousarray(rows[order]), row_keys[order]
    itemset.build(before[:9]).updated(new[:2], keys=[90, 91], remove=[3])  # compiled code is loaded once
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        old, updated, built = (Path(folder) / name for name in ("old", "updated", "built"))
        itemset.build(before).save(old)
        del before
        for number in range(args.rounds):
            seconds: dict[str, float] = {}
            for turn in (number, number + 1):  # the second of two files that are written takes longer
                if turn % 2:
                    s, seconds["build"] = timed(lambda: itemset.build(rows, keys=row_keys))
                    _, seconds["write"] = timed(lambda s=s: s.save(built))
                else:
                    s, seconds["read"] = timed(lambda: itemset.load(old))
                    s, seconds["change"] = timed(lambda s=s: s.updated(new, keys=keys, remove=gone))
                    _, seconds["save"] = timed(lambda s=s: s.save(updated))
                del s
            best = {name: min(value, best.get(name, value)) for name, value in seconds.items()}
        assert updated.read_bytes() == built.read_bytes()
    update = best["read"] + best["change"] + best["save"]
    allowed = BAR * best["build"] + best["read"] + best["write"]
    print(f"{items:,} items, {2 * half:,} changes; {args.rounds} rounds, the best of each\n")
    print("| build (s) | write (s) | read (s) | change (s) | save (s) | change / build | update / allowed |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    figures = [*(f"{best[name]:.3f}" for name in ("build", "write", "read", "change", "save"))]
    print("|", " | ".join([*figures, f"{best['change'] / best['build']:.2f}", f"{update / allowed:.2f}"]), "|")
    print(f"\nUpdate: read + change + save. Allowed: {BAR} x build + read + write.")


if __name__ == "__main__":
    main()
