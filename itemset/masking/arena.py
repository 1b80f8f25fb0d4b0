"""The memory that the tables of all item sets share on a device: one allocation, made once.

It holds each set's tables in one piece, as the file does, and one row of `Arena.sets` says where.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.item_set import ItemSet, build
from itemset.masking import Kernels, arena_plan
from itemset.masking import batch as form
from itemset.masking.arena_plan import MOST_SETS, ArenaFullError, Place, Plan, Resident, aligned, arena_bytes, room_for
from itemset.masking.batch import NO_BITS, READY, ROW, kernels_for, table_row
from itemset.trie.levels import LevelPlan
from itemset.trie.pointers import Pointers
from itemset.trie.tables import OF_VIEWS, SECTIONS

PIECE = 1 << 24  # bytes of each of the two staging buffers
_REMEMBERED = 4  # steps whose ends are told apart

Parts = list[tuple[torch.Tensor, NDArray[Any]]]  # what is copied where: a tensor on the device, uint8, and the bytes


class Copies:
    """One stream for all copies, and the events that order it with the steps. Call it from one thread.

    A copy waits for steps only if they may still read what it overwrites, a step for a copy only if it reads what is
    copied. Only out of pinned memory do copies run beside the host: while the device reads one of two buffers, the host
    fills the other. For a set larger than both it waits until the first is free, and for nothing else. All steps belong
    to one stream, the current one of each `use`. On a CPU, streams do nothing.
    """

    def __init__(self, device: torch.device, max_sets: int) -> None:
        self._device, self._streams = device, torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._stream.wait_stream(self._streams.current_stream(device))  # which fills the tables with zeros
        # Two buffers, each [PIECE] uint8. Made now: pinning memory takes milliseconds, and may wait for the device.
        self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in range(2)]
        self._free = [self._streams.Event() for _ in range(2)]  # the end of the copies out of each buffer
        self._at = self._filled = 0
        self._pending: dict[int, Any] = {}  # set -> its copy's end, until that is known to be over
        # The end of all work before step i, at i % _REMEMBERED: of the newest steps.
        self._before = [self._streams.Event() for _ in range(_REMEMBERED)]
        self._step = 1
        # [max_sets + 1] the newest step that reads each set, 0 if none did. The last entry is nobody's.
        self._read = np.zeros(max_sets + 1, np.int64)

    def use(self, numbers: NDArray[np.int64], *, begins: bool) -> None:
        """Begin a step that reads these sets and no others, -1 for none, or let the present one read them, too: see
        `Arena.use`."""
        steps = self._streams.current_stream(self._device)
        if begins:
            self._step += 1
            self._before[self._step % _REMEMBERED].record(steps)
        self._read[numbers] = self._step
        if self._pending:
            wanted = set(numbers.tolist())
            for number, copied in list(self._pending.items()):
                if copied.query():
                    del self._pending[number]
                elif number in wanted:
                    steps.wait_event(copied)  # and stays pending: `acquire` may have run on another stream

    def pieces(self, number: int, overwritten: Iterable[int], parts: Parts) -> Iterator[None]:
        """Copy each part of a set to its tensor. PIECE bytes each time this is advanced: steps may run in between.

        overwritten: the sets that lay there. All of `parts` has been read when this ends.
        """
        for other in {*overwritten, number}:
            self._wait_for_readers(other)
        for target, source in parts:
            position = 0
            while position < len(source):
                if self._filled == PIECE:
                    yield
                    self._free[self._at].record(self._stream)
                    self._at, self._filled = 1 - self._at, 0
                    self._free[self._at].synchronize()
                size = min(PIECE - self._filled, len(source) - position)
                piece = self._buffers[self._at][self._filled : self._filled + size]
                np.copyto(piece.numpy(), source[position : position + size])
                with self._streams.stream(self._stream):
                    target[position : position + size].copy_(piece, non_blocking=True)
                position, self._filled = position + size, self._filled + size
        copied = self._streams.Event()
        copied.record(self._stream)
        self._pending[number] = copied

    def _wait_for_readers(self, number: int) -> None:
        self._pending.pop(number, None)
        last, self._read[number] = int(self._read[number]), 0
        if last and last == self._step:  # nothing was recorded since
            self._stream.wait_stream(self._streams.current_stream(self._device))
        elif last:
            self._stream.wait_event(self._before[max(last + 1, self._step - _REMEMBERED + 1) % _REMEMBERED])


__all__ = ["Arena", "ArenaFullError", "Place", "Plan", "Resident", "arena_bytes", "check_tables", "room_for"]

_ALPHABETS = 8  # of a set
_SECTIONS = {name: Pointers._fields.index(name) for name in (*SECTIONS, *OF_VIEWS)} | {"ready": READY}


@dataclass
class _Placed:
    """A set whose tables are in an arena, or, until they are `there`, on their way to it."""

    digest: str
    start: int
    end: int
    row: NDArray[np.int64]  # of `Arena.sets`
    # The level plan and the distinct tokens, or the set until they are asked for: to read them off takes long.
    levels: LevelPlan | ItemSet
    tokens: NDArray[np.int64] | ItemSet
    most_boost: float | None  # of a set that is steered
    view: ItemSet | None = None  # the set, if it is a view on which others may stand
    there: bool = False
    alphabets: dict[tuple[int, ...], bytes] = field(default_factory=dict)  # see `Arena.alphabet`


class Arena:
    """The sets that a device's kernels read. Call it from one thread. `room_for` says how many bytes a set takes.

    kernels: `cpu_kernels` or `triton_kernels`. choice: of these, and of those of searches over its sets.
    words: [nbytes / 4 + 1] int32. All tables; the last word is nobody's.
    sets: [max_sets + 1, ROW] int64. Each set's row: where its sections begin, in words (`batch`); the last is nobody's.
    rows: on a CPU, the same with addresses. rows_at: its own.
    """

    def __init__(
        self, nbytes: int, device: torch.device | str = "cpu", *, max_sets: int = MOST_SETS, kernels: Kernels = "auto"
    ) -> None:
        """Raise ItemSetError if the device has no such room or no such kernels, or as `Plan` does."""
        self.plan, self.device, self.choice = Plan(nbytes, max_sets=max_sets), torch.device(device), kernels
        nbytes = self.plan.nbytes
        try:
            self.kernels = kernels_for("masking", self.device.type, kernels)
            self.words = torch.zeros(nbytes // 4 + 1, dtype=torch.int32, device=self.device)
        except ImportError as error:
            raise ItemSetError(f"item sets on {self.device} need Triton, which is missing: {error}") from error
        except (RuntimeError, AssertionError) as error:  # out of memory, or torch without CUDA
            raise ItemSetError(f"{self.device} cannot hold an arena of {nbytes:,} bytes: {error}") from error
        self.sets = torch.zeros(max_sets + 1, ROW, dtype=torch.int64, device=self.device)
        self._nothing = build([[0]])  # read in place of a set that is not there
        if self.device.type == "cpu":
            self.rows = np.tile(table_row(self._nothing), (max_sets + 1, 1))
            self.rows_at = self.rows.ctypes.data
        self._bases = np.append(np.arange(max_sets), -1)  # whose tables each set reads: its own, or those of its base
        self._placed: dict[int, _Placed] = {}  # by number; what is placed last stands last
        self._coming: dict[str, tuple[arena_plan.Piece, Iterator[None]]] = {}  # by a set's name: see `place_next`
        self._copies = Copies(self.device, max_sets)

    def acquire(self, item_set: ItemSet) -> int:
        """Return the number of this set. Its tables are copied to the device unless they, or equal ones, are there.

        The current stream sees them from now on. Raises as `Plan.acquire` and `place` do.
        """
        resident = self.plan.acquire(item_set)
        try:
            self.place(item_set, resident.number, resident.start, resident.below)
        except ItemSetError:
            self.plan.release(resident.number)
            raise
        self.use([resident.number])
        return resident.number

    def release(self, number: int) -> None:
        """Do `Plan.release`. The current stream's work so far may still read the set."""
        self.plan.release(number)
        self.use([number])

    def use(self, numbers: NDArray[np.integer[Any]] | Iterable[int], *, begins: bool = True) -> None:
        """Begin a step that reads these sets (numbers, or -1 for none), on the current stream; or let the present one
        read them, too.

        The stream, but not the host, waits for copies of these sets. Until the next step, they are not overwritten.
        `acquire` and `release` call it; call it before each step if you call `place`, or another plan releases sets.
        """
        numbers = np.asarray(numbers, np.int64)
        below = self._bases[numbers]  # whose tables a view's steps read, and a view may stand over a view
        self._copies.use(np.concatenate((numbers, below, self._bases[below])), begins=begins)

    def holds(self, digest: str, number: int, start: int) -> bool:
        """Return whether the tables of this set are there, so that `place` would copy nothing."""
        placed = self._placed.get(number)
        return placed is not None and placed.there and (placed.digest, placed.start) == (digest, start)

    def level_plan(self, number: int) -> LevelPlan:
        """Return the plan of a set's levels, for a search over it. Raises KeyError if no such set is here."""
        placed = self._placed[number]
        if isinstance(placed.levels, ItemSet):
            placed.levels = placed.levels.level_plan
        return placed.levels

    def alphabet(self, number: int, more: tuple[int, ...] = ()) -> bytes:
        """Return the distinct tokens of a set's, or its whole set's, items and `more`: ascending int64, as bytes."""
        placed = self._placed[number]
        if more not in placed.alphabets:
            if isinstance(placed.tokens, ItemSet):
                placed.tokens = placed.tokens.token_ids
            if len(placed.alphabets) == _ALPHABETS:  # `more` comes from clients
                del placed.alphabets[next(iter(placed.alphabets))]
            placed.alphabets[more] = np.union1d(placed.tokens, np.array(more, np.int64)).tobytes()
        return placed.alphabets[more]

    def most_boost(self, number: int) -> float | None:
        """Return a bound of all boosts of a set; None if it has none, or is not there."""
        return self._placed[number].most_boost if number in self._placed else None

    def view(self, number: int) -> ItemSet | None:
        """Return the view that was placed as this set, for others to stand on; None if there is none."""
        return self._placed[number].view if number in self._placed else None

    def forget_views(self, open_sets: Collection[str]) -> None:
        """Let go of views whose whole sets are not among these digests: see `view`. Their tables stay."""
        for placed in self._placed.values():
            if placed.view is not None and placed.view.whole.digest not in open_sets:
                placed.view = None

    def place(self, item_set: ItemSet, number: int, start: int, below: Sequence[Sequence[int]] = ()) -> None:
        """Copy the tables to where a plan, this arena's or another with the same room, has put them.

        below: `Resident.below`, where the sets that a view stands on go before it, unless all of them are there.
        Nothing is copied that is there. Steps see it after `use`. Raises ItemSetError if the tables are no trie.
        """
        if below and item_set.base is not None and not self.holds(item_set.digest, number, start):
            *lower, (base_number, base_start) = below
            self.place(item_set.base, base_number, base_start, lower)
        for _ in self.placing(item_set, number, start):
            pass

    def placing(self, item_set: ItemSet, number: int, start: int) -> Iterator[None]:
        """Do `place` in pieces of `PIECE` bytes, one each time this is advanced: steps may run in between.

        What a view stands on must be there. It ends early if something else is placed here meanwhile: ask `holds`.
        """
        if self.holds(item_set.digest, number, start):
            return
        base = None
        if item_set.base is None:
            _refuse_disorder(item_set)
        else:
            bases = [n for n, one in self._placed.items() if one.there and one.digest == item_set.base.digest]
            if not bases:
                raise ItemSetError("the arena does not hold the set of which this is a view: acquire that first")
            base = bases[-1]  # an earlier place may be free again
        row, parts = self._parts(item_set, number, start, base)
        known = vars(item_set.whole)
        levels = item_set.level_plan if "level_plan" in known else item_set
        tokens = item_set.token_ids if "token_ids" in known else item_set
        boost = item_set.most_boost if item_set.is_steered else None
        placed = _Placed(item_set.digest, start, start + arena_plan.piece_of(item_set), row, levels, tokens, boost)
        overwritten = [n for n, one in self._placed.items() if one.start < placed.end and start < one.end]
        for n in {*overwritten, number}:
            self._placed.pop(n, None)
            if self.device.type == "cpu":
                self.rows[n] = self.rows[-1]
        self._placed[number] = placed
        for _ in self._copies.pieces(number, overwritten, parts):
            yield
            if self._placed.get(number) is not placed:
                return
        if self.device.type == "cpu":  # nothing is read where a set came from: the file of an old version can go
            self.rows[number] = with_addresses(row[None], self.words.data_ptr())
        if base is not None:
            placed.view = item_set
        placed.there, self._placed[number] = True, self._placed.pop(number)
        self._bases[number] = number if base is None else base

    def place_next(self, name: str, item_set: ItemSet, piece: arena_plan.Piece) -> bool:
        """Copy the next piece of the set `name`; return whether all of it is there. Raises ItemSetError as `place`."""
        if name not in self._coming or self._coming[name][0] != piece:
            self._coming[name] = piece, self.placing(item_set, *piece)
        if next(self._coming[name][1], self) is not self:
            return False
        del self._coming[name]  # what was overtaken meanwhile comes again
        return self.holds(item_set.digest, *piece)

    def _parts(self, item_set: ItemSet, number: int, start: int, base: int | None) -> tuple[NDArray[np.int64], Parts]:
        """Return the row of `sets`, and what is to be copied where, the row last. base: the number of a view's base."""
        row, tables = table_row(item_set), item_set.trie.tables
        sections = [*_SECTIONS.values()]
        row[sections] = NO_BITS if base is None else self._placed[base].row[sections]
        if "alive" in item_set.own:
            row[READY] = NO_BITS  # the base's let through what the view leaves out
        widths = form.NARROW_LABELS if tables.labels.itemsize == 2 else 0
        widths |= {2: form.NARROW_TARGETS, 4: 0, 8: form.COUNTED}[tables.targets.itemsize]
        far = len(tables.tail_base) if tables.counted else tables.far_block
        row[form.WIDTHS] = tables.token_bits | widths | far << form.FAR_BLOCK
        memory, at = self.words[:-1].view(torch.uint8), start
        parts: Parts = []
        for name, array in item_set.resident.items():
            row[_SECTIONS[name]] = at // 4
            parts.append((memory[at : at + array.nbytes], array.view(np.uint8)))
            at += aligned(array.nbytes)
        parts.append((self.sets[number].view(torch.uint8), row.view(np.uint8)))
        return row, parts


def with_addresses(rows: NDArray[np.int64], words: int) -> NDArray[np.int64]:
    """Return some rows of `Arena.sets` as Numba takes them. words: the address of `Arena.words`."""
    sections, rows = [*_SECTIONS.values()], rows.copy()
    at = rows[:, sections]
    rows[:, sections] = np.where(at == NO_BITS, 0, words + 4 * at)
    return rows


def check_tables(item_set: ItemSet) -> None:
    """Do ahead of `Arena.place` what reads all of a set, which takes time. Raises ItemSetError if it is no trie."""
    _refuse_disorder(item_set)
    _ = item_set.level_plan, item_set.token_ids, item_set.whole.ready  # else an arena keeps the set, and its file open


def _refuse_disorder(item_set: ItemSet) -> None:
    if not item_set.whole.in_order:
        raise ItemSetError("the item set's tables are no trie: build its index again with `itemset build`")
