"""The oracle: a dict trie of a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
