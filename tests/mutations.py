"""Damaged index files: valid ones of several shapes, ways to damage them, and what may come of reading the result.

Run as a script it tries a range of them in this process, which a crash, a hang or too much memory ends; `run` starts
such a process and says how it went. A mutation is named by its seed and number, and can be tried again by them.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa

import itemset
from itemset import ItemSet, ItemSetError
from itemset.cli.options import facts
from itemset.masking.host import HostState
from itemset.select.filters import passing
from itemset.trie import attributes as attribute_columns

PATIENCE = 10  # seconds that one mutation may take
ROOM = 128 << 20  # bytes of address space that all of them may take, beyond what reading the valid files takes
EXTREMES = [0, 1, 2, -1, 31, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**64, 10**30]
SHAPES = ("one", "ragged", "fixed", "wide", "long", "shared", "described")
STRANGERS: list[Any] = [None, "x", 1.5, [], [1], {}, True]  # no integers


def shapes() -> dict[str, ItemSet]:
    """Valid sets: each layout of the tables, both kinds of keys, and what a header may say."""
    draw = np.random.default_rng(1)
    ragged = [draw.integers(0, 6, draw.integers(1, 9)).tolist() for _ in range(120)]
    names = [f"item {i} é" for i in range(120)]
    long = [[1, *draw.integers(0, 50, 1_500).tolist()], [2, 3], [2, *draw.integers(0, 50, 1_100).tolist()], [9]]
    sets = (
        itemset.build([[300, 301, 302, 303, 304]]),
        itemset.build(ragged, keys=names, vocab_size=70, prefix=" "),
        itemset.build(draw.integers(0, 40, (300, 4)), keys=draw.integers(-(2**62), 2**62, 300)),
        itemset.build([*draw.integers(70_000, 200_000, (60, 3)).tolist(), [5], [2**31 - 2, 7]]),
        itemset.build(long, keys=["a", "", "b", "c"]),
        itemset.build(draw.integers(0, 4, (90, 3)), keys=[f"k{i}" for i in range(90)]),
        described(draw.integers(0, 9, (60, 3))),
    )
    return dict(zip(SHAPES, sets, strict=True))


def described(items: np.ndarray) -> ItemSet:
    """A set whose attributes are stored in every way."""
    rows = range(len(items))
    columns = {
        "n": [None, *rows[1:]],
        "ok": [i % 3 == 0 for i in rows],
        "region": [[None, "DE", "AT"][i % 3] for i in rows],
        "name": [f"name {i} é" for i in rows],
        "tags": [["a", "b"][: i % 3] for i in rows],
        "day": pa.array(rows, pa.date32()),
    }
    with mock.patch.object(attribute_columns, "MAX_DICTIONARY", 4):
        return itemset.build(items, attributes=columns)


ASKED: list[dict[str, Any]] = [
    {"n": {"$gt": 5}},
    {"ok": True},
    {"region": {"$in": ["DE", "x"]}},
    {"name": {"$lt": "name 3"}},
    {"tags": {"$ne": "a"}},
    {"day": {"$gte": "1970-02-01"}},
]


class File:
    """An index file taken apart: its header as JSON and everything behind it."""

    def __init__(self, data: bytes) -> None:
        size = struct.unpack_from("<I", data, 12)[0]
        self.header: dict[str, Any] = json.loads(data[32 : 32 + size])
        self.payload = bytearray(data[32 + size :])

    def section(self, name: str) -> dict[str, Any]:
        return next(section for section in self.header["sections"] if section["name"] == name)

    def array(self, section: dict[str, Any]) -> np.ndarray:
        """The section's values, writable in place."""
        return np.frombuffer(self.payload, section["dtype"], section["count"], section["offset"])

    def seal(self) -> bytes:
        """The file with a header that is as long as it must be, and with the header's checksum."""
        body = msgspec.json.encode(self.header)
        body = body.ljust(-(-(len(body) + 32) // 64) * 64 - 32)
        prelude = struct.pack("<8sIIQ", b"ITEMSET\n", 1, len(body), 32 + len(body) + len(self.payload))
        return prelude + struct.pack("<II", zlib.crc32(body, zlib.crc32(prelude)), 0) + body + self.payload


# Damage that no checksum was told of.


def flip_bits(data: bytearray, rng: random.Random) -> None:
    header = 32 + struct.unpack_from("<I", data, 12)[0]
    low, high = rng.choice([(0, 32), (32, header), (header, len(data)), (0, len(data))])
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(low, high)] ^= 1 << rng.randrange(8)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.choice([rng.randrange(len(data)), len(data) - 1, rng.randrange(64)]) :]


