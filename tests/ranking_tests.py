"""What holds of ranked lists and draws of either engine. Test modules import these, and have the fixtures `engine`,
`server`, and `longest_prompt`: how many tokens leave room for an item of five."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from draw_requests import (
    BAD,
    BY_IMPORTANCE,
    CUT_OFF,
    GOOD,
    LEFT,
    LOST,
    check_choices,
    check_cut_off,
    check_fit,
    check_importance,
    left,
)
from engine_words import CITIES, EOS, PROMPT, Found, Ranked
from ranking import oracle_of
from server_tests import check_refused, item_of, text_of
from sets import tagged_items, tagged_keys

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a film"}]},
}
LIST = {"model": "tiny", "use_beam_search": True, "n": 2, "max_tokens": 20, "item_set": "ragged"}
every_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS)


def check(found: Found, expected: Ranked) -> None:
    assert [tokens for _, tokens in found.items] == [(*item, EOS) for _, item in expected]
    np.testing.assert_allclose([score for score, _ in found.items], [score for score, _ in expected], atol=2e-3)


def lists_of(engine: Any) -> list[Found]:
    """Ranked lists by a beam, proven, and of what the request brings."""
    proven = {"item_set": "ragged", "exact": True, "max_passes": 40}  # a proof takes 185
    asked = ((7, {"item_set": "prefixes"}), (3, proven), (9, {"choice": CITIES}))
    return [engine.rank(n, [PROMPT], **words)[0] for n, words in asked]


def check_lists(lists: list[Found], expected: list[Found]) -> None:
    """Two engines of the same model and sets rank alike."""
    for found, other in zip(lists, expected, strict=True):
        check(found, [(score, tokens[:-1]) for score, tokens in other.items])
        assert len(found.items) >= 3


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return oracle_of(tiny_model)


@pytest.mark.parametrize(
    ("name", "width"), [("prefixes", 7), ("one", 3), ("labels", 150), ("ragged", 200), ("seen", 134)]
)
def test_a_beam_as_wide_as_the_set_ranks_all_of_it(engine, oracle, named_sets, name, width):
    """One of the sets has a node of 150 children: more than vLLM's --max-logprobs and its logprob_token_ids allow."""
    for found in engine.rank(width, item_set=name):
        check(found, oracle(sorted(named_sets[name].items)))
        assert found.proven


def test_a_list_of_what_a_filter_leaves(engine, oracle):
    """Exact, without the items of some keys; equal items stay with the keys that pass."""
    words = {"item_filter": {"tag": {"$gte": 1}}, "exclude_keys": tagged_keys()[:40]}
    keys: dict[tuple[int, ...], list[str]] = {}
    for i, item in enumerate(tagged_items()):
        if i % 3 and i >= 40:
            keys.setdefault(tuple(item), []).append(tagged_keys()[i])
    expected = oracle(sorted(keys))[:9]
    for found in engine.rank(9, item_set="tagged", exact=True, **words):
        check(found, expected)
        assert found.proven
        assert found.keys == [keys[item] for _, item in expected]


BOOSTS = [
    {"item_filter": {"tag": {"$gte": 1}}, "boost": {"tag": -2.5}},
    {"exclude_keys": tagged_keys()[:40], "boost_keys": {"item 41": 4.0, "item 200": 2, "item 50": -3, "nobody": 9}},
    {"only_keys": tagged_keys()[100:], "boost": {"tag": 2}, "boost_keys": {"item 101": -5}},
]


def test_lengths_that_count(engine, oracle):
    """Log p by the square root of its tokens, the end token's too."""
    items = sorted(set(map(tuple, tagged_items())))
    expected = sorted(oracle(items), key=lambda one: -one[0] / (len(one[1]) + 1) ** 0.5)[:9]
    for more in ({"exact": True}, {"width": 300}):
        for found in engine.rank(9, item_set="tagged", normalise_length=0.5, **more):
            check(found, expected)


@pytest.mark.parametrize("words", BOOSTS)
def test_boosts_steer_a_list(engine, oracle, words):
    """Proven, and by a beam: the best by the sum of what the model and the boosts say."""
    gone, only = words.get("exclude_keys", ()), words.get("only_keys", tagged_keys())
    adds: dict[tuple[int, ...], float] = {}
    for i, (item, key) in enumerate(zip(tagged_items(), tagged_keys(), strict=True)):
        if key in only and key not in gone and ("item_filter" not in words or i % 3):
            added = words.get("boost", {}).get("tag", 0) * (i % 3) + words.get("boost_keys", {}).get(key, 0)
            adds[tuple(item)] = max(added, adds.get(tuple(item), -math.inf))
    expected = sorted(oracle(sorted(adds)), key=lambda one: -one[0] - adds[one[1]])[:9]
    for more in ({"exact": True}, {"width": 300}):
        for found in engine.rank(9, item_set="tagged", **words, **more):
            check(found, expected)
            assert found.proven


