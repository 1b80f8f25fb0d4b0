"""Weights of answers in the real SGLang: those of the same checkpoint in Hugging Face's own code."""

from __future__ import annotations

import pytest
from asking import named
from candidate_tests import *  # noqa: F403 - its trainer
from candidate_tests import check_candidates, check_refusals, check_samples
from engine_words import PROMPT
from models import cached_tiny_llama
from sets import named_flags
from sglang_engines import NGRAM, draft_model
from weight_tests import *  # noqa: F403 - its oracle
from weight_tests import check_weights

WEIGHED = named("one", return_set_weight=True)


@pytest.mark.parametrize("kind", ["plain", "ngram", "chain", "tree"])
def test_a_weight_is_the_legal_mass_along_its_answer(static, path, named_sets, oracle, kind):
    draft = cached_tiny_llama(seed=1)
    speculation = {"plain": {}, "ngram": NGRAM, "chain": draft_model(draft), "tree": draft_model(draft, topk=2)}
    engine = static(path, item_set_kernels="numba", **speculation[kind])
    check_weights(engine, named_sets, oracle, {}, {"temperature": 0.7, "presence_penalty": 0.5})


@pytest.mark.parametrize(
    ("params", "logprobs", "message"),
    [
        (WEIGHED, True, "return_set_weight cannot be had here: it comes in the place of log-"),
        (WEIGHED | {"ignore_eos": True}, False, "with ignore_eos an answer goes on after its end"),
        (WEIGHED | {"beam_width": 2}, False, "return_set_weight is of one sampled answer with item_set"),
        (named("one", return_set_weight=1), False, "return_set_weight must be true or false, not 1"),
    ],
)
def test_what_cannot_be_weighed_is_refused(static, params, logprobs, message):
    with pytest.raises(ValueError, match=message):
        static("device").generate(input_ids=PROMPT, sampling_params=params, return_logprob=logprobs)


def test_weights_of_generate(servers, tiny_model, named_sets, oracle):
    server = servers(tiny_model, arguments=("--grammar-backend", "static", *named_flags(named_sets)))
    items = named_sets["ragged"].items
    body = {"input_ids": PROMPT, "item_set": "ragged", "return_set_weight": True}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    for one in (answer, server.events("/generate", body | {"stream": True})[-1]):
        expected = oracle(items, tuple(one["output_ids"][:-1]))[0]
        assert one["meta_info"]["item"]["set_weight"] == pytest.approx(expected, abs=2e-3)


def test_candidates_have_the_log_probabilities_of_the_trainer(static, path, named_sets, trainer):
    engine = static(path, item_set_kernels="numba")
    check_samples(engine, named_sets, trainer)
    check_candidates(engine, named_sets, trainer)
    check_refusals(engine)


def test_log_probabilities_with_speculation_are_refused(static):
    engine = static("device", item_set_kernels="numba", **NGRAM)
    with pytest.raises(ValueError, match="item_logprobs cannot be had here: with speculation"):
        engine.generate(input_ids=PROMPT, sampling_params=named("one", item_logprobs=True))
