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
    """Why a worker cannot make lists, and why it cannot read their prompts once for all beams; None if it can. tokens:
    for how many a pass may have logits, see `passes.logits_room`."""

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
    """Let a worker make lists; without blocks it says so.

    All workers get the same: one that made them in another way would use other CUDA graphs than its peers.
    """
    from vllm_static.step_lists import WideLists

    compat.install(LISTS)
    runner = compat.runner_of(worker)
    setattr(runner.prompt_logprobs_worker, _LISTS, WideLists(runner, room))


def longest_item(worker: Any) -> int:
    """Return how many tokens the longest item of the registered sets has, 0 without any. Called by the engine core."""
    from vllm_static.processor import item_sets

    return item_sets(compat.runner_of(worker)).longest


@hook(f"{_PROMPTS}.add_request", why="which requests are ranked lists", when=LISTS)
def _add_request(original: Callable[..., Any], self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
    original()
    if lists := getattr(self, _LISTS, None):
        lists.add(req_id, req_idx, sampling_params.extra_args or {})


@hook(f"{_PROMPTS}.remove_request", why="a list has ended, or was aborted", when=LISTS)
def _remove_request(original: Callable[..., Any], self: Any, req_id: str) -> None:
    original()
    if lists := getattr(self, _LISTS, None):
        lists.remove(req_id)


@hook(
    f"{_PROMPTS}.compute_prompt_token_id_logprobs",
    why="a list's passes run where a step has its hidden states, after its sampling",
    when=LISTS,
)
def _compute(original: Callable[..., Any], self: Any, hidden_states: Tensor, input_batch: Any) -> dict[str, Tensor]:
    scores: dict[str, Tensor] = original()
    if (lists := getattr(self, _LISTS, None)) and lists.waiting:
        scores |= lists.answer(hidden_states, input_batch)
    return scores
