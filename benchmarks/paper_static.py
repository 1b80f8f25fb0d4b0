"""STATIC's table 1 and figures 2 to 4 (arXiv 2602.22647): what constraining one decoding step of 140 rows takes.

python benchmarks/papers.py static --json docs/benchmarks/papers.json

Every method gets the same logits [rows, vocabulary] and rows at one level of random items, and leaves the logits of
illegal tokens at minus infinity. Milliseconds, medians over all levels. On a machine with a GPU the tensors are there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_peers import LENGTH, STOP, Static, Walks, in_order, uniform
from runner import GPU, Report, Row, in_turns, isolated
from torch import Tensor

import itemset
from itemset.masking.arena import Arena, room_for
from itemset.masking.batch import Batch
from itemset.masking.host import HostState, fill_bitmasks
from itemset.masking.slots import Slots

ROWS, TOP = 140, 50  # the paper's batch of 2 with beams of 70, and the logits that its approximate PPV looks at
STATIC_MOST, DICT_MOST = 2 * 10**7, 10**6  # items for which the peers' memory is there on 24 GiB
BITMAP_BITS = 30  # of the hash bitmap's places, as the authors' code has it, eight in a byte
TOP_NAME = f"PPV top {TOP}"
HOST = "ours, bitmask on the host"
THEIRS, CHILDREN, OWN_CHILDREN = "STATIC", "STATIC, children alone", "ours, children alone"
LARGE, CODES = 151_936, 2_048  # a language model's vocabulary, and the tokens of semantic IDs in it
WRITE = "one write of the logits"
RATIO, OF_CHILDREN, OF_BOTH = (f"{what}ours / STATIC" for what in ("", "children: ", "each level's faster form: "))
# What has a table of its own: both forms of both methods.
FORMS = ("ours", THEIRS, RATIO, OWN_CHILDREN, CHILDREN, OF_CHILDREN, OF_BOTH, WRITE)
DEVICE = "cuda" if GPU else "cpu"
Step = Callable[[Tensor], Any]


class PrefixVerification:
    """PPV (DISC's algorithm 2): binary search of each candidate among the sorted items, within the prefix's range."""

    def __init__(self, columns: Tensor) -> None:
        """columns: [length, N] int32, the items in order."""
        self.columns = columns

    def first(self, level: int, low: Tensor, high: Tensor, tokens: Tensor, rounds: int = 33) -> Tensor:
        """The first item of each range [low, high) whose token at `level` is not below the candidate."""
        column, most = self.columns[level], self.columns.shape[1] - 1
        for _ in range(rounds):
            middle = (low + high) >> 1
            below = (column[middle.clamp(max=most)] < tokens) & (low < high)
            low, high = torch.where(below, middle + 1, low), torch.where(below | (low >= high), high, middle)
        return low

    def ranges(self, tokens: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The items that begin as each row does: tokens [rows, length], of which `level` count."""
        low = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        high = torch.full_like(low, self.columns.shape[1])
        for depth in range(level):
            token = tokens[:, depth]
            low, high = self.first(depth, low, high, token), self.first(depth, low, high, token + 1)
        return low, high

    def step(self, level: int, low: Tensor, high: Tensor, rounds: int, candidates: int, logits: Tensor) -> None:
        """rounds: as many as the widest range asks for, which a fixed program would know for each level."""
        tokens = logits.topk(candidates, 1).indices if candidates < logits.shape[1] else self.all_tokens(logits)
        found = self.first(level, low[:, None].expand(tokens.shape), high[:, None].expand(tokens.shape), tokens, rounds)
        column = self.columns[level]
        valid = (found < high[:, None]) & (column[found.clamp(max=len(column) - 1)] == tokens)
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        logits.masked_fill_(forbidden.scatter_(1, tokens, ~valid), -torch.inf)

    @staticmethod
    def all_tokens(logits: Tensor) -> Tensor:
        return torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)


