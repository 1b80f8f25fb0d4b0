"""Bad requests are refused one by one with a reason, and bad configurations before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine
from request_fields import fields_of
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

import itemset
from itemset.serving.request_fields import BEAMS, DRAWN, OPTIONS, nearest

NAMED = {"extra_args": {"item_set": "ragged"}}


def choice(*texts: str) -> dict:
    return {"structured_outputs": StructuredOutputsParams(choice=list(texts))}


@pytest.fixture
def engine(engines, tiny_model, static):
    config = static["additional_config"] | {"inline_item_limit": 1_000, "inline_text_limit": 1_000}
    return engines("v1", tiny_model, **(static | {"additional_config": config}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"extra_args": {"item_set": "films"}}, "no item set is called 'films': it has fixed, labels, large, one"),
        ({"extra_args": {"item_set": "inline:0123"}}, "no item set is called"),
        ({"extra_args": {"item_set": "raged"}}, "did you mean 'ragged'"),
        ({"extra_args": {"item_sets": "films"}}, "extra_args has no 'item_sets': name the set as item_set"),
        ({"extra_args": {"item_set": 7}}, "item_set must be the name of an item set, a string, not 7"),
        (NAMED | choice("a"), "item_set and structured_outputs .* exclude each other"),
        (NAMED | {"min_tokens": 2}, "min_tokens=2 forbids the shortest item of the item set 'ragged', which has 1"),
        (NAMED | {"allowed_token_ids": [5]}, "allowed_token_ids is not supported with an item set"),
        (NAMED | {"bad_words": ["x"]}, "bad_words is not supported with an item set"),
        (NAMED | {"repetition_penalty": 1e-308}, "with a repetition_penalty of 1e-308 tokens have no scores"),
        (NAMED | {"repetition_penalty": 1e308}, "with a repetition_penalty of 1e.308 tokens have no scores"),
        ({"extra_args": {"item_set": "one"}, "stop_token_ids": [302]}, "the stop token 302 occurs inside an item"),
        (choice(), "at least one text"),
        (choice("red", ""), r"choice\[1\] \(''\) is empty"),
        (choice("red", "\ud800"), r"choice\[1\] .* surrogate"),
        (choice(*map(str, range(1_001))), "choice has 1,001 items, the limit of an inline set is 1,000"),
        (choice("a</s>b"), r"choice\[0\] \('a</s>b'\) holds the end-of-sequence token"),
        (choice("red", "ab" * 2_000), r"choice\[1\] \('abab.* has 4,000 characters. An item .* may have 2,304"),
        (choice(*["a b c"] * 201), r"more than 1,000 characters, .* \(passed at choice\[200\]\): .*inline_text_limit"),
        (choice("a b " * 200), r"choice\[0\] .* has \d+ tokens, longer than max_model_len=256"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(engine, named_sets, params, message):
    with pytest.raises(VLLMValidationError, match=message):
        engine.generate(["p"], SamplingParams(**params))
    (output,) = engine.generate(["p"], SamplingParams(max_tokens=20, **NAMED))
    assert tuple(output.outputs[0].token_ids[:-1]) in named_sets["ragged"].items


def test_the_rest_of_the_batch_is_not_hurt_by_a_prompt_that_leaves_no_room(engine, named_sets):
    prompt = {"prompt_token_ids": [7] * 250}
    with pytest.raises(VLLMValidationError, match="max_model_len=256 leaves 6 after a prompt of 250: shorten"):
        engine.generate([prompt], SamplingParams(max_tokens=5, **NAMED))
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=6, extra_args={"item_set": "labels"}))
    assert tuple(output.outputs[0].token_ids[:-1]) in named_sets["labels"].items


def test_a_set_of_token_ids_outside_the_vocabulary(tmp_path, tiny_model):
    path = tmp_path / "a.itemset"
    itemset.build([[5, 2112]]).save(path)
    refused(tiny_model, {"films": str(path)}, "token id 2112, the model's vocabulary ends at 2111")


def test_a_set_with_the_end_of_sequence_token_inside(tmp_path, tiny_model):
    path = tmp_path / "a.itemset"
    itemset.build([[5, 1, 6]]).save(path)
    refused(tiny_model, {"films": str(path)}, "an item with the model's end-of-sequence token 1 in it")


def refused(model: Path, item_sets: object, message: str) -> None:
    """The engine does not start, and says so with `message`."""
    with pytest.raises(ValueError, match=message):
        Engine(
            "v1",
            model,
            structured_outputs_config={"backend": "static"},
            additional_config={"item_sets": item_sets},
        ).close()


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
def test_a_bad_file_ends_the_start_up(tmp_path, tiny_model, damage, message):
    path = tmp_path / "films.itemset"
    itemset.build([[5, 6], [7, 8]], keys=["x" * 100, "y" * 100]).save(path)
    damage(path)
    refused(tiny_model, {"films": str(path)}, message)


def flip(path: Path, position: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] = value
    path.write_bytes(data)


def test_another_tokenizer_ends_the_start_up_and_both_are_named(tmp_path, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<another>"])
    path = tmp_path / "films.itemset"
    itemset.build_text(["a film"], tokenizer).save(path)
    refused(
        tiny_model, {"films": str(path)}, rf"was built with the tokenizer .*{tiny_model.name} \(\w+\), the model uses"
    )


def test_drafts_that_cannot_be_made_end_the_start_up(engines, tiny_model):
    config = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with pytest.raises(ValueError, match=r"ngram_gpu needs model runner V2 or a GPU, .*: choose ngram"):
        engines("v1", tiny_model, structured_outputs_config={"backend": "static"}, speculative_config=config)


def test_a_misspelled_option_ends_the_start_up(engines, tiny_model):
    with pytest.raises(ValueError, match="there is no option 'item_set_paht': the plugin's options are item_sets"):
        engines(
            "v1",
            tiny_model,
            structured_outputs_config={"backend": "static"},
            additional_config={"item_set_paht": "host"},
        )


@pytest.mark.parametrize(
    ("item_sets", "message"),
    [
        (["films=a", "films=b"], "the item set 'films' is given twice"),
        (["films"], r"item_sets must be \{"),
        ("films=a", r"item_sets must be \{"),
        ({"films": 3}, r"item_sets must be \{"),
        ({"a:b": "x"}, "holds a colon"),
    ],
)
def test_a_bad_configuration_ends_the_start_up(tiny_model, item_sets, message):
    refused(tiny_model, item_sets, message)


def test_no_field_of_vllms_own_is_taken_for_a_misspelled_word():
    from vllm_static.http import SURFACE

    fields = fields_of("vllm.entrypoints")
    assert {"structured_outputs", "vllm_xargs", "temperature", "messages"} <= fields
    for path in (*SURFACE.served, "/v1/messages"):
        SURFACE.check(path, dict.fromkeys(fields, 1), {}, ours=True)
        SURFACE.check(path, {"vllm_xargs": dict.fromkeys(fields, 1)}, {}, ours=True)
    for field in fields - {BEAMS}:
        assert nearest(field, (*OPTIONS, BEAMS, *DRAWN)) is None, field
