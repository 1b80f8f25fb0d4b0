"""The device path inside the real V2 engine: what it leaves out, what it composes with, and that it samples exactly."""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from draft_tests import check_same, greedy
from engine_tests import check_answers
from engine_words import asked
from engines import force_asynchronous_scheduling
from sets import tagged_items, tagged_keys
from test_vllm_engine import CITIES, EOS, answer, inline, named, on_path, sampled
from vllm import SamplingParams

import itemset
from itemset.masking.batch import LOCAL
from itemset.serving.wire import EngineRequest, SetRef, read
from itemset.trie.walk import FREE, STATE_BITS

PARSER = Path(__file__).parent / "tiny_reasoning.py"


@pytest.fixture(scope="module")
def device(static):
    """Arguments of an engine on the device path, its kernels in torch: the interpreter is slow."""
    return on_path(static, "device", "numba")


@pytest.fixture(scope="module")
def host(static):
    return on_path(static, "host")


def processor_of(llm: Any) -> Any:
    from vllm_static.compat import item_sets

    return item_sets(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)


def plan_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.static_backend._device.plan


def test_the_same_answers_as_on_the_host_path(engines, tiny_model, device, host, named_sets):
    words = [*greedy([*named_sets]), *(asked(name, seed=5) for name in named_sets)]
    ours, theirs = (engines("v2", tiny_model, **path) for path in (device, host))
    check_same(ours, theirs, [f"prompt {i}" for i in range(len(words))], words)


