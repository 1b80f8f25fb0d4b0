"""Item numbers (`build_trie` gives them): from an item's tokens to its number and back, by the trie alone."""

import numpy as np
from numpy.typing import NDArray

from itemset.errors import AGAIN, ItemSetError
from itemset.trie.pointers import compiled, count_ones, element, first_from, label, load32
from itemset.trie.rows import Rows, grown
from itemset.trie.tables import TERMINAL, Tables, Trie
from itemset.trie.targets import is_leaf, nodes_before
from itemset.trie.walk import END, TAIL, advance, find_edge, follow, is_terminal, tail_token


def numbers_of(tables: Tables, whole: Tables, rows: Rows) -> NDArray[np.int64]:
    """Return each row's item number in the whole set, [N], -1 if it is no item of the set or view of `tables`."""
    out = np.empty(len(rows), np.int64)
    _numbers_of(tables.pointers, whole.pointers, whole.terminal_rank.ctypes.data, *rows.cells[:2], rows.offsets, out)
    return out


def items_at(tables: Tables, numbers: NDArray[np.int64], longest: int) -> Rows:
    """Return the tokens of these items. Raises ItemSetError for more than `longest` tokens, of a damaged index."""
    tokens, offsets = _items_at(tables.pointers, tables.terminal_rank.ctypes.data, numbers, longest)
    lengths = np.diff(offsets)
    if lengths.max(initial=0) > longest:
        raise ItemSetError(
            f"the index is corrupted, item {int(numbers[lengths.argmax()])} has more than {longest:,} tokens: {AGAIN}"
        )
    return Rows(tokens.astype(tables.labels.dtype), offsets)


def token_ids(trie: Trie) -> NDArray[np.int64]:
    """Return every token id that occurs in an item, ascending."""
    tables, ids = trie.tables, 1 << trie.tables.token_bits
    if ids > max(1 << 16, 8 * (len(tables.labels) + trie.tail_tokens)):  # few tokens, some with high ids
        tails = np.empty(trie.tail_tokens, np.uint32)
        _read_tails(tables.pointers, tails)
        return np.unique(np.concatenate((tables.labels, tails))).astype(np.int64)
    seen = np.zeros(ids, np.bool_)
    _mark_tokens(tables.pointers, trie.tail_tokens, seen)
    return np.flatnonzero(seen)


@compiled
def _read_tails(tables, tokens):  # type: ignore[no-untyped-def]
    for position in range(len(tokens)):
        tokens[position] = tail_token(tables, TAIL + position)


@compiled
def _mark_tokens(tables, tail_tokens, seen):  # type: ignore[no-untyped-def]
    """Set seen[token], [ids] bool, for each token of an edge or a tail. Safe whatever the tables hold."""
    for edge in range(tables.edges):
        token = label(tables, edge)
        if token < len(seen):
            seen[token] = True
    for position in range(tail_tokens):
        token = tail_token(tables, TAIL + position)
        if token >= 0:
            seen[token] = True


@compiled
def terminals_before(tables, terminal_rank, node):  # type: ignore[no-untyped-def]
    """Count the nodes before `node` at which an item ends."""
    word = node >> 5
    before = load32(tables.terminal, word) & ((np.int64(1) << (node & 31)) - 1)
    return load32(terminal_rank, word) + count_ones(before)


@compiled
def _numbers_of(tables, whole, terminal_rank, tokens, size, offsets, out):  # type: ignore[no-untyped-def]
    leaves = tables.edges - (tables.nodes - 1)
    for i in range(len(offsets) - 1):
        state, edge = np.int64(0), np.int64(-1)
        for k in range(offsets[i], offsets[i + 1]):
            token = element(tokens, size, k)
            if state >= TAIL:
                state = advance(tables, state, token)
                continue
            edge = find_edge(tables, state, token)
            if edge < 0:
                break
            state = follow(tables, edge)
        out[i] = -1
        if edge < 0:
            continue
        if state == END:
            out[i] = edge - nodes_before(tables, edge)
        elif is_terminal(tables, state):
            out[i] = leaves + terminals_before(whole, terminal_rank, state)


@compiled
def nth_edge(tables, nth, leaf):  # type: ignore[no-untyped-def]
    """Return the nth edge, from 0, that leads to a node (leaf = 0) or does not (leaf = 1), or -1."""
    low, high = np.int64(0), (tables.edges + 31) >> 5
    while high - low > 1:  # the last block with at most `nth` of them before it
        middle = (low + high) >> 1
        before = load32(tables.node_base, middle) - 1
        if leaf:
            before = middle * 32 - before
        if before <= nth:
            low = middle
        else:
            high = middle
    before = load32(tables.node_base, low) - 1
    left = nth - (low * 32 - before if leaf else before)
    end = min(low * 32 + 32, tables.edges)
    for edge in range(low * 32, end):
        if is_leaf(tables, edge) == leaf:
            if left == 0:
                return edge
            left -= 1
    return np.int64(-1)


@compiled
def node_of(tables, edge):  # type: ignore[no-untyped-def]
    """Return the node whose row holds `edge`."""
    return first_from(tables.row_offsets, 4, np.int64(1), tables.nodes, edge + 1) - 1


@compiled
def last_edge(tables, terminal_rank, number):  # type: ignore[no-untyped-def]
    """Return the last edge of an item, -1 if there is none. terminal_rank: address of `Tables.terminal_rank`."""
    leaves = tables.edges - (tables.nodes - 1)
    if number < leaves:
        return nth_edge(tables, number, 1)
    nth = number - leaves
    word = first_from(terminal_rank, 4, np.int64(1), (tables.nodes + 31) >> 5, nth + 1) - 1
    left, node = nth - load32(terminal_rank, word), word * 32
    while node < word * 32 + 31 and not (left == 0 and is_terminal(tables, node)):
        left -= 1 if is_terminal(tables, node) else 0
        node += 1
    return nth_edge(tables, node - 1, 0)


@compiled
def own_entry(tables, edge, number):  # type: ignore[no-untyped-def]
    """Return an item's entry in `Tables.dead` and `.boosted`, by its last edge and its number."""
    ends_at_node = number >= tables.edges - (tables.nodes - 1)
    return np.int64(TERMINAL) + follow(tables, edge) if ends_at_node else edge


@compiled
def _items_at(tables, terminal_rank, numbers, longest):  # type: ignore[no-untyped-def]
    """Return the tokens and offsets of the items; of one that is too long, the last `longest` + 1 tokens."""
    tokens, offsets = np.empty(8 * len(numbers), np.uint32), np.zeros(len(numbers) + 1, np.int64)
    above = np.empty(longest + 1, np.uint32)  # the labels of an item's edges, the last one first
    for i in range(len(numbers)):
        edge, edges, to = last_edge(tables, terminal_rank, numbers[i]), 0, offsets[i]
        state = follow(tables, edge) if edge >= 0 else np.int64(END)
        while edge >= 0 and edges <= longest:
            above[edges] = label(tables, edge)
            edges += 1
            node = node_of(tables, edge)
            parent = nth_edge(tables, node - 1, 0) if node > 0 else np.int64(-1)
            edge = parent if parent < edge else np.int64(-1)
        tokens = grown(tokens, to + edges)
        for k in range(edges):
            tokens[to + k] = above[edges - 1 - k]
        to += edges
        while state >= TAIL and to - offsets[i] <= longest:
            tokens = grown(tokens, to + 1)
            tokens[to] = tail_token(tables, state)
            state, to = advance(tables, state, np.int64(tokens[to])), to + 1
        offsets[i + 1] = to
    return tokens[: offsets[-1]], offsets
