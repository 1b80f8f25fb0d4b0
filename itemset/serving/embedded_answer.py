"""The items that an answer under a constraint with item sets has, with their keys and places."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from itemset.embedded.answer_items import json_paths
from itemset.embedded.composite_grammar import Composite, Found
from itemset.embedded.holes import Hole, Items
from itemset.embedded.vocabulary import Vocabulary
from itemset.serving.answer_fields import Logs
from itemset.serving.catalogue import Catalogue
from itemset.serving.constraint import JSON, Constraint, SetHole
from itemset.serving.wire import INLINE, name_of


@dataclass(frozen=True)
class ExpectedItems:
    """What a front end keeps of a request whose constraint has holes, and reads the answer's tokens with.

    The rest is as for `answer.Expected`.
    """

    constraint: Constraint
    vocabulary: Vocabulary
    catalogue: Catalogue
    stop_tokens: frozenset[int]
    content: Callable[[Sequence[int]], Sequence[int]] | None = None

    weighed = ""

    def answer_fields(self, tokens: Sequence[int], *, cut: bool, logs: Logs = ((), ())) -> dict[str, Any]:
        """What an answer says of its items: a list, in their order. cut: whether it ended before its end."""
        tokens = tokens if self.content is None else self.content(tokens)
        bridges = self.vocabulary.bridges
        holes = [
            Hole(Items(hole.item_set), bridges(hole.closers) if hole.closers else None, *_group(hole))
            for hole in self.constraint.holes
        ]
        composite = Composite(self.vocabulary, self.constraint.compiled, holes, self.stop_tokens)
        composite.read(tokens)
        text = b"".join(self.vocabulary.bytes[token] for token in tokens if 0 <= token < self.vocabulary.size)
        paths = json_paths(text) if self.constraint.kind == JSON else {}
        return {"items": [self._item(one, text, paths.get(one.begin)) for one in composite.found]}

    def _item(self, found: Found, text: bytes, path: str | None) -> dict[str, Any]:
        hole = self.constraint.holes[found.hole]
        keys = hole.item_set.keys_of([found.tokens])[0]
        shown = text[found.begin : found.end].decode("utf-8", "replace")
        if hole.place.quoted:
            shown = json.loads(f'"{shown}"', strict=False)
        where = {} if path is None else {"path": path}
        named = {} if hole.reference.startswith(INLINE) else {"set": name_of(hole.reference)}
        told = self.catalogue.version_fields(hole.reference)
        return {**where, "text": shown, **named, "key": keys[0], "keys": keys, **told}


def _group(hole: SetHole) -> tuple[int | None, bool]:
    return hole.place.group, hole.place.begins
