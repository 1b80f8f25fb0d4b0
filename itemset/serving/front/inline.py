"""Sets made for one request, of its texts. Errors name the text."""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.item_set import build
from itemset.serving import metrics
from itemset.serving.catalogue import Catalogue, InlineSet, RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.front.beside import on
from itemset.serving.wire import INLINE
from itemset.text import BATCH, Escape, encode, named
from itemset.trie.rows import MAX_ITEM_TOKENS, Rows, joined

logger = logging.getLogger(__name__)

Steps = Generator[int, None, InlineSet]
"""A list's work: yields the cost of each slice when it is done, and returns the set."""

NAME = "choice[{}]"
ITEM_TEXT_LIMIT = 1 << 17
"""Characters of one text, whatever the context: it is encoded in one piece, for which all other lists wait."""
SLICE_TEXTS, SLICE_CHARACTERS = 1_000, 50_000  # encoded at once, in some 10 ms
TEXT_COST = 16  # what a text costs beside its characters, in characters
FEW_TEXTS, FEW_CHARACTERS = 5_000, 500_000  # recognised within a millisecond


@dataclass(eq=False)
class _List:
    """A list that requests wait for."""

    reference: str
    steps: Steps
    left: int  # its cost still to come
    turn: int  # number of its last slice
    waiting: list[Future[InlineSet]] = field(default_factory=list)


