"""Ranked lists by a draft head, in the front end: which requests get one."""

from collections.abc import Callable
from typing import Any

from itemset.errors import ItemSetError
from itemset.ranking.search import widest
from itemset.serving.catalogue import InlineSet, RefusedError
from itemset.serving.front.admission import Checks
from itemset.serving.front.request_fields import ListOptions
from itemset.serving.wire import INLINE, MOST_LOGITS, Tokens
from vllm_static import compat

OPTION = "item_set_draft_head"


def drafting(path: str, vllm_config: Any, checks: Checks) -> Callable[[InlineSet, ListOptions], Tokens]:
    """Open and check the head in this file, before the engine starts. Return what gives the placeholders of its lists.

    Raises ItemSetError if it is missing or damaged, of another model or tokenizer, or drafts none of the registered
    sets, and if no lists are made inside a step.
    """
    from itemset.draft_head.head import DraftHead

    if (reason := compat.why_rounds(vllm_config)) is not None:
        raise ItemSetError(
            f"{OPTION} needs lists inside the engine, and this one makes them by rounds of requests: {reason}. Omit "
            f"{OPTION}, or see docs/lists.md for what lists inside the engine need"
        )
    head, model = DraftHead.load(path), vllm_config.model_config
    known = checks.fingerprint if head.tokenizer is not None else None
    head.check(hidden_size=model.get_hidden_size(), vocab_size=model.get_vocab_size(), fingerprint=known)
    sets = checks.catalogue.registered
    if not any(item_set.longest <= head.levels for item_set in sets.values()):
        lengths = ", ".join(f"{name} has items of up to {one.longest}" for name, one in sets.items()) or "there is none"
        raise ItemSetError(
            f"{head.name} drafts {head.levels} tokens, which is too few for each registered set ({lengths}): register "
            f"the set that it was trained for, or omit {OPTION}"
        )
    placeholders, most = head.placeholders, MOST_LOGITS // (4 * head.row_size)  # beams for which there is memory

    def placeholders_of(made: InlineSet, asked: ListOptions) -> Tokens:
        """Return those of a list that the head makes: of no inline set, no proof, and no normalised lengths."""
        ours = not made.reference.startswith(INLINE) and made.item_set.longest <= len(placeholders)
        if not ours or asked.exact or asked.max_passes is not None or asked.normalise_length:
            return ()
        if (width := widest(asked.beam)) > most:
            message = f"a beam of width {width:,} has no room for the draft head's logits: ask for at most {most:,}"
            raise RefusedError("beam search", message, "width" if asked.width else "n")
        return placeholders

    return placeholders_of
