"""What a request says of item sets is judged once, with one sentence for each fault, in both engines."""

from __future__ import annotations

from typing import Any

import pytest

from itemset.serving.catalogue import RefusedError
from itemset.serving.front.request import ItemRequest, refuse_beside
from itemset.serving.front.request_fields import COMPARED, DrawOptions, ListOptions
from itemset.serving.front.sampler_limits import refuse_unsampled

CONSTRAINTS = ("item_set", "choice", "regex")


def asked(
    named: Any = None, choice: Any = None, k: int | None = None, drawing: bool = False, **given: Any
) -> ItemRequest | None:
    of = {"where": "extra_args", "constraints": CONSTRAINTS}
    return ItemRequest.of([None, named], [choice], given, k=k, draws=drawing, **of)


def test_what_a_request_asks_for():
    assert asked() is None
    assert asked(item_set=None, renormalized=True) is None  # no set, and so no word of ours
    assert asked("films", temperature=1, item_set="films") == ItemRequest("films")
    assert asked(choice=["a"], exact=None) == ItemRequest(choice=["a"])
    best = ListOptions(10, width=64, exact=True, renormalised=False, max_passes=9, without_end=False)
    assert asked("films", k=10, width=64, exact=True, max_passes=9, use_beam_search=True).several == best
    assert asked("films", k=10).several == ListOptions(10)
    assert asked("films", k=3, at_most={"a": 1}).several == ListOptions(3, at_most={"a": 1})
    assert asked("films", k=3, explore=2).several == ListOptions(3, explore=2)
    assert asked("films", exclude_prompt=True) == ItemRequest("films", selection={"exclude_prompt": True})
    assert asked("films", exclude_prompt=False) == ItemRequest("films")
    assert asked("films", return_set_weight=True) == ItemRequest("films", weighed="return_set_weight")
    assert asked("films", return_set_weight=False) == ItemRequest("films")


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ({"named": 7}, "item_set must be the name of an item set, a string, not 7", "item_set"),
        ({"named": {"a": 1}}, "a string, not an object", "item_set"),
        ({"named": "a", "choice": ["b"]}, "item_set, choice and regex .or response_format. exclude each", "item_set"),
        ({"choice": ["b"], "exclude_keys": [0]}, "of a registered set: .* or shorten the list itself", "exclude_keys"),
        ({"item_sets": "a"}, "extra_args has no 'item_sets': name the set as item_set", "item_set"),
        ({"named": "a", "item_set_wire": b""}, "item_set_wire is not for requests: name the set", "item_set_wire"),
        ({"item_set_wire": [1]}, "item_set_wire is not for requests", "item_set_wire"),
        ({"named": "a", "exact": True}, "exact is for ranked lists: add use_beam_search and n", "exact"),
        ({"choice": ["a"], "width": 9}, "width is for ranked lists", "width"),
        ({"choice": ["a"], "widht": 9}, "there is no field 'widht': did you mean width?", "widht"),
        ({"named": "a", "k": 2, "renormalized": True}, "did you mean renormalised?", "renormalized"),
        ({"named": "a", "use_beam_serach": True}, "did you mean use_beam_search?", "use_beam_serach"),
        ({"named": "a", "k": 2, "width": 1}, "width=1 finds no 2 items: set it to at least 2", "width"),
        ({"named": "a", "k": 2, "width": True}, "width must be a number of beams, at least 1, or a list of", "width"),
        ({"named": "a", "k": "2"}, "n must be a number of items, at least 1, not '2'", "n"),
        ({"named": "a", "k": 2, "max_passes": 0}, "max_passes must be a number of forward passes", "max_passes"),
        ({"named": "a", "return_set_weight": 1}, "return_set_weight must be true or false, not 1", "return_set_weight"),
        ({"return_set_weight": True}, "return_set_weight is of one sampled answer with item_set", "return_set_weight"),
        ({"named": "a", "k": 2, "return_set_weight": True}, "not of slates, lists, draws", "return_set_weight"),
        ({"slate": {}, "return_set_weight": True}, "not of slates, lists, draws", "return_set_weight"),
        ({"named": "a", "return_set_weigth": True}, "did you mean return_set_weight?", "return_set_weigth"),
        ({"named": "a", "k": 2, "exact": "yes"}, "exact must be true or false, not 'yes'", "exact"),
        ({"named": "a", "k": 2, "renormalised": 1}, "renormalised must be true or false, not 1", "renormalised"),
        (
            {"named": "a", "k": 2, "explore": 2},
            "explore=2 of n=2 leaves no best item: lower it, or ask for draws",
            "explore",
        ),
        (
            {"named": "a", "k": 2, "explore": 0},
            "explore must be how many of the n items are draws, at least",
            "explore",
        ),
        ({"named": "a", "k": 2, "explore": True}, "explore must be how many of the n items are draws", "explore"),
        ({"named": "a", "k": 2, "explore": 1, "at_most": {"a": 1}}, "leave at_most or explore out", "at_most"),
        ({"named": "a", "k": 2, "explore": 1, "without_end": True}, "leave without_end or explore out", "without_end"),
        ({"named": "a", "explore": 1}, "explore is for ranked lists: add use_beam_search and n", "explore"),
        ({"named": "a", "k": 2, "explor": 1}, "did you mean explore?", "explor"),
        ({"named": "a", "k": 2, "at_most": {"a": 1.5}}, "at_most must be an object of at most 8 attributes", "at_most"),
        ({"named": "a", "k": 2, "at_most": {1: 2}}, "at_most must be an object", "at_most"),
        ({"named": "a", "k": 2, "at_most": {f"{i}": 2 for i in range(9)}}, "at_most must be an object", "at_most"),
        ({"named": "a", "at_most": {"a": 2}}, "at_most is for ranked lists: add use_beam_search and n", "at_most"),
        ({"named": "a", "k": 2, "atmost": {"a": 2}}, "did you mean at_most?", "atmost"),
        ({"named": "a", "k": 2, "at_must": {"a": 2}}, "did you mean at_most?", "at_must"),
        ({"named": "a", "exclude_prompts": True}, "did you mean exclude_prompt?", "exclude_prompts"),
        ({"named": "a", "exclude_prompt": 1}, "exclude_prompt must be true or false, not 1", "exclude_prompt"),
        ({"choice": ["b"], "exclude_prompt": True}, "of a registered set", "exclude_prompt"),
        ({"slate": {}, "exclude_prompt": True}, "would be ignored beside a slate: omit it", "exclude_prompt"),
        ({"named": "a", "k": 2, "without_end": "no"}, "without_end must be true or false, not 'no'", "without_end"),
    ],
)
def test_a_fault_is_named_with_its_field(given, message, param):
    with pytest.raises(RefusedError, match=message) as refused:
        asked(**given)
    assert refused.value.param == param


