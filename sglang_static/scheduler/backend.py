"""The grammar backend of a scheduler: item sets on the host path, everything else by xgrammar."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from itemset import ItemSet, ItemSetError
from itemset.embedded.composite_grammar import Composite
from itemset.embedded.holes import Once, Vocabulary
from itemset.embedded.placement import EBNF
from itemset.masking.arena import ArenaFullError
from itemset.masking.host import HostState
from itemset.masking.slots import MAX_STOP_TOKENS
from itemset.serving.catalogue import Catalogue
from itemset.serving.config import StaticConfig
from itemset.serving.engine.grammars import Grammars
from itemset.serving.engine.long_alternations import LongAlternations
from itemset.serving.engine.version_rollout import Preparer
from itemset.serving.warm_up import compile_all
from itemset.serving.wire import WIRE, EngineRequest, read
from sglang_static import compat
from sglang_static.compat import logger
from sglang_static.metrics import SchedulerFigures
from sglang_static.scheduler import masks
from sglang_static.scheduler.versions import RankDevices


class StaticGrammar(BaseGrammarObject):
    """One request's item set, or grammar with sets in it, as SGLang wants it (constrained/base_grammar_backend.py).

    A batch's first grammar makes, moves and applies the mask of all: ours is xgrammar's bitmask, so any may be first.
    It is never `is_terminated`: SGLang would lift its mask, and a request may go on after its end (`ignore_eos`). After
    an item the mask allows the stop tokens alone, at which SGLang ends the request.
    """

    allocate_vocab_mask = XGrammarGrammar.allocate_vocab_mask
    move_vocab_mask = staticmethod(XGrammarGrammar.move_vocab_mask)
    apply_vocab_mask = XGrammarGrammar.apply_vocab_mask

    def __init__(self, begin: Callable[[], HostState | Composite]) -> None:
        """begin: makes a request's place in its set, or in a grammar with sets in it."""
        super().__init__()
        self._begin, self.host = begin, begin()
        self.of_set = isinstance(self.host, HostState)

    def accept_token(self, token: int) -> None:
        """Raises ValueError for a token that leaves the set, or the grammar."""
        host: Any = self.host
        if not host.accept([token] if self.of_set else token):
            raise ValueError(f"the token {token} leaves the {'item set' if self.of_set else 'grammar'}")
        self.current_token = token

    def rollback(self, k: int) -> None:
        self.host.rollback(k)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        """Fill one row; a hook fills those of a step."""
        self.host.fill_bitmask(vocab_mask.numpy()[idx])

    def copy(self) -> "StaticGrammar":
        return StaticGrammar(self._begin)


