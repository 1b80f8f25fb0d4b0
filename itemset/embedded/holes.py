"""The holes of a grammar: their ids in the vocabulary, which items may stand in each, and which have been given.

A hole is one token of a grammar that no model has: its id comes after the vocabulary, on the border of a 32-bit word,
so that its bit never reaches a model's mask. Its bytes are no UTF-8, so that no text of a grammar lets it in.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import numpy as np
import xgrammar
from numpy.typing import NDArray

from itemset.item_set import ItemSet, build
from itemset.masking import host
from itemset.masking.host import Walk
from itemset.trie.pointers import compiled
from itemset.trie.walk import END

Made = TypeVar("Made")

HOLES = 31  # of one grammar; one id more is the decoy, which no grammar names

_INTEGER, _PIECE = re.compile(rb"-?(?:0|[1-9][0-9]*)"), re.compile(rb"-?[0-9]*")  # of JSON, and of a token in one
_NAMES_TOKENS = re.compile(r"(?<!\w)(ExcludeToken|TokenTagDispatch|Token\(\s*(?:\d+\s*,\s*)*\d+)")


@dataclass(eq=False)
class Bridges:
    """Tokens that are the last token of an item and the text that closes it: `)",` is `)` and `",`."""

    last: NDArray[np.uint32]  # [ceil(vocabulary / 32)], a bit for each key of `by_last`
    # Of each token that may be an item's last, the bridges, and of each bridge these, with the text after the last.
    by_last: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    by_token: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    alone: dict[bytes, int] = field(default_factory=dict)  # of such texts, the token that one is, if there is one


class Vocabulary:
    """One of each process. Safe for threads."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        """info: of the model's tokenizer, its size that of the model's logits."""
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
        stops, space = info.stop_token_ids, info.add_prefix_space
        longer = xgrammar.TokenizerInfo(padded, stop_token_ids=stops, add_prefix_space=space)
        # The rules' cache of xgrammar 0.2 forgets the ids of Token() and hands out the masks of another grammar's rule.
        # Holes are asked by `accept_token` and never read off a mask; grammars with a model's own ids go without it.
        self._cached = xgrammar.GrammarCompiler(longer, max_threads=2, cache_limit_bytes=64 << 20)
        self._exact = xgrammar.GrammarCompiler(longer, max_threads=2, cache_enabled=False)

    def compile(self, grammar: str) -> xgrammar.CompiledGrammar:
        """Compile a grammar in xgrammar's EBNF, in which `Token(first + k)` is hole k. Raises RuntimeError."""
        # As a text: of a Grammar, xgrammar compiles what it prints of it (see `printed`).
        if not self._names_tokens(grammar):
            with suppress(RuntimeError):  # that cache fails for patterns with counts above 128, too
                return self._cached.compile_grammar(grammar)
        return self._exact.compile_grammar(grammar)

    def _names_tokens(self, grammar: str) -> bool:
        return any(
            not found.startswith("Token(") or any(int(i) < self.first for i in re.findall(r"\d+", found))
            for found in _NAMES_TOKENS.findall(grammar)
        )

    def spells(self, tokens: NDArray[np.int32], offsets: NDArray[np.int64], texts: Sequence[bytes]) -> bool:
        """Return whether each text is what its tokens add up to. tokens, offsets: of all, as of `Rows`."""
        pieces = [self.bytes[token] for token in tokens.tolist()]
        ends = np.append(0, np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces))))[offsets]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return np.array_equal(np.diff(ends), lengths) and b"".join(pieces) == b"".join(texts)

    def not_integer(self, item_set: ItemSet) -> str | None:
        """Return the text of an item that JSON would not take for an integer, None if there is none.

        Looks at the tokens that there are, and at those items alone that may be wrong: all digits are right, unless a
        zero begins them.
        """
        texts = {token: self.bytes[token] if token < self.size else b"?" for token in item_set.token_ids.tolist()}
        odd = {token for token, text in texts.items() if not text.isdigit()}
        first, _ = item_set.children()
        zeros = [token for token in first.tolist() if texts[token].startswith(b"0")]
        longer = [token for token in zeros if texts[token] != b"0" or len(item_set.children([token])[0])]
        wrong = next((token for token in odd if _PIECE.fullmatch(texts[token]) is None), None)
        for item in item_set.items_at(item_set.holding([wrong] if wrong is not None else odd)):
            if _INTEGER.fullmatch(text := b"".join(texts[token] for token in item)) is None:
                return text.decode("utf-8", "replace")
        return texts[longer[0]].decode() + "..." if longer else None

    def bridges(self, closers: bytes) -> Bridges | None:
        """Return the bridges over each of these bytes, with which what follows a hole begins; None without any."""
        with self._lock:  # the first request may be many at once, for which one of them looks
            return self._bridges(closers) if closers else None

    @functools.lru_cache(8)  # noqa: B019 - one object a process
    def _bridges(self, closers: bytes) -> Bridges:
        texts = {token: text for token, text in enumerate(self.bytes) if token not in self._special}
        ids: dict[bytes, list[int]] = {}  # SentencePiece has two tokens of one byte
        for token, text in texts.items():
            ids.setdefault(text, []).append(token)
        found = Bridges(np.zeros(self.model_words, np.uint32))
        for token, text in texts.items():
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
        self._make: Callable[[], Made] | None = make
        self._made: Made | None = None
        self._lock = threading.Lock()

    def get(self) -> Made:
        """Return it. Raises as its making does, which another call then tries again."""
        with self._lock:
            if self._make is not None:
                self._made = self._make()
                self._make = None  # and what it holds
            return cast(Made, self._made)


