"""Speculative decoding on the device path, in the real V2 engine: drafts stay in their sets, and change no answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_tests import check_distribution, check_same, check_sampled, greedy, saved
from engines import backend
from live import Films
from models import cached_tiny_llama
from samples import FEW, SAMPLES, exact
from test_vllm_engine import answer, metrics, named, on_path, sampled
from vllm.exceptions import VLLMValidationError

import itemset

FORCED = {"method": "ngram_gpu", "num_speculative_tokens": 7, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def device(static):
    return on_path(static, "device", "numba")


@pytest.fixture(scope="module")
def draft_model():
    return str(cached_tiny_llama(seed=1))


def drafting(draft_model: str, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": draft_model, "num_speculative_tokens": 3} | more


def spoken(engine) -> tuple[float, float]:
    """Tokens drafted and accepted so far, by vLLM's own counters."""
    counted = engine.call(metrics)
    names = ("num_draft_tokens", "num_accepted_tokens")
    return tuple(counted.get(f"vllm:spec_decode_{name}", 0) for name in names)


@pytest.fixture
def speculating(engines, tiny_model, device, draft_model):
    """`speculating(kind)`: an engine that drafts by a model, greedily or by its distribution, or what is forced."""

    def start(kind: str, **more: Any):
        config = {
            "greedy": drafting(draft_model),
            "probabilistic": drafting(draft_model, draft_sample_method="probabilistic"),
            "forced": FORCED,
        }[kind]
        return engines("v2", tiny_model, speculative_config=config, disable_log_stats=False, **(device | more))

    return start


@pytest.mark.parametrize("kind", ["greedy", "probabilistic", "forced"])
def test_answers_are_those_without_speculation(speculating, engines, tiny_model, device, named_sets, kind):
    words = greedy([*named_sets] * 2)
    without, engine = engines("v2", tiny_model, **device), speculating(kind)
    check_same(engine, without, [f"prompt {i}" for i in range(len(words))], words)
    drafted, accepted = spoken(engine)
    assert drafted >= accepted > drafted / 4
    assert "drafts" in engine.call(sampled)


@pytest.mark.parametrize("kind", ["greedy", "probabilistic", "forced"])
def test_sampled_answers_stay_in_their_sets(speculating, named_sets, kind):
    check_sampled(speculating(kind), named_sets, [*named_sets] * 3)


@pytest.mark.parametrize("kind", ["greedy", "probabilistic", "forced"])
def test_no_illegal_draft_reaches_verification(speculating, named_sets, kind):
    """Each draft of a request with a set is a child of the state before it, or a stop token where the item may end."""
    engine = speculating(kind)
    engine.call(watch_drafts)
    names = ["fixed", "ragged", "prefixes", "large"] * 2
    engine.generate([f"p {i}" for i in range(8)], [named(name) for name in names])
    checked, illegal, compiled = engine.call(watched)
    engine.close()  # its processor is patched
    assert checked > 30
    assert (illegal, compiled) == (0, 0)


def watch_drafts(llm: Any) -> None:
    """Before each verification, count the draft rows whose state is DEAD; and note what a GPU would have to compile."""
    from test_vllm_device import forms_at_the_start, processor_of

    from itemset.masking.batch import LOCAL
    from itemset.trie.walk import DEAD

    processor, llm.forms_known = processor_of(llm), forms_at_the_start(llm)
    mask, llm.drafts_checked, llm.drafts_illegal = processor.mask_rows, 0, 0

    def watching(logits: Any, *args: Any, above: Any, **kwargs: Any) -> Any:
        result = mask(logits, *args, above=above, **kwargs)
        states = processor._slots.row_states[: len(logits)] & LOCAL
        drafts = above > 0
        llm.drafts_checked += int(drafts.sum())
        llm.drafts_illegal += int((states[drafts] == DEAD).sum())
        return result

    processor.mask_rows = watching


def watched(llm: Any) -> tuple[int, int, int]:
    """Draft rows so far, those of them that left their sets, and forms of kernels that were not there at the start."""
    return llm.drafts_checked, llm.drafts_illegal, len(llm.forms) - llm.forms_known


def test_a_draft_model_on_the_host_path(engines, tiny_model, static, draft_model, named_sets):
    """Model runner V1 cuts drafts at the first that leaves the set, and rolls back what is rejected."""
    words = greedy([*named_sets])
    without = engines("v1", tiny_model, **static)
    engine = engines("v1", tiny_model, speculative_config=drafting(draft_model), **static)
    check_same(engine, without, [f"p {i}" for i in range(len(words))], words)
    assert "On the host path no draft of draft_model is forced or masked" in engine.log()


