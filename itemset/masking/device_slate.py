"""A set as one request takes it for a slate: several distinct items, one after the other."""

import numpy as np

from itemset.item_set import ItemSet


class Slate(ItemSet):
    """A view of a set in which the device leaves out each item once it has been given.

    Its list of dead entries has room for them, after a copy of the list as it is at first, to begin anew. It is one
    request's own: no two may share it, so its digest is a name. Its row of `Arena.sets` says how far the slate is.

    more: items after the first. separator: the token between two items, which no item holds; `walk.NO_TOKEN` if the
    next one follows at once, for which no item may begin another.
    """

    def __init__(self, item_set: ItemSet, name: str, more: int, separator: int) -> None:
        super().__init__(item_set.trie, item_set._keys, digest=name)
        joins = item_set.base is not None and item_set.own.keys() == {"dead"}  # a view stands on no list of exclusions
        self.base = item_set.base if joins else item_set
        dead = item_set.trie.tables.dead
        self.own = {"dead": np.concatenate((dead, dead, np.zeros(more, np.uint32)))}
        self.more, self.separator = more, separator
