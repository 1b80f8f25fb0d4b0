"""What a request asks of draws, judged once, whichever engine took it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from itemset.errors import shown
from itemset.serving.catalogue import RefusedError
from itemset.serving.request_fields import APPROXIMATE, BEAMS, CANDIDATES, DRAW, DRAWS, LIST, REPLACE, wrong_type

MAX_SEED = 2**63 - 1
SHARED = ("width", "max_passes")
"""Options of draws that ranked lists have too."""
OPTIONS = (DRAW, CANDIDATES, REPLACE, APPROXIMATE, "seed", "temperature", *SHARED)
"""What a request may give beside `draws`."""
EXACT, IMPORTANCE = WAYS = ("exact", "importance")
"""Values of `draw`."""
MOST_CANDIDATES = 64
RACE_BEAMS, FEWEST_BEAMS = 16, 4  # of a race with replacement: by default, and as many as it takes at least

BENDING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "min_new_tokens"), (0,)),
    "top_k": (0, -1, 1 << 30),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "custom_logit_processor"), ({}, [])),
}
"""Parameters that bend a model's distribution token by token, and values with which they do nothing."""
UNSAID = ("stream", "echo", "logprobs", "prompt_logprobs", "return_logprob")
"""What an answer of draws has not."""


@dataclass(frozen=True)
class DrawOptions:
    """What a request asks of draws: `n` of them, and see `itemset.ranking.exact_sampling.Drawing`; if draw is
    "importance", `itemset.ranking.importance.Importance`."""

    n: int
    replace: bool = True
    seed: int | None = None
    temperature: float = 1.0
    width: int | None = None
    max_passes: int | None = None
    approximate: bool = False
    draw: str = EXACT
    candidates: int | None = None

    def __post_init__(self) -> None:
        """Raises RefusedError for a value of another type, or none that can be drawn with."""
        flags = {REPLACE: self.replace, APPROXIMATE: self.approximate}
        numbers = ((DRAWS, self.n, "draws"), (CANDIDATES, self.candidates, "candidates of a draw"))
        more = (("width", self.width, "forward passes in a round"), ("max_passes", self.max_passes, "forward passes"))
        check_fields(flags, (*numbers, *more))
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed <= MAX_SEED):
            raise wrong_type(f"seed must be an integer of 0 to 2^63 - 1, not {shown(self.seed)}", "seed")
        given = self.temperature
        if not (_is_int(given) or isinstance(given, float)) or not 0 < given <= 1:
            raise RefusedError(
                "draws",
                f"temperature must be more than 0 and at most 1 for draws, not {shown(given)}: it is one over items, "
                "of weights p^(1/temperature), which can be drawn exactly up to 1; for the most likely items ask for a "
                "ranked list",
                "temperature",
            )
        if self.draw not in WAYS:
            raise wrong_type(f'{DRAW} must be "{EXACT}" or "{IMPORTANCE}", not {shown(self.draw)}', DRAW)
        if self.draw == EXACT and self.candidates is not None:
            message = f'{CANDIDATES} is for {DRAW}: "{IMPORTANCE}"; to choose among items send only_keys'
            raise RefusedError("draws", message, CANDIDATES)
        if self.draw == IMPORTANCE:
            self._check_importance()

    def _check_importance(self) -> None:
        if self.candidates is None or self.candidates > MOST_CANDIDATES:
            message = f'{DRAW}: "{IMPORTANCE}" takes {CANDIDATES}: K, at most {MOST_CANDIDATES}'
            raise RefusedError("draws", message, CANDIDATES)
        for name, value, default in (
            (REPLACE, self.replace, True),
            (APPROXIMATE, self.approximate, False),
            ("temperature", self.temperature, 1),
            ("width", self.width, None),
        ):
            if value != default:
                raise RefusedError("draws", f'{name} is for exact draws: leave it or {DRAW}: "{IMPORTANCE}" out', name)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Those among a request's fields. Raises RefusedError as the class does."""
        return cls(given[DRAWS], **{name: given[name] for name in OPTIONS if given.get(name) is not None})


def race_width(asked: DrawOptions, races: int, wanted: int, most: int) -> int | None:
    """How many beams each race for `wanted` items has of `most`, inside a step; None if they are too few for all."""
    width = max(asked.width or RACE_BEAMS, 2 * wanted)
    if min(width, FEWEST_BEAMS) * races > most or wanted > most:
        return None
    return min(width, most // races)


def wants_draws(given: Any) -> bool:
    """Whether fields of a request ask for draws."""
    return isinstance(given, Mapping) and given.get(DRAWS) is not None


def candidates(given: Mapping[str, Any], beside: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """What `generate` is asked for by LIST, or DRAWS: true, in words of other requests: its fields, and the items of a
    list or None. beside: the engine's own parameters, n among them.

    Raises RefusedError for both together, and as `refuse_beside` does.
    """
    own, n = dict(given), beside.get("n") or 1
    ranked, drawn = own.pop(LIST, None) or False, own.get(DRAWS) is True
    if not isinstance(ranked, bool):
        raise wrong_type(f"{LIST} must be true or false, not {shown(ranked)}: n says how many items", LIST)
    if ranked and own.get(DRAWS) is not None:
        raise RefusedError("draws", f"{DRAWS} and a ranked list exclude each other: leave {LIST} or {DRAWS} out", LIST)
    refuse_beside({**beside, "n": None}, "draws" if drawn else "ranked lists")
    return own | ({DRAWS: n} if drawn else {}), None if drawn else n


def wants_candidates(given: Any) -> bool:
    """Whether fields beside `generate` ask for a list, or for draws, of its `n`."""
    return isinstance(given, Mapping) and (bool(given.get(LIST)) or given.get(DRAWS) is True)


def refuse_beside(given: Mapping[str, Any], what: str = "draws") -> None:
    """Raises RefusedError for fields of a request for draws that would be ignored, or mean something else."""
    for name, harmless in ((BEAMS, 0), ("beam_width", 1)):
        if given.get(name) not in (None, False, harmless):
            raise RefusedError(
                "draws", f"draws and a ranked list exclude each other: leave {name} or {DRAWS} out", name
            )
    for name in ("n", "best_of"):
        if given.get(name) not in (None, 1):
            raise RefusedError("draws", f"{DRAWS} says how many items to draw: leave {name} out", name)
    for name, neutral in BENDING.items():
        if (value := given.get(name)) is not None and value not in neutral:
            raise RefusedError(
                "draws",
                f"{name} would bend the model's distribution, and {what} follow it as it is: leave {name} out; "
                "temperature, up to 1, is for draws too",
                name,
            )
    for name in UNSAID:
        if given.get(name) is not None and given[name] is not False:  # logprobs: 0 asks for those of the tokens
            raise RefusedError("draws", f"{what} have no {name}: leave it out", name)


def with_beams(body: dict[str, Any]) -> None:
    """Make a body's draws take the way of ranked lists through its endpoint, an answer a draw.

    Raises RefusedError for what is wrong with them, and as `refuse_beside` does.
    """
    refuse_beside(body)
    body["n"] = DrawOptions.of(body).n
    body[BEAMS] = True


def check_fields(flags: Mapping[str, Any], numbers: Iterable[tuple[str, Any, str]]) -> None:
    """Raises RefusedError for a flag that is no boolean, and for a number below 1. numbers: names, values, units."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise wrong_type(f"{name} must be true or false, not {shown(flag)}", name)
    for name, number, unit in numbers:
        if number is not None and (not _is_int(number) or number < 1):
            raise wrong_type(f"{name} must be a number of {unit}, at least 1, not {shown(number)}", name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
