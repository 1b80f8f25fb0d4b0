"""One progress bar for each long command, on a terminal alone: what is done, how fast, and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def build_bar() -> Iterator[Callable[[str, float], None]]:
    """Show a bar on stderr for each stage, if that is a terminal. Yields what `build_external` takes as `progress`.

    Call it with "writing", too, while the index file is written.
    """
    layout = "{desc:<9}{percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"
    shown = ""
    # disable=None is tqdm's "only on a terminal"; smoothing=0 is "by the mean speed from the start".
    with tqdm(total=1.0, disable=None, smoothing=0, bar_format=layout) as bar:

        def show(stage: str, share: float) -> None:
            nonlocal shown
            if stage != shown:
                shown = stage
                bar.reset()
                bar.set_description_str(stage)
            bar.update(max(0.0, min(share, 1.0) - bar.n))

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
