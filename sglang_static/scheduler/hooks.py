"""The hooks into SGLang's schedulers, which share their processes with the workers: grammars, memory and masks."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from itemset.serving.config import StaticConfig
from sglang_static import compat
from sglang_static.compat import hook
from sglang_static.scheduler import drafts, masks

logger = logging.getLogger(__name__)


@hook("sglang.srt.constrained.grammar_manager:GrammarManager.process_req_with_grammar")
def _process_grammar(original: Callable[..., Any], self: Any, req: Any) -> bool:
    """A request is given its item set."""
    backend = getattr(self.grammar_backend, "static_backend", None)
    admitted = None if backend is None else backend.admit(self, req)
    waits: bool = original() if admitted is None else admitted
    return waits


@hook("sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask_batched")
def _fill_rows(original: Callable[..., Any], entries: Any, vocab_mask: Any) -> None:
    """The rows of all item sets are filled at once, whichever grammar is the first of its batch."""
    # SGLang asks the class of that one, and xgrammar's inherits the same function as ours.
    ours = [entry for entry in entries if getattr(entry.grammar, "of_set", False)]
    if ours:
        from itemset.masking.host import fill_bitmasks

        hosts = [entry.grammar.host for entry in ours]
        fill_bitmasks(hosts, [host.state for host in hosts], [entry.row for entry in ours], vocab_mask.numpy())
    original(entries=[entry for entry in entries if not getattr(entry.grammar, "of_set", False)])


@hook("sglang.srt.model_executor.model_runner:ModelRunner.load_model", always=True)
def _load_model(original: Callable[..., Any], self: Any) -> Any:
    """Device memory for item sets, before the KV cache is sized; the backend of grammars, by SGLang's own registry."""
    result = original()
    if not compat.is_ours(self.server_args) or self.is_draft_worker:
        return result
    from sglang_static.scheduler.backend import register

    register()
    config = StaticConfig.of(compat.options())
    if config.item_set_path != "host" and compat.why_host_path(self.server_args) is None:
        sampler = masks.ItemSetSampler(config, self.device, self.model_config.vocab_size)
        self.item_set_sampler, sampler.runner = sampler, self
        drafts.warn_of_unmasked(compat.resolved(self.server_args), forced=config.forced_drafts)
    return result


@hook("sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation")
def _forward(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    """Which rows of a step have an item set."""
    if batch is not None and (sampler := getattr(self.model_runner, "item_set_sampler", None)) is not None:
        sampler.stage(batch)
    return original()


SEARCH = 1 << 29  # bytes: of a search besides its logits, most of them the keys of children and what sorts them
LOGITS = 6  # float32 rows for each row of a pass: tensor parallelism gathers and copies logits; as many are left over


@hook("sglang.srt.managers.scheduler:Scheduler.init_beam_coordinator")
def init_beam_coordinator(original: Callable[..., Any], self: Any) -> None:
    """Beams of lists are of ours; the memory of the largest pass of lists is tried before a request comes: without it
    lists take rounds."""
    from sglang_static.scheduler.lists import coordinator_of

    original()
    self.beam_coordinator = coordinator_of(self.beam_coordinator)
    if (sampler := masks.current()) is None:
        return
    most = self.req_to_token_pool.size
    rows = rows_in_memory(most, 4 * LOGITS * sampler.vocab_size, partial(reserve, sampler.arena.device))
    sampler.list_rows = rows = min(compat.of_all_ranks(self, rows))
    asked = StaticConfig.of(compat.options()).max_list_rows_per_step
    sampler.rows_a_step = min(rows, asked or self.chunked_prefill_size or self.max_prefill_tokens)
    if rows < most:
        logger.warning("Ranked lists: passes have memory for %s rows of %s (--mem-fraction-static)", rows, most)


def rows_in_memory(rows: int, each: int, reserve: Callable[[int], Any]) -> int:
    """Return how many of `rows` a pass of lists has memory for: all, or a half as often as needed. 0 if none.

    each: bytes of a row. reserve: takes bytes of the device; raises RuntimeError if these are not free.
    """
    while rows:
        try:
            reserve(SEARCH + rows * each)
            return rows
        except RuntimeError:
            rows //= 2
    return 0


def reserve(device: torch.device, nbytes: int) -> None:
    """Take memory of the device, which PyTorch keeps for later. Raises torch.OutOfMemoryError, a RuntimeError."""
    torch.empty(nbytes, dtype=torch.uint8, device=device)
