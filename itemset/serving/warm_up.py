"""What a request would else wait for: all compiled loops, made before an engine is ready, and loaded by front ends.

`python -m itemset.serving.warm_up` fills Numba's cache, for an image that many servers start from. Of the processes of
a machine one compiles, and the others wait and load what it has saved.
"""

import fcntl
import hashlib
import logging
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np

from itemset.embedded import holes
from itemset.item_set import build
from itemset.ranking.exact_sampling import Drawing
from itemset.ranking.importance import Importance
from itemset.ranking.search import Rounds, Search
from itemset.select.prompt_items import in_tokens
from itemset.select.views import view
from itemset.serving.catalogue import InlineSet
from itemset.trie.pointers import SOURCES
from itemset.trie.rows import Rows
from itemset.trie.tables import count
from itemset.trie.validate import check_items

logger = logging.getLogger(__name__)


@cache
def compile_all() -> None:
    """Run all loops once on small sets, for both widths of token ids and both kinds of keys; a process does so once.

    Holds the lock of Numba's cache while it lacks loops; who comes later finds them there. A process that is killed
    holds none. Where files cannot be locked each process compiles for itself.
    """
    mark = _mark()
    with ExitStack() as held:
        if mark is not None and not mark.exists():
            with suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(mark.with_name("all-loops.lock").open("w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    logger.warning("Compiling loops for this machine, once: about half a minute")
                except BlockingIOError:
                    logger.warning("Another process compiles loops for this machine, once: about half a minute")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if mark.exists():
                    held.close()  # who has waited need not wait for the others who load
        _run_all()
        if mark is not None:
            with suppress(OSError):
                mark.touch()


@cache  # which keeps the process: Python warns of one that is forgotten while it runs
def compile_beside() -> object:
    """Let another process fill an empty Numba cache while an engine loads weights. If none can be saved, compile."""
    if (mark := _mark()) is None:
        compile_all()
    if mark is None or mark.exists():
        return None
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", __name__], **quiet)


def _mark() -> Path | None:
    """Return the file that says that Numba's cache has all loops of this version and CPU; None if none can be saved."""
    if (saved := count.stats.cache_path) is None:
        return None
    made = SOURCES, numba.__version__, sys.implementation.cache_tag, count.targetctx.codegen().magic_tuple()
    return Path(saved, f"all-loops-{hashlib.sha256(repr(made).encode()).hexdigest()[:16]}")


def _run_all() -> None:
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
        in_tokens(opened, [3])
        _rank(opened)
        _rank(view(opened, boost={"n": 1.0}))
        _rank(view(opened, boost_keys={numbers[0]: 1.0}))


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
        Search(item_set, 2, width=2, end_token=0, normalise_length=0.5),
        Drawing(item_set, 2, end_token=0, seed=0),
        Drawing(item_set, 2, end_token=0, seed=0, temperature=2.0),
        *([] if item_set.is_steered else [Importance(item_set, 2, end_token=0, candidates=2, seed=0)]),
    ]
    for search in searches:
        while passes := search.passes:
            search.take([(np.full(len(p.tokens) - p.known, -2.0), np.full(len(p.after), -2.0)) for p in passes])
        _ = search.result


if __name__ == "__main__":
    began = time.perf_counter()
    compile_all()
    print(f"compiled what servers run, in {time.perf_counter() - began:.0f} s")
