"""What a request would else wait for: all compiled loops of a front end and an engine, made before one is ready.

`python -m itemset.serving.warm_up` fills Numba's cache, for an image that many servers start from.
"""

import time
from functools import cache
from typing import Any

import numpy as np

from itemset.embedded import holes
from itemset.item_set import build
from itemset.ranking.exact_sampling import Drawing
from itemset.ranking.importance import Importance
from itemset.ranking.search import Rounds, Search
from itemset.select.views import view
from itemset.serving.catalogue import InlineSet
from itemset.trie.rows import Rows
from itemset.trie.validate import check_items


@cache
def compile_all() -> None:
    """Run all loops once on small sets, for both widths of token ids and both kinds of keys; a process does so once.

    Loads them where Numba's cache has them.
    """
    holes.warm_up()
    for high, numbers in ((1, [0, 1, 2]), (1 << 16, ["0", "1", "2"])):
        _build(high)
        made = build([[high, 1], [high, 2], [3]], keys=numbers, attributes={"n": [0, 1, 2]})
        opened = InlineSet.from_index("", made.to_bytes(), token_ids=True).item_set  # read-only, as a mapped file is
        check_items(opened.trie)
        _ = opened.token_ids, opened.level_plan
        some = view(opened, {"n": {"$gt": 0}}, exclude_keys=numbers[:2])
        for one in (opened, some, view(opened, only_keys=numbers[:1])):
            for token in (3, high):  # an answer's tokens have the width of the highest of them
                one.find([token])
        _rank(opened)


def _build(high: int) -> None:
    """Build sets of items of one length and of several, in order and not."""
    alike = [high] * 40  # more than sorting compares at once
    for items in ([[*alike, 1], [*alike, 0], [0], [0]], [[0], [0], [1, high]], [[high], [0]]):
        offsets = np.cumsum([0, *map(len, items)])
        built = build(Rows(np.array([token for item in items for token in item], np.int32), offsets))
        InlineSet.from_index("", built.to_bytes(), token_ids=True).item_set.find([0, high])


def _rank(item_set: Any) -> None:
    """Make lists and draws, of a model that thinks all tokens alike."""
    searches: list[Rounds] = [
        Search(item_set, 2, width=2, end_token=0),
        Search(item_set, 2, width=2, end_token=0, renormalised=True),
        Drawing(item_set, 2, end_token=0, seed=0),
        Importance(item_set, 2, end_token=0, candidates=2, seed=0),
    ]
    for search in searches:
        while passes := search.passes:
            search.take([(np.full(len(p.tokens) - p.known, -2.0), np.full(len(p.after), -2.0)) for p in passes])


if __name__ == "__main__":
    began = time.perf_counter()
    compile_all()
    print(f"compiled what servers run, in {time.perf_counter() - began:.0f} s")
