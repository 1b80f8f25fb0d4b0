"""The kernels in Numba, for CPUs: advance, walk, mask, children and forced, as `slots.Slots` calls them.

`triton_kernels` has the same functions with the same arguments and results. Here a set's tables are read where they
lie: compiled loops take the address of its row of integers (`batch.table_row`), and a tensor's address and strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from itemset.masking import batch as form
from itemset.masking.batch import ANY_CONSUMED, CONSUMED_MASK, COUNT_MASK, LOCAL, STATE, Batch, refuse_strides
from itemset.masking.bitmask import fill_bitmask_of
from itemset.masking.cpu_logits import forbid, logit, put_logit
from itemset.trie import walk as trie_walk
from itemset.trie.pointers import array_at, compiled, first_edge, label, load32, load64, pointers_at, store32, store64
from itemset.trie.walk import DEAD, END, FREE, NO_TOKEN, STATE_BITS, TAIL, WAITING, is_alive, is_terminal

if TYPE_CHECKING:
    from torch import Tensor

    from itemset.masking.arena import Arena


def advance(arena: Arena, states: Tensor, tokens: Tensor, marks: Tensor, out: Tensor) -> Tensor:
    """Write to out[i] the state after states[i] and one more token; DEAD if that is no token of the item and no stop.

    states, out: [n] int64, may be the same. tokens: [n] integers. marks: [n, 1 + any] int32, dense: the token after
    which a WAITING row's constraint begins, then the stop tokens; -1 for none.
    """
    _advance(arena.rows_at, states.numpy(), marks.numpy(), _integers((), tokens), out.numpy())
    return out


def walk(arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor, logits: Tensor | None = None) -> Tensor:
    """Take what each request has committed since the last call, and write the state of each logits row to `out`.

    A row's state is its request's after the row's own drafts: DEAD if they leave the set, END if committed tokens have
    left it, as then only the end of the request is right, and FREE if the row has no slot.

    cells: [slots + 1] int64, those of `Slots`; written. marks: [slots + 1, 1 + any] as of `advance`. out: [rows] int64.
    logits: if given, those to `mask` by these states.
    """
    refuse_strides(logits=logits)  # before anything is written
    _walk(_walk_of(arena, cells, marks, batch, out))
    if logits is not None:
        _mask(_mask_of(arena, logits, out, marks, batch.slots, batch.rows_each))
    return out


def mask(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, rows_each: int | None = None
) -> Tensor:
    """Set to -inf, in place, what may not follow each row's state.

    The children of its node or its tail's token may follow, and the stop tokens if an item may end there. Rows
    whose state is FREE, WAITING or DEAD stay as they are. After an item, a stop token that something else has set to
    -inf becomes 0: the row would be empty, and a sampler would take any token of it.

    logits: [rows, vocabulary], any floating type, any row stride. states: [rows] int64. marks: [slots + 1, 1 + any] as
    for `advance`. slots: [rows], or [rows / rows_each] with `rows_each` as in `Batch`; -1 for none, then no stop token
    is allowed. Raises ValueError for logits or states with another stride than 1 in a row.
    """
    refuse_strides(logits=logits, states=states)
    _mask(_mask_of(arena, logits, states, marks, slots, rows_each))
    return logits


def children(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, rows_each: int | None, width: int
) -> tuple[Tensor, Tensor]:
    """Return what may follow each row's state, where `mask` keeps it, and its logits, as `slots.Children`.

    logits, states, marks, slots, rows_each: as for `mask`; the logits are not changed. width: columns of the result.
    """
    refuse_strides(logits=logits, states=states)
    tokens, found = marks.new_empty((len(states), width)), logits.new_empty((len(states), width))
    _children(_mask_of(arena, logits, states, marks, slots, rows_each), tokens.data_ptr(), found.data_ptr(), width)
    return tokens, found


def forced(arena: Arena, states: Tensor, marks: Tensor, slots: Tensor, out: Tensor, guess: bool = False) -> Tensor:
    """Write to `out` the tokens that must follow each state, as many as it has columns and the set forces, then -1.

    A token is forced if a node has one child and no item ends there, and in a tail. After a complete item comes the
    row's first stop token, and then no more. Rows whose state is FREE, WAITING or DEAD stay as they are.

    states: [rows] int64. marks, slots: as for `mask`. out: [rows, k] int32 or int64.
    guess: if no token is forced, go on with a legal one: a node's first child, and again the stop token after that.
    """
    given = _integers((), slots, out)
    _forced(arena.rows_at, states.numpy(), marks.numpy(), given, out.shape[1], guess)
    return out


_MINUS_INFINITY = {
    "torch.float16": 0xFC00, "torch.bfloat16": 0xFF80, "torch.float32": 0xFF800000, "torch.float64": -(1 << 52),
}  # fmt: skip


def _integers(first: tuple[int, ...], *tensors: Tensor | None) -> NDArray[np.int64]:
    """Return integers, then each tensor's address, 0 for none, bytes of an element, and strides of rows and columns.
    Each call of torch counts here: a step of a few rows is little else."""
    given = [*first]
    for one in tensors:
        if one is None:
            given += (0, 8, 0, 0)
        else:
            strides = one.stride()
            given += (one.data_ptr(), one.element_size(), strides[0], strides[-1])
    return np.array(given, np.int64)


_SETS, _STATES, _ROWS, _ROWS_EACH, _MARKS, _COLUMNS, _CELLS, _BY_SLOT, _LAYOUT = range(9)  # of `walk`
_VOCABULARY, _MINUS = 6, 7  # of `mask`; the first six are the same
_WALK_HEAD, _MASK_HEAD = 9, 8  # what comes before the tensors


def _walk_of(arena: Arena, cells: Tensor, marks: Tensor, batch: Batch, out: Tensor) -> NDArray[np.int64]:
    slots, history, begin, end, by_slot, above, tokens, layout, rows_each, positions = batch
    first = (
        arena.rows_at, out.data_ptr(), out.shape[0], rows_each or 1, marks.data_ptr(), marks.shape[1], cells.data_ptr(),
        by_slot, layout,
    )  # fmt: skip
    return _integers(first, slots, history, begin, end, above, tokens, positions)


def _mask_of(
    arena: Arena, logits: Tensor, states: Tensor, marks: Tensor, slots: Tensor, rows_each: int | None
) -> NDArray[np.int64]:
    first = (
        arena.rows_at, states.data_ptr(), states.shape[0], rows_each or 1, marks.data_ptr(), marks.shape[1],
        logits.shape[1], _MINUS_INFINITY[str(logits.dtype)],
    )  # fmt: skip
    return _integers(first, slots, logits)


_SLOTS, _HISTORY, _BEGIN, _END, _ABOVE, _TOKENS, _POSITIONS = range(7)  # of what `walk` gives
_LOGITS = _OUT = 1  # of what `mask` and `forced` give, after the slots


@compiled
def _integer(given: int, which: int, row: int, column: int) -> Any:
    """Return an element of one of the tensors that `_integers` has described; -1 stands for none in all of them."""
    address, size = load64(given, 4 * which), load64(given, 4 * which + 1)
    index = row * load64(given, 4 * which + 2) + column * load64(given, 4 * which + 3)
    return load64(address, index) if size == 8 else np.int64(np.int32(load32(address, index)))


@compiled
def row_at(sets: int, state: int) -> Any:
    """Return the address of the row of a state's set. sets: the address of the first row."""
    return np.int64(sets) + (state >> STATE_BITS) * (8 * form.ROW)


