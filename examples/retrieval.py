"""Demo: generative retrieval end to end, from texts to ranked lists of films for the users who watched others.

Run it with `python3 bootstrap.py retrieval`, or with `--engine sglang` after it. It takes semantic IDs of the films of
MovieLens-100K and a small model that has learnt what users watch next, builds the index, serves both, and asks for
ranked lists over HTTP: how near beams come to the exact ranking, and how often the film that a user did watch next is
among the first ten. IDs and model come with the examples; `--train` makes them again (residual k-means over embeddings
of titles and genres, then some minutes of training). `--cold-start` asks for films that no training history holds
(`cold_start`).
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import cold_start
import retrieval_data
import retrieval_model
from films_data import CACHE, build_index, print_ranked, titles_by_key
from serving import MODEL_NAME, Launch, post, run, running_server
from transformers import AutoTokenizer

import itemset

WIDTHS = (1, 4, 10, 64)
K = 10


def prepare(folder: Path, seen: Sequence[Sequence[int]] | None, **attributes: Sequence[Any]) -> tuple[Path, Path]:
    """Make semantic IDs, a model that has learnt them, and the index; return the folder of the model, and the index.

    Files of an earlier run are used again. seen: the films that the model learns from, user by user; None takes IDs and
    model that come with the examples. attributes: a value for each film, by name.
    """
    model, catalogue, index = folder / "model", folder / "films.csv", folder / "films.itemset"
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        titles = titles_by_key()
        codes = retrieval_model.shipped_ids() if seen is None else retrieval_data.semantic_ids(retrieval_data.vectors())
        texts = [retrieval_model.text_of(code) for code in codes]
        with catalogue.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["movie_id", "title", "semantic_id", *attributes])
            writer.writerows(zip(titles.keys(), titles.values(), texts, *attributes.values(), strict=True))
        tokenizer = retrieval_model.make_tokenizer(codes)
        if seen is None:
            retrieval_model.unpack(tokenizer, model)
        else:
            encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            print("teaching a small model what users watch next (once)", flush=True)
            retrieval_model.train(seen, dict(zip(titles, encoded, strict=True)), tokenizer, model)
            retrieval_model.pack(model, codes, folder / retrieval_model.SHIPPED.name)
    build_index(catalogue, "semantic_id", model, index, list(attributes))
    return model, index


class Retrieval:
    """Asks the server for what users may watch next."""

    def __init__(self, url: str, index: itemset.ItemSet, end_token: int) -> None:
        self._url, self._index, self._end = url, index, end_token

    def ranked(self, watched: Sequence[int], n: int, **options: Any) -> list[dict[str, Any]]:
        """Ask for a ranked list of `n` films after a user's, best first: each with its rank, score and key."""
        films = self._index.tokens(watched[-retrieval_model.MEMORY :])
        prompt = [token for film in films for token in (*film, self._end)]
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": self._index.longest + 1, "item_set": "films"}
        answer = post(f"{self._url}/completions", {**body, "use_beam_search": True, "n": n, **options})
        return [choice["item"] for choice in answer["choices"]]


def report(retrieval: Retrieval, histories: Sequence[Sequence[int]]) -> bool:
    """Print recall and hits, and one user's list; return True if every answer is a film."""
    titles = titles_by_key()
    print(f"asking for {len(histories) * (len(WIDTHS) + 1)} ranked lists (about a minute)", flush=True)
    before, after = [watched[:-1] for watched in histories], [watched[-1] for watched in histories]
    with ThreadPoolExecutor(8) as pool:
        lists = {width: list(pool.map(partial(retrieval.ranked, n=width, width=width), before)) for width in WIDTHS}
        exact = list(pool.map(partial(retrieval.ranked, n=K, exact=True), before))
    best = [[item["key"] for item in one] for one in exact]

    print(f"\n{len(histories)} users; a beam N wide gives N films. recall: of the exact ranking's first 1 or {K};")
    print("hit: the film watched next is among the first 10; passes: of the model, for a list")
    print("{:>12}  {:>8}  {:>9}  {:>6}  {:>7}".format("beam", "recall@1", "recall@10", "hit@10", "passes"))
    for name, found in [*((f"{width} wide", lists[width]) for width in WIDTHS), ("exact", exact)]:
        keys = [[item["key"] for item in one] for one in found]
        recalls = [
            mean(len(set(mine[:k]) & set(first[:k])) / k for mine, first in zip(keys, best, strict=True))
            for k in (1, K)
        ]
        hits = mean(film in mine[:K] for film, mine in zip(after, keys, strict=True))
        passes = mean(one[0]["passes"] for one in found)
        print(f"{name:>12}  {recalls[0]:>8.2f}  {recalls[1]:>9.2f}  {hits:>6.2f}  {passes:>7.1f}")
    most_watched = [film for film, _ in Counter(film for watched in before for film in watched).most_common(K)]
    share = mean(film in most_watched for film in after)
    print(f"baseline: hit@10 of the ten most watched films for everyone: {share:.2f}")

    user = next((i for i, film in enumerate(after) if film in best[i]), 0)
    print("\nfor instance, after ..., " + ", ".join(titles[film] for film in before[user][-3:]))
    print_ranked(exact[user], titles | {after[user]: f"{titles[after[user]]}  <- watched next"})
    whole = all(len(set(keys)) == K and set(keys) <= set(titles) for keys in best)
    return whole and all(one[0]["proven"] for one in exact)


def show(engine: str, users: int, train: bool) -> bool:
    """Prepare, serve, ask and report; return True if all is as it should be."""
    histories = retrieval_data.histories()
    seen = [watched[:-1] for watched in histories]  # the last film is what the model is asked for
    model, index = prepare(CACHE / "retrieval-trained", seen) if train else prepare(CACHE / "retrieval", None)
    with serving(engine, model, index) as retrieval:
        return report(retrieval, histories[:users])


def show_cold_start(engine: str, users: int) -> bool:
    """Do the same for films that the model has never seen watched."""
    histories, titles = retrieval_data.histories(), titles_by_key()
    fresh = cold_start.newest(cold_start.years(titles), histories)
    asked = cold_start.cases(histories, fresh)[:users]
    seen = cold_start.without(histories, fresh)
    model, index = prepare(CACHE / "cold-start", seen, in_training=[key not in fresh for key in titles])
    with serving(engine, model, index) as retrieval:
        return cold_start.report(retrieval, asked, len(titles), fresh)


@contextmanager
def serving(engine: str, model: Path, index: Path) -> Iterator[Retrieval]:
    end_token = AutoTokenizer.from_pretrained(model).eos_token_id
    with running_server(Launch(engine, model, f"films={index}", dtype="float32")) as url:
        yield Retrieval(url, itemset.load(index), end_token)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--users", type=int, help="default: 100, and all that there are with --cold-start")
    parser.add_argument("--cold-start", action="store_true", help="films that no training history holds")
    parser.add_argument("--train", action="store_true", help="make the semantic IDs and train the model here")
    arguments = parser.parse_args()
    if arguments.cold_start:
        return run(partial(show_cold_start, arguments.engine, arguments.users or 10_000))
    return run(partial(show, arguments.engine, arguments.users or 100, arguments.train))


if __name__ == "__main__":
    sys.exit(main())
