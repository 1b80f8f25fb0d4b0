"""The fields of a request that this plugin reads, and which misspelled ones mean them."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
from msgspec import Meta

from itemset.errors import shown
from itemset.serving import wire
from itemset.serving.catalogue import RefusedError

REFERENCE = "item_set"  # the name of a registered set; inside the front end an ItemRequest takes its place
SLATE = "slate"  # several distinct items in one answer: see `itemset.embedded.placement.read_slate`
CHOICE, STRUCTURED, GUIDED = "choice", "structured_outputs", "guided_choice"
"""The inline list, the field that vLLM has it in, and its older word for it."""
FILTER, EXCLUDE, ONLY, PROMPT = SELECTION = ("item_filter", "exclude_keys", "only_keys", "exclude_prompt")
"""What chooses among the items of a registered set: see `itemset.select.views.view`."""
BOOST, BOOST_KEYS = STEERING = ("boost", "boost_keys")  # what adds to scores: see `itemset.select.views.view`
BEAMS = "use_beam_search"  # vLLM's word for a ranked list, on OpenAI endpoints of both engines
DRAWS, DRAW, CANDIDATES, REPLACE, APPROXIMATE = DRAWN = ("draws", "draw", "candidates", "replace", "approximate")
"""What a request for draws alone gives beside its set: see `DrawOptions`."""
OF_EXACT = (REPLACE, APPROXIMATE, "temperature", "width")  # options of exact draws alone
IMPORTANCE = "importance"  # of `draw`, the value that is not the default
MOST_CANDIDATES = 64
LEAST_TEMPERATURE = 1e-6  # of draws: float32 holds an item's log-probability over it, and some digits
MOST_TEMPERATURE = 100.0  # at which they hardly look at the model
USUAL_BEAMS = 64  # of a list: as many as find nearly all of the best (docs/benchmarks.md, "Ranked lists")
RACE_BEAMS, FEWEST_BEAMS = 16, 4  # of a race with replacement: by default, and as many as it takes at least
WEIGHT = "return_set_weight"  # asks for the probability of an answer's set along the way: see `answer_fields.Expected`
ATTRIBUTES = "item_attributes"  # asks for attributes of the items in answers: their names, or true for all
LOGPROBS = wire.LOGPROBS
NO_ATTRIBUTES = f"{ATTRIBUTES} are of the items of a registered set: name the set as {REFERENCE}, or omit it"
_KEYS = "(ids?|items?|keys?)?"
_NAMES = {
    FILTER: r"(item|meta|metadata|attribute|pre|post)?filters?|where",
    EXCLUDE: rf"(exclud(e|ed|ing)|seen|blocked|banned){_KEYS}",
    ONLY: rf"only{_KEYS}|(allow|allowed|include)(ids?|items?|keys?)|candidates?|keys",
    ATTRIBUTES: r"(with|return|include)?attributes?",
    "width": r"(num)?beams?|beamsize",
}
"""What others call these, folded. A server would drop such a field, and answer of all items."""
_ELSEWHERE = re.compile("|".join(f"(?P<{word}>{pattern})" for word, pattern in _NAMES.items()))
OF_ANSWERS = (WEIGHT, LOGPROBS, ATTRIBUTES)  # what answers are to say of items besides their keys
LIST = "list"
"""In the parameters of `generate`: its `n` candidates are the n best items. DRAWS there may be true: n draws. Beside
LIST_AFTER: how many items the list has."""
LIST_AFTER = "list_after"  # the text that ends a thought, after which a list is made; true: its reasoning's end
MOST_MARKER = 100  # characters of it

OF_SET, OF_ITEMS = (REFERENCE, *SELECTION, *STEERING, SLATE, *OF_ANSWERS), (DRAWS, DRAW, LIST_AFTER)
"""Fields of any request with a registered set, and of those that several items answer."""
WORDS = (*OF_SET, CHOICE, STRUCTURED, GUIDED, *OF_ITEMS)
EDITS = 2  # a key this many edits from a word, after folding case, - and _, is taken for it: a person meant the word
COMPARED = 200  # keys of a body that are compared so; of those after them only the words themselves count
OTHERS = frozenset({"items", "voice", "raw", "rows", "state", "slots", "date", "scale", "boot", "most"})
"""Fields of OpenAI's and the engines' own that come as near."""

CUSTOM, PARAMS, XARGS = "custom_params", "sampling_params", "vllm_xargs"
EXTRAS = frozenset(
    {"extra_body", STRUCTURED, CUSTOM, "extra_args", XARGS, "instances", "parameters", "options", PARAMS}
    | {f"{PARAMS}.{inner}" for inner in (CUSTOM, "extra_args", XARGS)}
)
"""Objects of a body, in any engine, that may hold any key, and in which people put our words."""


def at(body: Any, place: str) -> Iterator[dict[str, Any]]:
    """Yield the objects at a place of a body; of a batch, which is a list, each one's."""
    values = [body]
    for name in place.split(".") if place else ():
        values = [one.get(name) for value in values for one in objects(value)]
    for value in values:
        yield from objects(value)


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the object that a value is, or those in a list."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def rename_guided(given: dict[str, Any], into: dict[str, Any]) -> None:
    """Move vLLM's older word in an object to `choice` of another. Raises RefusedError for both, and for no list."""
    if (texts := given.pop(GUIDED, None)) is None:
        return
    if not isinstance(texts, list):
        raise wrong_type(f"{GUIDED} must be a list of texts, not {shown(texts)}", GUIDED)
    if into.get(CHOICE) is not None:
        raise RefusedError("two constraints", f"{GUIDED} is the older word for {CHOICE}: give one of them")
    into[CHOICE] = texts