def count_calls(llm: Any) -> None:
    """Count, from now on, what a grammar costs a step: bitmasks, their copies, and samplings that had to wait."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    counts = llm.counts = Counter()

    def counting(owner: type, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if what != "waits" or result.pending_structured_output_tokens:
                counts[what] += 1
            return result

        setattr(owner, name, counted)

    counting(StructuredOutputManager, "grammar_bitmask", "bitmasks")
    counting(StructuredOutputsWorker, "apply_grammar_bitmask", "bitmask copies")
    counting(AsyncScheduler, "schedule", "waits")
    counting(AsyncScheduler, "update_from_output", "steps")


@pytest.mark.parametrize("path", ["device", "host"])
def test_no_bitmask_and_no_waiting(engines, tiny_model, device, host, named_sets, path):
    """With asynchronous scheduling the host path makes every batch wait for the tokens before it; the device path
    makes none wait."""
    config = {"device": device, "host": host}[path]
    engine = engines("v2", tiny_model, prepare=force_asynchronous_scheduling, async_scheduling=True, **config)
    engine.call(count_calls)
    outputs = engine.generate(["p"] * 6, [named("fixed")] * 4 + [SamplingParams(max_tokens=5)] * 2)
    assert {answer(output) for output in outputs[:4]} <= named_sets["fixed"].items
    counts = engine.call(lambda llm: dict(llm.counts))
    engine.close()  # its classes are patched
    assert counts.pop("steps") >= 5
    if path == "device":
        assert counts == {}
    else:
        assert min(counts[what] for what in ("bitmasks", "bitmask copies", "waits")) >= 3


SPECULATIVE = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def test_asynchronous_scheduling_with_drafts(engines, tiny_model, device, named_sets):
    engine = engines(
        "v2",
        tiny_model,
        prepare=force_asynchronous_scheduling,
        async_scheduling=True,
        speculative_config=SPECULATIVE,
        **device,
    )
    items = sorted(named_sets["fixed"].items)[:8]
    prompts = [{"prompt_token_ids": [t for item in items for t in item] * 3 + [items[i][0]]} for i in range(8)]
    for temperature in (0, 1):
        outputs = engine.generate(prompts, named("fixed", temperature=temperature))
        assert {answer(output) for output in outputs} <= named_sets["fixed"].items


def test_what_apply_does_is_launching_kernels(engines, tiny_model, static):
    """So a CUDA graph could hold it: at most two launches, whatever the batch, and no torch operation between."""
    engine = engines("v2", tiny_model, **on_path(static, "device"))
    assert engine.call(apply_under_guard) == {"nobody": 0, "one of three": 1, "all, with drafts": 1}


def apply_under_guard(llm: Any) -> dict[str, int]:
    from test_kernels import Launches, OnlyKernels
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    from itemset.masking import triton_kernels

    processor = processor_of(llm)
    launched: list[Any] = []
    for name in ("_walk_kernel", "_mask_kernel"):
        setattr(triton_kernels, name, Launches(getattr(triton_kernels, name), launched))
    root = processor.arena.plan.residents[0].number
    counts = {}
    for what, slots, above, constrained in (
        ("nobody", [0, 1], [0, 0], []),
        ("one of three", [0, 1, 2], [0, 0, 0], [1]),
        ("all, with drafts", [0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2], [0, 1, 2]),
    ):
        processor._numbers[:] = -1
        for slot in constrained:
            processor._numbers[slot] = root
            processor._staged[slot] = [0, root, -1, EOS, *[-1] * 127]
        processor.apply_staged_writes()
        rows = torch.tensor(slots)
        context = LogitsContext(
            expanded_idx_mapping=rows,
            idx_mapping=rows.unique(),
            idx_mapping_np=np.unique(slots),
            expanded_local_pos=torch.tensor(above, dtype=torch.int32),
            input_ids=torch.full((len(slots),), 100, dtype=torch.int32),
            pos=rows,
            seq_lens_upper_bound_np=np.zeros(3, np.int32),
        )
        logits = torch.zeros(len(slots), 2112)
        launched.clear()
        with OnlyKernels():
            processor.apply(logits, context)
        counts[what] = len(launched)
        masked = logits.isneginf().any(1)
        assert masked[[slot in constrained and above[i] == 0 for i, slot in enumerate(slots)]].all()
        assert not masked[[slot not in constrained for slot in slots]].any()
    processor._numbers[:] = -1
    return counts


def test_no_copy_of_the_logits_is_made_for_a_set(engines, tiny_model, device):
    """vLLM copies the whole batch's to float32 if a processor asks to change one request's."""
    engine = engines("v2", tiny_model, **device)
    everybody = [named("ragged"), named("fixed", temperature=0), inline(CITIES), SamplingParams(max_tokens=5)]
    steps, copies = engine.call(copies_of_logits, everybody)
    assert (steps > 4, copies) == (True, 0)
    # Where a request asks for what takes a copy in any case, the mask is in that one.
    outputs = engine.generate(["p"] * 3, [named("fixed", logprobs=1), named("fixed", temperature=0.5), named("fixed")])
    assert len({answer(output) for output in outputs}) > 1
    for more in ({"logprobs": 1}, {"temperature": 0.5}, {"logit_bias": {300: 1.0}}):
        steps, copies = engine.call(copies_of_logits, [named("one", **more)])
        assert copies == steps >= 2


def copies_of_logits(llm: Any, params: list[SamplingParams]) -> tuple[int, int]:
    """In the engine's process: how many steps are sampled, and how many of them from other memory than the model's."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    seen, original = [], Sampler.apply_sampling_params

    def watched(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        processed = original(self, logits, *args, **kwargs)
        seen.append(processed.data_ptr() != logits.data_ptr())
        return processed

    with mock.patch.object(Sampler, "apply_sampling_params", watched):
        llm.generate(["p"] * len(params), params, use_tqdm=False)
    return len(seen), sum(seen)


def test_logits_of_16_bits_are_masked_in_place(engines, tiny_model, device):
    """And stay where somebody reads them as they were. What is sampled from has the model's dtype in both cases."""
    engine = engines("v2", tiny_model, **device)
    assert engine.call(mask_16_bits) == [(True, True), (False, True)] * 2


def mask_16_bits(llm: Any) -> list[tuple[bool, bool]]:
    """In the engine's process, for each dtype, without and with log-probabilities: whether the logits were changed, and
    whether what is sampled from is what a copy in float32 would be."""
    processor = processor_of(llm)
    sampler = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.sampler
    root = processor.arena.plan.residents[0].number
    processor._numbers[:2], processor._staged[1] = (-1, root), [0, root, -1, EOS, *[-1] * 127]
    processor.apply_staged_writes()
    zeros, rows = torch.zeros(2, dtype=torch.int32), torch.arange(2)
    processing, wanted = sampler.needs_logits_processing.copy(), sampler.sampling_states.num_logprobs.copy()
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for logprobs in (-1, 0):
            sampler.needs_logits_processing[:2], sampler.sampling_states.num_logprobs[:2] = False, logprobs
            logits = torch.randn(2, 2176).to(dtype)[:, :2112]  # as a model's padded head gives them
            before, expected = logits.clone(), logits.float()
            sampled = sampler.apply_sampling_params(
                logits, rows, rows, rows.numpy(), rows, zeros, zeros, np.zeros(2, np.int32), skip_top_k_top_p=True
            )
            processor.mask_rows(expected, rows, rows.numpy(), above=zeros, tokens=zeros, positions=rows)
            assert expected.isneginf().any(1).tolist() == [False, True]
            found.append((not torch.equal(logits, before), sampled.dtype == dtype and torch.equal(sampled, expected)))
    sampler.needs_logits_processing[:], sampler.sampling_states.num_logprobs[:] = processing, wanted
    processor._numbers[:] = -1
    return found


def test_nothing_is_compiled_while_serving(engines, tiny_model, static, named_sets):
    """On a GPU, each form of a kernel that is launched first by a request would make it wait for the compiler."""
    forced = {"method": "ngram_gpu", "num_speculative_tokens": 7, "prompt_lookup_max": 4}
    engine = engines("v2", tiny_model, **on_path(static, "device"), speculative_config=forced)
    known = engine.call(forms_at_the_start)
    assert known >= 3
    params = [named(name) for name in named_sets] + [inline(CITIES), SamplingParams(max_tokens=5)]
    for count in (1, 3, len(params)):
        engine.generate([f"prompt {i}" for i in range(count)], params[-count:])
    assert engine.call(lambda llm: len(llm.forms)) == known


def forms_at_the_start(llm: Any) -> int:
    from specialisations import Recorded

    from itemset.masking import triton_kernels

    llm.forms = set()
    for name in ("_walk_kernel", "_mask_kernel", "_forced_kernel", "_advance_kernel"):
        setattr(triton_kernels, name, Recorded(getattr(triton_kernels, name), llm.forms))
    config = llm.llm_engine.vllm_config
    processor_of(llm)._warm_up(config.model_config, config.speculative_config.num_speculative_tokens)
    return len(llm.forms)


def test_a_full_arena_sends_requests_to_the_host_path(engines, tiny_model, device, named_sets):
    config = device | {"additional_config": device["additional_config"] | {"inline_set_memory": 5_000}}
    engine = engines("v2", tiny_model, **config)
    lists = [CITIES, [str(n) for n in range(200)], ["left", "right"], [f"{n} miles" for n in range(300)]]
    for round_ in range(2):
        outputs = engine.generate(["p"] * 8, [inline(lists[i % 4]) for i in range(8)])
        for i, output in enumerate(outputs):
            assert output.outputs[0].text in lists[i % 4], round_
    assert "takes the host path: the arena is full" in engine.log()
    users = engine.call(lambda llm: [resident.users for resident in plan_of(llm).residents])
    assert users == [1] * len(named_sets) + [0] * (len(users) - len(named_sets))


def test_inline_sets_come_and_go(engines, tiny_model, device):
    """More of them than the arena holds at once, so that their places are reused."""
    config = device | {"additional_config": device["additional_config"] | {"inline_set_memory": 12_000}}
    engine = engines("v2", tiny_model, **config)
    lists = [[f"{word} {n}" for n in range(40)] for word in ("red", "green", "blue", "black", "white", "grey")]
    engine.call(watch_reads)
    for i in range(6):
        outputs = engine.generate(["p"] * 4, [inline(lists[(i + k) % 6]) for k in range(2)] + [inline(lists[i])] * 2)
        for k, output in enumerate(outputs):
            assert output.outputs[0].text in lists[(i + k) % 6 if k < 2 else i]
    read, unnamed = engine.call(reads)
    assert (read > 100, unnamed) == (True, 0)


def test_an_index_goes_to_the_worker_once(engines, tiny_model, device):
    """Again only after other sets have taken its place."""
    config = device | {"additional_config": device["additional_config"] | {"inline_set_memory": 6_000}}
    engine = engines("v2", tiny_model, **config)
    lists = [
        [f"{word} {n}" for n in range(40)]
        for word in ("plain", "spotted", "striped", "checked", "dotted", "faded", "painted", "woven")
    ]
    engine.call(watch_indexes)

    def sent(asked: list[list[str]]) -> int:
        before = engine.call(indexes)
        for output, texts in zip(engine.generate(["p"] * len(asked), list(map(inline, asked))), asked, strict=True):
            assert output.outputs[0].text in texts
        return engine.call(indexes) - before

    assert [sent(lists[:1] * 4), sent(lists[:1] * 4), sent(lists[:2] * 2)] == [1, 0, 1]
    assert sent(lists[2:]) == 6
    assert sent(lists[:1] * 2) == 1


def test_the_bits_of_a_filter_go_to_the_worker_once(engines, tiny_model, device):
    """Whatever is left out beside it; and an engine that has forgotten them makes them again."""
    engine = engines("v2", tiny_model, **device)
    engine.call(watch_indexes)

    def sent(**words: Any) -> tuple[int, int]:
        before = engine.call(indexes), engine.call(filters)
        extra = {"item_set": "tagged", "item_filter": {"tag": 2}, **words}
        left = {tuple(item) for i, item in enumerate(tagged_items()) if i % 3 == 2}
        left -= {tuple(tagged_items()[tagged_keys().index(key)]) for key in words.get("exclude_keys", ())}
        for output in engine.generate(["p"] * 3, [named("tagged", extra_args=extra)] * 3):
            assert answer(output) in left
        return engine.call(indexes) - before[0], engine.call(filters) - before[1]

    keys = tagged_keys()[2::3]
    assert [sent(exclude_keys=keys[:4]), sent(exclude_keys=keys[4:9]), sent()] == [(1, 1), (1, 0), (0, 0)]
    engine.call(forget_what_came)
    assert [sent(exclude_keys=keys[9:12]), sent(exclude_keys=keys[:4])] == [(1, 0), (0, 0)]


def forget_what_came(llm: Any) -> None:
    """Let the engine core forget all sets that came with requests."""
    llm.llm_engine.engine_core.engine_core.static_backend._catalogue._inline.clear()
    gc.collect()


def watch_indexes(llm: Any) -> None:
    processor = processor_of(llm)
    processor.indexes, processor.filters, add_request = 0, 0, processor.add_request

    def watched(req_idx: int, sampling_params: Any) -> bool:
        ref = (read(sampling_params.extra_args) or EngineRequest()).item_set or SetRef("")
        processor.indexes += ref.index is not None
        processor.filters += ref.base is not None
        return add_request(req_idx, sampling_params)

    processor.add_request = watched


def indexes(llm: Any) -> int:
    return processor_of(llm).indexes


def filters(llm: Any) -> int:
    return processor_of(llm).filters


def watch_reads(llm: Any) -> None:
    """Note, from now on, the sets that steps read, and those that they have not named to the arena before. On a GPU
    such a step could be ahead of the copy of its set."""
    processor = processor_of(llm)
    use, step = processor.arena.use, processor._slots.step
    processor.named, processor.reads = set(), []

    def named_use(numbers: Any, *, begins: bool = True) -> None:
        processor.named = set(np.asarray(numbers).tolist()) | (set() if begins else processor.named)
        use(numbers, begins=begins)

    def watched_step(batch: Any, *args: Any, **kwargs: Any) -> None:
        step(batch, *args, **kwargs)
        states = processor._slots.row_states[: len(batch.slots)]
        sets = (states[states & LOCAL != FREE] >> STATE_BITS).tolist()
        processor.reads += [number in processor.named for number in sets]

    processor.arena.use, processor._slots.step = named_use, watched_step


def reads(llm: Any) -> tuple[int, int]:
    """How many sets steps have read, and how many of them unnamed."""
    found = processor_of(llm).reads
    return len(found), found.count(False)


def test_a_slot_forgets_its_set(engines, tiny_model, device):
    engine = engines("v2", tiny_model, **device)
    plain = SamplingParams(max_tokens=6, seed=1)
    before = [output.outputs[0].token_ids for output in engine.generate(["p"] * 8, plain)]
    engine.generate(["p"] * 8, named("one"))
    assert [output.outputs[0].token_ids for output in engine.generate(["p"] * 8, plain)] == before


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.3, "min_p": 0.2},
        {"top_k": 2, "top_p": 0.8},
        {"top_p": 0.8},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1.9},
        {"logit_bias": {5: 100, 700: -100, 1: -100}},
        {"min_tokens": 1, "ignore_eos": True},
    ],
    ids=lambda parameters: "-".join(parameters),
)
def test_sampling_parameters_let_no_illegal_token_in(engines, tiny_model, device, named_sets, parameters):
    engine = engines("v2", tiny_model, **device)
    for name in ("prefixes", "ragged"):
        for output in engine.generate(["p"] * 8, named(name, **parameters)):
            item = tuple(itertools.takewhile(lambda token: token != EOS, output.outputs[0].token_ids))
            assert item in named_sets[name].items
            assert set(output.outputs[0].token_ids[len(item) :]) == {EOS}


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_modes(engines, tiny_model, device, mode):
    """Raw ones are the model's, over the whole vocabulary; processed ones are taken after the mask."""
    engine = engines("v2", tiny_model, logprobs_mode=mode, max_logprobs=2112, **device)
    (output,) = engine.generate(["p"], named("one", temperature=1, logprobs=2112))
    first = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
    finite = [token for token, value in first.items() if math.isfinite(value)]
    if mode.startswith("raw"):
        assert len(finite) == 2112
        total = sum(map(math.exp, first.values()))
        assert (abs(total - 1) < 1e-3) == (mode == "raw_logprobs")
    else:
        assert finite == [300]
        assert (first[300] == 0) == (mode == "processed_logprobs")
    engine.close()


