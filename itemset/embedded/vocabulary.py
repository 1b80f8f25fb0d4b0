"""A model's vocabulary as xgrammar sees it, with ids for holes after it.

A hole is one token of a grammar that no model has: its id comes after the vocabulary, on the border of a 32-bit word,
so that its bit never reaches a model's mask. Its bytes are no UTF-8, so that no text of a grammar lets it in.
"""

import functools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import xgrammar
from numpy.typing import NDArray

Made = TypeVar("Made")

HOLES = 31
"""Holes of one grammar. One id more is the decoy, which no grammar names."""

_NAMES_TOKENS = re.compile(r"(?<!\w)(ExcludeToken|TokenTagDispatch|Token\(\s*(?:\d+\s*,\s*)*\d+)")


@dataclass(eq=False)
class Bridges:
    """Tokens that are the last token of an item and the text that closes it: `)",` is `)` and `",`.

    by_last: of each token that may be the item's last, the bridges with the text after it.
    by_token: of each bridge, its last tokens with the text after them. last: a bit for each key of `by_last`,
        [ceil(vocabulary / 32)] uint32. alone: of a text after a last token, the token that it is, if there is one.
    """

    last: NDArray[np.uint32]
    by_last: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    by_token: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    alone: dict[bytes, int] = field(default_factory=dict)


class Vocabulary:
    """One of each process. Safe for threads."""

    def __init__(self, info: xgrammar.TokenizerInfo, threads: int = 2) -> None:
        """info: of the model's tokenizer, its size that of the model's logits. threads: of one compilation."""
        self._lock = threading.Lock()
        self.bytes: list[bytes] = list(info.decoded_vocab)
        """What each token adds to a text; of a special token, whatever xgrammar takes it for."""
        self.size = len(self.bytes)
        self.first = -(-self.size // 32) * 32
        self.decoy = self.first + HOLES
        self.words, self.model_words = -(-(self.decoy + 1) // 32), self.first // 32
        self._special = {*info.stop_token_ids, *info.special_token_ids}
        padded = [*self.bytes, *[b""] * (self.first - self.size)]
        padded += [b"\xff" + bytes([0xF8, 0x80 + i]) for i in range(HOLES + 1)]
        longer = xgrammar.TokenizerInfo(
            padded,
            xgrammar.VocabType.RAW,
            vocab_size=len(padded),
            stop_token_ids=info.stop_token_ids,
            add_prefix_space=info.add_prefix_space,
        )
        # The rules' cache of xgrammar 0.2 forgets the ids of Token() and hands out the masks of another grammar's rule.
        # Holes are asked by `accept_token` and never read off a mask; grammars with a model's own ids go without it.
        self._cached = xgrammar.GrammarCompiler(longer, max_threads=threads, cache_limit_bytes=64 << 20)
        self._exact = xgrammar.GrammarCompiler(longer, max_threads=threads, cache_enabled=False)

    def compile(self, grammar: str) -> xgrammar.CompiledGrammar:
        """Compile a grammar in xgrammar's EBNF, in which `Token(first + k)` is hole k. Raises RuntimeError."""
        parsed = xgrammar.Grammar.from_ebnf(grammar)
        return (self._exact if self._names_tokens(grammar) else self._cached).compile_grammar(parsed)

    def _names_tokens(self, grammar: str) -> bool:
        """Whether the grammar names ids that the model has."""
        for found in _NAMES_TOKENS.findall(grammar):
            if not found.startswith("Token(") or any(int(i) < self.first for i in re.findall(r"\d+", found)):
                return True
        return False

    def bridges(self, closers: bytes) -> Bridges:
        """Return the bridges over each of these bytes, with which what follows a hole begins."""
        with self._lock:  # the first request may be many at once, for which one of them looks
            return self._bridges(closers)

    @functools.lru_cache(16)  # noqa: B019 - one object a process
    def _bridges(self, closers: bytes) -> Bridges:
        ids: dict[bytes, list[int]] = {}  # SentencePiece has two tokens of one byte
        for token, text in enumerate(self.bytes):
            if token not in self._special:
                ids.setdefault(text, []).append(token)
        found = Bridges(np.zeros(self.model_words, np.uint32))
        for token, text in enumerate(self.bytes):
            if token in self._special:
                continue
            for closer in closers:
                at = text.find(bytes([closer]), 1)
                for last in ids.get(text[:at], ()) if at > 0 else ():
                    found.by_last.setdefault(last, []).append((token, text[at:]))
                    found.by_token.setdefault(token, []).append((last, text[at:]))
                    found.last[last >> 5] |= np.uint32(1 << (last & 31))
                    if text[at:] in ids:
                        found.alone[text[at:]] = ids[text[at:]][0]
        return found


class Once(Generic[Made]):
    """What is made when it is first asked for. Safe for threads: one makes it, and the others wait."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: Made | None = None

    def get(self) -> Made:
        """Return it. Raises as its making does, which another call then tries again."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made
