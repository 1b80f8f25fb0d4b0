"""Fuzzes the index reader: many damaged and lying files, each opened and used in every way, and what came of it.

python benchmarks/fuzz_index.py --mutations 100000 --seed 1

Every tenth batch runs compiled code that checks every index. Exits with 1 where a mutation failed; its number is tried
again with `--first NUMBER --mutations 1`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from mutations import SHAPES, run

BATCH = 2_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--checked", action="store_true", help="check every index in all batches")
    args = parser.parse_args()
    outcomes: Counter[tuple[str, str]] = Counter()
    failures, start, checked = [], time.perf_counter(), 0
    first, end = args.first, args.first + args.mutations
    with tempfile.TemporaryDirectory() as folder:
        while first < end:
            size = min(BATCH, end - first)
            check = args.checked or first // BATCH % 10 == 9
            tally = run(args.seed, first, size, SHAPES, cache=Path(folder) if check else None)
            outcomes += tally.outcomes
            failures += tally.failures
            checked += size if check else 0
            first = tally.stopped_at + 1 if tally.stopped_at is not None else first + size
            print(
                f"{first - args.first:>9,} of {args.mutations:,}  {time.perf_counter() - start:>6.0f} s  "
                f"{len(failures)} failed",
                flush=True,
            )
    print_table(outcomes)
    print(f"\nwith every index checked: {checked:,} of them")
    for failure in failures[:20]:
        print(f"\nfailed: {failure}")
    return 1 if failures else 0


def print_table(outcomes: Counter[tuple[str, str]]) -> None:
    """One line a kind of mutation, one column an outcome."""
    columns = [outcome for outcome, _ in Counter([o for _, o in outcomes.elements()]).most_common()]
    letters = [chr(ord("A") + i) for i in range(len(columns))]
    print(f"\n{'':<28}" + "".join(f"{letter:>9}" for letter in letters))
    for kind in sorted({kind for kind, _ in outcomes}):
        print(f"{kind:<28}" + "".join(f"{outcomes[kind, column]:>9,}" for column in columns))
    totals = [sum(outcomes[kind, column] for kind in {kind for kind, _ in outcomes}) for column in columns]
    print(f"{'all':<28}" + "".join(f"{total:>9,}" for total in totals))
    for letter, column in zip(letters, columns, strict=True):
        print(f"{letter}  {column}")


if __name__ == "__main__":
    sys.exit(main())
