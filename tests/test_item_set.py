"""Item sets against the oracle: children, ends, numbers, keys, files; and what is refused."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dict_trie, prefixes
from strategies import item_sets

import itemset
from itemset import ItemSetError, Rows
from itemset.trie import file as index_file
from itemset.trie.keys import Keys

VOCAB = 70


@given(item_sets(VOCAB))
@settings(max_examples=150, deadline=None)
def test_children_and_ends_of_every_prefix(items: list[list[int]]) -> None:
    s = itemset.build(items, vocab_size=VOCAB)
    for before, tokens, ends in prefixes(dict_trie(items)):
        labels, terminal = s.children(before)
        assert labels.tolist() == tokens
        assert terminal is ends


@given(item_sets(VOCAB), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_keys_lead_to_items_and_back(items: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    numbers = list(range(100, 100 + len(items)))
    names = [f"key {n}" for n in numbers]
    places: dict[tuple[int, ...], list[int]] = {}
    for i, item in enumerate(items):
        places.setdefault(tuple(item), []).append(i)
    distinct = [list(item) for item in places]
    random.shuffle(distinct)
    for keys in (list(range(len(items))), numbers, names):
        s = itemset.build(items, keys=None if keys[0] == 0 else keys)
        s = random.choice([s, itemset.from_bytes(s.to_bytes())])
        assert len(s) == len(distinct)
        assert s.duplicates == len(items) - len(distinct)
        assert s.shared == sum(len(equal) > 1 for equal in places.values())
        wanted = [[keys[i] for i in places[tuple(item)]] for item in distinct]
        assert s.keys_of(distinct) == wanted
        assert list(s.lookup(distinct)) == [s.find(item)[0] for item in distinct] == [own[0] for own in wanted]
        assert s.tokens(keys) == items
        assert sorted(s.keys.to_pylist()) == sorted(keys)


def test_what_is_no_item_is_not_found() -> None:
    s = itemset.build([[1, 2], [3, 70_000]])
    assert s.find([1, 2]) == (0, False)
    for tokens in ([], [-1], [1, -100], [1], [1, 2, 2], [1, 1 << 40], [1] * 70_000):
        assert s.find(tokens) is None


def test_keys_cost_nothing_if_no_two_items_are_equal() -> None:
    assert "key_starts" not in itemset.build([[1, 2], [1, 3]]).sections
    assert itemset.build([[1, 2], [1, 2]]).sections["key_starts"] == 8


def test_a_file_without_every_key_opens_as_it_is() -> None:
    """As files were before equal items kept all their keys."""
    s = itemset.build([[1, 2], [3], [1, 2]], keys=["a", "b", "c"])
    folded = itemset.build([[1, 2], [3]], keys=["a", "b"])
    old = itemset.from_bytes(index_file.to_bytes(s._header(), folded._arrays()))
    assert (old.duplicates, old.shared, len(old.keys)) == (1, 0, 2)
    assert old.keys_of([[3], [1, 2]]) == [["b"], ["a"]]


@pytest.mark.parametrize("starts", [[0, 3], [0, 1, 2], [1, 2, 3], [0, 0, 3], [0, 4, 3]])
def test_keys_that_do_not_fit_their_items_are_refused(starts: list[int]) -> None:
    s = itemset.build([[1, 2], [3], [1, 2]])
    data = index_file.to_bytes(s._header(), s._arrays() | {"key_starts": np.array(starts, np.uint32)})
    with pytest.raises(ItemSetError, match="the index is corrupted, its number of items does not fit its keys"):
        itemset.from_bytes(data)


@given(item_sets(VOCAB))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_input_does_not_matter(items: list[list[int]]) -> None:
    assert itemset.build(items).digest == itemset.build(sorted(items)).digest == itemset.build(items[::-1]).digest


def test_prefixes_that_are_no_items_have_no_key() -> None:
    s = itemset.build([[1, 2, 3], [1, 2, 4], [5, 6, 7, 8], [9]])
    for tokens in ([-1], [2**70]):
        with pytest.raises(ItemSetError, match="no item starts with"):
            s.children(tokens)
    for tokens in ([1], [1, 2], [5, 6, 7], [5, 6, 7, 8, 8], [9, 9], [2], [1, 2, 3, 3]):
        with pytest.raises(ItemSetError, match="no item of the set"):
            s.lookup([tokens])
    with pytest.raises(ItemSetError, match="a flat list"):
        s.children([[1, 2]])  # type: ignore[list-item]
    with pytest.raises(ItemSetError, match="put it in a list"):
        s.tokens("7")
    assert list(s.lookup([])) == s.keys_of([]) == s.keys_of(iter([])) == []
    assert s.keys_of(iter([[9], [1, 2, 4]])) == s.keys_of([[9], [1, 2, 4]]) == [[3], [1]]
    with pytest.raises(ItemSetError, match="no item has the key 7"):
        s.tokens([0, 7])


def skewed(length: int, vocab: int) -> np.ndarray:
    """Codes as unequal as in real catalogues: one row below the root holds most of them, half of the rows few."""
    draw, shares = np.random.default_rng(12), np.arange(1, vocab + 1) ** -1.2
    return draw.permutation(vocab)[draw.choice(vocab, (3_000, length), p=shares / shares.sum())]


def even(length: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(length * vocab).integers(0, vocab, (2_000, length))


@pytest.mark.parametrize(
    ("draw", "length", "vocab"),
    [*((even, length, vocab) for length in (1, 3, 8) for vocab in (4, 300, 70_000)), (skewed, 8, 2_048)],
)
def test_matrices_against_the_oracle(draw: Any, length: int, vocab: int) -> None:
    matrix = draw(length, vocab)
    s = itemset.build(matrix, vocab_size=vocab)
    if draw is skewed:
        children = np.diff(s.trie.tables.row_offsets.astype(np.int64))[1:]
        assert children.max() > vocab / 16
        assert np.median(children) < 5
    for before, tokens, ends in prefixes(dict_trie(matrix.tolist())):
        labels, terminal = s.children(before)
        assert (labels.tolist(), terminal) == (tokens, ends)
    rows = s.tokens(s.lookup(matrix))
    assert rows == matrix.tolist()


def test_long_items_and_long_tails() -> None:
    chain = [[7] * n for n in range(1, 301)]  # each a prefix of the next
    long = [[1, *range(2, 5_000)], [1, *range(3, 5_000)], [2] * 3_000]
    for items in (chain, long, chain + long):
        s = itemset.build(items)
        assert s.tokens(list(range(len(items)))) == items
        assert s.lookup(items).tolist() == list(range(len(items)))
    assert itemset.build(chain).children([7] * 299)[1]


def test_a_million_children_under_one_node() -> None:
    tokens = np.random.default_rng(0).permutation(1_000_000)[:, None]
    s = itemset.build(tokens)
    assert s.children()[0].tolist() == list(range(1_000_000))
    assert s.lookup([[999_999]]).tolist() == [int(np.flatnonzero(tokens[:, 0] == 999_999)[0])]


def test_token_ids_at_the_top_of_the_range() -> None:
    top = 2**31 - 2
    s = itemset.build([[top, 0, top], [top, top]])
    assert s.children([top])[0].tolist() == [0, top]
    assert s.children([top, 0])[0].tolist() == [top]


def test_token_ids_are_those_of_the_items() -> None:
    s = itemset.build([[5, 9, 1], [5, 9], [64]])
    assert s.token_ids.tolist() == [1, 5, 9, 64]


def test_a_prefix_costs_no_node_of_its_own() -> None:
    s = itemset.build([[1, 2, 3, 4, 5, 6, 7, 8], [2, 2, 3, 4, 5, 6, 7, 8]])
    assert (s.trie.level_nodes, s.trie.level_edges, s.trie.tail_tokens) == ((1,), (2,), 14)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "the item set is empty"),
        (np.zeros((0, 4), int), "the item set is empty"),
        ([[1], []], "item 1 is empty"),
        (np.zeros((3, 0), int), "item 0 is empty"),
        ([[1], [2, -1]], "item 1 holds token id -1"),
        ([[1], [2, 50]], "item 1 holds token id 50, outside the vocabulary 0..49"),
        ([[1], [2.5]], "must be integers"),
        ([[1], "film"], "item 1 is 'film', not a list of token ids"),
        (["film"], "encode texts with build_text"),
        ("film", "not str"),
        ([[1, [2]]], "must be integers"),
        ([[True]], "must be integers"),
        ([[2**70]], "must be integers"),
        ([[1] * 65_536], "item 0 has 65536 tokens"),
        (np.ones((2, 2)), "must be integers, not float64"),
        (Rows(np.array([1, 2]), np.array([0, 3])), "offsets must ascend"),
    ],
)
def test_bad_items_are_named(items: object, message: str) -> None:
    with pytest.raises(ItemSetError, match=message):
        itemset.build(items, vocab_size=50)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([1], "1 keys for 2 items"),
        ([1, "a"], "all integers or all strings"),
        ([1.5, 2.5], "must be integers or strings, not double"),
        ([1, None], "key 1 is missing"),
        (
            np.array([1, 2**63], np.uint64),
            "all strings: Integer value 9223372036854775808 not in range",
        ),
        ([1, 2**70], "an integer of more than 64 bits: give such keys as strings"),
    ],
)
def test_bad_keys_are_named(keys: list[object], message: str) -> None:
    with pytest.raises(ItemSetError, match=message):
        itemset.build([[1], [2]], keys=keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "limit", "message"),
    [
        ("itemset.trie.tables.MAX_INDEX", 2, "the set needs 3 edges, the limit is 2: split the set"),
        ("itemset.trie.tables.MAX_TAIL_TOKENS", 3, "the set needs 6 tail tokens, the limit is 3"),
        ("itemset.trie.rows.MAX_ITEMS", 2, "3 items are too many, the limit is 2: split the set"),
    ],
)
def test_a_set_too_large_for_its_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, limit: int, message: str
) -> None:
    monkeypatch.setattr(module, limit)
    with pytest.raises(ItemSetError, match=message):
        itemset.build([[1, 2, 3], [2, 3, 4], [3, 4, 5]])


def test_what_an_index_says_of_a_build() -> None:
    made = itemset.build([[1], [2]], vocab_size=np.int64(9))
    assert itemset.from_bytes(made.to_bytes()).vocab_size == 9
    for options in ({"escape": "xml"}, {"prefix": None}):
        with pytest.raises(ItemSetError, match="prefix must be a text and escape json or text"):
            itemset.build([[1]], **options)
    for tokens in (np.arange(5), np.zeros((4, 2), int)):
        with pytest.raises(ItemSetError, match="rows of 2 tokens are one array of all"):
            Rows(tokens, width=2)


def test_the_tokenizers_vocabulary_is_the_limit() -> None:
    class Tokenizer:
        def __len__(self) -> int:
            return 50

    with pytest.raises(ItemSetError, match=r"token id 50, outside the vocabulary 0\.\.49"):
        itemset.build([[50]], tokenizer=Tokenizer())


def test_a_build_makes_no_python_object_an_item() -> None:
    matrix = np.random.default_rng(0).integers(0, 2048, (100_000, 8)).astype(np.uint16)
    itemset.build(matrix[:10])  # compiled code and imports are not the build's
    tracemalloc.start()
    itemset.build(matrix)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * matrix.nbytes


def test_a_key_is_found_without_a_copy_of_all_keys() -> None:
    keys = Keys(pa.array(np.arange(1_000_000)[::-1]))
    tracemalloc.start()
    assert keys.numbers_of([1_000, 3]).tolist() == [998_999, 999_996]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(keys.values)


def test_saving_replaces_at_once_and_leaves_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "films.itemset"
    itemset.build([[1]]).save(path)
    (tmp_path / ".films.itemset.tmp").write_bytes(b"left by a killed build")
    itemset.build([[1], [2]]).save(path)
    assert len(itemset.load(path)) == len(itemset.verify(path)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["films.itemset"]
    with pytest.raises(ItemSetError, match="cannot write"):
        itemset.build([[1]]).save(tmp_path / "missing" / "films.itemset")


def test_damaged_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "films.itemset"
    itemset.build(np.arange(200).reshape(50, 4), keys=[f"film {i}" for i in range(50)]).save(path)
    good = path.read_bytes()

    def refused(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(ItemSetError) as error:
            itemset.load(path)
        assert "films.itemset" in str(error.value)
        return str(error.value)

    assert "not an item-set index" in refused(b"")
    assert "not an item-set index" in refused(b"PK\x03\x04" + good[4:])
    assert "truncated" in refused(good[:20])
    assert "truncated" in refused(good[:-1])
    assert "truncated" in refused(good[:100])
    assert "newer format version 4" in refused(good[:8] + b"\x04" + good[9:])
    assert "older format version 0" in refused(good[:8] + b"\x00" + good[9:])
    assert "header does not match" in refused(good[:60] + b"!" + good[61:])
    assert "header does not match" in refused(good + b"\0")
    for position in range(0, len(good), 97):
        damaged = bytearray(good)
        damaged[position] ^= 16
        path.write_bytes(damaged)
        try:
            assert itemset.load(path).tokens(["film 7"]) == [[28, 29, 30, 31]]  # padding between sections
        except ItemSetError as error:
            assert "films.itemset" in str(error)  # noqa: PT017
    with pytest.raises(ItemSetError, match="no such file"):
        itemset.load(tmp_path / "other")
    with pytest.raises(ItemSetError, match="is a directory"):
        itemset.load(tmp_path)


@pytest.mark.parametrize(
    ("counts", "what"),
    [
        ({"level_nodes": (1,)}, "1 levels of nodes, 2 of edges"),
        ({"level_nodes": (), "level_edges": ()}, "0 levels of nodes, 0 of edges"),
        ({"level_nodes": (1, 0)}, "a level without nodes or edges"),
        ({"token_bits": 32}, "tokens of 32 bits"),
        ({"shortest": 3}, "items of 3 to 2 tokens"),
        ({"tail_tokens": -1}, "-1 tail tokens"),
    ],
)
def test_a_header_that_cannot_be_is_named(counts: dict[str, Any], what: str) -> None:
    s = itemset.build([[1, 2], [1, 3], [4]])
    data = index_file.to_bytes(replace(s._header(), **counts), s._arrays())
    with pytest.raises(ItemSetError, match=f"the index is corrupted, its header counts {what}: build it again"):
        itemset.from_bytes(data)
