"""The KV of beams, one entry a trie node: prompts stay in the engine's cache, and no beam has a block of its own.

Beams that share tokens share the entries of these. A row knows its ancestors by their numbers, so nothing is copied
when beams fork, and nothing is left when a list ends (trie-based beam search, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_static import compat

STATE_ROWS = 1 << 10  # of a pass of layers with states, which copy what the rows' own tokens have left


class Room(NamedTuple):
    """The memory that a worker keeps for lists."""

    blocks: int  # of the KV cache, which the scheduler does not know: for beams' own tokens
    beams: int  # that have room in them
    tokens: int  # whose logits may stand in memory


def entries_of_block(kv_cache_spec: Any, dtype: torch.dtype) -> int:
    """Return for how many beams' tokens a block has room. dtype: the model's, of which keys and values are in any
    cache; what tokens leave in layers with states is float32."""
    if has_states(kv_cache_spec):
        entries: int = kv_cache_spec.page_size_bytes // (4 * sum(entry_parts(kv_cache_spec.shapes)))
    else:
        entries = kv_cache_spec.block_size * kv_cache_spec.dtype.itemsize // dtype.itemsize
    return entries


def has_states(kv_cache_spec: Any) -> bool:
    """Return whether layers keep states in a block, in place of keys and values."""
    return hasattr(kv_cache_spec, "shapes")


def entry_parts(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return how many numbers a token leaves in a layer with states: channels of the convolution, keys, values, heads.
    shapes: of a layer's states, the convolution's and [heads, size, any]. Queries are as many as keys."""
    channels, (heads, size, _) = max(shapes[0]), shapes[1]
    return [channels, (channels - heads * size) // 2, heads * size, heads]


def memory_of(cache: Tensor, first_block: int, dtype: torch.dtype) -> Tensor:
    """Return the memory of a layer's last blocks, [any]. cache: [blocks, ...], with what a block begins with."""
    offset, count = first_block * cache.stride(0), (len(cache) - first_block) * cache.stride(0)
    return cache.as_strided((count,), (1,), cache.storage_offset() + offset).view(dtype)


def attention_group(runner: Any) -> int:
    """Return the first group of the KV cache that has keys and values: its blocks are counted by tokens."""
    groups = runner.kv_cache_config.kv_cache_groups
    return next(i for i, group in enumerate(groups) if not has_states(group.kv_cache_spec))


class Prompt(NamedTuple):
    """A request whose prompt's KV is complete."""

    request: str
    slot: int  # its row of the runner's block tables
    tokens: int


@dataclass(frozen=True)
class BeamMetadata:
    """What a pass tells the model's attention layers: the metadata type by which they know it."""

    positions: Tensor  # [rows, more] int64, as the model counts them: an image's tokens may share some
    ancestors: Tensor  # [rows, known] int64, the entries of each row's tokens so far
    entries: Tensor  # [rows] int64, where the KV of each row's first query token goes; tails are never read again
    first_block: int  # of the cache, from which on entries lie
    starts: Tensor  # [prompts + 1] int32, each prompt's first query token, and the end: rows stand prompt by prompt
    lengths: Tensor  # [prompts] int32, its tokens
    tables: Tensor  # [prompts, blocks] int32, where its KV is in the paged cache; of states the one block with its last
    spans: list[tuple[int, int, int]]  # the same on the host, of each prompt: first query, end, tokens
    most_queries: int  # of any prompt, as are the next
    most_keys: int
    segments: int = 0  # parts in which a kernel goes through a prompt, 0 for as many as suit the pass
    scratch: dict[tuple[int, ...], tuple[Tensor, ...]] = field(default_factory=dict)  # of kernels, for all layers
    parts: dict[int, "BeamMetadata"] = field(default_factory=dict)  # that `of_last` has made, for layers alike
    seen: int = 0  # at most this many of each prompt's last tokens are read; 0 for all. Then, on an accelerator:
    copied: tuple[Tensor, ...] = ()  # blocks and offsets to copy, [blocks, tokens] int64, and tables of the copies

    @property
    def tokens(self) -> int:
        """Query tokens, without those that fill up a CUDA graph."""
        return self.positions.numel()

    def of_last(self, seen: int, block: int) -> "BeamMetadata":
        """Return the same for one query token a row, which sees this many of a prompt's last tokens. block: its tokens.
        No kernel begins inside a block for all queries of a prompt, so what they see is copied to where one begins."""
        if seen not in self.parts:
            more = self.positions.shape[1]
            lengths, most = self.lengths.clamp(max=seen), min(self.most_keys, seen)
            places = torch.arange(-(-most // block) * block, device=lengths.device) + (self.lengths - lengths)[:, None]
            places = places.minimum(self.lengths[:, None] - 1)  # after the last one whatever has a place
            blocks = self.tables.gather(1, places // block).long()
            tables = torch.arange(blocks.numel() // block, dtype=torch.int32, device=blocks.device)
            self.parts[seen] = replace(
                self,
                starts=self.starts // more,
                lengths=lengths,
                spans=[(first // more, last // more, tokens) for first, last, tokens in self.spans],
                most_queries=self.most_queries // more,
                most_keys=most,
                seen=seen,
                parts={},
                copied=(blocks.view(-1, block), (places % block).view(-1, block), tables.view(len(lengths), -1)),
            )
        return self.parts[seen]


class BeamKV:
    """The tokens after some prompts, of rows that branch off these, as many from each."""

    def __init__(self, runner: Any, prompts: Sequence[Prompt], first_block: int, *, recorded: bool = False) -> None:
        """first_block: there the entries of all layers begin, each in its own cache; there must be enough of them. As
        layers of several groups share memory, each group has a part of these blocks. recorded: for passes of one prompt
        that a CUDA graph holds: another may take its place, see `move_to`."""
        self.prompts, self.recorded, self._device = prompts, recorded, runner.device
        block = runner.block_tables.block_sizes[attention_group(runner)]
        self._block_tables = [table.gpu for table in runner.block_tables.block_tables]
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        self._state_blocks = [spec.block_size if has_states(spec) else 0 for spec in specs]  # tokens, 0 without states
        self.most_rows = STATE_ROWS if any(self._state_blocks) else 1 << 31  # of a pass
        end = runner.kv_cache_config.num_blocks
        self._first_blocks = range(first_block, end, (end - first_block) // len(self._block_tables))
        self._rope = runner.model_state.rope_state  # of positions in several dimensions, else None
        self._positions = compat.to_device([self._position(one) for one in prompts], self._device)
        # Races of a request stand together, and read its prompt once: [prompt, how many stand there]
        self._different = [(one, len(list(equal))) for one, equal in groupby(prompts)]
        self._read = compat.to_device([one.tokens for one, _ in self._different], self._device, np.int32)
        self._blocks = -(-max(one.tokens for one in prompts) // block)
        tables = zip(*(self._blocks_of(one) for one, _ in self._different), strict=True)
        self._tables = [torch.stack(table) for table in tables]
        self._starts = dict[tuple[int, ...], Tensor]()  # of passes' prompts, as of `BeamMetadata`
        self.restart()

    def _blocks_of(self, prompt: Prompt) -> list[Tensor]:
        """Return the blocks that passes read of a prompt, of each group: all of KV, and the last one of states."""
        blocks = list[Tensor]()
        for table, tokens in zip(self._block_tables, self._state_blocks, strict=True):
            last = min((prompt.tokens - 1) // tokens, table.shape[1] - 1) if tokens else 0
            blocks.append(table[prompt.slot, last : last + (1 if tokens else self._blocks)])
        return blocks

    def _position(self, prompt: Prompt) -> int:
        """Return the position of the first token after a prompt. Keys are counted by their places in the cache."""
        return prompt.tokens + (0 if self._rope is None else int(self._rope.prefill_delta.np[prompt.slot]))

    def restart(self) -> None:
        self.used = 0  # entries that are taken
        self._ancestors = torch.empty(len(self.prompts), 1, 0, dtype=torch.int64, device=self._device)

    def move_to(self, prompt: Prompt) -> None:
        """Let what is recorded of these rows come after another prompt, of no more blocks."""
        self._positions.fill_(self._position(prompt))
        self._read.fill_(prompt.tokens)
        for own, blocks in zip(self._tables, self._blocks_of(prompt), strict=True):
            own.copy_(blocks)

    def fork(self, parents: Tensor, known: int) -> None:
        """Let rows go on from these rows of the last pass, or from the prompts.

        parents: [prompts, rows] int64, each counted among its prompt's rows. known: tokens that every row keeps.
        """
        self._ancestors = self._ancestors[:, :, :known].gather(1, parents[:, :, None].expand(-1, -1, known))

    def metadata(self, rows: slice, more: int) -> list[BeamMetadata]:
        """Of a pass over the next `more` tokens of some rows, counted over all prompts, for the layers of each group of
        the KV cache. Reads nothing back."""
        _, each, known = self._ancestors.shape
        device = self._ancestors.device
        steps = torch.arange(known, known + more, device=device)
        positions = (self._positions[:, None, None] + steps).expand(-1, each, -1).reshape(-1, more)[rows]
        spans, read, end = list[tuple[int, int, int]](), list[int](), 0
        for i, (prompt, count) in enumerate(self._different):
            start, end = end, end + count * each
            if start < rows.stop and end > rows.start:
                first, last = max(start, rows.start) - rows.start, min(end, rows.stop) - rows.start
                spans.append((first * more, last * more, prompt.tokens))
                read.append(i)
        starts, ends, lengths = zip(*spans, strict=True)
        if (bounds := (*starts, ends[-1])) not in self._starts:
            self._starts[bounds] = compat.to_device(bounds, device, np.int32)
        prompts_read = slice(read[0], read[-1] + 1)
        ancestors = self._ancestors.flatten(0, 1)[rows]
        entries = torch.arange(self.used + rows.start, self.used + rows.stop, device=device)
        read_by, most = (self._starts[bounds], self._read[prompts_read]), max(last - first for first, last, _ in spans)
        scratch = dict[tuple[int, ...], tuple[Tensor, ...]]()
        return [
            BeamMetadata(
                positions, ancestors, entries, first_block, *read_by, tables[prompts_read], spans, most, max(lengths),
                scratch=scratch,
            )
            for first_block, tables in zip(self._first_blocks, self._tables, strict=True)
        ]  # fmt: skip

    def grow(self) -> None:
        """Note that a pass has run over all rows: the first query token of each is its last ancestor."""
        prompts, rows, _ = self._ancestors.shape
        entries = torch.arange(self.used, self.used + prompts * rows, device=self._ancestors.device)
        self._ancestors = torch.cat((self._ancestors, entries.view(prompts, rows, 1)), 2)
        self.used += prompts * rows
