"""The kernels in plain torch: the reference, and the fallback without Triton.

Shapes never depend on what the tensors hold and nothing is read back, so that all of it runs under
`torch.compile(fullgraph=True)`. `triton_kernels` has each function with the same arguments and results; there,
every tensor must have a stride of 1 in its last dimension, and ValueError names one that has not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from itemset.masking.arena import DEAD_COUNT, DEAD_LIST, ENTRY, FIRST_DEAD, LEFT, MORE, SEPARATOR, Arena
from itemset.masking.batch import ANY_CONSUMED, CHAIN, COLUMNS, CONSUMED, CONSUMED_MASK, COUNT_MASK, LOCAL, STATE, Batch
from itemset.masking.torch_tables import TablesOf
from itemset.trie.tables import TERMINAL
from itemset.trie.walk import DEAD, END, FREE, STATE_BITS, TAIL, WAITING


def advance(arena: Arena, states: Tensor, tokens: Tensor, marks: Tensor | None, out: Tensor) -> Tensor:
    """Write to out[i] the state after states[i] and one more token; DEAD if that is no token of the item and no stop.

    states, out: [n] int64, may be the same. tokens: [n] integers. marks: [n, 1 + any] integers or None: the token
    after which a WAITING row's constraint begins, then the stop tokens; -1 for none.
    """
    return out.copy_(TablesOf(arena, states).after(states, tokens.long(), marks, arena.widest.bit_length()))


def walk(arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, most: int | None = None) -> Tensor:
    """Take what each request has committed since the last call, and write the state of each logits row to `out`.

    A row's state is its request's after the row's own drafts. It is DEAD if they leave the set. If committed tokens
    have left it, it is END, because then only the end of the request is right. It is FREE if the row has no slot.

    batch: its `rows` are the logits rows.
    cells: [slots + 1] int64 as `slots.Slots` keeps them; written. marks: [slots + 1, 1 + any] as for `advance`.
    out: [rows] int64.
    most: committed tokens that a request has gained at most since the last call, as the host knows; the width of
        `history` if None. The work grows with it. Triton looks at each request instead.
    """
    rounds = arena.widest.bit_length()
    rows = _Committed(cells, marks, batch)
    state = rows.state
    for token, new in rows.tokens(most):
        state = torch.where(new, TablesOf(arena, state).after(state, token, rows.marks, rounds), state)
    rows.keep(cells, state)
    state = torch.where(state & LOCAL == DEAD, state - DEAD + END, state)
    state = torch.where(rows.constrained, state, FREE)
    if batch.tokens is not None:
        for token, draft in _draft_steps(batch, rows.above, batch.tokens):
            after = TablesOf(arena, state).after(state, token, rows.marks, rounds)
            state = torch.where(draft, after, state)
    return out.copy_(state)


def grow(arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, most: int | None = None) -> None:
    """Take what each request with a slate has committed since the last call, and leave out the items in it from now on.

    To be launched before the `walk` of a batch with slates, which then finds nothing to take: the rows of a request
    could not write its list together. Other requests stay as they are. A request that has committed nothing begins its
    slate anew. Arguments as for `walk`.
    """
    rounds = arena.widest.bit_length()
    rows = _Committed(cells, marks, batch)
    nobody, no_word = len(arena.sets) - 1, len(arena.words) - 1
    fields = arena.sets[rows.state >> STATE_BITS]
    grows = rows.constrained & rows.leads & (fields[:, MORE] > 0)
    begins = grows & (rows.consumed == 0)
    number = torch.where(begins, rows.state >> STATE_BITS, nobody)
    arena.sets[:, LEFT].index_put_((number,), fields[:, MORE])
    arena.sets[:, DEAD_COUNT].index_put_((number,), fields[:, FIRST_DEAD])
    places = torch.arange(arena.longest_slate + 1, device=cells.device)
    first, at = fields[:, FIRST_DEAD, None], fields[:, DEAD_LIST, None] + places
    copied = begins[:, None] & (places < first)
    arena.words[torch.where(copied, at, no_word)] = arena.words[torch.where(copied, at - first, no_word)]
    state = rows.state
    for token, new in rows.tokens(most):
        taking = grows & new
        tables, local = TablesOf(arena, state), state & LOCAL
        after = tables.after(state, token, rows.marks, rounds)
        edge, found = tables.find(local, token, rounds)
        _, children = _children(tables, local)
        others = (local == 0) | (children + tables.may_end(local) > 1)
        entry = torch.where(found & others, edge, tables.field(ENTRY))
        ends = ~found & (local < WAITING) & (token == tables.field(SEPARATOR)) & (children > 0)
        entry = torch.where(ends, TERMINAL + local, entry)
        arena.sets[:, ENTRY].index_put_((torch.where(taking, state >> STATE_BITS, nobody),), entry)
        given = taking & (after & LOCAL == 0) & (local != WAITING)
        dead, count = tables.field(DEAD_LIST)[:, None], tables.field(DEAD_COUNT)[:, None]
        entries = tables.word(DEAD_LIST, torch.where(places < count, places, 0), each=True)
        moves = (places < count) & (entries > entry[:, None])
        to = torch.where(given[:, None] & moves, dead + places + 1, no_word)
        arena.words[to] = entries.to(torch.int32)
        place = tables.field(DEAD_LIST) + tables.field(DEAD_COUNT) - moves.sum(1)
        arena.words[torch.where(given, place, no_word)] = entry.to(torch.int32)
        number = torch.where(given, state >> STATE_BITS, nobody)
        arena.sets[:, DEAD_COUNT].index_put_((number,), tables.field(DEAD_COUNT) + 1)
        arena.sets[:, LEFT].index_put_((number,), tables.field(LEFT) - 1)
        state = torch.where(taking, after, state)
    left = grows & (state & LOCAL == DEAD)  # only its end is right now, whatever is missing
    arena.sets[:, LEFT].index_put_((torch.where(left, state >> STATE_BITS, nobody),), torch.zeros_like(state))
    rows.keep(cells, state, grows)


class _Committed:
    """What each row's request has committed since its cell was written. All tensors are [rows] int64, or bool.

    state: before these tokens. consumed: 0 if none led there, else how many, as in a cell. constrained: whether it has
    a set. above: how many drafts lead to the row, or its parent. leads: whether the row is its request's first.
    marks: [rows, 1 + any].
    """

    def __init__(self, cells: Tensor, marks: Tensor, batch: Batch) -> None:
        row_slots = _of_rows(batch.slots, batch.rows_each)
        live = row_slots >= 0
        slots = torch.where(live, row_slots, len(cells) - 1).long()
        cell, self.marks = cells[slots], marks[slots]
        rows = torch.arange(len(slots), device=slots.device)
        place = slots if batch.by_slot else rows // (batch.rows_each or 1)
        self._batch, self._rows, self._live, self._slots = batch, rows, live, slots
        self._place = torch.where(live, place, 0)
        begin, self._end = (bound[self._place].long() for bound in (batch.begin, batch.end))
        self._total, self.consumed = self._end - begin, cell >> CONSUMED & CONSUMED_MASK
        state = cell & STATE
        self._new = torch.where(self.consumed == 0, self._total, (self._total - self.consumed) & COUNT_MASK)
        self.constrained = live & (state & LOCAL != FREE)
        # The window does not reach back so far: the tokens missed may have left the set.
        missed = self.constrained & (self._new > self._end)
        self.state = torch.where(missed, state & ~LOCAL | DEAD, state)
        self.above = rows % (batch.rows_each or 1) if batch.above is None else batch.above
        self.leads = torch.ones_like(live) if batch.layout == COLUMNS else self.above <= 0

    def tokens(self, most: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the next token of each row, and whether there is one. most: as for `walk`."""
        batch, rows = self._batch, self._rows
        last_column = batch.history.shape[1] - 1
        for i in range(batch.history.shape[1] if most is None else most):
            column = (self._end - self._new + i).clamp(0, last_column)
            token = batch.history[self._place, column].long()
            if batch.positions is not None and batch.tokens is not None:
                first = rows - torch.where(self._live, self.above, 0)
                token = torch.where(column == batch.positions[first], batch.tokens[first].long(), token)
            yield token, self.constrained & (i < self._new)

    def keep(self, cells: Tensor, state: Tensor, which: Tensor | None = None) -> None:
        """Write the cells: the state after all tokens, of the rows with a set or of those that `which` says."""
        written = self.constrained if which is None else which
        count = self._total & COUNT_MASK | torch.where(self._total == 0, 0, ANY_CONSUMED)
        cell = state | count << CONSUMED
        cells[torch.where(written, self._slots, len(cells) - 1)] = cell