def test_forced_drafts_take_three_steps_an_item(engines, tiny_model, tmp_path):
    """A million semantic IDs of 8 tokens: most stand alone behind two of them. Without drafts an item takes 9 steps."""
    codes = np.random.default_rng(0).integers(3, 2_051, (1_000_000, 8), dtype=np.uint16)
    items = itemset.build(codes)
    items.save(tmp_path / "ids.itemset")
    sets = backend(item_sets={"ids": str(tmp_path / "ids.itemset")})
    engine = engines("v2", tiny_model, speculative_config=FORCED, disable_log_stats=False, **sets)
    outputs = engine.generate([f"p {i}" for i in range(24)], named("ids"))
    items.lookup([list(answer(output)) for output in outputs])
    steps = 1 + engine.call(metrics)["vllm:spec_decode_num_drafts"] / 24
    assert 3 <= steps <= 3.5


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The arguments of an engine with the set FEW on the device path."""
    sets = backend(item_sets=saved(tmp_path_factory.mktemp("few"), FEW), item_set_path="device")
    return sets | {"max_num_seqs": 64, "max_logprobs": 1013}


@pytest.fixture(scope="module")
def expected(engines, odd_model, few):
    """The probability of each of its items, by an engine without drafts."""
    plain = engines("v2", odd_model, logprobs_mode="raw_logits", timeout=300, **few)
    with pytest.raises(VLLMValidationError, match=r"raw_logits.* ranked list adds log-probabilities up: start it with"):
        plain.rank(2, item_set="few")
    return exact(FEW, plain.logits)


@pytest.mark.parametrize("kind", ["plain", "greedy", "probabilistic", "forced"])
def test_speculation_leaves_the_distribution_exact(engines, odd_model, few, expected, kind):
    draft = str(cached_tiny_llama(vocab_size=1013, seed=1))
    config = {
        "plain": None,
        "greedy": drafting(draft),
        "probabilistic": drafting(draft, draft_sample_method="probabilistic"),
        "forced": FORCED | {"num_speculative_tokens": 3},
    }[kind]
    engine = engines(
        "v2", odd_model, timeout=120 + SAMPLES / 10, **({"speculative_config": config} if config else {}), **few
    )
    check_distribution(engine, expected, FEW)


def test_drafts_that_cannot_be_masked_are_named_in_the_log(engines, tiny_model, device, draft_model, named_sets):
    config = drafting(draft_model, use_local_argmax_reduction=True)
    engine = engines("v2", tiny_model, speculative_config=config, **device)
    assert (
        "Drafts of draft_model are not masked by item sets (use_local_argmax_reduction makes no draft" in engine.log()
    )
    check_sampled(engine, named_sets, ["fixed"] * 6)


def test_a_version_that_is_published_while_drafts_are_forced(engines, tiny_model, tmp_path):
    """A request that has begun ends on its version, drafts included; the next one gets the new version's."""
    films = Films(tmp_path / "sets" / "films")
    sets = backend(**films.options, item_set_path="device")
    engine = engines("v2", tiny_model, speculative_config=FORCED, disable_log_stats=False, **sets)
    for _ in range(3):
        before, version = films.versions[-1], films.publish()
        running, new = engine.call(answers_over_a_swap)
        assert {films.check_tokens(item, tokens) for item, tokens in running} == {before.name}
        assert {films.check_tokens(item, tokens) for item, tokens in new} == {version.name}
    drafted, accepted = spoken(engine)
    assert drafted >= accepted > drafted / 4


def answers_over_a_swap(llm: Any) -> list[list[tuple[dict[str, Any], list[int]]]]:
    """Items and tokens of requests that are a step old when the new version is taken up, and of those after them."""
    import vllm_static

    def begin(first: int) -> None:
        for i in range(first, first + 4):
            llm.llm_engine.add_request(str(i), "p", named("films", seed=i))

    found: dict[str, tuple[dict[str, Any], list[int]]] = {}
    begin(0)
    llm.llm_engine.step()
    vllm_static.refresh(llm)
    begin(4)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0].item, list(answer(output))
    items = [found[name] for name in sorted(found)]
    return [items[:4], items[4:]]
