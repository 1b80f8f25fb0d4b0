"""What every front end does with an item set: open the registered ones, build inline ones, refuse what cannot work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from itemset import lists
from itemset.best import Search
from itemset.catalogue import INLINE, Catalogue, InlineSet, RefusedError
from itemset.config import StaticConfig
from itemset.errors import ItemSetError, shown
from itemset.inline import InlineTexts
from itemset.item_set import ItemSet
from itemset.text import fingerprint


@dataclass(frozen=True)
class Words:
    """What an engine calls things, for the sentences that its users read.

    context, context_flag: the limit of prompt and output together. min_tokens, max_tokens: a request's limits of its
    output. options: where the plugin's options stand.
    """

    context: str
    context_flag: str
    min_tokens: str
    max_tokens: str
    options: str

    def option(self, name: str) -> str:
        """How to set an option that is a number."""
        return f'{{"{name}": N}} in {self.options}'


def _warm_up(item_set: ItemSet) -> None:
    """Load what naming an answer's item takes, for both widths of token ids: no answer should wait for it."""
    for token in (0, 1 << 16):
        item_set.find([token])


class Checks:
    """The item sets of one front end, and what they and its requests must satisfy. Safe for threads."""

    def __init__(
        self,
        config: StaticConfig,
        tokenizer: Any,
        words: Words,
        *,
        vocab_size: int,
        context: int,
        end_tokens: Collection[int],
        reserved: int = 0,
        on_encoded: Callable[[int], object] = lambda texts: None,
    ) -> None:
        """Open and check the registered sets.

        context: tokens of prompt and output together, of which the engine keeps `reserved`. end_tokens: those at which
        the model ends. on_encoded: told of the texts of inline sets as they are encoded, on another thread.
        Raises ItemSetError: a file that is missing or damaged, a set made with another tokenizer, outside the
        vocabulary, or with items longer than the context.
        """
        self._config, self._words = config, words
        self._vocab_size, self._end_tokens = vocab_size, end_tokens
        self._context, self._reserved = context, reserved
        self.catalogue = Catalogue(config)
        # Encoding runs on another thread than the engine's own use of the tokenizer, which is not safe for threads.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._inline = InlineTexts(
            self.catalogue,
            config,
            self._tokenizer,
            words,
            vocab_size=vocab_size,
            context=context,
            reserved=reserved,
            end_tokens=end_tokens,
            on_encoded=on_encoded,
        )
        model_print = None
        for name, item_set in self.catalogue.registered.items():
            if item_set.tokenizer is not None:
                model_print = model_print or fingerprint(self._tokenizer)
                self._check_tokenizer(name, item_set, model_print)
            self._check_fit(f"the item set {name!r} ({config.item_sets[name]})", item_set)
            _warm_up(item_set)

    def summary(self) -> str:
        """The registered sets, for the log."""
        return ", ".join(f"{name} ({len(s):,} items)" for name, s in self.catalogue.registered.items()) or "none"

    def named(self, reference: Any) -> str:
        """The name of a registered set that a request gives. Raises RefusedError."""
        if not isinstance(reference, str):
            raise RefusedError(
                "wrong type", f"item_set must be the name of an item set, a string, not {shown(reference)}"
            )
        registered = self.catalogue.registered
        # To look a name up takes its time, of a name of megabytes too long.
        if len(reference) > max(map(len, registered), default=0) or reference not in registered:
            raise self.catalogue.unknown(reference)
        return reference

    def inline(self, choice: Any) -> str:
        """The reference of the set of these texts, or of the InlineSet that stands in their place.

        Texts are encoded and built unless they were not long ago; this waits. Raises RefusedError, or ItemSetError for
        what is wrong with an item.
        """
        return (choice if isinstance(choice, InlineSet) else self._inline.get(choice)).reference

    async def prepare(self, choice: Any) -> InlineSet:
        """What may stand in place of these texts: with it `inline` is immediate. Raises as `inline` does.

        It takes a millisecond of the event loop. Encoding stops if this is cancelled and no other request waits for it.
        """
        return choice if isinstance(choice, InlineSet) else await self._inline.prepare(choice)

    def ranked(
        self,
        reference: str,
        given: Mapping[str, Any],
        *,
        k: int,
        prompt_tokens: int,
        max_tokens: int | None,
        end_token: int,
        behind: int,
    ) -> tuple[ItemSet, Search]:
        """The set of a request for a ranked list of `k`, and the search for it.

        given: what the request says, of it `lists.RANKING`. behind: tokens of the context that scoring a whole item
        takes after it. Raises RefusedError if the list may not be so long, or some of the items could not be scored.
        """
        self.request(reference, prompt_tokens=prompt_tokens, min_tokens=0, stop_tokens=[end_token], behind=behind)
        item_set = self.catalogue[reference]
        options = lists.options(given, k, self._config, self._words)
        if max_tokens is not None and max_tokens <= item_set.longest:
            raise RefusedError(
                "beam search",
                f"{self._words.max_tokens}={max_tokens} is less than the longest item has with its end token: set it "
                f"to at least {item_set.longest + 1} for a ranked list",
            )
        return item_set, Search(item_set, k, end_token=end_token, **options)

    def request(
        self, reference: str, *, prompt_tokens: int, min_tokens: int, stop_tokens: Collection[int], behind: int = 0
    ) -> None:
        """Raises RefusedError where the set and the rest of the request leave no way to end an item."""
        item_set = self.catalogue[reference]
        called = "the inline set" if reference.startswith(INLINE) else f"the item set {reference!r}"
        room, words = self._context - self._reserved - behind - prompt_tokens, self._words
        if item_set.longest > room:
            raise RefusedError(
                "no room in the context",
                f"{called} has an item of {item_set.longest} tokens, but {words.context}={self._context} leaves {room} "
                f"after a prompt of {prompt_tokens}: shorten the prompt or the item, or raise {words.context_flag}",
            )
        if min_tokens > item_set.shortest:
            raise RefusedError(
                words.min_tokens,
                f"{words.min_tokens}={min_tokens} forbids the shortest item of {called}, which has {item_set.shortest} "
                f"tokens: set {words.min_tokens} to at most {item_set.shortest}",
            )
        if inside := item_set.occurring(stop_tokens):
            raise RefusedError(
                "stop token inside",
                f"the stop token {inside[0]} occurs inside an item of {called}, which could never be finished: "
                "choose another stop token, or build the set without it",
            )

    def _check_fit(self, called: str, item_set: ItemSet) -> None:
        if ends := item_set.occurring(self._end_tokens):
            raise ItemSetError(
                f"{called} has an item with the model's end-of-sequence token {ends[0]} in it, which could never be "
                "finished: build the set without it"
            )
        highest = int(item_set.token_ids[-1])
        if highest >= self._vocab_size:
            raise ItemSetError(
                f"{called} holds token id {highest}, the model's vocabulary ends at {self._vocab_size - 1}: "
                "build the set with this model's token ids"
            )
        if item_set.longest > self._context - self._reserved:
            raise ItemSetError(
                f"{called} has an item of {item_set.longest} tokens, longer than {self._words.context}="
                f"{self._context}: raise {self._words.context_flag} or leave the item out"
            )

    def _check_tokenizer(self, name: str, item_set: ItemSet, model_print: str) -> None:
        if item_set.tokenizer is not None and item_set.tokenizer.fingerprint != model_print:
            model = getattr(self._tokenizer, "name_or_path", type(self._tokenizer).__name__)
            raise ItemSetError(
                f"the item set {name!r} ({self._config.item_sets[name]}) was built with the tokenizer "
                f"{item_set.tokenizer.name} ({item_set.tokenizer.fingerprint[:12]}), the model uses {model} "
                f"({model_print[:12]}): build the set with --tokenizer {model}"
            )
