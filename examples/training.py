"""Demo: the retrieval example's model goes on learning, by GRPO on its own rollouts: which probabilities should it use?

Run it with `python3 bootstrap.py train`. A rollout is a film; its reward is high if the user watched it soon: 1 for the
film watched next, 1 / log2(1 + place) for the films after it. Four ways, three seeds each, from one model:

    unconstrained         rollouts of any tokens, log p of the whole vocabulary
    log p                 rollouts inside the set of films, log p
    log q                 rollouts inside, log q: among the legal tokens
    log q + 0.1 log m     and a tenth of the log legal mass in the loss

It prints what came of each, and writes docs/pictures/training.svg with `--save`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import retrieval_data
import torch
from films_data import CACHE, ROOT
from retrieval import K, prepare
from retrieval_model import MEMORY
from torch import Tensor
from training_curves import picture
from transformers import AutoModelForCausalLM

import itemset
from itemset.adapters.decode_loop import beam_search
from itemset.adapters.huggingface import ItemSetLogitsProcessor
from itemset.devices import Arena, room_for
from itemset.training import legal_log_probs

WAYS = {"unconstrained": None, "log p": None, "log q": 0.0, "log q + 0.1 log m": 0.1}
"""The ways, and the weight of the log legal mass of those that train log q."""
SEEDS = (0, 1, 2)
STEPS, EVERY = 60, 15  # of training; between two looks
USERS, DRAWS = 24, 8  # of a step; rollouts of each user
LOOKED_AT, LOOKS = 64, 16  # windows of a look, and rollouts of each
RATE = 3e-4
AHEAD = 10  # films watched next that have a reward
MEASURES = ("reward inside", "reward left to itself", "p(set)")
Window = tuple[list[int], list[int]]  # the films watched, and those watched next


@dataclass
class Films:
    """The films of the index and their end token. tokens: of each film, by its key."""

    index: itemset.ItemSet
    end: int

    def __post_init__(self) -> None:
        keys = self.index.keys.to_pylist()
        self.tokens = dict(zip(keys, map(tuple, self.index.tokens(keys)), strict=True))

    def prompts(self, windows: Sequence[Window]) -> Tensor:
        return torch.tensor([[t for film in seen for t in (*self.tokens[film], self.end)] for seen, _ in windows])

    def rewards(self, ids: Tensor, windows: Sequence[Window]) -> Tensor:
        """Return the rewards of rollouts [windows, rollouts, T], whatever tokens these are."""
        gains = []
        for rows, (_, after) in zip(ids.tolist(), windows, strict=True):
            gain = {(*self.tokens[film], self.end): 1 / math.log2(2 + i) for i, film in enumerate(after)}
            gains.append([gain.get(tuple(row), 0.0) for row in rows])
        return torch.tensor(gains)


def windows_of(histories: Sequence[Sequence[int]], chance: random.Random) -> Iterator[Window]:
    """Return windows of what users have watched, without the last film of each, which the lists are to find."""
    long_enough = [watched[:-1] for watched in histories if len(watched) > MEMORY + AHEAD]
    while True:
        watched = chance.choice(long_enough)
        first = chance.randrange(len(watched) - MEMORY - AHEAD + 1)
        seen, after = watched[first : first + MEMORY], watched[first + MEMORY : first + MEMORY + AHEAD]
        yield list(seen), list(after)


class Beside:
    """A model's passes over prompts [B, P], each computed once, and over rollouts beside each other after them."""

    def __init__(self, model: Any, prompts: Tensor) -> None:
        out = model(prompts, use_cache=True, logits_to_keep=1)
        self._model, self._length, self._first, self._cache = model, prompts.shape[1], out.logits, out.past_key_values

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of the rollouts' tokens and the next ones, [..., T + 1, V]. ids: [B, rollouts, T]."""
        size, each, steps = ids.shape
        first = self._first[:, None].expand(-1, each, -1, -1)
        if not steps:
            return first
        # Columns of one step stand together. Each sees the prompt, and its own rollout so far.
        rollout, step = torch.arange(each).repeat(steps), torch.arange(steps).repeat_interleave(each)
        own = (rollout[:, None] == rollout) & (step[:, None] >= step)
        mask = torch.cat((own.new_ones(len(own), self._length), own), 1)
        options = {"attention_mask": mask[None, None], "position_ids": self._length + step[None]}
        rows = ids.transpose(1, 2).flatten(1)
        logits = self._model(rows, past_key_values=self._cache, **options).logits
        self._cache.crop(-rows.shape[1])
        return torch.cat((first, logits.view(size, steps, each, -1).transpose(1, 2)), 2)

    @torch.no_grad()
    def rollouts(self, each: int, films: Films, inside: bool) -> Tensor:
        """Draw rollouts of each prompt: ids [B, each, T], inside the set of films or of any tokens."""
        legal = ItemSetLogitsProcessor(films.index, prompt_length=0, stop_tokens=films.end)
        ids = torch.empty(len(self._first), each, 0, dtype=torch.int64)
        for _ in range(films.index.longest + 1):
            last = self.logits(ids)[:, :, -1].flatten(0, 1)
            scores = legal(ids.flatten(0, 1), last) if inside else last
            token = torch.multinomial(scores.softmax(-1), 1)
            ids = torch.cat((ids, token.view(*ids.shape[:2], 1)), 2)
        return ids


