"""Ranked lists made inside a step of model runner V2: what rounds of requests find, and nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from adapters import make_adapter
from engines import force_asynchronous_scheduling
from ranking import oracle_of
from safetensors.torch import load_file, save_file
from samples import CHURNED
from test_vllm_engine import metrics
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from itemset.ranking.search import ordered
from itemset.serving.wire import REASONS, EngineRequest, ListResult, ListSpec, NoList, SetRef
from vllm_static.compat import list_params
from vllm_static.front.engine_lists import EngineLists
from vllm_static.front.list_requests import RankingParams

PLAIN = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
ROUNDS: dict[str, Any] = {"max_passes": 10_000}  # such a list takes rounds of requests

Item = tuple[tuple[int, ...], float]
Width = int | tuple[int, ...]


@pytest.fixture
def engine(engines: Any, tiny_model: Path, static: dict[str, Any]) -> Any:
    return engines("v2", tiny_model, **given(static, ranked_list_beams=160, item_set_narrow_head="on"), **ROOMY)


def given(static: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The arguments of an engine with these options, too."""
    return static | {"additional_config": static["additional_config"] | options}


ROOMY = {"kv_cache_memory_bytes": 128 << 20}
"""So large a cache that an eighth of it has room for the beams of the tests."""


def prompt_of(length: int) -> list[int]:
    return [100 + (7 * i + length) % 800 for i in range(length)]


def items_of(output: Any) -> list[Item]:
    return [one[:2] for one in ordered(ListResult.of_table(output.prompt_token_id_logprobs).items[0])]


def asked(name: str, width: Width, k: int, renormalised: bool, end: int | None = 1) -> Any:
    spec = ListSpec(k, width, 1 if end is None else end, end is None, renormalised)
    return list_params(EngineRequest(SetRef(name), spec))


def inside(
    llm: Any, name: str, width: Width, k: int, renormalised: bool, lengths: list[int], end: int | None = 1
) -> list[list[Item]]:
    """In the engine's process: lists of some prompts, asked for together. end: the end token, if it is to count."""
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in lengths]
    outputs = llm.generate(prompts, asked(name, width, k, renormalised, end), use_tqdm=False)
    return [items_of(output) for output in outputs]


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def fixed_shapes(llm: Any) -> Any:
    """In the engine's process, while this is entered: its worker leaves no row out, as on an accelerator."""
    return mock.patch.object(runner_of(llm).prompt_logprobs_worker.static_lists, "narrow", False)


def as_accelerators(llm: Any, *arguments: Any) -> list[list[Item]]:
    """`inside`, with fixed shapes."""
    with fixed_shapes(llm):
        return inside(llm, *arguments)


def by_rounds(
    llm: Any, name: str, width: Width, k: int, renormalised: bool, length: int, without_end: bool = False
) -> list[Item]:
    options = {"item_set": name, "width": width, "renormalised": renormalised, "without_end": without_end, **ROUNDS}
    ((found, *_),) = searched(llm, options, k, [length])
    return found


def searched(llm: Any, options: dict[str, Any], k: int, lengths: list[int]) -> list[tuple[list[Item], bool, int]]:
    """Items of `LLM.beam_search`, whether they are proven, and the rounds."""
    prompts = [prompt_of(length) for length in lengths]
    params = RankingParams(beam_width=k, max_tokens=40, extra_args=options)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [
        ([(tuple(one.tokens[length:-1]), one.cum_logprob) for one in output.sequences], output.proven, output.rounds)
        for output, length in zip(outputs, lengths, strict=True)
    ]


def same(found: list[Item], expected: list[Item]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-4)


def loaded(llm: Any, name: str, length: int) -> tuple[list[Item], list[Item], int, int]:
    """A list of a prompt, the same once a KV connector has the prompt's KV and the engine has not, how many of its
    tokens were loaded, and how many layers the first one saved."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    save = ExampleConnector.save_kv_layer
    with mock.patch.object(ExampleConnector, "save_kv_layer", autospec=True, side_effect=save) as saved:
        (first,) = inside(llm, name, 4, 3, False, [length])
    assert llm.reset_prefix_cache()
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt_of(length)}], asked(name, 4, 3, renormalised=False), use_tqdm=False
    )
    return first, items_of(output), output.num_cached_tokens, saved.call_count


LISTS = [
    ("prefixes", 7, 7, False),
    ("one", 3, 2, False),
    ("ragged", 20, 5, False),
    ("ragged", 9, 9, True),
    ("fixed", 16, 10, False),
    ("labels", 150, 150, False),
    ("labels", 40, 40, True),
    ("large", 24, 12, False),
    ("large", 8, 8, True),
    ("seen", 40, 12, False),
    ("seen", 8, 8, True),
    ("large", (2, 9, 30), 12, False),
    ("ragged", (3, 20), 5, True),
]


@pytest.mark.parametrize(("name", "width", "k", "renormalised"), LISTS)
def test_the_items_of_rounds(engine, name, width, k, renormalised):
    """For prompts that end inside a block of 32, with one, and a token later; two lists of one of them."""
    lengths = [3, 31, 32, 33, 70, 70]
    made = [engine.call(form, name, width, k, renormalised, lengths) for form in (inside, as_accelerators)]
    for length, found, fixed in zip(lengths, *made, strict=True):
        expected = engine.call(by_rounds, name, width, k, renormalised, length)
        same(found, expected)
        same(fixed, expected)
        assert found


@pytest.mark.parametrize(("name", "width", "k"), [("prefixes", 7, 7), ("ragged", 20, 5), ("large", 24, 12)])
def test_scores_without_the_end(engine, tiny_model, name, width, k):
    """The sum of the items' own tokens, whoever makes the list."""
    lengths = [31, 70]
    made = [engine.call(form, name, width, k, False, lengths, None) for form in (inside, as_accelerators)]
    for length, *found in zip(lengths, *made, strict=True):
        expected = engine.call(by_rounds, name, width, k, False, length, True)
        ends = dict(map(reversed, oracle_of(tiny_model, prompt_of(length))([tokens for tokens, _ in expected])))
        assert all(score > ends[tokens] + 1e-3 for tokens, score in expected)
        for items in found:
            same(items, expected)


