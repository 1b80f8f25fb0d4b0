"""What a request asks of item sets, judged once: which set, which of its items, and what list or draws of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from itemset.errors import shown
from itemset.serving import draw_options, request_fields
from itemset.serving.catalogue import InlineSet, RefusedError
from itemset.serving.draw_options import DrawOptions, check_fields
from itemset.serving.request_fields import (
    BEAMS,
    DRAWN,
    DRAWS,
    LIST,
    LOGPROBS,
    OPTIONS,
    REFERENCE,
    SELECTION,
    SLATE,
    WEIGHT,
    wrong_type,
)
from itemset.serving.wire import WIRE
from itemset.text import Escape


@dataclass(frozen=True)
class ListOptions:
    """What a request asks of a ranked list: `k` items, and see `itemset.ranking.search.Search`.

    without_end: scores are of the items' own tokens, without the end token after them.
    """

    k: int
    width: int | None = None
    exact: bool = False
    renormalised: bool = False
    max_passes: int | None = None
    without_end: bool = False

    def __post_init__(self) -> None:
        """Raises RefusedError for a value of another type, or a beam too narrow for `k` items."""
        flags = {name: getattr(self, name) for name in ("exact", "renormalised", "without_end")}
        numbers = (("width", self.width, "beams"), ("n", self.k, "items"))
        check_fields(flags, (*numbers, ("max_passes", self.max_passes, "forward passes")))
        if self.width is not None and self.width < self.k:
            message = f"width={self.width:,} finds no {self.k:,} items: set it to at least {self.k:,}"
            raise RefusedError("beam search", message, "width")

    def scored_end(self, end_token: int) -> int | None:
        """The end token that counts in the scores, if any does."""
        return None if self.without_end else end_token

    @property
    def beam(self) -> int:
        """How many beams: `width`, or as many as items."""
        return self.width or self.k


@dataclass(frozen=True)
class ItemRequest:
    """The set that a request names or brings, one of both, and the ranked list or the draws of its items, if any.

    item_set: the name of a registered set. choice: the texts of an inline set, or the set made of them, or of what is
    left of the registered one. item_filter, exclude_keys, only_keys: see `views.view`. escape: of an inline set's
    texts, see `itemset.build_text`. weighed: WEIGHT or LOGPROBS, if its answers say these.
    """

    item_set: str | None = None
    choice: list[str] | InlineSet | None = field(default=None, repr=False)
    ranked: ListOptions | None = None
    drawn: DrawOptions | None = None
    item_filter: Mapping[str, Any] | None = field(default=None, repr=False)
    exclude_keys: list[Any] | None = field(default=None, repr=False)
    only_keys: list[Any] | None = field(default=None, repr=False)
    escape: Escape | None = None
    weighed: str = ""

    def __deepcopy__(self, memo: Any) -> ItemRequest:
        """Engines copy a request's parameters; this is immutable."""
        return self

    @property
    def chooses(self) -> bool:
        """Whether it selects among the items of its registered set, and that is still to be done."""
        selection = (self.item_filter, self.exclude_keys, self.only_keys)
        return self.choice is None and any(one is not None for one in selection)

    @classmethod
    def of(
        cls,
        named: Sequence[Any],
        choices: Sequence[Any],
        given: Mapping[str, Any],
        *,
        k: int | None = None,
        draws: bool = False,
        where: str,
        constraints: Sequence[str],
        other: bool = False,
    ) -> ItemRequest | None:
        """Judge a request; None if it has no set.

        named, choices: each name and each inline list that it gives, None for none. given: all fields among which
        options may stand, which its sender knows as `where`. k: items of its list, None without one. draws: whether its
        endpoint makes draws. constraints: what its sender may choose from; other: whether it has one that is no set.
        Raises RefusedError for what contradicts itself, has another type, is misspelled, or would be ignored.
        """
        if WIRE in given:
            raise wrong_type(f"{WIRE} is not for requests: name the set as item_set, or send a choice", WIRE)
        named, choices = ([value for value in values if value is not None] for values in (named, choices))
        drawn, has_set = draw_options.wants_draws(given), bool(named or choices)
        weighed = _weighed(given, has_set, ranked=k is not None or drawn)
        if given.get(SLATE) is not None:
            _refuse_beside_slate(given, has_set or other, ranked=k is not None)
            return None
        selection = {word: given[word] for word in SELECTION if given.get(word) is not None}
        _check_selection(selection, named, choices)
        if not has_set:
            if draws and drawn:
                raise wrong_type(f"{DRAWS} draws items of a set: name the set as {REFERENCE}", DRAWS)
            for key in islice(given, request_fields.COMPARED):
                if key != REFERENCE and request_fields.nearest(key, (REFERENCE,)):
                    raise wrong_type(f"{where} has no {shown(key)}: name the set as {REFERENCE}", REFERENCE)
            return None
        _check_one_set(named, choices, constraints, other)
        if drawn and not draws:
            raise RefusedError(
                "draws",
                f"{DRAWS} would be ignored here: send it to /v1/completions or /v1/chat/completions; offline, vLLM "
                f"takes {DRAWS}: true and n in LLM.generate, and a number in LLM.beam_search, with DrawParams",
                DRAWS,
            )
        check_options(given, ranked=k is not None and not drawn, drawn=drawn)
        name, choice = named[0] if named else None, choices[0] if choices else None
        if drawn:
            return cls(name, choice, drawn=DrawOptions.of(given), weighed=weighed, **selection)
        options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
        ranked = None if k is None else ListOptions(k, **options)
        return cls(name, choice, ranked, weighed=weighed, **selection)


