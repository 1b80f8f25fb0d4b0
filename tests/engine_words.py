"""Words in which tests ask either engine, and what they read of its answers. Each `Engine` translates them."""

from __future__ import annotations

from typing import Any, NamedTuple

EOS = 1
PROMPT = [7, 8, 9]
CITIES = ["Paris", "London", "New York", "New York City"]

Item = tuple[int, ...]
Ranked = list[tuple[float, Item]]


class Answer(NamedTuple):
    """said: what else it says, such as its item and items."""

    tokens: Item
    text: str
    finish: str
    said: dict[str, Any]

    @property
    def item(self) -> Item:
        """The tokens before the stop token."""
        return self.tokens[:-1] if self.tokens[-1] == EOS else self.tokens


class Found(NamedTuple):
    """A ranked list: (score, tokens with the end token), and the text and the keys of each of its items."""

    items: Ranked
    texts: list[str]
    keys: list[list[Any]]
    proven: bool
    passes: int


def asked(item_set: str, **words: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "max_tokens": 20, "item_set": item_set} | words


def prompts(count: int) -> list[list[int]]:
    """Different ones, in token ids."""
    return [[200 + i % 1_800, 300 + i % 7, 400] for i in range(count)]