REASONING = {"reasoning_parser": "tiny", "reasoning_parser_plugin": str(PARSER)}


@pytest.mark.parametrize("path", ["device", "host"])
def test_the_set_begins_behind_the_reasoning(engines, tiny_model, device, host, named_sets, path):
    config = {"device": device, "host": host}[path]
    engine = engines("v2", tiny_model, **(config | {"structured_outputs_config": {"backend": "static"} | REASONING}))
    begin, end = engine.call(lambda llm: [llm.get_tokenizer().get_vocab()[word] for word in ("letter", "station")])
    params, fixed = named("fixed", logit_bias={end: 6}, max_tokens=200), itemset.load(named_sets["fixed"].path)
    thoughts = 0
    opened = [{"prompt_token_ids": [200 + i, end, begin, 300][: 3 + i % 2]} for i in range(8)]
    for i, output in enumerate(engine.generate(opened, params)):
        tokens = list(output.outputs[0].token_ids)
        if end not in tokens:
            assert output.outputs[0].finish_reason == "length" or tokens[-1] == EOS, i
            assert output.outputs[0].item is None
            continue
        first = tokens.index(end) + 1
        thoughts += first > 1
        assert tuple(tokens[first:-1]) in named_sets["fixed"].items
        assert output.outputs[0].item == {"key": fixed.lookup([tokens[first:-1]])[0]}
    assert thoughts >= 3
    assert path == "host" or "constraints that begin later" in engine.call(sampled)
    # Where the prompt opens no thought, or has ended it, the set holds from the first token on.
    closed = [{"prompt_token_ids": ids} for ids in ([50, end], [50], [begin, 300, end, 7], [300, 301])]
    for output in engine.generate(closed, params):
        assert output.outputs[0].item == {"key": fixed.lookup([answer(output)])[0]}


