"""Sleep mode and updates of the weights: what lies on a device for item sets survives the one and follows the other."""

import contextlib
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from itemset.serving.config import StaticConfig
from itemset.serving.hooks import IMPORTED
from vllm_static.compat import hook

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def kept_through_sleep(vllm_config: Any) -> contextlib.AbstractContextManager[None]:
    """Within it, memory on the device is allocated that sleep mode restores before the next step, at both levels. A
    model is loaded into memory that level 2 discards."""
    model = vllm_config.model_config
    if not model.enable_sleep_mode or model.sleep_mode_backend != "cumem":  # others suspend the process as a whole
        return contextlib.nullcontext()
    from vllm.device_allocator import get_mem_allocator_instance

    kept: contextlib.AbstractContextManager[None] = get_mem_allocator_instance().use_memory_pool(tag="runtime")
    return kept


def asleep(worker: Any) -> bool:
    """Whether nothing may be copied to a worker's device now: its memory is not there."""
    worker = getattr(worker, "worker", worker)
    enabled: bool = worker.vllm_config.model_config.enable_sleep_mode
    return enabled and worker.sleep_mode_backend.state() == "SUSPENDED"


@hook("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state", when=IMPORTED)
def follow(original: Callable[..., Any], self: Any) -> None:
    """The model has new weights, reloaded or transferred: what is made of them is made again. The draft head is read
    again, into the memory where it lies: a trainer saves it before it updates the model."""
    original()
    try:
        _follow(self)
    except Exception:  # a worker that raises ends the engine
        logger.exception(
            "What item sets take of the weights stays as it was: check the draft head's file, update again"
        )


def _follow(runner: Any) -> None:
    from itemset.ranking.draft_head import DraftHead
    from vllm_static.processor import item_sets

    path = StaticConfig.of(runner.vllm_config.additional_config).item_set_draft_head
    if (processor := item_sets(runner)) is not None:
        processor.narrow.refresh()
        if path is not None and processor.head is not None:
            processor.head.load_state_dict(DraftHead.load(path, processor.arena.device).state_dict())
