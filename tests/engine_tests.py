"""What is generated with item sets in either engine, and how requests end. Test modules import these, and have the
fixtures `engine` and `many`: how many answers to look at."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from engine_words import CITIES, EOS, asked, prompts
from sets import NamedSet, tagged_items, tagged_keys

XY = 'root ::= "x" [0-9] "y"'
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}'
OTHERS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
    ({"grammar": XY}, lambda text: text[0] == "x" and text[1].isdigit() and text[2:] == "y"),
    ({"structural_tag": TAG}, lambda text: text == "ab"),
    ({"choice": CITIES}, lambda text: text in CITIES),
    ({}, lambda text: True),
]
"""Requests without a set, and what holds of their texts."""


def check_answers(
    engine: Any, named_sets: dict[str, NamedSet], count: int, others: Any = OTHERS, turned: bool = False
) -> None:
    """Generate so many items in one batch with all kinds of requests. turned: those without a set come first."""
    kinds: list[Any] = [*others, *named_sets] if turned else [*named_sets, *others]
    kinds = list(itertools.islice(itertools.cycle(kinds), count * len(kinds) // len(named_sets) + 1))
    words = [asked(kind) if isinstance(kind, str) else {"max_tokens": 24, **kind[0]} for kind in kinds]
    answers = engine.ask(prompts(len(kinds)), words)
    large = [answer.item for kind, answer in zip(kinds, answers, strict=True) if kind == "large"]
    assert len(set(large)) > len(large) / 2  # the model chooses, not the trie
    for kind, answer in zip(kinds, answers, strict=True):
        if isinstance(kind, str):
            assert answer.item in named_sets[kind].items
            assert (answer.tokens[-1], answer.finish) == (EOS, "stop")
        else:
            assert kind[1](answer.text), (kind, answer.text)


def test_no_answer_is_outside_its_set(engine, many, named_sets):
    check_answers(engine, named_sets, many)


SELECTIONS: list[tuple[dict[str, Any], Callable[[int], object]]] = [
    ({"item_filter": {"tag": 1}}, lambda i: i % 3 == 1),
    ({"item_filter": {"tag": {"$ne": 1}}, "exclude_keys": tagged_keys()[:300]}, lambda i: i % 3 != 1 and i >= 300),
    ({"exclude_keys": tagged_keys()[::2]}, lambda i: i % 2),
    ({"only_keys": tagged_keys()[7:27]}, lambda i: 7 <= i < 27),
    ({"item_filter": {"tag": {"$in": [0, 1]}}, "only_keys": tagged_keys()[11:14]}, lambda i: i in (12, 13)),
    ({}, lambda i: True),
    ({"item_set": "seen"}, lambda i: i % 3 == 0),
    ({"item_set": "seen", "exclude_keys": tagged_keys()[:200]}, lambda i: i % 3 == 0 and i >= 200),
]
"""What requests may choose of the set `tagged`, and which items that leaves, by their numbers in the input."""


def test_requests_choose_among_the_items(engine):
    """By filters, exclusions and candidates, and of a view; all in one batch, and again when they are known."""
    words = [asked("tagged", item_attributes=["tag"]) | words for words, _ in SELECTIONS] * 4
    for _ in range(2):
        answers = engine.ask(prompts(len(words)), words)
        for answer, (_, keeps) in zip(answers, SELECTIONS * 4, strict=True):
            assert answer.item in {tuple(item) for i, item in enumerate(tagged_items()) if keeps(i)}
            told = answer.said["item"]
            assert told["attributes"] == {"tag": tagged_keys().index(told["key"]) % 3}
        assert len({answer.item for answer in answers}) > 10


def test_an_item_may_be_a_prefix_of_another(engine, many):
    answers = engine.ask(prompts(20 + many // 8), asked("prefixes"))
    assert {len(answer.item) for answer in answers} >= {1, 2}


def test_ignore_eos_goes_on_with_stop_tokens_only(engine, named_sets):
    for answer in engine.ask(prompts(6), asked("prefixes", ignore_eos=True, max_tokens=24)):
        item = tuple(itertools.takewhile(lambda token: token != EOS, answer.tokens))
        assert item in named_sets["prefixes"].items
        assert set(answer.tokens[len(item) :]) == {EOS}
        assert (len(answer.tokens), answer.finish) == (24, "length")


def test_stop_token_ids_end_an_item_too(engine, named_sets):
    ends = set()
    for answer in engine.ask(prompts(16), asked("labels", stop_token_ids=[60, 61])):
        *item, end = answer.tokens
        assert tuple(item) in named_sets["labels"].items
        ends.add(end)
    assert ends <= {EOS, 60, 61}
    assert ends & {60, 61}


def test_max_tokens_cuts_inside_an_item(engine, named_sets):
    (cut, whole) = (engine.ask(prompts(1), asked("one", max_tokens=count))[0] for count in (3, 5))
    assert (cut.tokens, cut.finish) == ((300, 301, 302), "length")
    assert whole.tokens in named_sets["one"].items


def test_min_tokens_holds_the_stop_back(engine):
    for answer in engine.ask(prompts(4), asked("one", min_tokens=5)):
        assert answer.item == (300, 301, 302, 303, 304)


def test_n_gives_independent_items(engine, named_sets):
    answers = engine.ask(prompts(2), asked("large", n=4))
    assert {answer.item for answer in answers} <= named_sets["large"].items
    assert len(answers) == 8
    assert len({answer.item for answer in answers}) > 4


def test_stop_strings_end_inside_an_item(engine):
    (answer,) = engine.ask(["p"], {"choice": ["one two three"], "max_tokens": 40, "stop": [" two"]})
    assert answer.text == "one"


def test_an_item_shows_its_special_tokens(engine):
    for text in ("<pad>one", "<s><pad><s>", "a <pad>b<s>"):
        (answer,) = engine.ask(["p"], {"choice": [text], "max_tokens": 40})
        assert (answer.text, answer.said["item"]) == (text, {"key": 0})


WITHOUT_SETS = [{"logprobs": 2}, {"regex": "(river|letter|station)"}, {"json": {"type": "boolean"}}, {"stop": ["e"]}]


def check_untouched(engine: Any, without: Any, *more: dict[str, Any]) -> None:
    """With another backend an engine answers requests without sets as it does without the plugin."""
    words = [{"temperature": 0.0, "max_tokens": 8} | one for one in (*WITHOUT_SETS, *more)]
    found, expected = (one.ask(["Once upon a time"] * len(words), words) for one in (engine, without))
    told = [[(one.tokens, one.text, one.finish) for one in answers] for answers in (found, expected)]
    assert told[0] == told[1]
    assert len(found) >= len(words)
    assert "passed over" not in engine.log()
