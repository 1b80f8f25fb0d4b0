"""What a space at the end of a prompt costs a model, if it stays a token of its own.

python benchmarks/healing.py --json docs/benchmarks/healing.json

The demo's model and its first film titles, by Hugging Face's transformers: the log-probability of all titles together
after a prompt whose space is a token, and after the same prompt without it, with the space before each title.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from runner import Report, Row, parser  # which puts the examples on the path

from films_data import model_dir, titles  # isort: skip


PROMPTS = ("A film for a rainy Sunday: ", "I liked Alien (1979). Next: ")
AT_ONCE = 16


@torch.no_grad()
def log_probs(model: Any, tokenizer: Any, prompt: str, texts: list[str]) -> np.ndarray:
    """Of each text, its end token's included, after the prompt: [texts]."""
    before, found = tokenizer(prompt, add_special_tokens=False).input_ids, []
    for start in range(0, len(texts), AT_ONCE):
        part = [[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
                for text in texts[start : start + AT_ONCE]]  # fmt: skip
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(before + one) for one in part], batch_first=True)
        steps = model(rows).logits[:, len(before) - 1 : -1].log_softmax(-1)
        for one, step in zip(part, steps, strict=True):
            found.append(step[: len(one)].gather(1, torch.tensor(one)[:, None]).sum().item())
    return np.array(found)


def measured(count: int) -> Iterator[Row]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(model_dir())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with titles().open(newline="", encoding="utf-8") as file:
        texts = [row["title"] for row in csv.DictReader(file)][:count]
    for prompt in PROMPTS:
        kept = log_probs(model, tokenizer, prompt, texts)
        healed = log_probs(model, tokenizer, prompt[:-1], [f" {text}" for text in texts])
        sums = [float(np.logaddexp.reduce(one)) for one in (kept, healed)]
        yield {
            "prompt": prompt, "titles": len(texts), "log p, space kept": sums[0], "log p, healed": sums[1],
            "healed / kept": float(np.exp(sums[1] - sums[0])),
            "best, kept": texts[int(kept.argmax())], "best, healed": texts[int(healed.argmax())],
        }  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--titles", type=int, default=96)
    arguments = options.parse_args()
    Report(arguments).add("healing", list(measured(arguments.titles)))


if __name__ == "__main__":
    main()
