"""NEZHA's tables 3 and 4 (its section 4.3): the head beside its model's beam, and heads that lack a part.

python benchmarks/papers.py nezha --json docs/benchmarks/papers.json

Films, three seeds, each with semantic IDs and a model of its own; each row's head learns with a copy of the model. "no
state" is the paper's NEZHA-1, "no placeholders" NEZHA-2, "sum" NEZHA-3 (a transition that adds), "no check" NEZHA-4;
"MTP" are heads that see the last hidden state alone. Hits and NDCG of lists by 64 beams; "below its beam" is the mean
difference of hits at 10 from the beam search of the same model, "±" 1.96 standard errors of it over users (each the
mean of the seeds), "p" a paired t-test's. A second table has heads that are more than the paper's. `papers.py
groceries` is the first one for another catalogue.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import catalogues as small
import numpy as np
import torch
from numpy.typing import NDArray
from runner import Report, Row, isolated
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import itemset
from itemset.adapters.decode_loop import draft_search
from itemset.adapters.huggingface import draft_states
from itemset.draft_head.head import DraftHead
from itemset.draft_head.training import Rows
from itemset.masking.arena import Arena, room_for

SEEDS, WIDTH, USERS = (0, 1, 2), 64, 1_000
BEFORE, STEPS, BATCH = 1_200, 250, 32  # steps without a head and with it
ALL = small.VOCABULARY + 2 * small.LEVELS  # tokens: codes, and placeholders


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


class Wide(DraftHead):
    """A layer four times as wide before each level's logits."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        size, layer = self.hidden_size, torch.nn.Linear
        parts = [(layer(size, 4 * size), torch.nn.GELU(), layer(4 * size, size)) for _ in range(self.levels)]
        self.wide = torch.nn.ModuleList(torch.nn.Sequential(*part) for part in parts)

    def code_logits(self, level: int, hidden: Tensor, state: Tensor) -> Tensor:
        return super().code_logits(level, hidden + self.wide[level](hidden + state), state)


class Paused(DraftHead):
    """As many placeholders again before its own."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.placeholders = tuple(range(small.VOCABULARY, ALL))

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return super().loss(hidden[:, -1 - self.levels :], tokens)


KINDS: dict[str, type[DraftHead]] = {"no state": NoState, "no placeholders": NoPlaceholders, "sum": Sum}
KINDS |= {"MTP": Parallel, "a layer of four times the width": Wide, "twice the placeholders": Paused}
GAP = ("a layer of four times the width", "twice the placeholders", "twice the steps", "three times the head's loss")
GAP += ("taught by the model's own logits",)
ABLATIONS = ("NEZHA", "no state", "no placeholders", "sum", "MTP")


def taught_loss(head: DraftHead, states: Tensor, wanted: Tensor, logits: Tensor) -> Tensor:
    """How far the head is from what the model itself says of each level, after the same tokens. logits: of rows."""
    places = small.LEVELS * torch.arange(1, small.MEMORY + 1)[:, None] + torch.arange(small.LEVELS) - 1
    teacher, state, total = logits.detach()[:, places].flatten(0, 1), states[:, 0], states.new_zeros(())
    for level, codes in enumerate(head.codes):
        own = head.code_logits(level, states[:, level + 1], state).log_softmax(-1)
        total = total + kl_div(own, teacher[:, level, codes].log_softmax(-1), log_target=True, reduction="batchmean")
        if level + 1 < small.LEVELS:
            state = head.advance(level, state, wanted[:, level].contiguous())
    return total


def train(
    model: Any, seen: Sequence[Sequence[int]], codes: Tensor, seed: int, steps: int, name: str
) -> tuple[Any, DraftHead]:
    """A trained model and a head that go on together, as a row's name says."""
    model, first = deepcopy(model), small.VOCABULARY
    torch.manual_seed(seed)
    places = range(first, first + small.LEVELS)
    head = KINDS.get(name, DraftHead)(list(codes.T), places, hidden_size=small.SIZE, vocab_size=ALL)
    with torch.no_grad():  # as in the example: its logits begin as the model's own
        for level, row in enumerate(head.codes):
            head.logits[level].weight.copy_(model.get_input_embeddings().weight[row] / 2)
    rows = Rows(len(head.placeholders), small.LEVELS, small.MEMORY + 1)
    steps *= 2 if name == "twice the steps" else 1
    weight = 3 if name == "three times the head's loss" else 1

    def loss(items: Tensor) -> Tensor:
        tokens = codes[items].flatten(1)
        states, wanted, logits = rows.run(model, head, tokens)
        drafts = taught_loss(head, states, wanted, logits) if "taught" in name else head.loss(states, wanted)
        return weight * drafts + small.LEVELS * cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    small.learn(small.windows(seen, steps, BATCH, seed), steps, loss, (model, 1e-3), (head, 1e-2))
    return model.eval(), head.eval()


