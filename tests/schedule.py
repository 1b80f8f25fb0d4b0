"""An engine's life without a model: requests come and go at random, and each row of every step is held against a dict
trie.

Requests are admitted, scheduled or not, given drafts (chains or trees) of which some are accepted, preempted, resumed
in another slot with part of their output known, aborted and their slots recycled; some are free until a certain token;
sets are added, shared and forgotten in an arena that is too small for all of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import Node, dict_trie
from views import made

from itemset.masking import Kernels
from itemset.masking.arena import Arena, ArenaFullError, room_for
from itemset.masking.batch import CHAIN, LOCAL, TREE, Batch
from itemset.masking.slots import NO_SET, Slots
from itemset.trie.walk import DEAD, END, FREE, WAITING

VOCABULARY, PADDED = 48, 53  # tokens that items use, and columns of the logits
SLOTS, MOST_ROWS, STOPS, WIDTH = 6, 28, 3, 40
PROMPT = 3


@dataclass
class Request:
    """items: the oracle's set, None for a request without. number: the arena's. start: the token behind which the
    constraint begins, or -1. in_view: whether its set is a view, whose tables may go on after its last item."""

    items: Node | None
    number: int
    stops: list[int]
    start: int
    in_view: bool = False
    output: list[int] = field(default_factory=list)

    def node(self, drafts: list[int]) -> Node | str | None:
        """Where committed tokens and drafts lead: a node, "END", "DEAD", or None where nothing constrains the row."""
        if self.items is None:
            return None
        output = self.output + drafts
        begin = 0
        if self.start >= 0:
            if self.start not in output:
                return None
            begin = output.index(self.start) + 1
        committed = self.walk(self.items, self.output[begin:])
        return self.walk("END" if committed == "DEAD" else committed, output[max(begin, len(self.output)) :])

    def walk(self, node: Node | str, tokens: list[int]) -> Node | str:
        for token in tokens:
            if isinstance(node, dict) and token in node:
                node = node[token] if set(node[token]) != {None} else "END"
            elif token in self.stops and (node == "END" or (isinstance(node, dict) and None in node)):
                node = "END"
            else:
                return "DEAD"
        return node

    def allowed(self, drafts: list[int]) -> set[int] | None:
        """The tokens that may follow; None where the row must be left as it is."""
        node = self.node(drafts)
        if node is None or node == "DEAD":
            return None
        if node == "END":
            return set(self.stops)
        assert isinstance(node, dict)
        return {token for token in node if token is not None} | (set(self.stops) if None in node else set())


class Schedule:
    """Runs steps on `Slots` with these kernels and checks every one; raises AssertionError where a row is wrong."""

    def __init__(
        self,
        seed: int,
        *,
        kernels: Kernels,
        device: str,
        window: bool = False,
        each: bool = False,
        positions: bool = False,
    ) -> None:
        """window: give the kernels the newest tokens only, a row of them a logits row, as an engine without a history
        on the device would. each: in most steps all requests have as many rows, and slots and windows have one row a
        request. positions: most chains tell one token of each request, and the history does not hold it.
        """
        self.random = random.Random(seed)
        self.device, self.window, self.each, self.positions = device, window, each, positions
        self.pool = [self._items() for _ in range(12)]
        self.sets = [made(items) for items in self.pool]
        room = sorted(room_for(s) for s in self.sets)
        self.arena = Arena(sum(room[-4:]) + 4096, device, max_sets=6, kernels=kernels)
        self.slots = Slots(self.arena, SLOTS, max_rows=MOST_ROWS, max_stop_tokens=STOPS)
        self.running: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.history = torch.full((SLOTS, WIDTH), -7, dtype=torch.int32, device=device)
        self.begin = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.end = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.refused = self.checked = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.admit()
            self.step()
            self.leave()

    def admit(self) -> None:
        fresh = [slot for slot in range(SLOTS) if slot not in self.running]
        self.random.shuffle(fresh)
        entering: dict[int, Request] = {}
        while fresh and self.random.random() < 0.7:
            request = self.waiting.pop() if self.waiting and self.random.random() < 0.5 else self._request()
            if request is None:
                break
            entering[fresh.pop()] = request
        if not entering:
            return
        marks = [[r.start, *r.stops, *[-1] * (STOPS - len(r.stops))] for r in entering.values()]
        numbers = [request.number for request in entering.values()]
        self.slots.assign(self._tensor(list(entering)), self._tensor(numbers), self._tensor(marks))
        for slot, request in entering.items():
            self.running[slot] = request
            self.history[slot] = self.random.randrange(VOCABULARY)
            self.begin[slot] = PROMPT
            self._commit(slot, [], request)

    def step(self) -> None:
        scheduled = [slot for slot in self.running if self.random.random() < 0.8]
        self.random.shuffle(scheduled)
        tree = self.random.random() < 0.4
        rows: list[tuple[int, list[int]]] = []  # slot and drafts that lead to the row
        above, tokens = [], []
        each = self.random.choice([None, 1, 2, 3, 4]) if self.each else None
        for slot in scheduled:
            first = len(rows)
            rows.append((slot, []))
            above.append(-1 if tree else 0)
            tokens.append(self.random.randrange(VOCABULARY))  # the last committed token, in engines: not read
            for depth in range(self.random.choice([0, 0, 1, 2, 3]) if each is None else each - 1):
                parent = self.random.randrange(first, len(rows)) if tree else len(rows) - 1
                token = self._draft(self.running[slot], rows[parent][1])
                rows.append((slot, [*rows[parent][1], token]))
                above.append(parent if tree else depth + 1)
                tokens.append(token)
        padding = self.random.randrange(2)
        slots = self._tensor([slot for slot, _ in rows][::each] + [-1] * padding)
        if not len(slots):
            return
        padded = padding * (each or 1)
        batch = Batch(
            slots,
            *self._committed(rows[::each], padding),
            above=self._tensor(above + [0] * padded) if tree or each is None else None,
            tokens=self._tensor(tokens + [0] * padded),
            layout=TREE if tree else CHAIN,
            rows_each=each,
        )
        if self.positions and not tree and self.random.random() < 0.7:
            batch = self._tell(batch, above)
        dtype = self.random.choice([torch.float32, torch.float16, torch.bfloat16])
        logits = torch.randn(batch.rows, PADDED + 3, device=self.device).to(dtype)[:, :PADDED]
        before = logits.clone()
        self.slots.step(batch, logits)
        self.check(rows, before.cpu(), logits.cpu())
        self.verify(rows, above, tree)

    def check(self, rows: list[tuple[int, list[int]]], before: torch.Tensor, after: torch.Tensor) -> None:
        states = (self.slots.row_states[: len(before)] & LOCAL).tolist()
        for i in range(len(before)):
            slot, drafts = rows[i] if i < len(rows) else (-1, [])
            allowed = self.running[slot].allowed(drafts) if slot >= 0 else None
            if allowed is None:
                expected = before[i]
                assert states[i] in (FREE, DEAD, WAITING)
                dead = slot >= 0 and self.running[slot].node(drafts) == "DEAD"
                assert (states[i] == DEAD) == dead
            else:
                expected = torch.full_like(before[i], -torch.inf)
                kept = sorted(allowed)
                expected[kept] = before[i][kept]
                ended = self.running[slot].node(drafts) == "END"
                assert (states[i] == END) == ended or (ended and self.running[slot].in_view)
            assert torch.equal(after[i], expected), (slot, drafts, allowed)
            self.checked += 1

    def verify(self, rows: list[tuple[int, list[int]]], above: list[int], tree: bool) -> None:
        """Accept some legal drafts of each request and one token more."""
        for slot in {slot for slot, _ in rows}:
            request = self.running[slot]
            legal = [drafts for other, drafts in rows if other == slot and request.node(drafts) != "DEAD"]
            accepted = self.random.choice(legal)
            allowed = request.allowed(accepted)
            if allowed is None or self.random.random() < 0.005:
                allowed = set(range(VOCABULARY))  # free, or something broke: a token from outside the set
            # A stop token is as likely as all others together, so that most items end.
            stop = [token for token in allowed if token in request.stops]
            token = self.random.choice(stop if stop and self.random.random() < 0.5 else sorted(allowed))
            if request.node(accepted) is None and request.items is not None and self.random.random() < 0.3:
                token = request.start
            self._commit(slot, [*accepted, token], request)

    def leave(self) -> None:
        """Preempt, abort and finish."""
        for slot, request in list(self.running.items()):
            ended = bool(request.output) and request.output[-1] in request.stops and self.random.random() < 0.7
            full = PROMPT + len(request.output) > WIDTH - 6
            chance = self.random.random()
            if ended or full or chance < 0.1:
                del self.running[slot]
                if chance < 0.05 and not ended and not full:
                    self.waiting.append(request)  # preempted: it keeps its set
                elif request.number != NO_SET:
                    self.arena.release(request.number)

    def _request(self) -> Request | None:
        stops = self.random.sample(range(VOCABULARY), self.random.randrange(1, STOPS + 1))
        start = self.random.choice([-1, -1, self.random.randrange(VOCABULARY)])
        if self.random.random() < 0.2:
            return Request(None, NO_SET, stops, start)
        which = self.random.randrange(len(self.sets))
        try:
            number = self.arena.acquire(self.sets[which])
        except ArenaFullError:
            self.refused += 1
            return None
        return Request(dict_trie(self.pool[which]), number, stops, start, self.sets[which].base is not None)

    def _draft(self, request: Request, drafts: list[int]) -> int:
        allowed = request.allowed(drafts)
        if request.node(drafts) is None and self.random.random() < 0.3:
            return request.start
        if allowed and self.random.random() < 0.8:
            return self.random.choice(sorted(allowed))
        return self.random.randrange(-1, VOCABULARY)

    def _commit(self, slot: int, tokens: list[int], request: Request) -> None:
        request.output += tokens
        end = PROMPT + len(request.output)
        self.history[slot, PROMPT:end] = self._tensor(request.output)
        self.end[slot] = end

    def _committed(self, rows: list[tuple[int, list[int]]], padding: int) -> tuple[Any, ...]:
        if not self.window:
            return self.history, self.begin, self.end
        windows, begins = [], []
        for slot, _ in rows:
            request = self.running[slot]
            windows.append(([0] * WIDTH + request.output)[-WIDTH:])
            begins.append(WIDTH - len(request.output))
        ends = [WIDTH] * len(rows)
        rest = ([[0] * WIDTH] * padding, [0] * padding, [0] * padding)
        return (*(self._tensor(part + more) for part, more in zip((windows, begins, ends), rest, strict=True)), False)

    def _tell(self, batch: Batch, above: list[int]) -> Batch:
        """Move one token of each request, most often the newest, from the history to its first row's `tokens`."""
        assert batch.tokens is not None
        history = batch.history.clone()
        positions = [self.random.randrange(-1, WIDTH + 2) for _ in range(batch.rows)]
        for row in [row for row, depth in enumerate(above) if depth == 0]:
            place = row // (batch.rows_each or 1)
            place = int(batch.slots[place]) if batch.by_slot else place
            end = int(batch.end[place])
            positions[row] = self.random.choice([end - 1, end - 1, end - 2, end, -1])
            if 0 <= positions[row] < end:
                batch.tokens[row] = history[place, positions[row]]
                history[place, positions[row]] = VOCABULARY - 1
        return batch._replace(history=history, positions=self._tensor(positions))

    def _items(self) -> list[list[int]]:
        draw = self.random
        count, longest, tokens = draw.choice([1, 5, 30, 120]), draw.randrange(1, 9), draw.choice([2, 5, VOCABULARY])
        items = [[draw.randrange(tokens) for _ in range(draw.randrange(1, longest + 1))] for _ in range(count)]
        if draw.random() < 0.3:
            items += [[token, VOCABULARY - 1] for token in range(VOCABULARY)]
        return items

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
