"""Items that come sorted are not sorted again: the same index, byte for byte, or the first row out of order."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import item_sets

import itemset
from itemset import ItemSetError, build_external, cli
from itemset.building import readers

ITEMS = pa.list_(pa.int64())


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_PARQUET_ROWS", 3)


def write_shards(folder: Path, items: list[list[int]], keys: list[Any], shards: int) -> None:
    """Write consecutive rows to so many files, some of which may have none."""
    folder.mkdir(exist_ok=True)
    cuts = np.linspace(0, len(items), shards + 1).astype(int)
    for i, (start, end) in enumerate(pairwise(cuts)):
        tags = pa.array([len(item) for item in items[start:end]])
        table = pa.table({"ids": pa.array(items[start:end], ITEMS), "key": keys[start:end], "tag": tags})
        pq.write_table(
            table.cast(pa.schema([("ids", ITEMS), ("key", pa.int64()), ("tag", pa.int64())])), folder / f"{i}.parquet"
        )


@pytest.mark.usefixtures("_small_batches")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(item_sets(), st.integers(1, 4), st.booleans())
def test_the_same_bytes_from_sorted_shards(
    tmp_path: Path, items: list[list[int]], shards: int, with_keys: bool
) -> None:
    items, folder = sorted(items), tmp_path / "shards"
    keys = [7 * i % 31 for i in range(len(items))]
    for old in folder.glob("*"):
        old.unlink()
    write_shards(folder, items, keys, shards)
    key = "key" if with_keys else None
    tags = pa.table({"tag": [len(item) for item in items]})
    whole = itemset.build(items, keys=keys if with_keys else None, attributes=tags)
    found = build_external(folder, column="ids", key=key, attributes=["tag"], in_order=True, folder=tmp_path)
    assert found.to_bytes() == whole.to_bytes()


@pytest.mark.usefixtures("_small_batches")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(item_sets(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_first_row_out_of_order_is_named(tmp_path: Path, items: list[list[int]], shards: int, random: Any) -> None:
    folder = tmp_path / "shards"
    for old in folder.glob("*"):
        old.unlink()
    items = sorted(items)
    for _ in range(random.randrange(3)):  # two rows change places
        i, j = random.randrange(len(items)), random.randrange(len(items))
        items[i], items[j] = items[j], items[i]
    write_shards(folder, items, list(range(len(items))), shards)
    wrong = next((i for i in range(1, len(items)) if items[i] < items[i - 1]), None)
    if wrong is None:
        build_external(folder, column="ids", key="key", in_order=True)
        return
    with pytest.raises(ItemSetError, match=f": row {wrong + 1:,} is lower than the one before it: sort the"):
        build_external(folder, column="ids", key="key", in_order=True)


def test_the_command_needs_no_duckdb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    items = np.random.default_rng(1).integers(0, 50, (3_000, 3))
    items = items[np.lexsort(items.T[::-1])].tolist()
    write_shards(tmp_path / "shards", items, list(range(3_000)), 3)
    output = tmp_path / "a.itemset"
    command = ["build", "--sorted", str(tmp_path / "shards"), "--column", "ids", "--key", "key", "-o", str(output)]
    assert cli.main(command) == 0
    assert "in order already (--sorted)" in capsys.readouterr().out
    assert output.read_bytes() == itemset.build(items, keys=list(range(3_000))).to_bytes()
    write_shards(tmp_path / "shards", items[::-1], list(range(3_000)), 3)
    output.unlink()
    assert cli.main(command) == 1
    assert "shards: row " in capsys.readouterr().err
    assert not output.exists()
