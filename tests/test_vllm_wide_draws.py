"""Draws made inside a step of model runner V2: the model's own distribution, in the passes of a list as wide."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
from draw_requests import CHOSEN, LABELS, check_fit
from ranking import oracle_of
from test_vllm_wide_lists import ROOMY, fixed_shapes, given, prompt_of

from itemset.serving.metrics import ONE_REQUEST, UNDECIDED
from vllm_static.front.list_requests import DrawParams, RankingParams

ROUNDS: dict[str, Any] = {"max_passes": 10_000}  # such draws take rounds of requests alone

Item = tuple[int, ...]


@pytest.fixture
def engine(engines, tiny_model, static):
    return engines("v2", tiny_model, **given(static, ranked_list_beams=160), **ROOMY)


def counted() -> Counter[str]:
    from itemset.serving.metrics import DRAWS

    (metric,) = DRAWS.collect()
    return Counter({one.labels["way"]: one.value for one in metric.samples if one.name.endswith("_total")})


def drawn_from(llm: Any, options: dict[str, Any], lengths: list[int]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """In the engine's process: draws of some prompts, and how they were made."""
    before = counted()
    prompts = [prompt_of(length) for length in lengths]
    params = DrawParams(max_tokens=20, extra_args=options)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    found = [
        {
            "items": [(tuple(one.tokens[length:-1]), one.cum_logprob) for one in output.sequences],
            "exact": {one.exact for one in output.sequences},
            "passes": output.passes,
            "rounds": output.rounds,
        }
        for output, length in zip(outputs, lengths, strict=True)
    ]
    return found, dict(counted() - before)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [tokens for tokens, _ in found["items"]] == [tokens for tokens, _ in expected["items"]]
    scores = [[score for _, score in one["items"]] for one in (found, expected)]
    np.testing.assert_allclose(*scores, atol=1e-4)
    assert found["exact"] == expected["exact"] == {True}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_models_distribution(engine, tiny_model, temperature):
    """As many at a time as have room."""
    ways: Counter[str] = Counter()

    def draw(*, draws: int, seed: int, **options: Any) -> list[tuple[Item, float]]:
        items = []
        for part in range(0, draws, 10):
            asked = options | {"draws": min(10, draws - part), "seed": 1_000 * seed + part}
            ((found,), how) = engine.call(drawn_from, asked, [12])
            ways.update(how)
            items += found["items"]
        return items

    check_fit(draw, oracle_of(tiny_model, prompt_of(12)), temperature, {})
    assert set(ways) == {ONE_REQUEST}
    assert len(LABELS) == len(CHOSEN["only_keys"])


SETS = [
    ("prefixes", {"draws": 9}, [3, 32, 33, 70]),
    ("one", {"draws": 3}, [31]),
    ("labels", {"draws": 10, "temperature": 0.3}, [3, 33]),
    ("seen", {"draws": 8, "width": 20}, [3, 32, 33, 70]),
    ("seen", {"draws": 5, "replace": False}, [3, 33]),
    ("prefixes", {"draws": 40, "replace": False}, [32]),
    ("fixed", {"draws": 2}, [33]),
    ("ragged", {"draws": 2, "replace": False, "width": 9}, [20]),
]


@pytest.mark.parametrize(("name", "options", "lengths"), SETS)
def test_the_draws_of_rounds(engine, name, options, lengths):
    """With the same seed, for prompts that end inside a block of 32, with one, and a token later: what a step decides,
    and what rounds end after it."""
    asked = {"item_set": name, "seed": 5, **options}
    made, ways = engine.call(drawn_from, asked, lengths)
    expected, by_rounds = engine.call(drawn_from, asked | ROUNDS, lengths)
    for found, other in zip(made, expected, strict=True):
        same(found, other)
    assert set(ways) <= {ONE_REQUEST, UNDECIDED}
    assert by_rounds == {"max_passes": len(lengths)}


def test_some_draws_are_ended_by_rounds(engine):
    """A set that is unlikely as a whole: many prefixes are likelier than all of it. Passes count what a step took."""
    (few, ways) = engine.call(drawn_from, {"item_set": "ragged", "draws": 1, "seed": 1}, [40])
    (rounds, _) = engine.call(drawn_from, {"item_set": "ragged", "draws": 1, "seed": 1, **ROUNDS}, [40])
    assert ways == {UNDECIDED: 1}
    same(few[0], rounds[0])
    assert few[0]["passes"] > rounds[0]["passes"]


def as_accelerators(llm: Any, *arguments: Any) -> Any:
    """With fixed shapes."""
    with fixed_shapes(llm):
        return drawn_from(llm, *arguments)


def passes_of(llm: Any, options: dict[str, Any], k: int | None) -> list[int]:
    """The tokens of each pass of a request inside its step, with fixed shapes: a list of k items, or draws."""
    from vllm_static.worker import beam_forward

    own, sizes = beam_forward._run, list[int]()

    def run(runner: Any, tokens: Any, *args: Any) -> Any:
        sizes.append(tokens.numel())
        return own(runner, tokens, *args)

    params = DrawParams if k is None else RankingParams
    asked = params(beam_width=k or 1, max_tokens=20, extra_args=options)
    with mock.patch.object(beam_forward, "_run", run), fixed_shapes(llm):
        llm.beam_search([{"prompt_token_ids": prompt_of(20)}], asked)
    return sizes


@pytest.mark.parametrize("name", ["seen", "prefixes"])
def test_a_draw_takes_no_fewer_tokens_than_a_list_as_wide(engine, name):
    options = {"item_set": name, "width": 8}
    draw = engine.call(passes_of, options | {"draws": 1, "seed": 2}, None)
    one_list = engine.call(passes_of, options, 1)
    assert sum(one_list) <= sum(draw)  # it has one of a row a pass, and so none that fills up shorter tails
    assert len(one_list) >= 3


def test_what_takes_rounds_says_why(engine):
    asked = {"item_set": "labels", "only_keys": [1, 2, 3], "seed": 1}
    _, ways = engine.call(drawn_from, asked | {"draws": 41}, [9])
    assert ways == {"more draws than ranked_list_beams has room for": 1}
    _, ways = engine.call(drawn_from, asked | {"draws": 40}, [9])
    assert set(ways) == {ONE_REQUEST}
    found, _ = engine.call(as_accelerators, asked | {"draws": 2, "replace": False}, [9])
    assert len({item for item, _ in found[0]["items"]}) == 2
