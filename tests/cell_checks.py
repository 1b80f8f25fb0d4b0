"""What the answers to the requests of `cells` must be."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from inside_cases import KEYS, TITLES

COLOURS = ["red", "green", "dark blue"]
LATE = TITLES[12:]
NO_ITEM: Any = object()
"""What a way says of items that cannot say any: `/v1/responses` in SGLang."""


class Got(NamedTuple):
    """What is needed of a choice: its text, and what it says of its item, and of its items; "none" if it has no such
    field."""

    text: str
    item: Any = NO_ITEM
    items: Any = NO_ITEM


Check = Callable[[Sequence[Got]], None]


def one_of(titles: Sequence[str], *others: str, count: int = 0) -> Check:
    """others: what an item says besides its key. count: of choices."""

    def check(gots: Sequence[Got]) -> None:
        assert count in (0, len(gots))
        for got in gots:
            assert got.text in titles
            if got.item is not NO_ITEM:
                assert got.item.keys() == {"key", *others}
                assert got.item["key"] == KEYS[TITLES.index(got.text)]
                assert got.item.get("set_weight", -1) < 0
                assert len(got.item.get("item_set_version", "0" * 32)) == 32

    return check


title = one_of(TITLES)


def colour(gots: Sequence[Got]) -> None:
    for got in gots:
        assert got.text in COLOURS
        assert got.item in (NO_ITEM, {"key": COLOURS.index(got.text)})


def cut(gots: Sequence[Got]) -> None:
    assert all(got.item is None for got in gots)


def free(gots: Sequence[Got]) -> None:
    assert all(got.item in (NO_ITEM, "none") for got in gots)


def spelled(pattern: str) -> Check:
    def check(gots: Sequence[Got]) -> None:
        free(gots)
        assert all(re.fullmatch(pattern, got.text) for got in gots), gots

    return check


def slate(separator: str = "\n", among: Sequence[str] = TITLES, key: Callable[[str], Any] | None = None) -> Check:
    def check(gots: Sequence[Got]) -> None:
        for got in gots:
            texts = got.text.split(separator)
            assert len(set(texts)) == len(texts) == 3
            assert set(texts) <= set(among)
            if got.items is not NO_ITEM:
                assert [item["text"] for item in got.items] == texts
                keys = [key(text) if key else KEYS[TITLES.index(text)] for text in texts]
                assert [item["key"] for item in got.items] == keys

    return check


def inside(pattern: str, path: str | None = None, **more: Any) -> Check:
    """The one film in a text of this pattern."""

    def check(gots: Sequence[Got]) -> None:
        for got in gots:
            (film,) = re.fullmatch(pattern, got.text, re.DOTALL).groups()  # type: ignore[union-attr]
            film = json.loads(f'"{film}"') if path else film
            assert film in TITLES
            if got.items is not NO_ITEM:
                key = KEYS[TITLES.index(film)]
                said = {"text": film, "set": "titles", "key": key, "keys": [key], **({"path": path} if path else {})}
                assert got.items == [said | more]

    return check


def ranked(
    n: int, *, among: Sequence[str] = TITLES, proven: bool | None = None, shares: bool = False, version: bool = False,
    drawn: int = 0,
) -> Check:  # fmt: skip
    def check(gots: Sequence[Got]) -> None:
        assert [got.item["rank"] for got in gots] == [*range(1, n + drawn + 1)]
        assert ["explored" in got.item for got in gots] == [False] * n + [True] * drawn
        assert len({got.text for got in gots}) == n + drawn
        gots = gots[:n]
        scores = [got.item["score"] for got in gots]
        assert scores == sorted(scores, reverse=True)
        assert len({got.text for got in gots} & set(among)) == n
        keys = KEYS if among is not COLOURS else range(3)
        everywhere = TITLES if among is not COLOURS else COLOURS
        for got in gots:
            assert got.item["keys"] == [got.item["key"]] == [keys[everywhere.index(got.text)]]
            assert got.item["passes"] >= got.item["rounds"] >= 1
        assert not version or all(len(got.item["item_set_version"]) == 32 for got in gots)
        assert proven is None or {got.item["proven"] for got in gots} == {proven}
        assert not shares or sum(map(math.exp, scores)) <= 1 + 1e-3

    return check


def listed(n: int, count: int = 1, among: Sequence[str] = TITLES) -> Check:
    """Lists of `n` items after thoughts; if it is 0, thoughts that do not end. count: of choices."""

    def check(gots: Sequence[Got]) -> None:
        assert len(gots) == count
        for got in gots:
            assert re.fullmatch("(station)+", got.text)
            if n:
                items = [Got(one["text"], one) for one in got.items]
                ranked(n, among=among)(items)
            else:
                assert got.items is None

    return check


def drawn(n: int, *, distinct: bool = False, exact: bool = True, importance: bool = False) -> Check:
    def check(gots: Sequence[Got]) -> None:
        assert [got.item["draw"] for got in gots] == [*range(1, n + 1)]
        assert {got.text for got in gots} <= set(TITLES)
        assert not distinct or len({got.text for got in gots}) == n
        assert all(got.item["key"] == KEYS[TITLES.index(got.text)] for got in gots)
        assert exact is all(got.item["exact"] for got in gots)
        assert all(got.item["logprob"] < 0 and got.item["passes"] >= 1 for got in gots)
        assert exact or importance or all(0 < got.item["open"] <= 1 for got in gots)
        assert not importance or all(0 < got.item["weight"] <= 1 and got.item["candidates"] for got in gots)

    return check
