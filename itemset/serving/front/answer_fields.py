"""Which item an answer is: what a front end keeps of a request with a set, and reads the answer's tokens with."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from itemset.embedded.composite_grammar import Composite, Found
from itemset.embedded.holes import Hole, Items, Vocabulary
from itemset.embedded.placement import JSON
from itemset.item_set import ItemSet
from itemset.ranking.search import of_items
from itemset.serving.catalogue import Catalogue
from itemset.serving.constraint import Constraint
from itemset.serving.wire import INLINE, LOGPROBS, name_of

FIELDS = ("item", "items", LOGPROBS)  # of an answer: which items it is or holds, and its tokens' log-probabilities

_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*("?)|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")

Logs = tuple[Sequence[float], Sequence[float]]  # log p and log q of an answer's tokens: by the model, inside the set


def told_of(output: Any) -> dict[str, Any]:
    """Return those of the fields that an engine's output has."""
    return {name: getattr(output, name) for name in FIELDS if hasattr(output, name)}


@dataclass(frozen=True)
class Expected:
    """What a front end keeps of a request with a set, and reads the answer's tokens with."""

    item_set: ItemSet
    stop_tokens: frozenset[int]  # at which the request ends; none of them occurs in an item
    content: Callable[[Sequence[int]], Sequence[int]] | None = None  # takes the reasoning off an output that has any
    of_set: Mapping[str, str] = field(default_factory=dict)  # `Catalogue.version_fields`
    weighed: str = ""  # see `ItemRequest`
    names: Sequence[str] = ()  # of the attributes that answers say
    reference: str = ""  # of its set
    healed: bool = False  # whether its text begins with a space of the prompt's

    def answer_fields(self, tokens: Sequence[int], *, cut: bool, logs: Logs = ((), ())) -> dict[str, Any]:
        """Return what an answer says: its item. cut: whether it was aborted; a stop string may end an item.

        logs: of a weighed answer, not finite if the engine could not tell. Their difference is the logarithm of the
        legal mass, the model's probability of all tokens allowed there, and the sum of that the item's `set_weight`.
        """
        item = None if cut else self._item(tokens)
        if self.weighed == LOGPROBS:
            return {"item": item, LOGPROBS: item_logprobs(*logs)}
        if item is not None and self.weighed:
            weight = math.fsum(logs[0]) - math.fsum(logs[1])
            item["set_weight"] = weight if math.isfinite(weight) else None
        return {"item": item}

    def parts(self, tokens: Sequence[int], begin: int | None = None) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of an output's reasoning, and those of its item, before the first stop token.

        begin: where the item begins, if that is known: else all of the reasoning is looked through.
        """
        if begin is None:
            begin = len(tokens) - len(tokens if self.content is None else self.content(tokens))
        end = next((i for i in range(begin, len(tokens)) if tokens[i] in self.stop_tokens), len(tokens))
        return tokens[:begin], tokens[begin:end]

    def begun(self, tokens: Sequence[int]) -> bool:
        """Return whether the answer's item has begun: before it there may be reasoning."""
        return self.content is None or len(self.content(tokens)) > 0

    def _item(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        """Return what an answer says of its item; None if it did not end where a stop token follows one, or nothing
        else could. tokens: the whole output, with `ignore_eos` with many stop tokens."""
        before, of_item = self.parts(tokens)
        if not of_item or (item := self.item_set.find(of_item)) is None:
            return None
        if not self.stop_tokens.issuperset(tokens[len(before) + len(of_item) :]):
            return None
        key, is_prefix = item
        if is_prefix and tokens[-1] not in self.stop_tokens:
            return None
        told = of_items(self.item_set, [of_item], self.names)[0] if self.names else {"key": key}
        return {name: value for name, value in told.items() if name != "keys"} | {**self.of_set}


def item_logprobs(log_p: Sequence[float], log_q: Sequence[float]) -> dict[str, list[float]] | None:
    """Return what a candidate says of its tokens, its end token too: log q, by which sampling inside the set draws
    each, and log p, the model's own. None if the engine could not tell."""
    known = all(map(math.isfinite, (*log_p, *log_q)))
    return {"log_q": list(log_q), "log_p": list(log_p)} if known else None


@dataclass(frozen=True)
class ExpectedItems:
    """The same of a request whose constraint has holes."""

    constraint: Constraint
    vocabulary: Vocabulary
    catalogue: Catalogue
    stop_tokens: frozenset[int]
    content: Callable[[Sequence[int]], Sequence[int]] | None = None
    names: Sequence[str] = ()

    weighed = ""

    def answer_fields(self, tokens: Sequence[int], *, cut: bool, logs: Logs = ((), ())) -> dict[str, Any]:
        """Return what an answer says of its items: a list, in their order. cut: whether it was aborted."""
        tokens = tokens if self.content is None else self.content(tokens)
        holes = [
            Hole(Items(one.made.item_set), self.vocabulary.bridges(one.closers), one.place.group, one.place.begins)
            for one in self.constraint.holes
        ]
        composite = Composite(self.vocabulary, self.constraint.compiled, holes, self.stop_tokens)
        composite.read(tokens)
        text = b"".join(self.vocabulary.bytes[token] for token in tokens if 0 <= token < self.vocabulary.size)
        told, found = dict[int, dict[str, Any]](), composite.found
        paths = json_paths(text, {one.begin for one in found}) if self.constraint.kind == JSON else {}
        for made in self.constraint.sets:  # what one says of all its items is looked up together
            at = [i for i, one in enumerate(found) if self.constraint.holes[one.hole].made.reference == made.reference]
            told |= zip(at, of_items(made.item_set, [found[i].tokens for i in at], self.names), strict=True)
        return {"items": [self._item(one, text, paths.get(one.begin), told[i]) for i, one in enumerate(found)]}

    def _item(self, found: Found, text: bytes, path: str | None, own: dict[str, Any]) -> dict[str, Any]:
        hole = self.constraint.holes[found.hole]
        reference, shown = hole.made.reference, text[found.begin : found.end].decode("utf-8", "replace")
        if hole.place.quoted:
            shown = json.loads(f'"{shown}"', strict=False)
        shown = shown.removeprefix(" ") if hole.place.spaced else shown
        where = {} if path is None else {"path": path}
        named = {} if reference.startswith(INLINE) else {"set": name_of(reference)}
        return {**where, "text": shown, **named, **own, **self.catalogue.version_fields(reference)}


def json_paths(text: bytes, at: Collection[int]) -> dict[int, str]:
    """Return the path (`$.films[0]`) of each string or number in a JSON text, or in the beginning of one, whose content
    begins at one of these bytes. Keys of objects have none. What a pattern lets in may be no JSON."""
    found: dict[int, str] = {}
    above: list[str | int | None] = []  # of each open object the key, of each array the place
    is_key = False
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token in (b"{", b"["):
            above.append(None if token == b"{" else 0)
            is_key = token == b"{"
        elif token in (b"}", b"]"):
            if above:
                above.pop()
        elif token == b",":
            is_key = bool(above) and not isinstance(above[-1], int)
            if above and isinstance(above[-1], int):
                above[-1] += 1
        elif token == b":":
            is_key = False
        elif not is_key:
            if (begin := match.start() + token.startswith(b'"')) in at:
                found[begin] = "$" + "".join(_step(one) for one in above)
        elif match[1] and above:  # a key that is whole
            try:
                above[-1] = json.loads(token)
            except ValueError:
                above[-1] = token[1:-1].decode("utf-8", "replace")
    return found


def _step(key: str | int | None) -> str:
    key = "" if key is None else key
    return f".{key}" if _NAME.fullmatch(str(key)) else f"[{json.dumps(key)}]"
