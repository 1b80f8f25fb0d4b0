"""What chooses among a set's items for one request: filters and exclusions, beside a set built from the survivors.

python benchmarks/filters.py --items 2e7 --json docs/benchmarks/filters.json

Random semantic IDs of 8 tokens, 2,048 codes a token, each with a region, whether it is in stock, and a day of release.

filters: from the query to the view that a request carries, by the clock and in processor time.
exclusions: the same of keys to omit, other ones in each request, and the bytes that they take.
step: masking 256 rows of requests whose set is whole, filtered, or without some keys, at the same states; each as a
ratio to the whole set's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from operator import truediv
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from runner import Report, Row, checkouts, isolated, ms_of, parser, random_ids, whole

LENGTH, CODES, DAYS = 8, 2_048, 1_000
FIRST_DAY = date(2024, 1, 1)
REGIONS = ["AT", "AU", "BR", "CA", "CH", "DE", "FR", "GB", "IN", "JP", "MX", "US"]
EXCLUDED, ROWS, BATCHES = (1_000, 10_000), 256, 4


def catalogue(count: int) -> tuple[Any, NDArray[np.uint16]]:
    """The set, whose keys are row numbers, and its rows."""
    import itemset

    ids, draw = random_ids(count, LENGTH, (0, CODES)), np.random.default_rng(1)
    days = draw.integers(0, DAYS, count, dtype=np.int32) + (FIRST_DAY - date(1970, 1, 1)).days
    attributes = {
        "region": pa.DictionaryArray.from_arrays(draw.integers(0, len(REGIONS), count, dtype=np.int8), REGIONS),
        "in_stock": pa.array(draw.random(count) < 0.8),
        "released": pa.array(days, pa.int32()).view(pa.date32()),
    }
    return itemset.build(ids, attributes=attributes), ids


def newest(share: float) -> Row:
    """A query that this share of the items passes."""
    return {"released": {"$gte": (FIRST_DAY + timedelta(round(DAYS * (1 - share)))).isoformat()}}


GERMAN: Row = {"region": {"$in": ["DE", "AT"]}}
QUERIES: dict[str, Row] = {
    "region, in stock and released": {**GERMAN, "in_stock": True, **newest(0.007)},
    "region": GERMAN,
    "in stock": {"in_stock": True},
    "released, 10 %": newest(0.1),
    "released, 50 %": newest(0.5),
}


def timed(make: Callable[[], Any], repeats: int) -> Row:
    """Median ms of a view, by the clock and in processor time."""
    clock, processor = [], []
    for _ in range(repeats):
        begun = time.process_time()
        clock.append(ms_of(make))
        processor.append(1e3 * (time.process_time() - begun))
    return {"ms": median(clock), "processor, ms": median(processor)}


def filters(base: Any, ids: NDArray[np.uint16], repeats: int) -> Iterator[Row]:
    import itemset

    itemset.view(base, QUERIES["in stock"])  # reads the columns, and loads compiled code
    for name, query in QUERIES.items():
        seen = itemset.view(base, query)
        survivors = np.sort(np.asarray(seen.lookup(seen.items()))) if len(base) <= 10**6 else None
        row: Row = {"filter": name, "items left": len(seen)}
        row |= timed(lambda query=query: itemset.view(base, query), repeats)
        if survivors is not None:
            row["rebuilt, ms"] = ms_of(lambda rows=survivors: itemset.build(ids[rows], keys=rows))
        yield row


def exclusions(base: Any, ids: NDArray[np.uint16], repeats: int) -> Iterator[Row]:
    import itemset

    draw = np.random.default_rng(1)
    itemset.view(base, exclude_keys=[0])  # makes the key index
    for what, of in (("the whole set", base), ("10 % of it", itemset.view(base, newest(0.1)))):
        for count in EXCLUDED:
            lists = iter([draw.choice(len(base), count, replace=False) for _ in range(repeats)])
            row: Row = {"of": what, "excluded": count}
            yield row | timed(lambda of=of, lists=lists: itemset.view(of, exclude_keys=next(lists)), repeats)


def step(base: Any, ids: NDArray[np.uint16], repeats: int) -> Iterator[Row]:
    """Rows of the same states in every set, taken in turns."""
    import itemset
    from itemset.masking.host import HostState, fill_bitmasks

    draw = np.random.default_rng(2)
    sets = {"whole": base, "10% left": itemset.view(base, newest(0.1)), "50% left": itemset.view(base, newest(0.5))}
    tenth = sets["10% left"]
    asked = draw.permutation(min(len(base), 400_000))
    alive = np.array([number for number in asked if tenth.find(ids[number].tolist()) is not None])
    items, others = alive[: BATCHES * ROWS], alive[BATCHES * ROWS :]
    for count in EXCLUDED:
        gone = draw.choice(others, min(count, len(others)), replace=False)
        sets[f"{count:,} excluded"] = itemset.view(base, exclude_keys=gone)
        sets[f"10% left, {count:,} excluded"] = itemset.view(tenth, exclude_keys=gone)
    for what, deepest in (("roots", 0), ("depth 1", 1), ("all depths", LENGTH - 1)):
        depths = np.full(len(items), deepest) if deepest < 2 else draw.integers(0, LENGTH, len(items))
        hosts = {name: [HostState(one, [CODES]) for _ in items] for name, one in sets.items()}
        for rows in hosts.values():
            for host, item, depth in zip(rows, ids[items].tolist(), depths.tolist(), strict=True):
                assert host.accept(item[:depth])
        times: dict[str, list[float]] = {name: [] for name in sets}
        bitmask = np.zeros((ROWS, CODES // 32 + 1), np.int32)
        for turn in range(20 * repeats):
            batch = slice(turn % BATCHES * ROWS, turn % BATCHES * ROWS + ROWS)
            for name, rows in hosts.items():
                given = (rows[batch], [host.state for host in rows[batch]], range(len(rows[batch])), bitmask)
                fill_bitmasks(*given)  # what the tables share is then in the cache
                times[name].append(ms_of(lambda given=given: fill_bitmasks(*given)))
        for name, taken in times.items():
            ratio = median(map(truediv, taken, times["whole"]))
            yield {"states": what, "set": name, "µs a row": 1e3 * median(taken) / ROWS, "/ whole": ratio}


PARTS = {"filters": filters, "exclusions": exclusions, "step": step}


def measure(parts: list[str], count: int, repeats: int) -> dict[str, list[Row]]:
    given = catalogue(count)
    return {name: list(PARTS[name](*given, repeats)) for name in parts}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=whole, default=2 * 10**7)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--repeats", type=int, default=5)
    arguments = options.parse_args()
    report = Report(arguments)
    found = [
        (code, isolated(measure, arguments.parts, arguments.items, arguments.repeats, checkout=checkout))
        for code, checkout in checkouts(arguments)
    ]
    for name in arguments.parts:
        report.add(name, [code | row for code, tables in found for row in tables[name]])


if __name__ == "__main__":
    main()
