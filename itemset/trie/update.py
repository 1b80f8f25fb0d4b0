"""Updates of a trie: some items less, others more, without building the rest again.

Between two changes, in the order of the items, every level of the tables holds the same as before, at another place. So
the new trie consists of *runs* of items, copied level by level, and of *patches* between them: new items, and the
neighbours of each change, whose tails depend on it. Their tables are made as `tables.build_trie` makes those of all
rows. A *place* between two items is the next edge of each level.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.trie import tables as trie_tables
from itemset.trie.jit import compiled
from itemset.trie.numbering import items_at, numbers_of, terminals_before
from itemset.trie.pointers import bit, copy_bits, first_edge, label, put_label, set_bit, store32
from itemset.trie.rows import Distinct, Rows, common_prefixes, grown, sort_unique, token_dtype
from itemset.trie.tables import COUNTS, EDGES, LEAVES, NODES, TAIL_TOKENS, TERMINALS, Trie, build_trie, count, fill
from itemset.trie.targets import is_leaf, next_node, next_tail, nodes_before, put_leaf, tail_at, type_of_targets
from itemset.trie.validate import in_order, lengths_in_order
from itemset.trie.walk import DEAD, END, TAIL, advance, first_from, follow, is_terminal, tail_token, token_runs


class Changed(NamedTuple):
    """A changed trie, and where its items come from.

    members: [items] uint32, for each new item number the old one, or the old number of items plus that of a new row.
    same: [new rows] int64, the old number of each new row that was an item, -1 of the others.
    """

    trie: Trie
    members: NDArray[np.uint32]
    same: NDArray[np.int64]


class _Patches(NamedTuple):
    """P patches of R rows in all, one after another.

    tokens, offsets: the rows, as in `Rows`. sources: [R] uint32, as `Changed.members`.
    first: [P + 1] int64, the first row of each patch; empty if the tables are no trie.
    lcp: [R + P] uint16, for each patch as `sort_unique` returns it, but that its first row is compared with the item
        before the patch, and its end with the item after it.
    places: [2 P + 2, levels] int64, in the old trie: before all items, where each patch begins and ends, after all.
    """

    tokens: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    sources: NDArray[np.uint32]
    first: NDArray[np.int64]
    lcp: NDArray[np.uint16]
    places: NDArray[np.int64]


def change(trie: Trie, terminal_rank: NDArray[np.uint32], gone: NDArray[np.bool_], new: Distinct) -> Changed:
    """Return the trie without the items that are gone, and with the new rows.

    terminal_rank: of `numbering.rank_terminals`. gone: [items], by number; an item that is gone and new stays.
    Raises ValueError if the tables are not those of a trie: of a damaged file.
    """
    with ThreadPoolExecutor(1) as pool:
        consistent = pool.submit(in_order, trie, tails=False)  # the loops below check no index again
        same = numbers_of(
            trie.tables, trie.tables, terminal_rank, new.rows
        )  # this and the next walk safely whatever the tables are
        removed = gone.copy()
        removed[same[same >= 0]] = False
        numbers = np.flatnonzero(removed)
        fresh = np.flatnonzero(same < 0)
        before = items_at(trie.tables, terminal_rank, numbers, trie.longest)
        if not consistent.result():
            raise ValueError("its tables are no trie")
    added = new.rows.take(fresh)
    tokens = np.concatenate((before.tokens, added.tokens))
    offsets = np.concatenate((before.offsets, before.offsets[-1] + added.offsets[1:]))
    sources = np.concatenate((np.full(len(numbers), -1), trie.items + fresh))
    if not len(sources):
        return Changed(trie, np.arange(trie.items, dtype=np.uint32), same)
    changes = sort_unique(Rows(tokens, offsets))
    if changes.order is not None:
        sources = sources[changes.order]
    bits = trie.tables.token_bits
    spliced = None if int(tokens.max()) >> bits else _splice(trie, terminal_rank, changes.rows, sources)
    if spliced is not None and (before.tokens >> (bits - 1)).any():
        runs = token_runs(spliced[0].tables, spliced[0].tail_tokens)
        if not any((run >> (bits - 1)).any() for run in runs):
            spliced = None  # fewer bits are enough for the tokens that are left
    if spliced is not None:
        return Changed(*spliced, same)
    patches, _ = _patches_of(trie, terminal_rank, changes.rows, sources, whole=True)
    tokens = patches.tokens.astype(token_dtype(int(patches.tokens.max())), copy=False)
    built, members = build_trie(Rows(tokens, patches.offsets), patches.lcp)
    return Changed(built, patches.sources[members], same)


def _splice(
    trie: Trie, terminal_rank: NDArray[np.uint32], changes: Rows, sources: NDArray[np.int64]
) -> tuple[Trie, NDArray[np.uint32]] | None:
    """Return the changed trie, made of runs and patches, and its members; None if `targets` may need another type."""
    target_type = trie.tables.targets.dtype
    if target_type == np.uint64 and (np.diff(changes.offsets) != trie.longest).any():
        return None
    patches, per_level = _patches_of(trie, terminal_rank, changes, sources, whole=False)
    places = _counts_at(trie.tables.pointers, terminal_rank, trie.tail_tokens, patches.places)
    per_level[:, : places.shape[2]] += places[1::2].sum(axis=0) - places[::2].sum(axis=0)
    per_level[NODES, 0] = 1
    items, depth = int(per_level[[LEAVES, TERMINALS]].sum()), np.arange(per_level.shape[1])
    tokens = int((per_level[LEAVES] * (depth + 1) + per_level[TERMINALS] * depth + per_level[TAIL_TOKENS]).sum())
    length = 0 if tokens % items else tokens // items  # of each, if they have one length
    due = type_of_targets(length, trie_tables.levels_of(per_level), max(trie.longest, changes.longest))
    if due != target_type or due == np.uint32:  # that depends on the longest tail, which is not known
        return None
    bits, label_type = trie.tables.token_bits, trie.tables.labels.dtype
    tables, starts = trie_tables.allocate(per_level, bits, label_type, due, length)
    members = np.empty(items, np.uint32)
    _fill(trie.tables.pointers, patches, places, starts, tables.pointers, members, trie.items)
    inner = np.flatnonzero(members >= trie.items)
    members[inner] = patches.sources[members[inner] - trie.items]
    built = trie_tables.finish(tables, per_level, items, trie.shortest, trie.longest)
    sizes = np.diff(patches.offsets)
    if not trie.shortest == trie.longest == sizes.min(initial=trie.longest) == sizes.max(initial=trie.longest):
        shortest, longest = lengths_in_order(built)
        built = replace(built, shortest=shortest, longest=longest)
    return built, members


def _patches_of(
    trie: Trie, terminal_rank: NDArray[np.uint32], changes: Rows, sources: NDArray[np.int64], *, whole: bool
) -> tuple[_Patches, NDArray[np.int64]]:
    """Return the patches, and what `tables.count` counts of them.

    changes: distinct rows, ascending. sources: as `Changed.members` for each new row, -1 for a removed one.
    whole: make one patch of all items.
    """
    levels = len(trie.level_edges)
    per_level = np.zeros((COUNTS, max(trie.longest, changes.longest, levels) + 2), np.int64)
    limits = levels, trie.longest, trie.items if whole else 0
    rows = changes.tokens, changes.offsets, sources
    patches = _Patches(*_find(trie.tables.pointers, terminal_rank, limits, *rows, per_level))
    if not len(patches.first):
        raise ValueError("its tables are no trie")
    return patches, per_level


@compiled
def _find(tables, terminal_rank, limits, tokens, offsets, sources, per_level):  # type: ignore[no-untyped-def]
    """Return the fields of `_Patches`.

    limits: levels, tokens of the longest item, and how many items one patch of all has (else 0).
    per_level: zeros, to which is added what `tables.count` counts of the patches.
    """
    levels, longest, whole = limits
    changes = len(sources)
    most = whole + 3 * changes + 1  # rows: each change and its two neighbours
    out, rows, numbers = np.empty(1 << 10, tokens.dtype), np.zeros(most + 1, np.int64), np.empty(most, np.uint32)
    first, lcp = np.zeros(changes + 1, np.int64), np.zeros(most + changes, np.uint16)
    places = np.zeros((2 * changes + 2, levels), np.int64)
    edge, node, path = np.zeros(levels, np.int64), np.zeros(levels, np.int64), np.zeros(longest + 2, tokens.dtype)
    row, patch, change = np.int64(0), np.int64(0), np.int64(0)
    _go_on(tables, edge, 1)
    places[0], ahead, way = edge, edge.copy(), node.copy()  # ahead: the place of the next change
    if not whole:
        _go_to(tables, tokens, offsets[0], offsets[1], ahead, way)
    while change < changes:
        edge[:] = ahead
        depth = _step_back(tables, edge, node, path)
        places[2 * patch + 1] = edge
        begun, shared = change, depth
        while True:
            number, length, depth = _next_item(tables, terminal_rank, longest, edge, node, path, depth)
            if length < 0 or row + changes - change >= most:  # no trie: of one, there is room
                return out, rows, numbers, first[:0], lcp, places
            order = np.int64(0)
            while change < changes:
                begin, end = offsets[change], offsets[change + 1]
                order = _compare(tokens, begin, end, path, length) if length else np.int64(-1)
                if order >= 0:
                    break
                if sources[change] < 0:  # it is no item
                    return out, rows, numbers, first[:0], lcp, places
                out = _append(out, rows, row, tokens, begin, end)
                numbers[row] = sources[change]
                row, change = row + 1, change + 1
            if length == 0:
                break
            if change < changes and order == 0:
                change += 1
                continue
            out = _append(out, rows, row, path, 0, length)
            numbers[row] = number
            row += 1
            if change == begun or whole:
                continue
            if change == changes:
                break
            _go_to(tables, tokens, offsets[change], offsets[change + 1], ahead, way)
            if not np.array_equal(ahead, edge):
                break  # there are items before the next change
        places[2 * patch + 2] = edge
        depth = max(depth, 0)
        while depth > 0 and edge[depth] == first_edge(tables, node[depth] + 1):
            depth -= 1
        begin = first[patch]
        common_prefixes(out, rows[begin : row + 1], 0, lcp[begin + patch : row + patch + 1])
        lcp[begin + patch], lcp[row + patch] = shared, depth
        count(rows[begin : row + 1], 0, lcp[begin + patch : row + patch + 1], per_level)
        patch += 1
        first[patch] = row
    edge[0] = first_edge(tables, 1)
    _go_on(tables, edge, 1)
    places[2 * patch + 1] = edge
    tokens, rows = out[: rows[row]], rows[: row + 1]
    return tokens, rows, numbers[:row], first[: patch + 1], lcp[: row + patch], places[: 2 * patch + 2]


@compiled
def _append(out, offsets, row, tokens, begin, end):  # type: ignore[no-untyped-def]
    """Append tokens begin .. end - 1 as a row; return `out`, or a larger copy."""
    start = offsets[row]
    offsets[row + 1] = start + end - begin
    out = grown(out, offsets[row + 1])
    for k in range(end - begin):
        out[start + k] = tokens[begin + k]
    return out


@compiled
def _compare(tokens, start, end, path, length):  # type: ignore[no-untyped-def]
    """Return -1, 0 or 1: a row comes before the item in `path`, is the same, or comes after it."""
    for k in range(min(end - start, length)):
        if tokens[start + k] != path[k]:
            return np.int64(-1) if tokens[start + k] < path[k] else np.int64(1)
    return np.int64(np.sign(end - start - length))


@compiled
def _go_on(tables, edge, level):  # type: ignore[no-untyped-def]
    """Set the next edges from `level` on by those above, if the items below these are all before or after the place."""
    for k in range(level, len(edge)):
        edge[k] = first_edge(tables, next_node(tables, edge[k - 1]))


@compiled
def _go_to(tables, tokens, start, end, edge, node):  # type: ignore[no-untyped-def]
    """Go to the place before the first item that is no less than a row. node: the nodes of its prefixes, filled in."""
    at, depth, less = np.int64(0), np.int64(0), False
    while True:
        node[depth], edge[depth], last = at, first_edge(tables, at), first_edge(tables, at + 1)
        if start + depth == end:
            break
        token = np.int64(tokens[start + depth])
        edge[depth] = first_from(tables, edge[depth], last, token)
        if edge[depth] == last or label(tables, edge[depth]) != token:
            break
        at = follow(tables, edge[depth])
        if at >= DEAD or depth + 1 == len(edge):
            less = _ends_before(tables, at, tokens, start + depth + 1, end)
            break
        depth += 1
    for k in range(depth, -1, -1):
        edge[k] += less  # an item below it is before the place
        less |= edge[k] > first_edge(tables, node[k]) or (k > 0 and start + k < end and is_terminal(tables, node[k]))
    _go_on(tables, edge, depth + 1)


@compiled
def _ends_before(tables, state, tokens, start, end):  # type: ignore[no-untyped-def]
    """Return whether what is left of an item after a leaf comes before these tokens."""
    for k in range(start, end):
        if state == END:
            return True
        token, following = np.int64(tokens[k]), tail_token(tables, state)
        if following != token:
            return following < token
        state = advance(tables, state, token)
    return False


@compiled
def _step_back(tables, edge, node, path):  # type: ignore[no-untyped-def]
    """Go back by one item, if there is one, for `_next_item`; return how many tokens it shares with the one before."""
    at, depth, shared = np.int64(0), np.int64(0), np.int64(0)
    node[0] = 0
    while at < DEAD and depth < len(edge) and edge[depth] > first_edge(tables, at):
        node[depth] = at
        if edge[depth] - 1 > first_edge(tables, at) or (depth > 0 and is_terminal(tables, at)):
            shared = depth
        path[depth] = label(tables, edge[depth] - 1)
        at = follow(tables, edge[depth] - 1)
        depth += 1
    edge[shared:depth] -= 1
    return shared


@compiled
def _next_item(tables, terminal_rank, longest, edge, node, path, depth):  # type: ignore[no-untyped-def]
    """Put the tokens of the next item into `path`, and go to the place after it.

    node: the nodes on the way to the item before, down to `depth`. Returns the item's number and length, 0 after the
    last, -1 of no trie, and the depth of its last node.
    """
    while depth >= 0 and edge[depth] == first_edge(tables, node[depth] + 1):
        depth -= 1
    if depth < 0:
        return np.int64(-1), np.int64(0), depth
    while depth < min(len(edge), longest):
        taken = edge[depth]
        edge[depth] += 1
        path[depth] = label(tables, taken)
        state = follow(tables, taken)
        if state >= END:
            length = depth + 1
            while state >= TAIL and length < longest:
                path[length] = tail_token(tables, state)
                state = advance(tables, state, np.int64(path[length]))
                length += 1
            return taken - nodes_before(tables, taken), length if state == END else np.int64(-1), depth
        depth += 1
        if state >= DEAD or depth >= len(edge):
            break
        node[depth] = state
        if is_terminal(tables, state):
            leaves = tables.edges - (tables.nodes - 1)
            return leaves + terminals_before(tables, terminal_rank, state), depth, depth
    return np.int64(-1), np.int64(-1), depth


@compiled
def _counts_at(tables, terminal_rank, tail_tokens, places):  # type: ignore[no-untyped-def]
    """Return what the tables hold before each place: [places, COUNTS, levels + 1], in the layout of `tables.count`."""
    counts = np.zeros((len(places), COUNTS, places.shape[1] + 1), np.int64)
    for i in range(len(places)):
        for level in range(places.shape[1]):
            edge = places[i, level]
            node = next_node(tables, edge)
            counts[i, EDGES, level], counts[i, LEAVES, level] = edge, edge - (node - 1)
            counts[i, TAIL_TOKENS, level] = next_tail(tables, edge, tail_tokens)
            counts[i, NODES, level + 1] = node
            counts[i, TERMINALS, level + 1] = terminals_before(tables, terminal_rank, node)
    return counts


@compiled
def _fill(tables, patches, places, cursor, out, members, items):  # type: ignore[no-untyped-def]
    """Fill the new tables. members: of rows in patches, `items` and the number of the row."""
    store32(out.row_offsets, 0, 0)
    levels = places.shape[2] - 1
    for patch in range(len(patches.first)):
        begin, end = places[2 * patch], places[2 * patch + 1]
        for level in range(levels):
            if begin[EDGES, level] != end[EDGES, level]:
                _copy_run(tables, begin, end, level, cursor, out, members)
        cursor[:, : levels + 1] += end - begin
        if patch < len(patches.first) - 1:
            a, b = patches.first[patch], patches.first[patch + 1]
            lcp = patches.lcp[a + patch : b + patch + 1]
            fill(patches.tokens, patches.offsets[a : b + 1], 0, lcp, cursor, out, members, items + a)


@compiled
def _copy_run(tables, begin, end, level, cursor, out, members):  # type: ignore[no-untyped-def]
    """Copy one level of the items between two positions. `targets` are of one type, and become what `fill` leaves."""
    first, node, tail = begin[EDGES, level], begin[NODES, level + 1], begin[TAIL_TOKENS, level]
    edges, nodes = end[EDGES, level] - first, end[NODES, level + 1] - node
    tails, number = end[TAIL_TOKENS, level] - tail, begin[LEAVES, level]
    to, lone, position = cursor[EDGES, level], np.int64(-1), tail
    for k in range(edges):
        put_label(out, to + k, label(tables, first + k))
        if is_leaf(tables, first + k):
            put_leaf(out, to + k, 0)
            starts = tail_at(tables, first + k)
            if starts >= 0:  # a tail ends where the next one begins
                if lone >= 0:
                    put_leaf(out, lone, starts - position)
                lone, position = to + k, starts
    if lone >= 0:
        put_leaf(out, lone, tail + tails - position)
    width = tables.token_bits + 1
    copy_bits(tables.tails, tail * width, out.tails, cursor[TAIL_TOKENS, level] * width, tails * width)
    to = cursor[LEAVES, level]
    for k in range(edges - nodes):
        members[to + k] = number + k
    if nodes == 0:
        return
    shift, to = cursor[EDGES, level + 1] - begin[EDGES, level + 1], cursor[NODES, level + 1]
    for k in range(nodes):
        store32(out.row_offsets, to + k, first_edge(tables, node + k) + shift)
    number = tables.edges - (tables.nodes - 1) + begin[TERMINALS, level + 1]
    if begin[TERMINALS, level + 1] == end[TERMINALS, level + 1]:
        return
    next_end = cursor[TERMINALS, level + 1]
    for k in range(nodes):
        if bit(tables.terminal, node + k):
            set_bit(out.terminal, to + k)
            members[next_end] = number
            next_end, number = next_end + 1, number + 1
