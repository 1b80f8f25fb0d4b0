"""Constraints that list thousands of texts or tools and name no item set: the engine builds one in place of each list.

An `enum` of 5,000 texts in a JSON schema, a regex `(a|b|c)`, a rule of a grammar: xgrammar takes seconds for what is a
set. The grammar with holes in these places allows the same answers, and a request is never refused for it. Of tools the
names are the set. A tool's own schema is compiled when an answer has named it.
"""

import copy
import hashlib
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from itemset.embedded.holes import HOLES, Compiled, Hole, Items, Once, Vocabulary
from itemset.embedded.placement import JSON, TAG
from itemset.embedded.printed import Texts, long_alternations, printed
from itemset.embedded.rewrite import of_present_form
from itemset.embedded.tool_list import ToolList, tool_list
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet, build
from itemset.serving.engine.grammars import short_turns
from itemset.text import encode
from itemset.trie.rows import Rows, joined

_KEPT = 128 << 20  # bytes of sets and grammars that are kept for further requests
_LEFT = 1 << 14  # what one that is left to xgrammar counts as
_LISTING = re.compile('"(?:enum|const|begin)"')
_SLICE = 1_000  # texts encoded at once: between two slices other threads run
_Made = tuple[Compiled | None, int]  # None for xgrammar, and what it costs to keep, in bytes


