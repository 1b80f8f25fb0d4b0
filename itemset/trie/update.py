"""Updates of a set: its items in order, without those that go and with new ones, for the build that there is."""

import numpy as np
from numpy.typing import NDArray

from itemset.errors import AGAIN, ItemSetError
from itemset.trie.numbering import terminals_before
from itemset.trie.pointers import compiled, element, first_edge, label, put_element
from itemset.trie.rows import Distinct, Rows, as_rows, sort_order
from itemset.trie.tables import NONE, Trie
from itemset.trie.targets import is_leaf, node_at, tail_at
from itemset.trie.walk import is_terminal, tail_entry

_FIRST, _EDGE, _END, _NODE, _TAIL = range(5)
"""Of the node on the way to an item: its first, its next and its last edge. Of its level: the next node, the next tail,
-2 before the first."""


def merged(trie: Trie, key_starts: NDArray[np.uint32] | None, stays: NDArray[np.bool_], new: Rows | None) -> Distinct:
    """Return, as `sort_unique` does, the items with a key that stays and the new rows; `order` has the keys' places.

    key_starts, stays: [keys], of the set's keys; the places of the new rows' keys come after these.
    Raises ItemSetError if the tables are not those of a trie: of a damaged file.
    """
    order = NONE if new is None else sort_order(new)
    more = Rows(NONE, np.zeros(1, np.int64)) if new is None else new.take(order)
    rows, keys = trie.items + len(more), len(stays) + len(more)
    dtype = trie.tables.labels.dtype if new is None else np.result_type(trie.tables.labels, new.tokens)
    tokens = np.empty(_tokens_of(trie) + len(more.tokens), dtype)
    width = trie.longest if trie.shortest == trie.longest and (np.diff(more.offsets) == trie.longest).all() else 0
    offsets, lcp = np.zeros(0 if width else rows + 1, np.int64), np.zeros(rows + 1, np.uint16)
    places, starts = np.empty(keys, np.uint32), np.empty(rows + 1, np.uint32)
    levels, owned = np.cumsum([0, *trie.level_nodes]), NONE if key_starts is None else key_starts
    texts = tokens, more.tokens.astype(dtype), np.empty(trie.longest, dtype)
    cursor = np.zeros((5, len(levels)), np.int64)
    cursor[_NODE], cursor[_TAIL] = levels, -2
    moved, rank = order + np.uint32(len(stays)), trie.tables.terminal_rank.ctypes.data
    given = rank, levels, cursor, trie.longest, owned, stays, more.offsets, moved
    at = *(array.ctypes.data for array in texts), tokens.itemsize, len(tokens)
    rows, keys = _merge(trie.tables.pointers, *given, *at, offsets, lcp, places, starts)
    if rows < 0:
        raise ItemSetError(f"the index is corrupted, its tables are no trie: {AGAIN}")
    end = rows * width if width else offsets[rows]
    distinct = as_rows(Rows(tokens[:end], None if width else offsets[: rows + 1], width=width))
    return Distinct(distinct, places[:keys], None if rows == keys else starts[: rows + 1], lcp[: rows + 1])


def _tokens_of(trie: Trie) -> int:
    if trie.shortest == trie.longest:
        return trie.items * trie.longest
    levels, terminal = np.cumsum([0, *trie.level_nodes]), trie.tables.terminal.view(np.uint8)
    ends = np.add.reduceat(np.unpackbits(terminal, count=levels[-1], bitorder="little"), levels[:-1], dtype=np.int64)
    leaves, depth = np.subtract(trie.level_edges, [*trie.level_nodes[1:], 0]), np.arange(len(ends))
    return int(leaves @ (depth + 1) + ends @ depth) + trie.tail_tokens


