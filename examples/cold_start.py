"""Films that a model has never seen watched: STATIC's cold start (arXiv 2602.22647, table 3) on MovieLens-100K.

Run it with `python3 bootstrap.py retrieval --cold-start`. The newest tenth of the films is left out of training:
the model knows them only by their semantic IDs, made of titles and genres. For each user whose next film is one of
these it asks for two ranked lists: over all films, and over the fresh ones, by a filter of the request.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import mean
from typing import Any

K = 10
WIDTH = 64
FRESH = {"in_training": False}
"""The filter of a request for fresh films alone."""


def years(titles: Mapping[int, str]) -> dict[int, int]:
    """Return the year in each film's title, "Toy Story (1995)"; 0 without one."""
    return {key: int((re.findall(r"\((\d{4})\)", title) or ["0"])[-1]) for key, title in titles.items()}


def newest(years: Mapping[int, int], histories: Sequence[Sequence[int]]) -> set[int]:
    """Return the newest tenth of the films. Within a year, those that the fewest users have watched come first."""
    watched: dict[int, int] = {}
    for history in histories:
        for film in history:
            watched[film] = watched.get(film, 0) + 1
    order = sorted(years, key=lambda film: (-years[film], watched.get(film, 0), film))
    return set(order[: len(order) // 10])


def without(histories: Sequence[Sequence[int]], fresh: Collection[int]) -> list[list[int]]:
    """Return the histories without the fresh films, from which the model may learn."""
    return [[film for film in history if film not in fresh] for history in histories]


def cases(histories: Sequence[Sequence[int]], fresh: Collection[int]) -> list[tuple[list[int], int]]:
    """Return the first fresh film of each user who has watched one, and the other films watched before it."""
    found = []
    for history in histories:
        first = next((i for i, film in enumerate(history) if film in fresh), 0)
        if first:
            found.append((list(history[:first]), history[first]))
    return found


def recalls(lists: Sequence[Sequence[int]], wanted: Sequence[int]) -> tuple[float, float]:
    """Return the share of lists whose first film, and whose first K films, hold the one that was watched."""
    first, among = (mean(film in found[:k] for found, film in zip(lists, wanted, strict=True)) for k in (1, K))
    return first, among


def report(retrieval: Any, asked: Sequence[tuple[list[int], int]], films: int, fresh: Collection[int]) -> bool:
    """Print the table; return True if every film of the filtered lists is a fresh one."""
    print(f"asking for {2 * len(asked)} ranked lists", flush=True)
    before, wanted = [watched for watched, _ in asked], [film for _, film in asked]
    found = {}
    with ThreadPoolExecutor(8) as pool:
        for name, words in (("all films", {}), ("fresh films", {"item_filter": FRESH})):
            ask = partial(retrieval.ranked, n=K, width=WIDTH, **words)
            found[name] = [[item["key"] for item in one] for one in pool.map(ask, before)]
    print(f"\n{len(asked)} users whose next film is one of {len(fresh)} that no training history holds")
    print("{:>24}  {:>8}  {:>9}".format("lists over", "recall@1", "recall@10"))
    rows = {name: recalls(lists, wanted) for name, lists in found.items()}
    rows["guessing, fresh films"] = 1 / len(fresh), K / len(fresh)
    rows["guessing, all films"] = 1 / films, K / films
    for name, (one, ten) in rows.items():
        print(f"{name:>24}  {one:>8.4f}  {ten:>9.4f}")
    return all(set(one) <= set(fresh) for one in found["fresh films"])
