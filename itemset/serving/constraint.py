"""A request's constraint with item sets in it: made in the front end, and carried to the engine."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xgrammar

from itemset.embedded.placement import Place
from itemset.serving.catalogue import InlineSet

ENVELOPE = "\0item_set_holes:"  # begins what the engine gets of such a constraint; no grammar begins so
SMALL = 20_000  # characters of a constraint, and of its grammar, that xgrammar compiles in about a tenth of a second


class SetHole(NamedTuple):
    """A hole and the set in it, which is held meanwhile."""

    place: Place
    closers: bytes
    made: InlineSet


@dataclass(frozen=True, eq=False)
class Constraint:
    """A request's constraint with holes. In the request it stands in place of what it was made of."""

    kind: str  # of `embedded.placement`
    grammar: str  # xgrammar's EBNF with the holes' tokens
    holes: Sequence[SetHole]
    compiled: xgrammar.CompiledGrammar = field(repr=False)  # the grammar, in this process

    def __deepcopy__(self, memo: Any) -> "Constraint":
        """Engines copy a request's parameters; this is immutable."""
        return self

    @property
    def sets(self) -> list[InlineSet]:
        return list({hole.made.reference: hole.made for hole in self.holes}.values())

    def spec(self) -> str:
        holes = [
            [one.made.reference, one.closers.decode("latin-1"), one.place.group, one.place.begins] for one in self.holes
        ]
        return ENVELOPE + json.dumps([self.grammar, holes])


def after(mark: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens after the first occurrence of `mark`, none where it does not occur."""
    begin = -1
    with suppress(ValueError):  # `index` reads megabytes in a millisecond
        while True:
            begin = tokens.index(mark[0], begin + 1)
            if [*tokens[begin : begin + len(mark)]] == [*mark]:
                return tokens[begin + len(mark) :]
    return ()