def _weighed(given: Mapping[str, Any], has_set: bool, *, ranked: bool) -> str:
    """Return the field by which a request asks for log-probabilities, if any. ranked: whether for a list or draws."""
    words = [word for word in (WEIGHT, LOGPROBS) if given.get(word) is not None]
    for word in words:
        if not isinstance(given[word], bool):
            raise wrong_type(f"{word} must be true or false, not {shown(given[word])}", word)
    words = [word for word in words if given[word]]
    if words and (not has_set or (ranked and words[0] == WEIGHT)):
        raise wrong_type(
            f"{words[0]} is of one sampled answer with {REFERENCE} or a choice, not of slates, lists, draws, or sets "
            f"inside a constraint: add {REFERENCE}, or leave it out",
            words[0],
        )
    if len(words) > 1:
        raise wrong_type(f"{WEIGHT} is the sum of log p - log q in {LOGPROBS}: ask for one of them", WEIGHT)
    return words[0] if words else ""


def _check_selection(selection: Mapping[str, Any], named: Sequence[Any], choices: Sequence[Any]) -> None:
    for word, value in selection.items():
        if not named:
            mend = ", or shorten the list itself" if choices else ""
            raise wrong_type(
                f"{word} chooses among the items of a registered set: name the set as {REFERENCE}{mend}", word
            )
        kind, example = (dict, "an object of conditions") if word == request_fields.FILTER else (list, "a list of keys")
        if not isinstance(value, kind):
            raise wrong_type(f"{word} must be {example}, not {shown(value)}", word)


def _check_one_set(named: Sequence[Any], choices: Sequence[Any], constraints: Sequence[str], other: bool) -> None:
    for name in named:
        if not isinstance(name, str):
            raise wrong_type(f"item_set must be the name of an item set, a string, not {shown(name)}", REFERENCE)
        if name != named[0]:
            message = "two fields name different item sets, which exclude each other: give one"
            raise RefusedError("two constraints", message, REFERENCE)
    if len(choices) + bool(named) + other > 1:
        *first, last = constraints
        message = f"{', '.join(first)} and {last} (or response_format) exclude each other: give one"
        raise RefusedError("two constraints", message, REFERENCE)


def _refuse_beside_slate(given: Mapping[str, Any], other: bool, *, ranked: bool) -> None:
    """Raises RefusedError for what contradicts a slate. other: whether there is another constraint."""
    if other:
        message = "a slate and another item set or constraint exclude each other: give one; the slate names its set"
        raise RefusedError("two constraints", message, SLATE)
    if ranked or draw_options.wants_draws(given):
        message = "a slate is one answer: a ranked list or draws exclude it, leave them out"
        raise RefusedError("beam search", message, SLATE)
    for word in SELECTION:
        if given.get(word) is not None:
            raise wrong_type(f"{word} would be ignored beside a slate: state it in the slate", word)
    check_options(given, ranked=False)


def check_options(given: Mapping[str, Any], *, ranked: bool, drawn: bool = False) -> None:
    """Raises RefusedError for a misspelled option of a ranked list or of draws, and for one without them."""
    if given.get(LIST):
        message = f"{LIST} is for sampling_params of generate, offline: ask for {BEAMS} and n here, or leave it out"
        raise RefusedError("beam search", message, LIST)
    for key in (*islice(given, request_fields.COMPARED), *given.keys() & {*OPTIONS, *DRAWN}):
        meant = None if drawn and key == request_fields.CANDIDATES else request_fields.ELSEWHERE.get(key)
        word = meant or request_fields.nearest(key, (*OPTIONS, BEAMS, *SELECTION, *DRAWN, WEIGHT, LOGPROBS))
        if word not in (None, key):
            raise wrong_type(f"there is no field {shown(key)}: did you mean {word}?", key)
        if word in DRAWN and given[key] is not None and not drawn:
            raise RefusedError("draws", f"{word} is for draws: add {DRAWS}, or leave it out", word)
        if drawn and word in OPTIONS and word not in draw_options.SHARED and given[key] not in (None, False):
            raise RefusedError("draws", f"{word} is for ranked lists: draws are exact, leave it out", word)
        if word in OPTIONS and given[key] is not None and not ranked and not drawn:
            raise RefusedError(
                "beam search",
                f"{word} is for ranked lists: add use_beam_search and n, the number of items (in the sampling_params "
                f"of SGLang's /generate: beam_width and n), or omit {word}",
                word,
            )