def refuse_tools(body: Mapping[str, Any]) -> None:
    """Raises RefusedError where a body with a set asks for an answer that can be no item."""
    tools = body.get("tool_choice")
    if tools == "required" or isinstance(tools, dict):
        raise RefusedError(
            "two constraints",
            "an item set and a tool_choice that forces a tool exclude each other: leave tool_choice out, or send auto",
        )
    for word in ("guided_json", "guided_regex", "guided_grammar"):
        if body.get(word) is not None:
            raise RefusedError("two constraints", f"an item set and {word} exclude each other: give one")


def wrong_type(message: str, param: str | None = None) -> RefusedError:
    return RefusedError("wrong type", message, param)


def attributes_asked(given: Mapping[str, Any]) -> Sequence[str] | bool:
    """Return the attributes that a request asks for: names, or whether all. Raises RefusedError for another type."""
    asked = given.get(ATTRIBUTES)
    if isinstance(asked, list | tuple) and asked and all(isinstance(name, str) for name in asked):
        return tuple(dict.fromkeys(asked))
    if asked is None or isinstance(asked, bool):
        return bool(asked)
    raise wrong_type(
        f"{ATTRIBUTES} must be true, or a list of one or more of their names; it is {shown(asked)}", ATTRIBUTES
    )


def elsewhere(key: str) -> str | None:
    """Return the word that others write so; None where they write none of ours."""
    found = _ELSEWHERE.fullmatch(_folded(key[:40]))
    return found and found.lastgroup


def nearest(key: str, words: tuple[str, ...]) -> str | None:
    """Return the word that a key is, or is taken for; None where it is none of these."""
    return None if len(key) > 40 else _nearest(key, words)


@functools.lru_cache(4096)
def _nearest(key: str, words: tuple[str, ...]) -> str | None:
    if key in words:
        return key
    if REFERENCE in words and key.startswith(f"{REFERENCE}_") and key not in (wire.WIRE, wire.SETS):
        return REFERENCE  # as an option of the server
    # Many words come near BOOST: host, cost, best.
    near = (word for word in words if _near(_folded(key), _folded(word), 1 if word == BOOST else EDITS))
    return None if key in OTHERS else next(near, None)


