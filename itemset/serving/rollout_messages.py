"""Messages of version roll-outs, between a front end that follows published sets and its engines.

A version's life:

              front end (following)     engine (preparing)            its workers or ranks
    seen      published.current
    opened    Checks.open           ->  Prepare: Versions.begin   ->  Versions.begin
    copied    asks again            ->  Prepare: Holdings.hold    ->  Arrivals.advance, a piece for each message
    current   Catalogue.serve       <-  Catalogue.serve           ->  Catalogue.serve
    forgotten by the second `serve` after it; its copy on disk once no process has it open

Engines carry messages as plain values: `msgspec.to_builtins` at one end, `msgspec.convert` at the other.
"""

from enum import IntEnum

import msgspec


class Prepare(msgspec.Struct, tag=True):
    """Open a version of a set and bring it to the devices; it is served once it is there. Sent until it is.

    path: of its file. seal: of the copy that the front end has checked. ahead: only open it, it is still being checked.
    """

    name: str
    version: str
    path: str
    seal: list[str | int] | None = None
    ahead: bool = False


class Serves(msgspec.Struct, frozen=True, tag=True):
    """A front end serves the version with this sequence number. front, fronts: its number, and how many there are."""

    name: str
    sequence: int
    front: int
    fronts: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """No request will name this set any more."""

    name: str


Message = Prepare | Serves | Drop


class Stage(IntEnum):
    """How far a version has come in a process, which opens it and copies it to its device, a piece for each message.

    The lowest stage of all processes is the engine's. HOST: the device has no room, so masks are made on the host.
    """

    HOST = 0
    OPENING = 1
    COPYING = 2
    DEVICE = 3

    @property
    def is_ready(self) -> bool:
        """Whether requests may have the version."""
        return self in (Stage.HOST, Stage.DEVICE)


class Answer(msgspec.Struct, frozen=True):
    """Of an engine. stage: of what is prepared. refused: why it cannot be had. everywhere: whether all of the engine's
    front ends serve this sequence number or a later one."""

    stage: Stage = Stage.OPENING
    refused: str | None = None
    everywhere: bool = False
