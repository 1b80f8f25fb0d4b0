"""Times what chooses among a set's items for one request: filters and exclusions, beside what people do without them.

python benchmarks/filters.py --json docs/benchmarks/filters.json --plot docs/benchmarks/filters.png

2 x 10^7 random semantic IDs of 8 tokens, 2,048 codes a token, each with a region, whether it is in stock, and the day
of its release. Four parts:

ready: a filter, from the query to the view that a request carries, beside a set that is built from the survivors.
exclusions: what keys to leave out add to a request, in time and bytes.
step: masking 256 rows of requests whose set is whole, filtered, or without some keys, at the same states.
places: how many of a list's 50 places a search over the whole set keeps once items that do not pass are dropped.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

import itemset
from itemset.adapters.decode_loop import beam_search
from itemset.item_set import ItemSet
from itemset.masking import torch_kernels
from itemset.masking.arena import Arena, room_for
from itemset.masking.host import HostState, fill_bitmasks
from itemset.serving.admission import Words
from itemset.serving.catalogue import Catalogue
from itemset.serving.chosen import Chosen
from itemset.serving.config import StaticConfig
from itemset.serving.request import ItemRequest
from itemset.serving.travel import arrived, carried
from itemset.serving.versions import Opened
from itemset.serving.words import FILTERED, INDEX
from itemset.trie.filters import passing
from itemset.trie.rows import as_rows
from itemset.trie.view import bits_of
from itemset.trie.walk import STATE_BITS
from itemset.views import without

LENGTH, CODES, VOCABULARY, DAYS = 8, 2_048, 2_112, 1_000
FIRST_DAY = date(2024, 1, 1)
REGIONS = ["AT", "AU", "BR", "CA", "CH", "DE", "FR", "GB", "IN", "JP", "MX", "US"]
EXCLUDED = (1_000, 10_000)
ROWS, VOCABULARIES = 256, (VOCABULARY, 151_936)
BATCHES = 4
MARKS, SLOTS = torch.full((1, 2), -1, dtype=torch.int32), torch.full((ROWS,), -1, dtype=torch.int32)
PLACES, WIDTHS, LISTS = 50, (50, 128, 512), 20
PARTS = ("ready", "exclusions", "step", "places")
Row = dict[str, Any]


def catalogue(count: int) -> tuple[ItemSet, NDArray[np.uint16]]:
    """The set, whose keys are row numbers, and its rows."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, CODES, (count, LENGTH), dtype=np.uint16)
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


QUERIES: dict[str, Row] = {
    "region, in stock and released": {
        "region": {"$in": ["DE", "AT"]},
        "in_stock": True,
        "released": {"$gte": (FIRST_DAY + timedelta(DAYS - 7)).isoformat()},
    },
    "region": {"region": {"$in": ["DE", "AT"]}},
    "in stock": {"in_stock": True},
    "released, 10 %": newest(0.1),
    "released, 50 %": newest(0.5),
}


