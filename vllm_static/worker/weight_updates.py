"""Sleep mode and updates of the weights: what lies on a device for item sets survives the one and follows the other."""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from itemset.serving.config import StaticConfig
from itemset.serving.hooks import IMPORTED
from vllm_static import compat
from vllm_static.compat import hook

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


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
    path = StaticConfig.of(runner.vllm_config.additional_config).item_set_draft_head
    if (processor := compat.item_sets(runner)) is not None:
        processor.narrow.refresh()
        if path is not None and processor.head is not None:
            from itemset.draft_head.head import DraftHead

            processor.head.load_state_dict(DraftHead.load(path, processor.arena.device).state_dict())