class HashBitmap:
    """A bit for the hash of each prefix. False positives are let through."""

    def __init__(self, items: Tensor) -> None:
        bits = torch.zeros(1 << BITMAP_BITS, dtype=torch.uint8, device=items.device)
        value = torch.zeros(len(items), dtype=torch.int64, device=items.device)
        for depth in range(items.shape[1]):
            value = self.mixed(value, items[:, depth].long())
            bits[self.place(value)] = 1
        bytes_of = bits.view(-1, 8)
        self.bytes = sum((bytes_of[:, i] << i for i in range(1, 8)), start=bytes_of[:, 0].clone())

    def holds(self, value: Tensor) -> Tensor:
        place = self.place(value)
        return (self.bytes[place >> 3] >> (place & 7).to(torch.uint8) & 1).bool()

    @staticmethod
    def mixed(value: Tensor, token: Tensor) -> Tensor:
        value = (value ^ (token + 1)) * -7046029254386353131
        return value ^ ((value >> 29) & 0x7FFFFFFFF)

    @staticmethod
    def place(value: Tensor) -> Tensor:
        return (value >> 20) & ((1 << BITMAP_BITS) - 1)

    def prefix(self, tokens: Tensor, level: int) -> Tensor:
        value = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        for depth in range(level):
            value = self.mixed(value, tokens[:, depth].long())
        return value

    def step(self, prefix: Tensor, logits: Tensor) -> None:
        tokens = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(~self.holds(self.mixed(prefix[:, None], tokens)), -torch.inf)


class DictTrie:
    """Nested dicts on the host: a mask is made of a node's keys, and copied where the logits are."""

    def __init__(self, items: np.ndarray[Any, Any]) -> None:
        self.root: dict[int, Any] = {}
        for item in items.tolist():
            node = self.root
            for token in item:
                node = node.setdefault(token, {})

    def step(self, prefixes: list[list[int]], logits: Tensor) -> None:
        allowed = torch.zeros(logits.shape, dtype=torch.bool)
        for row, prefix in enumerate(prefixes):
            node = self.root
            for token in prefix:
                node = node[token]
            allowed[row, list(node)] = True
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)


def steps_at(
    level: int, walks: Walks, peers: dict[str, Any], item_set: itemset.ItemSet, vocabulary: int
) -> dict[str, Step]:
    """One step of each method, of rows that have walked `level` tokens. Ours advances by the last token and masks."""
    tokens, ids = walks.tokens[level], torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    arena: Arena = peers["arena"]
    slots = Slots(arena, ROWS, max_rows=ROWS)
    marks = torch.full_like(slots.marks[:ROWS], -1)
    marks[:, 1] = STOP
    whole = torch.full((ROWS,), level, dtype=torch.int32, device=DEVICE)
    slots.assign(ids, torch.full_like(ids, peers["number"]), marks)
    batch = Batch(ids, tokens.int(), begin=torch.zeros_like(whole), end=whole)
    slots.walk(batch._replace(end=(whole - 1).clamp(min=0)))
    cells = slots.cells.clone()

    def ours(logits: Tensor) -> None:
        slots.cells.copy_(cells)
        slots.step(batch, logits)

    def own_children(logits: Tensor) -> tuple[Tensor, Tensor]:
        slots.cells.copy_(cells)
        return slots.children(batch, logits, width)

    width = max(1, item_set.level_plan.children(level, 1))  # as many columns as theirs has
    found: dict[str, Step] = {"ours": ours, OWN_CHILDREN: own_children}
    if "ppv" in peers:
        ppv: PrefixVerification = peers["ppv"]
        low, high = ppv.ranges(tokens, level)
        search = partial(ppv.step, level, low, high, int((high - low).max()).bit_length())
        found |= {"PPV exact": partial(search, vocabulary), TOP_NAME: partial(search, TOP)}
        found["hash bitmap"] = partial(peers["bitmap"].step, peers["bitmap"].prefix(tokens, level))
    if "STATIC" in peers:
        static: Static = peers["STATIC"]
        at: Any = static.on_the_way[level][level]
        if level < len(static.dense):
            at = walks.tokens[level, :, : level + 1].long().unbind(1)
        found[THEIRS] = partial(static.masked, level, at)
        found[CHILDREN] = partial(static.children, level, static.on_the_way[level][level])
    if "dict" in peers:
        found["dict trie"] = partial(peers["dict"].step, [row[:level] for row in tokens.tolist()])
    if not GPU:
        on_host = bitmask_step(item_set, tokens, level, vocabulary)
        found[HOST] = lambda _: on_host()
    return found