class LongAlternations:
    """The long alternations of one engine core or scheduler, and the sets in their places. Safe for threads."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], tokenizer: Any, least: int, options: Mapping[str, Any],
        log: logging.Logger, checked: bool = False,
    ) -> None:  # fmt: skip
        """least: texts or tools that a list must have more of; 0 leaves all to xgrammar. options: as for `Constraints`.
        checked: the front end has had xgrammar read each constraint."""
        self._vocabulary, self._least, self._log, self._checked = vocabulary, least, log, checked
        self._tokenizer = Once(lambda: copy.deepcopy(tokenizer))  # engines change theirs between two uses
        self._options, self._lock = options, threading.Lock()
        self._made: OrderedDict[bytes, Once[_Made]] = OrderedDict()
        self._costs = dict[bytes, int]()  # of those that are made
        if least:  # what takes a second with a large vocabulary: no request should wait for it
            threading.Thread(target=self._prepare, name="long-alternations", daemon=True).start()

    def _prepare(self) -> None:
        with suppress(Exception):  # a request that needs them says what is wrong
            self._tokenizer.get()
            self._vocabulary().bridges(b'"')

    def get(self, kind: str, spec: str) -> Compiled | None:
        """Return what a `Composite` of the constraint begins with; None if xgrammar is to have it as it is."""
        if not self._least or not self.may_list(kind, spec):
            return None
        return self._kept(kind, spec, partial(self._made_of, kind, spec))

    def _kept(self, kind: str, spec: str, make: Callable[[], _Made]) -> Compiled | None:
        """Return what `make` has made of a constraint, now or earlier."""
        key = hashlib.blake2b(f"{kind}:{spec}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            made = self._made.setdefault(key, Once(partial(self._tried, make)))
            self._made.move_to_end(key)
        compiled, cost = made.get()
        with self._lock:
            if self._made.get(key) is made:  # not yet forgotten for another one
                self._costs[key] = cost
            while sum(self._costs.values()) > _KEPT:
                oldest, _ = self._made.popitem(last=False)
                self._costs.pop(oldest, None)
        return compiled

    @short_turns()
    def _tried(self, make: Callable[[], _Made]) -> _Made:
        try:
            return make()
        except Exception as error:  # whatever is wrong with it, xgrammar says it to whoever asks
            self._log.info("A constraint that lists very many texts or tools is left to xgrammar: %s", error)
            return None, _LEFT

    def may_list(self, kind: str, spec: str) -> bool:
        """Return whether a constraint is long enough to list more than `least` texts. Counts characters alone."""
        if kind in (JSON, TAG):
            return _LISTING.search(spec) is not None and spec.count('"') > 2 * self._least
        return spec.count("|") >= self._least

    def _made_of(self, kind: str, spec: str) -> _Made:
        begin = perf_counter()
        if kind == TAG and '"structures"' in spec:
            spec = json.dumps(of_present_form(json.loads(spec)))
        if (tools := tool_list(kind, spec, self._least)) is not None:
            if not self._checked:  # xgrammar refuses a request for any of its tools
                printed(kind, tools.spec(tools.tools), self._options)
            names = self._set(Texts(list(tools.tools), tools.closers))
            compiled, cost = self._of_tools(tools, frozenset(), Items(names))
            what, cost = f"{tools.size:,} tools", cost + names.nbytes + len(spec)
        elif kind in (JSON, TAG) and '"enum"' not in spec:
            return None, _LEFT
        else:
            compiled, cost, what = self._of_grammar(printed(kind, spec, self._options), [])
        if compiled is not None:
            self._log.info("A constraint of %s has item sets in their place: %.2f s", what, perf_counter() - begin)
        return compiled, cost

    def _of_grammar(self, text: str, holes: list[Hole]) -> tuple[Compiled | None, int, str]:
        """Return a grammar with sets in place of its long lists, None without holes, its cost, and how long they are.

        text: as `printed`, in which the first tokens after the vocabulary are `holes`.
        """
        vocabulary, given = self._vocabulary(), len(holes)
        grammar, found = long_alternations(text, self._least, vocabulary.first + given, HOLES - given)
        if not holes and not found:
            return None, _LEFT, ""
        try:
            sets = [self._set(one) for one in found]
        except ItemSetError:
            if not holes:
                raise
            grammar, found, sets = text, [], []  # an answer that has named a tool goes on, whatever lists that has
        closers = [vocabulary.bridges(texts.closers) for texts in found]
        holes = [*holes, *map(Hole, map(Items, sets), closers)]
        compiled = vocabulary.compile(grammar)
        cost = compiled.memory_size_bytes + sum(one.nbytes for one in sets)
        what = ", ".join(f"{len(texts.texts):,}" for texts in found) + " texts"
        return (vocabulary, compiled, holes), cost, what

    def _of_tools(self, tools: ToolList, named: frozenset[str], names: Items) -> _Made:
        """Return the grammar of an answer that has named these tools, and its cost. names: of the others."""
        vocabulary = self._vocabulary()

        def with_another(tokens: tuple[int, ...]) -> Compiled | None:
            more = named | {b"".join(map(vocabulary.bytes.__getitem__, tokens)).decode()}
            make = partial(self._of_tools, tools, more, names.without(tokens))
            return self._kept(f"{tools.kind} of tools", tools.spec(sorted(more)), make)

        hole = Hole(names, vocabulary.bridges(tools.closers), reread_by=with_another)
        text = printed(tools.kind, tools.spec(sorted(named)), self._options)
        return self._of_grammar(text.replace(tools.mark, f'" Token({vocabulary.first}) "'), [hole])[:2]

    def _set(self, found: Texts) -> ItemSet:
        """Raises ItemSetError for special tokens, which answers leave out, and texts that tokens do not give back."""
        tokenizer, vocabulary = self._tokenizer.get(), self._vocabulary()
        slices = (found.texts[start : start + _SLICE] for start in range(0, len(found.texts), _SLICE))
        rows = joined([Rows(*encode(part, tokenizer, escape="text")) for part in slices])
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        special = [*getattr(tokenizer, "all_special_ids", ()), *(token for token, one in added if one.special)]
        special += range(vocabulary.size, int(rows.tokens.max()) + 1)
        texts = [text.encode() for text in found.texts]
        if np.isin(rows.tokens, special).any() or not vocabulary.spells(rows.tokens, rows.offsets, texts):
            raise ItemSetError("some texts have special tokens, or the tokenizer does not give them back")
        return build(rows)