class Encoder:
    """Makes the inline sets of one front end. Safe for threads.

    The list that has least left goes on, so that short lists pass long ones and of equal ones the first ends first.
    Every third slice is for the list whose last one is longest ago, so that no stream of short lists holds up a long
    one for ever. Equal lists are one. A list that nobody waits for any more is dropped after its slice.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lists: dict[str, _List] = {}
        self._turns = 0
        self._thread, self._lock = ThreadPoolExecutor(1, "inline-sets"), threading.Lock()

    def ask(self, reference: str, cost: int, steps: Steps) -> Future[InlineSet]:
        """Return the future set of a list. Cancel the future if nobody waits for it any more.

        cost: of all slices together. steps: the list's work, which begins unless the set is known or is being made.
        """
        future: Future[InlineSet] = Future()
        with self._lock:
            if (known := self._catalogue.inline(reference)) is not None:
                future.set_result(known)
                return future
            if reference not in self._lists:
                self._lists[reference] = _List(reference, steps, cost, self._turns)
                self._thread.submit(self._slice)
            self._lists[reference].waiting.append(future)
        return future

    def _slice(self) -> None:
        """Encode a slice of the list whose turn it is, if a request waits."""
        with self._lock:
            for one in list(self._lists.values()):
                if all(future.cancelled() for future in one.waiting):
                    del self._lists[one.reference]
                    logger.info("Nobody waits for %s any more: its encoding stops", one.reference)
            if not self._lists:
                return
            self._turns += 1
            one = min(self._lists.values(), key=attrgetter("left" if self._turns % 3 else "turn"))
            one.turn = self._turns
        try:
            one.left -= next(one.steps)
            self._thread.submit(self._slice)
        except StopIteration as end:
            self._catalogue.keep(end.value)
            for future in self._ended(one):
                future.set_result(end.value)
        except BaseException as error:
            for future in self._ended(one):
                future.set_exception(error)

    def _ended(self, one: _List) -> list[Future[InlineSet]]:
        """Remove a list. Return the futures of those who still wait for it."""
        with self._lock:
            del self._lists[one.reference]
        return [future for future in one.waiting if future.set_running_or_notify_cancel()]


class InlineTexts:
    """Makes the inline sets of one front end, and finds those it has made. Safe for threads."""

    def __init__(
        self, catalogue: Catalogue, config: StaticConfig, tokenizer: Any, words: Words, limits: ModelLimits
    ) -> None:
        """tokenizer: as for `Checks`."""
        self._config, self._tokenizer, self._words = config, tokenizer, words
        self._vocab_size, self._end_tokens = limits.vocab_size, np.array(sorted(limits.end_tokens), np.int64)
        self._context, self._longest = limits.context, min(limits.context - limits.reserved, MAX_ITEM_TOKENS)
        # As vLLM bounds the text of a prompt (renderers/params.py, _text_len_check).
        longest_token = max(map(len, tokenizer.get_vocab()))
        self._item_limit = min(ITEM_TEXT_LIMIT, longest_token * self._longest)
        self._encoder, self._reader = Encoder(catalogue), ThreadPoolExecutor(1, "inline-texts")

    async def prepare(self, choice: Any, escape: Escape | None = None, *, here: bool = False) -> InlineSet:
        """Return the set of these texts, once it is encoded and built. Encoding stops if nobody waits for it.

        escape: as for `itemset.build_text`. here: see `at_once`; else another thread reads a large list. Raises
        RefusedError, or ItemSetError for what is wrong with an item.
        """
        texts = self._copied(choice)
        few = len(texts) <= FEW_TEXTS and sum(len(text) for text in texts if type(text) is str) <= FEW_CHARACTERS
        reference, cost = await on(None if here or few else self._reader, self._read, texts, escape)
        future = self._encoder.ask(reference, cost, self._encode(reference, texts, escape))
        if not here:
            return await asyncio.wrap_future(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _copied(self, choice: Any) -> list[Any]:
        """Return a copy of the list, which nobody else changes. Raises RefusedError: no list, or too many texts."""
        if not isinstance(choice, list) or not choice:
            raise RefusedError("bad items", "choice must be a list of at least one text")
        if len(choice) > self._config.inline_item_limit:
            raise RefusedError(
                "inline limit",
                f"choice has {len(choice):,} items, the limit of an inline set is {self._config.inline_item_limit:,}: "
                f"register it with `itemset build` and --item-set, or raise {self._words.option('inline_item_limit')}",
            )
        return choice.copy()

    def _read(self, texts: list[Any], escape: Escape | None = None) -> tuple[str, int]:
        """Return the reference of a list, and what it costs to encode, in `_encode`'s unit.

        It works in parts, so that no other thread waits for more than a few milliseconds. Raises RefusedError for an
        item that is no text, and for too many characters.
        """
        digest, characters = hashlib.blake2b(len(texts).to_bytes(8, "little"), digest_size=16), 0
        parts = [(start, texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
        for start, part in parts:
            if set(map(type, part)) != {str}:
                i = next(i for i, text in enumerate(part) if type(text) is not str)
                raise RefusedError(
                    "bad items", f"{NAME.format(start + i)} is no text, but of the type {type(part[i]).__name__}"
                )
            lengths = np.fromiter(map(len, part), np.int64, len(part))
            i = int(lengths.argmax())
            if lengths[i] > self._item_limit:
                raise RefusedError(
                    "inline limit",
                    f"{named(NAME, start + i, part[i])} has {lengths[i]:,} characters. An item of an inline set may "
                    f"have {self._item_limit:,} (at {self._words.context}={self._context}): leave it out, or register "
                    "the set with `itemset build` and --item-set",
                )
            characters += int(lengths.sum())
            if characters > self._config.inline_text_limit:
                over = int(np.searchsorted(lengths[::-1].cumsum(), characters - self._config.inline_text_limit))
                raise RefusedError(
                    "inline limit",
                    f"choice has more than {self._config.inline_text_limit:,} characters, the limit of an inline set "
                    f"(passed at {NAME.format(start + len(part) - 1 - over)}): register it with `itemset build` and "
                    f"--item-set, or raise {self._words.option('inline_text_limit')}",
                )
            digest.update(lengths.tobytes())
        for _, part in parts:
            digest.update("".join(part).encode("utf-8", "surrogatepass"))
        digest.update((escape or "").encode())
        return INLINE + digest.hexdigest(), characters + TEXT_COST * len(texts)

    def _encode(self, reference: str, texts: list[str], escape: Escape | None) -> Steps:
        """Encode the texts slice by slice, and build their set. Raises ItemSetError that names the first bad item."""
        rows = list[Rows]()
        for start, part in _slices(texts):
            ids, offsets = encode(part, self._tokenizer, before=start, name=NAME, escape=escape)
            rows.append(Rows(ids, offsets))
            metrics.ENCODED.inc(len(part))
            self._check(start, part, ids, offsets)
            yield sum(map(len, part)) + TEXT_COST * len(part)
        item_set = build(joined(rows))
        return InlineSet.from_index(reference, item_set.to_bytes(), token_ids=True)

    def _check(self, start: int, texts: list[str], tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Raises ItemSetError where an item cannot be an answer of this model."""
        lengths = np.diff(offsets)
        i = int(lengths.argmax())
        if lengths[i] > self._longest:
            raise ItemSetError(
                f"{named(NAME, start + i, texts[i])} has {lengths[i]:,} tokens, longer than {self._words.context}="
                f"{self._context}: raise {self._words.context_flag} or leave the item out"
            )
        for bad, why in (
            (np.isin(tokens, self._end_tokens), "an end-of-sequence token of the model, at which an answer ends"),
            (tokens >= self._vocab_size, f"a token id above {self._vocab_size - 1}, the model's last"),
        ):
            if bad.any():
                i = int(np.searchsorted(offsets, int(bad.argmax()), side="right")) - 1
                raise ItemSetError(f"{named(NAME, start + i, texts[i])} holds {why}: leave the item out")


def _slices(texts: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the texts in parts of at most SLICE_TEXTS and, unless it is one text, SLICE_CHARACTERS, with positions."""
    start, characters = 0, 0
    for i, text in enumerate(texts):
        if i - start == SLICE_TEXTS or (i > start and characters + len(text) > SLICE_CHARACTERS):
            yield start, texts[start:i]
            start, characters = i, 0
        characters += len(text)
    yield start, texts[start:]
