"""Selections: what item_filter, exclude_keys and only_keys leave of a registered set for one request."""

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.select.filters import check_size, digits
from itemset.select.views import View, view
from itemset.serving.catalogue import OVERHEAD, Catalogue, InlineSet, RefusedError
from itemset.serving.config import StaticConfig, Words
from itemset.serving.request import ItemRequest
from itemset.serving.request_fields import EXCLUDE, FILTER, ONLY
from itemset.serving.wire import part_reference

CHARACTERS = 100  # that a key may have if there are as many keys as the limit allows
_THREADS = 2  # so that no request with a list of keys waits for another's filter


class Chosen:
    """Makes the selections of one front end, unless it has them. Safe for threads."""

    def __init__(self, catalogue: Catalogue, config: StaticConfig, words: Words) -> None:
        self._catalogue, self._limit, self._words = catalogue, config.item_key_limit, words
        self._threads = ThreadPoolExecutor(_THREADS, "item-filters")

    async def prepare(self, asked: ItemRequest, of: str) -> InlineSet:
        """Do `get` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.get, asked, of)

    def get(self, asked: ItemRequest, of: str) -> InlineSet:
        """Return what is left of the registered set that the request names.

        of: the set's reference. Raises RefusedError, which names the field: a list over the limit, and as `views.view`
        does.
        """
        given = ((EXCLUDE, asked.exclude_keys), (ONLY, asked.only_keys))
        lists = {word: keys for word, keys in given if keys is not None}
        for word, keys in lists.items():
            self._check_size(word, keys)
        filtered, base = None, self._catalogue[of]
        if asked.item_filter is not None:
            filtered = self._filtered(asked.item_filter, base, of)
            base, of = filtered.item_set, filtered.reference
            if not lists:
                return filtered
        reference = _reference(lists, of)
        if kept := self._catalogue.inline(reference):
            return kept
        seen = base
        for word, keys in lists.items():
            with _naming(word):
                seen = view(seen, **{word: keys})  # type: ignore[arg-type]
        if seen is base:  # exclusions that the set has not
            return filtered or InlineSet(of, b"", base, 0)
        index = seen.to_bytes()
        if not isinstance(seen, View):  # it stands on nothing
            return self._catalogue.keep(InlineSet.from_index(reference, index, token_ids=True))
        nbytes = len(index) + seen.nbytes + seen._keys.own_bytes + OVERHEAD
        return self._catalogue.keep(InlineSet(reference, index, seen, nbytes, filter=filtered))

    def _check_size(self, word: str, keys: list[Any]) -> None:
        """Raises RefusedError for a list over the limits."""
        if any(isinstance(key, list | tuple | Mapping) for key in keys[: self._limit]):
            raise RefusedError("filter", f"{word} must hold keys, integers or strings, and no lists or objects", word)
        what, found, limit = "keys", len(keys), self._limit
        if found <= limit:
            what, limit = "characters", CHARACTERS * self._limit
            found = sum(len(key) if isinstance(key, str) else digits(key) for key in keys)
        if found > limit:
            raise RefusedError(
                "filter",
                f"{word} has {found:,} {what}, the limit is {limit:,}: send fewer, register an item view, "
                f"or raise {self._words.option('item_key_limit')}",
                word,
            )

    def _filtered(self, query: Any, base: ItemSet, of: str) -> InlineSet:
        with _naming(FILTER):
            check_size(query)  # before anything is made of it
        reference = _reference({FILTER: query}, of)
        if kept := self._catalogue.inline(reference):
            return kept
        with _naming(FILTER):
            return self._catalogue.keep(InlineSet.filtered(reference, base, query))


def _reference(asked: Mapping[str, Any], of: str) -> str:
    """Return the reference of a part, by what was asked for: what is left has a digest too, but of its items, and not
    of the keys that pass."""
    text = "\n".join(word + _text(word, value) for word, value in asked.items())
    return part_reference(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), of)


def _text(word: str, value: Any) -> str:
    """Return equal text for equal values."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: [type(other).__name__, repr(other)])
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError("filter", f"{word} must hold what JSON can: {error}", word) from error


@contextmanager
def _naming(word: str) -> Iterator[None]:
    try:
        yield
    except ItemSetError as error:
        raise RefusedError("filter", f"{word}: {error}", word) from error
