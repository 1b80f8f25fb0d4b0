"""Bad requests are refused one by one with a reason, and bad configurations before a process is started."""

from __future__ import annotations

import pytest
from asking import named
from refusal_tests import *  # noqa: F403 - its tests, with the engine of this module
from sglang_engines import Engine

import itemset


@pytest.fixture
def engine(static, path):
    return static(path, inline_item_limit=1_000, inline_text_limit=1_000)


@pytest.fixture
def refused(tiny_model):
    def refused(item_sets: object, message: str, **arguments: object) -> None:
        with pytest.raises(ValueError, match=message):
            Engine(tiny_model, **{"grammar_backend": "static", "item_sets": item_sets} | arguments).close()

    return refused


@pytest.fixture
def length_of_six():
    return 248  # SGLang keeps two tokens back


@pytest.fixture
def surface():
    from sglang_static.front.http import SURFACE

    modules = ["sglang.srt.entrypoints", "sglang.srt.managers"]
    return SURFACE, modules, {"custom_params", "sampling_params", "items"}, "sampling_params"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (named("ragged") | {"choice": ["a"]}, "item_set, choice and other constraints .* exclude each other"),
        (named("ragged", regex="a"), "item_set, choice and regex .* exclude each other"),
        (named("one", beam_width=2, exact=1), "exact must be true or false, not 1"),
        (named("one", beam_width=2, max_passes=0), "max_passes must be a number of forward passes, at least 1, not 0"),
        (named("ragged", beam_width=2, max_passes=1), "no item was found before the limit"),
        (named("ragged", beam_width=2, renormalized=True), "'renormalized': did you mean renormalised?"),
        (named("ragged", exact=True), "exact is for ranked lists: add use_beam_search and n"),
        (named("ragged", beam_width="4"), "width must be a number of beams, at least 1, or a list of such numbers"),
        ({"custom_params": {"item_sets": "one"}}, "sampling_params has no 'item_sets': name the set as item_set"),
    ],
)
def test_a_bad_request_in_sglangs_words(engine, params, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(input_ids=[7, 8], sampling_params=params)


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


def test_a_server_without_our_front_end_is_refused(monkeypatch):
    from types import SimpleNamespace

    from sglang_static import compat

    given = SimpleNamespace(speculative_algorithm=None, speculative_accept_threshold_single=1, tokenizer_worker_num=1)
    given.speculative_accept_threshold_acc, given.grpc_port, given.smg_grpc_mode = 1, None, False
    monkeypatch.setattr(compat, "resolved", lambda _: given)
    compat.refuse_unmasked(None)
    monkeypatch.setenv("SGLANG_RUST_SERVER", "true")
    with pytest.raises(ValueError, match="SGLANG_RUST_SERVER=1 serves without the processes that know item sets"):
        compat.refuse_unmasked(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"item_set_path": "gpu"}, "item_set_path must be one of auto, device, host"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num above 1 takes requests in processes"),
        ({"grpc_port": 50051}, "over gRPC .* item sets would be lost: leave it out"),
        ({"grpc_mode": True}, "over gRPC .* item sets would be lost: leave it out"),
        ({"grammar_backend": "xgrammar"}, "item_sets need the static backend: add grammar_backend"),
        (
            {"item_set_path": "device", "enable_pdmux": True},
            "item_set_path is device, but with --enable-pdmux two batches sample",
        ),
    ],
)
def test_a_bad_configuration_ends_the_start_up(refused, arguments, message):
    refused({}, message, **arguments)
