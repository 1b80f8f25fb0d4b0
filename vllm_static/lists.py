"""How ranked lists get into a worker's steps: the hooks of `wide_lists`, which they import when they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_static import compat
from vllm_static.compat import hook

if TYPE_CHECKING:
    from torch import Tensor

LISTS = "Checked where ranked lists are made inside a step"
"""Time of an install."""
_LISTS = "static_lists"
_PROMPTS = "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker"


class Trial(NamedTuple):
    """Why a worker cannot make lists, and why it cannot read their prompts once for all beams; None if it can."""

    lists: str | None
    apart: str | None


def backends(worker: Any) -> set[str]:
    """Return the names of a worker's attention backends. Called by the engine core, as are the next two."""
    from vllm_static import passes

    return passes.backends(compat.runner_of(worker))


def try_out(worker: Any, blocks: int, apart: bool) -> Trial:
    """Let a worker try passes in so many blocks that no request has. apart: also with prompts read once."""
    from vllm_static import passes

    runner = compat.runner_of(worker)
    last = runner.kv_cache_config.num_blocks
    scratch = range(last - blocks, last)
    reason = passes.try_out(runner, scratch)
    return Trial(reason, passes.try_out_apart(runner, scratch) if apart and reason is None else None)


def install(worker: Any, blocks: int, apart: bool) -> None:
    """Let a worker make lists, with so many blocks that the scheduler does not know; without any it says so.

    All workers get the same: one that made them in another way would use other CUDA graphs than its peers.
    """
    from vllm_static.wide_lists import WideLists

    compat.install(LISTS)
    runner = compat.runner_of(worker)
    setattr(runner.prompt_logprobs_worker, _LISTS, WideLists(runner, blocks, apart=apart))


def longest_item(worker: Any) -> int:
    """Return how many tokens the longest item of the registered sets has, 0 without any. Called by the engine core."""
    from vllm_static.processor import item_sets

    return item_sets(compat.runner_of(worker)).longest


@hook(f"{_PROMPTS}.add_request", why="which requests are ranked lists", when=LISTS)
def _add_request(original: Callable[..., Any], self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
    original(self, req_id, req_idx, sampling_params)
    if lists := getattr(self, _LISTS, None):
        lists.add(req_id, req_idx, sampling_params.extra_args or {})


@hook(f"{_PROMPTS}.remove_request", why="a list has ended, or was aborted", when=LISTS)
def _remove_request(original: Callable[..., Any], self: Any, req_id: str) -> None:
    original(self, req_id)
    if lists := getattr(self, _LISTS, None):
        lists.remove(req_id)


@hook(
    f"{_PROMPTS}.compute_prompt_token_id_logprobs",
    why="a list's passes run where a step has its hidden states, after its sampling",
    when=LISTS,
)
def _compute(
    original: Callable[..., Any],
    self: Any,
    logits_fn: Any,
    hidden_states: Tensor,
    input_batch: Any,
    prompt_lens: Any,
) -> dict[str, Tensor]:
    scores: dict[str, Tensor] = original(self, logits_fn, hidden_states, input_batch, prompt_lens)
    if (lists := getattr(self, _LISTS, None)) and lists.waiting:
        scores |= lists.answer(hidden_states, input_batch)
    return scores
