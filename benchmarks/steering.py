"""Boosts in the search, beside a list of the model's best that is re-ranked afterwards.

python benchmarks/steering.py --items 1e6 --prompts 12 --json docs/benchmarks/steering.json

Semantic IDs of 4 codes of 256, and a model that has learnt a taste: a prefix has the mass of its items, up to a noise
of its own, and 3 % of each step lie outside the set. Its logits come from an array, so that a list costs its search.

exact: of each boost and filter, whether the proven list of ten is that of exhaustive scoring, and what it took.
recall: the share of the ten best by the sum that a list of ten has, mean of the prompts. "n re-ranked": the n best
items of the model, exact, re-ranked by the sum. "beam of n": boosts in the search, by a beam of that width.
orders: the same of beams in NumPy that are ordered by the bound (log p and the largest boost below), or by log p and
a soft mean of the boosts below, which is no bound and would be a second number an edge. Its exponent is 3 over the
boost's spread, so that it would serve all weights as well.
potentials: making what the search reads, beside a filter of the same set.
rounds: the search's own time of a list, without the model, with a boost and without, in turns; `--before` compares a
list without boosts with another checkout's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from runner import Report, Row, checkouts, isolated, ms_of, parser, whole

CODES, LENGTH = 256, 4
LEGAL, NOISE, SPREAD = 0.97, 0.3, (2.0, 1.5, 1.0, 0.7)
RERANKED, BEAMS = (10, 64, 128, 256, 1_000), (64, 128, 256)


class Model:
    """Log-probabilities of the prefixes of a set's items, each level's in the order of their codes."""

    def __init__(self, ids: NDArray[np.int64], popularity: NDArray[np.float64], seed: int) -> None:
        """ids: [N, LENGTH], ascending and distinct. popularity: [N], of the model's log-probabilities."""
        draw, taste = np.random.default_rng(seed), popularity.copy()
        numbers = [(ids[:, :level] @ CODES ** np.arange(level)[::-1]) for level in range(LENGTH + 1)]
        firsts = [np.flatnonzero(np.diff(one, prepend=-1)) for one in numbers]
        self.prefixes = [one[first] for one, first in zip(numbers, firsts, strict=True)]
        for level in range(1, LENGTH + 1):
            own = SPREAD[level - 1] * draw.standard_normal(len(firsts[level]))
            taste += own[np.searchsorted(self.prefixes[level], numbers[level])]
        weights = np.exp(taste - taste.max())
        self.steps, logs = [np.zeros(1)], np.zeros(1)
        for level in range(1, LENGTH + 1):
            mass = np.add.reduceat(weights, firsts[level]) * np.exp(NOISE * draw.standard_normal(len(firsts[level])))
            parents = np.searchsorted(self.prefixes[level - 1], self.prefixes[level] // CODES)
            total = np.bincount(parents, mass)
            self.steps.append(np.log(mass / total[parents] * LEGAL))
            logs = logs[parents] + self.steps[-1]
        self.logs = logs  # of the items

    def answer(self, one: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What a pass of `search.Search` asks for."""
        rows = [self.logits(np.array([one.tokens[:taken]], np.int64).reshape(1, -1), taken)[0]
                for taken in range(one.known, min(len(one.tokens), LENGTH - 1) + 1)]  # fmt: skip
        run = [row[token] for row, token in zip(rows, one.tokens[one.known :], strict=False)]
        return np.array(run), rows[-1][one.after]

    def logits(self, tokens: NDArray[np.int64], taken: int) -> NDArray[np.float32]:
        """Log-probabilities after these prefixes, [rows, CODES + 1]: the last token is all that is not in the set."""
        rows = np.full((len(tokens), CODES + 1), -np.inf, np.float32)
        begin = (np.maximum(tokens[:, :taken], 0) @ CODES ** np.arange(taken)[::-1]) * CODES
        first, end = (np.searchsorted(self.prefixes[taken + 1], edge) for edge in (begin, begin + CODES))
        for row, low, high in zip(rows, first, end, strict=True):
            row[self.prefixes[taken + 1][low:high] % CODES] = self.steps[taken + 1][low:high]
            row[CODES] = np.log(1 - LEGAL)
        return rows


def catalogue(count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Skewed ids, ascending and distinct, and the popularity of each."""
    draw = np.random.default_rng(1)
    ids, number = np.zeros((int(count * 1.05), LENGTH), np.int64), np.zeros(int(count * 1.05), np.int64)
    for level in range(LENGTH):  # each prefix has a skew of its own
        shift = (number * 2654435761 >> 7) % CODES if level else 0
        ids[:, level] = (draw.choice(CODES, len(ids), p=draw.dirichlet(np.ones(CODES))) + shift) % CODES
        number = number * CODES + ids[:, level]
    ids = np.unique(ids, axis=0)
    ids = ids[np.sort(draw.permutation(len(ids))[:count])]
    return ids, np.minimum(draw.gumbel(0, 1, len(ids)), 8)


def boosts_of(count: int, popularity: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    draw = np.random.default_rng(2)
    unit = lambda values: (values - values.mean()) / values.std()  # noqa: E731
    flag, keys = np.zeros(count), np.zeros(count)
    flag[draw.permutation(count)[: count // 20]], keys[draw.permutation(count)[:1_000]] = 1, 1
    return {
        "each item's own": unit(draw.standard_normal(count)),
        "popular": unit(popularity),
        "novel": -unit(popularity),
        "margin, exponential": draw.exponential(1, count),
        "flag on 5 %": flag,
        "1,000 keys": keys,
    }


WEIGHTS = {"each item's own": (1, 2, 4), "margin, exponential": (1, 2), "flag on 5 %": (3,), "1,000 keys": (4,)}


def listed(arena: Any, number: int, plan: Any, model: Model, width: int) -> tuple[Any, float]:
    """A list of ten by a beam, [10, LENGTH] tokens, and the ms of its rounds."""
    import torch

    from itemset.ranking.lockstep import Lockstep

    beams, taken = Lockstep(arena, [number], plan, width=width, k=10, end_token=None), 0.0
    tokens = np.zeros((1, LENGTH), np.int64)
    while beams.passes_left:
        logits = torch.from_numpy(model.logits(tokens, beams.taken))
        taken += ms_of(lambda logits=logits: beams.round(logits))
        tokens = beams.tokens[0, : beams.row_count].numpy()
    return beams.found.tokens[0].numpy(), taken


def exact(count: int, prompts: int) -> Iterator[Row]:
    """Of 10^5 items at most, with two boosts at a time every other time."""
    import itemset
    from itemset.ranking.search import Search

    ids, popularity = catalogue(min(count, 100_000))
    boosts, draw = boosts_of(len(ids), popularity), np.random.default_rng(4)
    boosts |= {
        "brand's": draw.standard_normal(500)[draw.integers(0, 500, len(ids))],
        "age": -draw.exponential(1, len(ids)),
    }
    shelf, model = draw.integers(0, 100, len(ids)), Model(ids, popularity, 100)
    built = itemset.build(ids, attributes=boosts | {"shelf": shelf})
    names = list(boosts)
    for least in (None, 50, 90, 99):
        left = np.flatnonzero(shelf >= (least or 0))
        query = None if least is None else {"shelf": {"$gte": least}}
        for i, name in enumerate(names):
            weights = {name: 2.0} if i % 2 else {name: 1.0, names[i - 1]: -0.5}
            sums = model.logs[left] + sum(weight * boosts[one][left] for one, weight in weights.items())
            best = left[np.argsort(-sums)[:10]]
            search = Search(itemset.view(built, query, boost=weights), 10, width=64, exact=True)
            while search.passes:
                search.take([model.answer(one) for one in search.passes])
            found = search.result
            items = np.asarray(built.lookup([item.tokens for item in found.items]))
            row: Row = {"items left": len(left), "boost": " and ".join(weights), "equal": bool((items == best).all())}
            yield row | {"proven": found.proven, "passes": found.passes}


def recall(count: int, prompts: int) -> Iterator[Row]:
    import itemset
    from itemset.masking.arena import Arena, room_for

    ids, popularity = catalogue(count)
    boosts = boosts_of(len(ids), popularity)
    models = [Model(ids, popularity, 100 + prompt) for prompt in range(prompts)]
    built = itemset.build(ids, attributes=boosts)
    for name, values in boosts.items():
        for weight in WEIGHTS.get(name, (2,)):
            seen = itemset.view(built, boost={name: float(weight)})
            arena = Arena(room_for(seen))
            number, found = arena.acquire(seen), dict[str, list[float]]()
            for model in models:
                sums = model.logs + weight * values
                best = np.argpartition(-sums, 9)[:10]
                order = np.argsort(-model.logs)[: RERANKED[-1]]
                lists = {f"{n:,} re-ranked": order[:n][np.argsort(-sums[order[:n]])[:10]] for n in RERANKED}
                for width in BEAMS:
                    items, _ = listed(arena, number, built.level_plan, model, width)
                    lists[f"beam of {width}"] = np.asarray(built.lookup(items))
                for way, items in lists.items():
                    found.setdefault(way, []).append(len(np.intersect1d(items, best)) / 10)
            yield {"boost": name, "weight": weight} | {way: float(np.mean(each)) for way, each in found.items()}


def orders(count: int, prompts: int) -> Iterator[Row]:
    ids, popularity = catalogue(count)
    boosts, models = boosts_of(count, popularity), [Model(ids, popularity, 100 + prompt) for prompt in range(prompts)]
    numbers = [(ids[:, :level] @ CODES ** np.arange(level)[::-1]) for level in range(LENGTH + 1)]
    firsts = [np.flatnonzero(np.diff(one, prepend=-1)) for one in numbers]
    sizes = [np.diff(first, append=len(ids)) for first in firsts]
    for name, values in boosts.items():
        for weight in WEIGHTS.get(name, (2,)):
            added, sharp = weight * values, 3 / (weight * values.std())
            most = [np.maximum.reduceat(added, first) for first in firsts]
            soft = list[NDArray[np.float64]]()
            for first, size, top in zip(firsts, sizes, most, strict=True):
                shares = np.add.reduceat(np.exp(sharp * (added - np.repeat(top, size))), first) / size
                soft.append(top + np.log(shares) / sharp)
            ways, found = {"bound": most, "soft mean": soft}, dict[str, list[float]]()
            for model in models:
                best = np.argpartition(-(model.logs + added), 9)[:10]
                for width in (64, 128, 256):
                    for way, order in ways.items():
                        items = beam(model, order, width)
                        found.setdefault(f"{way}, {width}", []).append(len(np.intersect1d(items, best)) / 10)
            yield {"boost": name, "weight": weight} | {way: float(np.mean(each)) for way, each in found.items()}


def beam(model: Model, order: list[NDArray[np.float64]], width: int) -> NDArray[np.int64]:
    """The numbers of ten items. order: of each level, what is added to log p to choose among its prefixes."""
    rows, logs = np.zeros(1, np.int64), np.zeros(1)
    for level in range(LENGTH):
        begin = model.prefixes[level][rows] * CODES
        first, end = (np.searchsorted(model.prefixes[level + 1], edge) for edge in (begin, begin + CODES))
        children = np.concatenate([np.arange(*pair) for pair in zip(first, end, strict=True)])
        reached = np.repeat(logs, end - first) + model.steps[level + 1][children]
        scores = reached + order[level + 1][children]
        best = np.argsort(-scores)[: width if level + 1 < LENGTH else 10]
        rows, logs = children[best], reached[best]
    return rows


def potentials(count: int, prompts: int) -> Iterator[Row]:
    import itemset

    for items in (count // 10, count):
        ids, popularity = catalogue(items)
        boosts = boosts_of(len(ids), popularity)
        columns = {"popular": boosts["popular"], "stock": np.arange(len(ids)) % 10 > 0}
        built = itemset.build(ids, attributes=columns)
        keys = {int(key): 1.0 for key in np.random.default_rng(3).permutation(len(ids))[:1_000]}
        asked: dict[str, Row] = {
            "filter": {"item_filter": {"stock": True}}, "boost": {"boost": {"popular": 1.0}},
            "filter and boost": {"item_filter": {"stock": True}, "boost": {"popular": 1.0}},
            "1,000 boosted keys": {"boost_keys": keys},
        }  # fmt: skip
        for what, words in asked.items():
            seen = itemset.view(built, **words)
            times = [ms_of(lambda built=built, words=words: itemset.view(built, **words)) for _ in range(9)]
            yield {"items": len(ids), "view": what, "ms": median(times), "bytes": seen.nbytes}


def rounds(count: int, prompts: int) -> Iterator[Row]:
    import itemset
    from itemset.masking.arena import Arena, room_for

    ids, popularity = catalogue(count)
    model, popular = Model(ids, popularity, 100), boosts_of(len(ids), popularity)["popular"]
    built = itemset.build(ids, attributes={"popular": popular})
    sets = {"no boost": built}
    if hasattr(itemset, "view") and "boost" in itemset.view.__kwdefaults__:
        keys = {int(key): 1.0 for key in np.random.default_rng(3).permutation(len(ids))[:1_000]}
        sets["boost"] = itemset.view(built, boost={"popular": 1.0})
        sets["1,000 boosted keys"] = itemset.view(built, boost_keys=keys)
    arena = Arena(sum(map(room_for, sets.values())))
    numbers = {name: arena.acquire(one) for name, one in sets.items()}
    for width in BEAMS:
        times: dict[str, list[float]] = {name: [] for name in sets}
        for _ in range(30):
            for name, number in numbers.items():
                times[name].append(listed(arena, number, built.level_plan, model, width)[1])
                time.sleep(0.002)
        for name, each in times.items():
            yield {"width": width, "list": name, "ms": min(each), "/ no boost": min(each) / min(times["no boost"])}


PARTS = {"exact": exact, "recall": recall, "orders": orders, "potentials": potentials, "rounds": rounds}


def measure(part: str, count: int, prompts: int) -> list[Row]:
    return list(PARTS[part](count, prompts))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=whole, default=1_000_000)
    options.add_argument("--prompts", type=int, default=12)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = options.parse_args()
    report = Report(arguments)
    for part in arguments.parts:
        rows, given = list[Row](), (part, arguments.items, arguments.prompts)
        for label, checkout in checkouts(arguments):
            if part == "rounds" or label.get("code") != "before":
                rows += [label | row for row in isolated(measure, *given, checkout=checkout)]
        report.add(part, rows)


if __name__ == "__main__":
    main()
