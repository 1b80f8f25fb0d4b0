"""Demo: a ranked list from one forward pass of the model, by a draft head that was trained with it (NEZHA).

Run it with `python3 bootstrap.py nezha`. It takes the retrieval example's semantic IDs and model, and teaches the model
and a head together what users watch next. Then it compares four lists of ten films: the head's own drafts without a
check; those that are in a hash set of all films, as in the paper; those of the same head over the set's tables; and the
beam search of the same model without the head.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import nezha_model
import numpy as np
import retrieval
import retrieval_data
import retrieval_model
import torch
from films_data import CACHE, build_index, titles_by_key
from serving import run
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import itemset
from itemset.adapters.decode_loop import beam_search, draft_search
from itemset.adapters.huggingface import draft_states
from itemset.devices import Arena, room_for
from itemset.draft_head import DraftHead

WIDTHS = (10, 64)
K = 10
Items = list[tuple[int, ...]]


def prepare(folder: Path, histories: Sequence[Sequence[int]]) -> tuple[Path, Path]:
    """Make the model with its head, and the index of its semantic IDs; return the model's folder, and the index."""
    seen = [watched[:-1] for watched in histories]
    begin, before = retrieval.prepare(CACHE / "retrieval", None)
    model, catalogue, index = folder / "model", CACHE / "retrieval" / "films.csv", folder / "films.itemset"
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with catalogue.open(newline="", encoding="utf-8") as file:
            keys = [int(row["movie_id"]) for row in csv.DictReader(file)]
        tokens = itemset.load(before).tokens(keys)
        print("teaching the model and a draft head together (once, about three minutes on two cores)", flush=True)
        nezha_model.train(seen, dict(zip(keys, tokens, strict=True)), np.array(tokens), begin, model)
    build_index(catalogue, "semantic_id", model, index)  # the tokenizer has the placeholders now
    return model, index


class Found(NamedTuple):
    """A list: its drafts, best first; how many prefixes the model ran for it, and in how many rounds."""

    drafts: Items
    passes: int
    rounds: int


