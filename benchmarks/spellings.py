"""How much of an item's probability lies on other splits of its text into tokens than the tokenizer's own.

python benchmarks/spellings.py --json docs/benchmarks/spellings.json

The demo's model and its first film titles, by Hugging Face's transformers. All splits of a title are followed from the
left, the likeliest first: `--kept` of them at a time, and none that is 15 nats below the likeliest.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from runner import Report, Row, parser  # which puts the examples on the path

from films_data import model_dir, titles  # isort: skip

PROMPTS = ("A film for a rainy Sunday:", "I liked Alien (1979). Next:\n")
FAR = 15.0  # nats
Split = tuple[int, ...]


class Splits:
    """The model, and which tokens a text may begin with."""

    def __init__(self, kept: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.kept, folder = kept, str(model_dir())
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.by_text = defaultdict[str, list[int]](list)
        for token in range(len(self.tokenizer)):
            if token not in self.tokenizer.all_special_ids:
                self.by_text[self.tokenizer.decode([token])].append(token)
        self.longest = max(map(len, self.by_text))

    def canonical(self, before: list[int], text: str) -> float:
        """The log-probability of the tokenizer's own split, its end token's included."""
        split = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        rows = (self.next_log_probs(before, [tuple(split[:at])])[0, token] for at, token in enumerate(split))
        return float(sum(rows))

    @torch.no_grad()
    def next_log_probs(self, before: list[int], splits: list[Split]) -> torch.Tensor:
        """After each of these splits, which have equally many tokens: [splits, vocabulary]."""
        logits = self.model(torch.tensor([[*before, *split] for split in splits]), logits_to_keep=1).logits
        return logits[:, -1].log_softmax(-1)

    def of(self, before: list[int], text: str) -> dict[Split, float]:
        """The log-probability of each split of a text, its end token's included."""
        found, level = dict[Split, float](), {(): (0, 0.0)}  # of each split: characters so far, log p
        while level:
            following = dict[Split, tuple[int, float]]()
            for (split, (at, score)), row in zip(level.items(), self.next_log_probs(before, [*level]), strict=True):
                if at == len(text):
                    found[split] = score + row[self.tokenizer.eos_token_id].item()
                for end in range(at + 1, min(len(text), at + self.longest) + 1):
                    for token in self.by_text.get(text[at:end], ()):
                        following[(*split, token)] = end, score + row[token].item()
            best = sorted(following.items(), key=lambda one: -one[1][1])[: self.kept]
            level = {split: one for split, one in best if one[1] > best[0][1][1] - FAR}
        return found


def measured(count: int, kept: int) -> Iterator[Row]:
    splits = Splits(kept)
    with titles().open(newline="", encoding="utf-8") as file:
        texts = [row["title"] for row in csv.DictReader(file)][:count]
    for prompt in PROMPTS:
        before = splits.tokenizer(prompt, add_special_tokens=False).input_ids
        own, whole = [], []
        for text in texts:
            text = text if prompt.endswith("\n") else f" {text}"
            found = splits.of(before, text)
            found.pop(tuple(splits.tokenizer(text, add_special_tokens=False).input_ids), None)
            own.append(splits.canonical(before, text))
            whole.append(float(np.logaddexp.reduce([own[-1], *found.values()])))
        shares = 1 - np.exp(np.array(own) - np.array(whole))
        best = [set(np.argsort(scores)[-10:].tolist()) for scores in (own, whole)]
        together = np.logaddexp.reduce(own) - np.logaddexp.reduce(whole)
        yield {
            "prompt": prompt.strip(), "titles": count, "elsewhere, median": float(np.median(shares)),
            "elsewhere, most": float(shares.max()), "of which title": texts[int(shares.argmax())],
            "elsewhere, of all titles together": float(1 - np.exp(together)),
            "the ten best in common": len(best[0] & best[1]),
        }  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--titles", type=int, default=96)
    options.add_argument("--kept", type=int, default=32, help="splits at a time")
    arguments = options.parse_args()
    Report(arguments).add("spellings", list(measured(arguments.titles, arguments.kept)))


if __name__ == "__main__":
    main()
