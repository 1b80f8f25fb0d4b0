"""Inputs and index files in an object store, on a web server, and in folders of parts: read as if they were one file
here; what cannot be reached, has changed or is no whole is refused, with its address."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]
from stores import S3, web_server

import itemset
from itemset import ItemSetError, cli, storage
from itemset.building import sources
from itemset.building.external import build_external
from itemset.serving.catalogue import Catalogue, with_versions
from itemset.serving.config import StaticConfig
from itemset.trie import file as index_file

CODES = np.random.default_rng(3).integers(0, 40, (1_000, 4))
KEYS = np.arange(1_000) * 3


@pytest.fixture(scope="module")
def store() -> Iterator[S3]:
    s3 = S3()
    yield s3
    s3.close()


@pytest.fixture
def s3(store: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    return store


def parquet(rows: slice, key_type: pa.DataType | None = None) -> bytes:
    keys = pa.array(KEYS[rows]).cast(key_type or pa.int64())
    table = pa.table({"ids": CODES[rows].tolist(), "key": keys, "year": KEYS[rows] % 7})
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=100)
    return out.getvalue()


def jsonl(rows: slice) -> bytes:
    entries = zip(CODES[rows].tolist(), KEYS[rows].tolist(), strict=True)
    return "".join(json.dumps({"ids": ids, "key": key}) + "\n" for ids, key in entries).encode()


def built() -> itemset.ItemSet:
    return itemset.build(CODES, keys=KEYS)


def test_a_file_in_the_store_reads_as_one_here(s3: S3, tmp_path: Path) -> None:
    npy = io.BytesIO()
    np.save(npy, CODES)
    csv = "title,key\n" + "".join(f"item {key},{key}\n" for key in KEYS)
    files = {
        "all.parquet": (parquet(slice(None)), {"column": "ids", "key": "key", "attributes": ["year"]}),
        "all.jsonl": (jsonl(slice(None)), {"column": "ids", "key": "key"}),
        "all.csv": (csv.encode(), {"column": "title", "key": "key"}),
        "all.txt": (b"red\ngreen\n", {}),
        "all.npy": (npy.getvalue(), {}),
    }
    for name, (data, options) in files.items():
        (tmp_path / name).write_bytes(data)
        here, there = (sources.read(path, **options) for path in (tmp_path / name, s3.put(name, data)))
        assert there.texts == here.texts
        assert (there.tokens is None) == (here.tokens is None)
        if here.tokens is not None and there.tokens is not None:
            assert np.array_equal(there.tokens.tokens, here.tokens.tokens)
            assert np.array_equal(there.tokens.offsets, here.tokens.offsets)
        assert there.keys == here.keys
        assert there.attributes == here.attributes


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("pattern", ["", "/*.parquet"])
def test_parts_are_one_input(s3: S3, tmp_path: Path, where: str, pattern: str) -> None:
    files = {"part-0.parquet": slice(0, 300), "part-1.parquet": slice(300, 1_000), "part-2.parquet": slice(0)}
    files = {f"{where}{len(pattern)}/{name}": rows for name, rows in files.items()}
    for name, rows in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(parquet(rows))
        s3.put(name, parquet(rows))
    folder = f"{where}{len(pattern)}"
    (tmp_path / folder / "_SUCCESS").write_bytes(b"")
    s3.put(f"{folder}/_SUCCESS", b"")
    path = f"{tmp_path if where == 'here' else 's3://sets'}/{folder}{pattern}"
    output = tmp_path / "a.itemset"
    assert cli.main(["build", path, "--column", "ids", "--key", "key", "-o", str(output)]) == 0
    assert output.read_bytes() == built().to_bytes()
    assert build_external(path, column="ids", key="key").to_bytes() == built().to_bytes()
    shares = [items.done for items in sources.batches(path, column="ids")]
    assert shares == sorted(shares)
    assert shares[-1] <= 1


def test_parts_in_folders_below_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, text in {"b/0.txt": "third", "a/1.txt": "second", "a/0.txt": "first", ".tmp/0.txt": "none"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    for suffix, nothing in {"gz": gzip.compress(b""), "bz2": bz2.compress(b"")}.items():
        (tmp_path / f"a/00.txt.{suffix}").write_bytes(nothing)
    assert sources.read(tmp_path).texts == ["first", "second", "third"]
    assert sources.read_keys(tmp_path).to_pylist() == ["first", "second", "third"]


def test_parts_that_do_not_go_together(tmp_path: Path) -> None:
    def refused(**files: bytes) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, data in files.items():
            (folder / name.replace("_", ".")).write_bytes(data)
        with pytest.raises(ItemSetError) as error:
            sources.read(folder, column="ids", key="key")
        return str(error.value).replace(f"{folder}", "F")

    whole, texts = parquet(slice(0, 5)), b'{"ids": "a", "key": 1}\n'
    assert refused(a_parquet=whole, b_jsonl=texts).startswith("F holds files of several kinds, F/a.parquet and F/b.jso")
    message = refused(a_jsonl=jsonl(slice(0, 5)), b_jsonl=texts)
    assert message.startswith("F/b.jsonl, row 1: column 'ids' holds 'a', not list")
    assert refused(a_jsonl=b"", b_jsonl=b"") == "F/a.jsonl is empty: it must hold at least one item"
    assert refused() == "no file in F: check the path"
    assert refused(a_md=b"x").startswith("F/a.md: unknown suffix '.md', use one of .txt, .npy, .csv, .tsv, .item")


def test_an_index_in_the_store(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = s3.put("codes.itemset", built().to_bytes())
    assert itemset.load(uri).to_bytes() == built().to_bytes()
    assert itemset.verify(uri).digest == built().digest
    assert cli.main(["info", uri]) == 0
    assert f"{uri} ({len(built().to_bytes()):,} bytes)" in capsys.readouterr().out
    assert cli.main(["publish", uri, str(tmp_path / "published")]) == 0
    assert itemset.published.load_current(tmp_path / "published")[1].to_bytes() == built().to_bytes()
    assert cli.main(["update", uri, "--add", s3.put("more.npy", npy([[50, 51, 52, 53]])), "-o", f"{tmp_path}/b"]) == 0
    assert len(itemset.load(tmp_path / "b")) == len(built()) + 1
    assert cli.main(["build", f"{tmp_path}/x.npy", "-o", "s3://sets/x.itemset"]) == 1
    assert "cannot write s3://sets/x.itemset: name a file of this machine" in capsys.readouterr().err


def npy(matrix: list[list[int]]) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(matrix))
    return out.getvalue()


def test_a_registered_index_is_fetched_once_for_all_processes(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "codes.itemset").write_bytes(built().to_bytes())
    cache = str(tmp_path / "cache")
    with web_server(tmp_path) as (address, asked):
        uri = f"{address}/codes.itemset"
        options = with_versions({"item_sets": {"codes": uri}, "item_set_cache": cache})
        first = total(asked)
        catalogue = Catalogue(StaticConfig.of(options))  # as the engine's process does
        assert catalogue["codes"].to_bytes() == built().to_bytes()
        assert not catalogue.follows("codes")
        assert total(asked) == first
        with_versions({"item_sets": {"codes": uri}, "item_set_cache": cache})  # a second start: the header alone
        second = total(asked)
        assert index_file.version(uri, checked=False) == index_file.version(tmp_path / "codes.itemset")
        assert second - first == total(asked) - second
    assert os.listdir(cache).count(index_file.version(tmp_path / "codes.itemset")) == 1


def total(asked: dict[str, int]) -> int:
    return sum(asked.values())


@pytest.mark.slow
def test_an_interrupted_download_goes_on(tmp_path: Path) -> None:
    (tmp_path / "all.parquet").write_bytes(parquet(slice(None)))
    (tmp_path / "a.itemset").write_bytes(built().to_bytes())
    with web_server(tmp_path, breaks=storage.TRIES - 1) as (address, _):
        assert sources.read(f"{address}/all.parquet", column="ids", key="key").keys.to_pylist() == KEYS.tolist()
        assert itemset.load(f"{address}/a.itemset").digest == built().digest
    with web_server(tmp_path, breaks=100) as (address, _):
        uri = f"{address}/a.itemset"
        with pytest.raises(ItemSetError, match=f"{uri} cannot be read: "):
            itemset.load(uri)
        options = {"item_sets": {"codes": uri}, "item_set_cache": str(tmp_path / "cache")}
        with pytest.raises(ItemSetError, match=f"the item set 'codes' cannot be opened: {uri}:? cannot be read: "):
            with_versions(options)
        assert os.listdir(tmp_path / "cache") == ["lock"]


def test_an_object_that_changes_meanwhile(s3: S3) -> None:
    uri = s3.put("changing.jsonl", jsonl(slice(None)) * 40)
    reading = sources.batches(uri, column="ids", key="key")
    next(reading)
    s3.put("changing.jsonl", jsonl(slice(0, 900)))
    with pytest.raises(ItemSetError, match=f"{uri} "):
        list(reading)


def test_who_writes_a_file_waits_for_another_that_does(tmp_path: Path) -> None:
    path, begun, seen = tmp_path / "a", threading.Event(), threading.Event()

    def second() -> Iterator[bytes]:
        begun.set()
        yield b"sec"
        assert seen.wait(60)
        yield b"ond"

    other = threading.Thread(target=storage.write_whole, args=(path, tmp_path / "b", 0o644, second()))

    def first() -> Iterator[bytes]:
        yield b"first"
        other.start()
        assert not begun.wait(0.5)

    storage.write_whole(path, tmp_path / "b", 0o644, first())
    assert path.read_bytes() == b"first"
    seen.set()
    other.join()
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(os.getuid() != 0, reason="takes another user")
def test_what_another_user_has_left_stops_nobody(tmp_path: Path) -> None:
    """A killed process's unfinished file, which only its user may write to, in a folder of both."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    for above in (tmp_path, *tmp_path.parents[:3]):  # pytest's own, which are its user's
        above.chmod(above.stat().st_mode | 0o055)
    (folder / "b").write_bytes(b"half")
    os.seteuid(65534)
    try:
        storage.write_whole(folder / "a", folder / "b", 0o644, [b"whole"])
    finally:
        os.seteuid(0)
    assert (folder / "a").read_bytes() == b"whole"
    assert os.listdir(folder) == ["a"]