def mask(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, rows_each: int | None = None
) -> Tensor:
    """Set to -inf, in place, what may not follow each row's state.

    The children of its node or its tail's token may follow, and the stop tokens if an item may end there; in a slate,
    until its last item, the separator in their place. Rows whose state is FREE, WAITING or DEAD stay as they are. After
    an item, a stop token that something else has set to -inf becomes 0: the row would be empty, and a sampler would
    take any token of it.

    logits: [rows, vocabulary], any floating type, any row stride. states: [rows] int64. marks: [slots + 1, 1 + any] as
    for `advance`. slots: [rows], or [rows / rows_each] with `rows_each` as in `Batch`; -1 for none, then no stop token
    is allowed.
    """
    slots, vocabulary = _of_rows(slots, rows_each), logits.shape[1]
    tables = TablesOf(arena, states)
    local = states & LOCAL
    first, end = tables.row(local)
    lanes = torch.arange(min(vocabulary, arena.widest), device=logits.device)
    edge = first[:, None] + lanes
    inside = edge < end[:, None]
    row_tables, edge = TablesOf(arena, states[:, None]), torch.where(inside, edge, 0)
    if arena.views:
        inside = inside & row_tables.is_alive(edge)
    label = row_tables.label(edge)
    nothing = torch.full_like(states, vocabulary)[:, None]
    keep = torch.zeros(len(logits), vocabulary + 1, dtype=torch.bool, device=logits.device)
    keep.scatter_(1, torch.where(inside & (label < vocabulary), label, nothing), True)
    tail = tables.tail_entry(local)[0][:, None]
    keep.scatter_(1, torch.where((local >= TAIL)[:, None] & (tail < vocabulary), tail, nothing), True)
    stop = marks[slots.clamp(min=0).long(), 1:].long()
    if arena.slates:  # another item is to come
        separator = torch.full_like(stop, -1)
        separator[:, 0] = tables.field(SEPARATOR)
        stop = torch.where(tables.field(LEFT)[:, None] > 0, separator, stop)
    allowed = (tables.may_end(local) & (slots >= 0))[:, None] & (stop >= 0) & (stop < vocabulary)
    keep.scatter_(1, torch.where(allowed, stop, nothing), True)
    keep = keep[:, :vocabulary]
    logits.masked_fill_((local == END)[:, None] & keep & logits.isneginf(), 0)
    return logits.masked_fill_(_applies(local)[:, None] & ~keep, -torch.inf)


