"""A list to be made in a worker, the passes that it takes, and the table that comes of them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from itemset.ranking.beams import Beams, table_of
from itemset.serving.wire import HEAD, ListSpec
from vllm_static import compat
from vllm_static.worker.beam_kv import Prompt


class Asked(NamedTuple):
    """A list to be made."""

    number: int  # its set's, in the arena
    prompt: Prompt  # with a draft head's placeholders; its request has no name until a step has it
    spec: ListSpec
    tables: list[Tensor]  # of the list, or of its races so far
    # The hidden states of its prompt's last token, [1, hidden size], None before; if the draft head makes it, as far as
    # they have been computed, and those of its placeholders: [L + 1, hidden size].
    states: Any = None

    @property
    def kind(self) -> tuple[int, ListSpec]:
        """Return what lists that are made together have in common."""
        return self.number, replace(self.spec, races=(0,) * len(self.spec.races))

    @property
    def apart(self) -> "list[Asked]":
        """Return each race by itself; a list as it is."""
        return [self._replace(spec=replace(self.spec, races=(key,))) for key in self.spec.races] or [self]


class Passes(NamedTuple):
    """The passes of a list, or of a race."""

    shapes: list[tuple[int, int]]  # of each, how many rows it has, and how many tokens each of them
    stepwise: bool  # whether tails take a token a pass, too

    @property
    def rows(self) -> int:
        """Return the rows of all passes: each has an entry, also those of the last pass, which nobody reads."""
        return sum(rows for rows, _ in self.shapes)

    @property
    def tokens(self) -> int:
        """Of the largest pass: each has a row of logits."""
        return max(rows * more for rows, more in self.shapes)

    @property
    def queries(self) -> int:
        """Return the most tokens of a row."""
        return max(more for _, more in self.shapes)


def columns_of(
    key: bytes, span: tuple[int, int] | None, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tokens of an alphabet that a round reads, and each token's column, 0 of others: `Pass.columns`."""
    tokens = np.frombuffer(key, np.int64)
    low, high = np.searchsorted(tokens, (span[0], min(span[1] + 1, vocabulary)) if span else (0, vocabulary))
    read = compat.to_device(tokens[low:high] if low < high else tokens[:1], device)
    columns = torch.zeros(vocabulary, dtype=torch.int32, device=device)
    columns[read] = torch.arange(len(read), dtype=torch.int32, device=device)
    return read, columns


def states_at_ends(group: list[Asked]) -> Tensor:
    """Return the hidden states at the ends of the prompts: [lists, 1 or L + 1, hidden size]."""
    return torch.stack([one.states for one in group])


def table_with_head(beams: Beams) -> Tensor:
    """Return what beams have found, as `ListResult.of_table` reads it."""
    result = table_of(beams.decided)
    result = torch.nn.functional.pad(result, (0, max(0, HEAD - result.shape[2])), value=-1)
    head = torch.zeros_like(result[:, :1])
    head[:, 0, 0], head[:, 0, 1:3] = beams.proven, beams.took
    return torch.cat((head, result), 1)


def joined(tables: list[Tensor]) -> Tensor:
    """Return one table of those of a request's races, or of its list. All begin with the pass of the prompt."""
    if len(tables) == 1:
        return tables[0]
    heads = torch.stack([table[0] for table in tables])
    head = heads.amax(0)
    head[0], head[1] = heads[:, 0].amin(), heads[:, 1].sum() - (len(tables) - 1)
    return torch.cat((head[None], *(table[1:] for table in tables)))