def append(data: bytearray, rng: random.Random) -> None:
    data += rng.choice([b"\0", rng.randbytes(64), bytes(data)])


def overwrite(data: bytearray, rng: random.Random) -> None:
    """A run of zeros, or of bytes from elsewhere in the file: a page that was not written, or written twice."""
    size = rng.choice([4, 64, 512])
    at, source = (rng.randrange(max(1, len(data) - size)) for _ in range(2))
    data[at : at + size] = rng.choice([bytes(size), data[source : source + size]])[: len(data) - at]


# Lies: the checksums agree with them.


def lie_in_the_header(file: File, rng: random.Random) -> None:
    field = rng.choice([name for name in file.header if name != "sections"])
    value = file.header[field]
    if isinstance(value, list):
        levels = list(value)
        rng.choice([_change_level, _move_between_levels, _add_level, _drop_level])(levels, rng)
        file.header[field] = levels
    else:
        file.header[field] = _lie(value, rng)


def _change_level(levels: list[int], rng: random.Random) -> None:
    i = rng.randrange(len(levels))
    levels[i] = _lie(levels[i], rng)


def _move_between_levels(levels: list[int], rng: random.Random) -> None:
    a, b = rng.randrange(len(levels)), rng.randrange(len(levels))
    by = rng.choice([1, levels[a], levels[a] + 1, 2**40, 2**64])
    levels[a] -= by
    levels[b] += by


def _add_level(levels: list[int], rng: random.Random) -> None:
    levels.insert(rng.randrange(len(levels) + 1), rng.choice([0, 1, -1, 2**33]))


def _drop_level(levels: list[int], rng: random.Random) -> None:
    del levels[rng.randrange(len(levels))]


def lie_in_a_section(file: File, rng: random.Random) -> None:
    section = rng.choice(file.header["sections"])
    field = rng.choice(list(section))
    if field == "dtype":
        section["dtype"] = rng.choice(["uint8", "uint16", "uint32", "int64", "float64", "object", "uint64", ""])
        if rng.random() < 0.7:  # as many bytes as before
            sizes = {"uint8": 1, "uint16": 2, "uint32": 4}
            section["count"] = section["count"] * sizes.get(section["dtype"], 8) // sizes.get(section["dtype"], 8)
    elif field == "name":
        section["name"] = rng.choice([*(other["name"] for other in file.header["sections"]), "keys", "key_text", ""])
    else:
        section[field] = _lie(section[field], rng)


def swap_sections(file: File, rng: random.Random) -> None:
    """Two sections change places in the header, wholly or in part."""
    a, b = rng.choice(file.header["sections"]), rng.choice(file.header["sections"])
    place = ["offset", "count", "crc32"]
    for field in rng.choice([place, place[:1], place[::2], ["count"], ["dtype"], ["name"]]):
        a[field], b[field] = b[field], a[field]


def drop_a_section(file: File, rng: random.Random) -> None:
    file.header["sections"].remove(rng.choice(file.header["sections"]))