def step(
    arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, logits: Tensor, most: int | None = None
) -> Tensor:
    """Do `walk`, then `mask`."""
    walk(arena, cells, marks, batch, out, most)
    return mask(arena, logits, out, marks, batch.slots, batch.rows_each)


def forced(arena: Arena, states: Tensor, marks: Tensor, slots: Tensor, out: Tensor, guess: bool = False) -> Tensor:
    """Write to `out` the tokens that must follow each state, as many as it has columns and the set forces, then -1.

    A token is forced if a node has one child and no item ends there, and in a tail. After a complete item comes the
    row's first stop token, and then no more. Rows whose state is FREE, WAITING or DEAD stay as they are.

    states: [rows] int64. marks, slots: as for `mask`. out: [rows, k] int32 or int64.
    guess: if no token is forced, go on with a node's first child, and after the stop token with the same one again, so
        that every token is a legal one.
    """
    applies = _applies(states & LOCAL)
    state, going = states, applies
    stop = torch.where(slots >= 0, marks[slots.clamp(min=0).long(), 1].long(), -1)
    for k in range(out.shape[1]):
        tables, local = TablesOf(arena, state), state & LOCAL
        first, count = _children(tables, local)
        ends = tables.may_end(local)
        local = torch.where(ends & (count == 0) & (local < WAITING), END, local)
        state = (state & ~LOCAL) | local
        one = (count > 0) if guess else (count == 1) & ~ends
        token = torch.where(one, tables.label(torch.where(one, first, 0)), -1)
        token = torch.where(local >= TAIL, tables.tail_entry(local)[0], token)
        token = torch.where(local == END, stop, token)
        out[:, k] = torch.where(applies, torch.where(going, token, -1), out[:, k])
        going = going & (token >= 0) & (guess | (local != END))
        after = tables.after(state, token, None, arena.widest.bit_length())
        state = torch.where(going & (local != END), after, state)
    return out


def _children(tables: TablesOf, local: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first edge of each node that a walk may take, and how many there are."""
    first, end = tables.row(local)
    if not tables.arena.views:
        return first, end - first
    lanes = torch.arange(tables.arena.widest, device=first.device)
    edge = first[:, None] + lanes
    inside = edge < end[:, None]
    alive = inside & TablesOf(tables.arena, tables.states[:, None]).is_alive(torch.where(inside, edge, 0))
    return first + alive.int().argmax(1), alive.sum(1)


def _applies(local: Tensor) -> Tensor:
    """Return whether the state restricts what may follow."""
    return (local < WAITING) | (local >= END)


def may_end(arena: Arena, states: Tensor) -> Tensor:
    """Return whether an item may end at each state: bool, in the shape of states."""
    return TablesOf(arena, states).may_end(states & LOCAL)


def _of_rows(slots: Tensor, rows_each: int | None) -> Tensor:
    """Return each logits row's slot."""
    return slots if rows_each is None else slots.repeat_interleave(rows_each)


def _draft_steps(batch: Batch, above: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return, for each step down from the committed state, each row's token, and whether it takes one."""
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
