"""Speculation in the real SGLang engine: draft trees are verified inside the set, and change no answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from asking import answer, named, prompts
from draft_tests import check_distribution, check_same, check_sampled, greedy, repeating, saved
from engine_words import Answer
from models import cached_tiny_llama
from samples import FEW, SAMPLES, exact
from sets import FIRST, LAST
from sglang_engines import NGRAM, draft_model
from torch.utils._python_dispatch import TorchDispatchMode

import itemset
from itemset.masking import triton_kernels
from itemset.masking.slots import MAX_STOP_TOKENS, Slots
from itemset.serving.config import StaticConfig
from sglang_static.scheduler import masks
from sglang_static.scheduler.drafts import MASKED, _Drafting
from sglang_static.scheduler.masks import ItemSetSampler, parents_of

COMPILES = "a GPU would compile"  # cpu/interpreted_triton.py


@pytest.fixture(scope="session")
def speculation():
    """The arguments of an engine that speculates: by n-grams, by a draft model in chains, or by one in trees."""
    draft = cached_tiny_llama(seed=1)
    return {"plain": {}, "ngram": NGRAM, "chain": draft_model(draft), "tree": draft_model(draft, topk=2)}


@pytest.mark.parametrize("overlap", ["0", "1"], ids=["synchronous", "overlapping"])
@pytest.mark.parametrize("kind", ["ngram", "chain", "tree"])
def test_answers_are_those_without_speculation(static, path, named_sets, speculation, kind, overlap):
    kernels, count = ("triton", 2) if (path, overlap) == ("device", "1") else ("numba", 4)  # the interpreter is slow
    asking, words = repeating(named_sets, count)
    words += [*greedy(["one"]), {"regex": "[0-9]{3}", "temperature": 0}]
    asking += prompts(4)
    plain = static(path)
    engine = static(path, env={"TESTS_SGLANG_OVERLAP": overlap}, item_set_kernels=kernels, **speculation[kind])
    compiled = engine.log().count(COMPILES)
    first = engine.ask(asking, words)
    answers = check_same(engine, plain, asking, words)  # now the n-grams of the first answers propose them
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in first]
    if kernels == "triton":
        assert engine.log().count(COMPILES) == compiled > 0  # all at the start
    check_verified(answers, kind == "ngram" or path == "device")
    check_sampled(engine, named_sets, [*named_sets] * 2)
    assert "sets were read UNNAMED" not in engine.log()  # cpu/sitecustomize.py


def verifications(outputs: list[dict]) -> int:
    """Steps that verified drafts, summed over the requests."""
    return sum(output["meta_info"].get("spec_verify_ct", 0) for output in outputs)


def check_verified(answers: list[Answer], accepted: bool) -> None:
    """Fewer steps than tokens if drafts are accepted; a random model's are hardly ever legal if they are not masked."""
    steps = sum(answer.said.get("spec_verify_ct", 0) for answer in answers)
    assert 0 < steps <= sum(len(answer.tokens) - 1 for answer in answers) - accepted


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_drafts_of_a_model_are_masked(static, speculation, kind):
    """Only one token may follow in most states of this set: a masked draft model, random as it is, always finds it."""
    names = ["one", "ragged", "fixed"] * 4
    params = [named(name, temperature=0) for name in names]
    outputs = static("device", **speculation[kind]).generate(input_ids=prompts(12), sampling_params=params)
    assert verifications([output for name, output in zip(names, outputs, strict=True) if name == "one"]) == 4 * 2
    on_host = static("host", **speculation[kind]).generate(input_ids=prompts(12), sampling_params=params)
    assert verifications(outputs) < verifications(on_host) / 1.5


@pytest.mark.parametrize("overlap", ["0", "1"], ids=["synchronous", "overlapping"])
def test_forced_drafts_take_three_steps_an_item(engines, tiny_model, tmp_path, overlap):
    """Codes of 8 tokens, most of which stand alone after two of them. Without drafts an item takes 9 steps, of which
    the first verifies nothing."""
    codes = np.random.default_rng(0).integers(FIRST, LAST, (5_000, 8))
    itemset.build(codes).save(tmp_path / "codes.itemset")
    words = [named("codes", temperature=0)] * 12 + [named("codes")] * 12 + [{"max_new_tokens": 8, "temperature": 0}]
    answers, steps = [], {}
    for forced in (True, False):
        engine = engines(
            tiny_model,
            grammar_backend="static",
            item_sets={"codes": str(tmp_path / "codes.itemset")},
            item_set_path="device",
            forced_drafts=forced,
            env={"TESTS_SGLANG_OVERLAP": overlap},
            **NGRAM | {"speculative_num_draft_tokens": 8},
        )
        outputs = engine.generate(input_ids=prompts(25), sampling_params=words)
        assert {answer(output) for output in outputs[:24]} <= set(map(tuple, codes.tolist()))
        answers.append([output["output_ids"] for output in [*outputs[:12], outputs[24]]])
        steps[forced] = verifications(outputs[:24]) / 24
        assert ("not masked by item sets (they come from a table of n-grams)" in engine.log()) != forced
        assert "sets were read UNNAMED" not in engine.log()  # cpu/sitecustomize.py
    assert answers[0] == answers[1]
    assert 1 <= steps[True] <= 2.2 < 6 < steps[False]


