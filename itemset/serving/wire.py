"""What a request carries of its item sets from front end to scheduler and workers, and back; messages of roll-outs.

Both engines carry it among a request's own parameters, under the key WIRE: vLLM in `extra_args`, as a struct; SGLang in
`custom_params`, as JSON, with the sets at SETS. Messages are what `msgspec.to_builtins` makes.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from itemset.masking.arena_plan import Place
from itemset.ranking.search import widest

WIRE, SETS = "item_set_wire", "item_set_wire_sets"
"""The keys of an EngineRequest and, in SGLang, of its sets. Clients may not send them."""
LOGPROBS = "item_logprobs"
"""Asks every candidate for log q and log p of each of its tokens: see `front.answer_fields.item_logprobs`."""
MOST_LOGITS = 1 << 30
"""Bytes of logits that a worker of vLLM has in memory at once for lists; a draft head's beams are limited by it."""
INLINE, VIEW, FORM, VERSION = "inline:", "view:", "form:", "version:"
"""How references begin: INLINE + digest, of texts; VERSION + version + "@" + name, of a registered set; FORM +
version + "@" + reference, of that as some places spell its items; VIEW + digest + "@" + reference, of what a filter or
keys leave of another."""

Tokens = tuple[int, ...]


class SetRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which set a request has.

    index: the index file of an inline set, or what a selection has of its own; None of a set that the receiver knows.
    base: the filter that the set stands on, if the receiver does not know it.
    """

    reference: str
    index: bytes | None = None
    base: "SetRef | None" = None


class ListSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ranked list of `k` items by a beam of this width, or by one for each level; or the draws of some races, k items
    and one beam each.

    end_token: the token after each item. without_end: whether scores omit it. renormalised: whether scores are of the
    distribution over the set. races: keys, see `Drawing.races`. temperature: of draws. placeholders: tokens after the
    prompt, if a draft head makes the list; 0 for beams of the model. boost, normalise_length: see
    `ranking.beams.Beams`.
    """

    k: int
    width: int | tuple[int, ...]
    end_token: int
    without_end: bool = False
    renormalised: bool = False
    races: Tokens = ()
    temperature: float = 1.0
    placeholders: int = 0
    boost: float = 0.0
    normalise_length: float = 0.0

    @property
    def scored_end(self) -> int | None:
        """Return the end token that counts in the scores, if any does."""
        return None if self.without_end else self.end_token

    @property
    def beams(self) -> int:
        """Beams of the list, or of all races together."""
        return widest(self.width) * max(1, len(self.races))


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request carries: a set, or a constraint with sets in it; and whether it is a list of its items.

    grammar, sets: `Constraint.spec()`, and the sets in it. weighed: the field by which its answer says
    log-probabilities, if any. after: of a thought before a list, the tokens that end it, and those between both. place:
    where the set lies in vLLM's workers, from the engine core.
    """

    item_set: SetRef | None = None
    ranked: ListSpec | None = None
    grammar: str = ""
    sets: list[SetRef] = []
    weighed: str = ""
    after: tuple[Tokens, Tokens] | None = None
    place: Place | None = None

    @property
    def reference(self) -> str:
        """Of its set; empty if it has a constraint."""
        return self.item_set.reference if self.item_set else ""

    def but(self, **changes: Any) -> "EngineRequest":
        return msgspec.structs.replace(self, **changes)

    def weighs_at(self, temperature: float) -> float:
        """Return the temperature of an answer's log p and log q, 0 if not wanted; 1 for weights and greedy answers."""
        return (float(self.weighed == LOGPROBS and temperature) or 1.0) if self.weighed else 0.0

    @property
    def refs(self) -> list[SetRef]:
        return [self.item_set] if self.item_set else self.sets

    def json(self) -> dict[str, Any]:
        """Return what SGLang's `custom_params` carry: this with the names of its sets, and these, each as JSON."""
        names = [SetRef(one.reference) for one in self.refs]
        named = self.but(item_set=names[0]) if self.item_set else self.but(sets=names)
        return {WIRE: msgspec.json.encode(named).decode(), SETS: [_text(one) for one in self.refs]}


@lru_cache(16)
def _text(ref: SetRef) -> str:
    """Return a set as JSON: one object for all prompts of a request, so that a pickled batch has its megabytes once."""
    return msgspec.json.encode(ref).decode()


