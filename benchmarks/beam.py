"""`itemset.adapters.decode_loop` beside the same beam by a mask over the vocabulary, on a GPU if there is one.

python benchmarks/beam.py --json docs/benchmarks/beam.json

A set of 10^6 random semantic IDs of 4 codes, in a vocabulary of 151,936. No model runs: the logits of the four steps
are given. The mask: log-softmax of all logits in float32, the vocabulary masked, the best of rows x vocabulary. Both
find the same items. On a GPU each search is also replayed from a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from runner import Report, Row, in_turns, parser, random_ids
from torch import Tensor

import itemset
from itemset.adapters.decode_loop import beam_search
from itemset.masking.arena import Arena, room_for
from itemset.trie.walk import DEAD, STATE_BITS

ITEMS, STEPS, CODES, VOCABULARY = 1_000_000, 4, 2_048, 151_936
WIDTHS = (140, 512)


def masked(arena: Arena, number: int, logits: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """The `width` best items, [width, STEPS], and their scores, by masks: every item has STEPS tokens."""
    kernels, device = arena.kernels, arena.device
    tokens = torch.full((width, STEPS), -1, device=device)
    scores = torch.full((width,), -torch.inf, device=device)
    scores[:1].zero_()
    states = torch.where(scores == 0, number << STATE_BITS, DEAD)
    marks, slots = (torch.full(shape, -1, dtype=torch.int32, device=device) for shape in ((width, 1), (width,)))
    for step, one in enumerate(logits):
        log_probs = torch.log_softmax(one[0].float(), -1)
        kernels.mask(arena, log_probs, states, marks, slots)
        scores, picked = (scores[:, None] + log_probs).flatten().topk(width)
        parents, token = picked // VOCABULARY, picked % VOCABULARY
        tokens = tokens[parents]
        tokens[:, step] = token
        states = states[parents]
        kernels.advance(arena, states, token, marks, states)
    return tokens, scores


def table(device: str, repeats: int, emit: Callable[[str, Any], None], items: int = ITEMS) -> None:
    """Emit a row for each width and type of logits: median ms of a search of STEPS steps, and its peak memory."""
    codes = random_ids(items, STEPS, (0, CODES)).astype("int64")
    item_set = itemset.build(codes + (VOCABULARY - CODES))  # where a model that learned them has them
    arena = Arena(room_for(item_set), device)
    number = arena.acquire(item_set)
    for width in WIDTHS:
        for dtype in (torch.float32, torch.bfloat16):
            # The same for all rows: prefixes of almost equal scores may stand in either order.
            rows = [torch.randn(1, 1, VOCABULARY, device=device).to(dtype) for _ in range(STEPS)]
            logits = [row.repeat(1, width, 1) for row in rows]
            given = {"batch": 1, "width": width, "longest": STEPS}
            ways: dict[str, Callable[[], Any]] = {
                "masked": lambda logits=logits, width=width: masked(arena, number, logits, width),
                "children": lambda logits=logits, given=given: beam_search(
                    arena, number, lambda so_far, _: logits[so_far.shape[2]], **given
                ),
            }
            if dtype == torch.float32:  # else prefixes of equal scores stand in other rows, and get other logits
                tokens, scores = ways["masked"]()
                found = ways["children"]()
                torch.testing.assert_close(found.scores[0], scores, rtol=1e-4, atol=1e-4)
                assert sorted(found.tokens[0].tolist()) == sorted(tokens.tolist())
            row: Row = {"rows": width, "logits": str(dtype).removeprefix("torch.")}
            if device == "cuda":
                from gpu_peers import capture

                row |= {f"{name}, MiB": peak(way) for name, way in ways.items()}
                ways |= {f"{name}, graph": capture([way]) for name, way in list(ways.items())}
            row |= {f"{name}, ms": ms for name, ms in in_turns(ways, repeats).items()}
            emit("beam", row | {"times faster": row["masked, ms"] / row["children, ms"]})


def peak(way: Callable[[], Any]) -> float:
    """MiB that a way takes at most, beside what is there."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--items", type=int, default=ITEMS)
    options.add_argument("--repeats", type=int, default=7)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    table(
        "cuda" if torch.cuda.is_available() else "cpu",
        arguments.repeats,
        lambda _, row: rows.append(row),
        arguments.items,
    )
    Report(arguments).add("beam", rows)


if __name__ == "__main__":
    main()
