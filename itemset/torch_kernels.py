"""The kernels in plain torch: the reference, and the fallback where there is no Triton.

Shapes never depend on what the tensors hold and nothing is read back, so that all of it runs under
`torch.compile(fullgraph=True)`. Each function stands in `triton_kernels` with the same arguments and results; there,
every tensor must have a stride of 1 in its last dimension, and ValueError names one that has not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from itemset.arena import (
    LABELS,
    NARROW_LABELS,
    NARROW_TARGETS,
    NODE_BASE,
    ROW_OFFSETS,
    TAIL_BASE,
    TAILS,
    TARGETS,
    TERMINAL,
    WIDTHS,
    Arena,
)
from itemset.batch import CHAIN, COLUMNS, CONSUMED, CONSUMED_MASK, LOCAL, STATE, Batch
from itemset.walk import DEAD, END, FREE, TAIL, WAITING


def advance(arena: Arena, states: Tensor, tokens: Tensor, marks: Tensor | None, out: Tensor) -> Tensor:
    """out[i] = the state after states[i] and one more token; DEAD where it is neither the item's nor a stop token.

    states, out: [n] int64, may be the same. tokens: [n] integers. marks: [n, 1 + any] integers or None: the token
    behind which the constraint begins where the state is WAITING, then the stop tokens; -1 where there is none.
    """
    return out.copy_(_Tables(arena, states).after(states, tokens.long(), marks, arena.widest.bit_length()))


def walk(arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, most: int | None = None) -> Tensor:
    """Take what each request has committed since the last call, and write the state of each logits row to `out`.

    A row's state is its request's after the row's own drafts. It is DEAD where they leave the set; END in place of DEAD
    where it was committed tokens that left the set, because then nothing but the end of the request is right; and FREE
    where the row has no slot.

    batch: its `rows` are the logits rows.
    cells: [slots + 1] int64 as `slots.Slots` keeps them; written. marks: [slots + 1, 1 + any] as for `advance`.
    out: [rows] int64. most: committed tokens that a request has at most gained since the last call, as the host knows
        it; the width of `history` where None. The work grows with it. Triton looks at each request instead.
    """
    rounds = arena.widest.bit_length()
    row_slots = _of_rows(batch.slots, batch.rows_each)
    live = row_slots >= 0
    slots = torch.where(live, row_slots, len(cells) - 1).long()
    cell, row_marks = cells[slots], marks[slots]
    rows = torch.arange(len(slots), device=slots.device)
    place = slots if batch.by_slot else rows // (batch.rows_each or 1)
    begin, end = (bound[torch.where(live, place, 0)].long() for bound in (batch.begin, batch.end))
    total = end - begin
    new = (total - (cell >> CONSUMED)) & CONSUMED_MASK
    state = cell & STATE
    constrained = live & (state & LOCAL != FREE)
    # The window does not reach back so far: what was missed may have left the set.
    state = torch.where(constrained & (new > end), state & ~LOCAL | DEAD, state)
    above = rows % (batch.rows_each or 1) if batch.above is None else batch.above
    last_column = batch.history.shape[1] - 1
    for i in range(batch.history.shape[1] if most is None else most):
        column = (end - new + i).clamp(0, last_column)
        token = batch.history[torch.where(live, place, 0), column].long()
        if batch.positions is not None and batch.tokens is not None:
            first = rows - torch.where(live, above, 0)
            token = torch.where(column == batch.positions[first], batch.tokens[first].long(), token)
        after = _Tables(arena, state).after(state, token, row_marks, rounds)
        state = torch.where(constrained & (i < new), after, state)
    cells[torch.where(constrained, slots, len(cells) - 1)] = state | (total & CONSUMED_MASK) << CONSUMED
    state = torch.where(state & LOCAL == DEAD, state - DEAD + END, state)
    state = torch.where(constrained, state, FREE)
    if batch.tokens is not None:
        for token, draft in _draft_steps(batch, above, batch.tokens):
            after = _Tables(arena, state).after(state, token, row_marks, rounds)
            state = torch.where(draft, after, state)
    return out.copy_(state)


def mask(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, rows_each: int | None = None
) -> Tensor:
    """Set to -inf, in place, what may not follow each row's state: all but the children of its node, or its tail's
    token, and where an item may end the stop tokens. Rows whose state is FREE, WAITING or DEAD are left as they are.

    Where the item has ended, a stop token that something before has set to -inf becomes 0: the row would be empty, and
    a sampler would take any token of it.

    logits: [rows, vocabulary], any floating type, any row stride. states: [rows] int64. marks: [slots + 1, 1 + any] as
    for `advance`. slots: [rows], or [rows / rows_each] with `rows_each` as in `Batch`, -1 where the row has none; then
    no stop token is allowed.
    """
    slots, vocabulary = _of_rows(slots, rows_each), logits.shape[1]
    tables = _Tables(arena, states)
    local = states & LOCAL
    first, end = tables.row(local)
    lanes = torch.arange(min(vocabulary, arena.widest), device=logits.device)
    edge = first[:, None] + lanes
    inside = edge < end[:, None]
    label = _Tables(arena, states[:, None]).label(torch.where(inside, edge, 0))
    nothing = torch.full_like(states, vocabulary)[:, None]
    keep = torch.zeros(len(logits), vocabulary + 1, dtype=torch.bool, device=logits.device)
    keep.scatter_(1, torch.where(inside & (label < vocabulary), label, nothing), True)
    tail = tables.tail_entry(local)[0][:, None]
    keep.scatter_(1, torch.where((local >= TAIL)[:, None] & (tail < vocabulary), tail, nothing), True)
    stop = marks[slots.clamp(min=0).long(), 1:].long()
    allowed = (tables.may_end(local) & (slots >= 0))[:, None] & (stop >= 0) & (stop < vocabulary)
    keep.scatter_(1, torch.where(allowed, stop, nothing), True)
    keep = keep[:, :vocabulary]
    logits.masked_fill_((local == END)[:, None] & keep & logits.isneginf(), 0)
    return logits.masked_fill_(_applies(local)[:, None] & ~keep, -torch.inf)


def step(
    arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, logits: Tensor, most: int | None = None
) -> Tensor:
    """`walk`, then `mask`."""
    walk(arena, cells, marks, batch, out, most)
    return mask(arena, logits, out, marks, batch.slots, batch.rows_each)


def forced(arena: Arena, states: Tensor, marks: Tensor, slots: Tensor, out: Tensor, guess: bool = False) -> Tensor:
    """The tokens that must follow each state, as many as `out` has columns and the set forces, then -1.

    A token is forced where a node has one child and no item ends there, and in a tail. Behind a complete item stands
    the row's first stop token, and then no more. Rows whose state is FREE, WAITING or DEAD are left as they are.

    states: [rows] int64. marks, slots: as for `mask`. out: [rows, k] int32 or int64. guess: go on with a node's first
    child where no token is forced, and with the stop token behind the first one, so that every token is a legal one.
    """
    applies = _applies(states & LOCAL)
    state, going = states, applies
    stop = torch.where(slots >= 0, marks[slots.clamp(min=0).long(), 1].long(), -1)
    for k in range(out.shape[1]):
        tables, local = _Tables(arena, state), state & LOCAL
        first, end = tables.row(local)
        one = (end > first) if guess else (end - first == 1) & ~tables.may_end(local)
        token = torch.where(one, tables.label(torch.where(one, first, 0)), -1)
        token = torch.where(local >= TAIL, tables.tail_entry(local)[0], token)
        token = torch.where(local == END, stop, token)
        out[:, k] = torch.where(applies, torch.where(going, token, -1), out[:, k])
        going = going & (token >= 0) & (guess | (local != END))
        after = tables.after(state, token, None, arena.widest.bit_length())
        state = torch.where(going & (local != END), after, state)
    return out


def _applies(local: Tensor) -> Tensor:
    """Whether the state restricts what may follow."""
    return (local < WAITING) | (local >= END)


def may_end(arena: Arena, states: Tensor) -> Tensor:
    """Whether an item may end at each state: bool, in the shape of states."""
    return _Tables(arena, states).may_end(states & LOCAL)


def _of_rows(slots: Tensor, rows_each: int | None) -> Tensor:
    """Each logits row's slot."""
    return slots if rows_each is None else slots.repeat_interleave(rows_each)


