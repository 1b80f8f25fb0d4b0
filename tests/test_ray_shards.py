"""Sorting on a Ray cluster: the same index, byte for byte; what goes wrong, and what cannot be combined.

What needs the package `ray` is skipped without it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models import tiny_tokenizer

from itemset import ItemSetError, build_external, cli

TITLES = [f"{'abcdefgh'[i % 8] * (i % 5 + 1)} {i % 300}" for i in range(1_000)]


def write_texts(folder: Path) -> dict[str, Any]:
    """CSV in parts, one of which has no row, with equal items and keys that would do for numbers elsewhere."""
    folder.mkdir()
    for part, rows in enumerate((slice(0, 300), slice(0), slice(300, 1_000))):
        lines = [f"{title},00{i},{i % 7}" for i, title in list(enumerate(TITLES))[rows]]
        (folder / f"{part}.csv").write_text("\n".join(["title,key,word0", *lines]) + "\n")
    return {"column": "title", "key": "key", "attributes": ["word0"], "tokenizer": tiny_tokenizer(), "prefix": " "}


def write_tokens(folder: Path) -> dict[str, Any]:
    """Parquet without keys: items of one to forty tokens, and times in whole seconds."""
    folder.mkdir()
    draw = np.random.default_rng(1)
    for part, rows in enumerate((400, 600)):
        items = [draw.integers(0, 9, draw.choice([1, 2, 3, 40])).tolist() for _ in range(rows)]
        times = pa.array(draw.integers(0, 1 << 30, rows), pa.timestamp("s"))
        pq.write_table(pa.table({"ids": items, "time": times}), folder / f"{part}.parquet")
    return {"column": "ids", "attributes": ["time"], "vocab_size": 9}


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "a.txt").write_text("a\n")
    command = ["build", f"{tmp_path}/a.txt", "--engine", "ray", "-o", f"{tmp_path}/a.itemset"]
    assert cli.main(command) == 1
    assert capsys.readouterr().err == ("itemset: sorting on a cluster needs Ray: pip install 'static-backend[ray]'\n")
    assert not (tmp_path / "a.itemset").exists()


def test_what_goes_with_no_cluster(tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "a.npy", [[1, 2]])
    path = tmp_path / "a.npy"
    with pytest.raises(ItemSetError, match="in order already, there is nothing to sort: omit --sorted or --engine"):
        build_external(path, in_order=True, engine="ray")
    with pytest.raises(ItemSetError, match="shards are for what a cluster sorts: give an engine, or omit them"):
        build_external(path, shards=tmp_path / "shards")
    with pytest.raises(SystemExit):
        cli.main(["build", str(path), "--shards", str(tmp_path / "shards"), "-o", f"{tmp_path}/a.itemset"])
    assert "--shards is for what a cluster sorts: it needs --engine" in capsys.readouterr().err


def test_the_same_bytes_and_honest_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the package ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of Ray's workers

    def refused(path: Path, **options: Any) -> str:
        with pytest.raises(ItemSetError) as error:
            build_external(path, engine="ray", folder=tmp_path, **options)
        return str(error.value).replace(f"{tmp_path}/", "")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    (tmp_path / "a.txt").write_text("a\n")
    assert refused(tmp_path / "a.txt", tokenizer=tiny_tokenizer()).startswith("no Ray cluster at 127.0.0.1:9: ")
    monkeypatch.delenv("RAY_ADDRESS")
    ray.init("local", num_cpus=2, object_store_memory=200 << 20, log_to_driver=False)
    monkeypatch.chdir(tmp_path)  # where no worker is
    try:
        for name, write in {"texts": write_texts, "tokens": write_tokens}.items():
            options, shards = write(tmp_path / name), tmp_path / f"shards of {name}"
            alone = build_external(tmp_path / name, folder=tmp_path, **options).to_bytes()
            assert build_external(name, engine="ray", shards=shards.name, **options).to_bytes() == alone
            assert len(list(shards.glob("*.parquet"))) > 1
        assert refused(tmp_path / name, shards=shards, **options) == (
            "shards of tokens is not empty: give the shards a new folder"
        )
        shutil.rmtree(shards)
        assert refused(tmp_path / name, **{**options, "vocab_size": 8}).startswith("tokens/0.parquet: item ")
        pq.write_table(
            pa.table({"ids": ["text"], "time": pa.array([1], pa.timestamp("s"))}), tmp_path / name / "2.parquet"
        )
        assert refused(tmp_path / name, **options) == (
            "tokens/2.parquet holds texts, files before it token ids: keep them apart"
        )
        (tmp_path / name / "2.parquet").unlink()
        folder = tmp_path / "scratch"
        folder.mkdir()
        assert build_external(name, engine="ray", folder=folder, **options).to_bytes() == alone
        assert not list(folder.iterdir())
    finally:
        ray.shutdown()
