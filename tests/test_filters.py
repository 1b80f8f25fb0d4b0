"""Filters against DuckDB's answer to the same condition, over every type and missing values; refusals."""

from __future__ import annotations

import datetime
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import itemset
from itemset import ItemSetError
from itemset.select import filters
from itemset.select.filters import leaves, passing
from itemset.trie import attributes as attribute_columns

ROWS = 400
WORDS = ["DE", "AT", "CH", "de", "", "Ä", "D", "日本", "a'b", 'a"b']
DAYS = [f"2026-11-{day:02}" for day in range(1, 20)]
TIMES = ["2026-11-03T12:00:00", "2026-11-03T13:00:00", "2026-11-04T00:00:00", "2026-11-05T01:02:03.004005"]
INTEGERS, FLOATS = ("small", "count", "huge"), ("single", "price")
MOMENTS = ("day", "second", "millisecond", "moment", "zoned")
COMPARED = {"$eq": "=", "$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}


def given_table() -> pa.Table:
    random = np.random.default_rng(9)

    def column(values: list[Any], kind: Any) -> pa.Array:
        missing = random.random(ROWS) < 0.2
        return pa.array([None if gone else value for value, gone in zip(values, missing, strict=True)], kind)

    def times(kind: Any) -> pa.Array:
        values = [datetime.datetime.fromisoformat(text) for text in random.choice(TIMES, ROWS)]
        return column(values, pa.timestamp("us")).cast(kind, safe=False)

    words = [random.choice(WORDS, random.integers(0, 4)).tolist() for _ in range(ROWS)]
    return pa.table(
        {
            "small": column(random.integers(-4, 4, ROWS).tolist(), pa.int8()),
            "count": column(random.integers(-4, 4, ROWS).tolist(), pa.int64()),
            "huge": column([int(x) << 61 for x in random.integers(0, 8, ROWS)], pa.uint64()),
            "single": column((random.integers(-4, 4, ROWS) / 4).tolist(), pa.float32()),
            "price": column((random.integers(-9, 9, ROWS) / 2).tolist(), pa.float64()),
            "in_stock": column((random.random(ROWS) < 0.5).tolist(), pa.bool_()),
            "region": column(random.choice(WORDS, ROWS).tolist(), pa.string()),
            "day": column([datetime.date.fromisoformat(day) for day in random.choice(DAYS, ROWS)], pa.date32()),
            "second": times(pa.timestamp("s")),
            "millisecond": times(pa.timestamp("ms")),
            "moment": times(pa.timestamp("ns")),
            "zoned": times(pa.timestamp("us", tz="Asia/Tokyo")),
            "tags": column(words, pa.list_(pa.string())),
        }
    )


TABLE = given_table()
FOR_DUCKDB = TABLE.set_column(
    TABLE.column_names.index("zoned"), "zoned", TABLE.column("zoned").cast(pa.timestamp("us", tz="UTC")).cast(
        pa.timestamp("us")
    )
)  # fmt: skip


@pytest.fixture(scope="module", params=["dictionaries", "strings"])
def stored(request):
    """The table as an index file has it, in batches that cut bytes of bits; strings as numbers, or as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attribute_columns, "BATCH_ROWS", 77)
        patch.setattr(attribute_columns, "MAX_DICTIONARY", 100 if request.param == "dictionaries" else 2)
        made = itemset.build([[i] for i in range(ROWS)], attributes=TABLE)
        yield itemset.from_bytes(made.to_bytes()).attributes


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as connection:
        connection.register("t", FOR_DUCKDB.append_column("row", pa.array(range(ROWS))))
        yield connection


def values_of(name: str) -> st.SearchStrategy[Any]:
    if name in INTEGERS + FLOATS:
        whole = st.integers(-5, 5) | st.sampled_from([2**61, 3 * 2**61, 2**63, 2**64, -(2**64), 127, 128, 2**31])
        return whole if name == "huge" else whole | st.integers(-20, 20).map(lambda n: n / 4)
    if name == "in_stock":
        return st.booleans()
    if name in MOMENTS:
        zoned = [f"{text[:19]}Z" for text in TIMES] + ["2026-11-03T14:00:00+02:00", "1000-01-01", "9999-12-31"]
        return st.sampled_from(DAYS + TIMES + zoned)
    return st.sampled_from([*WORDS, "nobody's"])


@st.composite
def conditions(draw: Any, name: str, depth: int = 0) -> Any:
    """An operator object of an attribute."""
    value = values_of(name)
    operators: dict[str, st.SearchStrategy[Any]] = {
        "$eq": value,
        "$ne": value,
        "$in": st.lists(value, max_size=7) | st.lists(value, min_size=40, max_size=50),
        "$nin": st.lists(value, max_size=7),
        "$exists": st.booleans(),
    }
    if name != "in_stock":
        operators |= dict.fromkeys(("$gt", "$gte", "$lt", "$lte"), value)
    if depth < 2:
        operators["$not"] = conditions(name, depth + 1)
    chosen = draw(st.lists(st.sampled_from(sorted(operators)), min_size=1, max_size=3, unique=True))
    return {operator: draw(operators[operator]) for operator in chosen}


@st.composite
def entries(draw: Any) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(TABLE.column_names), min_size=0, max_size=3, unique=True))
    return {name: draw(values_of(name) | conditions(name)) for name in names}


def queries() -> st.SearchStrategy[dict[str, Any]]:
    def joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        return st.fixed_dictionaries({}, optional={"$and": several, "$or": several, "$not": inner})

    return st.recursive(entries(), joined, max_leaves=6)


def literal(name: str, value: Any) -> str:
    if isinstance(value, str):
        if name not in MOMENTS:
            return "'" + value.replace("'", "''") + "'"
        moment = datetime.datetime.fromisoformat(value)
        moment = moment.astimezone(datetime.UTC).replace(tzinfo=None) if moment.tzinfo else moment
        return f"TIMESTAMP '{moment.isoformat(' ')}'"
    if name in FLOATS:
        return f"CAST({float(value)!r} AS {'FLOAT' if name == 'single' else 'DOUBLE'})"
    return str(value)


def sql(query: dict[str, Any]) -> str:
    """The condition in SQL, true or false for every row."""
    parts = ["TRUE"]
    for name, value in query.items():
        if name == "$not":
            parts.append(f"NOT ({sql(value)})")
        elif name in ("$and", "$or"):
            parts.append("(" + f" {name[1:]} ".join(f"({sql(part)})" for part in value) + ")")
        else:
            parts.append(sql_condition(name, value if isinstance(value, dict) else {"$eq": value}))
    return " AND ".join(parts)


def sql_condition(name: str, operators: dict[str, Any]) -> str:
    parts = []
    for operator, value in operators.items():
        if operator == "$not":
            parts.append(f"NOT ({sql_condition(name, value)})")
        elif operator == "$exists":
            parts.append(f"{name} IS {'NOT ' if value else ''}NULL")
        elif operator in ("$in", "$nin"):
            any_of = " OR ".join(sql_compared(name, "=", one) for one in value) or "FALSE"
            parts.append(f"({any_of})" if operator == "$in" else f"NOT ({any_of})")
        elif operator == "$ne":
            parts.append(f"NOT {sql_compared(name, '=', value)}")
        else:
            parts.append(sql_compared(name, COMPARED[operator], value))
    return " AND ".join(parts)


def sql_compared(name: str, sign: str, value: Any) -> str:
    if name == "tags":
        return f"COALESCE(len(list_filter(tags, lambda x: x {sign} {literal(name, value)})) > 0, FALSE)"
    column = f"CAST({name} AS TIMESTAMP)" if name in MOMENTS else name
    return f"COALESCE({column} {sign} {literal(name, value)}, FALSE)"


@settings(max_examples=200, deadline=None)
@given(query=queries())
@pytest.mark.slow
def test_random_queries_against_duckdb(stored, database, query):
    wanted = database.sql(f"SELECT {sql(query)} AS passes FROM t ORDER BY row").fetchnumpy()["passes"]
    for attributes in (stored, TABLE):
        found = passing(query, attributes)
        assert found.dtype == np.bool_
        assert found.tolist() == wanted.tolist()


def test_slices_and_tables_without_columns(stored):
    query = {"region": {"$in": WORDS[:3]}, "price": {"$gt": 0}, "tags": {"$ne": "DE"}}
    whole = passing(query, stored)
    assert 0 < whole.sum() < ROWS
    for start, length in ((3, 100), (70, 200), (399, 1), (0, 0)):
        assert passing(query, stored.slice(start, length)).tolist() == whole[start : start + length].tolist()
    none = itemset.build([[1], [2], [1]]).attributes
    assert passing({}, none).tolist() == [True] * 3
    with pytest.raises(ItemSetError, match='there is no attribute "region": the set has none'):
        passing({"region": "DE"}, none)


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int32(), pa.int64(), pa.uint64()])
def test_long_lists_of_integers_up_to_their_types_limits(kind):
    limits = np.iinfo(str(kind))
    low, high = int(limits.min), int(limits.max)
    here = [low, low + 1, 0, 7, high - 1, high, None]
    table = pa.table({"x": pa.array(here, kind)})
    for values in (range(low, low + 50), range(high - 50, high + 1), range(low, high + 1, high // 40), range(-9, 99)):
        assert passing({"x": {"$in": list(values)}}, table).tolist() == [x in values for x in here]
        assert passing({"x": {"$nin": list(values)}}, table).tolist() == [x not in values for x in here]


@pytest.mark.parametrize(("operator", "passes"), [("$eq", [False, True, False]), ("$gt", [False, False, True])])
def test_nanoseconds_count(operator, passes):
    table = pa.table({"t": pa.array([123_456_000, 123_456_789, 123_456_790], pa.timestamp("ns"))})
    for moment in ("1970-01-01T00:00:00.123456789", "1970-01-01T01:00:00.123456789+01:00"):
        assert passing({"t": {operator: moment}}, table).tolist() == passes


def test_nan_passes_what_a_missing_value_does():
    table = pa.table({"x": pa.array([1.0, float("nan")])})
    for query, wanted in (
        ({"x": {"$gte": -1e300}}, [True, False]),
        ({"x": {"$ne": 1}}, [False, True]),
        ({"x": {"$exists": True}}, [True, True]),
    ):
        assert passing(query, table).tolist() == wanted, query


def test_what_each_condition_leaves():
    table = pa.table({"region": ["DE", "AT", "DE"], "in_stock": [True, None, False], "x": [1, 2, 3]})
    query = {"region": {"$in": ["CH"]}, "$and": [{"in_stock": True}, {"x": {"$gt": 1, "$lt": 3}}], "$or": [{"x": 9}]}
    assert leaves(query, table) == (
        '"region" $in ["CH"] leaves 0, "in_stock" $eq true leaves 1, "x" $gt 1 leaves 2, "x" $lt 3 leaves 2, '
        '$or [{"x": 9}] leaves 0'
    )
    assert leaves({}, table) == ""
    shown = leaves({"region": {"$nin": [f"region {i}" for i in range(100)]}}, table)
    assert shown.endswith('"region 3", "region ... leaves 3')


def nested(depth: int) -> dict[str, Any]:
    return {"$not": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ([], r'a filter is an object such as {"region": "DE"}, not \[\]'),
        ("region", 'a filter is an object such as .*, not "region"'),
        ({"x": 1}, r'there is no attribute "x": the set has "small" \(integer\), .*, "tags" \(list of strings\)'),
        ({3: 1}, "there is no attribute 3: the set has"),
        ({"$nor": []}, r'"\$nor" is no filter: use \$and, \$or, \$not'),
        ({"$eq": 1}, r'"\$eq" is no filter: it stands after an attribute'),
        ({"$or": []}, r"\$or takes a list of filters, not \[\]"),
        ({"$and": {"small": 1}}, r"\$and takes a list of filters"),
        ({"$or": [1]}, "a filter is an object such as .*, not 1"),
        ({"region": {}}, r'"region" \(string\) has an empty condition: give an operator'),
        ({"region": ["DE"]}, r'"region" \(string\) was given a list: write {"\$in": \["DE"\]}'),
        ({"region": {"$regex": "D"}}, r'"region" \(string\) was given the operator "\$regex": use one of \$eq,'),
        ({"region": {"name": "D"}}, r'"region" \(string\) was given the operator "name"'),
        ({"region": {"$not": "DE"}}, r'\$not of "region" \(string\) takes an object'),
        ({"region": {"$in": "DE"}}, r'\$in of "region" .* takes a list, not "DE"'),
        ({"region": {"$exists": 1}}, r'\$exists of "region" .* takes true or false, not 1'),
        ({"region": 5}, r'\$eq of "region" \(string\) was given 5: give a string'),
        ({"region": None}, r'\$eq of "region" \(string\) was given null: give a string'),
        ({"region": "\ud800"}, r'was given "\\ud800": give a string'),
        ({"\ud800": 1}, r'there is no attribute "\\ud800": the set has'),
        ({"tags": {"$in": ["DE", 5]}}, r'\$in of "tags" \(list of strings\) was given 5: give a string'),
        ({"in_stock": 1}, r'\$eq of "in_stock" \(bool\) was given 1: give true or false'),
        ({"in_stock": {"$gt": True}}, r'"in_stock" \(bool\) takes \$eq, \$ne, \$in, \$nin and \$exists, not \$gt'),
        ({"small": True}, r'\$eq of "small" \(integer\) was given true: give a number'),
        ({"count": {"$lt": "7"}}, r'\$lt of "count" \(integer\) was given "7": give a number'),
        ({"price": float("nan")}, r'\$eq of "price" \(float\) was given NaN: give a number'),
        ({"price": 10**400}, r'"price" \(float\) was given .*: give a number'),
        ({"day": {"$gt": "soon"}}, r'\$gt of "day" \(date\) was given "soon": give an ISO date such as'),
        ({"zoned": {"$gt": 5}}, r'"zoned" \(timestamp\) was given 5: give an ISO time such as'),
        ({"region": {"$in": ["DE"] * 10_001}}, "more than 10,000 values, the limit of all its conditions together"),
        ({"$or": [{"region": {"$in": ["DE"] * 5_001}}, {"region": {"$nin": ["FR"] * 5_000}}]}, "more than 10,000 val"),
        ({"region": {"$ne": "A" * 500_000}}, "more than 500,000 characters"),
        ({"region": {"$in": [f"{i:0>100}" for i in range(9_999)]}}, "more than 500,000 characters"),
        ({"A" * 500_001: 1}, "more than 500,000 characters"),
        ({"price": {"$in": [10**4_000] * 1_000}}, "more than 500,000 characters"),
        ({"region": {"$in": [[[]] * 3_000] * 3}}, "more than 3,200 objects and lists"),
        ({"$or": [{"small": 1}] * 101}, "more than 100 conditions"),
        ({"$or": [{}] * 101}, "more than 100 conditions"),
        (nested(17), "nested more than 16 deep"),
    ],
)
def test_a_bad_filter_is_refused(query: Any, message: str) -> None:
    for ask in (passing, leaves):
        with pytest.raises(ItemSetError, match=message):
            ask(query, TABLE)


def test_the_limits_themselves_pass() -> None:
    assert passing(nested(filters.MAX_DEPTH), TABLE).all()
    assert not passing({"$and": [{"small": 100}] * filters.MAX_CONDITIONS}, TABLE).any()
    assert not passing({"region": {"$in": ["x"] * filters.MAX_VALUES}}, TABLE).any()
