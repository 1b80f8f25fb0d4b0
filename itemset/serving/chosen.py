"""What is left of a registered set for one request: filters are kept, exclusions and candidates made each time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet, build
from itemset.serving.catalogue import OVERHEAD, VIEW, Catalogue, InlineSet, RefusedError
from itemset.serving.config import StaticConfig
from itemset.serving.request import ItemRequest
from itemset.serving.words import EXCLUDE, FILTER, ONLY, SELECTION
from itemset.views import View, view

if TYPE_CHECKING:
    from itemset.serving.admission import Words

VIEW_BYTES = 256 << 20  # of filters kept for their next request
_THREADS = 2  # so that no request with a list of keys waits for another's filter


class Chosen:
    """Finds the items that requests want of registered sets. Safe for threads."""

    def __init__(self, catalogue: Catalogue, config: StaticConfig, words: Words) -> None:
        self._catalogue, self._limit, self._words = catalogue, config.item_key_limit, words
        self._kept: OrderedDict[tuple[str, str], ItemSet] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "item-filters")
        if catalogue.registered:  # there is nothing else to choose from
            _warm_up()

    async def prepare(self, asked: ItemRequest, base: ItemSet) -> InlineSet:
        """Do `get` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.get, asked, base)

    def get(self, asked: ItemRequest, base: ItemSet) -> InlineSet:
        """Return what is left of `base`, the registered set that the request names.

        Raises RefusedError, which names the field: a list over the limit, and as `views.view` does.
        """
        for word, keys in ((EXCLUDE, asked.exclude_keys), (ONLY, asked.only_keys)):
            if keys is not None and len(keys) > self._limit:
                raise RefusedError(
                    "filter",
                    f"{word} has {len(keys):,} keys, the limit is {self._limit:,}: send fewer, register an item view, "
                    f"or raise {self._words.option('item_key_limit')}",
                    word,
                )
        assert asked.item_set is not None
        texts = [_text(word, getattr(asked, word)) for word in SELECTION]
        # Of what was asked: what is left has a digest too, but of its items, and not of the keys that pass.
        digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()
        reference = f"{VIEW}{digest}@{asked.item_set}"
        if kept := self._catalogue.inline(reference):
            return kept
        seen = base
        if asked.item_filter is not None:
            seen = self._filtered(asked.item_filter, base, (asked.item_set, texts[0]))
        for word, keys in ((EXCLUDE, asked.exclude_keys), (ONLY, asked.only_keys)):
            if keys is not None:
                seen = _checked(word, seen, **{word: keys})
        if seen is base:  # exclusions that the set has not
            return InlineSet(asked.item_set, b"", base, 0)
        index = seen.to_bytes(base) if isinstance(seen, View) else seen.to_bytes()
        return self._catalogue.keep(InlineSet(reference, index, seen, len(index) + _taken(seen)))

    def _filtered(self, query: Any, base: ItemSet, known: tuple[str, str]) -> ItemSet:
        with self._lock:
            if known in self._kept:
                self._kept.move_to_end(known)
                return self._kept[known]
        seen = _checked(FILTER, base, item_filter=query)
        with self._lock:
            self._kept[known] = seen
            while len(self._kept) > 1 and sum(map(_taken, self._kept.values())) > VIEW_BYTES:
                self._kept.popitem(last=False)
        return seen


def _warm_up() -> None:
    """Load what filters and lists of keys take, for both kinds of keys and token ids: no request should wait for it."""
    for first, keys in ((0, [0, 1, 2]), (1 << 16, ["0", "1", "2"])):
        small = build([[first, 1], [first, 2], [3]], keys=keys, attributes={"n": [0, 1, 2]})
        seen = view(small, {"n": {"$gt": 0}}, exclude_keys=keys[:2])
        seen.find([3])
        view(small, only_keys=keys[:1])


def _text(word: str, value: Any) -> str:
    """Return equal text for equal values."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: [type(other).__name__, repr(other)])
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError("filter", f"{word} must hold what JSON can: {error}", word) from error


def _taken(seen: ItemSet) -> int:
    """Return the bytes that a part takes: its own, and of a filter a bit for each key."""
    return seen.nbytes + (len(seen.keys) // 8 if "alive" in seen.own else 0) + OVERHEAD


def _checked(word: str, base: ItemSet, **options: Any) -> ItemSet:
    try:
        return view(base, **options)
    except ItemSetError as error:
        raise RefusedError("filter", f"{word}: {error}", word) from error
