"""One pass over a constraint before anything else: its limits, and where in it sets and references stand."""

import json
from collections.abc import Iterator
from typing import Any

from itemset.embedded.placement import NO_SCHEMAS, WORD
from itemset.errors import ItemSetError
from itemset.select.filters import digits

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
PLACES = 1_000
"""Places of one constraint, each reference counted as one; each takes its time."""
TEXT = 1 << 20
"""Characters of one constraint, lists of texts and keys among them."""
SETS, REFERRING, ANY = 1, 2, 3
"""What may stand in a part of a constraint: item sets, references, either."""
_DEEPEST = 128
"""Levels of a constraint with item sets: what is deeper would end in a stack that overflows, xgrammar's or Python's."""


class Survey:
    """What stands in the objects and lists of a constraint, whatever it means there."""

    def __init__(self) -> None:
        self._characters = self.references = 0
        self._holding = dict[int, int]()  # by the id of an object or list

    def add(self, node: Any, depth: int = 1) -> int:
        """Survey a parsed constraint; return what stands in it. Raises ItemSetError: too long or too deep."""
        self._characters += 1 + (len(node) if isinstance(node, str) else digits(node))
        if not isinstance(node, dict | list):
            return 0
        if depth > _DEEPEST:
            raise _too_deep()
        holding = 0
        for value in node if isinstance(node, list) else ():
            holding |= self.add(value, depth + 1)
        for key, value in node.items() if isinstance(node, dict) else ():
            self._characters += len(str(key))
            below = self.add(value, depth + 1)
            holding |= 0 if key in NO_SCHEMAS else below
        check_characters(self._characters)
        if isinstance(node, dict):
            references = sum(word in node for word in REFERENCES)
            self.references += references
            holding |= SETS * (WORD in node) | REFERRING * (references > 0)
        self._holding[id(node)] = holding
        return holding

    def holds(self, node: Any, what: int) -> bool:
        """Whether sets or references stand anywhere in a part of the constraint. what: SETS, REFERRING or ANY."""
        return bool(self._holding.get(id(node), 0) & what)


def parse(given: Any) -> Any:
    """Return a constraint, an object or its JSON text, as an object. Raises ItemSetError: no JSON, or too deep."""
    try:
        check_characters(len(given) if isinstance(given, str) else 0)
        parsed = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ItemSetError(f"the constraint is no JSON: {error}") from error
    except RecursionError:
        parsed = None
    if parsed is None:
        raise _too_deep()
    return parsed


def objects(given: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a constraint with its path, whatever it means there, but for constants."""
    if isinstance(given, dict):
        yield path, given
        for key, value in given.items():
            if key not in NO_SCHEMAS:
                yield from objects(value, f"{path}.{key}")
    elif isinstance(given, list):
        for i, value in enumerate(given):
            yield from objects(value, f"{path}[{i}]")


def check_characters(count: int) -> None:
    """Raises ItemSetError for a constraint of more characters than TEXT."""
    if count > TEXT:
        raise ItemSetError(
            f"the constraint has more than {TEXT:,} characters: register long lists as item sets, and state less"
        )


def _too_deep() -> ItemSetError:
    return ItemSetError(f"the constraint is nested more than {_DEEPEST} levels deep: make it flatter")
