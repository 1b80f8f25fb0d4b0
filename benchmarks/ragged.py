"""Size of ragged, text-like sets beside their information estimate, and the time to open and ask a large index.

python benchmarks/ragged.py

Text-like: 6 x 10^6 items of 8 tokens on average over a vocabulary of 128,256. Lengths are 1 + Poisson(7); tokens follow
Zipf's law with exponent 1, every fifth item repeats the start of another, as titles and product names do.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

import itemset
from itemset import Rows
from itemset.report import least_bytes

ITEMS, VOCABULARY = 6_000_000, 128_256
LARGE = 20_000_000


def text_like() -> Rows:
    random = np.random.default_rng(0)
    lengths = 1 + random.poisson(7, ITEMS)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    weights = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    ranks = np.searchsorted(weights, random.random(int(offsets[-1])) * weights[-1])
    tokens = random.permutation(VOCABULARY)[ranks].astype(np.uint32)
    for item in range(5, ITEMS, 5):
        start, size = offsets[item], min(lengths[item], lengths[item - 1]) // 2
        tokens[start : start + size] = tokens[offsets[item - 1] : offsets[item - 1] + size]
    return Rows(tokens, offsets)


def main() -> None:
    s = itemset.build(text_like(), vocab_size=VOCABULARY)
    least, size = least_bytes(s) / len(s), s.nbytes / len(s)
    print(f"ragged: {len(s):,} items of {s.shortest} to {s.longest} tokens, {size:.2f} bytes an item")
    print(f"  information estimate {least:.2f}; 1.5 x estimate + 8 = {1.5 * least + 8:.2f}")

    codes = np.random.default_rng(0).integers(0, 2_048, (LARGE, 8), dtype=np.uint16)
    started = time.perf_counter()
    s = itemset.build(codes)
    print(
        f"fixed: {LARGE:,} items built in {time.perf_counter() - started:.1f} s, {s.nbytes / LARGE:.2f} bytes an item"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.itemset"
        s.save(path)
        itemset.load(path).lookup(codes[:1])  # compiled code is loaded, the file is in the page cache
        for check in (False, True):
            started = time.perf_counter()
            itemset.load(path, check=check).lookup(codes[5:6])
            print(f"open to first lookup, check={check}: {(time.perf_counter() - started) * 1e3:.1f} ms")
        s = itemset.load(path)
        queries = codes[np.random.default_rng(1).integers(0, LARGE, 1_000_000)]
        started = time.perf_counter()
        keys = s.lookup(queries)
        print(f"10^6 lookups: {time.perf_counter() - started:.2f} s", end="; ")
        started = time.perf_counter()
        s.tokens(keys)
        print(f"10^6 keys back to tokens: {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
