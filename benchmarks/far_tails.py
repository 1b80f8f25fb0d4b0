"""Builds a set of more than 2^32 tail tokens and asks it: as many as 8.8 x 10^8 semantic IDs have, in long items.

4.2 million items of 1,056 bits as tokens, sorted. Their index is built by `itemset build --sorted`, verified, and asked
for items from its whole range. The kernels' reference walks them in an arena. Takes 15 GB of disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap

import itemset
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import LOCAL
from itemset.trie.targets import FAR
from itemset.trie.walk import END, STATE_BITS, TAIL

LENGTH, CHUNK, ASKED = 1_056, 100_000, 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=lambda text: int(float(text)), default=4_200_000)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where input, index and temporary files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        source, output = Path(name, "items.npy"), Path(name, "items.itemset")
        make_items(source, args.items)
        command(sys.executable, "-m", "itemset", "build", "--sorted", str(source), "--memory", "1GB", "-o", str(output))
        command(sys.executable, "-m", "itemset", "verify", str(output))
        ask(source, output)


def make_items(path: Path, items: int) -> None:
    """Rows of random bits, whose first 64 ascend."""
    random = np.random.default_rng(0)
    first = np.sort(random.integers(0, 2**64, items, np.uint64)).astype(">u8").view(np.uint8).reshape(-1, 8)
    matrix = open_memmap(path, "w+", np.uint8, (items, LENGTH))
    for start in range(0, items, CHUNK):
        end = min(start + CHUNK, items)
        rest = random.integers(0, 256, (end - start, LENGTH // 8 - 8), np.uint8)
        matrix[start:end] = np.unpackbits(np.concatenate((first[start:end], rest), axis=1), axis=1)


def ask(source: Path, output: Path) -> None:
    s = itemset.load(output)
    print(f"{len(s):,} items, {s.trie.tail_tokens:,} tail tokens, first block beyond 2^32: {s.trie.tables.far_block:,}")
    numbers = np.linspace(0, len(s) - 1, ASKED).astype(np.int64)
    wanted = np.load(source, mmap_mode="r")[numbers].astype(np.int64)
    if not np.array_equal(s.lookup(wanted), numbers):
        sys.exit("a lookup is wrong")
    if s.tokens(numbers[:200]) != wanted[:200].tolist():
        sys.exit("the tokens of a key are wrong")
    arena = Arena(room_for(s))
    states = torch.full((ASKED,), arena.acquire(s) << STATE_BITS)
    highest = 0
    for column in torch.from_numpy(wanted).unbind(1):
        states = arena.kernels.advance(arena, states, column, None, states)
        highest = max(highest, int((states & LOCAL).max()))
    if not bool((states & LOCAL == END).all()):
        sys.exit("a walk does not end with its item")
    print(f"{ASKED:,} items found and walked; the highest state was {highest:,}, {highest - TAIL - FAR:,} past 2^32")


def command(*words: str) -> None:
    started = time.perf_counter()
    subprocess.run(words, check=True)
    print(f"{words[3]}: {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
