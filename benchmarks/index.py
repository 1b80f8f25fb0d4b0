"""Build time, size, lookup and step of our index beside the published STATIC layout, dict tries and marisa-trie.

python benchmarks/index.py --sizes 1e5 1e6 1e7 --json docs/benchmarks/index.json --plot docs/benchmarks/index.png

Items are uniform random semantic IDs, 8 tokens of 2,048 codes. Every row runs in a process of its own, so that its
peak memory is its own. Needs marisa-trie and matplotlib beside this project.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH, CODES = 8, 2_048
STATES, QUERIES = 140, 100_000
LARGEST = {"ours": 10**9, "STATIC": 2 * 10**7, "dict": 10**6, "marisa": 10**7}  # where it still fits or ends in minutes
Answer = dict[str, float]


def semantic_ids(count: int) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, CODES, (count, LENGTH), dtype=np.uint16)


def sorted_ids(count: int) -> NDArray[np.uint16]:
    """The same, sorted: big-endian bytes order as tokens do."""
    ids = semantic_ids(count).byteswap().view(f"S{2 * LENGTH}").ravel()
    ids.sort()
    return ids.view(np.uint16).reshape(-1, LENGTH).byteswap()


class Timer:
    """Seconds of a block, and how far the process's memory rose above what it held before."""

    def __enter__(self) -> Timer:
        # Writing 5 there makes the kernel forget the process's high-water mark.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = memory("VmRSS")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.peak = memory("VmHWM") - self._before


def memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def random_prefixes(ids: NDArray[np.uint16]) -> list[list[int]]:
    random = np.random.default_rng(1)
    rows = ids[random.integers(0, len(ids), STATES)]
    return [row[: random.integers(0, LENGTH)].tolist() for row in rows]


def a_step(children: Callable[[Any], Any], states: list[Any]) -> float:
    """Seconds for the children of one state, the best of five rounds over all states."""
    rounds = []
    for _ in range(5):
        started = time.perf_counter()
        for state in states:
            children(state)
        rounds.append((time.perf_counter() - started) / len(states))
    return min(rounds)


def repeated(work: Callable[[NDArray[np.uint16]], Any], ids: NDArray[np.uint16]) -> tuple[Any, float, int]:
    """Result, seconds and peak of `work`: the medians of three times, once at sizes that take minutes."""
    result, timers = None, []
    for _ in range(3 if len(ids) <= 2 * 10**7 else 1):
        del result
        with Timer() as timer:
            result = work(ids)
        timers.append(timer)
    middle = sorted(timers, key=lambda timer: timer.seconds)[len(timers) // 2]
    return result, middle.seconds, middle.peak


def sort_once(ids: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """What sorting alone takes with NumPy: the first five codes packed, argsort, one gather."""
    key = np.zeros(len(ids), np.uint64)
    for depth in range(5):
        key = key << np.uint64(11) | ids[:, depth]
    return ids[np.argsort(key)]


def ours(count: int) -> Answer:
    import itemset
    from itemset.trie import walk

    itemset.build([[1, 2], [2], [1]]).lookup([[2]])  # compiled code is loaded once
    ids = semantic_ids(count)
    s, seconds, peak = repeated(itemset.build, ids)
    answer = {"build unsorted": seconds, "peak/input": peak / ids.nbytes, "bytes": s.nbytes / count}
    answer["sort once"] = repeated(sort_once, ids)[1]
    queries = ids[np.random.default_rng(2).integers(0, count, QUERIES)]
    with Timer() as lookup:
        keys = s.lookup(queries)
    with Timer() as back:
        s.tokens(keys)
    del s
    ids = sorted_ids(count)
    s, presorted, _ = repeated(itemset.build, ids)
    tables, states = s.trie.tables, []
    for prefix in random_prefixes(ids):
        state = 0
        for token in prefix:
            state = walk.advance(tables.pointers, state, token)
        states.append(state)
    return answer | {
        "build sorted": presorted,
        "lookup": lookup.seconds / QUERIES,
        "tokens": back.seconds / QUERIES,
        "step": a_step(lambda state: walk.children(tables, state), states),
    }


def static(count: int) -> Answer:
    """The published construction in short (arXiv 2602.22647, algorithm and layout of appendix B): every prefix is a
    state, [token, next state] pairs in CSR form, the first two levels also as dense tables."""
    ids = sorted_ids(count)
    with Timer() as timer:
        differs = ids[1:] != ids[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), LENGTH)
        parents, tokens, targets = [], [], []
        above, states = np.zeros(count, np.int32), 1
        for depth in range(LENGTH):
            new = np.concatenate(([True], first <= depth))
            own = np.cumsum(new, dtype=np.int32) + np.int32(states - 1)
            parents.append(above[new])
            tokens.append(ids[new, depth].astype(np.int32))
            targets.append(own[new] if depth < LENGTH - 1 else np.zeros(int(new.sum()), np.int32))
            if depth == 1:
                dense = np.zeros((CODES, CODES), np.int32)
                dense[ids[:, 0], ids[:, 1]] = own
            above, states = own, states + int(new.sum())
        counts = np.bincount(np.concatenate(parents), minlength=states)
        row_starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int32)))
        pairs = np.stack((np.concatenate(tokens), np.concatenate(targets)), axis=1)
        dense_mask = dense > 0
    nbytes = row_starts.nbytes + pairs.nbytes + dense.nbytes + dense_mask.nbytes
    found = []
    for prefix in random_prefixes(ids):
        state = 0
        for token in prefix:
            row = pairs[row_starts[state] : row_starts[state + 1]]
            state = int(row[np.searchsorted(row[:, 0], token), 1])
        found.append(state)
    step = a_step(lambda state: pairs[row_starts[state] : row_starts[state + 1], 0], found)
    return {"build sorted": timer.seconds, "bytes": nbytes / count, "peak/input": timer.peak / ids.nbytes, "step": step}