class Listed(MemoryFileSystem):  # type: ignore[misc]
    """Keeps listings, as hf:// does."""

    protocol = "listed"
    info = AbstractFileSystem.info

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("listed://")))

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        path = self._strip_protocol(path)
        self.dircache[path] = found = self.dircache.get(path) or super().ls(path, detail=True)
        return found if detail else [one["name"] for one in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def test_a_file_system_that_keeps_listings_is_asked_anew() -> None:
    fsspec.register_implementation("listed", Listed, clobber=True)
    files = fsspec.filesystem("memory")
    files.pipe("/top/in/0.txt", b"a\nb\n")
    assert sources.read("listed://top/in").texts == ["a", "b"]
    (before,) = storage.files_at("listed://top/in")
    files.pipe("/top/in/0.txt", b"a\nb\nc\n")
    files.pipe("/top/in/1.txt", b"d\n")
    assert sources.read("listed://top/in").texts == ["a", "b", "c", "d"]
    with pytest.raises(ItemSetError, match="was changed while it was read"):
        before.check_unchanged()


def test_a_damaged_index_in_the_store_is_not_served(s3: S3, tmp_path: Path) -> None:
    data = bytearray(built().to_bytes())
    data[-100] ^= 1
    options = {"item_sets": {"codes": s3.put("bad.itemset", bytes(data))}, "item_set_cache": str(tmp_path)}
    with pytest.raises(ItemSetError, match=r"s3://sets/bad.itemset is corrupted, section \w+ does not match"):
        with_versions(options)
    assert os.listdir(tmp_path) == ["lock"]


def test_what_is_not_there(s3: S3) -> None:
    s3.put("folder/a.txt", b"a\n")
    for uri, message in {
        "s3://sets/none.parquet": "no file s3://sets/none.parquet: check the address",
        "s3://sets/none/*.parquet": "s3://sets/none/ cannot be read: ",
        "s3://sets/folder/*.csv": r"no file in s3://sets/folder/\*.csv: check the path",
        "http://127.0.0.1:9/a.txt": "no file http://127.0.0.1:9/a.txt: check the address",
        "nowhere://a/b.txt": "nowhere://a/b.txt cannot be read: Protocol not known: nowhere",
        "abfs://a/b.txt": r"abfs://a/b.txt cannot be read: .* \(pip install 'static-backend\[remote\]'\)",
    }.items():
        with pytest.raises(ItemSetError, match=f"^{message}"):
            sources.read(uri)
    with pytest.raises(ItemSetError, match=r"s3://sets/folder is a folder: name a file in it"):
        itemset.load("s3://sets/folder")


def test_no_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = S3()
    try:
        uri = store.put("a.txt", b"a\n")
        store.refuse_everybody()
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ItemSetError, match="give credentials that may read it"):
            sources.read(uri)
    finally:
        store.close()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("gone.itemset", "no file {}: check the address"),
        ("status/404/a.itemset", "no file {}: check the address"),
        ("status/500/a.itemset", "{} cannot be read: its server answers with status 500"),
        ("status/503/a.itemset", "{} cannot be read: its server answers with status 503"),
        ("status/302/a.itemset", "{} cannot be read: its server redirects in circles: correct the address"),
    ],
)
@pytest.mark.slow
def test_what_a_web_server_says_is_told(tmp_path: Path, path: str, sentence: str) -> None:
    with web_server(tmp_path) as (address, _):
        uri = f"{address}/{path}"
        for read in (storage.file_at, storage.files_at):
            with pytest.raises(ItemSetError) as error:
                read(uri)
            assert str(error.value).startswith(sentence.format(uri))
