"""New versions of sets in a worker, which the engine core's `device_path` sends: opened, copied, served."""

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from itemset.serving.engine.version_rollout import or_reason
from itemset.serving.wire import Prepare, Stage
from vllm_static import compat

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


def prepare_in_worker(worker: Any, message: Prepare, piece: Any) -> Stage | str:
    """Open a version beside the steps of a worker, and copy one piece of it to its device. Return the stage, or why it
    cannot be had: an error in a worker would end the engine.

    piece: its place, `masking.arena_plan.Piece`; None while the engine core opens it.
    """

    def prepare() -> Stage:
        if compat.asleep(worker):
            return Stage.OPENING
        processor = compat.item_sets(compat.runner_of(worker))
        return Stage.DEVICE if processor is None else processor.prepare(message, piece)

    return or_reason(prepare, logger)


def close_in_worker(worker: Any, name: str, version: str | None, open_sets: Sequence[str]) -> None:
    """Serve a version that was prepared, None if its set is gone. Keep `open_sets` alone, by their digests."""
    try:
        if (processor := compat.item_sets(compat.runner_of(worker))) is not None:
            processor.close(name, version, open_sets)
    except Exception:
        logger.exception("Versions of an item set could not be closed")
