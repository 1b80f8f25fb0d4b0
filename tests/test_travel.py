"""What requests carry of their sets: from the front end to the engine, and on to a worker."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import itemset
from itemset.masking.arena import Arena, arena_bytes, room_for
from itemset.serving.admission import Words
from itemset.serving.catalogue import Catalogue, InlineSet, name_of
from itemset.serving.chosen import Chosen
from itemset.serving.config import StaticConfig
from itemset.serving.request import ItemRequest
from itemset.serving.travel import Sender, arrived, opened
from itemset.serving.words import FILTERED, INDEX, REFERENCE

ITEMS = [[1, 2], [3], [1, 2], [4, 5, 6], [4, 5, 7], [8]]
KEYS = ["a", "b", "c", "d", "e", "f"]


class Process:
    """A front end, with its catalogue."""

    def __init__(self, config: StaticConfig, engines: int = 1) -> None:
        self.catalogue = Catalogue(config)
        self._chosen = Chosen(self.catalogue, config, Words("", "", "", "", ""))
        self._sender = Sender(self.catalogue, engines=engines)

    def get(self, name: str = "films", **selection: Any) -> InlineSet:
        return self._chosen.get(ItemRequest(name, **selection), self.catalogue.reference(name))

    def carried(self, name: str = "films", **selection: Any) -> dict[str, Any]:
        made = self.get(name, **selection)  # which a request holds until it is sent
        return self._sender.carried(made.reference)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StaticConfig:
    path: Path = tmp_path_factory.mktemp("sets") / "films.itemset"
    days = [date(2020, 1, day) for day in range(1, 7)]
    itemset.build(ITEMS, keys=KEYS, attributes={"year": [1, 2, 2, 2, 1, 2], "day": days}).save(path)
    return StaticConfig.of({"item_sets": {"films": str(path)}, "item_views": {"new": 'films: {"year": 2}'}})


REQUESTS: list[tuple[dict[str, Any], list[list[str]]]] = [
    ({"exclude_keys": ["a"]}, [["c"], ["b"], ["d"], ["e"], ["f"]]),
    ({"exclude_keys": ["c"]}, [["a"], ["b"], ["d"], ["e"], ["f"]]),
    ({"exclude_keys": ["nobody"]}, [["a", "c"], ["b"], ["d"], ["e"], ["f"]]),
    ({"item_filter": {"year": 1}}, [["a"], ["e"]]),
    ({"item_filter": {"year": 1}, "exclude_keys": ["e"]}, [["a"]]),
    ({"item_filter": {"year": 1}, "exclude_keys": ["b"]}, [["a"], ["e"]]),
    ({"item_filter": {"year": 1}, "exclude_keys": ["e"], "only_keys": ["a", "e"]}, [["a"]]),
    ({"only_keys": ["c"]}, [["c"]]),
    ({"only_keys": ["a", "c"], "exclude_keys": ["a"]}, [["c"]]),
    ({"name": "new", "item_filter": {"year": {"$gt": 0}}}, [["c"], ["b"], ["d"], ["f"]]),
    ({"name": "new", "exclude_keys": ["d"]}, [["c"], ["b"], ["f"]]),
    ({"name": "new", "item_filter": {"day": {"$lte": "2020-01-04"}}, "exclude_keys": ["b"]}, [["c"], ["d"]]),
]


def test_the_answer_to_a_request_names_the_keys_that_it_left(config: StaticConfig) -> None:
    """Also if the same items are left of another request."""
    front = Process(config)
    for _ in range(2):
        for request, keys in REQUESTS:
            seen = front.get(**request).item_set
            assert seen.keys_of(sorted(seen.items())) == keys, request


def test_what_arrives_is_what_was_sent(config: StaticConfig) -> None:
    """In an engine that has kept all or nothing, and in a worker, which keeps what is in its arena."""
    front, engine = Process(config), Catalogue(config)
    whole = engine.registered["films"]
    arena = Arena(arena_bytes(engine.registered.values(), 50 * room_for(whole)))
    for item_set in engine.registered.values():
        arena.acquire(item_set)
    for request, _ in [*REQUESTS, *REQUESTS]:
        made, carried = front.get(**request).item_set, front.carried(**request)
        for receiver in (engine, Catalogue(config)):
            kept = arrived(receiver, carried)
            found = kept.item_set if kept else receiver[carried[REFERENCE]]
            assert sorted(found.items()) == sorted(made.items())
            assert found.digest == made.digest
            if isinstance(made, itemset.views.View):
                assert found.base is not None
                assert made.base is not None
                assert found.base.digest == made.base.digest
        if kept := arrived(engine, carried):
            resident = arena.plan.acquire(kept.item_set)
            below = arena.view(resident.below[-1][0]) if resident.below else None
            held = below is not None and below.digest == kept.item_set.base.digest  # type: ignore[union-attr]
            own_filter = {FILTERED: [None, kept.own_filter.index]} if kept.own_filter else {}
            sent = {key: carried[key] for key in (REFERENCE, INDEX) if key in carried} | ({} if held else own_filter)
            at_worker = opened(engine.versions, sent, below)
            arena.place(at_worker, resident.number, resident.start, resident.below)
            assert arena.holds(made.digest, resident.number, resident.start)
            assert all(arena.view(number) is not None for number, _ in resident.below[1:])


def test_the_bits_of_a_filter_go_once(config: StaticConfig) -> None:
    """Whatever is left out beside it; and again once the front end itself has had to make it again."""
    front, year = Process(config), {"item_filter": {"year": 2}}
    first = front.get(**year)  # held, as what many requests ask for would be
    carried = [
        front.carried(**year, exclude_keys=["b"]),
        front.carried(**year, exclude_keys=["d"]),
        front.carried(**year),
    ]
    assert [one[FILTERED][1] is not None for one in carried] == [True, False, False]
    assert [len(one.get(INDEX, b"")) < len(first.index) + 100 for one in carried] == [True] * 3
    assert {one[FILTERED][0] for one in carried} == {'{"year": 2}'}
    assert {name_of(one[REFERENCE]) for one in carried} == {"films"}
    assert front.get(**year, exclude_keys=["b"]).filter is first
    assert front.get(**year, exclude_keys=["b"]).item_set.base is first.item_set


def test_bits_always_go_to_one_of_several_engines_and_without_a_query(config: StaticConfig) -> None:
    several = Process(config, engines=2)
    assert all(several.carried(item_filter={"year": 2})[FILTERED][1] for _ in range(3))
    offline = Process(config)  # a query that JSON cannot hold
    after = {"year": MappingProxyType({"$gt": 1})}
    for _ in range(2):
        query, bits = offline.carried(item_filter=after)[FILTERED]
        assert query is None
        assert bits


def test_lists_of_keys_carry_no_bits(config: StaticConfig) -> None:
    front = Process(config)
    assert FILTERED not in front.carried(exclude_keys=["a"])
    assert FILTERED not in front.carried("new", exclude_keys=["d"])
    assert FILTERED not in front.carried(item_filter={"year": 2}, only_keys=["b", "d"])
    assert front.carried(exclude_keys=["nobody"]) == {REFERENCE: front.catalogue.reference("films")}
