"""The head of a set's own tokens, in a worker: logits of the tokens that a set has, without those of all others.

Model and `LogitsProcessor` run as ever, but for the product of hidden states and head, which takes some of the head's
rows only. What follows, such as scale and soft cap, is the same for every logit: a trial finds models that do more.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from vllm.distributed import get_tp_group

from itemset.masking.arena_plan import free_pieces
from itemset.ranking.beams import Beams
from itemset.serving.config import StaticConfig
from vllm_static import compat
from vllm_static.compat import logger
from vllm_static.worker.narrow_hooks import reading

SHARE = 3  # an alphabet has at most a third of the vocabulary: a CPU packs its full head, and no copies of its rows
AUTO_SHARE = 8  # of answers, unless it is `on`: at a 19th they were faster on a CPU, at a third not always
MOST_RUNS = 4  # of rows that lie together, which are multiplied where they are; of more, all rows are gathered
TOLERANCE = 0.02  # of the largest logit: what two orders of adding differ by in 16 bits
ROOM = 16 << 20  # bytes, of which alphabets whose rows lie together take few
_TRIED = 64  # tokens of the trial


@dataclass(frozen=True, eq=False)
class Alphabet:
    """The tokens of a set's items, and those that may end them."""

    tokens: Tensor  # [tokens] int64, ascending
    columns: Tensor  # [vocabulary] int32, the column of each of them, 0 of others
    own: Tensor  # int64, this rank's rows, ascending
    own_np: NDArray[np.int64]  # the same on the host
    each: int  # columns of every rank, of the rows in its own shard: with tensor parallelism some are nobody's
    runs: tuple[slice, ...]  # where the rows lie, if together
    gathered: Tensor | None  # [own, hidden size], their copy if not
    piece: slice  # the bytes of memory that all of it takes


