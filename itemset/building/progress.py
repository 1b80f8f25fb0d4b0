"""Progress bars of long commands on a terminal. Elsewhere, as in a server's log, a build prints lines instead."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

EVERY = 10.0  # seconds between a build's lines


@contextmanager
def build_bar() -> Iterator[Callable[[str, float], None]]:
    """Show a bar, else lines, on stderr. Yields `build_external`'s `progress`, which takes the stage "writing", too."""
    layout = "{desc:<9}{percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"
    shown, began, said = "", 0.0, time.monotonic()
    # disable=None is tqdm's "only on a terminal"; smoothing=0 is "by the mean speed from the start".
    with tqdm(total=1.0, disable=None, smoothing=0, bar_format=layout) as bar:

        def show(stage: str, share: float) -> None:
            nonlocal shown, began, said
            now = time.monotonic()
            if stage != shown:
                shown, began = stage, now
                bar.reset()
                bar.set_description_str(stage)
            bar.update(max(0.0, min(share, 1.0) - bar.n))
            if bar.disable and 0 < share < 1 and now - said >= EVERY:
                said, left = now, (now - began) * (1 - share) / share
                print(f"itemset: {stage} {share:.0%}, about {left:.0f} s left", file=sys.stderr, flush=True)

        yield show


@contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a bar of bytes, if it takes a second. Yields what `verify` takes as `progress`; threads may call it."""
    with tqdm(desc="checking", unit="B", unit_scale=True, delay=1, disable=None, smoothing=0) as bar:

        def show(nbytes: int, total: int) -> None:
            with bar.get_lock():
                bar.total = total
                bar.update(nbytes)

        yield show