def test_on_accelerators_a_row_has_a_token_a_pass(engine):
    """As in decoding, whose CUDA graphs it takes: of items of six tokens five passes, and one more for the end. On a
    CPU tails are read whole, and rows that lead nowhere are omitted."""
    without_end, fixed, narrow = engine.call(shapes_of_passes)
    assert [len(without_end), len(fixed)] == [5, 6]
    assert {tokens for _, tokens in (*without_end, *fixed)} == {1}
    assert [rows for rows, _ in fixed] == [16, 16, 32, 48, 48, 48]  # tails join at three levels
    assert len(narrow) <= 4
    assert 16 <= sum(rows for rows, _ in narrow) < 4 * 16


def shapes_of_passes(llm: Any) -> list[list[tuple[int, int]]]:
    """Rows of the passes of a list, and tokens of each: as an accelerator does it, without the end and with it, and on
    a CPU."""
    from vllm_static.worker import lists

    own, shapes = lists.states_after, list[list[tuple[int, int]]]()

    def run(runner: Any, kv: Any, tokens: torch.Tensor) -> Any:
        shapes[-1].append(tuple(tokens.shape))
        return own(runner, kv, tokens)

    with mock.patch.object(lists, "states_after", run):
        for form, end in ((as_accelerators, None), (as_accelerators, 1), (inside, 1)):
            shapes.append([])
            form(llm, "large", 16, 4, False, [40], end)
    return shapes


def test_a_prompt_in_chunks(engines, tiny_model, static, engine):
    """A prompt that takes four steps, beside others that take one. The passes take no more tokens at a time."""
    small = engines("v2", tiny_model, **static, **ROOMY, max_num_batched_tokens=32)
    lengths = [100, 20, 97]
    for found, length in zip(small.call(inside, "large", 6, 4, False, lengths), lengths, strict=True):
        same(found, engine.call(by_rounds, "large", 6, 4, False, length))


def cached(llm: Any) -> list[tuple[int, list[Item]]]:
    prompt = {"prompt_token_ids": prompt_of(96)}
    llm.reset_prefix_cache()
    outputs = [llm.generate(prompt, asked("fixed", 16, 5, False), use_tqdm=False)[0] for _ in range(2)]
    return [(output.num_cached_tokens, items_of(output)) for output in outputs]


def test_a_prompt_from_the_prefix_cache(engine):
    (none, first), (some, second) = engine.call(cached)
    assert (none, some) == (0, 64)
    same(second, first)


