"""Weights of answers in the real SGLang: those of the same checkpoint in Hugging Face's own code."""

from __future__ import annotations

from typing import Any

import pytest
from asking import inline, named
from models import cached_tiny_llama
from ranking import EOS, PROMPT, weights_of
from sets import named_flags, tagged_items
from sglang_engines import NGRAM, draft_model

SETS = ("prefixes", "ragged", "labels", "one", "tagged", "fixed")


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return weights_of(tiny_model)


def weighed(name: str, **params: Any) -> dict[str, Any]:
    return named(name, return_set_weight=True, **params)


@pytest.mark.parametrize("kind", ["plain", "ngram", "chain", "tree"])
def test_a_weight_is_the_legal_mass_along_its_answer(static, path, named_sets, oracle, kind):
    draft = cached_tiny_llama(seed=1)
    speculation = {"plain": {}, "ngram": NGRAM, "chain": draft_model(draft), "tree": draft_model(draft, topk=2)}
    engine = static(path, item_set_kernels="numba", **speculation[kind])
    params = [weighed(name) for name in SETS for _ in range(2)]
    params += [weighed("tagged", exclude_keys=["item 1"]), weighed("ragged", temperature=0.7, presence_penalty=0.5)]
    others = [named("ragged"), {"max_new_tokens": 6}, inline(["Paris"])]
    asked = params + others
    logprobs = [False] * len(params) + [True] * len(others)
    outputs = engine.generate(input_ids=[PROMPT] * len(asked), sampling_params=asked, return_logprob=logprobs)
    names, left = [*(name for name in SETS for _ in range(2)), "tagged", "ragged"], tagged_items()
    for i, (name, output) in enumerate(zip(names, outputs, strict=False)):
        tokens, info = tuple(output["output_ids"]), output["meta_info"]
        assert tokens[-1] == EOS
        items = set(map(tuple, left[:1] + left[2:])) if i == 12 else named_sets[name].items
        weight, score = oracle(items, tokens[:-1])
        assert info["item"]["set_weight"] == pytest.approx(weight, abs=2e-3)
        assert score - 2e-3 <= info["item"]["set_weight"] <= 0
        assert not [name for name in info if "logprobs" in name]
    for output in outputs[len(params) :]:
        assert "set_weight" not in (output["meta_info"].get("item") or {})
        assert len(output["meta_info"]["output_token_logprobs"]) == len(output["output_ids"])
    several = engine.generate(input_ids=PROMPT, sampling_params=weighed("ragged", n=3))
    for output in several:
        weight, _ = oracle(named_sets["ragged"].items, tuple(output["output_ids"][:-1]))
        assert output["meta_info"]["item"]["set_weight"] == pytest.approx(weight, abs=2e-3)


@pytest.mark.parametrize(
    ("params", "logprobs", "message"),
    [
        (weighed("one"), True, "return_set_weight cannot be had here: it comes in the place of log-"),
        (weighed("one", ignore_eos=True), False, "with ignore_eos an answer goes on after its end"),
        (weighed("one", beam_width=2), False, "return_set_weight is of one sampled answer with item_set"),
        (named("one", return_set_weight=1), False, "return_set_weight must be true or false, not 1"),
    ],
)
def test_what_cannot_be_weighed_is_refused(static, params, logprobs, message):
    with pytest.raises(ValueError, match=message):
        static("device").generate(input_ids=PROMPT, sampling_params=params, return_logprob=logprobs)


def test_over_http(servers, tiny_model, named_sets, oracle):
    server = servers(tiny_model, arguments=("--grammar-backend", "static", *named_flags(named_sets)))
    items = named_sets["ragged"].items
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a film"}]}),
    ):
        body = {"model": "tiny", "max_tokens": 20, "item_set": "ragged", "return_set_weight": True, **prompt}
        status, answer = server.post(path, body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["item"]["set_weight"] < 0
        assert choice.get("logprobs") is None
        *_, last = server.events(path, body | {"stream": True})
        assert last["choices"][0]["item"]["set_weight"] < 0
        status, answer = server.post(path, body | {"item_set": None})
        assert status == 400
        assert "return_set_weight is of one sampled answer with item_set" in str(answer)
    body = {"input_ids": PROMPT, "item_set": "ragged", "return_set_weight": True}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    expected = oracle(items, tuple(answer["output_ids"][:-1]))[0]
    assert answer["meta_info"]["item"]["set_weight"] == pytest.approx(expected, abs=2e-3)
    *_, last = server.events("/generate", body | {"stream": True})
    expected = oracle(items, tuple(last["output_ids"][:-1]))[0]
    assert last["meta_info"]["item"]["set_weight"] == pytest.approx(expected, abs=2e-3)
