"""Blocks of the KV cache that the scheduler does not know: the beams of ranked lists take them during a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from itemset.serving.config import StaticConfig
from vllm_static import compat, step_list_hooks
from vllm_static.compat import hook
from vllm_static.kv_branches import own_blocks

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

SHARE = 8  # of the KV cache, the part that lists take at most
SHARE_UNASKED = 16  # the same, if nobody says for how many beams
LONGEST = 32  # tokens of an item, above which fewer beams than configured fit
USUAL = 16  # the same, of an engine whose sets come with the requests


@hook(
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    why="ranked lists have blocks of the KV cache that the scheduler does not know",
    always=True,
)
def _initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """Keep the last blocks from the scheduler, and give them to the workers.

    Blocks of the scheduler's own pool would count as used, and `reset_prefix_cache` fails while any block is.
    """
    cache: KVCacheConfig = original()
    if not compat.is_ours(vllm_config):
        return cache
    from vllm.v1.core import kv_cache_utils

    reason = compat.why_rounds(vllm_config)
    if reason is None:
        workers: Callable[..., list[Any]] = self.model_executor.collective_rpc
        room, reason = _tried(workers, cache, vllm_config)
        workers(step_list_hooks.install, args=(room,))
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


def _tried(
    workers: Callable[..., list[Any]], cache: KVCacheConfig, vllm_config: Any
) -> tuple[step_list_hooks.Room, str | None]:
    """What room lists get, and why none are made; None if they are. All workers have tried it.

    Raises ValueError if prompts are to be read once, and the attention backend can not.
    """
    config = StaticConfig.of(vllm_config.additional_config)
    shared = config.item_set_shared_prefix == "on"
    if shared:
        compat.refuse_backends(set().union(*workers(step_list_hooks.backends)))
    if not _one_full_attention(cache):
        return step_list_hooks.NO_ROOM, "the KV cache is not one of full attention"
    blocks, beams = scratch_blocks(config, max(workers(step_list_hooks.longest_item)), cache, vllm_config)
    if not blocks:
        return step_list_hooks.NO_ROOM, "the KV cache is too small for beams"
    trials: list[step_list_hooks.Trial] = workers(step_list_hooks.try_out, args=(blocks, shared))
    if reason := next(filter(None, (one.lists for one in trials)), None):
        return step_list_hooks.NO_ROOM, reason
    tokens = min(one.tokens for one in trials)
    if not tokens:
        return step_list_hooks.NO_ROOM, "no memory is left for the logits of beams: lower --gpu-memory-utilization"
    why = next(filter(None, (one.apart for one in trials)), None)
    if shared and why is None:
        logger.info("Ranked lists: each pass reads a prompt once for all beams")
    elif shared:
        logger.warning("Ranked lists: each beam reads its prompt, although item_set_shared_prefix is on: %s", why)
    return step_list_hooks.Room(blocks, min(beams, tokens), tokens, shared and why is None), None


def scratch_blocks(config: StaticConfig, longest: int, cache: KVCacheConfig, vllm_config: Any) -> tuple[int, int]:
    """Return how many blocks lists get, for `ranked_list_beams` or for what may be missed of the cache, and how many
    beams have room in them.

    longest: tokens of the longest item of the registered sets, 0 if there are none.
    """
    block: int = cache.kv_cache_groups[0].kv_cache_spec.block_size
    each = 2 * own_blocks(block - 1, min(LONGEST, longest or USUAL), block)
    context = -(-vllm_config.model_config.max_model_len // block)
    wanted = config.ranked_list_beams
    share = SHARE_UNASKED if wanted is None else SHARE
    left: int = min(cache.num_blocks // share, cache.num_blocks - context - 1)  # the scheduler keeps one block empty
    beams = max(0, left) // each
    beams = beams if wanted is None else min(wanted, beams)
    return each * beams, beams


def _one_full_attention(cache: KVCacheConfig) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return [type(one) for one in specs] in ([FullAttentionSpec], [MLAAttentionSpec]) and (
        specs[0].sliding_window is specs[0].attention_chunk_size is None
    )
