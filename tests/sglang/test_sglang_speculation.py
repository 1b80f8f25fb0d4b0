"""Speculation in the real SGLang engine: draft trees are verified inside the set, and change no answer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from asking import CITIES, answer, inline, named, prompts
from models import cached_tiny_llama
from samples import FEW, SAMPLES, TEMPERATURE, exact
from sglang_engines import NGRAM, draft_model
from test_sglang_ranking import check_lists, lists_of

import itemset
from sglang_static.processor import parents_of

COMPILES = "a GPU would compile"  # cpu/interpreted_triton.py


def repetitive(items: list[tuple[int, ...]], count: int) -> list[list[int]]:
    """Prompts that hold items twice over: their n-grams propose some drafts inside the set, and some outside."""
    turned = [items[i:] + items[:i] for i in range(count)]
    return [([token for item in some for token in item] * 2 + list(some[0][:1]))[-150:] for some in turned]


@pytest.fixture(scope="session")
def speculation():
    """The arguments of an engine that speculates: by n-grams, by a draft model in chains, or by one in trees."""
    draft = cached_tiny_llama(seed=1)
    return {"plain": {}, "ngram": NGRAM, "chain": draft_model(draft), "tree": draft_model(draft, topk=2)}


@pytest.mark.parametrize("overlap", ["0", "1"], ids=["synchronous", "overlapping"])
@pytest.mark.parametrize("kind", ["ngram", "chain", "tree"])
def test_answers_are_those_without_speculation(static, path, named_sets, speculation, kind, overlap):
    kernels, count = ("triton", 2) if (path, overlap) == ("device", "1") else ("torch", 4)  # the interpreter is slow
    asked, params = [], []
    for name in ("large", "ragged", "prefixes"):
        asked += repetitive(sorted(named_sets[name].items)[:6], count)
        params += [named(name, temperature=0)] * count
    asked += prompts(4)
    params += [inline(CITIES, temperature=0), {"regex": "[0-9]{3}", "temperature": 0}, named("one", temperature=0)]
    params += [{"temperature": 0, "max_new_tokens": 10}]
    plain, lists = static(path).generate(input_ids=asked, sampling_params=params), lists_of(static(path))
    engine = static(path, env={"TESTS_SGLANG_OVERLAP": overlap}, item_set_kernels=kernels, **speculation[kind])
    compiled = engine.log().count(COMPILES)
    for _ in range(2):  # the second time, the n-grams of the first answers propose them
        outputs = engine.generate(input_ids=asked, sampling_params=params)
        assert [output["output_ids"] for output in outputs] == [output["output_ids"] for output in plain]
    check_lists(lists_of(engine), lists)
    if kernels == "triton":
        assert engine.log().count(COMPILES) == compiled > 0  # all at the start
    steps = sum(len(output["output_ids"]) - 1 for output in outputs)  # that no accepted draft would spare
    if kind == "ngram" or (kind, path) == ("chain", "device"):
        assert 0 < verifications(outputs) < steps
    else:  # a random model's drafts, not masked, are hardly ever legal
        assert 0 < verifications(outputs) <= steps
    names = list(named_sets) * 2
    sampled = engine.generate(input_ids=prompts(12), sampling_params=list(map(named, names)))
    for name, output in zip(names, sampled, strict=True):
        assert answer(output) in named_sets[name].items
    assert "sets were read UNNAMED" not in engine.log()  # cpu/sitecustomize.py


def verifications(outputs: list[dict]) -> int:
    """Steps that verified drafts, summed over the requests."""
    return sum(output["meta_info"].get("spec_verify_ct", 0) for output in outputs)


def test_drafts_of_a_model_are_masked(static, engines, tiny_model, files, named_sets, speculation):
    """Only one token may follow in most states of this set: a masked draft model, random as it is, always finds it."""
    names = ["one", "ragged", "fixed"] * 4
    params = [named(name, temperature=0) for name in names]
    outputs = static("device", **speculation["chain"]).generate(input_ids=prompts(12), sampling_params=params)
    assert verifications([output for name, output in zip(names, outputs, strict=True) if name == "one"]) == 4 * 2
    on_host = static("host", **speculation["chain"]).generate(input_ids=prompts(12), sampling_params=params)
    assert verifications(outputs) < verifications(on_host) / 1.5


@pytest.mark.parametrize("kind", ["plain", "ngram", "chain", "tree"])
def test_speculation_leaves_the_distribution_exact(engines, odd_model, tmp_path, path, kind):
    """Chi-square over whole items against the model's own probabilities, renormalised over the legal tokens."""
    itemset.build(FEW).save(tmp_path / "few.itemset")
    draft = cached_tiny_llama(vocab_size=1013, seed=1)
    speculation = {"ngram": NGRAM, "chain": draft_model(draft), "tree": draft_model(draft, topk=2)}.get(kind, {})
    engine = engines(
        odd_model,
        grammar_backend="static",
        item_sets={"few": str(tmp_path / "few.itemset")},
        item_set_path=path,
        max_running_requests=64,
        env={"TESTS_SGLANG_OVERLAP": "1"},
        timeout=120 + SAMPLES / 10,
        **speculation,
    )
    prompt, samples = [7, 8, 9], SAMPLES // 5
    expected = exact(FEW, lambda *behind: logits_behind(engine, prompt, *behind)) * samples
    outputs = engine.generate(input_ids=[prompt] * samples, sampling_params=named("few", temperature=TEMPERATURE))
    counts = Counter(answer(output) for output in outputs)
    observed = np.array([counts[tuple(item)] for item in FEW])
    assert observed.sum() == samples
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom, 99.9 %
    if kind == "ngram" or (kind, path) == ("chain", "device"):
        assert verifications(outputs) < sum(len(output["output_ids"]) - 1 for output in outputs)


def logits_behind(engine, prompt: list[int], prefix: list[int], tokens: list[int]) -> list[float]:
    output = engine.generate(
        input_ids=prompt + prefix,
        sampling_params={"max_new_tokens": 1, "temperature": 1.0},
        return_logprob=True,
        token_ids_logprob=tokens,
    )
    (entries,) = output["meta_info"]["output_token_ids_logprobs"]
    return [entry[0] for entry in entries]


@pytest.mark.parametrize("seed", range(20))
def test_parents_of_a_draft_tree(seed):
    random = np.random.default_rng(seed)
    trees, nodes = 3, int(random.integers(1, 40))
    parents = [[-1, *(int(random.integers(i)) for i in range(1, nodes))] for _ in range(trees)]
    first_child = torch.full((trees, nodes), -1)
    next_sibling = torch.full((trees, nodes), -1)
    for tree, above in enumerate(parents):
        for node in range(nodes - 1, 0, -1):
            next_sibling[tree, node] = first_child[tree, above[node]]
            first_child[tree, above[node]] = node
    assert parents_of(first_child, next_sibling).tolist() == parents
