"""Which item an answer is: what a front end keeps of a request with a set, and reads the answer's tokens with."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from itemset.item_set import ItemSet
from itemset.serving.request_fields import LOGPROBS

FIELDS = ("item", "items", LOGPROBS)
"""What an answer says of items: which it is, or which it holds, and its tokens' log-probabilities."""

Logs = tuple[Sequence[float], Sequence[float]]
"""log p and log q of each token of an answer: by the model, and inside the set."""


def told_of(output: Any) -> dict[str, Any]:
    """Those of the fields that an engine's output has."""
    return {name: getattr(output, name) for name in FIELDS if hasattr(output, name)}


@dataclass(frozen=True)
class Expected:
    """One request's set.

    stop_tokens: at which the request ends; none of them occurs in an item. content: what of the output comes after the
    reasoning, None where there is none. of_set: `Catalogue.version_fields`. weighed: see `ItemRequest`.
    """

    item_set: ItemSet
    stop_tokens: frozenset[int]
    content: Callable[[Sequence[int]], Sequence[int]] | None = None
    of_set: Mapping[str, str] = field(default_factory=dict)
    weighed: str = ""

    def answer_fields(self, tokens: Sequence[int], *, cut: bool, logs: Logs = ((), ())) -> dict[str, Any]:
        """What an answer says: its item. cut: whether it was aborted; a stop string may end an item.

        logs: of a weighed answer, not finite if the engine could not tell. Their difference is the logarithm of the
        legal mass, the model's probability of all tokens allowed there, and the sum of that the item's `set_weight`.
        """
        item = None if cut else self.item(tokens)
        if self.weighed == LOGPROBS:
            return {"item": item, LOGPROBS: item_logprobs(*logs)}
        if item is not None and self.weighed:
            weight = math.fsum(logs[0]) - math.fsum(logs[1])
            item["set_weight"] = weight if math.isfinite(weight) else None
        return {"item": item}

    def begun(self, tokens: Sequence[int]) -> bool:
        """Whether the answer's item has begun: before it there may be reasoning."""
        return self.content is None or len(self.content(tokens)) > 0

    def item(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        """What an answer says of its item, {"key": ...} and more; None if it did not end at an item's end: where a stop
        token follows, or nothing else could. tokens: the whole output, with `ignore_eos` with many stop tokens."""
        tokens = tokens if self.content is None else self.content(tokens)
        end = len(tokens)
        while end and tokens[end - 1] in self.stop_tokens:
            end -= 1
        if not end or (item := self.item_set.find(tokens[:end])) is None:
            return None
        key, is_prefix = item
        return None if is_prefix and end == len(tokens) else {"key": key, **self.of_set}


def item_logprobs(log_p: Sequence[float], log_q: Sequence[float]) -> dict[str, list[float]] | None:
    """What a candidate says of its tokens, the end token too: log q, by which sampling inside the set draws each of
    them, and log p, the model's own over the vocabulary. None if the engine could not tell."""
    known = all(map(math.isfinite, (*log_p, *log_q)))
    return {"log_q": list(log_q), "log_p": list(log_p)} if known else None


def after(mark: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """The tokens after the first occurrence of `mark`, none where it does not occur."""
    mark, length = list(mark), len(mark)
    for start in range(len(tokens) - length + 1):
        if list(tokens[start : start + length]) == mark:
            return tokens[start + length :]
    return ()
