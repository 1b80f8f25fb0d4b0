"""Ends many builds on disk by signals at random moments: each leaves a whole index, and its litter goes with the next.

python benchmarks/kill_build.py --times 200 --seed 1

Prints how often each end was seen; raises at the first build that left anything else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kills import end_builds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--items", type=int, default=1_000_000)
    args = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        seen = end_builds(Path(folder), args.times, args.seed, items=args.items)
    for end, times in sorted(seen.items()):
        print(f"{times:>6} {end}")
    print(f"{args.times:>6} builds in {time.perf_counter() - start:.0f} s: every index whole")


if __name__ == "__main__":
    main()
