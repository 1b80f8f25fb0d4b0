"""The grammar of one request with holes: xgrammar's matchers outside them, item sets inside.

A reading of the tokens so far is a `_Thread`: outside of all holes, or in one at a state of its set. There are several
if a text may be read in several ways: the item `Alien`, or the beginning of `Alien 3`. Each has a matcher of its own.
A hole is entered where its matcher takes the hole's id, and left by giving it that id: in between it stands still.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray

from itemset.embedded.holes import Hole, Items, Vocabulary
from itemset.trie.walk import DEAD, END

THREADS = 8
"""Readings that are kept: items without a border between them could have ever more. To drop some lets no token in."""


class Found(NamedTuple):
    """An item in an answer: its hole, its tokens, and where its text begins and ends, in bytes."""

    hole: int
    tokens: tuple[int, ...]
    begin: int
    end: int


class _Items(NamedTuple):
    """The items of a reading, the last one first: as many readings as tokens share those before."""

    before: "_Items | None"
    last: Found


class _Matcher:
    """An xgrammar matcher that knows its steps, so that an earlier state of it can be found again."""

    __slots__ = ("depth", "matcher")

    def __init__(self, matcher: xgrammar.GrammarMatcher, depth: int = 0) -> None:
        self.matcher, self.depth = matcher, depth

    def accept(self, what: int | bytes) -> bool:
        taken = self.matcher.accept_string(what) if isinstance(what, bytes) else self.matcher.accept_token(what)
        self.depth += 1 if taken else 0
        return bool(taken)

    def takes(self, what: int | bytes) -> bool:
        """Return whether this may follow. The matcher stays."""
        if taken := self.accept(what):
            self.to(self.depth - 1)
        return taken

    def to(self, depth: int) -> None:
        if depth != self.depth:
            self.matcher.rollback(self.depth - depth)
            self.depth = depth

    def fork(self) -> "_Matcher":
        return _Matcher(self.matcher.fork(), self.depth)


@dataclass(slots=True, eq=False)
class _Thread:
    """One reading: outside of all holes, or in one, at a state of its items. Immutable but for `open`."""

    matcher: _Matcher
    holes: Sequence[Hole]  # of the grammar that it reads by
    given: dict[int | None, Items]  # by group, what is left of its items
    found: "_Items | None"  # the items so far
    hole: int = -1
    items: Any = None  # Items, in a hole
    begin: int = 0
    state: int = 0
    path: tuple[int, ...] = ()
    depth: int = field(init=False)  # of its matcher, here
    open: "list[_Thread] | None" = field(default=None, init=False)  # those that begin a hole here, once looked for

    def __post_init__(self) -> None:
        self.depth = self.matcher.depth

    def after(self, state: int, token: int, matcher: _Matcher | None = None) -> "_Thread":
        return replace(self, state=state, path=(*self.path, token), matcher=matcher or self.matcher)


class Composite:
    """One request's place in a grammar with holes."""

    def __init__(
        self, vocabulary: Vocabulary, compiled: xgrammar.CompiledGrammar, holes: Sequence[Hole],
        stop_token_ids: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """stop_token_ids: the request's; by default those of the tokenizer."""
        self._vocabulary = vocabulary
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(stop_token_ids) or None)
        self._stops = frozenset(matcher.stop_token_ids)
        self._history = [[_Thread(_Matcher(matcher), holes, {}, None)]]
        self._tokens = list[int]()
        self._read = [0]  # bytes of the text so far, after each token
        self._wide = torch.empty((1, vocabulary.words), dtype=torch.int32)
        self._outside: NDArray[np.int32] = self._wide.numpy()[0, : vocabulary.model_words]
        self._inside = np.zeros(vocabulary.model_words, np.int32)
        self._end = np.zeros(vocabulary.model_words, np.uint32)
        for token in self._stops:
            self._end[token >> 5] |= np.uint32(1 << (token & 31))

    # What happened

    @property
    def is_terminated(self) -> bool:
        """Return whether a stop token has ended the answer."""
        return any(thread.hole < 0 and thread.matcher.matcher.is_terminated() for thread in self._history[-1])

    @property
    def in_set(self) -> bool:
        """Return whether every reading is inside an item."""
        return all(thread.hole >= 0 for thread in self._history[-1])

    @property
    def found(self) -> list[Found]:
        """Return the items so far that every reading has found, in order."""
        first, *others = (_in_order(thread.found) for thread in self._history[-1])
        everywhere = set(first).intersection(*others)
        return [item for item in first if item in everywhere]

    # Moving

    def accept(self, token: int) -> bool:
        """Take a token; return False, and stay, if it is not allowed. After the end only stop tokens are."""
        if not 0 <= token < self._vocabulary.size:
            return False
        before = self._history[-1]
        self._tokens.append(token)
        after = self._read_anew(self._after(before, token))
        if not after:
            self._tokens.pop()
            for thread in before:
                thread.matcher.to(thread.depth)
            return False
        self._history.append(after[:THREADS])
        self._read.append(self._read[-1] + len(self._vocabulary.bytes[token]))
        return True

    def allowed_prefix(self, tokens: list[int]) -> list[int]:
        """Return the longest start of `tokens` that `accept` would take, up to a stop token. The state stays."""
        taken = self.read(tokens)
        self.rollback(taken)
        return tokens[:taken]

    def read(self, tokens: Sequence[int]) -> int:
        """Take tokens up to a stop token, or to the first that is not allowed. Returns how many."""
        taken = 0
        while taken < len(tokens) and not self.is_terminated and self.accept(tokens[taken]):
            taken += 1
        return taken

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` accepted tokens. Raises ValueError if fewer were accepted."""
        if not 0 <= tokens < len(self._history):
            raise ValueError(f"cannot roll back {tokens} tokens, {len(self._history) - 1} were accepted")
        if tokens:
            del self._history[-tokens:], self._read[-tokens:], self._tokens[-tokens:]
            for thread in self._history[-1]:
                thread.matcher.to(thread.depth)

    def reset(self) -> None:
        self.rollback(len(self._history) - 1)

    def _read_anew(self, threads: list[_Thread]) -> list[_Thread]:
        """Return the readings of the tokens so far, where an item is complete that asks for another grammar by that."""
        for thread in threads:
            if thread.found is None or (hole := thread.holes[thread.found.last.hole]).reread_by is None:
                continue
            if hole.bridges is not None and any(one.hole >= 0 for one in threads):
                continue  # the item may still become a longer one, which what follows decides
            if (compiled := hole.reread_by(thread.found.last.tokens)) is None:
                return [one for one in threads if one is not thread]
            other = Composite(*compiled, self._stops)
            return other._history[-1] if other.read(self._tokens) == len(self._tokens) else []
        return threads

    def _after(self, before: list[_Thread], token: int) -> list[_Thread]:
        if token in self._stops and self.is_terminated:
            return before
        after = list[_Thread]()
        for thread in before:
            if thread.hole < 0:
                self._from_outside(thread, token, after)
                continue
            self._bridge(thread, token, after)
            if (state := thread.items.step(thread.state, token)) != DEAD:
                self._land(thread.after(state, token), token, after)
        return after

    def _from_outside(self, thread: _Thread, token: int, after: list[_Thread]) -> None:
        entered = []
        for inside in self._open(thread):
            self._bridge(inside, token, after)
            if (state := inside.items.step(0, token)) != DEAD:
                entered.append((inside, state))
        # The thread's own matcher goes to one reading. One that stays where it is, inside a hole, may share none that
        # moves: then both have forks.
        matcher: _Matcher | None = thread.matcher
        if entered:
            matcher = thread.matcher.fork() if thread.matcher.takes(token) else None
        if matcher is not None and matcher.accept(token):
            after.append(replace(thread, matcher=matcher))
        matchers = [thread.matcher, *(thread.matcher.fork() for _ in entered[1:])]
        for (inside, state), stays in zip(entered, matchers, strict=False):
            self._land(inside.after(state, token, stays), token, after)

    def _land(self, thread: _Thread, token: int, after: list[_Thread]) -> None:
        """Keep a thread inside its hole, and one outside if the item may end here."""
        if thread.state != END:
            after.append(thread)
        if thread.items.ends(thread.state):
            matcher = thread.matcher if thread.state == END else thread.matcher.fork()
            if matcher.accept(self._vocabulary.first + thread.hole):
                after.append(self._left(matcher, thread, thread.path, token))

    def _bridge(self, thread: _Thread, token: int, after: list[_Thread]) -> None:
        """Leave the thread's hole by a token that is the item's last one and what closes it."""
        bridges = thread.holes[thread.hole].bridges
        for last, rest in bridges.by_token.get(token, ()) if bridges is not None else ():
            ended = thread.items.step(thread.state, last)
            if ended == DEAD or not thread.items.ends(ended):
                continue
            matcher = thread.matcher.fork()
            if matcher.accept(self._vocabulary.first + thread.hole) and matcher.accept(rest):
                after.append(self._left(matcher, thread, (*thread.path, last), last))

    def _left(self, matcher: _Matcher, thread: _Thread, path: tuple[int, ...], last: int) -> _Thread:
        """Return the thread that has given an item. last: the item's last token."""
        group, given = thread.holes[thread.hole].group, thread.given
        if group is not None:
            given = {**given, group: thread.items.without(path)}
        end = self._read[-1] + len(self._vocabulary.bytes[last])
        found = _Items(thread.found, Found(thread.hole, path, thread.begin, end))
        return _Thread(matcher, thread.holes, given, found)

    def _open(self, thread: _Thread) -> list[_Thread]:
        """Return the beginnings of holes that may stand here: whose id the matcher takes, unless it takes any id."""
        if thread.open is None:
            first, matcher = self._vocabulary.first, thread.matcher
            taken = [(number, hole) for number, hole in enumerate(thread.holes) if matcher.takes(first + number)]
            if taken and matcher.takes(self._vocabulary.decoy):
                taken = []
            thread.open = []
            for number, hole in taken:
                items = hole.items if hole.begins else thread.given.get(hole.group, hole.items)
                thread.open.append(replace(thread, hole=number, items=items, begin=self._read[-1]))
        return thread.open

    # The mask

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Set bit t of `row` [ceil(vocabulary / 32)] if token t may follow, else clear it. Every word is written."""
        whole = row if len(row) == len(self._inside) else np.empty_like(self._inside)
        empty = True  # the first reading sets the row, the others add to it
        for thread in self._history[-1]:
            if thread.hole >= 0:
                self._fill_inside(thread, whole, empty)
                empty = False
            elif not thread.matcher.matcher.is_terminated():
                thread.matcher.matcher.fill_next_token_bitmask(self._wide)
                if empty:
                    np.copyto(whole, self._outside)
                else:
                    np.bitwise_or(whole, self._outside, out=whole)
                empty = False
                for inside in self._open(thread):
                    self._fill_inside(inside, whole, empty)
        if empty:
            np.copyto(whole, self._end.view(np.int32))
        if whole is not row:
            row[len(whole) :] = 0
            row[: len(whole)] = whole[: len(row)]

    def _fill_inside(self, thread: _Thread, row: NDArray[np.int32], empty: bool) -> None:
        """empty: nothing of the row has been set."""
        inside = row if empty else self._inside
        thread.items.fill(thread.state, inside)
        if inside is not row:
            np.bitwise_or(row, inside, out=row)
        bridges, matcher = thread.holes[thread.hole].bridges, thread.matcher
        if bridges is None or not (closing := thread.items.closing(thread.state, bridges)).bridges:
            return
        if not matcher.accept(self._vocabulary.first + thread.hole):
            return
        matcher.matcher.fill_next_token_bitmask(self._wide)
        others = [
            token
            for last, token, rest in closing.others
            if inside[last >> 5] >> (last & 31) & 1 and matcher.takes(rest)  # the item may end with `last`
        ]
        closing.let_in(self._outside, inside, row)
        matcher.to(matcher.depth - 1)
        for token in others:
            row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))


def _in_order(found: _Items | None) -> list[Found]:
    items = list[Found]()
    while found is not None:
        items.append(found.last)
        found = found.before
    return items[::-1]
