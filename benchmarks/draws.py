"""Compares ways to draw items from a model's distribution over a set: how far from it they are, in how many passes.

python benchmarks/draws.py --json docs/benchmarks/draws.json

On tables of all log-probabilities, each item scored once by the model in Hugging Face's code: film titles with
SmolLM2-135M-Instruct, after plain prompts of two examples and after chats, and the semantic IDs of `bootstrap.py
retrieval` with its trained model, after what users have watched. Distances are exact, but for DISC's, whose resampled
part is an average over pools of candidates. Passes of masked sampling, DISC (algorithm 1, no pass used twice) and
rejection follow from the tables; those of exact draws, and of rejection that learns, are counted, in requests of 1, 10
and 100 draws. A pass is one of ours in all of them: what is certain to follow a prefix is scored with it. A path pass
scores what may follow at each token of a guessed path below its prefix too; rows are the rows of logits that it reads.

The hits are those of `bootstrap.py retrieval`: the film that a user did watch next is the one drawn, or among ten that
are drawn without replacement.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ranking import SHOTS, TASTES
from vllm_paths import ROOT

import itemset
from itemset.ranking.exact_sampling import Drawing, expected_passes
from itemset.ranking.scored_tree import Answer, Pass

CANDIDATES = (1, 2, 4, 8)
REQUESTS = {1: 40, 10: 12, 100: 4}  # draws of a request: requests
POOLS, ROUNDS_OF_HITS = 2_000, 200
Item = tuple[int, ...]
Row = dict[str, Any]


@dataclass
class Table:
    """A set and the log-probability of each token that may follow a prefix of its items, the end token included."""

    items: list[Item]
    end: int
    following: dict[Item, dict[int, float]]

    @classmethod
    def of(cls, items: Sequence[Item], end: int, scores: Sequence[Sequence[float]]) -> Table:
        following: dict[Item, dict[int, float]] = {}
        for item, own in zip(items, scores, strict=True):
            for i, (token, score) in enumerate(zip((*item, end), own, strict=True)):
                following.setdefault(item[:i], {}).setdefault(token, score)
        return cls(list(items), end, following)

    def __call__(self, passes: Sequence[Pass]) -> list[Answer]:
        return [
            (
                np.array([self.following[tokens[:i]][tokens[i]] for i in range(known, len(tokens))]),
                np.array([self.following[tokens][token] for token in after.tolist()]),
            )
            for tokens, known, after, _ in passes
        ]

    def laws(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The logarithms of each item's probability, and of that with which masked sampling draws it."""
        legal = {prefix: np.logaddexp.reduce(list(after.values())) for prefix, after in self.following.items()}
        own, masked = [], []
        for item in self.items:
            steps = [(item[:i], token) for i, token in enumerate((*item, self.end))]
            own.append(sum(self.following[prefix][token] for prefix, token in steps))
            masked.append(own[-1] - sum(legal[prefix] for prefix, _ in steps))
        return np.array(own), np.array(masked)

    def prefixes(self, log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each prefix that a pass scores, the root first: its own probability, the items' below it, and the
        probability that masked sampling comes there. [passes, 3]"""
        own, below = {(): 1.0}, dict[Item, NDArray[np.float64]]()
        for item, p, q in zip(self.items, np.exp(log_p), np.exp(log_q), strict=True):
            for i in range(len(item) + 1):
                below[item[:i]] = below.get(item[:i], np.zeros(2)) + np.array([p, q])
        for prefix, after in sorted(self.following.items(), key=lambda one: len(one[0])):
            own |= {
                (*prefix, token): own[prefix] * np.exp(score) for token, score in after.items() if token != self.end
            }
        # After a prefix with one continuation no pass begins; the root's is always needed.
        first = [prefix for prefix in own if not prefix or len(self.following[prefix[:-1]]) > 1]
        return np.array([(own[prefix], *below[prefix]) for prefix in first])


def distance(law: NDArray[np.float64], truth: NDArray[np.float64]) -> Row:
    """Total variation, and the Kullback-Leibler divergence of a law from the truth, in nats."""
    positive = truth > 0
    with np.errstate(divide="ignore"):
        kl = float(np.sum(truth[positive] * np.log(truth[positive] / law[positive])))
    return {"tv": float(np.abs(law - truth).sum() / 2), "kl": kl}


def disc(log_p: NDArray[np.float64], log_q: NDArray[np.float64], k: int) -> tuple[NDArray[np.float64], float]:
    """The law of DISC with `k` candidates, and how many it draws on average.

    A candidate is accepted with probability x, the legal mass along it, so that all are with that of the set. If none
    is, one of k new ones is taken in proportion to x: for item i, k q(i) E[x(i) / (x(i) + the sum of k - 1 others)].
    """
    random, q, x = np.random.default_rng(k), np.exp(log_q), np.exp(log_p - log_q)
    mass = float(np.exp(np.logaddexp.reduce(log_p)))
    others = x[random.choice(len(q), (POOLS, k - 1), p=q / q.sum())].sum(1)
    resampled = np.array([k * mine * np.mean(weight / (weight + others)) for mine, weight in zip(q, x, strict=True)])
    missed = (1 - mass) ** k
    law = (1 - missed) * np.exp(log_p) / mass + missed * resampled / resampled.sum()
    return law, (1 - missed) / mass + missed * k


def exact(table: Table, built: itemset.ItemSet, n: int, width: int | None, requests: int, *, paths: bool) -> Row:
    """Passes and rounds of requests of `n` draws; rows: of logits that a pass scores on average."""
    took = []
    for seed in range(requests):
        drawing, rows = Drawing(built, n, end_token=table.end, seed=seed, width=width, paths=paths), 0
        while drawing.passes:
            answers = [table([one, *one.then]) for one in drawing.passes]
            rows += sum(len((one, *one.then)[-1].tokens) - one.known + 1 for one in drawing.passes)
            drawing.take(answers)
        took.append((drawing.result.passes, drawing.result.rounds, rows))
    passes, rounds, rows = np.sum(took, 0)
    return {"passes": passes / requests, "rounds": rounds / requests, "rows": rows / passes}


def learning(table: Table, n: int, requests: int) -> Row:
    """Passes of rejection that learns, as CARS does: requests of `n` draws.

    Sequences are sampled from the model without what is known to be illegal: all illegal tokens after prefixes that
    were looked at. A prefix that is new takes a pass and tells its legal mass, with which it is accepted; else all
    begins anew, with that known. Draws are exact.
    """
    passes = 0
    for seed in range(requests):
        random, bound, drawn = np.random.default_rng(seed), dict[Item, float](), 0
        while drawn < n:
            prefix, token = (), -1
            while token != table.end:
                following = table.following[prefix]
                if prefix not in bound:
                    passes += not prefix or len(table.following[prefix[:-1]]) > 1
                    before, bound[prefix] = 1.0, float(sum(np.exp(list(following.values()))))
                    for i in reversed(range(len(prefix))):  # what was known above
                        above, change = prefix[:i], bound[prefix[: i + 1]] - before
                        before = bound[above]
                        bound[above] += np.exp(table.following[above][prefix[i]]) * change
                    if random.random() >= bound[prefix]:
                        break
                shares = [np.exp(p) * bound.get((*prefix, after), 1.0) for after, p in following.items()]
                token = list(following)[random.choice(len(shares), p=np.array(shares) / sum(shares))]
                prefix = (*prefix, token) if token != table.end else prefix
            drawn += token == table.end
    return {"passes": passes / requests}


def measure(name: str, table: Table) -> list[Row]:
    """The rows of one prompt."""
    log_p, log_q = table.laws()
    truth = np.exp(log_p - np.logaddexp.reduce(log_p))
    places = table.prefixes(log_p, log_q)
    each, mass = float(places[:, 2].sum()), float(np.exp(log_p).sum())
    rows: list[Row] = [{"kind": "masked", "passes": each} | distance(np.exp(log_q), truth)]
    for k in CANDIDATES:
        law, candidates = disc(log_p, log_q, k)
        rows.append({"kind": f"DISC, K = {k}", "passes": candidates * each} | distance(law, truth))
    rows.append({"kind": "rejection", "passes": float(places[:, 0].sum()) / mass, "tv": 0.0, "kl": 0.0})
    built = itemset.build([list(item) for item in table.items])
    for n, requests in REQUESTS.items():
        row = {"kind": f"rejection that learns, {n} draw{'s' * (n > 1)}", "tv": 0.0, "kl": 0.0}
        rows.append(row | learning(table, n, requests))
    for n, requests in REQUESTS.items():
        for width, paths in itertools.product((1, 4, 8, None) if n == 1 else (None,), (False, True)):
            kind = f"exact, {n} draw{'s' * (n > 1)}" + (f", width {width}" if width else "") + ", paths" * paths
            row = {"kind": kind, "tv": 0.0, "kl": 0.0} | exact(table, built, n, width, requests, paths=paths)
            rows.append(row | ({} if paths else {"expected": expected_passes(places[:, 0], places[:, 1], n)}))
    return [{"set": name, "mass": mass, **row} for row in rows]


def scored(model: Any, prompt: list[int], items: Sequence[Item], end: int, batch: int) -> list[list[float]]:
    """The log-probabilities of each item's tokens and its end token, after a prompt that is run once."""
    import torch

    found: list[list[float]] = [[]] * len(items)
    with torch.inference_mode():
        after_prompt = model(torch.tensor([prompt]), use_cache=True)
        first = after_prompt.logits[0, -1].double().log_softmax(-1)
        order = sorted(range(len(items)), key=lambda i: len(items[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            longest = max(len(items[i]) for i in chosen)
            tokens = torch.tensor([[*items[i], *[end] * (longest + 1 - len(items[i]))] for i in chosen])
            cache = deepcopy(after_prompt.past_key_values)
            cache.batch_repeat_interleave(len(chosen))
            logits = model(tokens[:, :-1], past_key_values=cache, use_cache=True).logits
            own = logits.gather(2, tokens[:, 1:, None])[:, :, 0].double() - logits.double().logsumexp(-1)
            for row, i in enumerate(chosen):
                found[i] = [float(first[items[i][0]]), *own[row, : len(items[i])].tolist()]
    return found


def titles(prompts: int) -> list[Row]:
    from films_data import model_dir, titles_by_key
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_dir()
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder).float().eval(),
    )
    texts = dict.fromkeys(titles_by_key().values())
    items = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    rows = []
    for kind in ("titles, plain prompts", "titles, chats"):
        for taste in TASTES[:prompts]:
            prompt = tokenizer.encode(f"{SHOTS}{taste}: ") if "plain" in kind else chat(tokenizer, taste)
            table = Table.of(items, tokenizer.eos_token_id, scored(model, prompt, items, tokenizer.eos_token_id, 64))
            rows += measure(kind, table)
            print(kind, taste, rows[-1], file=sys.stderr, flush=True)
    return rows


def chat(tokenizer: Any, taste: str) -> list[int]:
    said = [{"role": "system", "content": "Answer with the title and year of a film."}]
    for line in SHOTS.splitlines():
        asked, answer = line.split(": ", 1)
        said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    said.append({"role": "user", "content": taste})
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def retrieval(users: int, measured: int) -> tuple[list[Row], list[Row]]:
    """The rows of some users, and the hits of all."""
    import retrieval as example
    from films_data import CACHE
    from retrieval_data import histories
    from retrieval_model import MEMORY, tokens_of
    from transformers import AutoModelForCausalLM, AutoTokenizer

    watched = histories()
    folder, _ = example.prepare(CACHE / "retrieval", [films[:-1] for films in watched])
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder).float().eval(),
    )
    with (CACHE / "retrieval" / "films.csv").open(newline="", encoding="utf-8") as file:
        encoded = {
            int(row["movie_id"]): tokenizer.encode(row["semantic_id"], add_special_tokens=False)
            for row in csv.DictReader(file)
        }
    end, items = tokenizer.eos_token_id, [tuple(tokens) for tokens in encoded.values()]
    number = {film: i for i, film in enumerate(encoded)}
    rows, hits = [], list[Row]()
    for i, films in enumerate(watched[:users]):
        prompt = tokens_of(films[:-1][-MEMORY:], encoded, end)
        table = Table.of(items, end, scored(model, prompt, items, end, 512))
        if i < measured:
            rows += measure("semantic IDs, trained model", table)
        hits += hits_of(table, number[films[-1]])
    print(rows[-1], file=sys.stderr, flush=True)
    return rows, hits


