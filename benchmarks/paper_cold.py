"""STATIC's table 3: lists of items that no training history holds, with a filter of these and without.

python benchmarks/papers.py cold --json docs/benchmarks/papers.json

Semantic IDs are made of all items' contents, so that a new item shares codes with old ones. A model learns from the
histories of two thirds of the users, in which the newest 5 % of the items do not occur. The other third is asked, after
19 old items, for the new one that each took next; three such thirds make all users, each with a seed, IDs and models of
its own. "No longer new" are models that learnt from the new items in the other users' histories: what there is to be
known. "Nearest contents" asks no model: new items by their likeness to the mean of the user's. "±" is 1.96 standard
errors over users.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import catalogues as small
import numpy as np
import torch
from numpy.typing import NDArray
from runner import Report, Row, isolated

import itemset

SHARES, FOLDS = (0.02, 0.05), 3
USERS, EVENTS = 250, 3  # of a fold that are asked for at most, and of each of them
STEPS = 600
WIDTH = 64  # of lists over all items


def asked(histories: dict[int, list[int]], new: set[int], old: set[int]) -> list[tuple[int, list[int], int]]:
    """Users, each with the last old items before a new one, and that."""
    found = []
    for user, taken in histories.items():
        before = [(user, [i for i in taken[:at] if i in old], item) for at, item in enumerate(taken) if item in new]
        found.append([(user, seen[-small.MEMORY :], item) for _, seen, item in before if len(seen) >= small.MEMORY])
    return [event for events in [events for events in found if events][:USERS] for event in events[:EVENTS]]


def nearest(contents: NDArray[Any], before: Sequence[Sequence[int]], new: Sequence[int]) -> list[list[int]]:
    centred = contents - contents.mean(0)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    order = np.argsort(-centred[np.array(before)].mean(1) @ centred[new].T, kind="stable")
    return [[new[i] for i in row[:10]] for row in order]


def fold(name: str, seed: int, steps: int) -> list[list[Any]]:
    """Rows of: share of the newest, way, user, and the place of the item taken in the list, 10 if it is not there."""
    torch.set_num_threads(1)  # two of these run at a time
    catalogue = small.CATALOGUES[name]()
    codes = small.semantic_ids(catalogue.contents, seed)
    number = {tuple(row): i for i, row in enumerate(codes.tolist())}
    everything, tokens = itemset.build(codes), torch.from_numpy(codes)
    old = set(catalogue.newest[round(max(SHARES) * len(codes)) :])
    others = [taken for user, taken in enumerate(catalogue.histories) if user % FOLDS != seed]
    warm = [[item for item in taken if item in old] for taken in others]
    plain, known = (small.trained(taken, tokens, seed, steps).eval() for taken in (warm, others))
    tested = {user: taken for user, taken in enumerate(catalogue.histories) if user % FOLDS == seed}
    rows: list[list[Any]] = []
    for share in SHARES:
        new = catalogue.newest[: round(share * len(codes))]
        events = asked(tested, set(new), old)
        before = [event[1] for event in events]
        every = partial(small.ranked, item_set=everything, prompts=tokens[torch.tensor(before)].flatten(1), width=WIDTH)
        few = partial(every, item_set=itemset.view(everything, only_keys=new), width=len(new))
        ways: dict[str, Callable[[], list[small.Items]]] = {
            "no filter": partial(every, plain),
            "filter": partial(few, plain),
            "filter, renormalised": partial(few, plain, renormalised=True),
            "filter, no longer new": partial(few, known),
        }
        lists = {way: [[number[row] for row in one] for one in ask()] for way, ask in ways.items()}
        lists["nearest contents"] = nearest(catalogue.contents, before, new)
        for way, found in lists.items():
            for (user, _, item), one in zip(events, found, strict=True):
                rows.append([share, way, user, one.index(item) if item in one else 10])
    return rows


def main(arguments: argparse.Namespace, report: Report) -> None:
    folds, steps, rows = range(1 if arguments.quick else FOLDS), 3 if arguments.quick else STEPS, list[Row]()
    # What is fetched and made once is there before several processes want it.
    newest = {name: load().newest for name, load in small.CATALOGUES.items()}
    with ThreadPoolExecutor(2) as pool:
        jobs = {name: [pool.submit(isolated, fold, name, seed, steps) for seed in folds] for name in newest}
    for name in newest:
        found = [row for job in jobs[name] for row in job.result()]
        for share in SHARES:
            size = round(share * len(newest[name]))
            users, _ = np.array([row[2:] for row in found if row[:2] == [share, "filter"]]).T
            about: Row = {"catalogue": name, "new items": size, "asked": len(users), "users": len(np.unique(users))}
            guessed: Row = {"recall@1": 1 / size, "± @1": 0.0, "recall@10": 10 / size, "± @10": 0.0}
            rows.append(about | {"way": "guessing"} | guessed)
            for way in dict.fromkeys(row[1] for row in found):
                row: Row = about | {"way": way}
                places = np.array([row[3] for row in found if row[:2] == [share, way]])
                for most in (1, 10):
                    hits = places < most
                    error = np.linalg.norm(np.bincount(users, hits - hits.mean())) / len(hits)
                    row |= {f"recall@{most}": float(hits.mean()), f"± @{most}": 1.96 * float(error)}
                rows.append(row)
    report.add("cold", rows)