def test_the_log_names_the_path_and_its_reason(engines, tiny_model, device, host):
    assert "static, device path, masks inside the sampler. Item sets: " in engines("v2", tiny_model, **device).log()
    assert "static, host path: as configured. Item sets: " in engines("v2", tiny_model, **host).log()
    assert "bytes, of which the registered sets take" in engines("v2", tiny_model, **device).log()


def test_the_device_path_where_it_cannot_be(engines, tiny_model, device):
    with pytest.raises(ValueError, match="item_set_path is device, but vLLM uses model runner V1"):
        engines("v1", tiny_model, **device)


def test_verification_that_looks_at_no_mask_is_refused(engines, tiny_model, device):
    config = {**SPECULATIVE, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5, 0.5]}
    with pytest.raises(ValueError, match="rejection_sample_method=synthetic accepts drafts without looking"):
        engines("v2", tiny_model, speculative_config=config, **device)


def test_vllm_s_front_end_in_rust_is_refused(engines, tiny_model, device):
    with pytest.raises(ValueError, match="VLLM_USE_RUST_FRONTEND=1 serves without our front end"):
        engines("v2", tiny_model, env={"VLLM_USE_RUST_FRONTEND": "1"}, **device)


BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a core a rank


def test_two_ranks_sample_the_same(engines, tiny_model, device, named_sets):
    """Tensor parallelism: every rank has an arena and samples all rows; where they differed, the ranks would hang or
    answer garbage."""
    engine = engines("v2", tiny_model, tensor_parallel_size=2, distributed_executor_backend="mp", env=BIND, **device)
    check_answers(engine, named_sets, 16)
    assert engine.log().count("bytes, of which the registered sets take") == 2
    engine.close()