def beside(llm: Any, lists: int) -> list[list[int]]:
    """Tokens of ordinary requests that run while lists come and go."""
    llm.reset_prefix_cache()
    for i, length in enumerate((5, 40, 64)):
        llm.llm_engine.add_request(f"plain-{i}", {"prompt_token_ids": prompt_of(length)}, PLAIN)
    outputs, step = {}, 0
    while llm.llm_engine.has_unfinished_requests():
        if step % 2 == 0 and step // 2 < lists:
            params = asked(("large", "ragged", "fixed")[step // 2 % 3], 12, 4, False)
            llm.llm_engine.add_request(f"list-{step}", {"prompt_token_ids": prompt_of(30 + step)}, params)
        for output in llm.llm_engine.step():
            outputs[output.request_id] = output
        step += 1
    assert sum(output.prompt_token_id_logprobs is not None for output in outputs.values()) == lists
    return [outputs[f"plain-{i}"].outputs[0].token_ids for i in range(3)]


def test_neighbours_stay_as_they_are(engine):
    assert engine.call(beside, 5) == engine.call(beside, 0)


@pytest.mark.parametrize("prepare", [None, force_asynchronous_scheduling])
def test_nothing_is_left(engines, tiny_model, static, prepare):
    """After lists of which every third is aborted and some preempted, mostly between the chunks of their prompts. There
    is room for two beams."""
    tight = given(static, ranked_list_beams=2) | {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64}
    small = engines("v2", tiny_model, **tight, prepare=prepare)
    before, after, answered, preempted = small.call(churn, CHURNED)
    assert before == after == 38
    assert answered == CHURNED - CHURNED // 3
    assert preempted


def churn(llm: Any, lists: int) -> tuple[int, int, int, int]:
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    llm.reset_prefix_cache()
    before, answered, preempted = scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), 0, 0
    added: list[str] = []
    while len(added) < lists or engine.has_unfinished_requests():
        for i in range(len(added), min(len(added) + 3, lists)):
            prompt = {"prompt_token_ids": prompt_of(20 + 13 * (i % 11))}
            engine.add_request(str(i), prompt, asked("fixed", 1 + i % 2, 1, False))
            added.append(str(i))
        engine.abort_request([name for name in added[-3:] if int(name) % 3 == 2])
        for output in engine.step():
            assert ListResult.of_table(output.prompt_token_id_logprobs).reason is None
            answered += 1
        if len(added) % 24 == 0 and len(added) < lists and scheduler.running:
            preempted += len(scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
    llm.reset_prefix_cache()
    return before, scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), answered, preempted


def test_nothing_is_read_back(engine):
    """With fixed shapes the rounds read no tensor: neither a number, nor a shape that depends on what is in one."""
    passes, found, _ = engine.call(rounds, 40)
    assert (passes, found) == (4, Counter())


def test_the_rounds_are_a_fixed_program(engine):
    """After prompts of other tokens and lengths, which end in as many blocks, the rounds run the same operations, with
    the same shapes and numbers."""
    (_, _, operations), (_, _, others) = engine.call(rounds, 40), engine.call(rounds, 37)
    assert len(operations) > 50
    assert operations == others


class Reads(TorchDispatchMode):
    READING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "_to_copy_host")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.READING):
            self.found[str(func)] += 1
        given = tree_map_only(torch.Tensor, lambda one: (one.shape, one.stride(), one.dtype), (args, kwargs))
        self.operations.append(f"{func} {given}")
        return func(*args, **(kwargs or {}))


def rounds(llm: Any, length: int) -> tuple[int, Counter[str], list[str]]:
    """Of a list after a prompt: its passes, and what the host reads and which operations run between them."""
    from vllm_static.worker import beam_forward, lists

    watch, own, run = Reads(), lists.WideLists._make, beam_forward._run
    passes_run = 0

    def make(*args: Any) -> Any:
        with watch:
            return (yield from own(*args))

    def run_apart(*args: Any) -> torch.Tensor:
        nonlocal passes_run
        passes_run += 1
        with _disable_current_modes():  # vLLM's own metadata and model
            return run(*args)

    with mock.patch.object(lists.WideLists, "_make", make), mock.patch.object(beam_forward, "_run", run_apart):
        (found,) = as_accelerators(llm, "fixed", 4, 4, False, [length])
    assert len(found) == 4
    return passes_run, watch.found, watch.operations


def test_a_list_of_512(engines, tiny_model, static):
    """A pass may be two passes here: the runner's buffers hold 2,048 tokens."""
    roomy = {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 64, "max_num_batched_tokens": 2_048}
    wide = engines("v2", tiny_model, **given(static, ranked_list_beams=512), **roomy)
    (found,) = wide.call(inside, "large", 512, 512, False, [50])
    assert len({tokens for tokens, _ in found}) == 512
    oracle = oracle_of(tiny_model, prompt_of(50))([tokens for tokens, _ in found])
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    expected = {tokens: score for score, tokens in oracle}  # of 512 some are nearly equal: their order is open
    np.testing.assert_allclose(scores, [expected[tokens] for tokens, _ in found], atol=1e-4)


def test_what_takes_too_many_tokens_is_said(engine):
    """A worker refuses nothing: the answer has a number instead of a list."""
    (output,) = engine.generate({"prompt_token_ids": prompt_of(9)}, asked("large", 1_500, 1, False))
    assert output.prompt_token_id_logprobs.tolist() == [[float(REASONS.index(NoList.TOO_LONG))]]


def test_a_list_takes_an_entry_a_node(engine):
    """No block of the cache: of three passes, an entry of each row, tails apart."""
    rows, used, free = engine.call(entries)
    assert used == sum(rows)
    assert len(set(free)) == 1


