"""Speculation inside item sets: draft models are masked step by step, draft trees are verified in one walk.

All of it reads the same cells, and walks from there: a draft has no state of its own that could go wrong, and nothing
has to be rolled back. What drafts may be recorded in SGLang's CUDA graphs, so it never looks at values.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from itemset.embedded.forced import extend
from itemset.masking.batch import LOCAL
from itemset.serving.config import StaticConfig
from itemset.trie.walk import FREE
from sglang_static import compat
from sglang_static.compat import hook, logger
from sglang_static.scheduler import masks, weights
from sglang_static.scheduler.masks import ItemSetSampler

MASKED = -1e30  # what masks the columns of a draft vocabulary: finite, because it may hold none of the legal tokens

_WHOLE_ROWS = 16  # of the whole vocabulary, from which a draft vocabulary's columns are gathered, at a time

_INFINITIES_END_THE_ENGINE = os.environ.get("SGLANG_ENABLE_ASYNC_ASSERT", "").lower() in ("1", "true")
"""SGLang's debugging switch, by which draft logits must be finite (utils/async_probe.py)."""


@hook("sglang.srt.speculative.eagle_utils:eagle_sample")
def eagle_sample(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any
) -> Any:
    """Verification of draft trees, in EAGLE, STANDALONE, NGRAM and their kin."""
    sampler = masks.current()
    if sampler is not None and (batch.forward_mode.is_idle() or not sampler.numbers(batch)):
        sampler = None
    if sampler is not None:
        grammar_mask = sampler.tree_mask(verify_input, batch, grammar_mask)
    with weights.verified(batch, logits_output.next_token_logits):
        result = original(grammar_mask=grammar_mask)
    if sampler is not None:
        predict, lengths, indices = result
        sampler.accept(batch, predict[indices.long()], lengths, walked=1)
    return result


@hook("sglang.srt.speculative.eagle_utils:_verify_coins", why="a coin of zero would accept an illegal draft")
def verify_coins(original: Callable[..., Any]) -> Any:
    """A draft is accepted where its coin is not above its probability: outside the set both may be zero."""
    coins, final = original()
    return coins.clamp(min=1e-9), final


