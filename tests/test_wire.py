"""What requests carry of their sets: from the front end to the engine, and on to a worker."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

import itemset
from itemset.errors import ItemSetError
from itemset.masking.arena import Arena, arena_bytes, room_for
from itemset.serving.catalogue import Catalogue, InlineSet
from itemset.serving.config import StaticConfig, Words
from itemset.serving.front.request import ItemRequest
from itemset.serving.front.request_fields import DrawOptions
from itemset.serving.front.selections import Chosen
from itemset.serving.wire import EngineRequest, ListResult, ListSpec, NoList, SetRef, name_of, read

ITEMS = [[1, 2], [3], [1, 2], [4, 5, 6], [4, 5, 7], [8]]
KEYS = ["a", "b", "c", "d", "e", "f"]


class Process:
    """A front end, with its catalogue."""

    def __init__(self, config: StaticConfig) -> None:
        self.catalogue = Catalogue(config)
        self.chosen = Chosen(self.catalogue, config, Words("", "", "", ""))

    def get(self, name: str = "films", **selection: Any) -> InlineSet:
        return self.chosen.get(selection, self.catalogue.reference(name))

    def ref(self, name: str = "films", **selection: Any) -> SetRef:
        made = self.get(name, **selection)  # which a request holds until it is sent
        return self.catalogue.made(made.reference).ref


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StaticConfig:
    path: Path = tmp_path_factory.mktemp("sets") / "films.itemset"
    days = [date(2020, 1, day) for day in range(1, 7)]
    itemset.build(ITEMS, keys=KEYS, attributes={"year": [1, 2, 2, 2, 1, 2], "day": days}).save(path)
    return StaticConfig.of({"item_sets": {"films": str(path)}})


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
    ({"item_filter": {"year": 2}}, [["c"], ["b"], ["d"], ["f"]]),
    ({"item_filter": {"year": 2}, "exclude_keys": ["d"]}, [["c"], ["b"], ["f"]]),
    ({"item_filter": {"year": 2, "day": {"$lte": "2020-01-04"}}, "exclude_keys": ["b"]}, [["c"], ["d"]]),
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
        made, sent_here = front.get(**request).item_set, front.ref(**request)
        for receiver in (engine, Catalogue(config)):
            found = receiver.receive(sent_here).item_set
            assert sorted(found.items()) == sorted(made.items())
            assert found.digest == made.digest
            if isinstance(made, itemset.select.views.View):
                assert found.base is not None
                assert made.base is not None
                assert found.base.digest == made.base.digest
        if sent_here.index is not None:
            kept = engine.receive(sent_here)
            resident = arena.plan.acquire(kept.item_set)
            below = arena.view(resident.below[-1][0]) if resident.below else None
            held = below is not None and below.digest == kept.item_set.base.digest  # type: ignore[union-attr]
            sent = SetRef(sent_here.reference, sent_here.index, None if held else sent_here.base)
            at_worker = engine.receive(sent, below, keep=False).item_set
            arena.place(at_worker, resident.number, resident.start, resident.below)
            assert arena.holds(made.digest, resident.number, resident.start)
            assert all(arena.view(number) is not None for number, _ in resident.below[1:])


BOOSTS: list[dict[str, Any]] = [
    {"boost": {"year": 0.5}},
    {"boost_keys": {"c": 1.5, "e": -2, "nobody": 1}},
    {"boost": {"year": -1, "day": 0.01}, "boost_keys": {"b": 3}},
]


@pytest.mark.parametrize("temperature", [1, 2])
@pytest.mark.parametrize("boosts", BOOSTS)
def test_a_steered_set_arrives_as_it_was_made(config: StaticConfig, boosts: dict[str, Any], temperature: float) -> None:
    """With its boosts, and with all that a filter and keys leave of it: in an engine, and in a worker's arena."""
    front, engine = Process(config), Catalogue(config)
    arena = Arena(arena_bytes(engine.registered.values(), 50 * room_for(engine.registered["films"])))
    arena.acquire(engine.registered["films"])
    digests = set[str]()
    for selection in ({}, *(request for request, _ in REQUESTS)):
        asked = ItemRequest("films", None, DrawOptions(2, temperature=temperature), selection | boosts)
        made = front.get(**asked.selection)
        if temperature > 1:
            made = front.chosen.tempered(made, asked)
        found = engine.receive(made.ref, keep=False).item_set
        assert sorted(found.items()) == sorted(made.item_set.items())
        assert found.digest == made.item_set.digest
        items = sorted(found.items())
        np.testing.assert_array_equal(found.boosts_of(items), made.item_set.boosts_of(items))
        assert found.boosts_of(items).any() or selection
        deep, below = 0, found
        while below.base is not None:
            deep, below = deep + 1, below.base
        assert deep <= 2  # `Arena.use` knows no more
        number = arena.acquire(found)
        assert arena.most_boost(number) == made.item_set.most_boost or not made.item_set.is_steered
        digests.add(found.digest)
    assert len(digests) >= 8


