"""The draft-head example's training: the retrieval example's model and a head learn together (NEZHA, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from films_data import emptied
from numpy.typing import NDArray
from retrieval_model import MEMORY

import itemset
from itemset.cli.train import HEAD_FILE
from itemset.draft_head import DraftHead
from itemset.draft_head.training import Schedule, train_head

STEPS, BATCH, RATE = 600, 24, 1e-3  # of a model that has learnt the histories already


def train(
    histories: Sequence[Sequence[int]],
    encoded: dict[int, list[int]],
    codes: NDArray[Any],
    begin: Path,
    folder: Path,
    *,
    kind: type[DraftHead] = DraftHead,
    seed: int = 0,
    steps: int | None = None,
) -> None:
    """Teach a model and a head what comes next, and save both, with the tokenizer, into a folder.

    encoded: each film's tokens by its key. codes: the same tokens, [films, L]. begin: the folder of a trained model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(begin), AutoModelForCausalLM.from_pretrained(begin)
    watched = [[encoded[film] for film in films] for films in histories]
    schedule = Schedule(MEMORY + 1, steps or STEPS, BATCH, seed, RATE)
    head = train_head(model, tokenizer, itemset.build(codes), watched, schedule, kind=kind)
    unfinished = emptied(folder.with_suffix(".unfinished"))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    head.save(unfinished / HEAD_FILE)
    unfinished.rename(folder)
