"""Engines and servers that tests share, because memory and cores are few."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import cloudpickle


class Closable(Protocol):
    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...


Process = TypeVar("Process", bound=Closable)


class Pool(Generic[Process]):
    """Makes engines or servers and keeps the last few that were used.

    Tests that ask with equal arguments share one, and should leave it as they found it.
    """

    def __init__(self, make: Callable[..., Process], keep: int) -> None:
        self.make = make
        self.keep = keep
        self._running: OrderedDict[bytes, Process] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Process:
        key = cloudpickle.dumps((tuple(map(str, args)), sorted(kwargs.items())))
        process = self._running.pop(key, None)
        if process is None or not process.alive:
            if process is not None:
                process.close()
            for ended in [key for key, one in self._running.items() if not one.alive]:
                self._running.pop(ended).close()
            while len(self._running) >= self.keep:
                self._running.popitem(last=False)[1].close()
            process = self.make(*args, **kwargs)
        self._running[key] = process
        return process

    def close(self) -> None:
        while self._running:
            self._running.popitem()[1].close()
