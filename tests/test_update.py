"""Changes to a set: byte for byte the set that is built again of what stays and what is new; what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import item_sets
from test_cli import TITLES, csv, films, npy, refused, run, sids, tokenizers  # noqa: F401

import itemset
from itemset import ItemSet, ItemSetError, cli
from itemset.trie import attributes as attribute_columns

SCHEMA = pa.schema([("n", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string())), ("score", pa.float64())])
Row = tuple[list[int], Any, dict[str, Any]]  # tokens, key, attributes


def built(rows: Sequence[Row], *, attributes: bool = True, **options: Any) -> ItemSet:
    return itemset.build([row[0] for row in rows], **of(rows, attributes), **options)


def of(rows: Sequence[Row], attributes: bool) -> dict[str, Any]:
    """The keys, and the attributes if there are any."""
    table = pa.Table.from_pylist([row[2] for row in rows], SCHEMA) if attributes else None
    return {"keys": [row[1] for row in rows], "attributes": table}


def values(number: int) -> dict[str, Any]:
    """Attributes of a row, some of them missing."""
    return {
        "n": None if number % 4 == 1 else number,
        "name": None if number % 5 == 2 else f"name {number % 23}",
        "tags": None if number % 7 == 3 else [f"tag {number % 11}", "all"][: number % 3],
        "score": None if number % 3 == 1 else number / 7,
    }


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Row], set[int], list[Row]]:
    """Rows of a set, positions of those to remove (not all if nothing comes), and new rows: some equal the old ones."""
    shift = draw(st.sampled_from([0, 0, 2**16, 2**31 - 80]))
    items = draw(item_sets())
    others = draw(st.one_of(st.just([]), item_sets(max_items=6), st.lists(st.sampled_from(items), max_size=4)))
    gone = draw(st.sets(st.integers(0, len(items) - 1), max_size=len(items) if others else len(items) - 1))
    low, high = draw(st.permutations([0, shift]))  # one of them may need wider tokens
    rows = [[token + low for token in item] for item in items]
    new = [[token + high for token in item] for item in others]
    return (
        [(item, 3 * i % 101 + 1000 * (i // 101), values(i)) for i, item in enumerate(rows)],
        gone,
        [(item, 10_000 + i, values(i + 40)) for i, item in enumerate(new)],
    )


@given(changes(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_the_bytes_of_a_build_of_what_stays_and_then_what_is_new(
    change: tuple[list[Row], set[int], list[Row]], texts: bool, attributes: bool
) -> None:
    rows, gone, new = change
    if texts:
        rows, new = ([(item, f"key {key}", about) for item, key, about in part] for part in (rows, new))
    removed = [rows[i][1] for i in gone]
    before = built(rows, attributes=attributes)
    options = of(new, attributes) if new else {}
    after = before.updated([row[0] for row in new] or None, **options, remove=removed)
    again = built([row for i, row in enumerate(rows) if i not in gone] + new, attributes=attributes)
    assert after.to_bytes() == again.to_bytes()
    assert itemset.from_bytes(before.to_bytes()).updated(remove=[]).to_bytes() == before.to_bytes()
    back = after.updated(remove=[row[1] for row in new]) if len(gone) < len(rows) else None
    kept = [row for i, row in enumerate(rows) if i not in gone]
    assert back is None or back.to_bytes() == built(kept, attributes=attributes).to_bytes()


@pytest.mark.parametrize("width", [0, 5])
def test_many_changes_to_many_items(width: int) -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 12, 30_000) if not width else np.full(30_000, width)
    rows = [(draw.integers(0, 9, length).tolist(), i, {}) for i, length in enumerate(lengths)]
    gone = set(draw.choice(20_000, 3_000, replace=False).tolist())
    before = built(rows[:20_000], attributes=False, vocab_size=50, prefix="")
    after = before.updated([row[0] for row in rows[20_000:]], keys=range(20_000, 30_000), remove=sorted(gone))
    again = built([row for row in rows if row[1] not in gone], attributes=False, vocab_size=50)
    assert after.to_bytes() == again.to_bytes()
    assert after.vocab_size == 50


def test_long_tails_and_fewer_bits() -> None:
    """Targets of 32 bits come and go, and so do bits of a token."""
    draw = np.random.default_rng(2)
    rows: list[Row] = [(draw.integers(0, 30, 20).tolist(), i, {}) for i in range(200)]
    wide: list[Row] = [([3, *draw.integers(0, 30, 1_200).tolist()], 300, {}), ([5, 64], 301, {})]
    less, more = built(rows, attributes=False), built(rows + wide, attributes=False)
    assert less.updated([row[0] for row in wide], keys=[300, 301]).to_bytes() == more.to_bytes()
    assert more.updated(remove=[300, 301]).to_bytes() == less.to_bytes()
    for gone in range(2):
        kept = rows + wide[1 - gone :][:1]
        assert more.updated(remove=[300 + gone]).to_bytes() == built(kept, attributes=False).to_bytes()


def test_more_texts_than_a_dictionary_holds_are_counted_without_those_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_columns, "MAX_DICTIONARY", 20)
    monkeypatch.setattr(attribute_columns, "BATCH_ROWS", 7)
    rows: list[Row] = [([i, i % 3], i, values(i)) for i in range(60)]
    for kept in (rows[:30], rows[30:33]):
        gone = [row[1] for row in rows if row not in kept]
        assert built(rows).updated(remove=gone).to_bytes() == built(kept).to_bytes()
    assert (
        built(rows[:5]).updated([row[0] for row in rows[5:]], **of(rows[5:], True)).to_bytes() == built(rows).to_bytes()
    )


EQUAL: list[Row] = [([1, 2], 7, {}), ([1], 8, {}), ([1, 2], 9, {}), ([1, 2, 3], 10, {})]


def test_a_key_that_is_removed_and_added_is_replaced() -> None:
    s = built(EQUAL, attributes=False)
    after = s.updated([[5], [1, 2]], keys=[8, 7], remove=[7, 8])
    assert (after.tokens([8, 7]), after.keys_of([[1, 2]]), after.find([1])) == ([[5], [1, 2]], [[9, 7]], None)
    with pytest.raises(ItemSetError, match="2 of the new keys are in the set, such as 7, 9: give others, or remove"):
        s.updated([[5], [6], [4]], keys=[9, 7, 1])


def test_keys_go_on_from_the_highest() -> None:
    s = itemset.build([[1], [2], [3]])
    after = s.updated([[4], [5]], remove=[2])
    assert after.keys_of([[1], [2], [4], [5]]) == [[0], [1], [3], [4]]
    assert s.updated([[4], [0]]).to_bytes() == itemset.build([[1], [2], [3], [4], [0]]).to_bytes()
    with pytest.raises(ItemSetError, match="the keys of this set are strings: give the new items keys, too"):
        itemset.build([[1]], keys=["a"]).updated([[2]])


def test_keys_that_are_not_there() -> None:
    s = itemset.build([[number] for number in range(50)], keys=[f"k{number}" for number in range(50)])
    missing = [f"m{number}" for number in range(9)]
    with pytest.raises(
        ItemSetError, match=r"9 of the keys to remove are not in the set, such as 'm0', 'm1', .*'m4': cor"
    ):
        s.updated(remove=["k1", *missing, *missing])
    after = s.updated(remove=["k1", *missing], missing_ok=True)
    assert len(after) == 49
    assert s.updated(remove=missing, missing_ok=True).to_bytes() == s.to_bytes()


def refusal(s: ItemSet, *args: Any, **options: Any) -> str:
    with pytest.raises(ItemSetError) as error:
        s.updated(*args, **options)
    return str(error.value)


def test_what_is_refused() -> None:
    s = built([([1, 2], 7, values(1)), ([3], 8, values(2))], vocab_size=50)
    assert "0 items would be left: a set has 1 to" in refusal(s, remove=[7, 8])
    assert "the keys of this set are integers, not strings such as 'x'" in refusal(s, remove=["x"])
    assert "keys must be a list, not 'x'" in refusal(s, remove="x")
    assert "item 1 holds token id 50, outside the vocabulary" in refusal(s, [[1], [50]], keys=[1, 2])
    assert "2 keys for 1 items" in refusal(s, [[1]], keys=[1, 2])
    assert "a view cannot be updated" in refusal(itemset.view(s, exclude_keys=[7]), remove=[8])
    about = {"n": [1], "name": ["x"], "tags": [["a"]], "score": [2]}
    assert s.updated([[9]], keys=[1], attributes=about).attributes.to_pylist()[-1]["score"] is not None
    assert "the set has the attributes n, name, tags, score: give those of the new" in refusal(s, [[9]], keys=[1])
    assert "not n, name, tags: give the new items the same" in refusal(
        s, [[9]], attributes={name: about[name] for name in ("n", "name", "tags")}
    )
    assert "attribute 'n' is integer in the set, which the new items' float does not fit" in refusal(
        s, [[9]], attributes=about | {"n": [1.5]}
    )
    assert "attribute 'name' is string" in refusal(s, [[9]], attributes=about | {"name": [True]})
    assert "2 rows of attributes for 1 items" in refusal(s, [[9]], attributes={name: [None] * 2 for name in about})
    assert "the set has no attributes: omit" in refusal(itemset.build([[1]]), [[9]], attributes={"n": [1]})
    nothing = s.updated([[9]], keys=[1], attributes={name: [None] for name in about})
    assert nothing.attributes.schema.types == s.attributes.schema.types


def test_a_damaged_trie_is_refused() -> None:
    s = itemset.build([[1, 2], [1, 3], [4]])
    targets = s.trie.tables.targets.copy()
    targets[0] = 5
    wrong = ItemSet(s.trie.__class__(**(vars(s.trie) | {"tables": replace(s.trie.tables, targets=targets)})), s._keys)
    with pytest.raises(ItemSetError, match="the index is corrupted, its tables are no trie: build it again"):
        wrong.updated(remove=[0])


def test_the_command_with_texts(capsys, films, csv, tokenizers, tmp_path):  # noqa: F811
    new, gone, output = tmp_path / "new.csv", tmp_path / "gone.txt", tmp_path / "films2.itemset"
    new.write_text("id,name\n21,Babe (1995)\n12,Toy Story 2\n22,Toy Story\n")
    gone.write_text("12\n14\n")
    options = ["--column", "name", "--key", "id", "--tokenizer", tokenizers[0]]
    said = run(capsys, "update", films, "--add", new, *options, "--remove", gone, "-o", output)
    assert "changes      2 keys removed, 3 added" in said
    whole = tmp_path / "whole.csv"
    kept = [
        (11, TITLES[0]),
        (13, TITLES[2]),
        (15, TITLES[4]),
        (21, "Babe (1995)"),
        (12, "Toy Story 2"),
        (22, "Toy Story"),
    ]
    whole.write_text("id,name\n" + "".join(f"{key},{title}\n" for key, title in kept))
    run(capsys, "build", whole, *options, "--prefix", " ", "-o", tmp_path / "whole.itemset")
    assert output.read_bytes() == (tmp_path / "whole.itemset").read_bytes()
    gone.write_text("12\n99\n98\n")
    update = ["update", films, "--remove", gone, "-o", output]
    assert "2 of the keys to remove are not in the set, such as 99, 98" in refused(capsys, *update)
    run(capsys, *update, "--missing-ok")
    gone.write_text("12\nx\n")
    assert "gone.txt: the keys of the set are integers" in refused(capsys, *update)
    assert "new.csv holds texts: give the model's tokenizer" in refused(
        capsys, "update", films, "--add", new, *options[:4], "-o", output
    )
    assert "another tokenizer" in refused(
        capsys, "update", films, "--add", new, *options[:5], tokenizers[1], "-o", output
    )
    with pytest.raises(SystemExit):
        cli.main(["update", films, "-o", str(output)])
    assert "update needs --add, --remove or both" in capsys.readouterr().err
    # Keys from the column of a table, and over the file itself.
    table = tmp_path / "gone.csv"
    table.write_text("why,id\nold,13\n")
    run(capsys, "update", output, "--remove", table, "--key", "id", "-o", output)
    assert itemset.load(output).keys.to_pylist().count(13) == 0
    assert "keys are lines of a .txt file, or a column" in refused(
        capsys, "update", films, "--remove", table, "-o", output
    )


def test_the_command_with_token_ids_and_attributes(capsys, sids, tmp_path):  # noqa: F811
    np.save(tmp_path / "new.npy", np.array([[5, 6, 9], [7, 7, 7]]))
    run(capsys, "update", sids, "--add", tmp_path / "new.npy", "-o", tmp_path / "more.itemset")
    assert itemset.load(tmp_path / "more.itemset").keys_of([[5, 6, 9], [7, 7, 7]]) == [[5], [6]]
    lines = ['{"ids": [1, 2], "key": "a", "year": 1990, "name": "x"}', '{"ids": [3], "key": "b", "year": null}']
    extra = '{"ids": [1, 4], "key": "12", "year": 2001, "name": "y"}'
    old, new, whole = (tmp_path / f"{name}.jsonl" for name in ("old", "new", "whole"))
    for path, content in ((old, lines), (new, [extra]), (whole, [lines[1], extra])):
        path.write_text("\n".join(content))
    options = ["--column", "ids", "--key", "key"]
    built_with = [*options, "--attribute", "year", "--attribute", "name"]
    for path in (old, whole):
        run(capsys, "build", path, *built_with, "-o", path.with_suffix(".itemset"))
    gone = tmp_path / "gone.txt"
    gone.write_text("a\n")
    table, other = tmp_path / "gone.jsonl", tmp_path / "gone.parquet"
    table.write_text('{"key": "a", "why": "old"}\n')
    parquet.write_table(pa.table({"key": ["a"], "why": ["old"]}), other)
    for keys in (gone, table, other):
        (tmp_path / "out").unlink(missing_ok=True)
        run(
            capsys, "update", tmp_path / "old.itemset", "--add", new, *options, "--remove", keys, "-o", tmp_path / "out"
        )
        assert (tmp_path / "out").read_bytes() == (tmp_path / "whole.itemset").read_bytes()
    table.write_text('{"why": "old"}\n')
    assert "key" in refused(capsys, "update", tmp_path / "old.itemset", "--remove", table, *options[2:], "-o", "x")
    parquet.write_table(pa.table({"key": pa.array([1.5])}), other)
    assert "key" in refused(capsys, "update", tmp_path / "old.itemset", "--remove", other, *options[2:], "-o", "x")
    update = ["update", tmp_path / "old.itemset", *options]
    for word, path in (("--add", new), ("--from", new), ("--remove", gone)):
        assert f"{path} is the source itself: give" in refused(capsys, *update, word, path, "-o", path)
    new.write_text(f'{extra}\n{{"ids": [1, 5], "key": "12"}}')
    update += ["--add", new, "-o", tmp_path / "out"]
    assert "keys in column 'key' are those of different items (1), such as '12' of '[1, 4]'" in refused(capsys, *update)
    run(capsys, *update, "--keys-repeat")
    assert itemset.load(tmp_path / "out").keys.to_pylist().count("12") == 2
    more = tmp_path / "more.jsonl"  # the keys that repeat are none of its own
    more.write_text('{"ids": [1, 6], "key": "d"}')
    run(capsys, "update", tmp_path / "out", "--add", more, *options, "-o", tmp_path / "more")
    new.write_text('{"ids": [1, 4], "key": "c", "year": "late"}')
    said = refused(capsys, "update", tmp_path / "old.itemset", "--add", new, *options, "-o", tmp_path / "out")
    assert "attribute 'year' is integer in the set, which the new items' string does not fit" in said
    assert "name a file in a folder" in refused(capsys, "update", sids, "--remove", gone, "-o", tmp_path)


def test_a_set_is_not_read_again_once_it_is_updated(tmp_path: Path) -> None:
    path = tmp_path / "films.itemset"
    itemset.build([[1], [2], [3]]).save(path)
    s = itemset.load(path)
    s.updated(remove=[0]).save(path)
    assert (s.items(), itemset.load(path).items()) == ([[1], [2], [3]], [[2], [3]])
