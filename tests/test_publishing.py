"""Tomorrow's file: the version that a build of it would be, whatever today's was, and what is said of the change."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import run, tokenizers  # noqa: F401
from tokenizers import normalizers

import itemset
from itemset import ItemSetError, cli, published
from itemset.building.key_rows import Changes, changes
from itemset.publishing import publish_source
from itemset.source_sets import with_indexes
from itemset.text import load_tokenizer

ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.integers(0, 9),
        st.one_of(st.none(), st.integers(0, 2)),
        st.sampled_from([["a"], [], ["a", "b"], None]),
    ),
    min_size=1,
    max_size=12,
)
Rows = list[tuple[list[int], int, int | None, list[str] | None]]


def set_of(rows: Rows, **more: Any) -> itemset.ItemSet:
    """A set of rows, of which items and keys may repeat."""
    about = {"n": pa.array([row[2] for row in rows], pa.int64()), "tags": pa.array([row[3] for row in rows], TAGS)}
    return itemset.build([row[0] for row in rows], keys=[row[1] for row in rows], attributes={**about, **more})


TAGS = pa.list_(pa.string())


@given(ROWS, ROWS)
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_counts_are_those_of_dicts(before: Rows, after: Rows) -> None:
    of_key = [{key: Counter(map(repr, (row for row in rows if row[1] == key))) for *_, key in keys_of(rows)}
              for rows in (before, after)]  # fmt: skip
    was, now = of_key
    both = was.keys() & now.keys()
    changed = sum(was[key] != now[key] for key in both)
    expected = Changes(len(was.keys() - both), len(now.keys() - both), changed, len(both) - changed)
    assert changes(set_of(before), set_of(after)) == expected


def keys_of(rows: Rows) -> list[tuple[int]]:
    return [(row[1],) for row in rows]


def test_items_are_compared_where_row_numbers_are_the_keys() -> None:
    before, after = itemset.build([[1], [2, 3], [2, 3], [4]]), itemset.build([[9], [4], [2, 3], [1, 1]])
    assert changes(before, after, by_key=False) == Changes(1, 2, 1, 1)  # [2, 3] had two rows


def test_columns_that_appear_go_or_have_another_type() -> None:
    rows: Rows = [([1], 1, 1, ["a"]), ([2], 2, 2, None)]
    before = set_of(rows, price=[1, 2], old=[True, False], code=[7, 8])
    after = set_of(rows, price=[1.0, 2.5], new=["x", "y"], code=["7", "8b"])
    made = changes(before, after)
    assert made[:4] == (0, 0, 1, 1)
    assert made.notes == (
        "attribute 'code' is string and was integer",
        "attribute 'new' is new",
        "attribute 'old' is gone",
        "attribute 'price' is float and was integer",
    )
    texts = itemset.build([[1], [2], [3]], keys=["1", "2b", "3"])
    said = str(changes(itemset.build([[1], [2]], keys=[1, 2]), texts))
    assert said == "1 gone, 2 new, 0 changed, 1 the same; keys are strings and were integers"


TODAY = [
    {"sku": "L1", "name": "Oak desk", "price": 120, "colours": ["red"]},
    {"sku": "L2", "name": "Oak desk", "price": 130, "colours": []},
    {"sku": "L3", "name": "Pine shelf", "price": 40, "colours": ["red", "blue"]},
    {"sku": "L4", "name": "Cork board", "price": None, "colours": None},
]
TOMORROW = [
    {"sku": "L5", "name": "Oak desk", "price": 119, "colours": ["red"]},
    {"sku": "L4", "name": "Cork board", "price": 12, "colours": None},
    {"sku": "L3", "name": "Pine shelf, wide", "price": 40, "colours": ["red", "blue"]},
    {"sku": "L1", "name": "Oak desk", "price": 120, "colours": ["red"]},
]
SAID = "1 gone, 1 new, 2 changed, 1 the same"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A table of these rows, in the format of the file's suffix; delimited text has no lists."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        mark = {".csv": ";", ".tsv": "\t"}[path.suffix]
        lines = [mark.join("" if value is None else str(value) for value in row.values()) for row in rows]
        path.write_text("\n".join([mark.join(rows[0]), *lines]) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".jsonl.gz"])
def test_the_commands_make_the_bytes_of_a_build(suffix, tokenizers, tmp_path, capsys):  # noqa: F811
    tokenizer, folder = ["--tokenizer", tokenizers[0]], tmp_path / "sets" / "shop"
    attributes = ["price", "colours"] if suffix in (".parquet", ".jsonl.gz") else ["price"]
    kept = [word for name in attributes for word in ("--attribute", name)]
    rows = [[{name: row[name] for name in ("sku", "name", *attributes)} for row in day] for day in (TODAY, TOMORROW)]
    today, tomorrow = (write(tmp_path / f"{day}{suffix}", rows[i]) for i, day in enumerate(["today", "tomorrow"]))
    columns = ["--column", "name", "--key", "sku", *kept, "--prefix", " "]
    for path in (today, tomorrow):
        run(capsys, "build", path, *columns, *tokenizer, "-o", f"{path}.itemset")
    said = run(capsys, "publish", today, folder, *kept, *tokenizer, "--prefix", " ")
    assert "read         items of 'name', keys of 'sku'" in said
    assert published.current(folder).path.read_bytes() == Path(f"{today}.itemset").read_bytes()
    said = run(capsys, "publish", tomorrow, folder)  # all else is as it was
    assert f"changes      {SAID}\n" in said
    assert "sequence     2\n" in said
    assert published.current(folder).path.read_bytes() == Path(f"{tomorrow}.itemset").read_bytes()
    assert "changes      0 gone, 0 new, 0 changed, 4 the same\n" in run(capsys, "publish", tomorrow, folder)
    assert published.current(folder).sequence == 2
    for words in (["--prefix", ""], []):  # none, and none from then on
        run(capsys, "publish", tomorrow, folder, *words)
        assert published.load_current(folder)[1].prefix == ""
    over = tmp_path / "over.itemset"
    over.write_bytes(Path(f"{today}.itemset").read_bytes())
    assert f"changes      {SAID}\n" in run(capsys, "update", over, "--from", tomorrow, *tokenizer, "-o", over)
    assert over.read_bytes() == Path(f"{tomorrow}.itemset").read_bytes()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["shop"]


def test_in_python(tokenizers, tmp_path):  # noqa: F811
    tokenizer = load_tokenizer(tokenizers[0])
    today, tomorrow = write(tmp_path / "today.csv", TODAY), write(tmp_path / "tomorrow.csv", TOMORROW)
    how: dict[str, Any] = {"column": "name", "key": "sku", "tokenizer": tokenizer}
    version, changed = publish_source(today, tmp_path / "shop", attributes=["price"], escape="json", **how)
    assert (version.items, changed) == (3, None)
    version, changed = publish_source(tomorrow, tmp_path / "shop", **how)
    assert str(changed) == SAID
    again = itemset.build_external(tomorrow, attributes=["price"], escape="json", **how)
    assert version.path.read_bytes() == again.to_bytes()
    version, changed = publish_source(tomorrow, tmp_path / "shop", **how | {"attributes": ["colours"]})
    assert changed is not None
    assert changed.notes == ("attribute 'colours' is new", "attribute 'price' is gone")
    with pytest.raises(ItemSetError, match=r"which column of .*today.csv has them is not known: name it with --key"):
        publish_source(today, tmp_path / "shop", column="name", tokenizer=tokenizer)
    with pytest.raises(ItemSetError, match="the set was built with the tokenizer one: give it"):
        publish_source(today, tmp_path / "shop", column="name", key="sku")
    with pytest.raises(ItemSetError, match="the set was built with another tokenizer, one: give that one"):
        publish_source(today, tmp_path / "shop", **how | {"tokenizer": load_tokenizer(tokenizers[1])})
    with pytest.raises(ItemSetError, match="has no column 'colour'"):
        publish_source(today, tmp_path / "shop", **how, attributes=["colour"])
    assert published.current(tmp_path / "shop") == version


@pytest.mark.parametrize("suffix", ["npy", "txt", "jsonl"])
def test_items_without_keys(suffix, tokenizers, tmp_path, capsys):  # noqa: F811
    days = [[[1, 2], [1, 3], [4, 4]], [[4, 4], [1, 3], [5, 6]]]
    for day, items in zip("ab", days, strict=True):
        path = tmp_path / f"{day}.{suffix}"
        if suffix == "npy":
            np.save(path, np.array(items))
        elif suffix == "txt":
            path.write_text("".join(f"Part {item}\n" for item in items))
        else:
            path.write_text("".join(json.dumps({"ids": item, "id": "x"}) + "\n" for item in items))
    given = ["--tokenizer", tokenizers[0]] if suffix == "txt" else ["--vocab-size", "100"]
    columns = ["--column", "ids"] if suffix == "jsonl" else []
    keys = ["--key", ""] if suffix == "jsonl" else []  # else its `id` would be taken for one
    run(capsys, "build", tmp_path / f"b.{suffix}", *columns, *keys, *given, "-o", tmp_path / "b.itemset")
    run(capsys, "publish", tmp_path / f"a.{suffix}", tmp_path / "set", *keys, *given)
    assert "1 gone, 1 new, 0 changed, 2 the same" in run(capsys, "publish", tmp_path / f"b.{suffix}", tmp_path / "set")
    assert published.current(tmp_path / "set").path.read_bytes() == (tmp_path / "b.itemset").read_bytes()


def test_keys_of_different_items_are_refused_unless_they_may_repeat(tokenizers, tmp_path, capsys):  # noqa: F811
    rows = [{"id": 1, "title": "Ink"}, {"id": 1, "title": "Pen"}, {"id": 2, "title": "Cap"}]
    path, folder = write(tmp_path / "rows.csv", rows), tmp_path / "set"
    given = ["publish", str(path), str(folder), "--tokenizer", tokenizers[0]]
    assert cli.main(given) == 1
    assert "keys in column 'id' are those of different items (1), such as 1 of " in capsys.readouterr().err
    assert not folder.exists()
    run(capsys, *given, "--keys-repeat")
    write(path, [*rows[:1], {"id": 1, "title": "Nib"}, *rows[2:]])
    assert cli.main(["publish", str(path), str(folder)]) == 1  # it is asked for each time
    assert "are those of different items" in capsys.readouterr().err
    assert "0 gone, 0 new, 1 changed, 1 the same" in run(capsys, "publish", path, folder, "--keys-repeat")
    assert published.load_current(folder)[1].keys.to_pylist().count(1) == 2


def test_a_file_that_looks_broken_is_not_published(tokenizers, tmp_path, capsys):  # noqa: F811
    path, folder = tmp_path / "items.csv", tmp_path / "set"

    def publish(count: int, price: str, *words: str) -> int:
        rows = [f"item {i},{i},{price}" for i in range(count)]
        path.write_text("\n".join(["item,id,price", *rows]))
        return cli.main(
            ["publish", str(path), str(folder), "--tokenizer", tokenizers[0], "--attribute", "price", *words]
        )

    assert publish(200, "2.5") == 0
    for count, price, why in ((99, "2.5", "101 gone"), (200, "two", "attribute 'price' is string and was float")):
        assert publish(count, price) == 1
        said = capsys.readouterr().err
        assert f"items.csv looks broken and is not published ({'101' if count == 99 else '0'} gone" in said
        assert why in said
        assert published.load_current(folder)[1].attributes["price"].to_pylist() == [2.5] * 200
    assert publish(100, "2") == 0
    assert publish(49, "2", "--force") == 0
    assert publish(49, "", "--force") == 0
    assert publish(49, "3.5") == 0  # no value was of another type


def test_the_folder_comes_last(tokenizers, tmp_path, capsys):  # noqa: F811
    path = write(tmp_path / "today.csv", TODAY)
    assert cli.main(["publish", str(tmp_path / "shop"), str(path)]) == 1
    assert f"{path} is a file: give the file first, and then the folder" in capsys.readouterr().err


def test_a_damaged_version_stops_no_file(tokenizers, tmp_path, capsys):  # noqa: F811
    today, folder = write(tmp_path / "today.csv", TODAY), tmp_path / "shop"
    run(capsys, "publish", today, folder, "--tokenizer", tokenizers[0], "--attribute", "price")
    path = published.current(folder).path
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:100])
    tomorrow = write(tmp_path / "tomorrow.csv", TOMORROW)
    assert cli.main(["publish", str(tomorrow), str(folder)]) == 0
    assert capsys.readouterr().err.count("is truncated") == 1
    current = published.load_current(folder)[1]
    assert current.attributes.column_names == ["price"]
    assert len(current) == len({row["name"] for row in TOMORROW})


def test_dense_keys_are_not_taken_for_row_numbers(tokenizers, tmp_path, capsys):  # noqa: F811
    rows = [{"id": i, "title": title} for i, title in enumerate(("Ink", "Pen", "Cap"))]
    given, index = ["--tokenizer", tokenizers[0]], tmp_path / "a.itemset"
    for key in ("id", ""):
        keyed = ["--column", "title", "--key", key]
        run(capsys, "build", write(tmp_path / "a.csv", rows), *keyed, *given, "-o", index)
        tomorrow = write(tmp_path / "b.csv", rows[1:])
        update = ["update", str(index), "--from", str(tomorrow), *given, "-o", str(tmp_path / "b.itemset")]
        assert cli.main(update) == 1
        assert "say whether these are row numbers (--key '') or of a column (--key id)" in capsys.readouterr().err
        said = run(capsys, *update, "--key", key)
        assert ("1 gone, 0 new, 0 changed, 2 the same") in said


def test_what_is_refused(tokenizers, tmp_path, capsys):  # noqa: F811
    today, folder = write(tmp_path / "today.csv", TODAY), tmp_path / "shop"
    for words in (["--from", today, "--add", today], ["--add", today, "--attribute", "price"], []):
        with pytest.raises(SystemExit):
            cli.main(["update", "x", *map(str, words), "-o", "y"])
        assert "update needs --add, --remove or both, or --from alone, which takes" in capsys.readouterr().err
    run(capsys, "publish", today, folder, "--tokenizer", tokenizers[0], "--attribute", "price")
    run(capsys, "build", today, "--column", "name", "--tokenizer", tokenizers[0], "-o", tmp_path / "a.itemset")
    for words in ([tmp_path / "a.itemset", folder, "--key", "id"], ["--list", folder, "--keys-repeat"]):
        with pytest.raises(SystemExit):
            cli.main(["publish", *map(str, words)])
        assert "takes the options of build with a file of items alone" in capsys.readouterr().err
    pointer = (folder / "current.json").read_bytes()
    (folder / "current.json").write_text("{")
    assert cli.main(["publish", str(today), str(folder)]) == 1
    assert "is damaged" in (said := capsys.readouterr().err)
    assert "next version" not in said
    (folder / "current.json").write_bytes(pointer)
    (folder / "source.json").write_text("{")
    assert cli.main(["publish", str(today), str(folder)]) == 1
    assert "source.json cannot be read" in capsys.readouterr().err
    (folder / "source.json").unlink()
    assert cli.main(["publish", str(today), str(folder)]) == 1
    assert "the set was built with the tokenizer one: give it (--tokenizer DIR)" in capsys.readouterr().err
    (folder / "source.json").symlink_to(tmp_path / "none" / "source.json")
    assert cli.main(["publish", str(today), str(folder), "--tokenizer", tokenizers[0]]) == 1
    assert "No such file or directory" in capsys.readouterr().err


ALTERED = {  # texts that a tokenizer with such a normaliser gives back as others, two of them as the same
    "lower": (normalizers.Lowercase(), ["iPhone", "IPHONE", "cable"]),
    "strip": (normalizers.Strip(), ["desk ", " desk", "lamp"]),
    "nfkc": (normalizers.NFKC(), ["Caf\u00e9 \u2460", "Cafe\u0301 1", "\uff21\uff22"]),
}


@pytest.mark.parametrize("kind", [*ALTERED])
def test_texts_that_a_tokenizer_alters_can_be_the_keys(kind, tokenizers, tmp_path, capsys):  # noqa: F811
    normalizer, texts = ALTERED[kind]
    tokenizer = load_tokenizer(tokenizers[0])
    tokenizer.backend_tokenizer.normalizer = normalizer
    tokenizer.save_pretrained(tmp_path / "altering")
    given, tokenizer = ["--tokenizer", str(tmp_path / "altering")], load_tokenizer(str(tmp_path / "altering"))
    (tmp_path / "items.txt").write_text("\n".join(texts) + "\n")
    parquet.write_table(pa.table({"title": texts, "id": range(3)}), tmp_path / "items.parquet")
    for name in ("items.txt", "items.parquet"):
        path, columns = tmp_path / name, ["--column", "title"] if name == "items.parquet" else []
        assert cli.main(["build", str(path), *columns, *given, "-o", f"{path}.itemset"]) == 0
        assert "makes of the texts as they are given" in capsys.readouterr().err
        assert cli.main(["build", str(path), *columns, *given, "--keep-text", "-o", f"{path}.itemset"]) == 0
        s = itemset.load(f"{path}.itemset")
        assert s.keys_of(s.items()) == sorted([texts[:2], texts[2:]], key=lambda some: s.tokens(some[:1]))
        assert s.lookup_text(texts, tokenizer) == [texts[0], texts[0], texts[2]]
        options = {"item_sets": {"x": f"{path}?keep_text=yes"}, "item_set_cache": str(tmp_path)}
        with pytest.warns(itemset.ItemSetWarning):
            opened = itemset.load(with_indexes(options, lambda: tokenizer)["item_sets"]["x"])
        assert opened.to_bytes() == s.to_bytes()
        folder = tmp_path / f"set of {kind}"
        for words in ([*given, "--keep-text"], []):
            assert cli.main(["publish", str(path), str(folder), *words, "--force"]) == 0  # keys of another type
            said = capsys.readouterr().out
        assert "0 gone, 0 new, 0 changed, 3 the same" in said
        assert published.load_current(folder)[1].to_bytes() == s.to_bytes()
        assert cli.main(["publish", str(path), str(folder), "--key", "", "--force"]) == 0
        assert sorted(published.load_current(folder)[1].keys.to_pylist()) == [0, 1, 2]
    for more in (["items.parquet", "--column", "title", "--key", "id"], ["ids.npy"]):
        np.save(tmp_path / "ids.npy", np.array([[1, 2]]))
        assert cli.main(["build", str(tmp_path / more[0]), *more[1:], *given, "--keep-text", "-o", "x"]) == 1
        assert "makes them the keys: it takes texts, and no --key" in capsys.readouterr().err