def read(params: Any) -> EngineRequest | None:
    """Return what a request's parameters carry, None if it has no item set. params: which a client may have given
    another type."""
    carried = params.get(WIRE) if isinstance(params, Mapping) else None
    if carried is None or isinstance(carried, EngineRequest):
        return carried
    if isinstance(carried, str):
        decoded = msgspec.json.decode(carried, type=EngineRequest)
        if isinstance(params, dict):
            params[WIRE] = decoded  # megabytes, of some sets, are not read twice
        return decoded
    return msgspec.convert(carried, EngineRequest)


class NoList(Enum):
    """Why an engine does not make a list, so that rounds of requests must: for which lists, and the metrics' label."""

    scope: Literal["engine", "set", "request"]

    NO_BLOCKS = "no room is kept for beams", "engine"
    NO_ROOM = "the beams do not fit in the room that is kept for them", "set"
    TOO_DEEP = "the set has too many levels", "set"
    TOO_LONG = "a list has too many tokens", "set"
    TOO_LARGE = "the set has too many tokens for the logits of a pass", "set"
    HOST_PATH = "the request took the host path", "request"
    NOT_HERE = "this engine makes no lists", "engine"
    TOO_MANY_ROWS = "too large for one request", "set"
    NO_ROOM_NOW = "no room for one request", "request"

    def __new__(cls, label: str, scope: Literal["engine", "set", "request"]) -> "NoList":
        self = object.__new__(cls)
        self._value_, self.scope = label, scope
        return self


REASONS = tuple(NoList)
"""In vLLM a worker's table is of one number, the place of its reason here."""
HEAD = 4
"""Numbers of a table's first row: see `ListResult.of_table`."""


class ListResult(msgspec.Struct, omit_defaults=True):
    """A list, or the draws of some races, that an engine has made; or the reason why it has not.

    items: of the list or of each race, tokens without the end token and scores, best first. proven: whether the list
    is proven, or all draws are decided. passes, rounds: what it took. reason: None if it was made. detail: what the
    log says of the reason. beams: that have room in a vLLM worker.
    """

    items: list[list[tuple[Tokens, float]]] = []
    proven: bool = False
    passes: int = 0
    rounds: int = 0
    reason: NoList | None = None
    detail: str = ""
    beams: int | None = None

    @classmethod
    def of_table(cls, table: NDArray[np.float64] | None, races: int = 1) -> "ListResult":
        """Read a vLLM worker's table, [1 + items, 2 + longest or HEAD] float64; None if the request took the host path.

        Its first row: 1 if proven, passes, rounds, beams that have room. Then a row an item, race after race: its
        score, how many tokens it has, and these; -inf after the last, or if undecided. No list: one number, of REASONS.
        """
        if table is None or table.shape[1] == 1:
            return cls(reason=NoList.HOST_PATH if table is None else REASONS[int(table[0, 0])])
        proven, passes, rounds, beams = table[0, :HEAD].astype(int).tolist()
        items = [list(_items(rows)) for rows in np.split(table[1:], max(1, races))]
        return cls(items, bool(proven), passes, rounds, beams=beams)


def _items(rows: NDArray[np.float64]) -> Iterator[tuple[Tokens, float]]:
    rows = rows[np.isfinite(rows[:, 0])]
    for score, (length, *tokens) in zip(rows[:, 0].tolist(), rows[:, 1:].astype(np.int64).tolist(), strict=True):
        yield tuple(tokens[:length]), score


class Prepare(msgspec.Struct, tag=True):
    """Open a version of a set, the file at `path`, and bring it to the devices. Sent until it is served."""

    name: str
    version: str
    path: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """No request will name this set any more."""

    name: str


Message = Prepare | Drop


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
        """Return whether requests may have the version."""
        return self in (Stage.HOST, Stage.DEVICE)


class Answer(msgspec.Struct, frozen=True):
    """Of an engine. stage: of what is prepared. refused: why it cannot be had."""

    stage: Stage = Stage.OPENING
    refused: str | None = None


def part_of(reference: str) -> str:
    """Return the reference of what a selection, or another spelling, was made of; the empty one of anything else."""
    return reference.partition("@")[2] if reference.startswith((VIEW, FORM)) else ""


def version_of(reference: str) -> tuple[str, str]:
    """Return the version, or "", and the name of a reference's registered set, also of a part's."""
    while above := part_of(reference):
        reference = above
    version, _, name = reference.removeprefix(VERSION).partition("@")
    return (version, name) if reference.startswith(VERSION) else ("", reference)


def name_of(reference: str) -> str:
    """Return the name of the registered set of a reference; an inline set's reference as it is."""
    return version_of(reference)[1]