@compiled
def next_state(row: int, state: int, token: int, begins_after: int, stops: Any) -> Any:
    """Return the state, without its set, after one more token. row: the address of the set's."""
    if state == WAITING:
        return np.int64(0) if token >= 0 and token == begins_after else np.int64(WAITING)
    tables = pointers_at(row)
    after = trie_walk.advance(tables, state, token)
    if after == DEAD and is_terminal(tables, state):
        for stop in stops:
            if stop == token and token >= 0:
                return np.int64(END)
    return after


@compiled
def children_from(tables: Any, node: int) -> Any:
    """Return the first edge of a node that a walk may take, and how many there are, 2 for more."""
    first, count = np.int64(-1), 0
    for edge in range(first_edge(tables, node), first_edge(tables, node + 1)):
        if is_alive(tables, edge):
            first = np.int64(edge) if count == 0 else first
            count += 1
            if count == 2:
                break
    return first, count


@compiled
def _advance(sets: int, states: Any, marks: Any, given: Any, out: Any) -> None:
    for i in range(len(states)):
        state, token = states[i], _integer(given.ctypes.data, 0, i, 0)
        after = next_state(row_at(sets, state), state & LOCAL, token, marks[i, 0], marks[i, 1:])
        out[i] = state & ~LOCAL | after


