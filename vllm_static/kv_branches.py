"""The KV cache of rows that branch off prompts: what they share with them, and the blocks of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.utils import torch_utils

MOST_LOGITS = 1 << 30  # bytes of a pass
TOKENS_APART = frozenset(("FLASH_ATTN", "TRITON_ATTN"))
"""Attention backends in whose KV cache no two tokens are packed together."""


class Prompt(NamedTuple):
    """A request whose prompt's KV is complete. slot: its row of the runner's block tables. tokens: its length."""

    request: str
    slot: int
    tokens: int


def own_blocks(prompt: int, tokens: int, block: int) -> int:
    """Return in how many blocks of `block` tokens the next `tokens` after a prompt lie."""
    return (prompt + tokens - 1) // block - prompt // block + 1


def scratch_needed(prompts: Iterable[Prompt], rows: int, tokens: int, block: int) -> int:
    """Return how many scratch blocks `Branches` takes with these arguments."""
    lengths = [one.tokens for one in prompts]
    return 2 * rows * len(lengths) * own_blocks_of_all(lengths, tokens, block)


class Places(NamedTuple):
    """Where the next tokens of some rows are.

    before: [rows] int64 on the host, tokens that stand in each row's block table before them.
    ends: [rows] int64, the same with them.
    positions: [rows, more] int64, counted from the prompt's first token.
    tables: [rows, blocks] int32, the rows' block tables.
    slots: [rows, more] int64, where their KV goes in the cache.
    """

    before: NDArray[np.int64]
    ends: Tensor
    positions: Tensor
    tables: Tensor
    slots: Tensor

    def of(self, rows: slice) -> Places:
        return Places(*(column[rows] for column in self))


class Branches:
    """Rows that branch off prompts, as many from each. A row reads its prompt's full blocks where they lie.

    After them it has blocks of its own, in one of two banks of scratch blocks. A row that goes on from another one gets
    a copy of its own tokens, from bank to bank: of whole blocks if the cache's layout hides where a token is. If the
    prompts are kept `apart`, each with its partial block, the rows' tables have nothing but their own tokens.

    tables: [2, prompts, rows, blocks] int32, of each bank. prompt_tables: [prompts, blocks] int32. lengths: [prompts]
    int64 on the host, tokens of the prompts. prompt_lengths: the same on the device.
    """

    def __init__(
        self, runner: Any, prompts: Sequence[Prompt], rows: int, tokens: int, scratch: range, *, apart: bool = False
    ) -> None:
        """rows: of each prompt. tokens: of each row after its prompt, at most. scratch: blocks that no request has, as
        many as `scratch_needed` or more."""
        self.prompts, self.apart = prompts, apart
        self.lengths = np.array([one.tokens for one in prompts], np.int64)
        (self._block,) = runner.block_tables.block_sizes
        self._bank, device, count = 0, runner.device, len(prompts)
        self.prompt_lengths = to_device(self.lengths, device)
        # [prompts] where the rows' own tokens begin in their tables
        self._begins = np.zeros_like(self.lengths) if apart else self.lengths
        full, each = self._begins // self._block, own_blocks_of_all(self._begins, tokens, self._block)
        slots = to_device([one.slot for one in prompts], device)
        given, columns = runner.block_tables.block_tables[0].gpu[slots], int(full.max()) + each
        self.prompt_tables = given[:, : -(-int(self.lengths.max()) // self._block)]
        shared = torch.nn.functional.pad(given[:, :columns], (0, max(0, columns - given.shape[1])))  # [prompts, blocks]
        after = to_device(full, device)[:, None] + torch.arange(each, device=device)
        self._last = shared.gather(1, after[:, :1])[:, 0]  # [prompts] the block in which each prompt ends
        # All rows' first own blocks stand together, then all their second ones: [2, own blocks, prompts, rows].
        own = torch.arange(scratch.start, scratch.start + 2 * each * count * rows, device=device)
        own = own.view(2, each, count, rows).permute(0, 2, 3, 1).to(shared.dtype)
        self.tables = shared[None, :, None].repeat(2, 1, rows, 1)
        self.tables.scatter_(3, after[None, :, None].expand_as(own), own)
        # [prompts, 1] the first of each prompt's rows
        self._first_row = torch.arange(0, count * rows, rows, device=device)[:, None]
        caches = {cache.data_ptr(): cache for cache in runner.kv_caches}.values()  # layers may share theirs
        self._caches = [cache.unflatten(0, (runner.kv_cache_config.num_blocks, -1)) for cache in caches]
        own_ids = slice(scratch.start, scratch.start + 2 * each * count * rows)
        self._own = [cache[own_ids].unflatten(0, (2, each, count * rows)) for cache in self._caches]
        self._by_token = shows_tokens(runner, self._caches)

    def begin(self) -> None:
        """Let the rows go on from their prompts: each gets what its prompt's last block holds."""
        rows, bank = self.tables.shape[2], self._bank
        for i, filled in enumerate((self._begins % self._block).tolist()):
            banks, some = (slice(2), slice(filled)) if self._by_token else (slice(bank, bank + 1), slice(None))
            for cache, own in zip(self._caches, self._own, strict=True) if filled else ():
                last = cache.index_select(0, self._last[i : i + 1])
                own[banks, 0, i * rows : (i + 1) * rows][..., some, :].copy_(last[..., some, :])

    def fork(self, parents: Tensor, known: int) -> None:
        """Let the rows go on from these rows of the last pass.

        parents: [prompts, rows or fewer] int64, each counted among its prompt's rows. known: tokens that every row has
        after its prompt.
        """
        old, self._bank = self._bank, 1 - self._bank
        rows = self.tables.shape[2]
        for i, (piece, begin) in enumerate(zip(self._first_row + parents, self._begins.tolist(), strict=True)):
            first, some = begin % self._block, slice(None)
            for column in range(own_blocks(begin, known, self._block)):
                if self._by_token:
                    start = first - column * self._block
                    some = slice(max(0, start), min(self._block, start + known))
                for own in self._own:
                    to = own[self._bank, column, i * rows : i * rows + len(piece)]
                    torch.index_select(own[old, column][..., some, :], 0, piece, out=to[..., some, :])

    def at(self, rows: int, known: int, more: int) -> Places:
        """Where `more` tokens of each prompt's first rows are, prompt by prompt, after `known` that they have."""
        steps = torch.arange(known, known + more, device=self.tables.device)
        positions = (self.prompt_lengths[:, None, None] + steps).expand(-1, rows, -1)
        inside = steps.expand_as(positions) if self.apart else positions
        tables = self.tables[self._bank, :, :rows]
        slots = tables.gather(2, inside // self._block).long() * self._block + inside % self._block
        return Places(
            np.repeat(self._begins + known, rows),
            inside[:, :, -1].flatten() + 1,
            positions.reshape(-1, more),
            tables.flatten(0, 1),
            slots.flatten(0, 1),
        )


def own_blocks_of_all(prompts: Iterable[int], tokens: int, block: int) -> int:
    """Return the most that `own_blocks` says of some prompts."""
    return max((own_blocks(int(prompt), tokens, block) for prompt in prompts), default=0)


def shows_tokens(runner: Any, caches: Sequence[Tensor]) -> bool:
    """Whether the caches [blocks, kernel blocks, heads, tokens, ...] keep each token's KV where these shapes say: on
    CPUs they do not."""
    names = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    (block,) = runner.block_tables.block_sizes
    return names <= TOKENS_APART and all(cache.ndim == 5 and cache.shape[1:4:2] == (1, block) for cache in caches)


def to_device(values: Any, device: torch.device, dtype: Any = np.int64) -> Tensor:
    """Copy numbers of the host to the device without waiting for it."""
    return torch_utils.async_tensor_h2d(np.asarray(values, dtype), device=device)
