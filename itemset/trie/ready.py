"""Ready masks: for the nodes of a trie's first levels, what may follow each as a row of bits.

A walk that masks by a node's children takes a time in proportion to them, and each request begins where they are most.
A row of bits is copied, or applied, as fast wherever it comes from.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.trie.jit import compiled
from itemset.trie.pointers import first_edge, label
from itemset.trie.tables import NONE, Trie
from itemset.trie.walk import is_alive

WIDE = 128  # children of a node for which a mask pays
HEADER = 3  # words before the rows: nodes with a row, the first word of all rows, and how many words a row has
_LEAST = 1 << 15  # bytes that ready masks may always take: the root's, for any vocabulary
_SHARE = 8  # a whole set's may take eight times less than its tables. A view is made while a request waits


def ready_masks(trie: Trie) -> NDArray[np.uint32]:
    """Return the header and the rows of the first levels, as deep as a level has a node with more than WIDE children.

    All nodes of a level have a row, or none: up to a share of the tables' bytes. Bit t of a row, counted from bit
    32 * `first word` on, is set if a walk may take an edge with token t. Of a view, its own. Empty without such a node.
    """
    tables, end, deepest = trie.tables, 0, 0
    most = max(trie.nbytes // _SHARE if tables.whole else 0, _LEAST) // 4
    low, high, first_word, width = np.iinfo(np.int64).max, 0, 0, 0
    for nodes in trie.level_nodes:
        begin, end = end, end + nodes
        if end > most:
            break
        offsets = tables.row_offsets[begin : end + 1].astype(np.int64)
        low = min(low, int(tables.labels[offsets[:-1]].min()) >> 5)
        high = max(high, int(tables.labels[offsets[1:] - 1].max()) >> 5)
        if end * (high - low + 1) > most:
            break
        if np.diff(offsets).max() > WIDE:
            deepest, first_word, width = end, low, high - low + 1
    if not deepest:
        return NONE
    rows = np.zeros((deepest, width), np.uint32)
    _fill(tables.pointers, 32 * first_word, rows)
    return np.concatenate((np.array([deepest, first_word, width], np.uint32), rows.ravel()))


@compiled
def _fill(tables: Any, first_token: int, rows: Any) -> None:
    """Set the bits of the first nodes' rows: 5 ms for four million edges. Safe whatever the labels are."""
    for node in range(len(rows)):
        row = rows[node]
        for edge in range(first_edge(tables, node), first_edge(tables, node + 1)):
            token = label(tables, edge) - first_token
            if 0 <= token < 32 * len(row) and is_alive(tables, edge):
                row[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