class NarrowHead:
    """Alphabets within a budget of memory, and the logits of their tokens. There is one in a worker."""

    def __init__(self, config: StaticConfig, device: torch.device) -> None:
        """Take the memory, `item_set_head_memory`: vLLM sizes its KV cache with what this leaves."""
        chosen = config.item_set_narrow_head
        # Why logits of all tokens are computed; None if they need not be. `attach` may say more.
        self.why_not = "not chosen" if chosen == "off" else None
        # Whether rows that lie apart are copied. A trainer that writes into the weights tells nobody that they change.
        self.copies = chosen == "on" or device.type == "cpu"
        size = config.item_set_head_memory if self.copies else min(config.item_set_head_memory, ROOM)
        size = 0 if self.why_not else size
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._share_of_answers = SHARE if chosen == "on" else AUTO_SHARE
        self.steps: Counter[str] = Counter()  # of sampling: NARROW, or why logits of all tokens were computed
        self._alphabets: dict[bytes, Alphabet] = {}  # what was used last stands last
        self._runner: Any = None
        self._head: Any = None

    def refresh(self) -> None:
        """Make every alphabet again at its next use: the weights have changed, or what the memory held is lost."""
        self._alphabets.clear()

    def attach(self, runner: Any) -> None:
        """Try it out with the runner's model, once; all ranks do so together."""
        if self._runner is not None or self.why_not is not None:
            return
        self._runner = runner
        try:
            self.why_not = self._try_out()
        except Exception as error:  # the model looks for a token's column
            self.why_not = f"a first product failed: {error!r}"
        if self.why_not is not None:
            logger.info("Logits of all tokens are computed, not of a set's own: %s", self.why_not)

    @torch.inference_mode()
    def _try_out(self) -> str | None:
        runner, size = self._runner, self._runner.vocab_size
        if runner.lora_config is not None:
            return "LoRA adapters may change the head"
        hidden = torch.randn(2, runner.model_config.get_hidden_size(), generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(runner.device, runner.dtype)
        with reading(lambda head, *_: setattr(self, "_head", head)):
            full = runner.model.compute_logits(hidden)
        if self._head is None or full is None or full.shape != (2, size):
            return "the model's logits are not the product of one head"
        if type(self._head.quant_method).__name__ not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
            return "the head is quantised"
        if self._head.num_added_embeddings:
            return "tokens were added to the head"
        tokens = np.unique(np.linspace(0, size - 1, _TRIED).astype(np.int64))
        alphabet = self.alphabet(tokens.tobytes())
        if alphabet is None:
            return "item_set_head_memory is too small"
        given, expected = self.logits(hidden, alphabet), full[:, alphabet.tokens].float()
        if given.shape != (2, self._head.tp_size * alphabet.each):
            return "the model's logits come from elsewhere"
        difference = (given[:, alphabet.columns[alphabet.tokens].long()].float() - expected).abs().max()
        return None if difference <= TOLERANCE * full.abs().max() else "the model changes some tokens' logits"

    def of_list(self, key: bytes) -> Alphabet | None:
        """Return the alphabet of a renormalised list's passes, if it makes the product smaller."""
        found = self._of(key, SHARE)
        return found if isinstance(found, Alphabet) else None

    def of_answers(self, key: bytes | str) -> Alphabet | str:
        """Return the alphabet of a step's rows, or why there is none. key: of all rows, or already a reason."""
        return key if isinstance(key, str) else self._of(key, self._share_of_answers)

    def _of(self, key: bytes, share: int) -> Alphabet | str:
        """Return the alphabet of these tokens, or why there is none: the same on all ranks."""
        if self.why_not is not None:
            return self.why_not
        if share * len(key) // 8 > self._runner.vocab_size:
            return "an alphabet too large"
        if not self.copies and _runs(key) > MOST_RUNS:
            return "rows of the head that lie apart"
        return self.alphabet(key) or "item_set_head_memory has no room"

    def alphabet(self, key: bytes) -> Alphabet | None:
        """Return the alphabet of these tokens, as of `Arena.alphabet`; None if there is no room for it."""
        made = self._alphabets.pop(key, None) or self._make(np.frombuffer(key, np.int64))
        if made is not None:
            self._alphabets[key] = made
        return made

    def _make(self, tokens: NDArray[np.int64]) -> Alphabet | None:
        head, size, device = self._head, self._runner.vocab_size, self._memory.device
        tokens = tokens[tokens < size]
        ranks, rows = head.tp_size, head.num_embeddings_per_partition
        of_ranks = np.split(tokens, np.searchsorted(tokens, rows * np.arange(1, ranks)))
        own_np = of_ranks[head.shard_indices.padded_org_vocab_start_index // rows] % rows
        starts = np.flatnonzero(np.diff(own_np, prepend=-2) != 1)
        spans = np.split(own_np, starts[1:]) if len(own_np) else []
        runs = tuple(slice(int(span[0]), int(span[-1]) + 1) for span in spans) if len(spans) <= MOST_RUNS else ()
        each, weight = max(len(one) for one in of_ranks), head.weight
        # As many bytes on each rank, so that all have room or none has.
        copied_rows = each if any(_runs(one.tobytes()) > MOST_RUNS for one in of_ranks) else 0
        sizes = (len(tokens) * 8, each * 8, size * 4, copied_rows * weight[0].nbytes)
        room = [-(-nbytes // 16) * 16 for nbytes in sizes]
        if (piece := self._piece(sum(room))) is None:
            return None
        types = torch.int64, torch.int64, torch.int32, weight.dtype
        parts = zip(self._memory[piece].split(room), sizes, types, strict=True)
        own_tokens, own, columns, gathered = (part[:nbytes].view(dtype) for part, nbytes, dtype in parts)
        own = own[: len(own_np)]
        own_tokens.copy_(compat.to_device(tokens, device))
        own.copy_(compat.to_device(own_np, device))
        columns.zero_()
        places = np.concatenate([rank * each + np.arange(len(one)) for rank, one in enumerate(of_ranks)])
        columns[own_tokens] = compat.to_device(places, device).int()
        copied = None if runs else gathered.view(-1, weight.shape[1])[: len(own_np)]
        if copied is not None:
            torch.index_select(weight, 0, own, out=copied)
        return Alphabet(own_tokens, columns, own, own_np, each, runs, copied, piece)

    def _piece(self, nbytes: int) -> slice | None:
        """Return a free piece of the memory. Forgets for it what was used longest ago."""
        while nbytes <= len(self._memory):
            taken = ((one.piece.start, one.piece.stop - one.piece.start) for one in self._alphabets.values())
            for start, free in free_pieces(taken, len(self._memory)):
                if free >= nbytes:
                    return slice(start, start + nbytes)
            del self._alphabets[next(iter(self._alphabets))]
        return None

    def logits(self, hidden: Tensor, alphabet: Alphabet) -> Tensor:
        """Return the logits of an alphabet's tokens, [rows, width]. hidden: [rows, hidden size]."""
        with self.only(alphabet):
            return self._runner.model.compute_logits(hidden)

    def only(self, alphabet: Alphabet, *, spread: bool = False, clear: bool = False) -> AbstractContextManager[None]:
        """While this is entered, the model's logits are those of an alphabet. spread: each in its token's place, among
        others of any value, for a mask. clear: these are 0."""

        def product(head: Any, bias: Tensor | None, multiply: Callable[..., Tensor]) -> Tensor:
            if alphabet.gathered is not None:
                logits = multiply(alphabet.gathered, None if bias is None else bias[alphabet.own])
            else:
                parts = [_product_of(run, head, bias, multiply) for run in alphabet.runs]
                logits = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            if logits.shape[-1] < alphabet.each:
                logits = pad(logits, (0, alphabet.each - logits.shape[-1]))
            if self._head.tp_size > 1:
                logits = get_tp_group().all_gather(logits, -1)
            if not spread:
                return logits
            shape = (len(logits), self._runner.vocab_size)
            wide = logits.new_zeros(shape) if clear else logits.new_empty(shape)
            if self._head.tp_size > 1:
                logits = logits.index_select(1, alphabet.columns[alphabet.tokens])
            return wide.index_copy_(1, alphabet.tokens, logits)

        return reading(product)

    def of_nobody(self) -> AbstractContextManager[None]:
        """While this is entered, the model's logits are those of a few tokens, other ones on each rank."""
        return reading(partial(_product_of, slice(0, _TRIED)))

    def round(self, beams: Beams, hidden: Tensor, alphabet: Alphabet) -> None:
        """Let beams of renormalised scores take a pass. hidden: [rows, queries, hidden size]. alphabet: their set's."""
        if beams.span is not None and self._head.tp_size == 1:  # else each rank would have another number of columns
            alphabet = _between(*beams.span, alphabet)
        logits = self.logits(hidden.flatten(0, 1), alphabet)
        beams.round(logits.view(*hidden.shape[:2], -1), columns=alphabet.columns)


@lru_cache(64)
def _runs(key: bytes) -> int:
    """Return in how many runs of consecutive ids these ascending int64 ids lie."""
    return 1 + int(np.count_nonzero(np.diff(np.frombuffer(key, np.int64)) != 1))


def _between(first: int, last: int, alphabet: Alphabet) -> Alphabet:
    """Return the part of an alphabet from one token to another, on one rank: slices, and no copy of the head's rows."""
    low, high = np.searchsorted(alphabet.own_np, (first, last + 1)).tolist()
    if low == high:  # the model has no such tokens
        return alphabet
    cut = (slice(max(run.start, first), min(run.stop, last + 1)) for run in alphabet.runs)
    return replace(
        alphabet, tokens=alphabet.tokens[low:high], columns=(alphabet.columns - low).clamp_(0, high - low - 1),
        own=alphabet.own[low:high], own_np=alphabet.own_np[low:high], each=high - low,
        runs=tuple(one for one in cut if one.start < one.stop),
        gathered=None if alphabet.gathered is None else alphabet.gathered[low:high],
    )  # fmt: skip


def _product_of(rows: slice, head: Any, bias: Tensor | None, multiply: Callable[..., Tensor]) -> Tensor:
    """Return the product with some rows of a head."""
    return multiply(head.weight[rows], None if bias is None else bias[rows])
