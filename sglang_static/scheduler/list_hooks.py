"""How ranked lists get into SGLang's schedulers: the beams of lists are of ours, and their memory is tried."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from itemset.serving.hooks import require
from sglang_static import compat
from sglang_static.compat import hook, logger
from sglang_static.scheduler import masks, turns

SEARCH = 1 << 29  # bytes: of a search besides its logits, most of them the keys of children and what sorts them
LOGITS = 6  # float32 rows for each row of a pass: tensor parallelism gathers and copies logits; as many are left over


@hook("sglang.srt.managers.scheduler:Scheduler.init_beam_coordinator")
def init_beam_coordinator(original: Callable[..., Any], self: Any) -> None:
    """Beams of lists are of ours; the memory of the largest pass of lists is tried before a request comes: without it
    lists take rounds."""
    from sglang_static.scheduler.lists import ItemCoordinator

    original()
    require(type(self.beam_coordinator), ItemCoordinator)
    self.beam_coordinator = ItemCoordinator(**msgspec.structs.asdict(self.beam_coordinator))
    self.static_turns = turns.Turns(self.device)
    if (sampler := masks.current()) is None:
        return
    most = self.req_to_token_pool.size
    rows = rows_in_memory(most, 4 * LOGITS * sampler.vocab_size, sampler.arena.device)
    sampler.list_rows = rows = min(compat.of_all_ranks(self, rows))
    asked = sampler.config.max_list_rows_per_step
    sampler.rows_a_step = min(rows, asked or self.chunked_prefill_size or self.max_prefill_tokens)
    if rows < most:
        logger.warning("Ranked lists: passes have memory for %s rows of %s (--mem-fraction-static)", rows, most)


def rows_in_memory(rows: int, each: int, device: torch.device) -> int:
    """Return how many of `rows` of `each` bytes a pass of lists has memory for: all, or a half as often as needed."""
    while rows:
        try:
            reserve(device, SEARCH + rows * each)
            return rows
        except RuntimeError:
            rows //= 2
    return 0


def reserve(device: torch.device, nbytes: int) -> None:
    """Take memory of the device, which PyTorch keeps for later. Raises torch.OutOfMemoryError, a RuntimeError."""
    torch.empty(nbytes, dtype=torch.uint8, device=device)