def dict_trie(count: int) -> Answer:
    """What is written today: nested Python dicts, as Hugging Face examples of prefix_allowed_tokens_fn do."""
    ids = semantic_ids(count)
    with Timer() as timer:
        root: dict[int, Any] = {}
        for item in ids.tolist():
            node = root
            for token in item:
                node = node.setdefault(token, {})
    nodes = []
    for prefix in random_prefixes(ids):
        node = root
        for token in prefix:
            node = node[token]
        nodes.append(node)
    queries = ids[np.random.default_rng(2).integers(0, count, QUERIES)].tolist()
    started = time.perf_counter()
    for item in queries:
        node = root
        for token in item:
            node = node[token]
    lookup = (time.perf_counter() - started) / QUERIES
    peak = timer.peak / ids.nbytes
    return {
        "build unsorted": timer.seconds,
        "bytes": timer.peak / count,
        "peak/input": peak,
        "lookup": lookup,
        "step": a_step(list, nodes),
    }


def marisa(count: int) -> Answer:
    import marisa_trie

    ids = semantic_ids(count)
    keys = ids.byteswap().view(f"V{2 * LENGTH}").ravel()
    with Timer() as timer:
        trie = marisa_trie.BinaryTrie(key.tobytes() for key in keys)
    queries = [key.tobytes() for key in keys[np.random.default_rng(2).integers(0, count, QUERIES)]]
    started = time.perf_counter()
    for key in queries:
        trie[key]
    lookup = (time.perf_counter() - started) / QUERIES
    size = len(trie.tobytes()) / count
    return {"build unsorted": timer.seconds, "bytes": size, "peak/input": timer.peak / ids.nbytes, "lookup": lookup}


KINDS = {"ours": ours, "STATIC": static, "dict": dict_trie, "marisa": marisa}
COLUMNS = {
    "sort once": (1, "s"),
    "build unsorted": (1, "s"),
    "build sorted": (1, "s"),
    "peak/input": (1, "x"),
    "bytes": (1, "B/item"),
    "lookup": (1e6, "µs"),
    "tokens": (1e6, "µs"),
    "step": (1e6, "µs"),
}


def measure(kind: str, count: int) -> Answer:
    command = [sys.executable, __file__, "--child", kind, "--sizes", str(count)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: Answer = json.loads(child.stdout)
    return answer


def table(results: dict[str, dict[str, Answer]]) -> str:
    lines = ["| N | index | " + " | ".join(f"{name} ({unit})" for name, (_, unit) in COLUMNS.items()) + " |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for size, row in results.items():
        for kind, answer in row.items():
            cells = [f"{answer[name] * scale:.3g}" if name in answer else "" for name, (scale, _) in COLUMNS.items()]
            lines.append(f"| {int(size):,} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Answer]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    for axis, name, title in zip(
        axes,
        ("build unsorted", "build sorted", "bytes"),
        ("build, unsorted (s)", "build, sorted (s)", "bytes an item"),
        strict=True,
    ):
        for kind in KINDS:
            points = [(int(size), row[kind][name]) for size, row in results.items() if name in row.get(kind, {})]
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", label=kind)
        axis.set(xlabel="items", title=title)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=float, default=[1e5, 1e6])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(KINDS[args.child](int(args.sizes[0]))))
        return
    results: dict[str, dict[str, Answer]] = {}
    for size in map(int, args.sizes):
        results[str(size)] = {}
        for kind in KINDS:
            if size <= LARGEST[kind]:
                print(f"{size:,} {kind} ...", file=sys.stderr, flush=True)
                results[str(size)][kind] = measure(kind, size)
    print(table(results))
    if args.json:
        record = {"machine": platform.processor() or platform.machine(), "numpy": np.__version__, "results": results}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