@pytest.mark.parametrize(
    ("words", "least"),
    [
        ({}, 0),
        ({"item_filter": {"tag": {"$gte": 1}}}, 1),
        ({"width": 12}, 0),
        ({"exact": True}, 0),
        ({"exclude_keys": tagged_keys()[::3]}, 1),
    ],
)
@pytest.mark.parametrize(("most", "k"), [(1, 5), (4, 12)])
def test_a_list_of_at_most_so_many_of_one_value(engine, oracle, words, least, most, k):
    """The greedy choice from the ranking of the whole set, in which an item has the tags of all its keys."""
    tags: dict[tuple[int, ...], set[int]] = {}
    for i, item in enumerate(tagged_items()):
        if i % 3 >= least:
            tags.setdefault(tuple(item), set()).add(i % 3)
    counts, chosen = [0, 0, 0], []
    for score, item in oracle(sorted(tags)):
        if len(chosen) < k and all(counts[tag] < most for tag in tags[item]):
            chosen.append((score, item))
            for tag in tags[item]:
                counts[tag] += 1
    for found in engine.rank(k, item_set="tagged", at_most={"tag": most}, **words):
        check(found, chosen)
        assert found.proven or words == {"width": 12}


def test_a_list_that_explores(engine, oracle):
    """The best are those of a shorter list, whoever makes it; the others are drawn, each time anew."""
    ranked = oracle(sorted({tuple(item) for item in tagged_items()}))
    seen = set()
    for _ in range(3):
        (found,) = engine.rank(7, [PROMPT], item_set="tagged", explore=3, width=12)
        check(found._replace(items=found.items[:4]), ranked[:4])
        drawn = [tokens[:-1] for _, tokens in found.items[4:]]
        scores = {item: score for score, item in ranked[4:]}
        assert len({*drawn}) == 3
        np.testing.assert_allclose([score for score, _ in found.items[4:]], [scores[one] for one in drawn], atol=2e-3)
        seen |= {*drawn}
    assert len(seen) > 3


def test_no_item_that_the_prompt_holds(engine, oracle):
    """Items of token ids, by their tokens: in lists, draws and samples, those of each prompt for itself."""
    keys: dict[tuple[int, ...], list[str]] = {}
    for key, item in zip(tagged_keys(), tagged_items(), strict=True):
        keys.setdefault(tuple(item), []).append(key)
    long = [item for item in keys if len(item) > 4]
    prompts = [PROMPT, [7, *long[0], 8, *long[3], 9], [*long[5], 7]]
    held = [
        {item for item in keys if any(tuple(prompt[i : i + len(item)]) == item for i in range(len(prompt)))}
        for prompt in prompts
    ]
    assert not held[0]
    assert len(held[1]) > 4
    words = {"item_set": "tagged", "exclude_prompt": True}
    lists = engine.rank(400, prompts, **words)
    assert [{tokens[:-1] for _, tokens in found.items} for found in lists] == [keys.keys() - one for one in held]
    check(engine.rank(9, **words, exact=True)[0], oracle(sorted(keys))[:9])
    answers = engine.ask(prompts * 20, {**words, "max_tokens": 20, "temperature": 1.0})
    for answer, one in zip(answers, held * 20, strict=True):
        assert answer.item in keys.keys() - one


def test_the_proven_best_of_several_prompts(engine, oracle, named_sets):
    lists = engine.rank(4, [PROMPT, [11, 12], PROMPT], item_set="ragged", exact=True)
    check(lists[0], oracle(sorted(named_sets["ragged"].items))[:4])
    check(lists[2], [(score, tokens[:-1]) for score, tokens in lists[0].items])
    assert all(found.proven for found in lists)
    limited = engine.rank(4, item_set="ragged", exact=True, max_passes=3)[0]
    assert limited.passes <= 3
    assert not limited.proven