def test_nothing_is_forced_before_the_end_of_a_thought(static, named_sets):
    engine = static("device", reasoning_parser="tiny", **NGRAM)
    (end,) = engine.call(lambda engine: engine.tokenizer_manager.tokenizer.encode("station"))[-1:]
    asked = [named("fixed", max_new_tokens=150, logit_bias={str(end): 6.0})] * 12
    outputs = engine.generate(input_ids=prompts(12), sampling_params=asked, require_reasoning=True)
    ended = [tokens for tokens in (output["output_ids"] for output in outputs) if end in tokens]
    assert len(ended) >= 3
    for tokens in ended:
        assert tuple(tokens[tokens.index(end) + 1 : -1]) in named_sets["fixed"].items


@pytest.mark.parametrize("kind", ["plain", "ngram", "chain", "tree"])
def test_speculation_leaves_the_distribution_exact(engines, odd_model, tmp_path, path, kind):
    draft = cached_tiny_llama(vocab_size=1013, seed=1)
    speculation = {"ngram": NGRAM, "chain": draft_model(draft), "tree": draft_model(draft, topk=2)}.get(kind, {})
    engine = engines(
        odd_model,
        grammar_backend="static",
        item_sets=saved(tmp_path, FEW),
        item_set_path=path,
        max_running_requests=64,
        env={"TESTS_SGLANG_OVERLAP": "1"},
        timeout=120 + SAMPLES / 10,
        **speculation,
    )
    answers = check_distribution(engine, exact(FEW, engine.logits), FEW)
    if kind == "ngram" or (kind != "plain" and path == "device"):
        check_verified(answers, True)


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


VOCABULARY, DRAFTS = 64, 4


@pytest.fixture
def sampler_of(monkeypatch):
    """An engine's sampler of item sets, without an engine: of four slots, in each of which a request has begun."""
    monkeypatch.setattr(masks, "_current", [])

    def make(items: list[list[int]], kernels: str = "numba") -> ItemSetSampler:
        sampler = ItemSetSampler(StaticConfig(inline_set_memory=1 << 20, item_set_kernels=kernels), "cpu", VOCABULARY)
        sampler.allocate(5, DRAFTS)
        number = sampler.arena.acquire(itemset.build(items))
        sampler.slots.assign(torch.arange(1, 5), torch.tensor([number, number, -1, number]), marks_of(4))
        return sampler

    return make


def marks_of(requests: int) -> torch.Tensor:
    """Of requests whose one stop token is the vocabulary's last."""
    marks = torch.full((requests, 1 + MAX_STOP_TOKENS), -1)
    marks[:, 1] = VOCABULARY - 1
    return marks