def entries(llm: Any) -> tuple[list[int], int, list[int]]:
    """Of a list the rows of its passes, the entries that it has taken, and the free blocks of the cache around them."""
    from vllm_static.worker import lists
    from vllm_static.worker.beam_kv import BeamKV

    own, made, rows = lists.states_after, list[BeamKV](), list[int]()
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = [pool.get_num_free_blocks()]

    def run(runner: Any, kv: Any, tokens: torch.Tensor) -> Any:
        made.append(kv)
        rows.append(len(tokens))
        return own(runner, kv, tokens)

    with mock.patch.object(lists, "states_after", run):
        inside(llm, "large", 24, 12, False, [40])
    return rows, made[-1].used, [*free, pool.get_num_free_blocks()]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[str, Path]:
    """A LoRA adapter of the tiny model, of random weights, and the model with these weights in it."""
    adapter, merged = make_adapter(tiny_model, tmp_path_factory.mktemp("adapted"), seed=5)
    return str(adapter), merged


def with_adapter(llm: Any, adapter: str | None, lengths: list[int], number: int = 1) -> list[list[Item]]:
    lora = None if adapter is None else LoRARequest("adapter", number, adapter)
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in lengths]
    return [items_of(one) for one in llm.generate(prompts, asked("fixed", 9, 6, False), lora_request=lora)]


def test_lists_of_lora_adapters(engines, tiny_model, static, adapted, tmp_path):
    """The beams have their prompt's adapter. Not both in one batch: on a CPU vLLM gives an adapter to all of it.

    Nine beams with tails have more tokens than a step, for which the adapters have buffers.
    """
    adapter, merged = adapted
    adapters = {"enable_lora": True, "max_lora_rank": 8}
    engine = engines("v2", tiny_model, **static, **ROOMY, **adapters, max_num_batched_tokens=32)
    lengths = [20, 33, 33]
    for given, model in ((adapter, merged), (None, tiny_model)):
        for length, items in zip(lengths, engine.call(with_adapter, given, lengths), strict=True):
            scored = oracle_of(model, prompt_of(length))([tokens for tokens, _ in items])
            same(items, [(tokens, score) for score, tokens in scored])
            assert len(items) == 6
    assert "not of a set's own: LoRA adapters may change the head" in engine.log()
    changed = tmp_path / "changed"  # of the same name, whose prompts the prefix cache must not take for the other's
    shutil.copytree(adapter, changed)
    weights = load_file(changed / "adapter_model.safetensors")
    save_file({name: 0 * weight for name, weight in weights.items()}, changed / "adapter_model.safetensors")
    for number, path, model in ((1, adapter, merged), (2, str(changed), tiny_model), (1, adapter, merged)):
        for length, items in zip(lengths, engine.call(with_adapter, path, lengths, number), strict=True):
            scored = oracle_of(model, prompt_of(length))([tokens for tokens, _ in items])
            same(items, [(tokens, score) for score, tokens in scored])
    check_rounds(engine, adapter)


def check_rounds(engine: Any, adapter: str) -> None:
    """On a CPU vLLM's scores of several prompts end its engine if it takes adapters: such lists are refused."""
    for path, words in ((adapter, {"exact": True}), (None, {"width": 900}), (adapter, {"max_passes": 3})):
        with pytest.raises(VLLMValidationError, match="would end on a CPU with LoRA adapters: merge the adapter"):
            engine.call(rounds_under, path, words)
    assert engine.call(answered_under, adapter) is not None


def rounds_under(llm: Any, adapter: str | None, words: dict[str, Any]) -> None:
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
    params = RankingParams(beam_width=6, max_tokens=40, item_set="fixed", **words)
    llm.beam_search([{"prompt_token_ids": prompt_of(40)}], params, lora_request=lora)


def answered_under(llm: Any, adapter: str) -> Any:
    params = SamplingParams(max_tokens=40, extra_args={"item_set": "fixed"})
    lora, prompt = LoRARequest("adapter", 1, adapter), {"prompt_token_ids": prompt_of(40)}
    return llm.generate(prompt, params, lora_request=lora)[0].outputs[0].item


def test_rounds_under_an_adapter_on_v1(engines, tiny_model, static, adapted):
    """Where all lists take rounds."""
    check_rounds(engines("v1", tiny_model, **static, enable_lora=True, max_lora_rank=8), adapted[0])


def with_ranks(llm: Any, lengths: list[int]) -> tuple[list[list[Item]], list[list[Item]], list[list[int]], list[Any]]:
    """Lists of raw and of renormalised scores, answers, and how each rank's steps were sampled."""
    from vllm_static.worker.narrow_hooks import sampled_steps

    raw, renormalised = (inside(llm, "fixed", 8, 5, kind, lengths) for kind in (False, True))
    words = [{"temperature": 0}, {"temperature": 1.3, "seed": 7, "top_k": 3}]
    params = [SamplingParams(max_tokens=12, extra_args={"item_set": "fixed"}, **one) for one in words]
    answers = llm.generate([{"prompt_token_ids": prompt_of(9)}] * 2, params, use_tqdm=False)
    return raw, renormalised, [list(one.outputs[0].token_ids) for one in answers], llm.collective_rpc(sampled_steps)


