"""Our index beside the published layout: size, build, lookup; what a change and a check of it take.

python benchmarks/index.py --sizes 1e5 1e6 1e7 2e7 --json docs/benchmarks/index.json
python benchmarks/index.py --parts change --sizes 1e7 --before ../before

Items are uniform random semantic IDs, 8 tokens of 2,048 codes, with their row numbers as keys. Every row is measured in
a process of its own, so that its peak memory is its own.

tries: "ours" and the layout that the STATIC paper publishes (arXiv 2602.22647).
change: half of the changes are removals, half new items. "build" is of the changed set's sorted rows, "update" of the
old set in memory; read, verify and write are of files. The two files must be equal.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from runner import Memory, Report, Row, checkouts, in_turns, isolated, parser, whole

LENGTH, CODES, QUERIES = 8, 2_048, 100_000
LARGEST = {"ours": 10**9, "STATIC": 2 * 10**7}  # items, where it still fits and ends in minutes
PARTS = ("tries", "change")


def semantic_ids(count: int) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, CODES, (count, LENGTH), dtype=np.uint16)


def sorted_ids(count: int) -> NDArray[np.uint16]:
    """The same, sorted: big-endian bytes order as tokens do."""
    ids = semantic_ids(count).byteswap().view(f"S{2 * LENGTH}").ravel()
    ids.sort()
    return ids.view(np.uint16).reshape(-1, LENGTH).byteswap()


def built(build: Callable[[Any], Any], ids: NDArray[np.uint16]) -> tuple[Any, float, float]:
    """Result, seconds and peak memory of a build, in sizes of its input: the median of three, once at large sizes."""
    result, runs = None, []
    for _ in range(3 if len(ids) <= 2 * 10**7 else 1):
        del result
        with Memory() as memory:
            result = build(ids)
        runs.append((memory.seconds, memory.peak / ids.nbytes))
    return result, *sorted(runs)[len(runs) // 2]


def queries(ids: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return ids[np.random.default_rng(2).integers(0, len(ids), QUERIES)]


def each(work: Callable[[], Any]) -> float:
    """Microseconds a query."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) / QUERIES * 1e6


def ours(count: int) -> Row:
    import itemset

    itemset.build([[1, 2], [2], [1]]).lookup([[2]])  # compiled code is loaded once
    ids = semantic_ids(count)
    s, seconds, peak = built(itemset.build, ids)
    asked = queries(ids)
    keys = s.lookup(asked)
    s.tokens(keys)
    row: Row = {"build unsorted, s": seconds, "peak / input": peak, "bytes an item": s.nbytes / count}
    row |= {"lookup, µs": each(lambda: s.lookup(asked)), "tokens, µs": each(lambda: s.tokens(keys))}
    s = ids = None  # so that the peak is the next build's
    return row | {"build sorted, s": built(itemset.build, sorted_ids(count))[1]}


def static_layout(ids: NDArray[np.uint16]) -> list[NDArray[Any]]:
    """The arrays of the published layout (the paper's algorithm and appendix B): every prefix but the items themselves
    is a state, with int32 row starts and [token, next state] pairs of int32; the first two levels also stand in dense
    tables, next state and mask."""
    differs = ids[1:] != ids[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), LENGTH)
    parents, pairs = [], []
    above, states = np.zeros(len(ids), np.int32), 1
    for depth in range(LENGTH):
        new = np.concatenate(([True], first <= depth))
        own = np.cumsum(new, dtype=np.int32) + np.int32(states - 1)
        last = depth == LENGTH - 1
        parents.append(above[new])
        pairs.append(np.stack((ids[new, depth].astype(np.int32), own[new] * np.int32(not last)), axis=1))
        if depth == 1:
            dense = np.zeros((CODES, CODES), np.int32)
            dense[ids[:, 0], ids[:, 1]] = own
        above, states = own, states + int(new.sum()) * (not last)
    starts = np.zeros(states + 1, np.int32)
    np.cumsum(np.bincount(np.concatenate(parents), minlength=states), out=starts[1:])
    return [starts, np.concatenate(pairs), dense, dense > 0]


def static(count: int) -> Row:
    arrays, seconds, peak = built(static_layout, sorted_ids(count))
    nbytes = sum(array.nbytes for array in arrays)
    return {"build sorted, s": seconds, "peak / input": peak, "bytes an item": nbytes / count}


TRIES = {"ours": ours, "STATIC": static}


def change(count: int, half: int, rounds: int) -> Row:
    """The least seconds of each step, in several rounds."""
    import itemset

    draw = np.random.default_rng(1)
    before = sorted_ids(count)
    gone = draw.choice(count, half, replace=False)
    new = draw.integers(0, CODES, (half, LENGTH), dtype=np.uint16)
    keys = np.arange(count, count + half)
    stay = np.ones(count, bool)
    stay[gone] = False
    rows, row_keys = np.concatenate((before[stay], new)), np.concatenate((np.flatnonzero(stay), keys))
    order = np.lexsort(rows.T[::-1])
    rows, row_keys = np.ascontiguousarray(rows[order]), row_keys[order]
    itemset.build(before[:9]).updated(new[:2], keys=[90, 91], remove=[3])  # compiled code is loaded once
    with tempfile.TemporaryDirectory() as folder:
        old, updated, other = (Path(folder, name) for name in ("old", "updated", "built"))
        itemset.build(before).save(old)
        del before
        sets: dict[str, Any] = {}
        took = in_turns(
            {
                "build, s": lambda: sets.update(built=itemset.build(rows, keys=row_keys)),
                "write, s": lambda: sets.pop("built").save(other),
                "read, s": lambda: sets.update(old=itemset.load(old)),
                "update, s": lambda: sets.update(new=sets.pop("old").updated(new, keys=keys, remove=gone)),
                "write updated, s": lambda: sets.pop("new").save(updated),
                "verify, s": lambda: subprocess.run(
                    [sys.executable, "-m", "itemset", "verify", str(old)], check=True, stdout=subprocess.DEVNULL
                ),
            },
            rounds,
            min,
        )
        assert updated.read_bytes() == other.read_bytes()
    row = {name: ms / 1e3 for name, ms in took.items()}
    update = row["read, s"] + row["update, s"] + row["write updated, s"]
    allowed = 1.5 * row["build, s"] + row["read, s"] + row["write, s"]
    return row | {"update / build": row["update, s"] / row["build, s"], "whole update / allowed": update / allowed}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", type=whole, default=[10**5, 10**6])
    options.add_argument("--parts", nargs="+", choices=PARTS, default=["tries"])
    options.add_argument("--kinds", nargs="+", choices=TRIES, default=list(TRIES))
    options.add_argument("--changes", type=whole, default=10**5)
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    report = Report(arguments)
    for part in arguments.parts:
        rows = []
        for size in arguments.sizes:
            for code, checkout in checkouts(arguments):
                if part == "tries":
                    for kind in arguments.kinds if checkout == checkouts(arguments)[0][1] else ["ours"]:
                        if size <= LARGEST[kind]:
                            row = {"items": size, "index": kind, **code}
                            rows.append(row | isolated(TRIES[kind], size, checkout=checkout))
                    continue
                args = (size, arguments.changes // 2, arguments.rounds)
                rows.append({"items": size, **code} | isolated(change, *args, checkout=checkout))
        report.add(part, rows, x="items", y="bytes an item" if part == "tries" else "", by="index")


if __name__ == "__main__":
    main()
