"""Background thread that encodes inline sets: equal lists once, in slices that take turns, until nobody waits."""

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter

from itemset.serving.catalogue import Catalogue, InlineSet

logger = logging.getLogger(__name__)

Steps = Generator[int, None, InlineSet]
"""A list's work: yields the cost of each slice when it is done, and returns the set."""


@dataclass(eq=False)
class _List:
    """A list that requests wait for. left: its cost still to come. turn: number of its last slice."""

    reference: str
    steps: Steps
    left: int
    turn: int
    waiting: list[Future[InlineSet]] = field(default_factory=list)


class Encoder:
    """Makes the inline sets of one front end. Safe for threads.

    The list that has least left goes on, so that short lists pass long ones and of equal ones the first ends first.
    Every third slice is for the list whose last one is longest ago, so that no stream of short lists holds up a long
    one for ever. Equal lists are one. A list that nobody waits for any more is dropped after its slice.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lists: dict[str, _List] = {}
        self._turns = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def ask(self, reference: str, cost: int, steps: Callable[[], Steps]) -> Future[InlineSet]:
        """Return the future set of a list. Cancel the future if nobody waits for it any more.

        cost: of all slices together. steps: makes the list's work, unless the set is known or is being made.
        """
        future: Future[InlineSet] = Future()
        with self._lock:
            if (known := self._catalogue.inline(reference)) is not None:
                future.set_result(known)
                return future
            if reference not in self._lists:
                self._lists[reference] = _List(reference, steps(), cost, self._turns)
            self._lists[reference].waiting.append(future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="inline-sets", daemon=True)
                self._thread.start()
        return future

    def _run(self) -> None:
        while (one := self._next()) is not None:
            try:
                one.left -= next(one.steps)
            except StopIteration as end:
                self._catalogue.keep(end.value)
                for future in self._ended(one):
                    future.set_result(end.value)
            except BaseException as error:
                for future in self._ended(one):
                    future.set_exception(error)

    def _next(self) -> _List | None:
        """Return the list whose turn it is. None, and the thread ends, if no request waits."""
        with self._lock:
            for one in list(self._lists.values()):
                if all(future.cancelled() for future in one.waiting):
                    del self._lists[one.reference]
                    logger.info("Nobody waits for %s any more: its encoding stops", one.reference)
            if not self._lists:
                self._thread = None
                return None
            self._turns += 1
            one = min(self._lists.values(), key=attrgetter("left" if self._turns % 3 else "turn"))
            one.turn = self._turns
            return one

    def _ended(self, one: _List) -> list[Future[InlineSet]]:
        """Remove a list. Return the futures of those who still wait for it."""
        with self._lock:
            del self._lists[one.reference]
        return [future for future in one.waiting if future.set_running_or_notify_cancel()]
