"""The random sets that every path is compared on."""

from __future__ import annotations

from hypothesis import strategies as st


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
