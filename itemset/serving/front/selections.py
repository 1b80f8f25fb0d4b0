"""What requests leave of registered sets: by filters, keys, prompts and boosts. Errors name the field."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.select import boosts
from itemset.select.boosts import by_place
from itemset.select.filters import check_size, digits
from itemset.select.prompt_items import TextIndex, in_tokens
from itemset.select.views import View, boosted, boosts_come_first, tempered, view, view_from_bytes
from itemset.serving.catalogue import OVERHEAD, Catalogue, InlineSet, RefusedError
from itemset.serving.config import StaticConfig, Words
from itemset.serving.front.request import ItemRequest
from itemset.serving.front.request_fields import BOOST, BOOST_KEYS, EXCLUDE, FILTER, ONLY, PROMPT, STEERING
from itemset.serving.wire import FORM, VIEW, part_of
from itemset.text import decode, decoded

Prompt = str | Sequence[int]  # a text or its tokens; empty if it has neither
KEY_CHARACTERS = 100  # that a key may have if there are as many keys as the limit allows


class Chosen:
    """Makes the selections of one front end, unless it has them. Safe for threads."""

    def __init__(self, catalogue: Catalogue, config: StaticConfig, words: Words, tokenizer: Any = None) -> None:
        self._catalogue, self._limit, self._words = catalogue, config.item_key_limit, words
        self._tokenizer, self._indexing = tokenizer, threading.Lock()
        self._codes = np.array([*getattr(tokenizer, "get_added_vocab", dict)().values()], np.int64)

    def get(self, selection: Mapping[str, Any], of: str, prompt: Prompt | None = None) -> InlineSet:
        """Return what a request's selection leaves of a registered set.

        of: the set's reference. prompt: if known. Raises RefusedError with the field: a list over the limit, an empty
        prompt, and as `views.view` does.
        """
        lists = {word: selection[word] for word in (EXCLUDE, ONLY) if word in selection}
        for word, keys in [*lists.items(), (BOOST_KEYS, list(selection.get(BOOST_KEYS, ())))]:
            self._check_size(word, keys)
        if PROMPT in selection and prompt is not None and (held := self._held(of, prompt)):
            lists = {PROMPT: held, **lists}
        whole, (steering, scale) = self._catalogue.made(of), steering_of(selection)
        first = {word: selection[word] for word in (FILTER,) if word in selection}
        excluded = lists.get(EXCLUDE, lists.get(PROMPT))
        if BOOST in steering and boosts_come_first(whole.item_set, excluded, lists.get(ONLY)):
            first, steering = first | steering, {}
        if first:
            with _naming(FILTER):
                check_size(first.get(FILTER, {}))  # before anything is made of it
            whole = self._part(first, whole.reference, None, partial(_left, whole.item_set, first))
        kept, rest = whole, lists | steering
        if rest:
            kept = self._part(rest, whole.reference, whole, partial(_left, whole.item_set, rest))
        with _naming(BOOST if BOOST in selection else BOOST_KEYS):
            boosts.check_size(kept.item_set, scale)
        return kept

    def tempered(self, made: InlineSet, asked: ItemRequest) -> InlineSet:
        """Return a set for draws at a request's temperature, above 1."""
        below = made if made.item_set.base is None else made.base
        of = made.reference if below is None else below.reference
        while below is None and of.startswith(VIEW):  # of the registered set, or of a form of it
            of = part_of(of)
        _, scale = steering_of(asked.selection)
        named = {"temperature": asked.temperature, "scale": scale, "of": made.reference}
        return self._part(named, of, below, partial(tempered, made.item_set, asked.temperature, scale))

    def _part(
        self, asked: Mapping[str, Any], of: str, below: InlineSet | None, make: Callable[[], ItemSet]
    ) -> InlineSet:
        """Return a part of a set, made and kept over the bytes that travel, unless it was.

        asked: what names it. of: the reference below it. below: on what it stands, None for a registered set.
        """
        reference = _reference(asked, of)
        if kept := self._catalogue.inline(reference):
            return kept
        seen = make()
        if below is not None and seen is below.item_set:  # exclusions that the set has not
            return below
        index, base = seen.to_bytes(), below if below is not None and below.index is not None else None
        if isinstance(seen, View):
            own = view_from_bytes(seen.base or seen, index, reference, keys=seen._keys)
            part = InlineSet(reference, own, index, len(index) + seen._keys.own_bytes + OVERHEAD, base)
        else:
            part = InlineSet.from_index(reference, index, token_ids=True)
            part = replace(part, nbytes=part.nbytes + 8 * len(seen.keys))
        part.item_set.rows_of, part.item_set.temperature = seen.rows_of, seen.temperature
        return self._catalogue.keep(part)

    def _check_size(self, word: str, keys: list[Any]) -> None:
        if any(isinstance(key, list | tuple | Mapping) for key in keys[: self._limit]):
            raise RefusedError("filter", f"{word} must hold keys, integers or strings, and no lists or objects", word)
        what, found, limit = "keys", len(keys), self._limit
        if found <= limit:
            what, limit = "characters", KEY_CHARACTERS * self._limit
            found = sum(len(key) if isinstance(key, str) else digits(key) for key in keys)
        if found > limit:
            raise RefusedError(
                "filter",
                f"{word} has {found:,} {what}, the limit is {limit:,}: send fewer, or raise "
                f"{self._words.option('item_key_limit')}",
                word,
            )

    def _held(self, of: str, prompt: Prompt) -> list[int | str]:
        """Return all keys of the items that a prompt holds. Items are texts, whose tokens depend on what stands beside
        them; or codes, if the set knows no tokenizer, or has only tokens that were added to one."""
        if not isinstance(prompt, str) and not len(prompt):
            message = f"{PROMPT} reads a prompt's text or tokens, and embeddings are neither: send keys as {EXCLUDE}"
            raise RefusedError("filter", message, PROMPT)
        of = part_of(of) if of.startswith(FORM) else of  # whose keys are the same
        whole, tokenizer = self._catalogue[of], self._tokenizer
        if whole.tokenizer is None or np.isin(whole.token_ids, self._codes).all():
            numbers = in_tokens(whole, tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        else:
            text = prompt if isinstance(prompt, str) else decode(list(prompt), tokenizer)
            numbers = self._texts(of, whole).numbers_in(text)
        return sorted({key for keys in whole._keys.every(numbers) for key in keys})

    def _texts(self, of: str, whole: ItemSet) -> TextIndex:
        """Return what finds a set's texts: made once a version, then cached and counted as inline sets are."""
        own = f"{VIEW}texts@{of}"
        with self._indexing:
            if (kept := self._catalogue.inline(own)) is None or (texts := kept.texts) is None:
                texts = TextIndex(whole, lambda rows: decoded(rows, self._tokenizer))
                self._catalogue.keep(InlineSet(own, whole, nbytes=texts.nbytes + OVERHEAD, texts=texts))
            return texts


def steering_of(selection: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the boosts of a selection, those of one attribute without their weight, and that weight, by which its
    potentials are to be multiplied."""
    steering, scale = {word: selection[word] for word in STEERING if selection.get(word)}, 1.0
    if BOOST in steering:
        with _naming(BOOST):
            unit, weight = boosts.parted(steering[BOOST])
        if BOOST_KEYS not in steering:
            steering[BOOST], scale = unit, weight
    return steering, scale


def _left(seen: ItemSet, asked: Mapping[str, Any]) -> ItemSet:
    """Return what a filter, keys and boosts leave of a set. Raises RefusedError, which names the field."""
    for word, value in asked.items():
        if word not in STEERING:
            with _naming(word):
                seen = view(seen, **{EXCLUDE if word == PROMPT else word: value})
    if BOOST in asked or BOOST_KEYS in asked:
        with _naming(BOOST_KEYS):
            keyed = by_place(seen, asked.get(BOOST_KEYS, {}))
        with _naming(BOOST):
            return boosted(seen, asked.get(BOOST, {}), keyed)
    return seen


def _reference(asked: Mapping[str, Any], of: str) -> str:
    """Return the reference of a part. It names the request: the digest of its tables does not tell which keys pass."""
    text = "\n".join(word + _text(word, value) for word, value in asked.items())
    return f"{VIEW}{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}@{of}"


def _text(word: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: [type(other).__name__, repr(other)])
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError("filter", f"{word} must hold what JSON can: {error}", word) from error


@contextmanager
def _naming(word: str) -> Iterator[None]:
    try:
        yield
    except ItemSetError as error:
        raise RefusedError("filter", f"{word}: {str(error).replace(EXCLUDE, word)}", word) from error