@compiled
def _stops(marks: int, columns: int, slot: int) -> Any:
    """Return a slot's stop tokens; none of no slot."""
    return array_at(marks + (slot * columns + 1) * 4, columns - 1 if slot >= 0 else 0, np.int32)


@compiled
def _walk(given: Any) -> None:
    head = given.ctypes.data
    sets, out, marks, cells = load64(head, _SETS), load64(head, _STATES), load64(head, _MARKS), load64(head, _CELLS)
    rows_each, columns, layout = load64(head, _ROWS_EACH), load64(head, _COLUMNS), load64(head, _LAYOUT)
    batch = head + 8 * _WALK_HEAD
    for row in range(load64(head, _ROWS)):
        request = row // rows_each
        slot = _integer(batch, _SLOTS, request, 0)
        if slot < 0 or load64(cells, slot) & LOCAL == FREE:
            store64(out, row, FREE)
            continue
        drafts = _drafts(batch, layout, row, row - request * rows_each)
        place = slot if load64(head, _BY_SLOT) else request
        begins_after = np.int64(np.int32(load32(marks, slot * columns)))
        stops = _stops(marks, columns, slot)
        state = _committed(sets, cells, begins_after, stops, batch, slot, place, row - drafts)
        cell = load64(cells, slot)
        for i in range(drafts if load64(batch, 4 * _TOKENS) else 0):
            at, column = row - drafts + 1 + i, 0
            if layout == form.TREE:
                at = row
                for _ in range(i + 1, drafts):
                    at = _integer(batch, _ABOVE, at, 0)
            elif layout == form.COLUMNS:
                at, column = row, i
            token = _integer(batch, _TOKENS, at, column)
            state = next_state(row_at(sets, cell & STATE), state, token, begins_after, stops)
        store64(out, row, cell & STATE & ~LOCAL | state)


@compiled
def _drafts(batch: int, layout: int, row: int, drafts: int) -> Any:
    """Return how many drafts lead to a row; `drafts` if the batch does not say."""
    if not load64(batch, 4 * _ABOVE):
        return drafts
    above = _integer(batch, _ABOVE, 0 if layout == form.COLUMNS else row, 0)
    if layout != form.TREE:
        return above
    drafts = 0
    while above >= 0:
        above, drafts = _integer(batch, _ABOVE, above, 0), drafts + 1
    return drafts


@compiled
def _committed(
    sets: int, cells: int, begins_after: int, stops: Any, batch: int, slot: int, place: int, first_row: int
) -> Any:
    """Take the committed tokens that a request's cell has not seen. Return the state after them, DEAD as END."""
    begin, end = _integer(batch, _BEGIN, place, 0), _integer(batch, _END, place, 0)
    cell, total = load64(cells, slot), end - begin
    state, consumed = cell & LOCAL, (cell >> form.CONSUMED) & CONSUMED_MASK
    new = total if consumed == 0 else (total - consumed) & COUNT_MASK
    row = row_at(sets, cell & STATE)
    known = newest = np.int64(-1)
    if load64(batch, 4 * _POSITIONS):
        known, newest = _integer(batch, _POSITIONS, first_row, 0), _integer(batch, _TOKENS, first_row, 0)
    if new > end:  # the window does not reach back so far: the tokens missed may have left the set
        state, new = np.int64(DEAD), np.int64(0)
    for column in range(end - new, end):
        token = newest if column == known else _integer(batch, _HISTORY, place, column)
        state = next_state(row, state, token, begins_after, stops)
    count = total & COUNT_MASK | (ANY_CONSUMED if total else 0)
    store64(cells, slot, cell & STATE & ~LOCAL | state | count << form.CONSUMED)
    return np.int64(END) if state == DEAD else state


@compiled
def _forced(sets: int, states: Any, marks: Any, given: Any, columns: int, guess: bool) -> None:
    address, size, stride = given[4 * _OUT], given[4 * _OUT + 1], given[4 * _OUT + 2]
    for i in range(len(states)):
        row, state = row_at(sets, states[i]), states[i] & LOCAL
        slot, tables = _integer(given.ctypes.data, _SLOTS, i, 0), pointers_at(row)
        stop = np.int64(marks[slot, 1]) if slot >= 0 else np.int64(-1)
        going = state < WAITING or state >= END
        for column in range(columns if going else 0):
            token = np.int64(-1)
            if going:
                if state >= TAIL:
                    token = trie_walk.tail_token(tables, state)
                elif state < WAITING:
                    first, count = children_from(tables, state)
                    ends = is_terminal(tables, state)
                    if count and (guess or (count == 1 and not ends)):
                        token = label(tables, first)
                    elif ends and not count:
                        state = np.int64(END)
                if state == END:
                    token = stop
                going = token >= 0 and (guess or state != END)
                if going and state != END:
                    state = next_state(row, state, token, NO_TOKEN, marks[0, :0])
            if size == 4:
                store32(address, i * stride + column, token)
            else:
                store64(address, i * stride + column, token)


