"""The hooks into SGLang's schedulers, which share their processes with the workers: grammars, memory and masks."""

from collections.abc import Callable
from typing import Any

from itemset.serving.config import BACKEND, StaticConfig
from sglang_static import compat
from sglang_static.compat import hook
from sglang_static.scheduler import masks


@hook("sglang.srt.constrained.grammar_manager:GrammarManager.process_req_with_grammar")
def _process_grammar(original: Callable[..., Any], self: Any, req: Any) -> bool:
    """A request is given its item set."""
    backend = getattr(self.grammar_backend, "static_backend", None)
    admitted = None if backend is None else backend.admit(self, req)
    return original() if admitted is None else admitted


@hook("sglang.srt.constrained.base_grammar_backend:BaseGrammarBackend._init_value_dispatch")
def _make_grammar(original: Callable[..., Any], self: Any, key: tuple[str, str]) -> Any:
    """Very many texts in a constraint become a set."""
    of_texts = getattr(self, "of_texts", None)
    made = None if of_texts is None else of_texts(key)
    return original() if made is None else made


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
    from sglang_static.scheduler.backend import make_backend

    compat.grammars.register_grammar_backend(BACKEND, make_backend)
    config = StaticConfig.of(compat.options())
    if config.why_on_host(compat.why_host_path(self.server_args)) is None:
        sampler = masks.ItemSetSampler(config, self.device, self.model_config.vocab_size)
        self.item_set_sampler, sampler.runner = sampler, self
        if compat.resolved(self.server_args).speculative_algorithm is not None:
            from sglang_static.scheduler import drafts

            drafts.warn_of_unmasked(compat.resolved(self.server_args), forced=config.forced_drafts)
    return result


@hook("sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation")
def _forward(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    """Which rows of a step have an item set."""
    if batch is not None and (sampler := getattr(self.model_runner, "item_set_sampler", None)) is not None:
        sampler.stage(batch)
    return original()
