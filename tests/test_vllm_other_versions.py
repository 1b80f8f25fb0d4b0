"""vLLM 0.33.0, which has no CPU build: what meets our hooks is taken from its wheel, and called inside the vLLM here.

Four of its files are fetched once, into .cache/releases. Without them or a package index the tests are skipped.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import hooked_names
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from itemset.serving.hooks import START, Hooks
from itemset.serving.wire import WIRE, EngineRequest, ListSpec, SetRef
from vllm_static import core_hooks, draft_head_requests, plugin
from vllm_static.front_end import FrontEnd

RELEASE = "vllm==0.33.0"
SOURCES = Path(__file__).parent.parent / ".cache" / "releases" / RELEASE
NAMES = ("structured_output/__init__", "structured_output/utils", "structured_output/request", "core/kv_cache_manager")
MANAGER, APPLY, REQUESTS, BLOCKS = FILES = [f"vllm/v1/{name}.py" for name in NAMES]
DRAFTS = 3


@cache
def source(path):
    if not (SOURCES / path).exists():
        try:
            read = hooked_names.released(RELEASE)
            for name in FILES:
                (SOURCES / name).parent.mkdir(parents=True, exist_ok=True)
                (SOURCES / name).write_text(read(name))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no {RELEASE} here: {error}")
    return (SOURCES / path).read_text()


def loaded(name, path):
    """A module of the release. What it imports is the installed vLLM's."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source(path), path, "exec"), vars(module))
    return module


def hooked(target, *functions):
    """Let these of the plugin's hooks run around functions of another release. functions: name there, hook."""
    hook = Hooks(START)
    for name, ours in functions:
        hook(f"{target}.{name}", why="as in the plugin", always=True)(ours)
    hook.install(RELEASE, START)


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


@pytest.fixture(scope="module", params=["installed", RELEASE])
def engine(request, config):
    """A structured-output manager, the function that applies its masks, what a request has of it, and a front end."""
    if request.param == RELEASE:
        managers, apply, requests = (
            loaded("later_manager", MANAGER),
            loaded("later_masks", APPLY),
            loaded("later_requests", REQUESTS),
        )
        ours = [
            ("grammar_init", core_hooks._grammar_init),
            ("grammar_bitmask", core_hooks._grammar_bitmask),
        ]
        hooked("later_manager:StructuredOutputManager", *ours)
    else:
        from vllm.v1 import structured_output as managers
        from vllm.v1.structured_output import request as requests
        from vllm.v1.structured_output import utils as apply
    manager = managers.StructuredOutputManager(config)
    core_hooks.give_backend(manager, config)
    manager._use_async_grammar_compilation = False
    return manager, apply.apply_grammar_bitmask, requests.StructuredOutputRequest, FrontEnd(config, manager.tokenizer)


def made(engine, name, params, *, reasoning_ended=True):
    """A request as the engine core has it, with its grammar."""
    request = Request(name, [5, 6, 7], params, None)
    request.structured_output_request = engine[2].from_sampling_params(params)
    request.structured_output_request.reasoning_ended = reasoning_ended
    engine[0].grammar_init(request)
    assert request.structured_output_request.grammar is not None
    return request


def of_set(engine, named, **options):
    manager, *_, front_end = engine
    params = SamplingParams(max_tokens=20)
    params.update_from_generation_config({}, manager.tokenizer.eos_token_id)
    front_end.attach(named, params, 3)
    return made(engine, named, params, **options)


def legal(items, prefix, end):
    """Tokens that may follow, by looking at every item."""
    after = {item[len(prefix)] for item in items if len(item) > len(prefix) and item[: len(prefix)] == prefix}
    return after | ({end} if prefix in items else set())


@pytest.mark.parametrize("drafted", [(0, 0, 0), (3, 0, 1), (1, 2, 3)])
def test_each_request_gets_its_own_masks(engine, named_sets, drafted):
    """Beside a request with another grammar and one that still reasons, whatever number of drafts each has."""
    manager, apply, *_ = engine
    end, vocabulary = manager.tokenizer.eos_token_id, manager.vllm_config.model_config.get_vocab_size()
    requests = {name: of_set(engine, name) for name in ("ragged", "fixed", "prefixes")}
    items = {name: {tuple(item) for item in named_sets[name].items} for name in requests}
    drafts = {}
    for name, count in zip(requests, drafted, strict=True):
        longest = max(sorted(items[name]), key=len)
        drafts |= {name: list(longest[:count])} if count else {}
    regex = StructuredOutputsParams(regex="[0-9]{4}")
    regex._backend = "xgrammar"  # as vLLM's front end leaves it
    requests["digits"] = made(engine, "digits", SamplingParams(structured_outputs=regex))
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
    apply(step, GrammarOutput(order, masks), SimpleNamespace(req_ids=batch), logits)
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


def test_a_step_without_drafts_is_filled_for_many_requests(engine, named_sets):
    """More than vLLM fills by its thread pool."""
    manager = engine[0]
    requests = {str(i): of_set(engine, "fixed" if i % 2 else "ragged") for i in range(200)}
    masks = manager.grammar_bitmask(requests, list(requests), {})
    each = len(masks) // 200
    fixed, ragged = (masks[each * i] for i in (1, 0))
    assert not np.array_equal(fixed, ragged)
    assert all(np.array_equal(masks[each * i], fixed if i % 2 else ragged) for i in range(200))


def later_blocks():
    """The installed KVCacheManager with the release's `get_computed_blocks`, and our hook around it."""
    find = hooked_names.find({"m.py": source(BLOCKS)}.get, "m", ["KVCacheManager", "get_computed_blocks"])
    names = dict(vars(kv_cache_manager))
    exec(compile(ast.unparse(find), BLOCKS, "exec"), names)
    own = {"get_computed_blocks": names["get_computed_blocks"]}
    module = sys.modules["later_blocks"] = ModuleType("later_blocks")
    module.Manager = type("Manager", (kv_cache_manager.KVCacheManager,), own)
    hooked("later_blocks:Manager", ("get_computed_blocks", draft_head_requests._get_computed_blocks))
    return module.Manager


def test_a_bound_of_the_prefix_cache_reaches_vllm():
    """0.33's scheduler gives it with every request, by position (v1/core/sched/scheduler.py)."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype=torch.float32)
    cache = KVCacheConfig(32, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = later_blocks()(cache, max_model_len=64, scheduler_block_size=4, hash_block_size=4)
    init_none_hash(hash)
    hasher = get_request_block_hasher(4, lambda value: repr(hash(repr(value))).encode())

    def request(name, **extra):
        return Request(name, list(range(17)), SamplingParams(extra_args=extra or None), None, block_hasher=hasher)

    first = request("first")
    manager.allocate_slots(first, 17)
    assert manager.get_computed_blocks(request("second"))[1] == 16
    assert manager.get_computed_blocks(request("third"), 9)[1] == 8
    assert manager.get_computed_blocks(request("fourth"), max_cache_hit_length=None)[1] == 16
    of_head = {WIRE: EngineRequest(SetRef("a"), ListSpec(4, 4, 2, placeholders=6))}
    assert manager.get_computed_blocks(request("fifth", **of_head))[1] == 8
    assert manager.get_computed_blocks(request("sixth", **of_head), 5)[1] == 4
