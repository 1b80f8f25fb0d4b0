"""How ranked lists get into a worker's steps, and the blocks of the KV cache that their beams take there.

The engine core keeps these from its scheduler; the hooks in the workers import `step_lists` once they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

from itemset.serving.config import StaticConfig
from vllm_static import compat, core_hooks
from vllm_static.compat import hook
from vllm_static.kv_branches import own_blocks

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

LISTS = "Checked where ranked lists are made inside a step"
"""Time of an install."""
_LISTS = "static_lists"
_PROMPTS = "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker"

SHARE = 8  # of the KV cache, the part that lists take at most
SHARE_UNASKED = 16  # the same, if nobody says for how many beams
LONGEST = 32  # tokens of an item, above which fewer beams than configured fit
USUAL = 16  # the same, of an engine whose sets come with the requests


class Trial(NamedTuple):
    """Why a worker cannot make lists, and why it cannot read their prompts once for all beams; None if it can. tokens:
    see `branch_forward.logits_room`."""

    lists: str | None
    apart: str | None
    tokens: int


class Room(NamedTuple):
    """What lists get. blocks: of the KV cache, which the scheduler does not know. beams: that have room in them.
    tokens: that a pass may have the logits of. apart: whether a pass reads a prompt once for all beams."""

    blocks: int
    beams: int
    tokens: int
    apart: bool


NO_ROOM = Room(0, 0, 0, False)


def backends(worker: Any) -> set[str]:
    """Return the names of a worker's attention backends. Called by the engine core, as are the next two."""
    from vllm_static import branch_forward

    return branch_forward.backends(compat.runner_of(worker))


def try_out(worker: Any, blocks: int, apart: bool) -> Trial:
    """Let a worker try passes in this many blocks, which no request has. apart: also with prompts read once."""
    from vllm_static import branch_forward

    runner = compat.runner_of(worker)
    last = runner.kv_cache_config.num_blocks
    scratch = range(last - blocks, last)
    if reason := branch_forward.try_out(runner, scratch):
        return Trial(reason, None, 0)
    try:
        tokens = branch_forward.logits_room(runner)
    except Exception as error:  # a device that does not say what is free
        return Trial(f"what memory is free is not known: {error!r}", None, 0)
    return Trial(None, branch_forward.try_out_apart(runner, scratch) if apart else None, tokens)


def install(worker: Any, room: Room) -> None:
    """Let a worker make lists; without blocks it says so. All get the same room, and so use the same CUDA graphs."""
    from vllm_static.processor import item_sets
    from vllm_static.step_lists import WideLists

    compat.install(LISTS)
    runner = compat.runner_of(worker)
    setattr(runner.prompt_logprobs_worker, _LISTS, lists := WideLists(runner, room))
    item_sets(runner).lists = lists


def longest_item(worker: Any) -> int:
    """Return how many tokens the longest item of the registered sets has, 0 without any. Called by the engine core."""
    from vllm_static.processor import item_sets

    return max((one.longest for one in item_sets(compat.runner_of(worker)).registered), default=0)


@hook(f"{_PROMPTS}.compute_prompt_token_id_logprobs", when=LISTS)
def _compute(original: Callable[..., Any], self: Any, hidden_states: Tensor, input_batch: Any) -> dict[str, Tensor]:
    """A list's passes run where a step has its hidden states, after its sampling."""
    scores: dict[str, Tensor] = original()
    if (lists := getattr(self, _LISTS, None)) and lists.asked:
        scores |= lists.answer(hidden_states, input_batch)
    return scores


@hook("vllm.v1.engine.core:EngineCore._initialize_kv_caches", always=True)
def _initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """Ranked lists have blocks of the KV cache that the scheduler does not know: in its pool they would count as used,
    and `reset_prefix_cache` fails while any block is. The engine core answers what our front ends ask."""
    cache: KVCacheConfig = original()
    if not compat.is_ours(vllm_config):
        return cache
    core_hooks.add_methods(self)
    from vllm.v1.core import kv_cache_utils

    reason = compat.why_rounds(vllm_config)
    if reason is None:
        workers: Callable[..., list[Any]] = self.model_executor.collective_rpc
        room, reason = _tried(workers, cache, vllm_config)
        workers(install, args=(room,))
    if reason is not None:
        logger.info("Ranked lists take rounds of requests: %s", reason)
        return cache
    cache.num_blocks -= room.blocks
    vllm_config.cache_config.num_gpu_blocks = cache.num_blocks
    kv_cache_utils.update_kv_cache_capacity(vllm_config, cache)
    logger.info(
        "Ranked lists: %s blocks of the KV cache are kept for %s beams. A pass may have logits of %s tokens",
        *(f"{count:,}" for count in (room.blocks, room.beams, room.tokens)),
    )
    return cache


def _tried(workers: Callable[..., list[Any]], cache: KVCacheConfig, vllm_config: Any) -> tuple[Room, str | None]:
    """What room lists get, and why none are made; None if they are. All workers have tried it.

    Raises ValueError if prompts are to be read once, and the attention backend can not.
    """
    config = StaticConfig.of(vllm_config.additional_config)
    shared = config.item_set_shared_prefix == "on"
    if shared:
        compat.refuse_backends(set().union(*workers(backends)))
    if not _one_full_attention(cache):
        return NO_ROOM, "the KV cache is not one of full attention"
    blocks, beams = scratch_blocks(config, max(workers(longest_item)), cache, vllm_config)
    if not blocks:
        return NO_ROOM, "the KV cache is too small for beams"
    trials: list[Trial] = workers(try_out, args=(blocks, shared))
    if reason := next(filter(None, (one.lists for one in trials)), None):
        return NO_ROOM, reason
    tokens = min(one.tokens for one in trials)
    if not tokens:
        return NO_ROOM, "no memory is left for the logits of beams: lower --gpu-memory-utilization"
    why = next(filter(None, (one.apart for one in trials)), None)
    if shared and why is None:
        logger.info("Ranked lists: each pass reads a prompt once for all beams")
    elif shared:
        logger.warning("Ranked lists: each beam reads its prompt, although item_set_shared_prefix is on: %s", why)
    return Room(blocks, min(beams, tokens), tokens, shared and why is None), None


def scratch_blocks(config: StaticConfig, longest: int, cache: KVCacheConfig, vllm_config: Any) -> tuple[int, int]:
    """Return how many blocks lists get, for `ranked_list_beams` or for what may be missed of the cache, and how many
    beams have room in them.

    longest: tokens of the longest item of the registered sets, 0 if there are none.
    """
    block: int = cache.kv_cache_groups[0].kv_cache_spec.block_size
    each = 2 * own_blocks(block - 1, min(LONGEST, longest or USUAL), block)
    context = -(-vllm_config.model_config.max_model_len // block)
    most = config.ranked_list_beams
    share = SHARE_UNASKED if most is None else SHARE
    left: int = min(cache.num_blocks // share, cache.num_blocks - context - 1)  # the scheduler keeps one block empty
    beams = max(0, left) // each
    beams = beams if most is None else min(most, beams)
    return each * beams, beams


def _one_full_attention(cache: KVCacheConfig) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return [type(one) for one in specs] in ([FullAttentionSpec], [MLAAttentionSpec]) and (
        specs[0].sliding_window is specs[0].attention_chunk_size is None
    )
