"""How ranked lists get into a worker's steps. The engine core calls what stands here (`core.lists`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_static import compat
from vllm_static.compat import hook
from vllm_static.worker.beam_kv import Room

LISTS = "Checked where ranked lists are made inside a step"  # time of an install
_LISTS = "static_lists"
_PROMPTS = "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker"


def try_out(worker: Any, blocks: int) -> int | str:
    """Let a worker try passes in this many blocks, which no request has. Returns `beam_forward.logits_room`, or why it
    cannot make lists. Called by the engine core, as is the next."""
    from vllm_static.worker import beam_forward

    runner = compat.runner_of(worker)
    if reason := beam_forward.try_out(runner, runner.kv_cache_config.num_blocks - blocks):
        return reason
    try:
        return beam_forward.logits_room(runner)
    except Exception as error:  # a device that does not say what is free
        return f"what memory is free is not known: {error!r}"


def install(worker: Any, room: Room) -> None:
    """Let a worker make lists; without blocks it says so. All get the same room, and so use the same CUDA graphs."""
    from vllm_static.worker.lists import WideLists

    compat.install(LISTS)
    runner = compat.runner_of(worker)
    setattr(runner.prompt_logprobs_worker, _LISTS, lists := WideLists(runner, room))
    compat.item_sets(runner).lists = lists


def go_on(worker: Any, wait: bool) -> bool:
    """Let a worker's lists go on between two steps, if time is their bound, and return whether they can go on
    again. wait: for the device, too. Called by the engine core, as is the next."""
    runner = compat.runner_of(worker)
    lists = getattr(runner.prompt_logprobs_worker, _LISTS)
    if runner.execute_model_state is not None or not lists.share.timed:
        return False  # in a step passes would overwrite its buffers
    lists.go_on()
    if wait and runner.device.type != "cpu":
        torch.get_device_module(runner.device).synchronize(runner.device)
    return bool(lists.can_go_on)


def longest_item(worker: Any) -> int:
    """Return how many tokens the longest item of the registered sets has, 0 without any."""
    registered = compat.item_sets(compat.runner_of(worker)).catalogue.registered.values()
    return max((one.longest for one in registered), default=0)


@hook(f"{_PROMPTS}.compute_prompt_token_id_logprobs", when=LISTS)
def _compute(original: Callable[..., Any], self: Any, hidden_states: Tensor, input_batch: Any) -> dict[str, Tensor]:
    """A list's passes run where a step has its hidden states, after its sampling."""
    scores: dict[str, Tensor] = original()
    if (lists := getattr(self, _LISTS, None)) and (lists.asked or lists.begun):
        scores |= lists.answer(hidden_states, input_batch)
    return scores