def test_a_list_is_refused_if_its_items_could_not_be_scored(engine, longest_prompt):
    """Not one token too early: the longest prompt that leaves room for an item of five tokens gets its list."""
    asked = {"item_set": "one", "max_tokens": 6}
    assert len(engine.rank(2, [[7] * longest_prompt], **asked)[0].items) == 1
    with pytest.raises(engine.refusal, match=f"leaves 4 after a prompt of {longest_prompt + 1}"):
        engine.rank(2, [[7] * (longest_prompt + 1)], **asked)
    with pytest.raises(engine.refusal, match=r"list of 1,001 is longer than .* 1,000: .*ranked_list_limit"):
        engine.rank(1_001, [[7]], **asked)


def test_an_inline_set(engine):
    assert sorted(engine.rank(9, choice=CITIES)[0].texts) == sorted(CITIES)  # no filler


@every_endpoint
def test_lists_over_http(server, named_sets, oracle, endpoint):
    asked = LIST | ENDPOINTS[endpoint] | {"n": 9}
    exact = {"item_set": "prefixes", "exact": True, "return_token_ids": True}
    choices = choices_of(server, endpoint, asked | exact)
    found = [item_of(choice) for choice in choices]
    assert sorted(found) == sorted(named_sets["prefixes"].items)  # all seven, none twice, no filler
    assert [choice["index"] for choice in choices] == list(range(7))
    items = [choice["item"] for choice in choices]
    assert [item["rank"] for item in items] == list(range(1, 8))
    scores = [item["score"] for item in items]
    assert scores == sorted(scores, reverse=True)
    assert len({item["key"] for item in items}) == 7
    assert all(item["proven"] and item["passes"] >= 3 and item["keys"][0] == item["key"] for item in items)
    assert sorted(item["keys"] for item in items) == [[0], [1], [2], [3], [4], [5], [6, 7]]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    if endpoint == "/v1/completions":
        expected = oracle(sorted(named_sets["prefixes"].items))
        assert found == [item for _, item in expected]
        np.testing.assert_allclose(scores, [score for score, _ in expected], atol=2e-3)
    wider = choices_of(server, endpoint, asked | {"item_set": "prefixes", "n": 2, "width": 9})
    assert [choice["item"]["score"] for choice in wider] == pytest.approx(scores[:2], abs=2e-3)
    inline = asked | {"item_set": None, "structured_outputs": {"choice": CITIES}}
    assert sorted(map(text_of, choices_of(server, endpoint, inline))) == sorted(CITIES)
    shares = choices_of(server, endpoint, inline | {"renormalised": True, "width": 9})
    assert sum(math.exp(choice["item"]["score"]) for choice in shares) == pytest.approx(1, abs=1e-3)


def choices_of(server: Any, endpoint: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, answer = server.post(endpoint, body)
    assert status == 200, answer
    return answer["choices"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"renormalized": True}, "there is no field 'renormalized': did you mean renormalised?"),
        ({"widht": 64}, "there is no field 'widht': did you mean width?"),
        ({"item_set": "raged"}, "did you mean 'ragged'"),
        ({"width": 1}, "width=1 finds no 2 items: set it to at least 2"),
        ({"width": [9, 1]}, "width=1 finds no 2 items: set it to at least 2"),
        ({"width": [9, 0]}, "width must be a number of beams, at least 1, or a list of such numbers: of each level"),
        ({"width": [1_001, 9]}, "a beam of width 1,001 is longer than this engine's limit of 1,000"),
        ({"width": 1_001}, "a beam of width 1,001 is longer than this engine's limit of 1,000"),
        ({"width": 4, "use_beam_search": False}, "width is for ranked lists: add use_beam_search and n"),
        ({"exact": True, "max_passes": 10_001}, "max_passes=10,001 is more than this engine's limit of 10,000"),
        ({"n": 1_001}, "a ranked list of 1,001 is longer than this engine's limit of 1,000: ask for fewer items"),
        ({"exact": "yes"}, "exact must be true or false, not 'yes'"),
        ({"exact": True, "max_passes": 1}, "no item was found before the limit: raise max_passes"),
        ({"at_most": {"tag": 2}}, "at_most: there is no attribute 'tag': the set has none"),
        (
            {"item_set": "tagged", "at_most": {"tag": 2, "brand": 1}},
            "at_most: there is no attribute 'brand': the set has",
        ),
        (
            {"item_set": "tagged", "at_most": {"tag": 0}},
            "at_most must be an object of at most 8 attributes and numbers",
        ),
        ({"item_set": "tagged", "at_most": {"tag": True}}, "at_most must be an object of at most 8 attributes"),
        ({"item_set": "tagged", "at_most": {}}, "at_most must be an object of at most 8 attributes"),
        ({"item_set": "tagged", "at_most": ["tag"]}, "at_most must be an object of at most 8 attributes"),
        ({"item_set": "tagged", "at_mots": {"tag": 2}}, "there is no field 'at_mots': did you mean at_most?"),
        ({"item_set": "tagged", "at_most": {"tag": 2}, "use_beam_search": False}, "at_most is for ranked lists: add"),
        ({"exact": True, "use_beam_search": False}, "exact is for ranked lists: add use_beam_search and n"),
        (
            {"item_set": "tagged", "boost": {"tga": 1}},
            "boost: there is no attribute 'tga': the set has \"tag\" (integer)",
        ),
        ({"item_set": "tagged", "boost": {"tag": "high"}}, "boost: the weight of 'tag' is 'high': give a number"),
        ({"item_set": "tagged", "boost": {"tag": 1e9}}, "boost: it changes a score by up to 2e+09, the limit is 1,000"),
        ({"item_set": "tagged", "boost_keys": ["item 4"]}, "boost_keys must be an object of keys and what each adds"),
        ({"normalise_length": 3}, "normalise_length must be a power of its tokens, 0 to 2, not 3"),
        ({"normalize_length": 0.5}, "there is no field 'normalize_length': did you mean normalise_length?"),
        ({"boost_keys": {"one": 1}}, "boost_keys: 'one' is no key: the keys of this set are integers"),
        ({"boost_keys": {"1": 1, "01": 2}}, "boost_keys: the key 1 is given twice: give it once"),
        ({"use_beam_search": False, "boost_keys": {"1": 1}}, "boost_keys steers ranked lists and exact draws: ask for"),
    ],
)
def test_a_bad_list_is_http_400(server, body, message):
    for endpoint, prompt in ENDPOINTS.items():
        check_refused(server, endpoint, {**LIST, **prompt, **body}, message)


