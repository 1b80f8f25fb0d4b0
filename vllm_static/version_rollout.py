"""Version roll-outs in vLLM: an engine core holds room for a version in the plan, and its workers open and copy it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm.logger import init_logger

from itemset.masking.arena import ArenaFullError
from itemset.serving.rollout_messages import Prepare, Stage
from itemset.serving.version_rollout import Devices, or_reason, warn_of_no_room
from itemset.serving.versions import Opened
from vllm_static import compat
from vllm_static.device_path import DevicePath

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


class WorkerDevices(Devices):
    """The devices of an engine core's workers. `engine` is its executor. Called by the engine's loop, between steps."""

    def __init__(self, device: DevicePath) -> None:
        self._device = device

    def advance(self, engine: Any, message: Prepare, opened: Opened | str | None) -> list[Stage | str]:
        if isinstance(opened, str):
            return [opened]
        pieces = None
        if opened is not None:
            try:
                pieces = [list(piece) for piece in self._device.holdings.hold(opened.name, opened.sets)]
            except ArenaFullError as error:
                warn_of_no_room(opened, error, "in --additional-config", logger)
                return [Stage.HOST]
        stages: list[Stage | str] = engine.collective_rpc(prepare_in_worker, args=(message, pieces))
        return stages

    def close(self, engine: Any, name: str, version: str | None, open_sets: Collection[str]) -> None:
        """Have the workers let go of what this core has closed, at the same step: `Plan.send_again`."""
        self._device.holdings.drop(name) if version is None else self._device.holdings.settle(name)
        self._device.plan.send_again(open_sets)
        engine.collective_rpc(close_in_worker, args=(name, version, list(open_sets)))


def prepare_in_worker(worker: Any, message: Prepare, pieces: Any) -> Stage | str:
    """Open a version beside the steps of a worker, and copy one piece of it to its device. Return the stage, or why it
    cannot be had: an error in a worker would end the engine.

    pieces: its places, `masking.arena_reservations.Pieces`; None while the engine core opens it.
    """

    def prepare() -> Stage:
        processor = _item_sets(worker)
        return Stage.DEVICE if processor is None else processor.prepare(message, pieces)

    return or_reason(prepare, logger)


def close_in_worker(worker: Any, name: str, version: str | None, open_sets: Sequence[str]) -> None:
    """Serve a version that was prepared, None if its set is gone. Keep `open_sets` alone, by their digests."""
    try:
        if (processor := _item_sets(worker)) is not None:
            processor.close(name, version, open_sets)
    except Exception:
        logger.exception("Versions of an item set could not be closed")


def _item_sets(worker: Any) -> Any:
    """Return the processor of a worker that samples, None if the worker does not, in a pipeline."""
    from vllm_static.processor import item_sets

    runner = compat.runner_of(worker)
    return None if getattr(runner, "sampler", None) is None else item_sets(runner)