@compiled
def _mask(given: Any) -> None:
    head = given.ctypes.data
    sets, states, marks, vocabulary = (
        load64(head, _SETS), load64(head, _STATES), load64(head, _MARKS), load64(head, _VOCABULARY),
    )  # fmt: skip
    logits = head + 8 * (_MASK_HEAD + 4 * _LOGITS)
    address, size, stride = load64(logits, 0), load64(logits, 1), load64(logits, 2)
    forbidden = load64(head, _MINUS)
    words = np.empty((vocabulary + 31) >> 5, np.uint32)
    for i in range(load64(head, _ROWS)):
        row, state = row_at(sets, load64(states, i)), load64(states, i) & LOCAL
        tables = pointers_at(row)
        if (WAITING <= state < END) or (tables.nodes <= state < WAITING):
            continue
        slot = _integer(head + 8 * _MASK_HEAD, _SLOTS, i // load64(head, _ROWS_EACH), 0)
        stops = _stops(marks, load64(head, _COLUMNS), slot)
        fill_bitmask_of(tables, state, stops, load64(row, form.READY), words)
        at = address + i * stride * size
        forbid(at, size, vocabulary, words.ctypes.data, forbidden)
        if state == END:
            for token in stops:
                if 0 <= token < vocabulary and logit(at, size, token) == forbidden:
                    put_logit(at, size, token, 0)


@compiled
def _children(given: Any, tokens: int, found: int, width: int) -> None:
    head = given.ctypes.data
    sets, states, vocabulary = load64(head, _SETS), load64(head, _STATES), load64(head, _VOCABULARY)
    logits, forbidden = head + 8 * (_MASK_HEAD + 4 * _LOGITS), load64(head, _MINUS)
    address, size, stride = load64(logits, 0), load64(logits, 1), load64(logits, 2)
    for i in range(load64(head, _ROWS)):
        tables, state = pointers_at(row_at(sets, load64(states, i))), load64(states, i) & LOCAL
        at, to, into, count = address + i * stride * size, tokens + 4 * width * i, found + size * width * i, np.int64(0)
        if state >= trie_walk.TAIL:
            count = _put(trie_walk.tail_token(tables, state), count, width, vocabulary, at, size, to, into)
        elif state < tables.nodes:
            first, end = first_edge(tables, state), first_edge(tables, state + 1)
            whole = not tables.alive and not tables.dead_count and 0 < end - first <= width
            if whole and label(tables, end - 1) < vocabulary:  # two loops, which LLVM makes wide
                count = np.int64(end - first)
                for place in range(count):
                    store32(to, place, label(tables, first + place))
                for place in range(count):
                    put_logit(into, size, place, logit(at, size, label(tables, first + place)))
            else:
                for edge in range(first, end):
                    if is_alive(tables, edge):
                        count = _put(label(tables, edge), count, width, vocabulary, at, size, to, into)
        if is_terminal(tables, state):
            slot = _integer(head + 8 * _MASK_HEAD, _SLOTS, i // load64(head, _ROWS_EACH), 0)
            for stop in _stops(load64(head, _MARKS), load64(head, _COLUMNS), slot):
                count = _put(stop, count, width, vocabulary, at, size, to, into)
                if state == END and count > 0 and logit(into, size, count - 1) == forbidden:
                    put_logit(into, size, count - 1, 0)
        for place in range(count, width):
            store32(to, place, -1)
            put_logit(into, size, place, forbidden)


@compiled
def _put(token: int, count: int, width: int, vocabulary: int, at: int, size: int, to: int, into: int) -> Any:
    """Write a child and its logit, if there is room. Return how many there are now."""
    if not 0 <= token < vocabulary or count == width:
        return count
    store32(to, count, token)
    put_logit(into, size, count, logit(at, size, token))
    return count + 1