def test_a_list_has_no_logprobs(server):
    body = LIST | {"prompt": "p", "logprobs": 1}
    check_refused(server, "/v1/completions", body, "no logprobs of single tokens")


@pytest.mark.parametrize(("temperature", "boosts"), [(1.0, {}), (0.5, {}), (2.0, {}), (0.7, {"4": 1.5, "9": -2})])
def test_draws_follow_the_models_distribution(engine, oracle, temperature, boosts):
    check_fit(engine.draw, oracle, temperature, boosts)


def test_draws_of_what_a_filter_leaves(engine):
    """Each width gives the same draws."""
    found = engine.draw(**LEFT, draws=400, replace=False, seed=3)
    assert {item for item, _ in found} == left()
    assert len(found) == len(left())
    wide = engine.draw(**LEFT, draws=5, replace=False, seed=3, width=9)
    assert [item for item, _ in wide] == [item for item, _ in found[:5]]
    with pytest.raises(engine.refusal, match=r"more than 3 passes.* raise max_passes, or add approximate"):
        engine.draw(**CUT_OFF)


@every_endpoint
def test_draws_over_http(server, endpoint):
    asked = {"model": "tiny", **ENDPOINTS[endpoint], "max_tokens": 20}
    check_choices(choices_of(server, endpoint, asked | LEFT | {"draws": 400, "replace": False, "seed": 5}), len(left()))
    inline = {"structured_outputs": {"choice": CITIES}, "draws": 9, "seed": 5, "temperature": 0.9}
    choices = choices_of(server, endpoint, asked | inline)
    check_choices(choices, 9)
    assert list(map(text_of, choices)) == [CITIES[choice["item"]["key"]] for choice in choices]
    check_importance(choices_of(server, endpoint, asked | BY_IMPORTANCE | {"item_set": "prefixes"}), 6)
    check_cut_off(choices_of(server, endpoint, asked | CUT_OFF | {"approximate": True}))


@pytest.mark.parametrize(("body", "message"), BAD + LOST)
def test_bad_draws_are_http_400(server, body, message):
    check_refused(server, "/v1/completions", {"model": "tiny", "prompt": "p", **GOOD, **body}, message)


def test_a_list_has_no_limit_of_tokens(engine):
    """The server knows how long its items are."""

    def items(**words: Any) -> list[list[Any]]:
        return [[tokens for _, tokens in found.items] for found in engine.rank(2, **words)]

    for name in ("one", "ragged", "fixed"):
        for most in (1, 3, 200):
            assert items(item_set=name, max_tokens=most) == items(item_set=name)
