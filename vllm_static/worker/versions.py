"""New versions of sets in a worker, which the engine core's `device_path` sends: opened, copied, served."""

from collections.abc import Sequence
from typing import Any

from itemset.masking.arena import check_tables
from itemset.masking.arena_plan import Piece
from itemset.serving.engine.version_rollout import or_reason
from itemset.serving.wire import Prepare, Stage
from vllm_static import compat
from vllm_static.compat import logger


def prepare_in_worker(worker: Any, message: Prepare, piece: Piece | None) -> Stage | str:
    """Open a version beside the steps of a worker, and copy one piece of it to its device. Return the stage, or why it
    cannot be had: an error in a worker would end the engine. piece: its place; None while the engine core opens it."""

    def prepare() -> Stage:
        if compat.asleep(worker):
            return Stage.OPENING
        if (sets := compat.item_sets(compat.runner_of(worker))) is None:
            return Stage.DEVICE
        opened = sets.catalogue.begin(message, check_tables)
        if opened is None or piece is None:
            return Stage.OPENING
        return Stage.DEVICE if sets.arena.place_next(opened.name, opened.item_set, piece) else Stage.COPYING

    return or_reason(prepare, logger)


def close_in_worker(worker: Any, name: str, version: str | None, open_sets: Sequence[str]) -> None:
    """Serve a version that was prepared, None if its set is gone. Keep `open_sets` alone, by their digests."""
    try:
        if (sets := compat.item_sets(compat.runner_of(worker))) is None:
            return
        if version is None:
            sets.catalogue.drop(name)
        elif (opened := sets.catalogue.begun(name, version)) is not None:
            sets.catalogue.serve(opened)
        sets.arena.forget_views(open_sets)
    except Exception:
        logger.exception("Versions of an item set could not be closed")
