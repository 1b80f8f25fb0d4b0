"""Ranked lists by a draft head, in the engine core."""

from collections.abc import Callable
from copy import copy
from typing import Any

from itemset.serving.wire import read
from vllm_static.compat import hook


@hook("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks")
def _get_computed_blocks(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """A draft head reads the hidden states at the end of its prompt: they are computed, also if their KV is cached."""
    carried = read(getattr(request.sampling_params, "extra_args", None))
    if carried is None or carried.ranked is None or not carried.ranked.placeholders:
        return original()
    before = request.num_prompt_tokens - carried.ranked.placeholders - 1
    fewer = copy(request)  # nothing of a request is changed there
    fewer.block_hashes = request.block_hashes[: max(0, before // self.block_pool.hash_block_size)]
    return original(request=fewer)