class Lists:
    """The ways to a list, each a function of a prompt, [1, tokens] int64, and of a width."""

    def __init__(self, model: Path, films: itemset.ItemSet, kind: type[DraftHead] = DraftHead) -> None:
        self._longest = films.longest
        self._arena = Arena(room_for(films), "cpu")
        self._number = self._arena.acquire(films)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._head: DraftHead | None = None
        if (path := model / nezha_model.HEAD_FILE).exists():
            self._head = kind.load(path)
            self._head.check_set(films)
        self._valid = set(map(tuple, films.items()))

    def drafted(self, prompt: Tensor, width: int) -> Found:
        """Make a list by the head, over the set's tables."""
        assert self._head is not None
        hidden = draft_states(self._model, self._head, prompt)
        ranking = draft_search(self._arena, self._number, self._head, hidden, width=width)
        return Found(self._items(ranking), 1, 1)

    @torch.no_grad()
    def free(self, prompt: Tensor, width: int, *, hash_set: bool) -> Found:
        """Make a list by the head alone: each level's likeliest codes. hash_set: of the last level's candidates only
        those that are films."""
        head = self._head
        assert head is not None
        hidden = draft_states(self._model, head, prompt)[0]
        states, scores, drafts = hidden[:1], torch.zeros(1), torch.zeros(1, 0, dtype=torch.int64)
        for level, codes in enumerate(head.codes):
            together = scores[:, None] + head.code_logits(level, hidden[level + 1], states).log_softmax(-1)
            last = level + 1 == head.levels
            order = together.flatten().sort(descending=True)
            parents, places = order.indices // len(codes), order.indices % len(codes)
            if last and hash_set:
                candidates = torch.cat((drafts[parents], codes[places, None]), 1).tolist()
                kept = torch.tensor(
                    [i for i, row in enumerate(candidates) if tuple(row) in self._valid], dtype=torch.int64
                )
                order, parents, places = order.values[kept], parents[kept], places[kept]
            else:
                order = order.values
            scores, parents, places = order[:width], parents[:width], places[:width]
            drafts = torch.cat((drafts[parents], codes[places, None]), 1)
            if not last:
                states = head.advance(level, states[parents], codes[places])
        return Found([tuple(row) for row in drafts.tolist()], 1, 1)

    @torch.no_grad()
    def beam(self, prompt: Tensor, width: int) -> Found:
        """Make a list by the model's own passes, over the set's tables."""
        cache: Any = None
        rounds = 0

        def logits(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal cache, rounds
            if cache is not None:
                if rounds == 1:
                    cache.batch_repeat_interleave(width)
                else:
                    cache.reorder_cache(parents[0])
            given = prompt if cache is None else tokens[0, :, -1:]
            output = self._model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, rounds = output.past_key_values, rounds + 1
            return output.logits.transpose(0, 1)

        options = {"batch": 1, "width": width, "longest": self._longest}
        ranking = beam_search(self._arena, self._number, logits, **options)
        return Found(self._items(ranking), 1 + (rounds - 1) * width, rounds)

    @staticmethod
    def _items(ranking: Any) -> Items:
        return [tuple(row) for row in ranking.tokens[0, : ranking.found[0]].tolist()]

    def valid(self, draft: tuple[int, ...]) -> bool:
        return draft in self._valid


Way = Callable[[Tensor, int], Found]


class Tally:
    """The sums over some lists: hits, valid drafts, times."""

    def __init__(self) -> None:
        self.hits, self.gains, self.shares = list[bool](), list[float](), list[float]()
        self.seconds, self.passes, self.rounds = list[float](), 0, 0

    def add(self, found: Found, wanted: tuple[int, ...] | None, valid: float, seconds: float) -> None:
        """Count a list of which `wanted` was watched next, None if that is no film of the set. valid: the share of its
        drafts that are."""
        first = found.drafts[:K]
        if wanted is not None:
            self.hits.append(wanted in first)
            self.gains.append(1 / math.log2(2 + first.index(wanted)) if wanted in first else 0.0)
        self.shares.append(valid)
        self.seconds.append(seconds)
        self.passes, self.rounds = found.passes, found.rounds

    def row(self) -> str:
        return (
            f"{mean(self.hits):>6.3f}  {mean(self.gains):>7.4f}  {mean(self.shares):>5.3f}  {self.passes:>6}  "
            f"{self.rounds:>6}  {1e3 * median(self.seconds):>6.1f}"
        )


def show(users: int) -> bool:
    """Prepare, compare and print; return True if every draft over the tables is a film of its set."""
    histories = retrieval_data.histories()
    folder, index = prepare(CACHE / "nezha", histories)
    before = CACHE / "retrieval" / "model"
    torch.set_num_threads(1)  # so small a model gains nothing by more
    films, end = itemset.load(index), AutoTokenizer.from_pretrained(folder).eos_token_id
    keys = list(titles_by_key())
    encoded = {key: list(tokens) for key, tokens in zip(keys, films.tokens(keys), strict=True)}
    asked = [(watched[:-1][-retrieval_model.MEMORY :], tuple(encoded[watched[-1]])) for watched in histories[:users]]
    prompts = [torch.tensor([retrieval_model.tokens_of(seen, encoded, end)]) for seen, _ in asked]
    wanted = [film for _, film in asked]
    quarter = itemset.view(films, only_keys=random.Random(0).sample(keys, len(keys) // 4))
    legal = True
    for what, chosen in (("all films", films), ("a quarter of the films, by chance, is in stock", quarter)):
        lists, plain = Lists(folder, chosen), Lists(before, chosen)
        ways: dict[str, Way] = {
            "head, no check": partial(lists.free, hash_set=False),
            "head, hash set": partial(lists.free, hash_set=True),
            "head, the tables": lists.drafted,
            "beam, same model": lists.beam,
            "beam, model before": plain.beam,
        }
        print(f"\n{what}; {len(prompts)} users, {sum(map(lists.valid, wanted))} of whom then watch one of these.")
        compare(lists, ways, prompts, wanted)
        found = [lists.drafted(prompt, K).drafts for prompt in prompts[:50]]
        legal = legal and all(len(drafts) == K and all(map(lists.valid, drafts)) for drafts in found)
    return legal


def compare(lists: Lists, ways: dict[str, Way], prompts: Sequence[Tensor], wanted: Sequence[tuple[int, ...]]) -> None:
    """Ask all ways in turns, and print their results."""
    print(
        "valid: the share of a beam's drafts that are such films, of as many as it is wide; ms: median time of a list"
    )
    head = ("width", "lists by", "hit@10", "NDCG@10", "valid", "passes", "rounds", "ms")
    print("{:>5}  {:<18}  {:>6}  {:>7}  {:>5}  {:>6}  {:>6}  {:>6}".format(*head))
    for width in WIDTHS:
        tallies = {name: Tally() for name in ways}
        for way in ways.values():
            way(prompts[0], width)  # compiles
        for prompt, film in zip(prompts, wanted, strict=True):
            for name, way in ways.items():
                begun = time.perf_counter()
                found = way(prompt, width)
                seconds = time.perf_counter() - begun
                share = sum(map(lists.valid, found.drafts)) / width
                tallies[name].add(found, film if lists.valid(film) else None, share, seconds)
        for name, tally in tallies.items():
            print(f"{width:>5}  {name:<18}  {tally.row()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], help="whose environment this runs in; none is started")
    parser.add_argument("--users", type=int, default=943)
    return run(partial(show, parser.parse_args().users))


if __name__ == "__main__":
    sys.exit(main())