def hits_of(table: Table, wanted: int) -> list[Row]:
    """How often a user's next film is drawn, or among ten; and whether it is the best, or among the ten best."""
    log_p, log_q = table.laws()
    laws = {"masked": log_q, "exact": log_p}
    with np.errstate(divide="ignore"):
        laws |= {f"DISC, K = {k}": np.log(disc(log_p, log_q, k)[0]) for k in CANDIDATES}
    found = [{"kind": "ranked list", "hit_1": log_p.argmax() == wanted, "hit_10": wanted in np.argsort(-log_p)[:10]}]
    random = np.random.default_rng(wanted)
    noise = random.gumbel(size=(ROUNDS_OF_HITS, len(log_p)))
    for kind, law in laws.items():
        keys = law + noise  # the ten largest are drawn without replacement
        among = (keys > keys[:, wanted, None]).sum(1) < 10
        share = float(np.exp(law[wanted] - np.logaddexp.reduce(law)))
        found.append({"kind": kind, "hit_1": share, "hit_10": float(among.mean())})
    return found


def averaged(rows: list[Row], by: tuple[str, ...]) -> list[Row]:
    """The means of rows that are alike in what `by` names, and the smallest and the largest mass of their sets."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [
        dict(zip(by, key, strict=True))
        | {name: mean(float(row[name]) for row in group) for name in group[0] if name not in by}
        | ({"masses": [min(r["mass"] for r in group), max(r["mass"] for r in group)]} if "mass" in group[0] else {})
        for key, group in groups.items()
    ]


def table_of(rows: list[Row]) -> str:
    lines = ["| | total variation | KL | passes | rounds | by the formula | rows a pass |", "|---|" + "--:|" * 6]
    last = None
    for row in rows:
        if row["set"] != last:
            lines.append(f"| **{row['set']}**, mass {row['masses'][0]:.1e} to {row['masses'][1]:.1e} | | | | | | |")
        last = row["set"]
        cells = [f"{row['tv']:.3f}", f"{row['kl']:.3f}", f"{row['passes']:,.1f}"]
        cells += [f"{row[name]:,.1f}" if name in row else "" for name in ("rounds", "expected", "rows")]
        lines.append(f"| {row['kind']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def hits_table(rows: list[Row]) -> str:
    lines = ["| | hit@1 | hit@10 |", "|---|--:|--:|"]
    return "\n".join([*lines, *(f"| {row['kind']} | {row['hit_1']:.3f} | {row['hit_10']:.3f} |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3, help="of titles, of each kind")
    parser.add_argument("--users", type=int, default=100, help="whose hits are counted")
    parser.add_argument("--measured", type=int, default=20, help="users whose passes are counted")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.append(str(ROOT / "examples"))
    rows, hits = retrieval(arguments.users, arguments.measured)
    rows += titles(arguments.prompts)
    means, shares = averaged(rows, ("set", "kind")), averaged(hits, ("kind",))
    print(f"{table_of(means)}\n\n{hits_table(shares)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"draws": means, "hits": shares}, indent=1) + "\n")


if __name__ == "__main__":
    main()
