"""What compiled loops must not do, counted in what Numba makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INCREFS = """
import json, re, sys
import numpy as np
from numba import typeof, types
import itemset
from itemset.trie import levels, numbering, validate, tables, targets, update, view

place = typeof(itemset.build([[1, 2], [1, 3]]).trie.tables.pointers)
i64, u64 = types.int64, types.uint64
counts, cells, bits = i64[::1], i64[:, ::1], types.uint8[::1]
loops = {
    update._merge: (
        place, i64, counts, cells, i64, types.uint32[::1], types.boolean[::1], counts, types.uint32[::1],
        *[i64] * 5, counts, types.uint16[::1], types.uint32[::1], types.uint32[::1],
    ),
    levels._measure: (place, i64, *[counts] * 5),
    validate._in_order: (place, i64, counts, counts),
    tables.fill: (i64, i64, counts, i64, types.uint16[::1], cells, place, types.uint32[::1]),
    targets.set_bases: (place,),
    view._mark: (place, bits, i64, i64, bits),
    numbering._read_tails: (place, types.uint32[::1]),
    numbering._mark_tokens: (place, i64, types.boolean[::1]),
}
for loop, signature in loops.items():
    loop.compile(signature)
print(json.dumps({
    loop.py_func.__name__: len(re.findall(r"call void @NRT_incref", loop.inspect_llvm(loop.signatures[-1])))
    for loop in loops
}))
"""


@pytest.mark.slow
def test_loops_over_whole_tables_count_no_references(tmp_path: Path) -> None:
    """Counting them at each edge has made such loops up to 93 times slower."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}  # what comes from a cache cannot be looked into
    done = subprocess.run([sys.executable, "-c", INCREFS], env=environment, capture_output=True, text=True, check=True)
    counted = json.loads(done.stdout)
    assert len(counted) == 8
    assert counted == dict.fromkeys(counted, 0)


SERVED = """
import sys, tempfile
from pathlib import Path

import pytest
import numpy as np
from numba.core.dispatcher import Dispatcher
import itemset
from itemset import view
from itemset.embedded.holes import Items
from itemset.masking import host
from itemset.ranking.exact_sampling import Drawing
from itemset.ranking.search import Search
from itemset.serving.catalogue import InlineSet
from itemset.serving.warm_up import compile_all
from itemset.trie.validate import check_items

def made():
    ours = [module for name, module in sys.modules.items() if name.startswith("itemset")]
    loops = {loop for module in ours for loop in vars(module).values() if isinstance(loop, Dispatcher)}
    return {(loop.py_func.__name__, str(one)) for loop in loops for one in loop.nopython_signatures}

compile_all()
before, draw, asked = made(), np.random.default_rng(0), 0
for top in (300, 70_000):
    for lengths in ((4, 5), (2, 6)):
        for kind in (int, str):
            rows = {tuple(draw.integers(0, top, draw.integers(*lengths)).tolist()) for _ in range(300)}
            items = sorted(map(list, rows))
            keys = [kind(7 * i) for i in range(len(items))]
            path = Path(tempfile.mkdtemp()) / "set.itemset"
            itemset.build(items, keys=keys, attributes={"n": list(range(len(items)))}).save(path)
            whole = itemset.load(path)  # mapped, read-only
            check_items(whole.trie)
            inline = InlineSet.from_index("", itemset.build(items[::-1]).to_bytes(), token_ids=True).item_set
            few = {"n": {"$lt": 200}}
            views = [view(whole, few), view(whole, exclude_keys=keys[20:30]), view(whole, only_keys=keys[5:20])]
            some = view(whole, exclude_keys=keys[20:30], boost_keys={keys[5]: 1})
            steered = [view(whole, few, boost={"n": 0.1}), some]
            for one in (whole, inline, *views, view(whole, few, exclude_keys=keys[20:30]), *steered):
                for search in (
                    Search(one, 2, width=2, end_token=1, normalise_length=0.5),
                    Drawing(one, 2, end_token=1, seed=0, temperature=2.0),
                ):
                    while passes := search.passes:
                        runs, after = [len(p.tokens) - p.known for p in passes], [len(p.after) for p in passes]
                        search.take([(np.full(a, -2.0), np.full(b, -2.0)) for a, b in zip(runs, after)])
                    _ = search.result
                states, row = [host.HostState(one, [1]) for _ in range(2)], np.zeros((2, 4), np.int32)
                host.fill_bitmasks(states, [0, 0], [0, 1], row)
                states[0].accept(items[10])
                states[0].fill_bitmask(row[0])
                assert one.find(items[10]) is not None
                host.forced_tokens(one, items[10])
                Items(one).without(tuple(items[10])).step(0, items[10][0])
                _ = one.level_plan, one.token_ids
                asked += 1
print(asked, len(before), sorted(made() - before))
"""


@pytest.mark.slow
def test_no_request_compiles_anything() -> None:
    """Sets from files and from requests, and what is left of them: every form that a server meets once it is ready."""
    done = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, check=True)
    asked, compiled, more = done.stdout.split(maxsplit=2)
    assert int(asked) == 64
    assert int(compiled) > 30
    assert more.strip() == "[]"
