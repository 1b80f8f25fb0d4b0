"""Runs the programs of a Triton launch as a GPU may: begun in any order, each taking turns with the others.

Triton's interpreter runs one program after the other. Here each has a thread, one of which runs at a time; before each
access to memory it may hand over to another one.
"""

from __future__ import annotations

import inspect
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime import interpreter

ACCESSES = ("create_load", "create_store", "create_masked_load", "create_masked_store", "create_atomic_rmw")


@contextmanager
def interleaved(seed: int, chance: float = 0.1) -> Iterator[None]:
    """chance: how likely a program hands over before an access. Seldom, so that others overtake the one that waits."""
    draw = random.Random(seed)
    turns = _Turns(draw, chance)
    builder = interpreter.interpreter_builder

    def access(original: Callable[..., Any]) -> Callable[..., Any]:
        def hand_over_first(*args: Any, **kwargs: Any) -> Any:
            turns.hand_over()
            return original(*args, **kwargs)

        return hand_over_first

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        scope = interpreter._patch_lang(self.fn)
        try:
            given = inspect.getcallargs(self.fn, *args, **{key: kwargs[key] for key in kwargs if key in names})
            given = {n: v if n in self.constexprs else interpreter._implicit_cvt(v) for n, v in given.items()}
            grid = (*self.grid, 1, 1)[:3]
            builder.set_grid_dim(*grid)
            programs = list(itertools.product(*map(range, grid)))
            draw.shuffle(programs)
            turns.run(lambda: self.fn(**given), programs)
        finally:
            scope.restore()

    accesses = {name: access(getattr(builder, name)) for name in ACCESSES}
    with mock.patch.object(interpreter.GridExecutor, "__call__", launch), mock.patch.multiple(builder, **accesses):
        yield


class _Turns:
    def __init__(self, draw: random.Random, chance: float) -> None:
        self._draw, self._chance = draw, chance
        self._waiting: dict[tuple[int, ...], threading.Semaphore] = {}

    def run(self, program: Callable[[], None], indices: list[tuple[int, ...]]) -> None:
        """Run a program for each index, to their ends. Raises what the first of them raises."""
        self._waiting = {index: threading.Semaphore(0) for index in indices}
        self._ended, errors = threading.Semaphore(0), []

        def one(index: tuple[int, ...]) -> None:
            self._wait(index)
            try:
                program()
            except BaseException as error:
                errors.append(error)
            del self._waiting[index]
            self._wake_any() if self._waiting else self._ended.release()

        threads = [threading.Thread(target=one, args=[index], daemon=True) for index in indices]
        for thread in threads:
            thread.start()
        self._wake_any()
        self._ended.acquire()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def hand_over(self) -> None:
        if self._draw.random() < self._chance:
            index = interpreter.interpreter_builder.grid_idx
            self._wake_any()
            self._wait(index)

    def _wake_any(self) -> None:
        self._draw.choice(list(self._waiting.values())).release()

    def _wait(self, index: tuple[int, ...]) -> None:
        self._waiting[index].acquire()
        interpreter.interpreter_builder.grid_idx = index