def ranks(catalogue: str, names: Sequence[str], users: int, steps: int, seed: int) -> dict[str, list[list[float]]]:
    """Of each way to a list, and of the beam beside it: the place of the item that each user took last, infinite if it
    is not among ten."""
    torch.set_num_threads(1)  # several of these run at a time
    histories, contents, _ = small.CATALOGUES[catalogue]()
    codes = small.semantic_ids(contents, seed)
    tokens, items = torch.from_numpy(codes), itemset.build(codes)
    histories = [taken for taken in histories if len(taken) > small.MEMORY]
    asked = histories[:: -(-len(histories) // users)]
    prompts = tokens[torch.tensor([taken[-1 - small.MEMORY : -1] for taken in asked])].flatten(1)
    wanted = [tuple(codes[taken[-1]].tolist()) for taken in asked]
    seen, result = [taken[:-1] for taken in histories], {}
    begun = small.trained(seen, tokens, seed, steps * BEFORE // STEPS, ALL)
    for name in names:
        model, head = train(begun, seen, tokens, seed, steps, name)
        lists = {name: drafted(model, head, items, prompts)}
        if name == "NEZHA":
            lists["no check"] = drafted(model, head, itemset.build(list(product(*map(np.unique, codes.T)))), prompts)
        beam = small.ranked(model, items, prompts, WIDTH)
        for way, found in {**lists, **({"beam": beam} if name == "NEZHA" else {})}.items():
            result[way] = [
                [one.index(item) if item in one else float("inf") for one, item in zip(every, wanted, strict=True)]
                for every in (found, beam)
            ]
    return result


@torch.no_grad()
def drafted(model: Any, head: DraftHead, item_set: itemset.ItemSet, prompts: Tensor) -> list[small.Items]:
    arena = Arena(room_for(item_set), "cpu")
    search = partial(draft_search, arena, arena.acquire(item_set), head, width=WIDTH)
    found = [search(draft_states(model, head, part)).tokens[:, :10] for part in prompts.split(64)]
    return [list(map(tuple, rows)) for rows in torch.cat(found).tolist()]


def measured(places: NDArray[Any], beam: NDArray[Any]) -> Row:
    """places, beam: [seeds, users]."""
    from scipy.stats import ttest_rel

    row: Row = {}
    for most in (5, 10):
        row |= {f"hit@{most}": float((places < most).mean())}
        row |= {f"NDCG@{most}": float(np.where(places < most, 1 / np.log2(2 + places), 0).mean())}
    hits, best = (places < 10).mean(0), (beam < 10).mean(0)
    row |= {"its beam's hit@10": float(best.mean()), "below its beam": float((best - hits).mean())}
    if (best == hits).all():
        return row
    return row | {"±": float(1.96 * (best - hits).std() / len(hits) ** 0.5), "p": float(ttest_rel(best, hits).pvalue)}


def main(arguments: argparse.Namespace, report: Report, catalogue: str = "films") -> None:
    users, steps, seeds = (10, 3, SEEDS[:1]) if arguments.quick else (USERS, STEPS, SEEDS)
    names = [*ABLATIONS, *GAP] if catalogue == "films" else ABLATIONS
    small.CATALOGUES[catalogue]()  # what is fetched and made once is there before several processes want it
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(isolated, ranks, catalogue, names, users, steps, seed) for seed in seeds]
    rows, found = list[Row](), [job.result() for job in jobs]
    for way in found[0]:
        places, beam = np.array([one[way] for one in found], float).swapaxes(0, 1)
        rows.append({"way": way} | measured(places, beam))
    report.add("nezha" if catalogue == "films" else "nezha groceries", [row for row in rows if row["way"] not in GAP])
    if catalogue == "films":
        report.add("nezha gap", [row for row in rows if row["way"] in GAP])


groceries = partial(main, catalogue="groceries")