@compiled
def _merge(  # type: ignore[no-untyped-def]
    tables, terminal_rank, levels, cursor, longest, owned, stays, new_offsets, new_places,
    tokens, new_tokens, path, size, room, offsets, lcp, places, starts,
):  # fmt: skip
    """Fill in what `merged` returns; return how many rows and places that is, -1 for rows if the tables are no trie.

    The items come in their order, with one cursor a level: the next of its nodes, and of the edges of the last one.
    levels: the first node of each, and their end. cursor: [5, levels + 1]. owned: `key_starts`, empty if each item has
    one key. terminal_rank, tokens, new_tokens, path: addresses, but for the first of arrays of `size` bytes a token,
    `room` of them in `tokens`; path has those of an item.
    """
    cursor[_END, 0], cursor[_NODE, 0], last_level = first_edge(tables, 1), 1, cursor.shape[1] - 2
    length, number = -1, 0  # of the item
    leaves, mask = tables.edges - (tables.nodes - 1), (np.int64(1) << tables.token_bits) - 1
    depth, row, place, new, after_new = 0, 0, 0, 0, True
    last, at = 0, 0  # where the row before begins and ends
    shared = 0  # tokens that the item shares with it, unless it is a new one
    while length:
        length = 0
        while depth >= 0 and not length:
            taken = cursor[_EDGE, depth]
            if taken == cursor[_END, depth]:
                depth -= 1
                continue
            token = label(tables, taken)
            if taken > cursor[_FIRST, depth] and token <= element(path, size, depth):
                return -1, place
            shared = min(shared, depth)
            put_element(path, size, depth, token)
            cursor[_EDGE, depth] = taken + 1
            if is_leaf(tables, taken):
                number, length = taken - (cursor[_NODE, depth + 1] - 1), depth + 1
                if cursor[_TAIL, depth] == -2 or tables.target_bytes < 8:  # counted ones of a level follow one another
                    cursor[_TAIL, depth] = tail_at(tables, taken)
                entry = np.int64(0) if cursor[_TAIL, depth] >= 0 else mask + 1
                while entry <= mask:
                    entry = tail_entry(tables, cursor[_TAIL, depth])
                    if entry < 0 or length == longest:
                        return -1, place
                    put_element(path, size, length, entry & mask)
                    length, cursor[_TAIL, depth] = length + 1, cursor[_TAIL, depth] + 1
                continue
            depth += 1
            below = cursor[_NODE, depth]
            if depth >= min(longest, last_level + 1) or below != node_at(tables, taken) or below == levels[depth + 1]:
                return -1, place
            cursor[_NODE, depth], cursor[_END, depth] = below + 1, first_edge(tables, below + 1)
            cursor[_EDGE, depth] = cursor[_FIRST, depth] = first_edge(tables, below)
            if is_terminal(tables, below):
                number, length = leaves + terminals_before(tables, terminal_rank, below), depth
        while new < len(new_places):
            begin, more = new_offsets[new], new_offsets[new + 1] - new_offsets[new]
            k = _shared(new_tokens, begin, path, 0, min(more, length), size)
            if length and (k == length or (k < more and element(new_tokens, size, begin + k) > element(path, size, k))):
                break  # it comes after the item, or equals it
            k = _shared(new_tokens, begin, tokens, last, min(more, at - last), size)
            if row == 0 or k < more or k < at - last:  # the row before is another one
                starts[row], lcp[row] = place, k
                for k in range(more):
                    put_element(tokens, size, at + k, element(new_tokens, size, begin + k))
                row, last, at = row + 1, at, at + more
                if len(offsets):
                    offsets[row] = at
            places[place] = new_places[new]
            place, new, after_new = place + 1, new + 1, True
        if not length:
            break
        keys, rest = place, len(new_places) - new
        if not 0 <= number < (len(owned) - 1 if len(owned) else len(stays)) or row + rest + 1 >= len(lcp):
            return -1, place
        begin, stop = (np.int64(owned[number]), np.int64(owned[number + 1])) if len(owned) else (number, number + 1)
        if at + length + new_offsets[-1] - new_offsets[new] > room or place + stop - begin + rest > len(places):
            return -1, place
        for key in range(begin, stop):
            if stays[key]:
                places[place] = key
                place += 1
        if place == keys:
            continue
        if after_new:
            shared = _shared(path, 0, tokens, last, min(length, at - last), size)
        starts[row], lcp[row] = keys, shared
        for k in range(length):
            put_element(tokens, size, at + k, element(path, size, k))
        row, last, at, shared, after_new = row + 1, at, at + length, longest, False
        if len(offsets):
            offsets[row] = at
    starts[row] = place
    for level in range(1, last_level + 1):
        if cursor[_NODE, level] != levels[level + 1]:
            return -1, place
    return row, place


@compiled
def _shared(one, begin, other, at, most, size):  # type: ignore[no-untyped-def]
    """Return how many tokens two rows share at their beginning, `most` of them at most."""
    k = 0
    while k < most and element(one, size, begin + k) == element(other, size, at + k):
        k += 1
    return k
