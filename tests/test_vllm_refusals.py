"""Bad requests are refused one by one with a reason, and bad configurations before a model is loaded."""

from __future__ import annotations

import pytest
from engines import Engine
from refusal_tests import *  # noqa: F403 - its tests, with the engine of this module
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

import itemset

NAMED = {"extra_args": {"item_set": "ragged"}}
BACKEND = {"structured_outputs_config": {"backend": "static"}}


@pytest.fixture
def engine(engines, tiny_model, static):
    config = static["additional_config"] | {"inline_item_limit": 1_000, "inline_text_limit": 1_000}
    return engines("v1", tiny_model, **(static | {"additional_config": config}))


@pytest.fixture
def refused(tiny_model):
    def refused(item_sets: object, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Engine("v1", tiny_model, **BACKEND, additional_config={"item_sets": item_sets}).close()

    return refused


@pytest.fixture
def length_of_six():
    return 250


@pytest.fixture
def surface():
    from vllm_static.front.http import SURFACE

    return SURFACE, ["vllm.entrypoints"], {"structured_outputs", "vllm_xargs"}, "vllm_xargs"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"extra_args": {"item_sets": "films"}}, "extra_args has no 'item_sets': name the set as item_set"),
        (NAMED | {"allowed_token_ids": [5]}, "allowed_token_ids is not supported with an item set"),
        (NAMED | {"bad_words": ["x"]}, "bad_words is not supported with an item set"),
        (NAMED | {"repetition_penalty": 1e-308}, "repetition_penalty cannot be 1e-308 beside an item set"),
        (NAMED | {"repetition_penalty": 1e308}, r"repetition_penalty cannot be 1e\+308 .*: give a number of 1e-06"),
    ],
)
def test_a_bad_request_in_vllms_words(engine, params, message):
    with pytest.raises(VLLMValidationError, match=message):
        engine.generate(["p"], SamplingParams(**params))


def test_another_tokenizer_ends_the_start_up_and_both_are_named(tmp_path, tiny_model, refused):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<another>"])
    itemset.build_text(["a film"], tokenizer).save(tmp_path / "films.itemset")
    message = rf"was built with the tokenizer .*{tiny_model.name} \(\w+\), the model uses"
    refused({"films": str(tmp_path / "films.itemset")}, message)


def test_drafts_that_cannot_be_made_end_the_start_up(engines, tiny_model):
    config = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with pytest.raises(ValueError, match=r"ngram_gpu needs model runner V2 or a GPU, .*: choose ngram"):
        engines("v1", tiny_model, **BACKEND, speculative_config=config)


def test_a_misspelled_option_ends_the_start_up(engines, tiny_model):
    with pytest.raises(ValueError, match="there is no option 'item_set_paht': the plugin's options are item_sets"):
        engines("v1", tiny_model, **BACKEND, additional_config={"item_set_paht": "host"})


@pytest.mark.parametrize(
    ("item_sets", "message"),
    [
        (["films=a", "films=b"], "the item set 'films' is given twice"),
        (["films"], r"item_sets must be \{"),
        ("films=a", r"item_sets must be \{"),
        ({"films": 3}, r"item_sets must be \{"),
    ],
)
def test_a_bad_configuration_ends_the_start_up(refused, item_sets, message):
    refused(item_sets, message)