def _folded(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "")


def _near(given: str, word: str, edits: int) -> bool:
    """Return whether two words are at most that many insertions, deletions and substitutions apart."""
    if not given or not word or abs(len(given) - len(word)) > edits:
        return len(given) + len(word) <= edits
    if given[0] == word[0]:
        return _near(given[1:], word[1:], edits)
    return edits > 0 and any(_near(given[i:], word[j:], edits - 1) for i, j in ((0, 1), (1, 0), (1, 1)))


_Flag = Annotated[bool, Meta(description="true or false")]
_Count = Annotated[int, Meta(ge=1)]
_Widths = Annotated[tuple[_Count, ...], Meta(min_length=1, max_length=64)]
_WIDTH = "a number of beams, at least 1, or a list of such numbers: of each level"
_Quotas = Annotated[dict[str, _Count], Meta(min_length=1, max_length=8)]
_QUOTAS = 'an object of at most 8 attributes and numbers of items, at least 1, such as {"brand": 2}'
_Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_fields_of = functools.cache(msgspec.structs.fields)  # which reads annotations, for half a millisecond


def _number(unit: str) -> Meta:
    return Meta(description=f"a number of {unit}, at least 1")


class _Options(msgspec.Struct, frozen=True):
    def __post_init__(self) -> None:
        """Raises RefusedError for a value of another type."""
        number, *others = _fields_of(type(self))
        for one in (*others, number):  # which SGLang may have of the width
            name, value = one.encode_name, getattr(self, one.name)
            try:
                msgspec.convert(value, one.type)
            except msgspec.ValidationError as error:
                what = get_args(one.type)[-1].description
                raise wrong_type(f"{name} must be {what}, not {shown(value)}", name) from error

    @classmethod
    def of(cls, number: Any, given: Mapping[str, Any]) -> Self:
        """Return those among a request's fields, beside their number. Raises RefusedError as the class does."""
        return cls(number, **{name: given[name] for name in cls.__struct_fields__[1:] if given.get(name) is not None})


class ListOptions(_Options, frozen=True):
    """What a request asks of a ranked list: `n` items, and see `itemset.ranking.search.Search`.

    without_end: scores are of the items' own tokens, without the end token after them.
    """

    n: Annotated[_Count, _number("items")]
    width: Annotated[_Count | _Widths | None, Meta(description=_WIDTH)] = None
    exact: _Flag = False
    renormalised: _Flag = False
    max_passes: Annotated[_Count | None, _number("forward passes")] = None
    without_end: _Flag = False
    normalise_length: Annotated[float, Meta(ge=0, le=2, description="a power of its tokens, 0 to 2")] = 0.0
    at_most: Annotated[_Quotas | None, Meta(description=_QUOTAS)] = None
    explore: Annotated[_Count | None, Meta(description="how many of the n items are draws, at least 1")] = None

    def __post_init__(self) -> None:
        """Raises RefusedError for a value of another type, a beam too narrow for `n` items, or draws beside what is not
        drawn by."""
        super().__post_init__()
        if self.explore is not None and self.explore >= self.n:
            message = f"explore={self.explore:,} of n={self.n:,} leaves no best item: lower it, or ask for {DRAWS}"
            raise wrong_type(message, "explore")
        for name in ("renormalised", "without_end", "normalise_length", "at_most") if self.explore else ():
            if getattr(self, name):
                message = f"explore draws by the model's own probabilities and boosts: leave {name} or explore out"
                raise wrong_type(message, name)
        *_, last = [self.beam] if isinstance(self.beam, int) else self.beam
        if last < self.n:
            message = f"width={last:,} finds no {self.n:,} items: set it to at least {self.n:,}"
            raise RefusedError("beam search", message, "width")

    def with_beams(self, items: int, most: int, steered: bool) -> Self:
        """Give a list of a set with this many items the beams that it has unless it says otherwise, at most `most`.

        steered: by boosts, which take twice the beams to find as much (docs/steering.md, "Which width?").
        """
        if self.width is not None or self.exact or self.max_passes is not None:
            return self
        return msgspec.structs.replace(self, width=max(self.n, min(USUAL_BEAMS << steered, items, most)))

    def of_engine(self, items: int, most: int) -> Self:
        """Return the options of the list that an engine makes: a longer one, out of which `at_most` chooses, or a
        shorter one, which `explore` goes on from."""
        if self.explore:
            return msgspec.structs.replace(self, n=self.n - self.explore, explore=None)
        if not self.at_most:
            return self
        n = max(self.n, min(max(USUAL_BEAMS, 4 * self.n), items, most))
        *levels, last = [self.beam] if isinstance(self.beam, int) else self.beam
        return msgspec.structs.replace(self, n=n, width=(*levels, max(last, n)) if levels else max(last, n))

    @property
    def beam(self) -> int | tuple[int, ...]:
        """Return how many beams, of every level or of each: `width`, or as many as items."""
        return tuple(self.width) if isinstance(self.width, Sequence) else self.width or self.n