def loss_of(way: str, logits: Tensor, ids: Tensor, rewards: Tensor, films: Films) -> Tensor:
    """Return GRPO's loss of one update: a rollout's advantage is its reward relative to the others of its prompt."""
    good = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logits, ids = logits.flatten(0, 1), ids.flatten(0, 1)
    if way == "unconstrained":
        log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return -(good * (log_probs - log_probs.detach()).exp()).mean()
    log_q, log_mass = legal_log_probs(logits, ids, films.index, stop_tokens=films.end)
    assert log_mass is not None
    weight = WAYS[way]
    log_probs = log_q + log_mass if weight is None else log_q
    return -(good * (log_probs - log_probs.detach()).exp()).mean() - (weight or 0) * log_mass.sum(1).mean()


@torch.no_grad()
def look(model: Any, films: Films, windows: Sequence[Window]) -> list[float]:
    """Return MEASURES by rollouts inside the set: their legal mass weights them to the model left to itself."""
    passes = Beside(model, films.prompts(windows))
    ids = passes.rollouts(LOOKS, films, inside=True)
    logits = passes.logits(ids)[:, :, :-1].flatten(0, 1)
    _, log_mass = legal_log_probs(logits, ids.flatten(0, 1), films.index, stop_tokens=films.end)
    assert log_mass is not None
    rewards, weights = films.rewards(ids, windows).flatten(), log_mass.sum(1).exp()
    return [float(x.mean()) for x in (rewards, rewards * weights, weights)]


@torch.no_grad()
def hits(model: Any, films: Films, histories: Sequence[Sequence[int]]) -> float:
    """Return how often the film that a user watched last is among the ten best."""
    arena = Arena(room_for(films.index), torch.device("cpu"))
    number, found = arena.acquire(films.index), list[bool]()
    cases = [(list(watched[-MEMORY - 1 : -1]), [watched[-1]]) for watched in histories if len(watched) > MEMORY]
    for first in range(0, len(cases), 100):
        part = cases[first : first + 100]
        passes = Beside(model, films.prompts(part))

        def logits_fn(tokens: Tensor, parents: Tensor, passes: Beside = passes) -> Tensor:
            return passes.logits(tokens)[:, :, -1]

        options: dict[str, Any] = {"longest": films.index.longest, "end_token": films.end}
        lists = beam_search(arena, number, logits_fn, batch=len(part), width=K, **options).tokens.tolist()
        found += [list(films.tokens[film]) in best for (_, (film,)), best in zip(part, lists, strict=True)]
    return mean(found)


def begun(folder: Path, index: Path) -> tuple[Any, Films, list[list[int]]]:
    """Return the model, the films, and what users have watched."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, Films(itemset.load(index), model.config.eos_token_id), retrieval_data.histories()


def learn(way: str, seed: int, folder: Path, index: Path) -> dict[str, Any]:
    """Train the model in a way: MEASURES every EVERY steps, and the lists' hits afterwards."""
    began, (model, films, histories) = time.monotonic(), begun(folder, index)
    torch.manual_seed(seed)
    same, windows = (windows_of(histories, random.Random(chance)) for chance in (-1, seed))
    looked_at = list(islice(same, LOOKED_AT))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    curve = [look(model, films, looked_at)]
    for step in range(STEPS):
        part = list(islice(windows, USERS))
        passes = Beside(model, films.prompts(part))
        ids = passes.rollouts(DRAWS, films, inside=way != "unconstrained")
        loss = loss_of(way, passes.logits(ids)[:, :, :-1], ids, films.rewards(ids, part), films)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            curve.append(look(model, films, looked_at))
    found = hits(model, films, histories)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in zip(MEASURES, curve[-1], strict=True))
    print(f"  {way}, seed {seed}: {shown}, hit@{K} {found:.3f} ({time.monotonic() - began:.0f} s)", flush=True)
    return {"way": way, "seed": seed, "curve": curve, "hit@10": found}


def report(runs: Sequence[dict[str, Any]], before: float) -> None:
    print(f"\n{'':>20}  {'hit@10 of lists':>19}  " + "  ".join(f"{name:>21}" for name in MEASURES))
    for name, mine, step in [("before", runs[:1], 0), *((way, runs, -1) for way in WAYS)]:
        if mine := [run for run in mine if step == 0 or run["way"] == name]:
            found = "  ".join(f"{before if step == 0 else run['hit@10']:.3f}" for run in mine)
            cells = ["  ".join(f"{run['curve'][step][i]:.3f}" for run in mine) for i in range(len(MEASURES))]
            print(f"{name:>20}  {found:>19}  " + "  ".join(f"{cell:>21}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], help="whose environment this runs in; none is started")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--save", action="store_true", help="write the picture of the documentation")
    arguments = parser.parse_args()
    model, index = prepare(CACHE / "retrieval", None)
    print(f"training in {len(arguments.ways)} ways, {len(SEEDS)} seeds each, two at a time", flush=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        first = pool.submit(hits, *begun(model, index))
        tasks = [pool.submit(learn, way, seed, model, index) for seed in SEEDS for way in arguments.ways]
        runs = [task.result() for task in tasks]
        before = first.result()
    report(runs, before)
    if arguments.save:
        (ROOT / "docs" / "pictures" / "training.svg").write_text(picture(runs, MEASURES, EVERY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
