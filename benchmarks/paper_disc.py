"""DISC's tables 2 to 5 (AISTATS 2025) on a task that fits here: which item a text names, by an untaught model.

python benchmarks/papers.py disc --json docs/benchmarks/papers.json

The items are film titles as a catalogue writes them, "Godfather, The". A chat with three examples, as in the paper's
tasks "in context", asks which film a sentence names, as one says it: "The Godfather". SmolLM2-135M-Instruct in float32
scores all prefixes of all items in passes over the trie, after which each way to draw can be judged without chance,
or, as DISC's, by thousands of draws: the share of answers that are the film (the exact match), beside how far the way
is from the model's own distribution over the set. "M = 50" looks at the 50 best tokens alone, as PPV does, and at all
that are legal where none of these is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from runner import Report, Row, isolated

import itemset
from itemset.ranking.importance import Importance
from itemset.ranking.scored_tree import Answer, Pass
from itemset.serving.front.list_runner import run_together

TITLES, QUERIES, DRAWS, BEST, PART = 400, 60, 200, 50, 256
CANDIDATES = (1, 2, 4, 8)
SYSTEM = "Answer with the title of the film, as the catalogue writes it, and nothing else."
SENTENCES = ("Last night we watched {} again.", "Have you seen {} with your friends?", "My favourite is {}, I think.")
EXAMPLES = ("Birdcage, The", "Fargo", "Time to Kill, A")
ARTICLE = re.compile(r"(.+), (The|A|An)$")
Prefix = tuple[int, ...]


def catalogue() -> tuple[list[str], list[str]]:
    """The titles, without those of the examples, and the ones that are asked for: half of them say an article last."""
    from films_data import titles_by_key

    rng = np.random.default_rng(0)
    plain = {re.sub(r" \(.*", "", title) for title in titles_by_key().values()} - {*EXAMPLES, "unknown"}
    titles = rng.permutation(sorted(plain)).tolist()
    moved = [title for title in titles if ARTICLE.match(title)][: QUERIES // 2]
    others = [title for title in titles if not ARTICLE.match(title)]
    asked = moved + others[: QUERIES - len(moved)]
    return sorted({*asked, *titles[:TITLES]})[: TITLES + QUERIES], asked


def messages(title: str, at: int) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": SYSTEM}]
    for number, one in enumerate((*EXAMPLES, title)):
        spoken = ARTICLE.sub(r"\2 \1", one)
        sentence = SENTENCES[(number if one in EXAMPLES else at) % len(SENTENCES)]
        turns.append({"role": "user", "content": sentence.format(spoken)})
        turns += [{"role": "assistant", "content": one}] if one in EXAMPLES else []
    return turns


class Trie:
    """The prefixes of all items, each after its parent."""

    def __init__(self, items: Sequence[Prefix], end: int) -> None:
        self.items, self.end = items, end
        self.prefixes: list[Prefix] = sorted({item[:size] for item in items for size in range(len(item) + 1)}, key=len)
        self.number = {prefix: i for i, prefix in enumerate(self.prefixes)}
        children: list[set[int]] = [set() for _ in self.prefixes]
        for item in items:
            for size, token in enumerate((*item, end)):
                children[self.number[item[:size]]].add(token)
        self.children = [np.array(sorted(one)) for one in children]
        # Each part has whole subtrees of the root, so that a prefix stands beside all before it.
        self.parts: list[list[int]] = [[]]
        for _, below in groupby(sorted(self.prefixes[1:]), key=lambda prefix: prefix[0]):
            numbers = [self.number[prefix] for prefix in below]
            if self.parts[-1] and len(self.parts[-1]) + len(numbers) > PART:
                self.parts.append([])
            self.parts[-1] += numbers

    @torch.inference_mode()
    def scores(self, model: Any, prompt: list[int]) -> Scores:
        """The log-probabilities of what may follow each prefix."""
        after, best = [np.empty(0)] * len(self.prefixes), [np.empty(0, bool)] * len(self.prefixes)

        def take(numbers: list[int], states: Any) -> None:
            rows = model.lm_head(states).double().log_softmax(-1)
            least = rows.topk(BEST).values[:, -1]
            for number, row, bound in zip(numbers, rows, least.tolist(), strict=True):
                after[number] = row[self.children[number]].numpy()
                best[number] = after[number] >= bound

        first = model.model(input_ids=torch.tensor([prompt]), use_cache=True)
        take([0], first.last_hidden_state[0, -1:])
        cache = first.past_key_values
        for numbers in self.parts:
            prefixes = [self.prefixes[number] for number in numbers]
            sees = torch.zeros(len(numbers), len(prompt) + len(numbers), dtype=torch.bool)
            places = {prefix: place for place, prefix in enumerate(prefixes, len(prompt))}
            for row, prefix in enumerate(prefixes):
                sees[row, : len(prompt)] = True
                sees[row, [places[prefix[:size]] for size in range(1, len(prefix) + 1)]] = True
            mask = torch.zeros(1, 1, *sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
            positions = torch.tensor([[len(prompt) - 1 + len(prefix) for prefix in prefixes]])
            tokens = torch.tensor([[prefix[-1] for prefix in prefixes]])
            given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
            take(numbers, model.model(**given, past_key_values=cache).last_hidden_state[0])
            cache.crop(len(prompt))
        return Scores(self, after, best)


class Scores:
    """What a model gives after a prompt. after, best: of each prefix's children, the log-probability, and whether it
    is among the BEST of the whole vocabulary."""

    def __init__(self, trie: Trie, after: list[Any], best: list[Any]) -> None:
        self.trie, self._after, self._best = trie, after, best

    def answer(self, one: Pass) -> Answer:
        numbers = [self.trie.number[one.tokens[:size]] for size in range(one.known, len(one.tokens) + 1)]
        run = [self._of(number, token) for number, token in zip(numbers, one.tokens[one.known :], strict=False)]
        return np.array(run), np.array([self._of(numbers[-1], token) for token in one.after])

    def _of(self, number: int, token: int) -> float:
        return float(self._after[number][np.searchsorted(self.trie.children[number], token)])

    def log_probs(self, *, masked: bool = False, top: bool = False) -> Any:
        """Of each item. masked: as sampling among the legal tokens gives it; top: among those of the BEST."""
        rows = self._after
        if top:
            legal = zip(rows, self._best, strict=True)
            rows = [np.where(few, row, -np.inf) if few.any() else row for row, few in legal]
        if masked:
            rows = [row - np.logaddexp.reduce(row) for row in rows]
        step = [
            dict(zip(of.tolist(), row.tolist(), strict=True)) for of, row in zip(self.trie.children, rows, strict=True)
        ]
        number = self.trie.number
        paths = [(*item, self.trie.end) for item in self.trie.items]
        return np.array([sum(step[number[path[:at]]][token] for at, token in enumerate(path)) for path in paths])

    def greedy(self) -> Prefix:
        """The item of the most likely legal token at each place."""
        prefix: Prefix = ()
        while True:
            number = self.trie.number[prefix]
            token = int(self.trie.children[number][self._after[number].argmax()])
            if token == self.trie.end:
                return prefix
            prefix = (*prefix, token)


def greedy_answer(model: Any, prompt: list[int], end: int, longest: int) -> Prefix:
    """What the model says by itself."""
    given = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": longest, "eos_token_id": end, "pad_token_id": end}
    tokens = model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(prompt) :].tolist()
    return tuple(tokens[: tokens.index(end)] if end in tokens else tokens)


def judge(nth: int) -> list[Row]:
    """A row for each way to an answer, the mean over all that is asked, or over every nth of it."""
    from films_data import model_dir
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    titles, asked = catalogue()
    asked = asked[::nth]
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    encoded = [tuple(tokenizer.encode(title, add_special_tokens=False)) for title in titles]
    trie, item_set = Trie(encoded, end), itemset.build(encoded)
    hits: dict[str, list[float]] = {}
    apart: dict[str, list[float]] = {}
    passes: dict[str, list[float]] = {}
    masses = []
    for at, title in enumerate(asked):
        given = tokenizer.apply_chat_template(messages(title, at), add_generation_prompt=True, tokenize=False)
        prompt, wanted = tokenizer.encode(given, add_special_tokens=False), titles.index(title)
        scores = trie.scores(model, prompt)
        free = scores.log_probs()
        mass = np.logaddexp.reduce(free)
        exact = np.exp(free - mass)
        masses.append(float(np.exp(mass)))
        ways = {"masked": scores.log_probs(masked=True), "masked, M = 50": scores.log_probs(masked=True, top=True)}
        shares = {name: np.exp(value) for name, value in ways.items()} | {"exact draws": exact}
        for count in CANDIDATES:
            drawn = Importance(item_set, DRAWS, end_token=end, candidates=count, seed=at)
            (found,) = run_together([drawn], lambda asked, scores=scores: [scores.answer(one) for _, one in asked])
            places = {item: i for i, item in enumerate(encoded)}
            counts = np.bincount([places[tuple(one.tokens)] for one in found.items], minlength=len(encoded))
            name = f"DISC, K = {count}"
            shares[name] = counts / counts.sum()
            passes.setdefault(name, []).append(sum(one.about["candidates"] for one in found.items) / len(found.items))
        for name, share in shares.items():
            hits.setdefault(name, []).append(float(share[wanted]))
            apart.setdefault(name, []).append(float(np.abs(share - exact).sum() / 2))
        hits.setdefault("the model alone, sampled", []).append(float(np.exp(free[wanted])))
        longest = max(map(len, encoded)) + 8
        alone = greedy_answer(model, prompt, end, longest)
        hits.setdefault("the model alone, greedy", []).append(alone == encoded[wanted])
        hits.setdefault("masked, greedy", []).append(scores.greedy() == encoded[wanted])
        hits.setdefault("best of a list", []).append(int(free.argmax()) == wanted)
    order = ("the model alone, sampled", "masked", "masked, M = 50", *(f"DISC, K = {n}" for n in CANDIDATES))
    rows = []
    for name in (*order, "exact draws", "the model alone, greedy", "masked, greedy", "best of a list"):
        found = np.array(hits[name], float)
        row: Row = {"way": name, "exact match": float(found.mean()), "±": float(1.96 * found.std() / len(found) ** 0.5)}
        for column, of in (("distance", apart), ("candidates a draw", passes)):
            row |= {column: float(np.mean(of[name]))} if name in of else {}
        rows.append(row)
    rows[0]["the set's mass"] = float(np.mean(masses))
    return rows


def main(arguments: argparse.Namespace, report: Report) -> None:
    report.add("disc", isolated(judge, QUERIES // 2 if arguments.quick else 1))
