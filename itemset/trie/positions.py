"""Positions between two items of a trie: the next edge of each level, and what comes next from there on.

After the last of a position's first entries, the next node of a level is the one that the next edge of the level above
leads to. So few entries say it all.
"""

from __future__ import annotations

from itemset.trie.jit import compiled
from itemset.trie.numbering import terminals_before
from itemset.trie.pointers import first_edge
from itemset.trie.tables import EDGES, LEAVES, NODES, TAIL_TOKENS, TERMINALS
from itemset.trie.targets import next_tail, nodes_before

EDGE, NODE, TAIL_AT, ENDS = range(4)
"""Rows of a position that is filled in: for every level its next edge, and the node, the tail and the count of terminal
nodes that come next from that edge on."""


@compiled
def next_node(tables, edge):  # type: ignore[no-untyped-def]
    """Return the node that the first edge to a node leads to, from `edge` on."""
    if edge >= tables.edges:
        return tables.nodes
    return nodes_before(tables, edge) + 1


@compiled
def next_edge(tables, edge, depth, level):  # type: ignore[no-untyped-def]
    """Return the next edge of a level, at a position whose first entries, to `depth`, are in `edge`."""
    found = edge[min(depth, level)]
    for _ in range(depth, level):
        found = first_edge(tables, next_node(tables, found))
    return found


@compiled
def place_at(tables, terminal_rank, tail_tokens, first, depth, place):  # type: ignore[no-untyped-def]
    """Fill in the position whose first entries, to `depth`, are in `first`.

    place: [4, levels], for every level the next edge, the node and the tail that come next, and the terminals before
    that node.
    """
    for level in range(place.shape[1]):
        edge = first[level] if level <= depth else first_edge(tables, place[NODE, level - 1])
        node = next_node(tables, edge)
        place[EDGE, level], place[NODE, level] = edge, node
        place[TAIL_AT, level] = next_tail(tables, edge, tail_tokens)
        place[ENDS, level] = terminals_before(tables, terminal_rank, node)


@compiled
def add_run(begin, end, per_level):  # type: ignore[no-untyped-def]
    """Add what the tables hold of the items between two positions: as `tables.count` counts it, and `fill` goes on."""
    for level in range(begin.shape[1]):
        edges = end[EDGE, level] - begin[EDGE, level]
        nodes = end[NODE, level] - begin[NODE, level]
        per_level[EDGES, level] += edges
        per_level[LEAVES, level] += edges - nodes
        per_level[TAIL_TOKENS, level] += end[TAIL_AT, level] - begin[TAIL_AT, level]
        per_level[NODES, level + 1] += nodes
        per_level[TERMINALS, level + 1] += end[ENDS, level] - begin[ENDS, level]