class _Drafting:
    """One phase of a draft model: which requests it drafts for, and where each row stands in its request's set. The
    rows are the requests, and then the branches of their trees."""

    def __init__(self, sampler: ItemSetSampler, worker: Any, slots: Tensor) -> None:
        self._sampler, self._hot, self._slots = sampler, worker.hot_token_id, slots.long()
        self._states = sampler.committed(self._slots)

    def mask(self, logits: Tensor, fed: Tensor | None) -> None:
        """Mask draft logits, [rows, draft vocabulary], in place. fed: [rows], the drafts of the pass before, if any."""
        rows, requests = len(logits), len(self._slots)
        if not rows or rows % requests:
            return
        slots = self._slots.repeat_interleave(rows // requests)
        states = self._states.repeat_interleave(rows // len(self._states))
        if fed is not None:
            self._states = states = self._sampler.advance(states, fed, slots)
        if self._hot is None:
            self._sampler.slots.mask(states, slots, logits)
            if _INFINITIES_END_THE_ENGINE:
                logits.clamp_(min=MASKED)
        elif len(self._hot) == logits.shape[1]:
            for some, of, part in zip(*(one.split(_WHOLE_ROWS) for one in (states, slots, logits)), strict=True):
                whole = part.new_zeros(len(part), self._sampler.vocab_size)
                self._sampler.slots.mask(some, of, whole)
                part.add_(whole[:, self._hot].clamp_(min=MASKED))

    def select(self, original: Callable[..., Any], i: int, probabilities: Tensor) -> Any:
        """Choose a tree's next rows, which keep their branches' states. probabilities: [rows, topk] of their tokens.

        They are made to fall along each branch, where a forced token would leave them as they are: else a node could
        be chosen to be verified without the one above it.
        """
        free = (self._states & LOCAL == FREE)[:, None]
        result = original(topk_p=torch.where(free, probabilities, probabilities.clamp(min=1e-9) * 0.999))
        if i > 0:
            chosen = result[3][2]  # [requests, topk] places: topk of the first step, then topk * topk a step
            parents = (chosen // chosen.shape[1] - 1) % chosen.shape[1]
            self._states = self._states.view(chosen.shape).gather(1, parents).flatten()
        return result


_stepping: list[_Drafting] = []  # the phase whose steps run


@contextlib.contextmanager
def _drafting(worker: Any, slots: Tensor, *, steps: bool) -> Iterator[None]:
    """Mask the logits of a worker's draft model meanwhile, also of a replayed CUDA graph, which has a row a request.
    steps: whether each pass drafts one token more, after what the pass before it has drafted."""
    sampler = masks.current()
    if sampler is None:
        yield
        return
    phase = _Drafting(sampler, worker, slots)
    _stepping[:] = [phase] if steps else []

    def masked(run: Callable[..., Any], forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        fed = forward_batch.input_ids if steps else None  # SGLang may pad them
        result = run(forward_batch, *args, **kwargs)
        phase.mask(getattr(result, "logits_output", result).next_token_logits, fed)  # a graph gives no more
        return result

    graphs = getattr(worker, "cuda_graph_runner_for_draft_extend", None)
    ways = [(worker.draft_runner, "forward"), *([(graphs, "execute")] if graphs is not None else [])]
    for runner, name in ways:
        setattr(runner, name, partial(masked, getattr(runner, name)))
    try:
        yield
    finally:
        _stepping.clear()
        for runner, name in ways:
            delattr(runner, name)


@hook("sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker.draft_forward")
def draft_forward(original: Callable[..., Any], self: Any, forward_batch: Any) -> Any:
    """The drafts of EAGLE and STANDALONE but the first. Recorded in a CUDA graph, or run as it is."""
    if forward_batch.forward_mode.is_idle():
        return original()
    with _drafting(self, forward_batch.req_pool_indices, steps=True):
        return original()


@hook("sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill")
def extend_after_prefill(original: Callable[..., Any], self: Any, batch: Any, next_token_ids: Tensor) -> Any:
    """The first draft after a prompt; the token that was sampled there is taken first."""
    sampler = masks.current()
    if sampler is not None and len(batch.reqs):
        sampler.accept(batch, next_token_ids[:, None], torch.ones_like(next_token_ids), walked=0)
    with _drafting(self, batch.req_pool_indices, steps=False):
        return original()


@hook("sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode")
def extend_after_verification(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    """The first draft after accepted ones."""
    with _drafting(self, batch.req_pool_indices, steps=False):
        return original()


@hook("sglang.srt.speculative.spec_utils:select_top_k_tokens")
def select_branches(original: Callable[..., Any], i: int, topk_p: Tensor) -> Any:
    """A tree goes on from some of its rows: the states of its branches go with them."""
    return _stepping[0].select(original, i, topk_p) if _stepping else original()


@hook("sglang.srt.speculative.ngram_worker:NGRAMWorker._prepare_draft_tokens")
def prepare_drafts(original: Callable[..., Any], batch: Any) -> Any:
    """Forced tokens as drafts, in place of n-grams."""
    drafts, trees = original()
    if not _forced():
        return drafts, trees
    if (sampler := masks.current()) is not None:
        sampler.force_drafts(batch, *map(torch.from_numpy, (drafts, trees)))
    if batch.has_grammar:
        nodes = drafts.reshape(len(batch.reqs), -1)
        for request, row, tree in zip(batch.reqs, nodes, trees.reshape(*nodes.shape, -1), strict=True):
            _force_on_host(compat.in_force(request.grammar), row, tree, batch.model_config.vocab_size)
    return drafts, trees


@cache
def _forced() -> bool:
    return StaticConfig.of(compat.options()).forced_drafts


def _force_on_host(grammar: Any, nodes: NDArray[np.int64], tree: NDArray[np.bool_], vocab_size: int) -> None:
    """Overwrite n-grams by a chain of what a set on the host path forces, if anything. nodes: [drafts + 1], the last
    token first. tree: [drafts + 1, drafts + 1], which nodes are above each."""
    if (place := getattr(grammar, "host", None)) is None:
        return
    if not (chain := extend(place, (), len(nodes) - 1, -(-vocab_size // 32))):
        return
    at, used = 0, len(chain) + 1
    for depth, token in enumerate(chain, 2):  # a tree of n-grams that has the whole chain has more
        at = next(
            (i for i in range(at + 1, len(nodes)) if nodes[i] == token and tree[i, at] and tree[i].sum() == depth), 0
        )
        if not at:
            break
    else:
        return
    nodes[1:used], nodes[used:] = chain, 0  # the rest are beside the chain's first token, and illegal there
    tree[:used], tree[used:] = np.tri(used, len(nodes), dtype=bool), np.eye(len(nodes), dtype=bool)[used:]
    tree[:, 0] = True


def warn_of_unmasked(given: Any, *, forced: bool) -> None:
    """Warn of drafts that item sets do not mask. given: arguments of a server that speculates. forced: the option."""
    algorithm = given.speculative_algorithm
    reasons = {
        "they come from a table of n-grams": algorithm == "NGRAM" and not forced,
        "it drafts in a way of its own": given.enable_multi_layer_eagle or algorithm == "FROZEN_KV_MTP",
    }
    message = "Drafts of %s are not masked by item sets (%s): verification alone masks them, and fewer are accepted."
    for reason in (reason for reason, holds in reasons.items() if holds):
        logger.warning(message, algorithm, reason)
