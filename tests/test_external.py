"""Building on disk: the same bytes as in memory from every kind of file, honest errors, and nothing left behind."""

from __future__ import annotations

import io
import mmap
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kills import end_builds
from strategies import item_sets
from test_sources import write_table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import itemset
from itemset import ItemSetError, build_external, cli, published
from itemset.building import external, progress, readers, sources
from itemset.building.external import available_memory
from itemset.building.key_rows import changes, refuse_repeated
from itemset.building.progress import build_bar
from itemset.building.scratch import Zeros, scratch_folder
from itemset.cli import options
from itemset.trie import attributes

VOCAB = 70
KILLS = int(os.environ.get("ITEMSET_KILLS", "20"))
TEXTS = ["toy story", "toy", "golden eye", "four rooms", "toy story", "story", "eye", "golden", "four four", "rooms"]


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows in a batch, so that a small file has many, and equal items stand in several."""
    monkeypatch.setattr(external, "_BATCH_TOKENS", 5)
    monkeypatch.setattr(external, "_BATCH_KEYS", 3)
    monkeypatch.setattr(readers, "ROWS", 3)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 128)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 128)
    monkeypatch.setattr(sources, "_NPY_BATCH_BYTES", 64)
    monkeypatch.setattr(attributes, "BATCH_ROWS", 11)
    monkeypatch.setattr(attributes, "MAX_DICTIONARY", 9)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", *sorted({word for text in TEXTS for word in text.split()})]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def in_memory(path: Path, tokenizer: Any = None, **options: Any) -> bytes:
    """The index of `sources.read` and a build in memory."""
    names = {name: options.pop(name) for name in ("column", "key", "attributes") if name in options}
    source = sources.read(path, **names)
    options |= {"keys": source.keys, "attributes": source.attributes, "tokenizer": tokenizer}
    if source.texts is not None:
        return itemset.build_text(source.texts, **options).to_bytes()
    return itemset.build(source.tokens, **options).to_bytes()


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ItemSetError) as error:
        build_external(path, folder=path.parent, **options)
    return str(error.value)


@pytest.mark.usefixtures("_small_batches")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(item_sets(VOCAB), st.sampled_from(["int", "text", None]), st.sampled_from([0, 2**16, 2**31 - 1 - VOCAB]))
@pytest.mark.slow
def test_the_same_bytes_for_random_sets(tmp_path: Path, items: list[list[int]], keys: str | None, shift: int) -> None:
    ids = [[token + shift for token in item] for item in items]
    numbers = [7 * i % 31 - 5 for i in range(len(ids))]
    texts = ["" if number % 5 == 0 else f"key\0 {number}" * (number % 3) for number in numbers]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"item": pa.array(ids, pa.list_(pa.int64())), "int": numbers, "text": texts}), path)
    options = {"column": "item", "key": keys, "vocab_size": VOCAB + shift}
    assert build_external(path, folder=tmp_path, **options).to_bytes() == in_memory(path, **options)


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "ndjson", "parquet"])
@pytest.mark.parametrize("keys", [None, "number", "name", "mixed"])
def test_the_same_bytes_from_tables_of_texts(
    tmp_path: Path, suffix: str, keys: str | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    numbers = list(range(100, 100 + len(TEXTS)))
    table = {
        "title": TEXTS,
        "number": numbers,
        "name": [f"tt{n}" for n in numbers],
        "mixed": [*map(str, numbers[:-1]), "x"],
        "rest": ["x" * 40] * len(TEXTS),
    }
    path = write_table(tmp_path / f"a.{suffix}", table)
    options = {"column": "title", "key": keys, "tokenizer": tokenizer, "prefix": "four "}
    assert build_external(path, folder=tmp_path, **options).to_bytes() == in_memory(path, **options)


@pytest.mark.usefixtures("_small_batches")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(item_sets(6, max_items=90), st.randoms(use_true_random=False))
@pytest.mark.slow
def test_the_same_attributes_of_every_type(tmp_path: Path, items: list[list[int]], random: Any) -> None:
    """Some strings are few enough for numbers, others are not; any value may be missing."""

    def column(kind: Any, draw: Any) -> pa.Array:
        return pa.array([None if random.random() < 0.2 else draw() for _ in items], kind)

    def word() -> str:
        return random.choice(["", "a", "b\0é", "long " * 9])

    every = {
        "bool": column(pa.bool_(), lambda: random.random() < 0.5),
        "float": column(pa.float32(), random.random),
        "few": column(pa.string(), word),
        "many": column(pa.string(), lambda: f"{word()} {random.randrange(999)}"),
        "category": column(pa.string(), word).dictionary_encode(),
        "day": column(pa.date32(), lambda: random.randrange(-9, 20_000)),
        "moment": column(pa.timestamp("ns", "Asia/Tokyo"), lambda: 1000 * random.randrange(10**15)),
        "tags": column(pa.list_(pa.string()), lambda: [word() for _ in range(random.randrange(3))]),
        "notes": column(pa.large_list(pa.large_string()), lambda: [f"{word()} {random.randrange(99)}"]),
    }
    for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()):
        every[str(kind)] = column(kind, lambda kind=kind: random.randrange(1 << (kind.bit_width - 1)))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"item": pa.array(items, pa.list_(pa.int64())), **every}), path)
    options = {"column": "item", "attributes": list(every)}
    s = build_external(path, folder=tmp_path, **options)
    assert s.to_bytes() == in_memory(path, **options)
    assert s.attributes.to_pydict() == pa.table(every).take(s.keys).to_pydict()


@pytest.mark.usefixtures("_small_batches")
def test_the_same_bytes_from_lines_of_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(TEXTS * 40).encode())
    assert build_external(path, tokenizer=tokenizer).to_bytes() == in_memory(path, tokenizer)


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("length", [None, 3])
def test_the_same_bytes_from_tables_of_token_lists(tmp_path: Path, suffix: str, length: int | None) -> None:
    random = np.random.default_rng(5)
    items = [random.integers(0, 4, length or random.integers(1, 9)).tolist() for _ in range(200)]
    path = write_table(tmp_path / f"a.{suffix}", {"sid": items, "id": [f"k{i}" for i in range(200)]})
    for key in (None, "id"):
        options = {"column": "sid", "key": key}
        assert build_external(path, folder=tmp_path, **options).to_bytes() == in_memory(path, **options)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("dtype", "order", "vocab"), [("uint16", "C", 6), ("int64", "F", 6), (">i4", "C", 90_000)])
def test_the_same_bytes_from_matrices(
    tmp_path: Path, request: pytest.FixtureRequest, small: bool, dtype: str, order: Any, vocab: int
) -> None:
    if small:
        request.getfixturevalue("_small_batches")
    items = 300 if small else 100_000
    matrix = np.random.default_rng(3).integers(0, vocab, (items, 4)).astype(dtype, order=order)
    np.save(tmp_path / "a.npy", matrix)
    path = tmp_path / "a.npy"
    assert build_external(path, vocab_size=vocab).to_bytes() == in_memory(path, vocab_size=vocab)


def test_the_tokenizer_of_token_ids_is_recorded(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_table(tmp_path / "a.jsonl", {"t": [[1, 2], [5, 3], [1]]})
    assert build_external(path, tokenizer=tokenizer).to_bytes() == in_memory(path, tokenizer)
    assert build_external(path, tokenizer=tokenizer, vocab_size=9).to_bytes() == in_memory(
        path, tokenizer, vocab_size=9
    )


@pytest.mark.parametrize("top", [10, 2**16, 2**31 - 2])
def test_the_same_bytes_for_items_too_long_for_words(tmp_path: Path, top: int) -> None:
    random = np.random.default_rng(2)
    items = [[top] * n for n in range(1, 700, 7)] + [random.integers(0, 3, 300).tolist() for _ in range(50)]
    items += [[1] * 20_000, [1] * 20_000, [1] * 19_999 + [2]]
    random.shuffle(items)
    path = write_table(tmp_path / "a.jsonl", {"sid": items})
    assert build_external(path).to_bytes() == in_memory(path)
    np.save(tmp_path / "a.npy", random.integers(top - 1, top + 1, (200, 2_100)))
    assert build_external(tmp_path / "a.npy").to_bytes() == in_memory(tmp_path / "a.npy")


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # the sort has just removed it
        return 0


@pytest.mark.slow
def test_sorting_within_little_memory_spills_and_gives_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(external, "MIN_MEMORY", 64 << 20)
    np.save(tmp_path / "a.npy", np.random.default_rng(4).integers(0, 2048, (3_000_000, 8), dtype=np.uint16))
    stages, most = [], 0  # most bytes in files with a name

    def watch(stage: str, share: float) -> None:
        nonlocal most
        stages.append((stage, share))
        sizes = (size_of(file) for file in tmp_path.rglob("*") if file.name != "a.npy")
        most = max(most, sum(sizes))

    s = build_external(tmp_path / "a.npy", memory=0, folder=tmp_path, progress=watch)
    assert s.to_bytes() == in_memory(tmp_path / "a.npy")
    assert most > 4 << 20
    assert list(dict(stages)) == ["reading", "sorting", "merging", "building"]
    assert all(0 <= share <= 1 for _, share in stages)
    assert stages == sorted(stages, key=lambda pair: (list(dict(stages)).index(pair[0]), pair[1]))


@pytest.mark.usefixtures("_small_batches")
def test_errors_name_the_row_or_item_of_the_whole_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def table(name: str, **table: list[Any]) -> Path:
        return write_table(tmp_path / name, table)

    items: list[list[int | None]] = [[1, 2, 3]] * 30
    assert "row 31, column 't' holds token id 50" in refusal(table("a.jsonl", t=[*items, [50]]), vocab_size=50)
    assert "row 31, column 't' is empty" in refusal(table("a.parquet", t=[*items, []]))
    assert "row 31: a list in column 't' holds a missing" in refusal(table("a.parquet", t=[*items, [None]]))
    assert "row 31 has no value in column 't'" in refusal(table("a.jsonl", t=[*items, None]))
    texts = ["golden eye"] * 30
    named: dict[str, Any] = {"column": "t", "tokenizer": tokenizer}
    assert "row 31 has no value" in refusal(table("a.csv", t=[*texts, ""]), **named)
    assert "row 31, column 't' ('what') encodes to the unknown" in refusal(table("a.csv", t=[*texts, "what"]), **named)
    assert "row 31, column 't' (' ') encodes to no token" in refusal(
        table("a.jsonl", t=[*texts, " "]), tokenizer=tokenizer
    )
    keys = {"t": [*texts, "eye"], "k": [*range(30), ""]}
    options: dict[str, Any] = {"column": "t", "key": "k", "tokenizer": tokenizer}
    assert "row 31 has no value in column 'k'" in refusal(table("a.csv", **keys), **options)
    floats = {"t": texts, "k": [f"{i}.0" for i in range(30)]}
    assert "(0.0, ...), write them as integers" in refusal(table("a.tsv", **floats), **options)
    lines = tmp_path / "a.txt"
    lines.write_text("golden eye\n" * 300 + "\ngolden eye\n")
    assert "line 301 is blank" in refusal(lines, tokenizer=tokenizer)
    lines.write_bytes(b"golden eye\n" * 300 + b"\xff\n")
    assert "line 301 is not UTF-8" in refusal(lines, tokenizer=tokenizer)
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"t": [1]}\n' * 300 + '{"t": "a"}\n')
    assert "row 301: column 't' holds 'a'" in refusal(rows)
    np.save(tmp_path / "a.npy", np.array([[1, 2]] * 40 + [[1, -2]]))
    assert "row 41 holds token id -2" in refusal(tmp_path / "a.npy")


def test_a_source_that_changes_between_two_reads_is_named(tmp_path: Path) -> None:
    path, changed = tmp_path / "a.npy", []

    def change(rows: int, stage: str, share: float) -> None:
        if stage in ("sorting", "merging") and not changed:
            changed.append(stage)
            np.save(path, np.zeros((rows, 3), np.uint16))

    for rows in (200, 300):
        np.save(path, np.arange(600, dtype=np.uint16).reshape(200, 3))
        changed.clear()
        assert "a.npy was changed while it was read" in refusal(path, progress=partial(change, rows))
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"t": [1, 2]}\n')
    made = build_external(lines, column="t", progress=lambda stage, share: stage == "sorting" and lines.write_text("?"))
    assert made.items() == [[1, 2]]  # a copy is stored of what needs parsing
    assert lines.read_text() == "?"


def test_tables_have_the_memory_that_is_allowed_and_files_for_the_rest(tmp_path: Path, monkeypatch: Any) -> None:
    room = Zeros(tmp_path, 1000)
    arrays = [room(100, np.uint32), room(200, np.uint32), room(300, np.uint16), room(0, np.uint32)]
    assert [isinstance(array.base, np.memmap | mmap.mmap) for array in arrays] == [False, True, False, False]
    for array in arrays:
        assert not array.any()
        array[:] = 7
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(OSError, match="No space left"):
        room(1000, np.uint32)


def test_without_room_the_mend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2048, (200_000, 8), dtype=np.uint16))
    with monkeypatch.context() as patch:
        patch.setattr(external, "MIN_MEMORY", 1 << 20)
        assert re.search("cannot be sorted .*give more memory or disk", refusal(path, memory=0))
        many = itemset.build(np.arange(400_000).reshape(-1, 1))
        with pytest.raises(itemset.ItemSetError, match=r"^the keys of both sets cannot be sorted .*give more memory"):
            changes(many, many, memory=0)
        with pytest.raises(itemset.ItemSetError, match=r"^a.npy: keys in column 'k' cannot be sorted .*give more mem"):
            refuse_repeated("a.npy", "k", many, None, 0, tmp_path)
    with monkeypatch.context() as patch:
        full = OSError(28, os.strerror(28))
        patch.setattr(external.Spool, "append", lambda self, numbers: (_ for _ in ()).throw(full))
        assert "No space left on device" in refusal(path)
    assert os.listdir(tmp_path) == ["a.npy"]


def test_the_command_line_sorts_within_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, low, high = (str(tmp_path / name) for name in ("a.npy", "low.itemset", "high.itemset"))
    np.save(path, np.random.default_rng(0).integers(0, 2048, (20_000, 8), dtype=np.uint16))
    for memory, output in (("1MB", low), ("1GiB", high)):
        assert cli.main(["build", path, "--memory", memory, "-o", output]) == 0
        assert capsys.readouterr().err == ""
    assert Path(low).read_bytes() == Path(high).read_bytes() == in_memory(Path(path))
    assert cli.main(["build", path, "--memory", "1MB", "--vocab-size", "5", "-o", low]) == 1
    assert "outside the vocabulary 0..4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["build", path, "--memory", "much", "-o", low])
    assert "no size such as 4GB" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "high.itemset", "low.itemset"]


def test_the_bar_tells_stage_share_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with build_bar() as progress:
        for stage in ("encoding", "sorting", "merging", "building", "writing"):
            for share in (0.0, 0.5, 1.0):
                progress(stage, share)
    shown = re.findall(r"(\w+) +(\d+)%\|[^|]*\| \d\d:\d\d, about [\d:?]+ left", terminal.getvalue())
    assert list(dict(shown)) == ["encoding", "sorting", "merging", "building", "writing"]
    assert shown[-1] == ("writing", "100")


@pytest.mark.parametrize(
    ("stages", "shares", "said"),
    [(["encoding"], [0.0, 0.25, 0.5, 1.0], ["encoding 25%", "encoding 50%"]), (["merging"], [0.0, 1.0], []),
     (["sorting", "writing"], [0.5], 2 * ["50%"]), ([], [0.5], [])],
)  # fmt: skip
def test_a_build_without_a_terminal_says_lines(
    stages: list[str], shares: list[float], said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with build_bar() as show:
        for stage in stages:
            for share in shares:
                show(stage, share)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    assert all(f"{what}, about " in line and line.endswith(" s left") for what, line in zip(said, lines, strict=True))
    monkeypatch.setattr(progress, "EVERY", 60.0)
    with build_bar() as show:
        show("encoding", 0.5)
    assert capsys.readouterr().err == ""


def test_the_bars_of_other_commands_end_at_their_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.itemset"
    item_set = itemset.build(np.random.default_rng(0).integers(0, 50, (3_000, 4)))
    item_set.save(path)
    for work in (itemset.verify, partial(published.publish, folder=tmp_path / "set")):
        told: list[tuple[int, int]] = []
        work(path, progress=lambda nbytes, total, told=told: told.append((nbytes, total)))
        assert {total for _, total in told} == {sum(nbytes for nbytes, _ in told)}


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 * 10**9), ("1.5g", 1_500_000_000), ("2 GiB", 2**31), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert options.size(text) == size


def test_the_memory_that_there_is(tmp_path: Path) -> None:
    assert 2**20 < available_memory() < 2**50
    for file, text in {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "sys/fs/cgroup/memory.max": "5000000\n",
        "sys/fs/cgroup/memory.current": "3000000\n",
        "sys/fs/cgroup/memory.stat": "anon 2000000\ninactive_file 1000000\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert available_memory(tmp_path) == 3_000_000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 8_192_000
    assert available_memory(tmp_path / "none") > 2**20


def test_a_scratch_folder_goes_with_its_block_and_that_of_a_killed_process_with_the_next(tmp_path: Path) -> None:
    output = tmp_path / "a b"
    with scratch_folder(output) as folder:
        (folder / "spilled").write_bytes(b"x")
        assert os.listdir(tmp_path) == [folder.name]
    assert os.listdir(tmp_path) == []
    output.touch()
    with pytest.raises(FileNotFoundError), scratch_folder(tmp_path / "none" / "a"):
        pass
    code = f"""
import sys
from itemset.building.scratch import scratch_folder
with scratch_folder({str(output)!r}) as folder:
    (folder / "spilled").write_bytes(b"x")
    print(folder.name, flush=True)
    sys.stdin.read()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(itemset.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes) as other:  # type: ignore[call-overload]
        left = other.stdout.readline().strip()
        with scratch_folder(output) as folder:
            assert sorted(os.listdir(tmp_path)) == sorted([left, folder.name, "a b"])
        other.kill()
    assert sorted(os.listdir(tmp_path)) == [left, "a b"]
    with scratch_folder(output) as folder:
        assert sorted(os.listdir(tmp_path)) == [folder.name, "a b"]
    assert os.listdir(tmp_path) == ["a b"]


@pytest.mark.slow
def test_ended_builds_leave_a_whole_index_and_nothing_else(tmp_path: Path) -> None:
    seen = end_builds(tmp_path, KILLS, seed=1)
    assert seen.total() == KILLS