def verification(slots: list[int], tokens: list[list[int]], *, committed: int, topk: int) -> tuple[Any, Any]:
    """SGLang's input of a verification, and its batch. tokens: each request's last committed one and its drafts."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    batch = ScheduleBatch(reqs=[], device="cpu")
    batch.req_pool_indices = torch.tensor(slots)
    batch.seq_lens = torch.full((len(slots),), committed)
    nodes = len(tokens[0])
    chain = torch.tensor([*range(1, nodes), -1]).repeat(len(slots), 1)
    verify = EagleVerifyInput(
        draft_token=torch.tensor(tokens).flatten(),
        custom_mask=None,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=chain,
        retrieve_next_sibling=torch.full_like(chain, -1),
        retrieve_cum_len=None,
        spec_steps=nodes - 1,
        topk=topk,
        draft_token_num=nodes,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
    return verify, batch


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_is_verified_like_a_tree(sampler_of, seed):
    random = np.random.default_rng(seed)
    items = random.integers(0, 3, (40, 6)).tolist()
    sampler = sampler_of(items)
    slots = random.permutation([1, 2, 3, 4])[: random.integers(1, 5)].tolist()
    paths = [list(items[i]) for i in random.integers(0, 40, len(slots))]
    committed = int(random.integers(0, 3))
    drafts = int(random.integers(1, DRAFTS + 1))
    tokens = [path[committed : committed + drafts] for path in paths]
    for chain in tokens:
        if random.random() < 0.5:
            chain[random.integers(drafts)] = int(random.integers(5))
    _, batch = verification(slots, tokens, committed=0, topk=1)
    before = torch.tensor([path[:committed] for path in paths])
    if committed:
        sampler.accept(batch, before, torch.full((len(slots),), committed), walked=0)
    logits = torch.randn(len(slots) * drafts, VOCABULARY)
    masked = []
    for topk in (1, 2):
        verify, batch = verification(slots, tokens, committed=committed, topk=topk)
        masked.append(logits.clone())
        sampler.tree_mask(verify, batch, None).apply(masked[-1])
    assert torch.equal(*masked)
    constrained = [slot != 3 for slot in slots]
    assert (masked[0].isneginf().view(len(slots), -1).any(1)).tolist() == constrained


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_has_illegal_drafts_only_for_want_of_others(sampler_of, seed):
    """SGLang chooses the branches and the nodes of random drafts; none is chosen without the one above it."""
    from sglang.srt.speculative.eagle_utils import organize_draft_results
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    torch.manual_seed(seed)
    random, topk, steps = np.random.default_rng(seed), 1 + seed % 3, 4
    items = [random.integers(0, 4, random.integers(1, 7)).tolist() for _ in range(30)]
    sampler, slots, worker = sampler_of(items), torch.tensor([4, 1, 2]), SimpleNamespace(hot_token_id=None)
    first, phase = (_Drafting(sampler, worker, slots) for _ in range(2))

    def drawn(phase: _Drafting, rows: int, fed: torch.Tensor | None) -> Any:
        logits = torch.randn(rows, VOCABULARY)
        phase.mask(logits, fed)
        return logits.softmax(-1).topk(topk)

    found, scores, (probabilities, tokens) = [], None, drawn(first, len(slots), None)
    for step in range(steps):

        def choose(topk_p: torch.Tensor, i: int = step, tokens: Any = tokens, scores: Any = scores) -> Any:
            return select_top_k_tokens(i, topk_p, tokens, None, scores, topk)

        with torch.compiler.set_stance("force_eager"):
            fed, _, scores, tree = phase.select(choose, step, probabilities)
        found.append(tree)
        probabilities, tokens = drawn(phase, len(fed), fed)
    given = list(zip(*found, strict=True))
    parents, picked, _ = organize_draft_results(*given, min(8, 1 + topk + (steps - 1) * topk**2))
    legal = {(*item, *[VOCABULARY - 1] * steps)[:n] for item in items for n in range(1, steps + 1)}
    for above, nodes, drafts in zip(parents.tolist(), picked.tolist(), torch.cat(given[1], 1).tolist(), strict=True):
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for node, token in enumerate(drafts):
            paths[node] = (*paths[above[node // topk]], token)
        assert {above[node // topk] for node in nodes} <= {-1, *nodes}
        assert sum(paths[node] in legal for node in nodes) == min(len(nodes), sum(p in legal for p in paths.values()))


def test_a_draft_vocabulary_has_the_mask_of_its_tokens(sampler_of):
    """More rows than are gathered at a time. A legal token is missing: those of the first request are all masked."""
    sampler, slots = sampler_of([[1, 2], [5]]), torch.tensor([1, 2, 4, 3] * 10)
    sampler.slots.assign(torch.tensor([1]), torch.tensor([sampler.arena.acquire(itemset.build([[9]]))]), marks_of(1))
    hot = torch.tensor([40, 5, 2, 63, 1])
    logits = torch.ones(len(slots), len(hot))
    _Drafting(sampler, SimpleNamespace(hot_token_id=hot), slots).mask(logits, None)
    masked = {1: [MASKED] * 5, 3: [1.0] * 5}
    expected = [masked.get(slot, [MASKED, 1, MASKED, MASKED, 1]) for slot in slots.tolist()]
    assert torch.equal(logits, torch.tensor(expected))


class Computed(TorchDispatchMode):
    """Notes every torch operation that computes something."""

    VIEWS = ("aten.slice.Tensor", "aten.view.default", "aten.detach.default", "aten.alias.default")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in self.VIEWS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Launches(list):
    """Stands in for a kernel: notes the grid of each launch."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.append(grid)


def test_a_chain_takes_one_launch_and_two_operations(sampler_of, monkeypatch):
    """The operations: how many tokens each request had before, from SGLang's lengths and ours."""
    launched = Launches()
    for name in ("_walk_kernel", "_mask_kernel"):
        monkeypatch.setattr(triton_kernels, name, launched)
    monkeypatch.setattr(Slots, "step", Slots.step.__wrapped__)  # cpu/sitecustomize.py looks at what it has done
    sampler = sampler_of([[1, 2, 3, 4]], "triton")
    verify, batch = verification([4, 2], [[1, 2, 3, 4]] * 2, committed=0, topk=1)
    logits = torch.zeros(8, VOCABULARY)
    launched.clear()
    with Computed() as computed:
        sampler.tree_mask(verify, batch, None).apply(logits)
    assert launched == [(8,)]
    assert computed.names == ["aten.index.Tensor", "aten.sub.Tensor"]
