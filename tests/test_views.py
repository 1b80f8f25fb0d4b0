"""Views against the dict trie of the items that are left."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie, prefixes
from strategies import item_sets
from views import KINDS, made

import itemset
from itemset.embedded.holes import Items
from itemset.masking.arena import Arena, ArenaFullError, room_for
from itemset.masking.batch import ALIVE
from itemset.select.views import View, view_from_bytes
from itemset.trie.walk import DEAD

REGIONS = ["DE", "AT", "CH"]


def check(seen: itemset.ItemSet, left: list[tuple[int, ...]], all_items: list[tuple[int, ...]]) -> None:
    """What may follow every prefix of all items, and which of them are items of the view."""
    expected = {prefix: (children, ends) for prefix, children, ends in prefixes(dict_trie(left))}
    for prefix in {item[:i] for item in all_items for i in range(len(item) + 1)}:
        if prefix in expected:
            children, ends = seen.children(prefix)
            assert (children.tolist(), ends) == expected[prefix]
        else:
            with pytest.raises(itemset.ItemSetError, match="no item starts with"):
                seen.children(prefix)
    assert sorted(map(tuple, seen.items())) == sorted(left)
    assert len(seen) == len(left)
    assert [item for item in all_items if seen.find(item)] == [item for item in all_items if item in set(left)]


@settings(max_examples=40, deadline=None)
@given(items=item_sets(), kind=st.sampled_from(KINDS))
def test_a_view_has_what_is_left(items: list[list[int]], kind: str) -> None:
    seen = made(items, kind)
    check(seen, sorted(set(map(tuple, items))), [tuple(item) for item in seen.whole.items()])
    if isinstance(seen, View):
        again = view_from_bytes(seen.base, seen.to_bytes())
        check(again, sorted(set(map(tuple, items))), [tuple(item) for item in seen.whole.items()])
        assert again.digest == seen.digest != seen.whole.digest


@settings(max_examples=40, deadline=None)
@given(items=item_sets(), kind=st.sampled_from(KINDS), order=st.randoms(use_true_random=False))
def test_items_that_are_given_one_after_another(items: list[list[int]], kind: str, order: Any) -> None:
    """As slates give them: what may follow is always what is left."""
    seen = made(items, kind)
    left = sorted(set(map(tuple, items)))
    walk = Items(seen)
    for item in order.sample(left, len(left))[:-1][:20]:
        left.remove(item)
        walk = walk.without(item)
        expected = {prefix: (children, ends) for prefix, children, ends in prefixes(dict_trie(left))}
        row = np.empty(-(-(1 + max(map(max, items))) // 32), np.int32)
        for prefix in {(), item, *(item[:i] for i in range(len(item)))}:
            state = functools.reduce(lambda state, token: walk.step(state, token) if state != DEAD else DEAD, prefix, 0)
            if prefix not in expected:
                assert state == DEAD or not walk.ends(state)
                continue
            walk.fill(state, row)
            bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            assert (bits, walk.ends(state)) == expected[prefix]


@settings(max_examples=60, deadline=None)
@given(items=item_sets(), data=st.data())
def test_filters_exclusions_and_candidates_by_key(items: list[list[int]], data: Any) -> None:
    """Equal items share their keys: one stays while one of its keys does, and has the keys that pass."""
    rows = range(len(items))
    regions = [REGIONS[i % 3] for i in rows]
    keys = data.draw(st.sampled_from([[f"key {i}" for i in rows], [7 * i - 3 for i in rows]]))
    halves = [i % 2 == 0 for i in rows]
    films = itemset.build(items, keys=keys, attributes={"region": regions, "half": halves})
    half = data.draw(st.booleans())  # a view that is asked for a part of it
    wanted = data.draw(st.sampled_from([None, ["DE"], ["DE", "CH"]]))
    without = data.draw(st.none() | st.lists(st.sampled_from(keys), max_size=10))
    only = data.draw(st.none() | st.lists(st.sampled_from(keys), max_size=10))
    left = [
        i for i in rows
        if (not half or halves[i])
        and (wanted is None or regions[i] in wanted)
        and (without is None or keys[i] not in without)
        and (only is None or keys[i] in only)
    ]  # fmt: skip
    options: dict[str, Any] = {
        "item_filter": None if wanted is None else {"region": {"$in": wanted}},
        "exclude_keys": None if without is None else [*without, "none"][: len(without)],
        "only_keys": only,
    }
    base = itemset.view(films, {"half": True}) if half else films
    if not left:
        with pytest.raises(itemset.ItemSetError, match="no item is left: "):
            itemset.view(base, **options)
        return
    seen = itemset.view(base, **options)
    if isinstance(seen, View) and seen is not base:
        below = seen.base if seen.base in (base, base.whole) else view_from_bytes(base, seen.base.to_bytes())
        again = view_from_bytes(below, seen.to_bytes())
        assert sorted(again.items()) == sorted(seen.items())
        assert again.digest == seen.digest
    if data.draw(st.booleans()):  # one after the other, in any order: views of views
        steps = data.draw(st.permutations([name for name, given in options.items() if given is not None]))
        steps = sorted(steps, key=lambda name: name == "only_keys")  # what that gives has no attributes
        seen = functools.reduce(lambda below, name: itemset.view(below, **{name: options[name]}), steps, base)
    check(seen, sorted({tuple(items[i]) for i in left}), [tuple(item) for item in films.items()])
    for i in left:
        same = [keys[k] for k in left if items[k] == items[i]]
        assert seen.keys_of([items[i]]) == [same]
        told = [{"half": halves[k], "region": regions[k]} for k in left if items[k] == items[i]]
        assert seen.attributes_of([items[i]], ["half", "region"]) == [told]
        assert list(seen.lookup([items[i]])) == same[:1]
        assert (seen.find(items[i]) or ("",))[0] == same[0]
        assert seen.tokens([keys[i]]) == [items[i]]
    for i in set(rows) - set(left):
        with pytest.raises(itemset.ItemSetError, match="no item"):
            seen.tokens([keys[i]])


def films() -> itemset.ItemSet:
    items = [[1, 2, 3], [1, 2, 4], [1, 5], [6], [6, 7], [8, 9, 9, 9]]
    attributes = {"year": [1999, 2001, 2001, 2010, None, 2020], "region": ["DE", "AT", "DE", "DE", "DE", "CH"]}
    return itemset.build(items, keys=[f"film {i}" for i in range(6)], attributes=attributes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"item_filter": {"region": "FR"}}, 'no item is left: "region" $eq "FR" leaves 0'),
        ({"item_filter": {"regoin": "DE"}}, 'there is no attribute "regoin"'),
        ({"exclude_keys": [f"film {i}" for i in range(6)]}, "no item is left: exclude_keys leaves 0 of the 6 items"),
        ({"only_keys": ["film 9"]}, "no item is left: none of only_keys is a key of the"),
        ({"only_keys": "film 1"}, "keys must be a list, not 'film 1'"),
        ({"exclude_keys": [3]}, "the keys of this set are strings, not integers such as 3"),
        ({"exclude_keys": ["film 1", 3]}, "keys must be all integers or all strings"),
        ({"exclude_keys": [2**63]}, "a key is an integer of more than 64 bits: give such keys as strings"),
        ({"only_keys": [2**64]}, "a key is an integer of more than 64 bits"),
        ({"only_keys": [10**400]}, "a key is an integer of more than 64 bits"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_said(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(itemset.ItemSetError) as error:
        itemset.view(films(), **options)
    assert sentence in str(error.value)


def test_views_of_views_stand_on_a_filter_at_most() -> None:
    """An arena waits for the copies of a view, of what it stands on, and of what that stands on."""
    first = itemset.view(itemset.view(films(), {"region": "DE"}), exclude_keys=["film 0"])
    second = itemset.view(first, exclude_keys=["film 2"])
    third = itemset.view(second, {"year": {"$exists": True}})
    assert [one.items() for one in (second, third)] == [[[6, 7], [6]], [[6]]]
    assert second.base is first.base
    assert third.base is first.whole
    with pytest.raises(itemset.ItemSetError, match=r'"region" \$eq "DE" leaves 2, "year" \$gt 2010 leaves 0'):
        itemset.view(second, {"region": "DE", "year": {"$gt": 2010}})


def test_a_view_reads_where_its_set_stands_now() -> None:
    """Not where it stood before its memory was given away."""
    whole, other = (itemset.build(np.random.default_rng(i).integers(0, 500, (300, 4))) for i in range(2))
    seen = itemset.view(whole, exclude_keys=[0])
    arena = Arena(2 * room_for(whole), max_sets=4)
    arena.place(whole, 0, 0)  # as a plan may, that has forgotten the set and found another place for it
    arena.place(whole, 1, room_for(whole))
    arena.place(other, 2, 0)
    arena.place(seen, 3, 2 * room_for(whole) - 128)
    assert torch.equal(arena.sets[3, :ALIVE], arena.sets[1, :ALIVE])


def test_a_view_is_not_saved(tmp_path: Any) -> None:
    """Nor what `only_keys` gives, whose attributes are those of its set."""
    for options in ({"item_filter": {"region": "DE"}}, {"only_keys": films().keys.to_pylist()[:2]}):
        seen = itemset.view(films(), **options)
        with pytest.raises(itemset.ItemSetError, match="cannot be saved: save the set itself"):
            seen.save(tmp_path / "view.itemset")
        with pytest.raises(itemset.ItemSetError, match="cannot be updated: update the set itself"):
            seen.updated([[5]])


def test_exclusions_upon_exclusions_are_one() -> None:
    """As many as one likes: each stands on the whole set, and goes to another process."""
    seen: itemset.ItemSet = itemset.build([[i] for i in range(2_000)])
    for i in range(0, 2_000, 2):
        seen = itemset.view(seen, exclude_keys=[i])
    for one in (seen, pickle.loads(pickle.dumps(seen))):
        assert one.items() == [[i] for i in range(1, 2_000, 2)]
        assert one.lookup([[3]]).tolist() == [3]
        with pytest.raises(itemset.ItemSetError, match="no item of the view has the key 4"):
            one.tokens([4])


def test_a_damaged_view_is_refused() -> None:
    whole = films()
    data = bytearray(itemset.view(whole, {"region": "DE"}).to_bytes())
    data[-1] ^= 1
    with pytest.raises(itemset.ItemSetError, match="does not match its checksum"):
        view_from_bytes(whole, bytes(data))


def test_an_arena_holds_the_bits_of_a_view_alone() -> None:
    matrix = np.random.default_rng(0).integers(0, 500, (20_000, 4))
    whole = itemset.build(matrix, attributes={"half": np.arange(20_000) % 2 == 0})
    seen = itemset.view(whole, {"half": True})
    without = itemset.view(seen, exclude_keys=np.arange(0, 2_000, 2))
    arena = Arena(room_for(without), max_sets=3)
    number = arena.acquire(without)
    used = [resident.nbytes for resident in arena.plan.residents]
    edges, nodes = len(whole.trie.tables.labels), len(whole.trie.tables.row_offsets) - 1
    assert used[1] < edges / 8 + nodes / 8 + 512
    assert used[2] < 4 * 1_000 + 512
    with pytest.raises(ArenaFullError):
        arena.acquire(itemset.build([[1]]))
    arena.release(number)
    again = arena.acquire(itemset.build([[1]]))  # what nobody uses makes room, the view before what is below it
    assert len(arena.plan.residents) == 3
    arena.release(again)


def test_ten_thousand_exclusions_take_no_memory_beyond_the_list() -> None:
    items, texts = np.random.default_rng(0).integers(0, 2_000, (100_000, 4)), [f"é{i}" for i in range(100_000)]
    for keys in (range(100_000), texts):
        whole = itemset.build(items, keys=keys)
        seen = itemset.view(whole, exclude_keys=keys[:10_000])
        assert seen.nbytes <= 4 * 10_000
        assert len(seen.to_bytes()) < 4 * 10_000 + 1_000
        gone = whole.tokens(keys[:10_000])
        assert gone == items[:10_000].tolist()
        assert len(seen) == len(whole) - len(set(map(tuple, gone)))


@pytest.mark.parametrize("as_key", [int, str])
def test_a_key_of_most_items_is_found_in_one_step_an_item(as_key: Any) -> None:
    """With a step for each pair of them, this would take minutes."""
    items = np.arange(600_000).reshape(-1, 2)
    owners = [as_key(i % 100 if i % 3 == 0 else 7) for i in range(len(items))]
    whole = itemset.build(items, keys=owners)
    places = np.flatnonzero([key == as_key(7) for key in owners])
    found = whole._keys.places_of([as_key(7), as_key(1_000), as_key(7)])
    assert np.array_equal(found, places)
    assert np.array_equal(whole._keys.places_of([as_key(9)]), np.arange(9, len(items), 300))
    assert (
        itemset.view(whole, exclude_keys=[as_key(7)]).items()
        == items[np.delete(np.arange(len(items)), places)].tolist()
    )


def test_a_view_that_came_with_a_request_reads_nothing_of_the_whole_set():
    """A worker opens it between two steps: what only a front end asks for would be read off all tables there."""
    index = itemset.view(_tagged(), {"n": {"$gt": 1}}).to_bytes()
    whole = _tagged()
    one = view_from_bytes(whole, index, "part")
    assert not vars(whole).keys() & {"level_plan", "token_ids"}
    assert "terminal_rank" not in vars(whole.trie.tables)
    assert one.token_ids is whole.token_ids
    assert one.level_plan is whole.level_plan
    assert one.find([5, 7]) is not None


def _tagged() -> itemset.ItemSet:
    return itemset.build([[5, 6], [5, 7], [8]], attributes={"n": [1, 2, 3]})
