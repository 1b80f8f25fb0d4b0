"""A request's constraint with item sets in it: made in the front end, carried to the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xgrammar

from itemset.embedded.placement import Place
from itemset.item_set import ItemSet
from itemset.serving.catalogue import InlineSet

ENVELOPE = "\0item_set_holes:"
"""Before what the engine gets of such a constraint, in place of a grammar. No grammar begins so."""

JSON, TAG, EBNF, LARK, SLATE = KINDS = ("json", "structural_tag", "ebnf", "lark", "slate")
SMALL = 20_000
"""Characters of a constraint, and of its grammar, that xgrammar compiles within about a tenth of a second."""


@dataclass(frozen=True, eq=False)
class SetHole:
    """A hole and the set in it. kept: the set, if it came with the request or was chosen for it, held meanwhile."""

    place: Place
    closers: bytes
    reference: str
    item_set: ItemSet = field(repr=False)
    kept: InlineSet | None = field(repr=False)


@dataclass(frozen=True, eq=False)
class Constraint:
    """A request's constraint with holes. In the request it stands in place of what it was made of.

    kind: one of KINDS. grammar: xgrammar's EBNF with the holes' tokens. compiled: it, in this process.
    slate: of a slate that a device can make, how many items come after the first, and the token between two, or
        NO_TOKEN. least: of a slate, tokens that none has fewer of.
    """

    kind: str
    grammar: str
    holes: Sequence[SetHole]
    compiled: xgrammar.CompiledGrammar = field(repr=False)
    slate: tuple[int, int] | None = None
    least: int = 0

    def __deepcopy__(self, memo: Any) -> Constraint:
        """Engines copy a request's parameters; this is immutable."""
        return self

    @property
    def references(self) -> list[str]:
        return list(dict.fromkeys(hole.reference for hole in self.holes))

    def spec(self) -> str:
        """Return what `embedded_grammars.Grammars` reads in the engine."""
        holes = [
            [one.reference, one.closers.decode("latin-1"), one.place.group, one.place.begins] for one in self.holes
        ]
        return ENVELOPE + json.dumps([self.grammar, holes])