class StaticBackend:
    """The item sets of one scheduler, and the way that each request with one takes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], tokenizer: Any) -> None:
        """Open the registered sets; raises ItemSetError as `itemset.load` does. vocabulary: makes the model's."""
        config, sampler = StaticConfig.of(compat.options()), masks.current()
        self._catalogue = Catalogue(config) if sampler is None else sampler.catalogue
        self._plan = None if sampler is None else sampler.arena.plan
        self._figures = SchedulerFigures(self._plan)
        self.preparer = Preparer(self._catalogue, logger, RankDevices(sampler))
        self._grammars = Grammars(vocabulary)
        options = compat.json_options()
        self._alternations = LongAlternations(vocabulary, tokenizer, config.inline_enum_size, options, logger)
        compile_all()

    def admit(self, manager: Any, request: Any) -> bool | None:
        """Give the request its set, or its grammar with sets in it. Return whether it waits for that; None without
        either. On the device path SGLang sees a request without a grammar. One that cannot be served is ended with its
        reason, HTTP 400."""
        custom = request.sampling_params.custom_params
        if (carried := read(custom)) is None:
            return None
        try:
            sets = masks.receive_sets(self._catalogue, carried, custom)
            for item_set in sets:
                self._check_room(manager.scheduler, request, item_set)
            if carried.grammar:
                del custom[WIRE]
                return self._admit_holes(manager, request, carried, sets)
            (item_set,) = sets
            compat.decode_alone(request)
            stops = compat.stop_tokens(request)
            on_device = self._claim(manager, request, item_set, stops)
            # With n above 1 SGLang first asks for no token, so that the others find the prompt in its cache.
            if request.sampling_params.max_new_tokens > 0 and carried.ranked is None:
                self._figures.admitted("device" if on_device else "host")
            if not on_device:
                grammar = StaticGrammar(partial(HostState, item_set, stops))
                request.grammar = compat.after_reasoning(manager, request, grammar)
                manager._apply_request_reasoning_config(request)
        except ItemSetError as error:
            self._figures.refused()
            request.set_finish_with_abort(str(error))
        return False

    def _claim(self, manager: Any, request: Any, item_set: ItemSet, stops: set[int]) -> bool:
        """Claim a place for the request's set for as long as the request exists. False, and nothing done, if it must
        take the host path: a full arena, too many stop tokens, or an end of its reasoning of more than one token."""
        start = compat.reasoning_end_token(manager, request)
        if self._plan is None or start is None or len(stops) > MAX_STOP_TOKENS:
            return False
        try:
            resident = self._plan.acquire(item_set)
        except ArenaFullError as error:
            logger.warning("An item set takes the host path: %s (inline_set_memory of the plugin's options)", error)
            return False
        # A request ends in many places of SGLang; that nothing holds on to it any more is the one sign of them all.
        weakref.finalize(request, self._figures.released, resident.number)
        request.item_set = masks.Admitted(item_set, resident, [start, *sorted(stops)])
        return True

    def _admit_holes(self, manager: Any, request: Any, carried: EngineRequest, sets: list[ItemSet]) -> bool:
        spec, stops = carried.grammar, compat.stop_tokens(request)
        named = dict(zip((one.reference for one in carried.sets), sets, strict=True))

        def compiled() -> Any:
            shared = self._grammars.get(spec, named.__getitem__)
            return compat.after_reasoning(manager, request, StaticGrammar(lambda: Composite(*shared.get(), stops)))

        self._figures.admitted("host")
        compat.compile_later(manager, request, WIRE, compiled, self._grammars.threads(spec))
        return True

    def of_texts(self, key: tuple[str, str]) -> StaticGrammar | None:
        """Return the grammar of a constraint that lists very many texts, with sets in their place; else None. key:
        SGLang's word for its kind, and the constraint (constrained/base_grammar_backend.py)."""
        kind = EBNF if key[0] == "full_assistant_ebnf" else key[0]
        refused = self._alternations.may_list(kind, key[1]) and compat.refuses(*key)
        listed = None if refused else self._alternations.get(kind, key[1])
        return None if listed is None else StaticGrammar(lambda: Composite(*listed))

    def _check_room(self, scheduler: Any, request: Any, item_set: ItemSet) -> None:
        """The front end checks against the context; only here the size of the KV cache is known."""
        room = scheduler.max_req_len - len(request.origin_input_ids) - 1
        if item_set.longest > room:
            raise ItemSetError(
                f"the item set has an item of {item_set.longest} tokens, but the KV cache leaves room for {room}: "
                "shorten the prompt or the item, or raise --mem-fraction-static or --max-total-tokens"
            )


def make_backend(server_args: Any, tokenizer: Any, vocab_size: int, end_tokens: Any) -> Any:
    """Return what SGLang's registry calls: its own backend for other grammars, with ours beside it."""
    backend = compat.everything_else(tokenizer, vocab_size, end_tokens)
    vocabulary = Once(lambda: Vocabulary(compat.token_info(tokenizer, vocab_size, end_tokens))).get
    backend.static_backend = static = StaticBackend(vocabulary, tokenizer)
    if getattr(backend, "_answer_frame", None) is None:  # SGLang puts xgrammar's own grammars into such frames
        getattr(backend, "grammar_backend", backend).of_texts = static.of_texts
    return backend
