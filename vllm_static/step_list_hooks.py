"""How ranked lists get into a worker's steps, and the blocks of the KV cache that their beams take there.

The engine core keeps these from its scheduler; the hooks in the workers import `step_lists` once they are installed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

from itemset.serving.config import StaticConfig
from vllm_static import compat, core_hooks
from vllm_static.compat import hook

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


class Room(NamedTuple):
    """What lists get. blocks: of the KV cache, which the scheduler does not know: the memory of beams' own tokens.
    beams: that have room in it. tokens: whose logits may stand in memory."""

    blocks: int
    beams: int
    tokens: int


NO_ROOM = Room(0, 0, 0)


def try_out(worker: Any, blocks: int) -> int | str:
    """Let a worker try passes in this many blocks, which no request has. Called by the engine core, as is the next.

    Returns `beam_forward.logits_room`, or why it cannot make lists.
    """
    from vllm_static import beam_forward

    runner = compat.runner_of(worker)
    if reason := beam_forward.try_out(runner, runner.kv_cache_config.num_blocks - blocks):
        return reason
    try:
        return beam_forward.logits_room(runner)
    except Exception as error:  # a device that does not say what is free
        return f"what memory is free is not known: {error!r}"


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
def _compute(original: Callable[..., Any], self: Any, hidden_states: "Tensor", input_batch: Any) -> "dict[str, Tensor]":
    """A list's passes run where a step has its hidden states, after its sampling."""
    scores: dict[str, Tensor] = original()
    if (lists := getattr(self, _LISTS, None)) and (lists.asked or lists.begun):
        scores |= lists.answer(hidden_states, input_batch)
    return scores


@hook("vllm.v1.engine.core:EngineCore._initialize_kv_caches", always=True)
def _initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """Ranked lists have blocks of the KV cache that the scheduler does not know: in its pool they would count as used,
    and `reset_prefix_cache` fails while any block is. The engine core gets our backend, before requests come."""
    cache: KVCacheConfig = original()
    if not compat.is_ours(vllm_config):
        return cache
    core_hooks.extend(self)
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
        "Ranked lists: %s blocks of the KV cache are kept for %s beams. Logits of %s tokens have room",
        *(f"{count:,}" for count in (room.blocks, room.beams, room.tokens)),
    )
    if room.beams < (asked := StaticConfig.of(vllm_config.additional_config).ranked_list_beams or 0):
        few = "ranked_list_beams is %s: for more than %s enlarge the KV cache, of which they get an eighth at most"
        logger.warning(few, f"{asked:,}", f"{room.beams:,}")
    return cache


def _tried(workers: Callable[..., list[Any]], cache: "KVCacheConfig", vllm_config: Any) -> tuple[Room, str | None]:
    """What room lists get, and why none are made; None if they are. All workers have tried it."""
    config = StaticConfig.of(vllm_config.additional_config)
    if not _one_full_attention(cache):
        return NO_ROOM, "the KV cache is not one of full attention"
    blocks, beams = beam_blocks(config, max(workers(longest_item)), cache, vllm_config)
    if not blocks:
        return NO_ROOM, "the KV cache is too small for beams"
    trials: list[int | str] = workers(try_out, args=(blocks,))
    if reason := next((one for one in trials if isinstance(one, str)), None):
        return NO_ROOM, reason
    tokens = min(one for one in trials if isinstance(one, int))
    if not tokens:
        return NO_ROOM, "no memory is left for the logits of beams: lower --gpu-memory-utilization"
    return Room(blocks, beams, tokens), None


def beam_blocks(config: StaticConfig, longest: int, cache: "KVCacheConfig", vllm_config: Any) -> tuple[int, int]:
    """Return how many blocks lists get, for `ranked_list_beams` or for what may be missed of the cache, and how many
    beams have room in them.

    longest: tokens of the longest item of the registered sets, 0 if there are none.
    """
    block: int = cache.kv_cache_groups[0].kv_cache_spec.block_size
    each = min(LONGEST, longest or USUAL)  # tokens
    context = -(-vllm_config.model_config.max_model_len // block)
    most = config.ranked_list_beams
    share = SHARE_UNASKED if most is None else SHARE
    left: int = min(cache.num_blocks // share, cache.num_blocks - context - 1)  # the scheduler keeps one block empty
    beams = max(0, left) * block // each
    beams = beams if most is None else min(most, beams)
    return -(-each * beams // block), beams


def _one_full_attention(cache: "KVCacheConfig") -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return [type(one) for one in specs] == [FullAttentionSpec] and (
        specs[0].sliding_window is specs[0].attention_chunk_size is None
    )