def ms(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def catalogue_of(base: ItemSet) -> Catalogue:
    """What a process knows that serves this set."""
    catalogue = Catalogue(StaticConfig())
    catalogue.serve(Opened("set", "0" * 32, {"set": base}))
    return catalogue


def chosen(catalogue: Catalogue) -> Chosen:
    """What a server answers requests with, its filters not yet asked for."""
    return Chosen(catalogue, StaticConfig(), Words("", "", "", "", ""))


def ready(base: ItemSet, ids: NDArray[np.uint16], repeats: int) -> Iterator[Row]:
    itemset.view(base, QUERIES["in stock"])  # reads the columns, and loads compiled code
    for name, query in QUERIES.items():
        asked = ItemRequest("set", item_filter=query)
        passes = passing(query, base.attributes)
        times: dict[str, list[float]] = {
            name: [] for name in ("attributes", "edges", "first", "first, processor", "again")
        }
        for _ in range(repeats):
            times["attributes"].append(ms(lambda query=query: passing(query, base.attributes)))
            times["edges"].append(ms(lambda passes=passes: bits_of(base.trie.tables, passes)))
            serving = chosen(catalogue_of(base))
            begun = time.process_time()
            times["first"].append(ms(lambda serving=serving, asked=asked: serving.get(asked, "set")))
            times["first, processor"].append(1e3 * (time.process_time() - begun))
            times["again"].append(ms(lambda serving=serving, asked=asked: serving.get(asked, "set")))
        seen = serving.get(asked, "set")
        survivors = base.keys.to_numpy()[passes]
        row: Row = {"filter": name, "left": len(seen.item_set), "MB": seen.item_set.nbytes / 1e6}
        row |= {f"{which}, ms": median(each) for which, each in times.items()}
        row["rebuilt, ms"] = ms(lambda survivors=survivors: itemset.build(ids[survivors], keys=survivors))
        row["rebuilt / first"] = row["rebuilt, ms"] / row["first, ms"]
        yield row


def exclusions(base: ItemSet, repeats: int) -> Iterator[Row]:
    """A request's own time, in the process that takes it and in the one that runs the engine, and what it takes."""
    draw = np.random.default_rng(1)
    started = time.perf_counter()
    index = base._keys.index
    seconds, nbytes = time.perf_counter() - started, index._slots.nbytes
    front, engine = catalogue_of(base), catalogue_of(base)
    serving = chosen(front)
    serving.get(ItemRequest("set", exclude_keys=[0]), "set")  # loads compiled code
    for query in (None, newest(0.1)):
        of: ItemSet = base if query is None else serving.get(ItemRequest("set", item_filter=query), "set").item_set
        pool = base.keys.to_numpy()[passing(query, base.attributes)] if query else base.keys.to_numpy()
        for count in EXCLUDED:
            lists = [draw.choice(pool, count, replace=False).tolist() for _ in range(5 * repeats)]
            before, here, busy, there, made = [], [], [], [], []
            for keys in lists:
                before.append(ms(lambda: serving.get(ItemRequest("set", item_filter=query), "set")) if query else 0.0)  # noqa: B023
                asked = ItemRequest("set", item_filter=query, exclude_keys=keys)
                begun = time.process_time()
                here.append(ms(lambda: made.append(carried(front, serving.get(asked, "set").reference))))  # noqa: B023
                busy.append(1e3 * (time.process_time() - begun))
                there.append(ms(lambda: arrived(engine, made[-1])))  # noqa: B023
            sent = [len(one[INDEX]) + len(one.get(FILTERED, b"")) for one in made]
            tracemalloc.start()
            start = tracemalloc.get_traced_memory()[0]
            held = [without(of, base._keys.places_of(keys)) for keys in lists]
            kept = (tracemalloc.get_traced_memory()[0] - start) / len(held)
            tracemalloc.stop()
            yield {
                "of": "the whole set" if query is None else "10 % of it", "excluded": count,
                "lookup, ms": median(ms(lambda keys=keys: base._keys.places_of(keys)) for keys in lists),
                "request, ms": median(here) - median(before), "request, processor, ms": median(busy),
                "engine, ms": median(there),
                "list, bytes": held[0].own["dead"].nbytes, "sent, bytes": round(median(sent)),
                "held, bytes": round(kept),
                "key index, s": seconds, "key index, MB": nbytes / 1e6,
            }  # fmt: skip


def step(base: ItemSet, ids: NDArray[np.uint16], repeats: int) -> Iterator[Row]:
    """Rows of the same states in every set, taken in turns."""
    draw = np.random.default_rng(2)
    passes = {share: passing(newest(share), base.attributes) for share in (0.1, 0.5)}
    sets = {"whole": base}
    for share, rows in passes.items():
        sets[f"{share:.0%} left"] = itemset.view(base, newest(share))
        survivors = base.keys.to_numpy()[passes[0.1] & rows]
    items = draw.choice(survivors, BATCHES * ROWS, replace=False)
    others = np.setdiff1d(base.keys.to_numpy()[passes[0.1]], items)
    for count in EXCLUDED:
        gone = draw.choice(others, count, replace=False)
        sets[f"{count:,} excluded"] = itemset.view(base, exclude_keys=gone)
        sets[f"10% left, {count:,} excluded"] = itemset.view(sets["10% left"], exclude_keys=gone)
    arena = Arena(sum(map(room_for, sets.values())), "cpu", max_sets=16)
    numbers = {name: arena.acquire(one) for name, one in sets.items()}
    torch.set_num_threads(1)
    for what, deepest in (("roots", 0), ("depth 1", 1), ("all depths", LENGTH - 1)):
        depths = np.full(len(items), deepest) if deepest < 2 else draw.integers(0, LENGTH, len(items))
        walked = {name: _walked(one, ids[items], depths) for name, one in sets.items()}
        for vocabulary in VOCABULARIES:
            host: dict[str, list[float]] = {name: [] for name in sets}
            device: dict[str, list[float]] = {name: [] for name in sets}
            bitmask, logits = np.zeros((ROWS, -(-vocabulary // 32)), np.int32), torch.zeros(ROWS, vocabulary)
            for turn in range(20 * repeats):
                batch = slice(turn % BATCHES * ROWS, turn % BATCHES * ROWS + ROWS)
                for name in sets:
                    hosts = walked[name][batch]
                    states = [one.state for one in hosts]
                    fill_bitmasks(hosts, states, range(ROWS), bitmask)  # what the tables share is then in the cache
                    host[name].append(ms(lambda: fill_bitmasks(hosts, states, range(ROWS), bitmask)))  # noqa: B023
                    if turn < 2 * repeats and vocabulary == VOCABULARY:
                        at = torch.tensor(states) + (numbers[name] << STATE_BITS)
                        device[name].append(ms(lambda: torch_kernels.mask(arena, logits, at, MARKS, SLOTS)))  # noqa: B023
            for name in sets:
                row: Row = {"states": what, "vocabulary": vocabulary, "set": name}
                for path, times in (("host", host), ("torch", device)):
                    if times[name]:
                        row[f"{path}, µs a row"] = 1e3 * median(times[name]) / ROWS
                        row[f"{path} / whole"] = median(map(truediv, times[name], times["whole"]))
                yield row


def _walked(item_set: ItemSet, items: NDArray[np.uint16], depths: NDArray[np.int64]) -> list[HostState]:
    hosts = [HostState(item_set, [1]) for _ in items]
    for host, item, depth in zip(hosts, items.tolist(), depths.tolist(), strict=True):
        assert host.accept(item[:depth])
    return hosts


def places(base: ItemSet) -> Iterator[Row]:
    """A random model: which of 64 distributions comes next depends on the tokens so far."""
    arena = Arena(2 * room_for(base), "cpu")
    passes = {share: passing(newest(share), base.attributes) for share in (0.1, 0.01, 0.001)}
    for width in WIDTHS:
        found = [searched(arena, base, width, seed) for seed in range(LISTS)]
        for share, rows in passes.items():
            seen = itemset.view(base, newest(share))
            dropped = [rows[base._numbers_of(as_rows(items))] for items in found]
            in_view = [len(searched(arena, seen, max(width, PLACES), seed)[:PLACES]) for seed in range(LISTS)]
            yield {
                "items left": share, "width": width,
                "dropped from 50": float(np.mean([np.count_nonzero(one[:PLACES]) for one in dropped])),
                "dropped from all beams": float(np.mean([min(PLACES, np.count_nonzero(one)) for one in dropped])),
                "view": float(np.mean(in_view)),
            }  # fmt: skip


def searched(arena: Arena, item_set: ItemSet, width: int, seed: int) -> list[list[int]]:
    table = 2 * torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def logits(tokens: Tensor, _: Tensor) -> Tensor:
        return table[(tokens * torch.arange(1, tokens.shape[2] + 1) * 7).sum(2) % 64]

    number = arena.acquire(item_set)
    best = beam_search(arena, number, logits, batch=1, width=width, longest=LENGTH)
    arena.release(number)
    return best.tokens[0, : int(best.found[0])].tolist()


def table(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'--:|' * len(columns)}"]
    for row in rows:
        cells = [_shown(row.get(name, "")) for name in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=lambda text: int(float(text)), default=2 * 10**7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    base, ids = catalogue(args.items)
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "ready": lambda: ready(base, ids, args.repeats),
        "exclusions": lambda: exclusions(base, args.repeats),
        "step": lambda: step(base, ids, args.repeats),
        "places": lambda: places(base),
    }
    results: dict[str, list[Row]] = {}
    for name in args.parts:
        results[name] = list(parts[name]())
        print(f"{name}\n\n{table(results[name])}\n", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"items": args.items, **results}, indent=1) + "\n")
    if args.plot:
        plot(results["places"], args.plot)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for share in dict.fromkeys(row["items left"] for row in rows):
        mine = [row for row in rows if row["items left"] == share]
        widths = [row["width"] for row in mine]
        axis.plot(
            widths, [row["dropped from all beams"] for row in mine], marker="o", label=f"{share:.1%} left, dropped"
        )
    axis.plot(widths, [row["view"] for row in mine], "k--", label="view")
    axis.set(xlabel="beam width", ylabel=f"places filled of {PLACES}", xscale="log")
    axis.minorticks_off()
    axis.set_xticks(WIDTHS, list(map(str, WIDTHS)))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
