"""Bad requests and bad starts that either engine refuses alike. Test modules import these, and have the fixtures
`engine`, with limits of 1,000 for inline sets, and `refused`: `refused(item_sets, message)` is a start that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_words import asked
from request_fields import fields_of

import itemset
from itemset.serving.front.request_fields import BEAMS, DRAWN, OPTIONS, elsewhere, nearest

RAGGED = asked("ragged")


def choice(*texts: str) -> dict[str, Any]:
    return {"choice": list(texts)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"item_set": "films"}, "no item set is called 'films': it has fixed, labels, large, one"),
        ({"item_set": "inline:0123"}, "no item set is called"),
        ({"item_set": "raged"}, "did you mean 'ragged'"),
        ({"item_set": 7}, "item_set must be the name of an item set, a string, not 7"),
        (RAGGED | choice("a"), "item_set(, choice)? and .* exclude each other"),
        (RAGGED | {"min_tokens": 2}, r"min_(new_)?tokens=2 forbids the shortest item of the item set 'ragged'"),
        (asked("one", stop_token_ids=[302]), "the stop token 302 occurs inside an item"),
        (choice(), "at least one text"),
        (choice("red", ""), r"choice\[1\] \(''\) is empty"),
        (choice("red", "\ud800"), r"choice\[1\] .* surrogate"),
        (choice(*map(str, range(1_001))), "choice has 1,001 items, the limit of an inline set is 1,000"),
        (choice("a</s>b"), r"choice\[0\] \('a</s>b'\) holds the end-of-sequence token"),
        (choice("red", "ab" * 2_000), r"choice\[1\] \('abab.* has 4,000 characters. An item .* may have 2,(304|286)"),
        (choice(*["a b c"] * 201), r"more than 1,000 characters, .* \(passed at choice\[200\]\): .*inline_text_limit"),
        (choice("a b " * 200), r"choice\[0\] .* has \d+ tokens, longer than (max_model_len|context_length)=256"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(engine, named_sets, words, message):
    with pytest.raises(engine.refusal, match=message):
        engine.ask([[7, 8]], words)
    (answer,) = engine.ask([[7, 8]], RAGGED)
    assert answer.item in named_sets["ragged"].items


def test_a_prompt_that_leaves_no_room(engine, named_sets, length_of_six):
    """length_of_six: of a prompt that leaves room for six tokens."""
    with pytest.raises(engine.refusal, match=f"=256 leaves 6 after a prompt of {length_of_six}: shorten"):
        engine.ask([[7] * length_of_six], RAGGED | {"max_tokens": 5})
    (answer,) = engine.ask([[7] * length_of_six], asked("labels", max_tokens=5))
    assert answer.item in named_sets["labels"].items


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([[5, 2112]], "token id 2112, the model's vocabulary ends at 2111"),
        ([[5, 1, 6]], "an item with the model's end-of-sequence token 1 in it"),
        (
            [[7], list(range(3, 260))],
            r"up to 257 tokens, longer than (max_model_len|context_length)=256: .* 1 of 2 items, .* the key 1",
        ),
    ],
)
def test_a_set_that_does_not_fit_the_model(tmp_path, refused, items, message):
    itemset.build(items).save(tmp_path / "a.itemset")
    refused({"films": str(tmp_path / "a.itemset")}, message)


def flip(path: Path, position: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "the item set 'films' cannot be opened: .* no such file: build it with"),
        (lambda path: (path.unlink(), path.mkdir()), "the item set 'films' cannot be opened: .* is no published set"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "is truncated"),
        (lambda path: path.write_bytes(b"PK" + path.read_bytes()[2:]), "is not an item-set index"),
        (lambda path: flip(path, 8, 0), "older format version 0"),
        (lambda path: flip(path, 8, 9), "newer format version 9"),
        (lambda path: flip(path, -3, 255), "does not match its checksum"),
    ],
)
def test_a_bad_file_ends_the_start_up(tmp_path, refused, damage, message):
    path = tmp_path / "films.itemset"
    itemset.build([[5, 6], [7, 8]], keys=["x" * 100, "y" * 100]).save(path)
    damage(path)
    refused({"films": str(path)}, message)


def test_a_name_with_a_colon_ends_the_start_up(refused):
    refused({"a:b": "x"}, "holds a colon")


def test_no_field_of_the_engines_own_is_taken_for_a_misspelled_word(surface):
    """surface: ours, where the engine's fields are declared, some of them, and where extras stand."""
    ours, modules, some, extras = surface
    fields = set().union(*map(fields_of, modules))
    assert {*some, "temperature", "messages"} <= fields
    for path in (*ours.served, "/v1/messages", "/v1/score"):
        ours.check(path, dict.fromkeys(fields, 1), {}, ours=True)
        ours.check(path, {extras: dict.fromkeys(fields, 1)}, {}, ours=True)
    for field in fields - {BEAMS}:
        assert nearest(field, (*OPTIONS, BEAMS, *DRAWN)) is None, field
        assert elsewhere(field) is None, field


EXTREMES: list[dict[str, Any]] = [
    {name: value}
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    for value in (1e-45, 1e-30, 0.0, 2, 1e38, 1e39)
]
EXTREMES += [{"top_k": value} for value in (1, (1 << 31) - 1, 1 << 31, 1 << 70)]
EXTREMES += [{"logit_bias": {500: value}} for value in (-1e308, -3e38, -100, 1e-45, 3e38, 1e39)]
EXTREMES += [{"seed": value} for value in ((1 << 63) - 1, 1 << 63)]
EXTREMES += [{"stop_token_ids": [value]} for value in (2111, 2112, -1, 1 << 70)]


def test_a_number_that_no_sampler_can_hold_is_refused(engine, named_sets):
    """All others give items in one batch, with and without top_k, and so do their neighbours."""
    held = []
    for extreme in EXTREMES:
        try:
            engine.ask([[7, 8]], asked("labels", max_tokens=2, **extreme))
        except engine.refusal:
            continue
        held.append(extreme)
    assert len(held) > len(EXTREMES) / 3
    for extreme in ({"temperature": 1e39}, {"repetition_penalty": 1e-45}, {"top_k": 1 << 70}):
        assert extreme in EXTREMES
        assert extreme not in held
    batch = [asked("ragged") | beside | extreme for extreme in held for beside in ({}, {"top_k": 5})]
    *answers, neighbour = engine.ask([[7, 8, i] for i in range(len(batch) + 1)], [*batch, asked("labels")])
    assert neighbour.item in named_sets["labels"].items
    for words, answer in zip(batch, answers, strict=True):
        assert answer.tokens[:-1] in named_sets["ragged"].items, words