def test_ranks_choose_the_same_rows(engines, tiny_model, static, engine):
    """Under tensor parallelism every rank makes lists and answers, from the same logits; those of a set's own tokens
    are each rank's share of them, gathered."""
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    narrow = given(static, item_set_narrow_head="on")
    two = engines("v2", tiny_model, **narrow, **ROOMY, tensor_parallel_size=2, env=env, timeout=300)
    *found, answers, steps = two.call(with_ranks, [20, 32, 33])
    two.close()
    *expected, alone, _ = engine.call(with_ranks, [20, 32, 33])
    for items, others in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        same(items, others)
    assert answers == alone
    assert len(steps) == 2
    assert set(steps[0]) == set(steps[1]) == {"narrow"}


def ways(llm: Any, requests: list[dict[str, Any]], k: int = 2) -> tuple[int, dict[str, float]]:
    """How many requests the engine gets for lists, and how they are counted."""
    from itemset.serving.metrics import LISTS

    def counts() -> Counter[str]:
        (metric,) = LISTS.collect()
        return Counter({one.labels["way"]: one.value for one in metric.samples if one.name.endswith("_total")})

    core, before = llm.llm_engine.engine_core, counts()
    with mock.patch.object(core, "add_request", wraps=core.add_request) as added:
        for one in requests:
            params = RankingParams(beam_width=k, max_tokens=40, **one)
            (output,) = llm.beam_search([{"prompt_token_ids": prompt_of(9)}], params)
            assert len(output.sequences) == k
    return added.call_count, dict(counts() - before)


def test_a_list_is_one_request_of_the_engine(engine):
    """Also an inline set's."""
    inline = StructuredOutputsParams(choice=["Paris", "London", "New York"])
    lists = [{"extra_args": {"item_set": "large", "width": 24}}, {"structured_outputs": inline}]
    assert engine.call(ways, lists) == (2, {"one request": 2})


def test_what_takes_rounds_says_why(engine):
    lists = [{"item_set": "prefixes", **more} for more in ({"exact": True}, ROUNDS, {"width": 161})]
    added, counted = engine.call(ways, [{"extra_args": one} for one in lists])
    assert added > 6
    assert counted == {"exact": 1, "max_passes": 1, "wider than ranked_list_beams": 1}


ENGINES = {
    "model runner V1": ("v1", {}, "VLLM_USE_V2_MODEL_RUNNER=1"),
    "the host path": ("v2", {"item_set_path": "host"}, "the line on the backend"),
    "ranked_list_beams is 0": ("v2", {"ranked_list_beams": 0}, "leave it out"),
}


@pytest.mark.parametrize("reason", ENGINES)
def test_an_engine_without_lists_says_why(engines, tiny_model, static, reason):
    runner, options, mend = ENGINES[reason]
    engine = engines(runner, tiny_model, **given(static, **options))
    added, counted = engine.call(ways, [{"extra_args": {"item_set": "prefixes"}}] * 2)
    assert counted == {reason: 2}
    assert added > 4
    line = next(one for one in engine.log().splitlines() if "Ranked lists take rounds of requests: " in one)
    assert reason in line
    assert mend in line


def test_a_cache_too_small_is_asked_once(engines, tiny_model, static):
    """The first list tells the front end."""
    small = engines("v2", tiny_model, **static, num_gpu_blocks_override=12)
    for requests in (1, 0):
        added, counted = small.call(ways, [{"extra_args": {"item_set": "one"}}], 1)
        assert counted == {"no room is kept for beams": 1}
        assert added == 2 + requests


def test_proven_and_rounds(engine):
    """As wide as the set, a list is proven; in as many rounds as the search takes."""
    for options, k in (({"item_set": "prefixes"}, 7), ({"item_set": "ragged", "width": 6}, 4)):
        ((_, *inside),) = engine.call(searched, options, k, [12])
        ((_, *rounds),) = engine.call(searched, options | ROUNDS, k, [12])
        assert inside == rounds


def test_beside_others_a_list_comes_after_them(engine):
    """Two lists at once: there are beams for both, but so slow an engine gets one. What came meanwhile goes first."""
    assert engine.call(order_of_two) == ["list", "other", "list", "other"]


def order_of_two(llm: Any) -> list[str]:
    one, order, others = EngineLists(llm.llm_engine.vllm_config), list[str](), list[asyncio.Task[None]]()

    def unfinished() -> int:
        return one.under_way + sum(not task.done() for task in others)

    async def other() -> None:
        await asyncio.sleep(0.01)
        order.append("other")

    async def a_list() -> None:
        async with one.room(ListSpec(4, 64, 1), unfinished):
            await asyncio.sleep(0.5)
            order.append("list")
            others.append(asyncio.ensure_future(other()))

    async def both() -> None:
        await asyncio.gather(a_list(), a_list())
        await asyncio.gather(*others)

    asyncio.run(both())
    return order


