"""Bad requests are refused one by one with a reason, and bad configurations before a process is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from asking import answer, inline, named, prompts
from request_fields import fields_of

import itemset
from itemset.serving.request_fields import BEAMS, DRAWN, OPTIONS, nearest


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"item_set": "films"}, "no item set is called 'films': it has fixed, labels, large, one"),
        ({"item_set": "inline:0123"}, "no item set is called"),
        ({"item_set": "raged"}, "did you mean 'ragged'"),
        ({"item_set": 7}, "item_set must be the name of an item set, a string, not 7"),
        (named("ragged") | {"choice": ["a"]}, "item_set, choice and other constraints .* exclude each other"),
        (named("ragged", regex="a"), "item_set, choice and regex .* exclude each other"),
        (named("ragged", min_new_tokens=2), "min_new_tokens=2 forbids the shortest item of the item set 'ragged'"),
        (named("one", stop_token_ids=[302]), "the stop token 302 occurs inside an item"),
        (
            named("one", beam_width=2, max_new_tokens=4),
            "less than the longest item has with its end token: set it to",
        ),
        (named("one", beam_width=2, exact=1), "exact must be true or false, not 1"),
        (named("one", beam_width=2, max_passes=0), "max_passes must be a number of forward passes, at least 1, not 0"),
        (named("ragged", beam_width=2, max_passes=1), "no item was found before the limit"),
        (named("ragged", beam_width=2, renormalized=True), "'renormalized': did you mean renormalised?"),
        (named("ragged", exact=True), "exact is for ranked lists: add use_beam_search and n"),
        (named("ragged", beam_width="4"), "width must be a number of beams, at least 1, not '4'"),
        ({"custom_params": {"item_sets": "one"}}, "sampling_params has no 'item_sets': name the set as item_set"),
        (inline([]), "at least one text"),
        (inline(["red", ""]), r"choice\[1\] \(''\) is empty"),
        (inline(["red", "\ud800"]), r"choice\[1\] .* surrogate"),
        (inline([str(i) for i in range(1_001)]), "choice has 1,001 items, the limit of an inline set is 1,000"),
        (inline(["a</s>b"]), r"choice\[0\] \('a</s>b'\) holds the end-of-sequence token"),
        (inline(["red", "ab" * 2_000]), r"choice\[1\] \('abab.* has 4,000 characters. An item .* may have 2,286"),
        (inline(["a b c"] * 201), r"more than 1,000 characters, .* \(passed at choice\[200\]\): .*inline_text_limit"),
        (inline(["a b " * 200]), r"choice\[0\] .* has \d+ tokens, longer than context_length=256"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(static, path, named_sets, params, message):
    engine = static(path, inline_item_limit=1_000, inline_text_limit=1_000)
    with pytest.raises(ValueError, match=message):
        engine.generate(input_ids=[7, 8], sampling_params=params)
    output = engine.generate(input_ids=[7, 8], sampling_params=named("ragged"))
    assert answer(output) in named_sets["ragged"].items


def test_a_prompt_that_leaves_no_room(engine, named_sets):
    with pytest.raises(ValueError, match="context_length=256 leaves 6 after a prompt of 248: shorten"):
        engine.generate(input_ids=[7] * 248, sampling_params=named("ragged", max_new_tokens=5))
    output = engine.generate(input_ids=[7] * 248, sampling_params=named("labels", max_new_tokens=5))
    assert answer(output) in named_sets["labels"].items


def test_a_custom_logit_processor_is_refused(engine):
    with pytest.raises(ValueError, match="custom_logit_processor is not supported with an item set"):
        engine.generate(input_ids=[7], sampling_params=named("one"), custom_logit_processor="{}")


def test_a_set_too_long_for_the_memory(engines, tiny_model, tmp_path, path):
    itemset.build([list(range(100, 200)), [300]]).save(tmp_path / "long.itemset")
    engine = engines(
        tiny_model,
        grammar_backend="static",
        item_sets={"long": str(tmp_path / "long.itemset")},
        item_set_path=path,
        max_total_tokens=64,
    )
    with pytest.raises(ValueError, match="an item of 100 tokens, but the KV cache leaves room for 60: shorten"):
        engine.generate(input_ids=[7, 8], sampling_params=named("long"))
    assert engine.generate(input_ids=[7, 8], sampling_params={"max_new_tokens": 2})["output_ids"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([[5, 2112]], "token id 2112, the model's vocabulary ends at 2111"),
        ([[5, 1, 6]], "an item with the model's end-of-sequence token 1 in it"),
        ([list(range(3, 260))], "longer than context_length=256"),
    ],
)
def test_a_set_that_does_not_fit_the_model(tmp_path, tiny_model, items, message):
    file = tmp_path / "a.itemset"
    itemset.build(items).save(file)
    refused(tiny_model, message, item_sets={"films": str(file)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "the item set 'films' cannot be opened: .* no such file: build it with"),
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "is truncated"),
        (lambda file: file.write_bytes(b"PK" + file.read_bytes()[2:]), "is not an item-set index"),
    ],
)
def test_a_bad_file_ends_the_start_up(tmp_path, tiny_model, damage, message):
    file = tmp_path / "films.itemset"
    itemset.build([[5, 6], [7, 8]]).save(file)
    damage(file)
    refused(tiny_model, message, item_sets={"films": str(file)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"item_sets": {"a:b": "x"}}, "holds a colon"),
        ({"item_set_path": "gpu"}, "item_set_path must be one of auto, device, host"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num above 1 takes requests in processes"),
        ({"grammar_backend": "xgrammar", "item_sets": {}}, "item_sets need the static backend: add grammar_backend"),
        (
            {"item_set_path": "device", "enable_pdmux": True},
            "item_set_path is device, but with --enable-pdmux two batches sample",
        ),
    ],
)
def test_a_bad_configuration_ends_the_start_up(tiny_model, arguments, message):
    refused(tiny_model, message, **arguments)


def refused(model: Path, message: str, **arguments: object) -> None:
    from sglang_engines import Engine

    with pytest.raises(ValueError, match=message):
        Engine(model, **({"grammar_backend": "static"} | arguments)).close()


def test_the_server_goes_on_after_many_bad_requests(engine, named_sets):
    for i in range(30):
        with pytest.raises(ValueError, match="no item set is called"):
            engine.generate(input_ids=[7], sampling_params=named(f"none {i}"))
    outputs = engine.generate(input_ids=prompts(len(named_sets)), sampling_params=[named(name) for name in named_sets])
    assert all(answer(o) in named_sets[name].items for name, o in zip(named_sets, outputs, strict=True))


def test_no_field_of_sglangs_own_is_taken_for_a_misspelled_word():
    from sglang_static.http import SURFACE

    fields = fields_of("sglang.srt.entrypoints") | fields_of("sglang.srt.managers")
    assert {"custom_params", "sampling_params", "temperature", "messages", "items"} <= fields
    for path in (*SURFACE.served, "/v1/score"):
        SURFACE.check(path, dict.fromkeys(fields, 1), {}, ours=True)
        SURFACE.check(path, {"sampling_params": dict.fromkeys(fields, 1)}, {}, ours=True)
    for field in fields:
        assert nearest(field, (*OPTIONS, BEAMS, *DRAWN)) is None, field
