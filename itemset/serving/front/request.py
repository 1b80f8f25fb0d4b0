"""What a request asks of item sets, judged once: which set, which of its items, and what list or draws of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from itemset.errors import shown
from itemset.serving.catalogue import InlineSet, RefusedError
from itemset.serving.front import request_fields as fields

from itemset.serving.front.request_fields import (  # isort: skip
    BEAMS, DRAWS, LIST, LIST_AFTER, LOGPROBS, REFERENCE, SLATE, WEIGHT, DrawOptions, ListOptions, wrong_type,
)  # fmt: skip
from itemset.serving.wire import SETS, WIRE
from itemset.text import Escape

if TYPE_CHECKING:  # it imports torch
    from itemset.serving.constraint import Constraint

BENDING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "min_new_tokens"), (0,)),
    "top_k": (0, -1, 1 << 30),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "custom_logit_processor"), ({}, [])),
}
"""Parameters that bend a model's distribution token by token, and values with which they do nothing."""
_LISTS, _COUNTS = {fields.BEAMS: (False,), "beam_width": (False, 1)}, {"n": (1,), "best_of": (1,)}
"""The same of parameters that ask for a list, and of those that ask for several answers."""
UNSAID = ("stream", "echo", "logprobs", "prompt_logprobs", "return_logprob")  # what an answer of draws has not


@dataclass(frozen=True)
class ItemRequest:
    """The set that a request names or brings, one of both, and the ranked list or the draws of its items, if any.

    item_set: the name of a registered set. choice: the texts of an inline one. selection: see `views.view`. escape: of
    texts inside longer ones, as for `itemset.build_text`. weighed: WEIGHT or LOGPROBS, if its answers say these.
    attributes: names of those that they say, or true for all. constraint: in place of a set the kind and the text of
    one in which sets may stand. made: either, once it is made. after: what ends a thought before its list, see
    LIST_AFTER; marker: its tokens; ended: that thought. reference: of its set, if its version is decided.
    """

    item_set: str | None = None
    choice: list[str] | None = field(default=None, repr=False)
    several: ListOptions | DrawOptions | None = None
    selection: Mapping[str, Any] = field(default_factory=dict, repr=False)
    escape: Escape | None = None
    weighed: str = ""
    attributes: Sequence[str] | bool = False
    constraint: tuple[str, Any] | None = field(default=None, repr=False)
    made: "InlineSet | Constraint | None" = field(default=None, repr=False)
    after: str | bool = False
    marker: tuple[int, ...] = ()
    ended: "Thought | None" = field(default=None, repr=False)
    reference: str = ""

    def __deepcopy__(self, memo: Any) -> "ItemRequest":
        """Engines copy a request's parameters; this is immutable."""
        return self

    @property
    def wanted(self) -> int:
        return 1 if self.several is None else self.several.n

    @property
    def names(self) -> Sequence[str]:
        """Return the names of its attributes, once it has its set."""
        return () if isinstance(self.attributes, bool) else self.attributes

    @property
    def temperature(self) -> float:
        return self.several.temperature if isinstance(self.several, DrawOptions) else 1.0

    @property
    def chooses(self) -> bool:
        """Return whether it selects among the items of its registered set, or steers them, and that is to be done."""
        return self.made is None and (bool(self.selection) or self.temperature > 1)

    @classmethod
    def of(
        cls, named: Sequence[Any], choices: Sequence[Any], given: Mapping[str, Any], *, k: int | None = None,
        draws: bool = False, where: str, constraints: Sequence[str], other: bool = False,
    ) -> "ItemRequest | None":  # fmt: skip
        """Judge a request; None if it has no set.
        named, choices: each name and each inline list that it gives, None for none. given: all fields among which
        options may stand, which its sender knows as `where`. k: items of its list, None without one. draws: whether its
        endpoint makes draws. constraints: what its sender may choose from; other: whether it has one that is no set.

        Raises RefusedError for what contradicts itself, has another type, is misspelled, or would be ignored.
        """
        if word := next((word for word in (WIRE, SETS) if word in given), None):
            raise wrong_type(f"{word} is not for requests: name the set as item_set, or send a choice", word)
        named, choices = ([value for value in values if value is not None] for values in (named, choices))
        drawn, has_set = wants_draws(given), bool(named or choices)
        if after := _list_after(given, alone=has_set and k is None and not drawn):
            k = given[LIST]
        weighed = _weighed(given, has_set, ranked=k is not None or drawn)
        attributes = fields.attributes_asked(given)
        if given.get(SLATE) is not None:
            _refuse_beside_slate(given, has_set or other, ranked=k is not None)
            return None
        if attributes and not named and (choices or not other):  # of a constraint it is known later
            raise wrong_type(fields.NO_ATTRIBUTES, fields.ATTRIBUTES)
        selection = _selection(given, named, choices)
        if not has_set:
            if draws and drawn:
                raise wrong_type(f"{DRAWS} draws items of a set: name the set as {REFERENCE}", DRAWS)
            for key in islice(given, fields.COMPARED):
                if key != REFERENCE and fields.nearest(key, (REFERENCE,)):
                    raise wrong_type(f"{where} has no {shown(key)}: name the set as {REFERENCE}", REFERENCE)
            return None
        _check_one_set(named, choices, constraints, other and not after)  # a thought may have a grammar
        if drawn and not draws:
            raise RefusedError(
                "draws",
                f"{DRAWS} would be ignored here: send it to /v1/completions or /v1/chat/completions; offline, vLLM "
                f"takes {DRAWS}: true and n in LLM.generate, and a number in LLM.beam_search, with DrawParams",
                DRAWS,
            )
        check_options(given, ranked=k is not None and not drawn, drawn=drawn)
        several: ListOptions | DrawOptions | None
        several = DrawOptions.of(given[DRAWS], given) if drawn else None if k is None else ListOptions.of(k, given)
        for word in selection.keys() & fields.STEERING:
            if several is None or (isinstance(several, DrawOptions) and several.draw == fields.IMPORTANCE):
                raise RefusedError(
                    "beam search",
                    f"{word} steers ranked lists and exact draws: ask for {BEAMS} and n, or for {DRAWS}, or omit it",
                    word,
                )
        name, choice = named[0] if named else None, choices[0] if choices else None
        return cls(name, choice, several, selection, weighed=weighed, attributes=attributes, after=after)


