"""The contract with vLLM where its versions differ most, called in this process: front end, grammars, masks,
prefix cache. `contract.py` runs this on releases that are not installed.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_static import compat, plugin
from vllm_static.core import hooks
from vllm_static.v1 import model_runner

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


@pytest.mark.parametrize("most", [1, 3, 7])
def test_rows_that_no_draft_has_are_free(engine, named_sets, most):
    """dspark and dflash draft fewer tokens in a step than they may (vLLM 50924). Since 0.33 a request has a row for all
    that it may draft: nothing of an earlier step is left in those."""
    _, manager = engine
    backend, end = compat.backend_of(manager), manager.tokenizer.eos_token_id
    words = -(-manager.vllm_config.model_config.get_vocab_size() // 32)
    items = {name: {tuple(item) for item in named_sets[name].items} for name in ("ragged", "fixed", "prefixes")}
    requests = {name: of_set(engine, name) for name in items}
    requests["digits"] = made(engine, "digits", structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"))

    def theirs(structured_output_request_ids=tuple(requests), scheduled_spec_decode_tokens=None):
        return np.full(((1 + most) * len(structured_output_request_ids), words), 7, np.int32)

    before, backend._least_rows = backend._least_rows, 0
    try:
        for counts in ((most, most, most), (0, most, 0), (0, 1, most), (0, 0, 0)):
            drafts = {
                name: list(max(sorted(items[name]), key=len))[:count]
                for name, count in zip(items, counts, strict=True)
                if count
            }
            masks = backend.fill(theirs, manager, requests, list(requests), drafts)
            assert masks.shape == ((1 + most) * len(requests), words)
            each = masks.reshape(len(requests), 1 + most, words)
            for name, rows in zip(items, each, strict=False):
                tokens = drafts.get(name, [])
                for i, row in enumerate(rows[: 1 + len(tokens)]):
                    found = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                    assert set(found.tolist()) == legal(items[name], tuple(tokens[:i]), end), (name, i)
                assert (rows[1 + len(tokens) :] == -1).all(), (name, counts)
            assert (each[-1] == 7).all()
    finally:
        backend._least_rows = before


@pytest.mark.parametrize("output", [[[-1, -1, -1], [-1]], [[9, -1], []], [[2_000_000], [-7] * 30]])
def test_v1_scores_the_same_whatever_output_token_ids_hold(config, output):
    """Under asynchronous scheduling -1 stands for tokens that are not known yet (vLLM 52461)."""

    def sampled(output_token_ids):
        metadata = SamplingMetadata(
            temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
            max_num_logprobs=1, no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.zeros(2),
            presence_penalties=torch.zeros(2), repetition_penalties=torch.ones(2), output_token_ids=output_token_ids,
            allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
            logprob_token_ids={1: [4, 5, 6]},
        )  # fmt: skip
        batch, sampler = SimpleNamespace(sampling_metadata=metadata), Sampler()
        weighed = ([(0, 0, 0)], torch.ones(1, 1), torch.tensor([9.0]))
        runner = SimpleNamespace(vllm_config=config, input_batch=batch, sampler=sampler, static_weighed=weighed)
        logits = torch.linspace(-3, 3, 2 * 40).reshape(2, 40)
        with torch.compiler.set_stance("force_eager"):
            found = model_runner.sample(lambda: sampler(logits, batch.sampling_metadata), runner, logits, None)
        assert batch.sampling_metadata is metadata
        return found.sampled_token_ids.tolist(), found.logprobs_tensors.logprobs.tolist()

    assert sampled(output) == sampled([[9, 9, 9], [9]])


@pytest.mark.parametrize("after", [[], [1], [1, 1, 1], [1, 7], [7], [7, 1]])
@pytest.mark.parametrize("named", ["ragged", "fixed", "prefixes"])
def test_drafts_after_an_end_token(engine, named_sets, named, after):
    """An overlapped step may accept drafts after the end token. None but end tokens are legal there: what is accepted
    is what the grammar has advanced by, and a rollback of that leads back."""
    request, end = of_set(engine, named), engine[1].tokenizer.eos_token_id
    grammar = request.structured_output_request.grammar
    item = list(max(sorted(map(tuple, named_sets[named].items)), key=len))
    drafts = [*item, end, *(end if token == 1 else token for token in after)]
    advanced = len(item) + 1 + next((i for i, token in enumerate(after) if token != 1), len(after))
    assert grammar.validate_tokens(drafts) == drafts[:advanced]
    assert grammar.accept_tokens("a", drafts) is (advanced == len(drafts))
    mask = engine[1].grammar_bitmask({"a": request}, ["a"], {})[:1]
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [end]
    grammar.rollback(advanced)
    assert grammar.validate_tokens(item) == item


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


@pytest.mark.parametrize("parameter", ["trace_decode_token_ids", "thinking_token_budget"])
def test_what_forces_tokens_past_the_mask_is_refused(config, parameter):
    """With the set in force from the first token on; a budget of reasoning before it is well."""
    config = copy.deepcopy(config)
    config.speculative_config, config.reasoning_config = None, SimpleNamespace(enabled=True)
    config.model_config.enable_trace_replay = True
    front_end, prompt = InputProcessor(config), {"type": "token", "prompt_token_ids": [5, 6, 7]}
    params = {"extra_args": {"item_set": "fixed"}, parameter: [5] if parameter.startswith("trace") else 5}
    if parameter == "thinking_token_budget":
        front_end.process_inputs("before", prompt, SamplingParams(**params), ("generate",))
        config.structured_outputs_config.enable_in_reasoning = True
    with pytest.raises(VLLMValidationError, match=f"{parameter} puts tokens into an answer past its item set"):
        front_end.process_inputs("refused", prompt, SamplingParams(**params), ("generate",))