def test_lists_over_http(servers, tiny_model, named_sets):
    """More of them at a time than have beams: they wait, and none takes rounds. A client that leaves leaves nothing."""
    flags = ("--guided-decoding-backend", "static", "--item-set", f"large={named_sets['large'].path}")
    options = ("--additional-config", json.dumps({"ranked_list_beams": 24}))
    server = servers("v2", tiny_model, arguments=(*flags, *options))
    asked = {"model": "tiny", "use_beam_search": True, "n": 8, "width": 16, "max_tokens": 20, "item_set": "large"}

    def one(i: int) -> tuple[int, Any]:
        return server.post("/v1/completions", asked | {"prompt": prompt_of(10 + i % 3)})

    with pytest.raises(OSError, match="timed out"):
        server.post("/v1/completions", asked | {"prompt": prompt_of(200)}, timeout=0.001)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(one, range(6)))
    for status, answer in answers:
        assert status == 200, answer
        assert [choice["item"]["rank"] for choice in answer["choices"]] == list(range(1, 9))
    assert answers[0][1]["choices"] == answers[3][1]["choices"]
    lines = server.get("/metrics")[1].splitlines()
    name = "item_set:ranked_lists_total"
    counted = {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(name)}
    assert set(counted) == {"one request"}
    assert 6 <= counted["one request"] <= 7


def off(llm: Any) -> Any:
    """In the engine's process, while this is entered: logits of all tokens are computed."""
    return mock.patch.object(narrow_of(llm), "why_not", "turned off")


def narrow_of(llm: Any) -> Any:
    return runner_of(llm).prompt_logprobs_worker.static_lists._sets.narrow


def narrowly(llm: Any, name: str) -> tuple[list[Item], list[Item], int, int]:
    """In the engine's process: a list with logits of its set's tokens, the same with those of all, and the most logits
    that a row had in the first; and how many the vocabulary has."""

    def wide() -> list[Item]:
        (found,) = inside(llm, name, 9, 6, True, [21])
        return found

    model, widths = runner_of(llm).model, [0]

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        widths.append(logits.shape[1])
        return logits

    compute = model.compute_logits
    with mock.patch.object(model, "compute_logits", counted):
        narrow = wide()
    with off(llm):
        return narrow, wide(), max(widths), runner_of(llm).vocab_size


@pytest.mark.parametrize("name", ["fixed", "prefixes", "ragged"])
def test_lists_from_logits_of_their_own_tokens(engine, name):
    """No row has logits of the whole vocabulary."""
    narrow, wide, most, vocabulary = engine.call(narrowly, name)
    same(narrow, wide)
    assert most < vocabulary
    assert len(narrow) > 1


Requests = list[tuple[str | None, dict[str, Any]]]


def answered(llm: Any, requests: Requests, narrow: bool, because: str = "") -> tuple[Any, dict[str, int]]:
    """In the engine's process: tokens of answers asked for together, and how their steps were sampled. because: of
    `changed`."""
    head = narrow_of(llm)
    common = {"max_tokens": 12, "detokenize": False}
    params = [
        SamplingParams(**common | {"extra_args": name and {"item_set": name}} | words) for name, words in requests
    ]
    prompts = [{"prompt_token_ids": prompt_of(9)}] * len(params)
    before = Counter(head.steps)
    # A grammar that a thread compiles may be ready only when the other answers have ended.
    manager = llm.llm_engine.engine_core.engine_core.structured_output_manager
    compiled_first = mock.patch.object(manager, "_use_async_grammar_compilation", False)
    with compiled_first, changed(llm, because) if because else contextlib.nullcontext() if narrow else off(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs], dict(head.steps - before)


GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.3, "seed": 7}
KINDS = [
    GREEDY,
    SEEDED,
    {**SEEDED, "top_k": 3},
    {**SEEDED, "top_p": 0.8, "min_p": 0.1},
    {**SEEDED, "logit_bias": {5: 2}},
]
KINDS += [{**GREEDY, "repetition_penalty": 1.5}]


def test_answers_from_logits_of_their_own_tokens(engine):
    """Those of the full head, also with all that changes single logits, whoever is in the batch."""
    requests = [("fixed", one) for one in KINDS]
    narrow, steps = engine.call(answered, requests, True)
    assert set(steps) == {"narrow"}
    assert narrow == engine.call(answered, requests, False)[0]
    for request, alone in zip(requests[:2], narrow, strict=False):
        assert engine.call(answered, [request], True)[0] == [alone]


FULL: list[tuple[str, Requests]] = [
    ("requests without a set", [("fixed", GREEDY), (None, GREEDY)]),
    ("sets with other tokens", [("fixed", GREEDY), ("ragged", GREEDY)]),
    ("logprobs or weights", [("fixed", {**GREEDY, "logprobs": 1})]),
    ("logprobs or weights", [(None, {**GREEDY, "extra_args": {"item_set": "fixed", "return_set_weight": True}})]),
    (
        "requests on the host path",
        [
            ("fixed", GREEDY),
            (None, {**GREEDY, "structured_outputs": StructuredOutputsParams(regex="(a|b)+")}),
        ],
    ),
]


