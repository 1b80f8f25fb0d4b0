"""Drafts from the target's hidden states, in the real V2 engine: EAGLE, EAGLE-3 that knows half the tokens, MTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_models import cached_tiny_eagle, cached_tiny_eagle3, cached_tiny_mimo
from draft_tests import NAMES, check_distribution, check_same, greedy, saved, uneven
from engine_words import asked
from engines import backend
from samples import exact
from test_vllm_drafts import spoken, watch_drafts, watched
from test_vllm_engine import on_path

CHUNKED = {"max_num_batched_tokens": 32}  # what 8 requests verify in a step; a longer prompt takes several


def drafting(kind: str, target: Path) -> dict[str, Any]:
    """The speculative configuration. "drawn": drafts by the draft model's distribution, else its most likely tokens."""
    method, _, drawn = kind.partition(" ")
    config = {"method": method, "num_speculative_tokens": 3}
    config |= {"draft_sample_method": "probabilistic"} if drawn else {}
    head = {"eagle": cached_tiny_eagle, "eagle3": cached_tiny_eagle3}.get(method)
    return config | ({"model": str(head(target))} if head else {})


# With the scope of a module, pytest runs all tests of a kind before the next: the pool keeps two engines.
@pytest.fixture(scope="module", params=["eagle", "eagle drawn", "eagle3", "eagle3 drawn", "mtp", "mtp drawn"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def plain(kind, tiny_model, static) -> dict[str, Any]:
    """The arguments of an engine on the device path, without speculation."""
    model = cached_tiny_mimo() if kind.startswith("mtp") else tiny_model
    return {"model": model, **on_path(static, "device", "numba"), **CHUNKED}


@pytest.fixture
def speculating(kind, engines, tiny_model, plain):
    return engines("v2", **plain, speculative_config=drafting(kind, tiny_model), disable_log_stats=False)


def test_answers_are_those_without_speculation(speculating, engines, plain):
    check_answers_and_lists(speculating, engines("v2", **plain))


def check_answers_and_lists(speculating: Any, without: Any) -> None:
    words = greedy(NAMES)
    check_same(speculating, without, uneven(len(words)), words)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_the_same_on_the_host_path(engines, tiny_model, static, method):
    """Of model runner V1, which verifies in another sampler."""
    model = cached_tiny_mimo() if method == "mtp" else tiny_model
    speculating = engines("v1", model, speculative_config=drafting(method, tiny_model), **static)
    check_answers_and_lists(speculating, engines("v1", model, **static))


def test_drafts_and_answers_stay_in_their_sets(speculating, named_sets, kind):
    """Also at a temperature at which the logit of a token that the draft model lacks is divided by next to nothing."""
    names = NAMES * 2
    words = [asked(name, temperature=temperature) for temperature in (0.02, 1) for name in NAMES]
    words += [{"max_tokens": 9}]
    prompts = [f"p {i}" for i in range(len(words))]
    begun = spoken(speculating)
    speculating.call(watch_drafts)
    answers = speculating.ask(prompts, words)
    checked, illegal, compiled = speculating.call(watched)
    masked = spoken(speculating)
    speculating.call(lift_masks)
    speculating.ask(prompts, words)
    unmasked = spoken(speculating)
    speculating.close()  # its processor is patched
    for name, answer in zip(names, answers, strict=False):
        assert answer.item in named_sets[name].items
    assert (illegal, compiled) == (0, 0)
    assert checked > 30
    (drafted, accepted), (drafted_without, accepted_without) = np.diff([begun, masked, unmasked], axis=0)
    told = f"{kind}: {accepted} of {drafted} drafts accepted, {accepted_without} of {drafted_without} without masks"
    assert accepted / drafted > 3 * accepted_without / drafted_without, told


def lift_masks(llm: Any) -> None:
    from vllm_static.worker import drafts

    drafts._processors.clear()


def test_tokens_that_the_draft_model_lacks_are_drawn_by_their_distribution(engines, odd_model, tmp_path):
    """Chi-square over items. Behind 101 it knows no legal token: what it draws must be what it says that it draws."""
    items = [[101, 201], [101, 203], [101, 205], [103, 201], [103, 202]]
    common = backend(item_sets=saved(tmp_path, items), item_set_path="device")
    plain = engines("v2", odd_model, logprobs_mode="raw_logits", max_logprobs=1013, **common)
    config = drafting("eagle3 drawn", odd_model)
    engine = engines("v2", odd_model, speculative_config=config, max_num_seqs=24, **common)
    check_distribution(engine, exact(items, plain.logits), items)
