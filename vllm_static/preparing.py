"""The engine's part in following published sets: a core takes a version up, and has its workers do so."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger

from itemset.errors import ItemSetError
from itemset.masking.arena import ArenaFullError
from itemset.serving.catalogue import Catalogue
from itemset.serving.preparing import Preparer, no_room, on_host, or_why_not
from itemset.serving.versions import Opened
from vllm_static import compat
from vllm_static.device import DevicePath

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name


class CorePreparer:
    """Answers the questions of front ends (`itemset.serving.preparing`). Called by the engine's loop, between steps."""

    def __init__(self, catalogue: Catalogue, device: DevicePath | None) -> None:
        """device: None if masks are made on the host, and the workers need not know of sets."""
        self._device = device
        self._preparer = Preparer(catalogue, logger)
        if device is not None:
            self._preparer = Preparer(catalogue, logger, self._place, self._served, self._dropped)
        self._executor: Any = None

    def answer(self, executor: Any, question: Mapping[str, Any]) -> dict[str, Any]:
        """executor: the engine core's, which reaches its workers."""
        self._executor = executor
        return self._preparer.answer(question)

    def _place(self, question: Mapping[str, Any], opened: Opened | None) -> dict[str, Any]:
        assert self._device is not None
        pieces = None
        if opened is not None:
            try:
                pieces = [list(piece) for piece in self._device.holdings.hold(opened.name, opened.sets)]
            except ArenaFullError as error:
                logger.warning(no_room(opened, error, "in --additional-config"))
                return on_host(question, opened)
        answers = self._executor.collective_rpc(prepare_in_worker, args=(dict(question), pieces))
        if refused := [answer for answer in answers if isinstance(answer, str)]:
            raise ItemSetError(refused[0])
        copying = pieces is not None and None not in answers
        return {"ready": copying and all(answers), "path": "device", "copying": copying}

    def _served(self, opened: Opened, open_sets: Collection[str]) -> None:
        assert self._device is not None
        self._device.holdings.settle(opened.name)
        self._close(opened.name, opened.version, open_sets)

    def _dropped(self, name: str, open_sets: Collection[str]) -> None:
        assert self._device is not None
        self._device.holdings.drop(name)
        self._close(name, None, open_sets)

    def _close(self, name: str, version: str | None, open_sets: Collection[str]) -> None:
        """Have the workers let go of what this core has closed, at the same step: `Plan.send_again`."""
        assert self._device is not None
        self._device.plan.send_again(open_sets)
        self._executor.collective_rpc(close_in_worker, args=(name, version, list(open_sets)))


def prepare_in_worker(worker: Any, question: Mapping[str, Any], pieces: Any) -> bool | str | None:
    """Open a version beside the steps of a worker, and copy one piece of it to its device.

    pieces: where it goes, `masking.holding.Pieces`; None while the engine core opens it. Returns whether all of it is
    there, None while it is being opened, or why it cannot be had: an error in a worker would end the engine.
    """

    def prepared() -> bool | None:
        processor = _item_sets(worker)
        return True if processor is None else processor.prepare(question, pieces)

    return or_why_not(prepared, logger)


def close_in_worker(worker: Any, name: str, version: str | None, open_sets: Sequence[str]) -> None:
    """Serve a version that was prepared, None if its set is gone, and let go of sets that the engine core has closed.

    open_sets: digests of those that are open there.
    """
    try:
        if (processor := _item_sets(worker)) is not None:
            processor.close(name, version, open_sets)
    except Exception:
        logger.exception("Versions of an item set could not be closed")


def _item_sets(worker: Any) -> Any:
    """The processor of a worker that samples; None of one that does not, of a pipeline."""
    from vllm_static.processor import item_sets

    runner = compat.runner_of(worker)
    return None if getattr(runner, "sampler", None) is None else item_sets(runner)