def test_what_a_request_asks_of_draws():
    assert asked("films", drawing=True, k=3, draws=3).several == DrawOptions(3)
    wanted = DrawOptions(2, replace=False, seed=7, temperature=0.5, width=9, max_passes=80, approximate=True)
    given = {"seed": 7, "temperature": 0.5, "width": 9, "max_passes": 80, "approximate": True, "replace": False}
    assert asked("films", drawing=True, draws=2, exact=None, renormalised=False, **given).several == wanted
    for bad, message, param in (
        ({"draws": 2}, "draws would be ignored here", "draws"),
        ({"replace": False}, "replace is for draws: add draws", "replace"),
        (
            {"drawing": True, "draws": 2, "renormalised": True},
            "renormalised is for ranked lists: draws",
            "renormalised",
        ),
        ({"drawing": True, "draws": 2, "at_most": {"a": 1}}, "at_most is for ranked lists: draws are exact", "at_most"),
        ({"drawing": True, "draws": True}, "draws must be a number of draws, at least 1, not True", "draws"),
        ({"drawing": True, "draws": 2, "temperature": "1"}, "temperature must be 1e-06 to 100", "temperature"),
        ({"drawing": True, "draws": 2, "seed": 1.5}, "seed must be an integer", "seed"),
        ({"drawing": True, "draws": 2, "replaced": True}, "did you mean replace?", "replaced"),
    ):
        with pytest.raises(RefusedError, match=message) as refused:
            asked("films", **bad)
        assert refused.value.param == param
    with pytest.raises(RefusedError, match="name the set as item_set"):
        asked(drawing=True, draws=2)
    with pytest.raises(RefusedError, match="leave repetition_penalty out"):
        refuse_beside({"repetition_penalty": 1.1})
    refuse_beside({"top_p": 1.0, "top_k": -1, "n": 1, "stream": False, "logit_bias": {}, "temperature": 0.5})