def _draft_steps(batch: Batch, above: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each step down from the committed state: the token that each row takes, and whether it takes one."""
    if batch.layout == COLUMNS:
        return [(tokens[:, i].long(), above > i) for i in range(tokens.shape[1])]
    most = (batch.rows_each or len(tokens)) - 1 if batch.max_drafts is None else batch.max_drafts
    rows = torch.arange(len(tokens), device=tokens.device)

    def at(row: Tensor) -> Tensor:
        return tokens[row.clamp(0, len(tokens) - 1)].long()

    if batch.layout == CHAIN:
        return [(at(rows - above + i + 1), above > i) for i in range(most)]
    path = [rows]  # the row, its parent, its parent's parent ...; -1 above a request's first row
    for _ in range(most):
        path.append(torch.where(path[-1] >= 0, above[path[-1].clamp(0, len(rows) - 1)].long(), -1))
    # A row's first token is that of the ancestor just below its request's first row, which has no parent.
    return [(at(row), (row >= 0) & (parent >= 0)) for row, parent in zip(path[-2::-1], path[:0:-1], strict=True)]


class _Tables:
    """The tables behind each of some states. All arguments and results are int64 tensors of the states' shape."""

    def __init__(self, arena: Arena, states: Tensor) -> None:
        self.arena = arena
        self.fields = arena.sets[states >> 32]

    def field(self, column: int) -> Tensor:
        return self.fields[..., column]

    def word(self, column: int, index: Tensor) -> Tensor:
        return self.arena.words[self.field(column) + index].long() & 0xFFFFFFFF

    def element(self, column: int, index: Tensor, narrow_bit: int) -> Tensor:
        narrow = self.field(WIDTHS) & narrow_bit != 0
        word = self.word(column, torch.where(narrow, index >> 1, index))
        return torch.where(narrow, (word >> ((index & 1) * 16)) & 0xFFFF, word)

    def label(self, edge: Tensor) -> Tensor:
        return self.element(LABELS, edge, NARROW_LABELS)

    def row(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """First edge and the one behind the last; equal where the state is no node."""
        node = torch.where(local < WAITING, local, 0)
        first, end = self.word(ROW_OFFSETS, node), self.word(ROW_OFFSETS, node + 1)
        return first, torch.where(local < WAITING, end, first)

    def may_end(self, local: Tensor) -> Tensor:
        node = torch.where(local < WAITING, local, 0)
        bit = (self.word(TERMINAL, node >> 5) >> (node & 31)) & 1
        return (local == END) | ((local < WAITING) & (bit != 0))

    def tail_entry(self, local: Tensor) -> tuple[Tensor, Tensor]:
        """Token at this position of the tails, and whether it is the last of its tail."""
        token_bits = self.field(WIDTHS) & 0xFF
        at = torch.where(local >= TAIL, local - TAIL, 0) * (token_bits + 1)
        shift = at & 31
        low, high = self.word(TAILS, at >> 5), self.word(TAILS, (at >> 5) + 1)
        entry = (low >> shift) | (high << (32 - shift))
        return entry & ((1 << token_bits) - 1), (entry >> token_bits) & 1 != 0

    def find(self, local: Tensor, token: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        """The edge of node `local` that carries the token, and whether there is one. Rows are shorter than 2^rounds."""
        low, end = self.row(local)
        high = end
        for _ in range(rounds):
            middle = (low + high) >> 1
            label = self.label(torch.where(low < high, middle, 0))
            below = (low < high) & (label < token)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        edge = torch.where(low < end, low, 0)
        return edge, (low < end) & (self.label(edge) == token)

    def follow(self, edge: Tensor) -> Tensor:
        """The state behind an edge, as `walk.follow`."""
        target = self.element(TARGETS, edge, NARROW_TARGETS)
        leaf = torch.where(self.field(WIDTHS) & NARROW_TARGETS != 0, 1 << 15, 1 << 31)
        node = self.word(NODE_BASE, edge >> 5) + target
        tail = self.word(TAIL_BASE, edge >> 5) + target - leaf + TAIL
        return torch.where(target == 2 * leaf - 1, END, torch.where(target >= leaf, tail, node))

    def after(self, states: Tensor, token: Tensor, marks: Tensor | None, rounds: int) -> Tensor:
        """The state, with its set, after one more token."""
        local = states & LOCAL
        edge, found = self.find(local, token, rounds)
        expected, last = self.tail_entry(local)
        behind = torch.where(found, self.follow(edge), DEAD)
        in_tail = torch.where(expected == token, torch.where(last, END, local + 1), DEAD)
        result = torch.where(local >= TAIL, in_tail, behind)
        result = torch.where((local == FREE) | (local == WAITING), local, result)
        if marks is not None:
            is_mark = (token >= 0)[:, None] & (marks == token[:, None])
            result = torch.where((result == DEAD) & is_mark[:, 1:].any(1) & self.may_end(local), END, result)
            result = torch.where((local == WAITING) & is_mark[:, 0], 0, result)
        return (states & ~LOCAL) | result