THOUGHT = "thought"  # what an answer says that is a thought: the `ItemRequest` for the list after it, until it is made


@dataclass
class Thought:
    """One request's sampled answer before a list. jobs: a list that has begun. prompt: as its engine's list needs it.
    tokens: of the answer, once it has ended at its marker. table: the list, if the engine has made it already."""

    asked: "ItemRequest"
    jobs: list[Any]
    prompt: Any = ()
    tokens: Sequence[int] = ()
    table: Any = None
    weighed: ClassVar[str] = ""

    def answer_fields(self, tokens: Sequence[int], *, cut: bool, logs: Any = ()) -> dict[str, Any]:
        """Return what an answer says: that its list is to be made, or that there is none, as it has ended elsewhere."""
        if cut or tuple(tokens[-len(self.asked.marker) :]) != self.asked.marker:
            return {"items": None}
        return {THOUGHT: replace(self.asked, ended=replace(self, tokens=tokens))}


def _list_after(given: Mapping[str, Any], *, alone: bool) -> str | bool:
    """Return what ends the thought before a list; False without one. alone: whether a set is all that is asked for."""
    after: str | bool | None = given.get(LIST_AFTER)
    if after is None or after is False:
        return False
    marks = isinstance(after, str | bool) and 0 < len(str(after)) <= fields.MOST_MARKER
    if not (alone and marks and type(given.get(LIST)) is int):
        raise wrong_type(
            f"{LIST_AFTER} is the text that ends a thought, at most {fields.MOST_MARKER} characters, or true for the "
            f"end of the model's reasoning: give it beside {REFERENCE} with {LIST}: 10 for ten items, and without "
            f"{BEAMS}, {DRAWS} and {SLATE}",
            LIST_AFTER,
        )
    return after


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


_KINDS: Mapping[str, tuple[type, str]] = {
    fields.FILTER: (dict, "an object of conditions"),
    fields.PROMPT: (bool, "true or false"),
    fields.BOOST: (dict, "an object of attributes and weights"),
    fields.BOOST_KEYS: (dict, "an object of keys and what each adds"),
}


def _selection(given: Mapping[str, Any], named: Sequence[Any], choices: Sequence[Any]) -> dict[str, Any]:
    words = (*fields.SELECTION, *fields.STEERING)
    selection = {word: given[word] for word in words if given.get(word) is not None}
    for word, value in selection.items():
        if not named:
            mend = ", or shorten the list itself" if choices else ""
            raise wrong_type(
                f"{word} chooses among the items of a registered set: name the set as {REFERENCE}{mend}", word
            )
        kind, example = _KINDS.get(word, (list, "a list of keys"))
        if not isinstance(value, kind):
            raise wrong_type(f"{word} must be {example}, not {shown(value)}", word)
    return {word: value for word, value in selection.items() if value is not False}


def _check_one_set(named: Sequence[Any], choices: Sequence[Any], constraints: Sequence[str], other: bool) -> None:
    for name in named:
        if not isinstance(name, str):
            message = f"item_set must be the name of an item set, a string, not {shown(name)}"
            message += ": send a list of texts as a choice"
            raise wrong_type(message, REFERENCE)
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
    if ranked or wants_draws(given):
        message = "a slate is one answer: a ranked list or draws exclude it, leave them out"
        raise RefusedError("beam search", message, SLATE)
    for word in (*fields.SELECTION, *fields.STEERING):
        if given.get(word) is not None:
            in_slates = word in fields.SELECTION and word != fields.PROMPT
            mend = "state it in the slate" if in_slates else "omit it"
            raise wrong_type(f"{word} would be ignored beside a slate: {mend}", word)
    check_options(given, ranked=False)