def test_two_names_and_two_constraints():
    with pytest.raises(RefusedError, match="name different item sets, which exclude each other"):
        ItemRequest.of(["a", "b"], [], {}, where="extra_args", constraints=CONSTRAINTS)
    assert ItemRequest.of(["a", "a"], [], {}, where="extra_args", constraints=CONSTRAINTS) == ItemRequest("a")
    for named, choices, other in (([], [["a"], ["b"]], False), (["a"], [], True), ([], [["a"]], True)):
        with pytest.raises(RefusedError, match="exclude each other: give one"):
            ItemRequest.of(named, choices, {}, where="extra_args", constraints=CONSTRAINTS, other=other)


def test_of_a_body_of_many_fields_the_words_themselves_count():
    many = {f"field{i}": 1 for i in range(COMPARED)}
    assert asked("films", **many, widht=1) == ItemRequest("films")
    with pytest.raises(RefusedError, match="width is for ranked lists"):
        asked("films", **many, width=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 1e300}, "temperature cannot be 1e[+]300 beside an item set, .* a number of 1e-37 to 1e[+]10"),
        ({"temperature": float("nan")}, "temperature cannot be nan"),
        ({"min_p": "0.1"}, "min_p cannot be '0.1'"),
        ({"presence_penalty": -1e39}, "presence_penalty cannot be -1e[+]39"),
        ({"repetition_penalty": 1e-9}, "repetition_penalty cannot be 1e-09"),
        ({"logit_bias": {"7": None}}, "logit_bias cannot be None"),
        ({"logit_bias": [7]}, "logit_bias cannot be a list .*: give an object"),
        ({"top_k": 5.0}, r"top_k cannot be 5.0 .*: give an integer below 2\^31"),
        ({"min_new_tokens": 1 << 31}, "min_new_tokens cannot be 2147483648"),
        ({"sampling_seed": -(1 << 64)}, r"sampling_seed cannot be -18446744073709551616 .* 2\^63"),
        ({"stop_token_ids": [3, 100]}, "stop_token_ids cannot be 100 .*: give token ids of 0 to 99"),
        ({"stop_token_ids": 3}, "stop_token_ids cannot be 3 .*: give a list"),
    ],
)
def test_a_sampling_parameter_that_no_sampler_can_hold(given, message):
    with pytest.raises(RefusedError, match=message) as refused:
        refuse_unsampled(given, 100)
    assert [refused.value.param] == list(given)


def test_sampling_parameters_that_samplers_hold():
    refuse_unsampled({"temperature": 0, "top_p": 1, "min_p": None, "top_k": -1, "stop_token_ids": [None, 99]}, 100)
    refuse_unsampled({"temperature": 2.0, "logit_bias": {"5": -100, 6: 0}, "seed": -1, "presence_penalty": -2}, 100)


@pytest.mark.parametrize(
    ("given", "items", "most", "beams", "steered"),
    [
        ({}, 10_000, 1_000, 64, 128),
        ({}, 40, 1_000, 40, 40),
        ({}, 5, 1_000, 10, 10),
        ({}, 10_000, 32, 32, 32),
        ({"n": 100}, 10_000, 1_000, 100, 128),
        ({"width": 12}, 10_000, 1_000, 12, 12),
        ({"exact": True}, 10_000, 1_000, 10, 10),
        ({"max_passes": 40}, 10_000, 1_000, 10, 10),
    ],
)
def test_a_list_has_64_beams_and_with_boosts_128_unless_it_says_otherwise(given, items, most, beams, steered):
    options = ListOptions(**({"n": 10} | given))
    assert options.with_beams(items, most, False).beam == beams
    assert options.with_beams(items, most, True).beam == steered


@pytest.mark.parametrize(
    ("n", "width", "items", "most", "listed"),
    [
        (10, None, 10_000, 1_000, (64, 64)),
        (30, None, 10_000, 1_000, (120, 120)),
        (10, None, 20, 1_000, (20, 20)),
        (10, None, 10_000, 32, (32, 32)),
        (10, 16, 10_000, 1_000, (64, 64)),
        (10, 300, 10_000, 1_000, (64, 300)),
        (10, [8, 16], 10_000, 1_000, (64, (8, 64))),
        (900, None, 10_000, 1_000, (1_000, 1_000)),
    ],
)
def test_of_a_list_of_engine_an_engine_makes_a_longer_one(n, width, items, most, listed):
    plain = ListOptions(n, width=width).with_beams(items, most, False)
    options = ListOptions(n, width=width, at_most={"a": 1}).with_beams(items, most, False).of_engine(items, most)
    assert (options.n, options.beam) == listed
    assert plain.of_engine(items, most) == plain