def bitmask_step(item_set: itemset.ItemSet, tokens: Tensor, level: int, vocabulary: int) -> Callable[[], Any]:
    """What fills the host path's bitmask of rows that have walked `level` of their tokens."""
    hosts = [HostState(item_set, [STOP]) for _ in range(ROWS)]
    for host, row in zip(hosts, tokens.tolist(), strict=True):
        assert host.accept(row[:level])
    bitmask = np.zeros((ROWS, -(-vocabulary // 32)), np.int32)
    return partial(fill_bitmasks, hosts, [host.state for host in hosts], list(range(ROWS)), bitmask)


def cell(count: int, vocabulary: int, repeats: int, codes: int = 0) -> Row:
    """One row of the tables: milliseconds of each method's step, and false positives of the bitmap. codes: how many of
    the tokens, the last ones, are in items; else all are, and all methods are there, not STATIC's alone."""
    torch.set_num_threads(1)
    items = uniform(count, codes or vocabulary) + np.uint32(vocabulary - codes if codes else 0)
    item_set = itemset.build(items)
    ordered = in_order(torch.from_numpy(items.astype(np.int32)).to(DEVICE), item_set.trie.tables.token_bits)
    walks = Walks.random(ordered, LENGTH, ROWS).in_step()
    arena = Arena(room_for(item_set), DEVICE)
    peers: dict[str, Any] = {"arena": arena, "number": arena.acquire(item_set)}
    if not codes:
        peers |= {"ppv": PrefixVerification(ordered.T.contiguous()), "bitmap": HashBitmap(ordered)}
    if count <= STATIC_MOST:
        peers["STATIC"] = Static(ordered, vocabulary, walks.positions)
    if count <= DICT_MOST and not codes:
        peers["dict"] = DictTrie(items)
    times: dict[str, list[float]] = {}
    wrong = lost = legal = 0
    draw = torch.Generator().manual_seed(0)
    for level in range(LENGTH):
        original = torch.randn(ROWS, vocabulary, generator=draw).to(DEVICE)
        logits, steps = original.clone(), steps_at(level, walks, peers, item_set, vocabulary)
        masks = {}
        for name, step in steps.items():
            logits.copy_(original)
            given = step(logits)
            if name in (CHILDREN, OWN_CHILDREN):
                tokens, found = given if name == OWN_CHILDREN else given[1::-1]
                spread = torch.full((ROWS, vocabulary + 1), -torch.inf, device=DEVICE)
                spread.scatter_(1, torch.where(tokens < 0, vocabulary, tokens).long(), found)
                given = spread[:, :vocabulary]
            masks[name] = (given if isinstance(given, Tensor) else logits).isneginf()
        for name in masks.keys() & {"PPV exact", THEIRS, CHILDREN, OWN_CHILDREN, "dict trie"}:
            assert torch.equal(masks[name], masks["ours"]), f"{name} masks other tokens at level {level}"
        legal += int((~masks["ours"]).sum())
        if "ppv" in peers:
            wrong += int((masks["ours"] & ~masks["hash bitmap"]).sum())
            lost += int((~masks["ours"] & masks[TOP_NAME]).sum())
        ways: dict[str, Any] = {name: partial(step, logits) for name, step in steps.items()}
        ways[WRITE] = partial(logits.fill_, 1.0)
        for name, took in in_turns(ways, repeats).items():
            times.setdefault(name, []).append(took)
    row: Row = {"items": count, "tokens": vocabulary} | ({"in items": codes} if codes else {})
    row |= {name: sum(took) / len(took) for name, took in times.items()}
    if THEIRS in times:
        best = {
            us: [min(pair) for pair in zip(times[us], times[alone], strict=True)]
            for us, alone in (("ours", OWN_CHILDREN), (THEIRS, CHILDREN))
        }
        row[RATIO] = row["ours"] / row[THEIRS]
        row[OF_CHILDREN] = row[OWN_CHILDREN] / row[CHILDREN]
        row[OF_BOTH] = sum(best["ours"]) / sum(best[THEIRS])
    for name in [name for name in ("ours", HOST) if name in times]:
        row[f"{name}: slowest level / cheapest"] = max(times[name]) / min(times[name])
    if "ppv" not in peers:
        return row
    illegal = LENGTH * ROWS * vocabulary - legal
    return row | {"bitmap lets through, %": 100 * wrong / illegal, f"{TOP_NAME} loses, %": 100 * lost / legal}


def branching(width: int, repeats: int) -> Row:
    """Figure 4: the step at nodes of `width` children, 10^6 items of a vocabulary as large: at the root, and at one of
    the third level's many nodes, which have no ready masks."""
    torch.set_num_threads(1)
    items = np.random.default_rng(0).integers(0, width, (10**6, LENGTH), dtype=np.uint32)
    items[:width, :2], items[:width, 2] = 0, np.arange(width)
    item_set = itemset.build(items)
    arena = Arena(room_for(item_set), DEVICE)
    number, ids = arena.acquire(item_set), torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    slots = Slots(arena, ROWS, max_rows=ROWS)
    marks = torch.full_like(slots.marks[:ROWS], -1)
    slots.assign(ids, torch.full_like(ids, number), marks)
    none = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
    deep = Batch(ids, torch.zeros(ROWS, LENGTH, dtype=torch.int32, device=DEVICE), begin=none, end=none + 2)
    slots.walk(deep)
    cells, logits = slots.cells.clone(), torch.randn(ROWS, width, device=DEVICE)
    slots.assign(ids, torch.full_like(ids, number), marks)
    ways: dict[str, Any] = {"ours, at the root": partial(slots.step, deep._replace(end=none), logits)}
    times = in_turns(ways, repeats)
    slots.cells.copy_(cells)
    ordered = in_order(torch.from_numpy(items.astype(np.int32)).to(DEVICE), item_set.trie.tables.token_bits)
    static = Static(ordered, width, torch.zeros(1, ROWS, dtype=torch.int64, device=DEVICE))
    at = static.on_the_way[2][0]
    ways = {"ours": partial(slots.step, deep, logits), OWN_CHILDREN: partial(slots.children, deep, logits, width)}
    ways |= {THEIRS: partial(static.masked, 2, at, logits), CHILDREN: partial(static.children, 2, at, logits)}
    times |= in_turns(ways | {WRITE: partial(logits.fill_, 1.0)}, repeats)
    return {"children": width} | times


def host_levels(count: int, vocabulary: int, repeats: int) -> Row:
    """Microseconds of the host path's bitmask of rows at each level."""
    torch.set_num_threads(1)
    items = uniform(count, vocabulary)
    item_set = itemset.build(items)
    ordered = in_order(torch.from_numpy(items.astype(np.int32)), item_set.trie.tables.token_bits)
    tokens = Walks.random(ordered, LENGTH, ROWS).in_step().tokens
    ways = {f"level {level}": bitmask_step(item_set, tokens[level], level, vocabulary) for level in range(LENGTH)}
    times = {name: 1e3 * ms for name, ms in in_turns(ways, repeats).items()}
    ratio = max(times.values()) / min(times.values())
    return {"items": count, "tokens": vocabulary} | times | {"slowest / cheapest": ratio}


def main(arguments: argparse.Namespace, report: Report) -> None:
    few = arguments.quick
    sets = ((10**4, 256),) if few else ((10**6, 2_048), (10**7, 2_048), (10**6, 32_768), (10**7, 32_768))
    report.add("static host levels", [isolated(host_levels, *one, 3 if few else 60) for one in sets])
    sizes = (10**4,) if few else (10**5, 10**6, 10**7, 2 * 10**7)
    rows = [isolated(cell, count, 2_048, 3 if few else 15) for count in sizes]
    vocabularies = (256,) if few else (256, 1_024, 4_096, 32_768)
    by_tokens = [isolated(cell, 10**4 if few else 10**7, v, 3 if few or v > 4_096 else 5) for v in vocabularies]
    large, codes, count = (1_024, 64, 10**4) if few else (LARGE, CODES, 10**6)
    by_codes = [isolated(cell, count, large, 3 if few else 7, codes) for codes in (codes, large)]
    apart = set(FORMS) - {"ours", THEIRS}
    for name, table in (("static items", rows), ("static tokens", by_tokens)):
        kept = [{key: value for key, value in row.items() if key not in apart} for row in table]
        report.add(name, kept, x="items", y="ours", by="tokens")
    about = ("items", "tokens", "in items")
    forms = [{"in items": row["tokens"], **row} for row in (*rows, *by_tokens, *by_codes)]
    report.add("static forms", [{key: row[key] for key in (*about, *FORMS)} for row in forms])
    widths = (8,) if few else (2, 16, 128, 1_024, 8_192, 65_536, 1 << 18)
    report.add("static branching", [isolated(branching, width, 3 if few or width > 8_192 else 15) for width in widths])
