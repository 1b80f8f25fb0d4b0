"""Sources in place of index files: built once into the cache, by the columns that are given or plain to see."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import itemset
from itemset import source_sets
from itemset.cli import build
from itemset.errors import ItemSetError
from itemset.serving.catalogue import with_versions
from itemset.text import load_tokenizer

TITLES = ["The red river (1961)", "A wild garden (1994)", "The last engine"]
KEYS = [7, 3, 9]
ROWS = [{"movie_id": key, "title": title, "year": 1960 + key} for key, title in zip(KEYS, TITLES, strict=True)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "films.csv").write_text(
        "movie_id,title,year\n" + "".join(f"{','.join(map(str, r.values()))}\n" for r in ROWS)
    )
    (tmp_path / "films.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "films.txt").write_text("".join(f"{title}\n" for title in TITLES))
    (tmp_path / "parts").mkdir()
    for place, row in enumerate(ROWS):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "parts" / f"{place}.parquet")
    np.save(tmp_path / "codes.npy", np.array([[5, 6], [5, 7]]))
    return tmp_path


@pytest.fixture
def opened(folder, tiny_model):
    """A function that returns the set which a server opens for a source."""

    def opened(source: object) -> itemset.ItemSet:
        given = {"item_sets": {"films": source}, "item_set_cache": str(folder / "cache")}
        options = source_sets.with_indexes(given, partial(load_tokenizer, str(tiny_model)))
        assert with_versions(options)["item_set_versions"].keys() == {"films"}
        return itemset.load(options["item_sets"]["films"])

    return opened


@pytest.mark.parametrize("source", ["films.csv", "films.jsonl", "parts", "parts/*.parquet", "films.csv?attribute=year"])
def test_a_file_with_the_columns_that_are_plain_to_see(source, folder, opened, tiny_model):
    films = opened(f"{folder}/{source}")
    assert films.lookup_text(TITLES, load_tokenizer(str(tiny_model))).tolist() == KEYS
    assert films.attributes.column_names == (["year"] if "year" in source else [])


def test_a_table_or_a_list_of_the_process_itself(opened, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    for table in (pd.DataFrame(ROWS), pa.Table.from_pylist(ROWS), {"title": TITLES, "movie_id": KEYS}):
        assert opened(table).lookup_text(TITLES, tokenizer).tolist() == KEYS
    assert opened(TITLES).lookup_text(TITLES, tokenizer).tolist() == [0, 1, 2]
    assert opened([[5, 6], [5, 7, 8]]).items() == [[5, 6], [5, 7, 8]]
    assert opened(np.array([[5, 6], [5, 7]])).items() == [[5, 6], [5, 7]]


def test_lines_and_token_ids_have_no_columns(folder, opened):
    assert len(opened(folder / "films.txt")) == 3
    assert opened(str(folder / "codes.npy")).items() == [[5, 6], [5, 7]]


def test_a_second_start_builds_nothing_and_a_change_of_the_file_does(folder, opened, monkeypatch, capsys):
    built = []
    write_index = build.write_index
    monkeypatch.setattr(build, "write_index", lambda *given: built.append(given) or write_index(*given))
    source = f"{folder}/films.csv?column=title&key=movie_id"
    assert len({opened(source).digest for _ in range(2)}) == 1
    assert (len(built), capsys.readouterr().err.count("building an index")) == (1, 1)
    for change, count in ((f"{source}&prefix=%20", 2), (f"{folder}/films.csv?column=year", 3)):
        opened(change)
        assert len(built) == count
    with open(folder / "films.csv", "a") as file:
        file.write("11,The silver summer,1999\n")
    assert (len(opened(source)), len(built)) == (4, 4)
    (old,) = [index for index in (folder / "cache" / "built").glob("*.itemset") if len(itemset.load(index)) == 4]
    os.utime(old, (0, 0))
    opened(folder / "films.txt")
    assert not old.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "films.csv?colum=title",
            "options other than column, key, .*, split, keys_repeat, keep_text: write films=.*films.csv.column=NAME",
        ),
        ("films.csv?column=name", "no column 'name', it has 'movie_id', 'title', 'year'"),
        ("plain.csv", "has the columns 'a', 'b': say which has the items, films=.*plain.csv.column=NAME"),
        ("films.csv?keys_repeat=false", "films.csv: keys_repeat must be yes or no, not false"),
        ("films.csv?keep_text=", "films.csv: keep_text must be yes or no, not "),
        ("films.csv?escape=xml", "options other than column, key, .*, keys_repeat, keep_text: write films="),
        ("gone.csv", "no file .*gone.csv"),
        ("torn.parquet", "torn.parquet cannot be read"),
        ("films.xml?column=title", "unknown suffix '.xml'"),
    ],
)
def test_what_is_refused_says_what_to_write(source, message, folder, opened):
    (folder / "plain.csv").write_text("a,b\nx,y\n")
    (folder / "films.xml").write_text("<a/>")
    (folder / "torn.parquet").write_text("PAR1")
    with pytest.raises(ItemSetError, match=message):
        opened(f"{folder}/{source}")


def test_a_table_with_its_columns_named(opened, tiny_model):
    table = pd.DataFrame({"a": TITLES, "b": KEYS, "c": [1.5, 2, 3], "d": ["x", "y", "z"]})
    films = opened({"data": table, "column": "a", "key": "b", "attributes": ["c", "d"]})
    assert films.keys.to_pylist() != [0, 1, 2]
    assert films.attributes.column_names == ["c", "d"]
    for given in (table, [1, 2], {"data": table, "column": "e"}):
        with pytest.raises(ItemSetError, match=r"the item set 'films'.*of a table or list say it so: 'films': {.data"):
            opened(given)


def test_a_value_that_is_no_source_is_judged_by_the_options(folder, opened):
    with pytest.raises(ItemSetError, match="item_sets must be"):
        opened(7)
    with pytest.raises(ItemSetError, match=r"must be a file, a table .* or a list of texts"):
        opened(object())


def test_flags_keep_their_order_and_index_files_stay(folder, tiny_model):
    cache = {"item_set_cache": str(folder / "cache")}
    given = {"item_sets": [f"films={folder}/films.txt", "a=b.itemset", "bad"], **cache}
    films, *others = source_sets.with_indexes(given, partial(load_tokenizer, str(tiny_model)))["item_sets"]
    assert others == ["a=b.itemset", "bad"]
    assert len(itemset.load(films.removeprefix("films="))) == 3
    without = {"item_set_path": "host"}
    assert source_sets.with_indexes(without, partial(load_tokenizer, "none")) == without
    assert Path(films.removeprefix("films=")).parent == folder / "cache" / "built"


@pytest.mark.parametrize(
    ("given", "items"),
    [
        (pa.array(TITLES), dict(enumerate(TITLES))),
        (pa.chunked_array([TITLES[:1], TITLES[1:]]), dict(enumerate(TITLES))),
        (pd.Series(TITLES), dict(enumerate(TITLES))),
        (dict(zip(KEYS, TITLES, strict=True)), dict(zip(KEYS, TITLES, strict=True))),
        ({"a": TITLES[0], "b": TITLES[1]}, {"a": TITLES[0], "b": TITLES[1]}),
        ({"sku": ["a", "b"], "name": TITLES[:2]}, {"a": TITLES[0], "b": TITLES[1]}),
    ],
)
def test_columns_and_objects_of_the_process_are_read_as_what_they_are(given, items, opened, tiny_model):
    films = opened(given)
    tokenizer = load_tokenizer(str(tiny_model))
    assert {key: tokenizer.decode(films.tokens([key])[0]) for key in films.keys.to_pylist()} == items


def test_a_flag_that_is_no_changes_nothing(folder, opened):
    assert sorted(opened(f"{folder}/films.csv?keep_text=no").keys.to_pylist()) == sorted(KEYS)


@pytest.mark.parametrize("name", ["films.xlsx", "films.pkl", "films.bin", "films"])
def test_a_server_refuses_what_build_does(name, folder, opened):
    (folder / name).write_bytes(b"PK\x03\x04 no index")
    with pytest.raises(ItemSetError, match=r"unknown suffix .*use one of .txt|a pickle can run any code"):
        opened(f"{folder}/{name}")


def test_a_file_that_is_replaced_before_it_is_built_leaves_no_index(folder, opened, monkeypatch):
    path, write_index = folder / "films.txt", build.write_index

    def replaced(*given):
        path.write_text("Another film\n")
        return write_index(*given)

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_index", replaced)
        with pytest.raises(ItemSetError, match=r"films.txt was changed while it was read: start again"):
            opened(path)
    assert not list((folder / "cache").rglob("*.itemset"))
    path.write_text("".join(f"{title}\n" for title in TITLES))
    assert len(opened(path)) == 3


def test_what_was_taken_is_said(folder, opened, capsys):
    (folder / "shop.csv").write_text("SKU;Name;Price;Sold\n1;Kite;3,5;yes\n2;Ball;4;no\n")
    opened(f"{folder}/shop.csv?attribute=Price&attribute=Sold")
    said = capsys.readouterr().err
    columns = "column=Name&key=SKU&attribute=Price&attribute=Sold"
    assert f"{columns}, separated by semicolons, a header, quotes as csv, utf-8" in said
    assert "; attributes Price (string), Sold (string)" in said
    assert "such as 'Ball' of " in said
    opened(f"{folder}/films.csv?key=")
    assert "no column has the keys, row numbers are the keys" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["column=Name", "column=Name&key=SKU", "column=Name&key=", "delimiter=%3B"])
def test_the_way_to_an_attribute_keeps_what_was_given(given, folder, opened, capsys):
    (folder / "shop.csv").write_text("SKU;Name;Price\n1;Kite;3\n2;Ball;4\n")
    opened(f"{folder}/shop.csv?{given}")
    (way,) = re.findall(r"filter by: films=(\S+) \(it has", capsys.readouterr().err)
    assert way.startswith(f"{folder}/shop.csv?{given}&attribute=")
    assert len(opened(way).attribute_schema) == 1


@pytest.mark.parametrize(
    ("rows", "word"), [("7,Kite\n7,Ball\n", "7"), ("A,Kite\nB,Ball\nA,Boat\n", "'A'"), ("1,x\n1,y\n1,z\n2,x\n", "1")]
)
def test_a_key_of_different_items_is_refused_unless_it_is_meant(rows, word, folder, opened, capsys):
    path = folder / "double.csv"
    path.write_text("sku,name\n" + rows)
    with pytest.raises(ItemSetError, match=f"keys in column 'sku' are those of different items .1., such as {word} of"):
        opened(f"{path}")
    assert len(opened(f"{path}?keys_repeat=yes").keys) == rows.count("\n")
    assert "keys_repeat=yes" in capsys.readouterr().err
    path.write_text("sku,name\n7,Kite\n7,Kite\n8,Kite\n")  # an item twice, and one with two keys
    assert len(opened(f"{path}")) == 1
