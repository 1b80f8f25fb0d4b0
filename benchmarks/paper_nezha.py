"""NEZHA's tables 3 and 4 (its section 4.3): the head beside its model's beam, and heads that lack a part.

python benchmarks/papers.py nezha --json docs/benchmarks/papers.json

The films, the model and the training of examples/nezha.py, several seeds; each head is trained with a model of its
own. "no state" is the paper's NEZHA-1, "no placeholders" NEZHA-2, "sum" NEZHA-3 (a transition that adds), "no check"
NEZHA-4; "MTP" are heads that see the last hidden state alone. Hits and NDCG of lists by 64 beams, all users; "±" is
1.96 standard errors over users and seeds, "below the beam" the mean difference of hits at 10 from the beam search of
the same model, user by user.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runner import Report, Row, isolated
from torch import Tensor

from itemset.ranking.draft_head import DraftHead

SEEDS, WIDTH = (0, 1), 64


class NoState(DraftHead):
    def code_logits(self, level: int, hidden: Tensor, state: Tensor) -> Tensor:
        return super().code_logits(level, hidden + 0 * state, torch.zeros_like(state))


class NoPlaceholders(DraftHead):
    def code_logits(self, level: int, hidden: Tensor, state: Tensor) -> Tensor:
        return super().code_logits(level, torch.zeros_like(hidden), state)


class Sum(DraftHead):
    def advance(self, level: int, state: Tensor, tokens: Tensor) -> Tensor:
        codes = self.get_buffer(f"codes_{level}")
        places = torch.searchsorted(codes, tokens).clamp(max=len(codes) - 1)
        return state + self.embeddings[level](places)


class Parallel(NoPlaceholders):
    """MTP."""

    def advance(self, level: int, state: Tensor, tokens: Tensor) -> Tensor:
        return state


KINDS: dict[str, type[DraftHead]] = {
    "NEZHA": DraftHead,
    "no state": NoState,
    "no placeholders": NoPlaceholders,
    "sum": Sum,
    "MTP": Parallel,
}


def ranks(name: str, seed: int, users: int, steps: int) -> dict[str, list[float]]:
    """Of each way to a list, the place of the film that each user watched next, infinite if it is not among ten."""
    import nezha_model
    import retrieval
    import retrieval_data
    import retrieval_model
    from films_data import CACHE, build_index, titles_by_key
    from nezha import Lists
    from transformers import AutoTokenizer

    import itemset

    histories, keys = retrieval_data.histories(), list(titles_by_key())
    begin, before = retrieval.prepare(CACHE / "retrieval", None)
    given = itemset.load(before).tokens(keys)
    with tempfile.TemporaryDirectory() as place:
        folder, index = Path(place, "model"), Path(place, "films.itemset")
        seen = [watched[:-1] for watched in histories]
        encoded = dict(zip(keys, map(list, given), strict=True))
        teach = partial(nezha_model.train, kind=KINDS[name], seed=seed, steps=steps)
        teach(seen, encoded, np.array(given), begin, folder)
        build_index(CACHE / "retrieval" / "films.csv", "semantic_id", folder, index)
        films, end = itemset.load(index), AutoTokenizer.from_pretrained(folder).eos_token_id
        lists = Lists(folder, films, KINDS[name])
        torch.set_num_threads(1)
        ways: dict[str, Any] = {name: lists.drafted}
        if name == "NEZHA":
            ways |= {"no check": partial(lists.free, hash_set=False), "beam": lists.beam}
        found: dict[str, list[float]] = {way: [] for way in ways}
        for watched in histories[:users]:
            words = retrieval_model.tokens_of(watched[:-1][-retrieval_model.MEMORY :], encoded, end)
            for way, ask in ways.items():
                drafts = ask(torch.tensor([words]), WIDTH).drafts[:10]
                wanted = tuple(encoded[watched[-1]])
                found[way].append(drafts.index(wanted) if wanted in drafts else float("inf"))
    return found


def main(arguments: argparse.Namespace, report: Report) -> None:
    few = arguments.quick
    users, steps, seeds = (10, 3, SEEDS[:1]) if few else (943, 600, SEEDS)
    found: dict[str, list[float]] = {}
    for seed in seeds:
        for name in KINDS:
            for way, places in isolated(ranks, name, seed, users, steps).items():
                found.setdefault(way, []).extend(places)
    beam, rows = np.array(found["beam"]), list[Row]()
    for way, places in found.items():
        at = np.array(places)
        row: Row = {"way": way}
        for most in (5, 10):
            row |= {f"hit@{most}": float((at < most).mean())}
            row |= {f"NDCG@{most}": float(np.where(at < most, 1 / np.log2(2 + at), 0).mean())}
        apart = (beam < 10).astype(float) - (at < 10)
        row |= {"below the beam": float(apart.mean()), "±": float(1.96 * apart.std() / len(apart) ** 0.5)}
        rows.append(row)
    report.add("nezha", rows)
