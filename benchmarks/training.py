"""What a trainer pays for log-probabilities over the legal tokens, beside those over the whole vocabulary.

python benchmarks/training.py --json docs/benchmarks/training.json

A batch of items of a set of 10^6 random semantic IDs, and a vocabulary of 151,936 tokens, each way forward and backward
in a process of its own, one thread, float32. Ways take turns, and the least time of each counts.

logits: from logits that are there, beside `log_softmax` and the gather of the ids. The gradient is read once, as the
    head's backward pass would: where nothing is written to it, it takes no memory. The walk's time stands beside.
hidden: from hidden states of 1,024 and the head's matrix, beside the product with the whole head and the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from runner import Memory, Report, Row, in_turns, isolated, parser, whole

VOCABULARY, BATCH, STOP, WIDTH = 151_936, 64, 2, 1_024
SHAPES = ((4, 256), (8, 2_048))


def batch(levels: int, codes: int, items: int) -> tuple[Any, Any, float]:
    """The ids of items with their stop tokens, what was legal at each, and the milliseconds of that walk."""
    import torch

    import itemset
    from itemset.training import legal_tokens

    torch.set_num_threads(1)
    rows = np.random.default_rng(0).integers(0, codes, (items, levels)) + 1_000 + codes * np.arange(levels)
    item_set = itemset.build(rows, vocab_size=VOCABULARY)
    ids = torch.cat((torch.from_numpy(rows[:BATCH]), torch.full((BATCH, 1), STOP)), 1)
    took = in_turns({"walk": lambda: legal_tokens(ids, item_set, stop_tokens=STOP)}, 20, min)
    return ids, legal_tokens(ids, item_set, stop_tokens=STOP), took["walk"]


def rows_of(ways: dict[str, Callable[[], Any]], of: list[Any], repeats: int, shape: Row) -> list[Row]:
    """Times and memory of each way to a [B, T] and back. of: the tensors that get a gradient."""

    def there_and_back(way: Callable[[], Any]) -> None:
        for one in of:
            one.grad = None
        way().sum().backward()
        of[0].grad.sum()

    times = in_turns({name: lambda way=way: there_and_back(way) for name, way in ways.items()}, repeats, min)
    rows = []
    for name, way in ways.items():
        for one in of:
            one.grad = None
        with Memory() as memory:
            there_and_back(way)
        row = {**shape, "log-probabilities": name, "ms": times[name], "/ full": times[name] / times["full softmax"]}
        rows.append(row | {"peak memory, MiB": memory.peak / 2**20})
    return rows


def logits(levels: int, codes: int, items: int, repeats: int) -> list[Row]:
    import torch

    from itemset.training import legal_log_probs

    ids, legal, walk = batch(levels, codes, items)
    given = torch.randn(*ids.shape, VOCABULARY, requires_grad=True)
    ways = {
        "full softmax": lambda: given.log_softmax(-1).gather(-1, ids[..., None]),
        "log q": lambda: legal_log_probs(given, legal, mass=False)[0],
        "log q and log m": lambda: sum(legal_log_probs(given, legal)),
    }
    rows = rows_of(ways, [given], repeats, {"set": f"{levels} x {codes:,}"})
    return [row | ({} if row["log-probabilities"] == "full softmax" else {"walk, ms": walk}) for row in rows]


def hidden(levels: int, codes: int, items: int, repeats: int) -> list[Row]:
    import torch

    from itemset.training import legal_log_probs_of_hidden

    ids, legal, _ = batch(levels, codes, items)
    states, head = (torch.randn(*shape, requires_grad=True) for shape in ((*ids.shape, WIDTH), (VOCABULARY, WIDTH)))
    ways = {
        "full softmax": lambda: (states @ head.T).log_softmax(-1).gather(-1, ids[..., None]),
        "log q": lambda: legal_log_probs_of_hidden(states, head, legal, mass=False)[0],
        "log q and log m": lambda: sum(legal_log_probs_of_hidden(states, head, legal)),
    }
    return rows_of(ways, [states, head], max(repeats // 5, 1), {"set": f"{levels} x {codes:,}"})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=whole, default=10**6)
    options.add_argument("--repeats", type=int, default=10)
    arguments = options.parse_args()
    report = Report(arguments)
    for name, measure in {"logits": logits, "hidden": hidden}.items():
        runs = [isolated(measure, *shape, arguments.items, arguments.repeats) for shape in SHAPES]
        report.add(name, [row for rows in runs for row in rows])


if __name__ == "__main__":
    main()
