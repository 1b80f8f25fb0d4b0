"""Drafts of forced tokens on the host path, in the engine core: of items that stand alone or inside an answer."""

from collections.abc import Callable
from typing import Any

from itemset.embedded.forced import extend
from vllm_static import compat
from vllm_static.compat import hook


@hook("vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids", why="a drafter does not know what a set forces")
def _update_draft_token_ids(original: Callable[..., None], self: Any, draft_token_ids: Any) -> None:
    """Add what the sets force to the drafts of the next step, up to as many as the drafter may propose. Under
    asynchronous scheduling vLLM does not call this: the next step begins before its drafts are known here."""
    original()
    manager = self.structured_output_manager
    backend = compat.backend_of(manager)
    if backend is None or not backend.forces_drafts or self.dynamic_sd_lookup is not None:  # which may want fewer
        return
    may_reason = compat.may_reason(manager)
    for request_id in draft_token_ids.req_ids:
        request = self.requests.get(request_id)
        structured: Any = getattr(request, "structured_output_request", None)
        if structured is None or request.is_finished() or request.is_prefill_chunk:
            continue
        place = getattr(structured.grammar, "host", None)
        if place is not None and (structured.reasoning_ended or not may_reason):
            words = -(-backend.vocab_size // 32)
            request.spec_token_ids = extend(place, request.spec_token_ids, self.num_spec_tokens, words)