def test_a_filter_travels_as_a_digest_and_bits(config: StaticConfig) -> None:
    """Whatever it says, and whatever is left out beside it; also a query that JSON cannot hold."""
    front = Process(config)
    for query in ({"year": 2, "day": {"$ne": f"2020-02-02{'':90000}"[:10]}}, {"year": MappingProxyType({"$gt": 1})}):
        bits = front.get(item_filter=query).index
        for beside in ({}, {"exclude_keys": ["b"]}, {"exclude_keys": ["d"]}):
            sent = front.ref(item_filter=query, **beside)
            assert (sent.base or sent).index is bits
            assert not beside or len(sent.reference) + len(sent.index or b"") < len(bits) + 300
            assert name_of(sent.reference) == "films"
    assert front.get(item_filter={"year": 2}, exclude_keys=["b"]).base is front.get(item_filter={"year": 2})


BRINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "values": lambda i: {"item_filter": {"n": {"$in": [*range(i, i + 9_999)]}}},
    "text": lambda i: {"item_filter": {"name": {"$ne": f"{i:-<400000}"}}},
    "excluded": lambda i: {"exclude_keys": [*range(i, i + 10_000)]},
    "excluded from a filter": lambda i: {"item_filter": {"n": {"$gte": i}}, "exclude_keys": [*range(i, i + 5_000)]},
    "alone": lambda i: {"only_keys": [*range(i, i + 10_000)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("brings", BRINGS.values(), ids=BRINGS)
def test_all_that_is_kept_of_what_requests_chose_is_counted(brings: Any, tmp_path: Path) -> None:
    """In a front end and in an engine, in bytes: and no more of it is kept than the limit says."""
    items = [[1 + i // 200, 1 + i % 200] for i in range(20_000)]
    attributes = {"n": [*range(20_000)], "name": [f"name {i % 7}" for i in range(20_000)]}
    itemset.build(items, keys=range(20_000), attributes=attributes).save(tmp_path / "films.itemset")
    limit = 1_000_000
    options = {"item_sets": {"films": str(tmp_path / "films.itemset")}, "inline_set_host_memory": limit}
    config = StaticConfig.of(options)
    front, engine = Process(config), Catalogue(config)
    engine.receive(front.ref(**brings(9_000)))  # what is loaded and made at the first time

    def kept() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before, counted = kept(), front.catalogue.inline_bytes + engine.inline_bytes
        for i in range(8):
            engine.receive(front.ref(**brings(i)))
        grown = kept() - before
        assert grown <= front.catalogue.inline_bytes + engine.inline_bytes - counted
        for i in range(8, 36):
            engine.receive(front.ref(**brings(i)))
        assert kept() - before <= 2 * limit
    finally:
        tracemalloc.stop()
    assert max(front.catalogue.inline_bytes, engine.inline_bytes) <= limit


def test_lists_of_keys_carry_no_bits(config: StaticConfig) -> None:
    front = Process(config)
    assert front.ref(exclude_keys=["a"]).base is None
    assert front.ref(item_filter={"year": 2}, only_keys=["b", "d"]).base is None
    assert front.ref(exclude_keys=["nobody"]) == SetRef(front.catalogue.reference("films"))


CARRIED = [
    EngineRequest(SetRef("inline:ab", b"\x00index", SetRef("view:cd", b"bits")), weighed="return_set_weight"),
    EngineRequest(SetRef("films"), ListSpec(3, 8, 2, without_end=True, races=(-(2**63), 7), temperature=0.5)),
    EngineRequest(grammar="\0grammar", sets=[SetRef("a", b"b"), SetRef("c")]),
    EngineRequest(SetRef("films"), place=(1, 16, "digest", -1, ((2, 32),))),
]


@pytest.mark.parametrize("carried", CARRIED)
def test_what_a_request_carries_survives_the_engines_own_messages(carried: EngineRequest) -> None:
    """As it is, and by msgpack and pickle; by JSON, with the sets beside it."""
    for sent in (
        carried,
        msgspec.msgpack.decode(msgspec.msgpack.encode({"item_set_wire": carried}))["item_set_wire"],
        pickle.loads(pickle.dumps(carried)),
    ):
        assert read({"item_set_wire": sent}) == carried
    sent = carried.json()
    assert [msgspec.json.decode(one, type=SetRef) for one in sent["item_set_wire_sets"]] == carried.refs
    named = read(sent)
    assert named is not None
    assert [one.index for one in named.refs] == [None] * len(carried.refs)
    back = {"item_set": carried.item_set} if carried.item_set else {"sets": carried.sets}
    assert named.but(**back) == carried
    assert read(None) is read({"others": 1}) is None


def test_the_message_of_a_batch_has_a_set_once() -> None:
    """However many of its prompts have it, and if they have several in turn."""
    sets = [SetRef(f"inline:{i}", bytes([i]) * 100_000) for i in range(3)]
    prompts = [EngineRequest(sets[i % 3]).json() for i in range(60)]
    assert len(pickle.dumps(prompts)) < 3 * 140_000 + 60 * 200


def test_a_version_that_is_gone_is_named(config: StaticConfig) -> None:
    with pytest.raises(ItemSetError, match="version 4f3a of item set 'films' is no longer loaded: retry the request"):
        Catalogue(config).receive(SetRef("version:4f3a@films"), keep=False)


def test_a_refused_list_is_read_back() -> None:
    for reason in NoList:
        result = ListResult(reason=reason, detail="its 9 rows")
        assert msgspec.json.decode(msgspec.json.encode(result), type=ListResult) == result
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode("another error", type=ListResult)
