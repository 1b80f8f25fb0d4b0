"""Ranked lists in the engine core: the blocks of the KV cache that their beams take, and lists of several steps."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from itemset.serving.config import StaticConfig
from itemset.serving.wire import read
from vllm_static import compat
from vllm_static.compat import hook, logger
from vllm_static.worker.beam_kv import Room, entries_of_block
from vllm_static.worker.list_hooks import go_on, install, longest_item, try_out

SHARE = 8  # of the KV cache, the part that lists take at most
SHARE_UNASKED = 16  # the same, if nobody says for how many beams
LONGEST = 32  # tokens of an item, above which fewer beams than configured fit
USUAL = 16  # the same, of an engine whose sets come with the requests


@hook("vllm.v1.engine.core:EngineCore._initialize_kv_caches")
def _initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """Ranked lists have blocks of the KV cache that the scheduler does not know: in its pool they would count as used,
    and `reset_prefix_cache` fails while any block is."""
    cache = original()
    if id(vllm_config) not in compat.backends:
        return cache  # of another engine in this process
    from vllm.v1.core import kv_cache_utils

    room: Room | str | None = compat.why_rounds(vllm_config)
    if room is None:
        workers: Callable[..., list[Any]] = self.model_executor.collective_rpc
        room = _tried(workers, cache, vllm_config)
        workers(install, args=(Room(0, 0, 0) if isinstance(room, str) else room,))
    if isinstance(room, str):
        logger.info("Ranked lists take rounds of requests: %s", compat.with_mend(room))
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


def _tried(workers: Callable[..., list[Any]], cache: Any, vllm_config: Any) -> Room | str:
    """Return what room lists get of the KVCacheConfig once all workers have tried it, or why none are made."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if not _known(specs):
        return "the KV cache holds what beams cannot share"
    block = min(entries_of_block(spec, vllm_config.model_config.dtype) for spec in specs)
    each = min(LONGEST, max(workers(longest_item)) or USUAL)  # tokens
    context = sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)
    most = StaticConfig.of(vllm_config.additional_config).ranked_list_beams
    share = SHARE_UNASKED if most is None else SHARE
    left: int = min(cache.num_blocks // share, cache.num_blocks - context - 1)  # the scheduler keeps one block empty
    beams = max(0, left) // len(specs) * block // each
    beams = beams if most is None else min(most, beams)
    if not beams:
        return "the KV cache is too small for beams"
    blocks = -(-each * beams // block) * len(specs)
    trials: list[Any] = workers(try_out, args=(blocks,))
    if reason := next((one for one in trials if isinstance(one, str)), None):
        return str(reason)
    if not (tokens := min(trials)):
        return "no memory is left for the logits of beams: lower --gpu-memory-utilization"
    return Room(blocks, beams, tokens)


def _known(specs: list[Any]) -> bool:
    """Return whether the groups of a KV cache are of attention to all tokens or in a window, with blocks alike, and
    maybe of states of Mamba 2 or of the gated delta rule."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    states = [one for one in specs if type(one) is MambaSpec and one.mamba_type in (Kind.MAMBA2, Kind.GDN_ATTN)]
    others = [one for one in specs if one not in states]
    known = all(type(one) in (FullAttentionSpec, SlidingWindowSpec) for one in others)
    known &= all(len(one.shapes) == 2 for one in states)  # of a convolution, and the states
    alike = len({one.page_size_bytes for one in specs}) == len({one.block_size for one in others}) == 1
    return known and alike and not any(getattr(one, "attention_chunk_size", None) for one in others)


@hook("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", order=-1)
def _update_from_output(original: Callable[..., Any], self: Any, model_runner_output: Any) -> Any:
    """A request whose table is empty takes another step, in which its list goes on; its tokens, a step's drafts among
    them, are read by nobody."""
    if compat.backend_of(self.structured_output_manager) is None:
        return original()
    tables = model_runner_output.prompt_token_id_logprobs_dict
    for name, table in list(tables.items()):
        request = self.requests.get(name)
        if not table.numel():
            del tables[name]
            _unfinished.add(self)
            if request is not None and not (request.num_stale_output_tokens and request.drop_stale_output):
                request.max_tokens += 1 + self.num_spec_tokens
        elif self.num_spec_tokens and request is not None and read(request.sampling_params.extra_args) is not None:
            request.max_tokens = request.num_output_tokens + 1
    return original()


@hook("vllm.v1.engine.core:EngineCore.post_step")
def _post_step(original: Callable[..., Any], self: Any, model_executed: bool) -> None:
    """Lists go on when the tokens of a step are on their way: the requests that have these do not wait for it. While
    there are no others, lists go on without steps."""
    original(model_executed=model_executed)
    before = _parts.pop(self, None)
    more = before is not None and any(before.result())  # raises if it has failed
    if not (more or self.scheduler in _unfinished) or not self.scheduler.running:
        return
    _unfinished.discard(self.scheduler)
    if not _only_lists(self):
        _parts[self] = self.model_executor.collective_rpc(go_on, args=(False,), non_block=True)
        return
    while any(self.model_executor.collective_rpc(go_on, args=(True,))) and _only_lists(self):
        pass


def _only_lists(core: Any) -> bool:
    """Return whether an engine has nothing else to do than lists, whose requests run."""
    scheduler, arriving = core.scheduler, getattr(core, "input_queue", None)
    if scheduler.get_request_counts()[1] or (arriving is not None and not arriving.empty()):
        return False
    carried = (read(one.sampling_params and one.sampling_params.extra_args) for one in scheduler.running)
    return all(one is not None and one.ranked is not None for one in carried)


_unfinished = WeakSet[Any]()  # schedulers with lists that another step has to go on with
_parts = WeakKeyDictionary[Any, Any]()  # of each engine core, the last part of its lists
