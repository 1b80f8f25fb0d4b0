"""What every front end does with an item set: open the registered ones, build inline ones, refuse what cannot work."""

import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from itemset.errors import ItemSetError, shown
from itemset.serving.catalogue import Catalogue, InlineSet, Opened, RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.front.beside import at_once, on
from itemset.serving.front.forms import Forms
from itemset.serving.front.inline import InlineTexts
from itemset.serving.front.request import ItemRequest
from itemset.serving.front.request_fields import PROMPT
from itemset.serving.front.selections import Chosen, Prompt
from itemset.serving.warm_up import compile_beside
from itemset.serving.wire import INLINE, name_of
from itemset.text import fingerprint


class Checks:
    """The item sets of one front end, and what they and its requests must satisfy. Safe for threads."""

    def __init__(
        self, config: StaticConfig, tokenizer: Any, words: Words, limits: ModelLimits,
        log: logging.Logger = logging.getLogger(__name__),  # noqa: B008 - there is one
        added_tokens: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Open and check the registered sets.

        tokenizer: nobody else's; it encodes on several threads. added_tokens: what the engine has added to it.
        Raises ItemSetError: a file that is missing or damaged, a set made with another tokenizer, outside the
        vocabulary, or with items longer than the context. A set of `item_set_dir` is then not served.
        """
        compile_beside()
        self._config, self.words, self._limits, self._added_tokens = config, words, limits, added_tokens
        self.catalogue, self._tokenizer = Catalogue(config), tokenizer
        self._inline = InlineTexts(self.catalogue, config, tokenizer, words, limits)
        self._selections = Chosen(self.catalogue, config, words, tokenizer)
        self._forms = Forms(self.catalogue, config, tokenizer, log)
        self._threads = ThreadPoolExecutor(4, "item-filters")
        self._prompts = ThreadPoolExecutor(1, "prompt-items")  # nothing else waits for an index of titles
        for opened in self.catalogue.serving.values():
            try:
                self._check(opened)
            except ItemSetError as error:
                config.left_out(opened.name, error)
                self.catalogue.drop(opened.name)

    def open(self, name: str, version: str, path: Path) -> Opened:
        """Open and check a followed set's version, which may take seconds. Raises ItemSetError as the start does."""
        opened = self.catalogue.open(name, version, path)
        self._check(opened)
        return opened

    def _check(self, opened: Opened) -> None:
        item_set, limits = opened.item_set, self._limits
        called = f"the item set {opened.name!r} ({self._config.where(opened.name)})"
        if item_set.tokenizer is not None and item_set.tokenizer.fingerprint != self.fingerprint:
            model = getattr(self._tokenizer, "name_or_path", type(self._tokenizer).__name__)
            raise ItemSetError(
                f"{called} was built with the tokenizer {item_set.tokenizer.name} "
                f"({item_set.tokenizer.fingerprint[:12]}), the model uses {model} ({self.fingerprint[:12]}): build "
                f"the set with --tokenizer {model}, or start with the set's own, such as an adapter's with more tokens"
            )
        if ends := item_set.occurring(limits.end_tokens):
            raise ItemSetError(
                f"{called} has an item with the model's end-of-sequence token {ends[0]} in it, which could never be "
                "finished: build the set without it"
            )
        highest = int(item_set.token_ids[-1])
        if highest >= limits.vocab_size:
            raise ItemSetError(
                f"{called} holds token id {highest}, the model's vocabulary ends at {limits.vocab_size - 1}: "
                "build the set with this model's token ids; tokens that an adapter adds need a model merged with it"
            )
        if item_set.longest > (room := limits.context - limits.reserved):
            long = np.concatenate([part[np.diff(rows.offsets) > room] for part, rows in item_set.parts()])
            key = item_set.keys_of(item_set.items_at(long[:1]))[0][0]
            raise ItemSetError(
                f"{called} has items of up to {item_set.longest} tokens, longer than {self.words.context}="
                f"{limits.context}: raise {self.words.context_flag}, or leave out {len(long):,} of {len(item_set):,} "
                f"items, such as that with the key {shown(key)}"
            )
        _ = item_set.attributes  # checked: no filter should wait for it

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint of the model's tokenizer."""
        return fingerprint(self._tokenizer, self._added_tokens)

    def made(self, asked: ItemRequest, prompt: Prompt | None = None) -> InlineSet:
        """Do `prepare` here: wait until texts are encoded and built, or filters applied."""
        return at_once(self.prepare(asked, prompt, here=True))

    async def prepare(self, asked: ItemRequest, prompt: Prompt | None = None, *, here: bool = False) -> InlineSet:
        """Return the set of a request; of a registered one the version that is served now.

        Beside the event loop it takes a millisecond of that, and encoding stops if nobody waits for it. here: see
        `at_once`. Raises RefusedError, or ItemSetError for what is wrong with an item. prompt: if known.
        """
        if isinstance(asked.made, InlineSet):
            return asked.made
        threads = None if here else self._prompts if PROMPT in asked.selection else self._threads
        if asked.choice is not None:
            made = await self._inline.prepare(asked.choice, asked.escape, here=here)
        else:
            of = asked.reference or self.catalogue.reference(asked.item_set or "")
            of = await self._forms.reference(of, asked.escape, here=here)
            if asked.chooses:
                made = await on(threads, self._selections.get, asked.selection, of, prompt)
            else:
                made = self.catalogue.made(of)
        return await on(threads, self._selections.tempered, made, asked) if asked.temperature > 1 else made

    def request(
        self, made: InlineSet, *, prompt_tokens: int, min_tokens: int, stop_tokens: Collection[int], after: int = 0
    ) -> None:
        """Raises RefusedError where the set and the rest of the request leave no way to end an item.

        after: context tokens that must stay free after the item.
        """
        item_set, reference = made.item_set, made.reference
        called = "the inline set" if reference.startswith(INLINE) else f"the item set {name_of(reference)!r}"
        room, words = self._limits.context - self._limits.reserved - after - prompt_tokens, self.words
        if item_set.longest > room:
            raise RefusedError(
                "no room in the context",
                f"{called} has an item of {item_set.longest} tokens, but {words.context}={self._limits.context} leaves "
                f"{room} after a prompt of {prompt_tokens}: shorten the prompt or the item, or raise "
                f"{words.context_flag}",
            )
        if min_tokens > item_set.shortest:
            raise RefusedError(
                words.min_tokens,
                f"{words.min_tokens}={min_tokens} forbids the shortest item of {called}, which has {item_set.shortest} "
                f"tokens: set {words.min_tokens} to at most {item_set.shortest}",
                words.min_tokens,
            )
        if inside := item_set.occurring(stop_tokens):
            raise RefusedError(
                "stop token inside",
                f"the stop token {inside[0]} occurs inside an item of {called}, which could never be finished: "
                "choose another stop token, or build the set without it",
                "stop_token_ids",
            )
