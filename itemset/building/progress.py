"""One progress bar for each long command, on a terminal alone: what is done, how fast, and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

# What the stages of a build on disk cost, in seconds per million items of 8 tokens on two cores. Only their ratios
# count: the time left is the time so far, divided by the share that is done.
_COSTS = {"reading": 0.04, "encoding": 15.0, "sorting": 0.07, "merging": 0.05, "building": 0.07, "writing": 0.07}


@contextmanager
def build_bar() -> Iterator[Callable[[str, float], None]]:
    """Show a bar on stderr, if that is a terminal. Yields what `build_external` takes as `progress`.

    Call it with "writing", too, while the index file is written.
    """
    layout = "{desc:<9}{percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"
    costs: dict[str, float] = {}
    shown = [""]
    # disable=None is tqdm's "only on a terminal"; smoothing=0 is "by the mean speed from the start".
    with tqdm(total=1.0, disable=None, smoothing=0, bar_format=layout) as bar:

        def show(stage: str, share: float) -> None:
            if not costs:  # texts are encoded while they are read
                costs.update(_COSTS)
                del costs["reading" if stage == "encoding" else "encoding"]
            before = sum(list(costs.values())[: list(costs).index(stage)])
            done = (before + costs[stage] * min(share, 1.0)) / sum(costs.values())
            bar.update(max(0.0, done - bar.n))
            if stage != shown[-1]:
                shown.append(stage)
                bar.set_description_str(stage)

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