@pytest.mark.parametrize(("reason", "requests"), FULL)
def test_steps_that_need_all_logits(engine, reason, requests):
    found, steps = engine.call(answered, requests, True)
    assert reason in steps
    assert found == engine.call(answered, requests, False)[0]


def changed(llm: Any, reason: str) -> Any:
    """In the engine's process, while this is entered: a reason why an engine computes all logits holds."""
    from vllm.v1.worker.gpu.sample.batch_shard import BatchSharder

    runner, head = runner_of(llm), narrow_of(llm)
    sampler, processors = runner.sampler, runner.sampler.logits_processors
    if reason == "logits sharded by request":
        return mock.patch.object(runner, "batch_sharder", BatchSharder(8, 1, runner.device))
    if reason == "other logits processors":
        return mock.patch.object(sampler, "logits_processors", [*processors, processors[2]])
    if reason == "an alphabet too large":
        return mock.patch.object(head, "_share_of_answers", 8)
    if reason == "rows of the head that lie apart":
        return mock.patch.object(head, "copies", False)
    return mock.patch.multiple(head, _memory=head._memory[:64], _alphabets={})


CHANGED = ["logits sharded by request", "other logits processors", "an alphabet too large"]
CHANGED += ["item_set_head_memory has no room", "rows of the head that lie apart"]


@pytest.mark.parametrize("reason", CHANGED)
def test_engines_that_need_all_logits(engine, reason):
    """An alphabet of a quarter of the vocabulary is too large if nobody has said `on`."""
    requests = [("fixed", one) for one in KINDS[:2]]
    found, steps = engine.call(answered, requests, True, reason)
    assert set(steps) == {reason}
    assert found == engine.call(answered, requests, True)[0]


def tried(llm: Any) -> dict[str, str | None]:
    """In the engine's process: what the trial says of other heads and models."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Quantised(UnquantizedEmbeddingMethod):
        pass

    runner, narrow = runner_of(llm), narrow_of(llm)
    model, head, compute = runner.model, narrow._head, runner.model.compute_logits

    def penalised(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[:, 100:] -= 1
        return logits

    def indexed(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[:, 500] = 0
        return logits

    ways = {
        "as it is": contextlib.nullcontext(),
        "quantised": mock.patch.object(head, "quant_method", Quantised()),
        "added": mock.patch.object(head, "num_added_embeddings", 2),
        "LoRA": mock.patch.object(runner, "lora_config", object()),
        "no head": mock.patch.object(model, "compute_logits", lambda hidden: hidden @ head.weight.T),
        "penalised": mock.patch.object(model, "compute_logits", penalised),
        "indexed": mock.patch.object(model, "compute_logits", indexed),
        "no memory": mock.patch.object(narrow, "_memory", narrow._memory[:64]),
    }
    found = {}
    for name, way in ways.items():
        with way, mock.patch.multiple(narrow, _runner=None, _head=None, _alphabets={}, why_not=None):
            narrow.attach(runner)
            found[name] = narrow.why_not
    return found


def test_models_that_need_all_logits(engine):
    engine.call(answered, [("fixed", GREEDY)], True)
    found = engine.call(tried)
    assert found.pop("indexed").startswith("a first product failed: IndexError")
    assert found == {
        "as it is": None,
        "quantised": "the head is quantised",
        "added": "tokens were added to the head",
        "LoRA": "LoRA adapters may change the head",
        "no head": "the model's logits are not the product of one head",
        "penalised": "the model changes some tokens' logits",
        "no memory": "item_set_head_memory is too small",
    }


def other_weights(llm: Any) -> tuple[bool, bool]:
    """In the engine's process: whether an alphabet's logits are those of the head, once this has changed; and whether
    one without room is omitted."""
    head = narrow_of(llm)
    key = np.arange(3, 300, 7).tobytes()
    hidden = torch.ones(2, runner_of(llm).model_config.get_hidden_size())
    weight = head._head.weight
    with torch.inference_mode():
        before = weight.clone()
        head.logits(hidden, head.alphabet(key))
        weight.mul_(2)
        head.refresh()
        alphabet = head.alphabet(key)
        same = torch.allclose(head.logits(hidden, alphabet), hidden @ weight[alphabet.tokens].T, atol=1e-5)
        weight.copy_(before)
        head.refresh()
    with mock.patch.object(head, "_memory", head._memory[:64]):
        return same, head.alphabet(key) is None


def test_rows_of_the_head_follow_its_weights(engine):
    assert engine.call(other_weights) == (True, True)


def in_ranges(llm: Any) -> list[int]:
    """In the engine's process: of some alphabets the bytes of the head's rows that are copied, or read where they lie,
    and the columns of a level's tokens."""
    from vllm_static.worker.narrow_head import _between

    head, found = narrow_of(llm), list[int]()
    hidden = torch.ones(2, runner_of(llm).model_config.get_hidden_size())
    for tokens in ([1, *range(100, 300)], [*range(2, 300, 2)]):
        with mock.patch.object(head, "_alphabets", {}), torch.inference_mode():
            alphabet = head.alphabet(np.array(tokens).tobytes())
            part = _between(150, 199, alphabet)
            found += [0 if alphabet.gathered is None else alphabet.gathered.nbytes, part.tokens.numel()]
            torch.testing.assert_close(head.logits(hidden, part), hidden @ head._head.weight[part.tokens].T)
            torch.testing.assert_close(part.columns[part.tokens], torch.arange(len(part.tokens), dtype=torch.int32))
            assert _between(900, 901, alphabet) is alphabet
    return found