def lie_in_an_array(file: File, rng: random.Random) -> None:
    section = rng.choice(file.header["sections"])
    with _resummed(file, section) as array:
        if not len(array):
            return
        info = np.iinfo(array.dtype)
        values = [info.min, info.max, 0, 1, info.max // 2, info.max // 2 + 1, min(info.max, len(array)), 31, 32]
        low = rng.randrange(len(array))
        high = min(len(array), low + rng.choice([1, 1, 2, 32, 10**9]))
        part = array[low:high]
        draw = np.random.default_rng(rng.getrandbits(32))
        how = rng.randrange(7)
        if how == 0:
            part[:] = rng.choice(values)
        elif how == 1:
            part[:] = draw.integers(info.min, info.max, len(part), array.dtype, endpoint=True)
        elif how == 2:
            part[:] = draw.integers(0, len(array) + 1, len(part)).astype(array.dtype)
        elif how == 3:
            draw.shuffle(part)
        elif how == 4:
            part[:] = part[::-1].copy()
        elif how == 5:
            part += np.array(rng.choice([1, 255, 2]), array.dtype)
        else:
            part -= np.array(rng.choice([1, 255, 2]), array.dtype)


def lose_the_last_bits(file: File, rng: random.Random) -> None:
    """Tails of which some or all never end."""
    width = file.header["token_bits"] + 1
    with _resummed(file, file.section("tails")) as words:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        lasts = np.arange(width - 1, file.header["tail_tokens"] * width, width)
        bits[lasts[:: rng.choice([1, 1, 2, 5])]] = 0
        words[:] = np.packbits(bits, bitorder="little").view(np.uint32)


def lie_about_the_end_of_items(file: File, rng: random.Random) -> None:
    """Other terminals, and an item count that agrees with them."""
    with _resummed(file, file.section("terminal")) as words:
        for _ in range(rng.choice([1, 3, 40])):
            words[rng.randrange(len(words))] ^= np.uint32(1 << rng.randrange(32))
        ends = int(np.unpackbits(words.view(np.uint8)).sum())
    items = sum(file.header["level_edges"]) - sum(file.header["level_nodes"]) + 1 + ends
    file.header["items"] = items if rng.random() < 0.9 else items + rng.choice([-1, 1])


def lie_about_token_bits(file: File, rng: random.Random) -> None:
    """Another width of the tails' tokens, and as many of them as fit."""
    bits = rng.randrange(1, 32)
    file.header["token_bits"] = bits
    file.header["tail_tokens"] = max(0, (file.section("tails")["count"] - 1) * 32 // (bits + 1))


def wrap_the_key_offsets(file: File, rng: random.Random) -> None:
    """Offsets whose differences are positive only because they wrap around; integer keys that are shuffled."""
    names = [section["name"] for section in file.header["sections"]]
    with _resummed(file, file.section("key_offsets" if "key_offsets" in names else "keys")) as array:
        if len(array) > 5:
            array[1:6] = [2**62, 2**63 - 1, -(2**63), -(2**62), 0]


class _resummed:  # noqa: N801
    """The section's array, writable; the section's checksum follows it."""

    def __init__(self, file: File, section: dict[str, Any]) -> None:
        self.file, self.section = file, section

    def __enter__(self) -> np.ndarray:
        self.array = self.file.array(self.section)
        return self.array

    def __exit__(self, *_: object) -> None:
        self.section["crc32"] = zlib.crc32(self.array.tobytes())


def _lie(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.1 or not isinstance(value, int):
        return rng.choice(STRANGERS)
    return rng.choice([value + 1, value - 1, value * 2, value // 2, -value, *EXTREMES])


DAMAGE: list[Callable[[bytearray, random.Random], None]] = [flip_bits, truncate, append, overwrite]
LIES: list[Callable[[File, random.Random], None]] = [  # in an order in which they can be told together
    lie_in_an_array,
    lose_the_last_bits,
    lie_about_the_end_of_items,
    wrap_the_key_offsets,
    lie_about_token_bits,
    lie_in_the_header,
    swap_sections,
    lie_in_a_section,
    drop_a_section,
]
WEIGHTS = [6, 2, 1, 1, 1, 4, 2, 4, 1]


@dataclass(frozen=True)
class Mutant:
    kind: str
    data: bytes
    honest: bool  # no checksum was recomputed: what is read with checks must be what was written


def mutate(data: bytes, rng: random.Random) -> Mutant:
    """One way to damage the file, or two or three that lie together."""
    if rng.random() < 0.35:
        damage = rng.choice(DAMAGE)
        damaged = bytearray(data)
        damage(damaged, rng)
        return Mutant(damage.__name__, bytes(damaged), True)
    file = File(data)
    lies = sorted(rng.choices(range(len(LIES)), WEIGHTS, k=rng.choice([1, 1, 1, 2, 2, 3])))
    for i in dict.fromkeys(lies):
        LIES[i](file, rng)
    sealed = bytearray(file.seal())
    if rng.random() < 0.03:
        flip_bits(sealed, rng)
    return Mutant(LIES[lies[0]].__name__ if len({*lies}) == 1 else "several lies", bytes(sealed), False)


@dataclass(frozen=True)
class Original:
    """A valid file and all that it says."""

    data: bytes
    keys: Sequence[int] | Sequence[str]
    items: list[list[int]]
    """Of each key."""
    attributes: pa.Table

    @staticmethod
    def of(s: ItemSet) -> Original:
        keys = s.keys.to_pylist()
        return Original(s.to_bytes(), keys, s.tokens(keys), s.attributes)

    def is_read_from(self, s: ItemSet) -> bool:
        known = (File(self.data).header[name] for name in ("items", "longest", "vocab_size", "prefix", "digest"))
        header = (len(s), s.longest, s.vocab_size, s.prefix, s.digest)
        if header != tuple(known) or s.tokens(self.keys) != self.items or not s.attributes.equals(self.attributes):
            return False
        keys: dict[tuple[int, ...], list[int | str]] = {}
        for item, key in zip(self.items, self.keys, strict=True):
            keys.setdefault(tuple(item), []).append(key)
        wanted = [keys[tuple(item)] for item in self.items]
        return s.keys_of(self.items) == wanted and list(s.lookup(self.items)) == [own[0] for own in wanted]


def examine(path: Path, mutant: Mutant, original: Original, rng: random.Random) -> str:
    """Open the file with and without checks, use what opens in every way. Returns the outcome, with checks first.

    Raises whatever is no ItemSetError, and AssertionError where a refusal does not name the file or the set reads
    otherwise than it was written although no checksum was recomputed.
    """
    path.write_bytes(mutant.data)
    outcomes = []
    for check in (True, False):
        try:
            s = itemset.load(path, check=check)
        except ItemSetError as error:
            if path.name not in str(error):
                raise AssertionError("the refusal does not name the file") from error
            outcomes.append("refused")
            continue
        if check and mutant.honest:
            assert original.is_read_from(s), "the set reads otherwise than it was written"
        unchanged = use(s, path, original, rng)
        outcomes.append("reads as before" if unchanged else "answers")
    return f"{outcomes[0]}, unchecked {outcomes[1]}"


def use(s: ItemSet, path: Path, original: Original, rng: random.Random) -> bool:
    """Every way to read the set. Returns whether it reads as the original does."""
    stops = [1, 2**31 - 2]
    questions: list[Callable[[], object]] = [
        lambda: (repr(s), s.sections, s.digest),
        lambda: (s.token_ids, s.occurring([0, 1, 2**31 - 2])),
        lambda: [s.children(item[: rng.randrange(len(item))]) for item in rng.sample(original.items, 1)],
        lambda: s.lookup(original.items[:50]),
        lambda: s.keys_of(original.items[:50]),
        *(lambda item=item: s.lookup([item]) for item in rng.choices(original.items, k=3)),  # type: ignore[misc]
        lambda: s.lookup([[rng.choice([rng.randrange(60), rng.randrange(2**31 - 1)]) for _ in range(3)]]),
        lambda: s.tokens(original.keys[:50]),
        *(lambda key=key: s.tokens([key]) for key in rng.choices(original.keys, k=3)),  # type: ignore[misc]
        lambda: s.attributes.equals(original.attributes),
        *(lambda query=query: passing(query, s.attributes) for query in ASKED),  # type: ignore[misc]
        lambda: itemset.verify(path),
        lambda: facts(s),
        lambda: walk_by_children(s, rng),
        lambda: walk_by_bitmask(HostState(s, stops), rng),
        lambda: s.to_bytes(),
        lambda: original.is_read_from(s),
    ]
    unchanged = False
    for question in questions:
        try:
            unchanged = question() is True
        except ItemSetError:
            unchanged = False
    return unchanged


def walk_by_children(s: ItemSet, rng: random.Random) -> None:
    tokens: list[int] = []
    for _ in range(12):
        labels, _ = s.children(tokens)
        if not len(labels):
            return
        tokens.append(int(rng.choice(labels)) if rng.random() < 0.95 else rng.randrange(-1, 2**31))


def walk_by_bitmask(state: HostState, rng: random.Random) -> None:
    row = np.zeros(rng.choice([3, 10, 70]), np.int32)
    for _ in range(40):
        state.fill_bitmask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed)) if len(allowed) and rng.random() < 0.95 else rng.randrange(-1, 2**31)
        if not state.accept([token]) and not len(allowed):
            return


def attempts(seed: int, first: int, count: int, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Try mutations first .. first + count of `seed`, limited in time and memory; yields (kind, outcome) of each, a
    dictionary as the outcome of one that failed."""
    originals = {name: Original.of(s) for name, s in shapes().items() if name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.itemset"
        for original in originals.values():  # compile everything before the memory is limited
            examine(path, Mutant("none", original.data, True), original, random.Random(0))
        limit = _address_space() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in range(first, first + count):
            rng = random.Random(f"{seed}/{number}")
            name = rng.choice(list(originals))
            mutant = mutate(originals[name].data, rng)
            os.write(2, f"{number} {name} {mutant.kind}\n".encode())
            signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)  # its signal ends the process, also inside compiled code
            try:
                yield mutant.kind, examine(path, mutant, originals[name], rng)
            except Exception:
                yield mutant.kind, {"number": number, "shape": name, "traceback": traceback.format_exc()}
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@dataclass(frozen=True)
class Tally:
    """How a range of mutations went: how often each (kind, outcome), what failed, and which one ended the process."""

    outcomes: Counter[tuple[str, str]]
    failures: list[str]
    stopped_at: int | None


def run(seed: int, first: int, count: int, names: Sequence[str] = SHAPES, *, cache: Path | None = None) -> Tally:
    """Try mutations in a process of its own; one that ends the process is a failure.

    cache: where to keep code that checks every index, which then runs instead of the usual code.
    """
    environment = os.environ | ({"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(cache)} if cache else {})
    environment["PYTHONPATH"] = str(Path(itemset.__file__).parents[1])
    command = [sys.executable, __file__, str(seed), str(first), str(count), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    outcomes: Counter[tuple[str, str]] = Counter()
    failures, stopped_at = [], None
    for line in done.stdout.splitlines():
        kind, outcome = json.loads(line)
        if isinstance(outcome, dict):
            failures.append(f"{outcome['number']} ({outcome['shape']}, {kind}):\n{outcome['traceback']}")
        else:
            outcomes[kind, outcome] += 1
    if done.returncode:
        failures.append(f"the process ended with {done.returncode}:\n{done.stderr[-1_000:]}")
        stopped_at = first + len(done.stdout.splitlines())
    return Tally(outcomes, failures, stopped_at)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind_and_outcome in attempts(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]):
        print(json.dumps(kind_and_outcome), flush=True)
