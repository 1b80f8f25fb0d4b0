"""Registered sets as places inside longer texts spell their items: escaped in JSON strings, or after other text.

Most items have the same tokens in all places. A form is the set in which the others are encoded anew, with the same
keys and attributes. It is made when a request first needs it, lies beside the private copies for the next start, and
reaches the engines as one of these copies: its version is in the request's reference.
"""

import asyncio
import json
import logging
import math
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from itemset.embedded.placement import NO_SPACE
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.serving.catalogue import Catalogue, RefusedError
from itemset.serving.config import StaticConfig
from itemset.serving.front.inline import SLICE_TEXTS
from itemset.serving.private_copies import folder_of_indexes, open_copy
from itemset.serving.wire import FORM, version_of
from itemset.text import Escape, continues, decoded, encode
from itemset.trie.rows import Rows, joined

REMEMBERED = 60.0  # seconds for which a failure answers further requests: to fail may take a whole build
_PLACES = {"json": "JSON strings", "text": "other texts", "space": "texts, after a space"}
_HARMFUL = {*map(chr, range(32)), '"', "\\"}  # characters that a JSON string must escape


class _Outcome(NamedTuple):
    """The reference of a form, or why there is none; known until a time, in seconds of `time.monotonic`."""

    form: str | ItemSetError
    until: float = math.inf


class Forms:
    """Those of one front end. Safe for threads."""

    def __init__(self, catalogue: Catalogue, config: StaticConfig, tokenizer: Any, log: logging.Logger) -> None:
        self._catalogue, self._config, self._tokenizer, self._log = catalogue, config, tokenizer, log
        # By reference and place: made or begun, once for all requests.
        self._futures: dict[tuple[str, Escape], Future[_Outcome]] = {}
        self._lock, self._threads = threading.Lock(), ThreadPoolExecutor(2, "item-forms")

    async def reference(self, of: str, escape: Escape | None, *, here: bool = False) -> str:
        """Return the reference of a set's form, or of the set itself if it has all of its tokens there.

        of: its own. escape: how items stand in the place, None for answers of their own. here: see `at_once`; else it
        is awaited until the form is made. Raises RefusedError for items that cannot stand there.
        """
        if escape is None:
            return of
        with self._lock:
            future = self._futures.get((of, escape))
            if future is None or (future.done() and not self._holds(future)):
                future = self._futures[of, escape] = self._threads.submit(self._outcome, of, escape)
        if not here:
            await asyncio.shield(asyncio.wrap_future(future))
        if isinstance(form := future.result().form, ItemSetError):
            raise form.with_traceback(None)  # which would grow each time
        return form

    def _holds(self, ended: Future[_Outcome]) -> bool:
        if ended.exception() is not None:
            return False
        form, until = ended.result()
        if isinstance(form, str):
            return self._catalogue.known(form) is not None  # else it was closed since
        return time.monotonic() < until

    def _outcome(self, of: str, escape: Escape) -> _Outcome:
        try:
            known = self._made(of, escape)
        except ItemSetError as error:  # without a space, requests are served all the same: that is tried once
            return _Outcome(error) if escape == "space" else _Outcome(error, time.monotonic() + REMEMBERED)
        form = self._catalogue[known]
        _ = form.token_ids, form.attributes  # read once: no event loop should wait for it
        with self._lock:
            open_now = {one.reference for one in self._catalogue.serving.values()}
            self._futures = {key: one for key, one in self._futures.items() if key[0] in open_now or not one.done()}
        return _Outcome(known)

    def _made(self, of: str, escape: Escape) -> str:
        item_set, (version, name) = self._catalogue[of], version_of(of)
        if escape == "space" and (item_set.tokenizer is None or item_set.prefix):
            raise RefusedError("item set inside", f"the text before an item of {name!r} {NO_SPACE}")
        numbers = self._to_respell(item_set, escape)
        if not len(numbers):
            return of
        if item_set.tokenizer is None:
            text = decoded(item_set.items_at(numbers[:1]), self._tokenizer)[0]
            raise RefusedError(
                "item set inside",
                f"the item set {name!r} is of token ids, which have one spelling, and some of its items, such as "
                f"{shown(text)}, must be escaped in a JSON string: build it of texts (itemset build --tokenizer)",
            )
        try:
            index = folder_of_indexes(self._config.item_set_cache) / f"{version}-{escape}.itemset"
            if not index.exists():
                self._make(item_set, name, numbers, escape, index)
            os.utime(index)
            try:
                _, form = open_copy(index, self._config.item_set_cache)
            except ItemSetError:  # it may be damaged
                self._make(item_set, name, numbers, escape, index)
                _, form = open_copy(index, self._config.item_set_cache)
        except (OSError, ItemSetError) as error:
            self._log.warning("The item set %r cannot be made for %s: %s", name, _PLACES[escape], error)
            if isinstance(error, ItemSetError):
                raise
            mend = "make room there, or name another folder with the option item_set_cache"
            raise ItemSetError(f"{error.filename} cannot be used: {error.strerror}: {mend}") from error
        return f"{FORM}{form}@{of}"

    def _to_respell(self, item_set: ItemSet, escape: Escape) -> NDArray[np.int64]:
        """Return the numbers of the items that may have other tokens in such a place."""
        if item_set.escape == escape:
            return np.zeros(0, np.int64)
        if escape == "space":  # SentencePiece puts one before a text of its own already
            return np.arange(len(item_set) if self._continues or item_set.escape is not None else 0)
        if item_set.escape is None and item_set.tokenizer is not None and not self._continues:
            return np.arange(len(item_set))
        if "json" not in (item_set.escape, escape):
            return np.zeros(0, np.int64)
        token_ids = item_set.token_ids.tolist()
        texts = decoded([[token] for token in token_ids], self._tokenizer)
        return item_set.holding(token for token, text in zip(token_ids, texts, strict=True) if _HARMFUL & {*text})

    @cached_property
    def _continues(self) -> bool:
        return continues(self._tokenizer)

    def _make(self, item_set: ItemSet, name: str, numbers: NDArray[np.int64], escape: Escape, index: Path) -> None:
        began, parts = time.monotonic(), list[Rows]()
        called = f"the item set {name!r} inside longer texts: an item".replace("{", "{{").replace("}", "}}")
        for part in np.array_split(numbers, 1 + len(numbers) // SLICE_TEXTS):  # other threads go on between two
            texts = decoded(item_set.items_at(part), self._tokenizer)
            if item_set.escape == "json":
                texts = [json.loads(f'"{text}"', strict=False) for text in texts]
            parts.append(Rows(*encode(texts, self._tokenizer, escape=escape, name=called)))
        item_set.respelt(numbers, joined(parts), escape).save(index)
        text = "Item set %r inside %s: %s of %s items encoded anew in %.2f s, an index of %s bytes"
        of, seconds, nbytes = f"{len(item_set):,}", time.monotonic() - began, f"{index.stat().st_size:,}"
        self._log.info(text, name, _PLACES[escape], f"{len(numbers):,}", of, seconds, nbytes)
