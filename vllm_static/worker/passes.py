"""A list to be made in a worker, and the passes that it takes."""

from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import Tensor

from itemset.serving.wire import ListSpec
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