def check_options(given: Mapping[str, Any], *, ranked: bool, drawn: bool = False) -> None:
    """Raises RefusedError for a misspelled option of a ranked list or of draws, and for one without them."""
    if given.get(LIST) and not given.get(LIST_AFTER):
        message = f"{LIST} is of the list after a thought, whose end {LIST_AFTER} says: else ask for {BEAMS} and n"
        raise RefusedError("beam search", message, LIST)
    of_sets = (*fields.SELECTION, *fields.STEERING, *fields.OF_ANSWERS)
    words = (*fields.OPTIONS, BEAMS, *of_sets, *fields.DRAWN, LIST_AFTER)
    for key in (*islice(given, fields.COMPARED), *given.keys() & {*fields.OPTIONS, *fields.DRAWN}):
        meant = None if key in words and (drawn or key != fields.CANDIDATES) else fields.elsewhere(key)
        word = meant or fields.nearest(key, words)
        if word not in (None, key):
            raise wrong_type(f"there is no field {shown(key)}: did you mean {word}?", key)
        if word is None or given[key] is None:
            continue
        of_lists, of_draws = word in fields.OPTIONS, word in DrawOptions.__struct_fields__
        if word in fields.DRAWN and not drawn:
            raise RefusedError("draws", f"{word} is for draws: add {DRAWS}, or leave it out", word)
        if of_lists and drawn and not of_draws and given[key] not in (None, False):
            raise RefusedError("draws", f"{word} is for ranked lists: draws are exact, leave it out", word)
        if of_lists and not ranked and not drawn:
            raise RefusedError(
                "beam search",
                f"{word} is for ranked lists: add use_beam_search and n, the number of items (in the sampling_params "
                f"of SGLang's /generate: beam_width and n), or omit {word}",
                word,
            )


def wants_draws(given: Any) -> bool:
    return isinstance(given, Mapping) and given.get(DRAWS) is not None


def candidates(given: Mapping[str, Any], beside: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Return what `generate` is asked for by LIST, or DRAWS: true, in words of other requests: its fields, and the
    items of a list or None. beside: the engine's own parameters, n among them.

    Raises RefusedError for both together, and as `refuse_beside` does.
    """
    own, n = dict(given), beside.get("n") or 1
    ranked, drawn = own.pop(LIST, None) or False, own.get(DRAWS) is True
    if not isinstance(ranked, bool):
        message = f"{LIST} must be true or false, not {shown(ranked)}: n says how many items, but beside {LIST_AFTER}"
        raise wrong_type(message, LIST)
    if ranked and own.get(DRAWS) is not None:
        raise RefusedError("draws", f"{DRAWS} and a ranked list exclude each other: leave {LIST} or {DRAWS} out", LIST)
    refuse_beside({**beside, "n": None}, "draws" if drawn else "ranked lists")
    return own | ({DRAWS: n} if drawn else {}), None if drawn else n


def wants_candidates(given: Any) -> bool:
    """Return whether fields beside `generate` ask for a list, or for draws, of its `n`."""
    if not isinstance(given, Mapping) or given.get(LIST_AFTER) not in (None, False):
        return False
    return bool(given.get(LIST)) or given.get(DRAWS) is True


def refuse_beside(given: Mapping[str, Any], what: str = "draws") -> None:
    """Raises RefusedError for fields of a request for draws that would be ignored, or mean something else."""
    bends = f"{{0}} would bend the model's distribution, and {what} follow it as it is: leave {{0}} out; "
    for neutral, why in (
        (_LISTS, f"draws and a ranked list exclude each other: leave {{0}} or {DRAWS} out"),
        (_COUNTS, f"{DRAWS} says how many items to draw: leave {{0}} out"),
        (BENDING, bends + "temperature is for draws too"),
    ):
        for name, values in neutral.items():
            if given.get(name) not in (None, *values):
                raise RefusedError("draws", why.format(name), name)
    for name in UNSAID:
        if given.get(name) is not None and given[name] is not False:  # logprobs: 0 asks for those of the tokens
            raise RefusedError("draws", f"{what} have no {name}: leave it out", name)


DRAWING = ("/v1/completions", "/v1/chat/completions")  # OpenAI's endpoints that may answer with lists and draws


def with_beams(body: dict[str, Any], path: str) -> None:
    """Let a body's draws, if any, take the way of ranked lists. Raises RefusedError as `refuse_beside` does."""
    if wants_draws(body) and path in DRAWING:
        refuse_beside(body)
        body["n"] = DrawOptions.of(body[DRAWS], body).n
        body[fields.BEAMS] = True
