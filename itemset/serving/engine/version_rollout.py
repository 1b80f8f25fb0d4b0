"""Version roll-outs in an engine: a version is opened, brought to the devices and served, as front ends ask for it.

A version's life:

              front end (Follower)      engine (Preparer)             its workers or ranks
    seen      published.current
    opened    Checks.open           ->  Prepare: Catalogue.begin   ->  Catalogue.begin
    copied    asks again            ->  Prepare: Holdings.hold    ->  Arena.place_next, a piece for each message
    current   Catalogue.serve       <-  Catalogue.serve           ->  Catalogue.serve
    forgotten by the second `serve` after it; its copy on disk once no process has it open

A process with requests has a `Preparer`. Its `Devices` know the engine's workers or ranks. Nothing waits between steps.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.masking.arena_plan import ArenaFullError, Holdings, Piece
from itemset.serving.catalogue import Catalogue, Opened
from itemset.serving.wire import Answer, Drop, Message, Prepare, Stage

Result = TypeVar("Result")


class Devices:
    """How an engine brings versions to its devices. This one has none: masks are made on the host.

    The argument `engine` of methods is what reaches the engine's other processes.
    """

    def check(self, item_set: ItemSet) -> None:
        """Check a set, on the thread that has opened it. Raises ItemSetError."""

    def advance(self, engine: Any, message: Prepare, opened: Opened | str | None) -> list[Stage | str]:
        """Bring a version to the devices, or a piece of it. Return the stage of each process, or why it cannot be had.

        opened: here; None while it is being opened, or why it cannot be.
        """
        if isinstance(opened, str):
            return [opened]
        return [Stage.OPENING if opened is None else Stage.HOST]

    def close(self, engine: Any, name: str, version: str | None, open_sets: Collection[str]) -> None:
        """A version is served, None if its set is gone. open_sets: digests of the sets whose versions stay open."""


class Preparer:
    """Answers the messages of front ends, in a process whose requests have item sets. For one thread."""

    def __init__(self, catalogue: Catalogue, log: logging.Logger, devices: Devices | None = None) -> None:
        self._catalogue, self._log, self._devices = catalogue, log, devices or Devices()

    def answer(self, message: Any, engine: Any = None) -> Any:
        """Answer a message; both are plain values. What fails is refused and raises nothing: the engine goes on."""
        stage = or_reason(lambda: self._stage(msgspec.convert(message, Message), engine), self._log)
        return msgspec.to_builtins(Answer(refused=stage) if isinstance(stage, str) else Answer(stage))

    def _stage(self, message: Message, engine: Any) -> Stage | str:
        catalogue, devices = self._catalogue, self._devices
        if isinstance(message, Drop):
            catalogue.drop(message.name)
            devices.close(engine, message.name, None, catalogue.open_sets())
            return Stage.OPENING  # which nobody reads
        opened = or_reason(lambda: catalogue.begin(message, devices.check), self._log)
        stages = devices.advance(engine, message, opened)
        if refused := [stage for stage in stages if isinstance(stage, str)]:
            return refused[0]
        if not isinstance(opened, Opened):
            return Stage.OPENING
        stage = min(stage for stage in stages if not isinstance(stage, str))
        if stage.is_ready:
            catalogue.serve(opened)
            devices.close(engine, message.name, message.version, catalogue.open_sets())
        return stage


def or_reason(work: Callable[[], Result], log: logging.Logger) -> Result | str:
    """Return what `work` returns, or why it fails: an error would end the engine, or leave other ranks waiting."""
    try:
        return work()
    except ItemSetError as error:
        return str(error)
    except Exception as error:
        log.exception("A message about item sets could not be answered")
        return f"{type(error).__name__}: {error}"


def hold(holdings: Holdings, opened: Opened, options: str, log: logging.Logger) -> Piece | None:
    """Hold room for a version in an arena; without any return None, and log it. options: where the plugin's are set."""
    try:
        return holdings.hold(opened.name, opened.item_set)
    except ArenaFullError as error:
        message = "Version %s of the item set %r takes the host path until there is room: %s (item_set_headroom %s)"
        log.warning(message, opened.version, opened.name, error, options)
        return None
