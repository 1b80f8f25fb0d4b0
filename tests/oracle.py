"""The oracle: a dict trie of a few lines, and the random sets every path is compared on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

Node = dict  # token -> Node; the key None marks the end of an item


def dict_trie(items: Sequence[Sequence[int]]) -> Node:
    root: Node = {}
    for item in items:
        node = root
        for token in item:
            node = node.setdefault(token, {})
        node[None] = {}
    return root


def prefixes(node: Node, before: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], list[int], bool]]:
    """Every prefix of every item, with the tokens that may follow and whether an item ends there."""
    yield before, sorted(token for token in node if token is not None), None in node
    for token, child in node.items():
        if token is not None:
            yield from prefixes(child, (*before, token))


def item_sets(vocab_size: int = 70, max_items: int = 40) -> st.SearchStrategy[list[list[int]]]:
    """Lists of items: shared prefixes, prefixes of each other, duplicates, one item, one token, a token at the top."""
    small, top = st.integers(0, 3), st.just(vocab_size - 1)
    token = st.one_of(small, st.integers(0, vocab_size - 1), top)
    item = st.one_of(
        st.lists(small, min_size=1, max_size=5),
        st.lists(token, min_size=1, max_size=12),
        st.integers(1, 30).map(lambda n: [1] * n),
    )
    every_token = st.just([[t] for t in range(vocab_size)])
    fixed = st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(small, min_size=n, max_size=n), min_size=1))
    return st.one_of(st.lists(item, min_size=1, max_size=max_items), fixed, every_token)
