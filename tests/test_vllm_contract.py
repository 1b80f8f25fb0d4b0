"""The contract with vLLM where its versions differ most, called in this process: front end, grammars, masks,
prefix cache. `contract.py` runs this on releases that are not installed.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_static import plugin
from vllm_static.core import hooks

ROOT = Path(__file__).parents[1]
DRAFTS = 3


@pytest.fixture(scope="module")
def config(tiny_model, named_sets):
    plugin.register()
    arguments = EngineArgs(
        str(tiny_model),
        structured_outputs_config={
            "backend": "static",
            "reasoning_parser": "tiny",
            "reasoning_parser_plugin": str(Path(__file__).with_name("tiny_reasoning.py")),
        },
        additional_config={
            "item_sets": {name: named_sets[name].path for name in ("ragged", "fixed", "prefixes")},
            "item_set_path": "host",
        },
        speculative_config={"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2},
    )
    return arguments.create_engine_config()


@pytest.fixture(scope="module")
def engine(config):
    """A front end, and the structured outputs of an engine core."""
    backend = hooks.make_backend(config)
    yield InputProcessor(config), StructuredOutputManager(config)
    del backend


def made(engine, name, *, reasoning_ended=True, **params):
    """A request as the engine core has it, with its grammar."""
    front_end, manager = engine
    prompt = {"type": "token", "prompt_token_ids": [5, 6, 7]}
    sent = front_end.process_inputs(name, prompt, SamplingParams(max_tokens=20, **params), ("generate",))
    request = Request.from_engine_core_request(sent, None)
    request.structured_output_request.reasoning_ended = reasoning_ended
    manager._use_async_grammar_compilation = False
    manager.grammar_init(request)
    assert request.structured_output_request.grammar is not None
    return request


def of_set(engine, named, **options):
    return made(engine, named, extra_args={"item_set": named}, **options)


def legal(items, prefix, end):
    """Tokens that may follow, by looking at every item."""
    after = {item[len(prefix)] for item in items if len(item) > len(prefix) and item[: len(prefix)] == prefix}
    return after | ({end} if prefix in items else set())


@pytest.mark.parametrize("drafted", [(0, 0, 0), (3, 0, 1), (1, 2, 3)])
def test_each_request_gets_its_own_masks(engine, named_sets, drafted):
    """Beside a request with another grammar and one that still reasons, whatever number of drafts each has."""
    _, manager = engine
    end, vocabulary = manager.tokenizer.eos_token_id, manager.vllm_config.model_config.get_vocab_size()
    requests = {name: of_set(engine, name) for name in ("ragged", "fixed", "prefixes")}
    items = {name: {tuple(item) for item in named_sets[name].items} for name in requests}
    drafts = {}
    for name, count in zip(requests, drafted, strict=True):
        longest = max(sorted(items[name]), key=len)
        drafts |= {name: list(longest[:count])} if count else {}
    requests["digits"] = made(engine, "digits", structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"))
    requests["thinks"] = of_set(engine, "fixed", reasoning_ended=False)
    drafts["thinks"] = [17, 18]
    # Since 0.33: tokens that would end the reasoning, and that its set does not begin with.
    closed = getattr(requests["thinks"].structured_output_request, "masked_reasoning_end_ids", False) is None
    if closed:
        requests["thinks"].structured_output_request.masked_reasoning_end_ids = (40,)
    order = ["thinks", "ragged", "digits", "fixed", "prefixes"]
    masks = manager.grammar_bitmask(requests, order, drafts)

    batch = [*order[::-1], "free"]
    logits = torch.zeros(len(batch) + sum(map(len, drafts.values())), vocabulary)
    step = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    apply_grammar_bitmask(step, GrammarOutput(order, masks), SimpleNamespace(req_ids=batch), logits)
    rows = iter(logits.isfinite())
    for name in batch:
        for i in range(1 + len(drafts.get(name, ()))):
            open_to = set(next(rows).nonzero().flatten().tolist())
            if name in items:
                assert open_to == legal(items[name], tuple(drafts.get(name, ())[:i]), end), (name, i)
            elif name == "digits":
                assert 0 < len(open_to) < 400
            else:
                assert set(range(vocabulary)) - open_to == ({40} if closed and name == "thinks" else set())
    assert next(rows, None) is None


def test_a_step_without_drafts_is_filled_for_many_requests(engine):
    """More than vLLM fills by its thread pool."""
    requests = {str(i): of_set(engine, "fixed" if i % 2 else "ragged") for i in range(200)}
    masks = engine[1].grammar_bitmask(requests, list(requests), {})
    each = len(masks) // 200
    fixed, ragged = (masks[each * i] for i in (1, 0))
    assert not np.array_equal(fixed, ragged)
    assert all(np.array_equal(masks[each * i], fixed if i % 2 else ragged) for i in range(200))


@pytest.fixture(scope="module")
def cached(config):
    """What computes a prompt's cached tokens, one of 17 tokens being there, and further requests with that prompt."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype=torch.float32)
    cache = KVCacheConfig(32, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(cache, max_model_len=64, scheduler_block_size=4, hash_block_size=4)
    init_none_hash(hash)
    hasher = get_request_block_hasher(4, lambda value: repr(hash(repr(value))).encode())

    def request(name, **extra):
        return Request(name, list(range(17)), SamplingParams(extra_args=extra or None), None, block_hasher=hasher)

    manager.allocate_slots(request("first"), 17)
    return manager.get_computed_blocks, request


HAS_BOUND = "max_cache_hit_length" in inspect.signature(KVCacheManager.get_computed_blocks).parameters
"""0.33's scheduler gives it with every request, by position (v1/core/sched/scheduler.py)."""


def test_the_prefix_cache_is_looked_up_as_ever(cached):
    computed, request = cached
    assert computed(request("second"))[1] == 16
    if HAS_BOUND:
        assert computed(request("third"), 9)[1] == 8
        assert computed(request("fourth"), max_cache_hit_length=None)[1] == 16


def test_a_draft_heads_placeholders_are_computed(cached):
    from itemset.serving.wire import WIRE, EngineRequest, ListSpec, SetRef

    computed, request = cached
    of_head = {WIRE: EngineRequest(SetRef("a"), ListSpec(4, 4, 2, placeholders=6))}
    assert computed(request("fifth", **of_head))[1] == 8
    if HAS_BOUND:
        assert computed(request("sixth", **of_head), 5)[1] == 4