_REMEMBERED = 1 << 12  # states of a set whose bridges are kept


class Closing:
    """The bridges that a state may leave its hole by, if the grammar takes what is more of them."""

    def __init__(self, bridges: Iterable[tuple[int, int, bytes]], alone: dict[bytes, int]) -> None:
        """bridges: of each an item's last token, the token that is it and more, and the text of what is more."""
        self.bridges = list(bridges)
        known = [(last, token, alone[rest]) for last, token, rest in self.bridges if rest in alone]
        self._lasts, self._tokens, self._rests = np.array(known, np.int64).reshape(-1, 3).T.copy()
        self.others = [one for one in self.bridges if one[2] not in alone]  # what is more is no token of its own

    def let_in(self, after: NDArray[np.int32], inside: NDArray[np.int32], row: NDArray[np.int32]) -> None:
        """Set in `row` the bridges whose rest may come `after` the hole, and their last token `inside`: bitmasks."""
        _let_in(self._lasts, self._tokens, self._rests, after, inside, row)


_NONE = Closing((), {})


@compiled
def _let_in(lasts: Any, tokens: Any, rests: Any, after: Any, inside: Any, row: Any) -> None:
    allowed = np.empty(len(tokens), np.bool_)
    for i in range(len(tokens)):  # before any is set: `inside` may be `row`
        allowed[i] = (after[rests[i] >> 5] >> (rests[i] & 31)) & (inside[lasts[i] >> 5] >> (lasts[i] & 31)) & 1
    for i in range(len(tokens)):
        if allowed[i]:
            row[tokens[i] >> 5] |= np.int32(1) << np.int32(tokens[i] & 31)


class Items(Walk):
    """The items that may come in a hole: a set without those that have been given. Immutable."""

    def __init__(self, item_set: ItemSet) -> None:
        super().__init__(item_set)
        self._all: Items | None = None  # itself; a reference to it would keep the set until Python looks for circles
        self._closing: dict[tuple[int, Bridges], tuple[Closing, list[int]]] = {}

    def without(self, tokens: tuple[int, ...]) -> "Items":
        """Return what is left after this item."""
        left = object.__new__(Items)
        left._all = self._all or self
        left._begin_without(self, tokens)
        return left

    def closing(self, state: int, bridges: Bridges) -> Closing:
        """Return the bridges over an item's end in this state. Its mask limits them further."""
        closing, longer = (self._all or self)._closing_of_all(state, bridges)
        if self._all is None or not longer:
            return closing
        given = {t for t in longer if not self.ends(self.step(state, t))}
        left = (one for one in closing.bridges if one[0] not in given)
        return Closing(left, bridges.alone) if given else closing

    def _closing_of_all(self, state: int, bridges: Bridges) -> tuple[Closing, list[int]]:
        """Return them, and the last tokens after which an item ends that begins a longer one, of the whole set."""
        key = (state, bridges)
        if (known := self._closing.get(key)) is not None:
            return known
        row = np.empty(len(bridges.last), np.int32)
        self.fill(state, row)
        words = row.view(np.uint32) & bridges.last
        at = np.flatnonzero(words)
        of, place = np.unpackbits(words[at].view(np.uint8), bitorder="little").reshape(-1, 32).nonzero()
        lasts = [last for last in (at[of] << 5 | place).tolist() if self.ends(self.step(state, last))]
        if len(self._closing) >= _REMEMBERED:
            self._closing.clear()
        found = [(last, *one) for last in lasts for one in bridges.by_last[last]]
        closing = Closing(found, bridges.alone) if found else _NONE
        self._closing[key] = known = closing, [last for last in lasts if self.step(state, last) != END]
        return known


def warm_up() -> None:
    """Load what masks and giving an item take: no request should wait for it."""
    host.warm_up()
    Items(build([[0], [1]])).without((0,)).step(0, 1)
    row = np.zeros(1, np.int32)
    Closing([(0, 1, b"")], {b"": 2}).let_in(row, row, row)


@dataclass(frozen=True)
class Hole:
    """One hole of a grammar."""

    items: Items
    bridges: Bridges | None = None  # over what follows it, None if that is not known
    group: int | None = None  # holes of one group give distinct items
    begins: bool = False  # it is the first of its group, in which all items may come anew
    reread_by: "Callable[[tuple[int, ...]], Compiled | None] | None" = None
    """Returns, of a complete item's tokens, the grammar by which the answer is read anew; None if it has none."""


Compiled = tuple[Vocabulary, xgrammar.CompiledGrammar, list[Hole]]  # what each `Composite` of a constraint begins with
