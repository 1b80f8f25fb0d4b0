"""NEZHA's tables 3 and 4 (its section 4.3): the head beside its model's beam, and heads that lack a part.

python benchmarks/papers.py nezha --json docs/benchmarks/papers.json

Films, three seeds, each with semantic IDs and a model of its own; each row's head learns with a copy of the model. "no
state" is the paper's NEZHA-1, "no placeholders" NEZHA-2, "sum" NEZHA-3 (a transition that adds), "no check" NEZHA-4;
"MTP" are heads that see the last hidden state alone. Hits and NDCG of lists by 64 beams; "below its beam" is the mean
difference of hits at 10 from the beam search of the same model, "±" 1.96 standard errors of it over users (each the
mean of the seeds), "p" a paired t-test's. `papers.py groceries` is the same for another catalogue, `papers.py gap`
heads that are more than the paper's.

`papers.py seeds` and `grocery_seeds`: heads that learn with their model from the first step, five seeds, also beside
the beam of a model that learnt alone, for as many steps of as many histories.
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
TOGETHER = "from step 0"  # model and head learn together from the first of as many steps, as the model does alone
ALONE = "the beam of a model that has no head"
MANY_SEEDS = tuple(range(5))
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
    """A model and a head that learn together, as a row's name says. model: one that has learnt alone."""
    first, batch, rate = small.VOCABULARY, BATCH, 1e-3
    if name == TOGETHER:
        steps, batch, rate = steps * (BEFORE + STEPS) // STEPS, small.BATCH, small.RATE
    model = small.untrained(seed, ALL) if name == TOGETHER else deepcopy(model)
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

    small.learn(small.windows(seen, steps, batch, seed), steps, loss, (model, rate), (head, 1e-2))
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
    begun = None if TOGETHER in names else small.trained(seen, tokens, seed, steps * BEFORE // STEPS, ALL)

    def places(lists: list[small.Items]) -> list[float]:
        return [one.index(item) if item in one else float("inf") for one, item in zip(lists, wanted, strict=True)]

    if ALONE in names:  # as many steps as model and head have from step 0
        alone = small.trained(seen, tokens, seed, steps * (BEFORE + STEPS) // STEPS, ALL)
        result[ALONE] = [places(small.ranked(alone, items, prompts, WIDTH))] * 2
    for name in names:
        if name == ALONE:
            continue
        model, head = train(begun, seen, tokens, seed, steps, name)
        lists = {name: drafted(model, head, items, prompts)}
        if name == "NEZHA":
            lists["no check"] = drafted(model, head, itemset.build(list(product(*map(np.unique, codes.T)))), prompts)
        beam = small.ranked(model, items, prompts, WIDTH)
        for way, found in {**lists, **({"beam": beam} if name == "NEZHA" else {})}.items():
            result[way] = [places(found), places(beam)]
    return result


@torch.no_grad()
def drafted(model: Any, head: DraftHead, item_set: itemset.ItemSet, prompts: Tensor) -> list[small.Items]:
    arena = Arena(room_for(item_set), "cpu")
    search = partial(draft_search, arena, arena.acquire(item_set), head, width=WIDTH)
    found = [search(draft_states(model, head, part)).tokens[:, :10] for part in prompts.split(64)]
    return [list(map(tuple, rows)) for rows in torch.cat(found).tolist()]


def measured(places: NDArray[Any], beam: NDArray[Any], alone: NDArray[Any] | None = None) -> Row:
    """places, those of the beam of the same model, and of a model without a head: [seeds, users]."""
    row: Row = {}
    for most in (5, 10):
        row |= {f"hit@{most}": float((places < most).mean())}
        row |= {f"NDCG@{most}": float(np.where(places < most, 1 / np.log2(2 + places), 0).mean())}
    row |= {"its beam's hit@10": float((beam < 10).mean()), **below(places, beam, "its beam")}
    return row if alone is None else row | below(places, alone, "a beam alone", "±, alone", "p, alone")


def below(places: NDArray[Any], other: NDArray[Any], of: str, error: str = "±", chance: str = "p") -> Row:
    """How far hits at 10 are below others, 1.96 standard errors over users, and the paired t-test's p."""
    from scipy.stats import ttest_rel

    hits, best = (places < 10).mean(0), (other < 10).mean(0)
    row: Row = {f"below {of}": float((best - hits).mean())}
    if (best == hits).all():
        return row
    row |= {error: float(1.96 * (best - hits).std() / len(hits) ** 0.5)}
    return row | {chance: float(ttest_rel(best, hits).pvalue)}


def main(
    arguments: argparse.Namespace, report: Report, catalogue: str = "films",
    names: Sequence[str] = ABLATIONS, table: str = "nezha",
) -> None:  # fmt: skip
    users, steps, seeds = (10, 3, SEEDS[:1]) if arguments.quick else (USERS, STEPS, SEEDS)
    small.CATALOGUES[catalogue]()  # what is fetched and made once is there before several processes want it
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(isolated, ranks, catalogue, names, users, steps, seed) for seed in seeds]
    rows, found = list[Row](), [job.result() for job in jobs]
    for way in found[0]:
        places, beam = np.array([one[way] for one in found], float).swapaxes(0, 1)
        rows.append({"way": way} | measured(places, beam))
    report.add(table, rows)


def seeds(arguments: argparse.Namespace, report: Report, catalogue: str = "films") -> None:
    """When the head should learn."""
    users, steps, chosen = (10, 3, MANY_SEEDS[:1]) if arguments.quick else (USERS, STEPS, MANY_SEEDS)
    found = [isolated(ranks, catalogue, [TOGETHER, ALONE], users, steps, seed) for seed in chosen]
    places = {way: np.array([one[way] for one in found], float).swapaxes(0, 1) for way in found[0]}
    rows = [{"way": way} | measured(*places[way], alone=places[ALONE][0]) for way in (TOGETHER, ALONE)]
    report.add(f"nezha seeds {catalogue}", rows)


groceries = partial(main, catalogue="groceries", table="nezha groceries")
gap = partial(main, names=GAP, table="nezha gap")
grocery_seeds = partial(seeds, catalogue="groceries")