def test_rows_that_lie_together_are_not_copied(engine):
    """Nor are those of a level."""
    assert engine.call(in_ranges) == [0, 50, 149 * 128 * 4, 25]


def test_lists_after_prompts_that_a_connector_has_loaded(engines, engine, tiny_model, static, tmp_path):
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    options = given(static, ranked_list_beams=160)
    other = engines("v2", tiny_model, **options, **ROOMY, kv_transfer_config=connector)
    first, again, tokens, saved = other.call(loaded, "ragged", 150)
    assert (tokens >= 128, saved) == (True, 2)  # the model's layers, with the prompt's step, and not with the passes
    for items in (first, again):
        same(items, engine.call(inside, "ragged", 4, 3, False, [150])[0])


def beside_drafts(llm: Any, rows: int | None) -> tuple[list[Item], list[float], list[tuple[int, ...]]]:
    """A list that is made beside other requests, `rows` rows a step; how many drafts were accepted of these without a
    list and with one; and their answers, twice."""
    others: Any = [{"prompt_token_ids": prompt_of(length)} for length in (9, 40)]
    plain = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, detokenize=False)
    accepted, answers = [metrics(llm)["vllm:spec_decode_num_accepted_tokens"]], list[tuple[int, ...]]()
    share = runner_of(llm).prompt_logprobs_worker.static_lists.share
    for more in ([], [{"prompt_token_ids": prompt_of(20)}]):
        with mock.patch.multiple(share, rows=rows or share.rows, timed=rows is None), fixed_shapes(llm):
            given = [plain, plain, asked("fixed", 8, 8, renormalised=False)][: 2 + len(more)]
            outputs = llm.generate([*others, *more], given, use_tqdm=False)
        answers += [tuple(one.outputs[0].token_ids) for one in outputs[:2]]
        accepted.append(metrics(llm)["vllm:spec_decode_num_accepted_tokens"])
    return items_of(outputs[2]), np.diff(accepted).tolist(), answers


@pytest.mark.parametrize("rows", [10_000, 8, None])
def test_lists_beside_drafts(engines, engine, tiny_model, static, rows):
    """A draft model that is the model itself: of tokens or slots that a pass has left in its buffers it would make
    drafts that are refused. Over several steps a list's request has drafts of its own."""
    config = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 3}
    options = given(static, ranked_list_beams=160)
    other = engines("v2", tiny_model, **options, **ROOMY, speculative_config=config, disable_log_stats=False)
    items, (alone, accepted), answers = other.call(beside_drafts, rows)
    same(items, engine.call(as_accelerators, "fixed", 8, 8, False, [20])[0])
    assert answers[:2] == answers[2:]
    assert alone > 30
    assert accepted == alone if rows == 10_000 else accepted >= alone


def after_embeddings(llm: Any, length: int) -> list[Any]:
    """A list after a prompt's own embeddings, by `beam_search` and by `generate`; one that takes rounds is refused."""
    weights = runner_of(llm).model.model.embed_tokens.weight
    prompt: Any = {"prompt_embeds": weights[prompt_of(length)].clone()}
    (found,) = llm.beam_search([prompt], RankingParams(beam_width=3, width=4, max_tokens=12, item_set="fixed"))
    searched = [(tuple(one.tokens[:-1]), one.cum_logprob) for one in found.sequences]
    asking = SamplingParams(n=3, max_tokens=12, extra_args={"item_set": "fixed", "list": True, "width": 4})
    (output,) = llm.generate([prompt], asking, use_tqdm=False)
    generated = [(tuple(one.token_ids[:-1]), one.cumulative_logprob) for one in output.outputs]
    with pytest.raises(VLLMValidationError, match="send a prompt of tokens"):
        llm.beam_search([prompt], RankingParams(beam_width=3, max_tokens=12, item_set="fixed", **ROUNDS))
    return [searched, generated, found.rounds]


def test_lists_after_prompt_embeddings(engines, engine, tiny_model, static):
    other = engines("v2", tiny_model, **given(static, ranked_list_beams=160), **ROOMY, enable_prompt_embeds=True)
    searched, generated, _ = other.call(after_embeddings, 20)
    expected = engine.call(by_rounds, "fixed", 4, 3, False, 20)
    for items in (searched, generated, other.call(inside, "fixed", 4, 3, False, [20])[0]):
        same(items, expected)
