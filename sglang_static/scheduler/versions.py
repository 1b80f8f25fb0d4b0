"""Version roll-outs in the schedulers: what they do between their steps."""

from collections.abc import Callable, Collection
from typing import Any

from itemset.item_set import ItemSet
from itemset.masking.arena import check_tables
from itemset.serving.catalogue import Opened
from itemset.serving.engine.version_rollout import Devices, hold, or_reason
from itemset.serving.wire import Prepare, Stage
from sglang_static import compat
from sglang_static.compat import hook, logger


@hook("sglang.srt.managers.scheduler:Scheduler.handle_dumper_control", why="new versions of followed sets are taken up")
def _handle_dumper_control(original: Callable[..., Any], self: Any, recv_req: Any) -> None:
    if recv_req.method != compat.METHOD:
        original()
        return
    answer = self.grammar_manager.grammar_backend.static_backend.preparer.answer(recv_req.body, self)
    output = compat.messages.DumperControlReqOutput(success=True, response=[answer])
    self.ipc_channels.send_to_tokenizer.send_output(output, recv_req)


class RankDevices(Devices):
    """The devices of tensor-parallel ranks, which get the same messages in the same step, and agree on each stage.
    `engine` is this rank's scheduler, whose loop calls this between steps."""

    def __init__(self, sampler: Any) -> None:
        """sampler: the ItemSetSampler; None on the host path."""
        self._sampler = sampler

    def check(self, item_set: ItemSet) -> None:
        if self._sampler is not None:
            check_tables(item_set)

    def advance(self, engine: Any, message: Prepare, opened: Opened | str | None) -> list[Stage | str]:
        each = compat.of_all_ranks(engine, opened if isinstance(opened, str) else opened is not None)
        if not all(one is True for one in each):
            return [one if isinstance(one, str) else Stage.OPENING for one in each]
        if self._sampler is None:
            return [Stage.HOST]
        stages: list[Stage | str] = compat.of_all_ranks(engine, or_reason(lambda: self._copy(engine, opened), logger))
        if Stage.HOST in stages:
            self._sampler.holdings.give_up(message.name)
        return stages

    def _copy(self, scheduler: Any, opened: Any) -> Stage:
        if (piece := hold(self._sampler.holdings, opened, "of the plugin's options", logger)) is None:
            return Stage.HOST
        with scheduler.forward_stream_ctx:  # whose steps may read what is overwritten
            there = self._sampler.arena.place_next(opened.name, opened.item_set, piece)
        return Stage.DEVICE if there else Stage.COPYING

    def close(self, engine: Any, name: str, version: str | None, open_sets: Collection[str]) -> None:
        if self._sampler is not None:
            self._sampler.holdings.settle(name, version)
            self._sampler.arena.forget_views(open_sets)