class DrawOptions(_Options, frozen=True):
    """What a request asks of draws: `n` of them, and see `itemset.ranking.exact_sampling.Drawing`; if draw is
    "importance", `itemset.ranking.importance.Importance`."""

    n: Annotated[_Count, _number("draws")] = msgspec.field(name=DRAWS)
    replace: _Flag = True
    seed: Annotated[_Seed | None, Meta(description="an integer of 0 to 2^63 - 1")] = None
    temperature: Any = 1.0
    width: Annotated[_Count | None, _number("forward passes in a round")] = None
    max_passes: Annotated[_Count | None, _number("forward passes")] = None
    approximate: _Flag = False
    draw: Annotated[Literal["exact", "importance"], Meta(description='"exact" or "importance"')] = "exact"
    candidates: Annotated[_Count | None, _number("candidates of a draw")] = None

    def __post_init__(self) -> None:
        """Raises RefusedError for a value of another type, or none that can be drawn with."""
        super().__post_init__()
        given, least, most = self.temperature, LEAST_TEMPERATURE, MOST_TEMPERATURE
        if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given <= most:
            raise RefusedError(
                "draws",
                f"temperature must be {least:g} to {most:g} for draws, not {shown(given)}: it is one over items, of "
                "weights p^(1/temperature); for the most likely items ask for a ranked list",
                "temperature",
            )
        by_importance, candidates = self.draw == IMPORTANCE, self.candidates
        if not by_importance and candidates is not None:
            message = f'{CANDIDATES} is for {DRAW}: "{IMPORTANCE}"; to choose among items send only_keys'
            raise RefusedError("draws", message, CANDIDATES)
        if by_importance and (candidates is None or candidates > MOST_CANDIDATES):
            message = f'{DRAW}: "{IMPORTANCE}" takes {CANDIDATES}: K, at most {MOST_CANDIDATES}'
            raise RefusedError("draws", message, CANDIDATES)
        for one in _fields_of(type(self)) if by_importance else ():
            if one.name in OF_EXACT and getattr(self, one.name) != one.default:
                message = f'{one.name} is for exact draws: leave it or {DRAW}: "{IMPORTANCE}" out'
                raise RefusedError("draws", message, one.name)

    def race_width(self, races: int, wanted: int, most: int) -> int | None:
        """Return how many beams each race for `wanted` items has of `most`, in a step; None if too few for all."""
        width = max(self.width or RACE_BEAMS, 2 * wanted)
        if min(width, FEWEST_BEAMS) * races > most or wanted > most:
            return None
        return min(width, most // races)


OPTIONS = ListOptions.__struct_fields__[1:]  # what a request for a ranked list may give beside its set
