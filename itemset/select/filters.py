"""Filters: which rows of the attributes pass a query in the language of MongoDB, Pinecone and Chroma.

{"region": {"$in": ["DE", "AT"]}, "in_stock": true, "released": {"$gte": "2026-11-14"}}

docs/library.md says what it may hold, and what passes.
"""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset.errors import ItemSetError
from itemset.trie.attributes import BATCH_ROWS, is_list, kind_of
from itemset.trie.keys import are_among, bools, valid

MAX_DEPTH = 16  # of a query's objects
MAX_CONDITIONS = 100
MAX_VALUES = 10_000  # of a query, in all its conditions
MAX_CHARACTERS = 500_000  # of its names, texts and digits
_MAX_PARTS = 2 * MAX_CONDITIONS * MAX_DEPTH  # objects and lists: a query within the limits above has fewer
_THREADS = 4
_FEW = 32  # values of a list: to compare with each of them is faster than Arrow's hash table
_SHOWN = 60  # characters of a value in a message
_NAMED = 20  # attributes in a message
_COMPARED = {"$gt": "greater", "$gte": "greater_equal", "$lt": "less", "$lte": "less_equal"}
_OPERATORS = ("$eq", "$ne", *_COMPARED, "$in", "$nin", "$exists", "$not")
_JOINED = ("$and", "$or", "$not")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EXPECTED: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "integer": (int | float, "a number"),
    "float": (int | float, "a number"),
    "string": (str, "a string"),
    "date": (str, 'an ISO date such as "2026-11-14"'),
    "timestamp": (str, 'an ISO time such as "2026-11-14T12:00:00Z"'),
}

Rows = NDArray[np.bool_]
Test = Callable[[pa.RecordBatch], Rows]
Compare = Callable[[pa.Array], Rows]
Condition = tuple[str, Test]  # what a message calls it, and which rows of a batch pass


def passing(query: Mapping[str, Any], attributes: pa.Table) -> Rows:
    """Return which rows pass the query: [rows].

    Raises ItemSetError, which names the attribute and its type: one that is not there (then those that are), an
    operator or a value that does not go with it, a malformed query, or one over the limits.
    """
    parts = _each(_all(_conditions(query, attributes)), attributes)
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


def leaves(query: Mapping[str, Any], attributes: pa.Table) -> str:
    """Say how many rows each condition of the query leaves on its own. Raises ItemSetError as `passing` does."""
    return ", ".join(
        f"{name} leaves {sum(map(np.count_nonzero, _each(test, attributes))):,}"
        for name, test in _conditions(query, attributes)
    )


def _conditions(query: Any, attributes: pa.Table) -> list[Condition]:
    check_size(query)
    return _Reader(attributes.schema).query(query, 0)


def check_size(query: Any) -> None:
    """Raise ItemSetError for a query over the limits. Reads no more of it than they allow."""
    values = parts = characters = 0
    waiting = [query]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Mapping | list | tuple):
            values += 1
            characters += len(node) if isinstance(node, str) else digits(node)
        elif values + len(waiting) + len(node) <= _MAX_PARTS + MAX_VALUES:
            parts += 1
            waiting.extend(node.values() if isinstance(node, Mapping) else node)
            names = node if isinstance(node, Mapping) else ()
            characters += sum(len(name) for name in names if isinstance(name, str))
        else:
            values += len(node)
        if values > MAX_VALUES:
            what = f"{MAX_VALUES:,} values"
        elif characters > MAX_CHARACTERS:
            what = f"{MAX_CHARACTERS:,} characters"
        elif parts > _MAX_PARTS:
            what = f"{_MAX_PARTS:,} objects and lists"
        else:
            continue
        raise ItemSetError(f"the filter has more than {what}, the limit of all its conditions together: shorten it")


def _each(test: Test, attributes: pa.Table) -> list[Rows]:
    """Return which rows of each batch pass, in a few threads: Arrow and NumPy release the GIL."""
    batches = attributes.to_batches(max_chunksize=BATCH_ROWS)
    threads = min(_THREADS, len(os.sched_getaffinity(0)), len(batches))
    if threads < 2:
        return [test(batch) for batch in batches]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(test, batches))


class _Reader:
    """Turns a query into conditions. Raises ItemSetError for what is none."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._conditions = 0

    def query(self, query: Any, depth: int) -> list[Condition]:
        """Return conditions that must all hold."""
        if not isinstance(query, Mapping):
            raise ItemSetError(f'a filter is an object such as {{"region": "DE"}}, not {_shown(query)}')
        self._check_depth(depth)
        if not query:  # which takes a pass over the rows too
            self._count()
        return list(chain.from_iterable(self._entry(name, value, depth + 1) for name, value in query.items()))

    def _entry(self, name: Any, value: Any, depth: int) -> list[Condition]:
        if name == "$not":
            return [(f"$not {_shown(value)}", _not(_all(self.query(value, depth))))]
        if name in _JOINED:
            if not isinstance(value, list | tuple) or not value:
                raise ItemSetError(f"{name} takes a list of filters, not {_shown(value)}")
            parts = [self.query(part, depth) for part in value]
            if name == "$and":
                return list(chain.from_iterable(parts))
            tests = [_all(part) for part in parts]
            either: Test = lambda batch: functools.reduce(np.bitwise_or, (test(batch) for test in tests))  # noqa: E731
            return [(f"$or {_shown(value)}", either)]
        if isinstance(name, str) and name.startswith("$"):
            mend = "it stands after an attribute" if name in _OPERATORS else f"use {', '.join(_JOINED)}"
            raise ItemSetError(f'{_shown(name)} is no filter: {mend}, as in {{"region": {{"$eq": "DE"}}}}')
        if name not in self._schema.names:  # Arrow's own search raises for what is no text
            raise ItemSetError(f"there is no attribute {_shown(name)}: {known([self._schema])}")
        index = self._schema.names.index(name)
        if isinstance(value, list | tuple):
            raise ItemSetError(f'{self._named(index)} was given a list: write {{"$in": {_shown(value)}}}')
        return self._operators(index, value if isinstance(value, Mapping) else {"$eq": value}, depth)

    def _operators(self, index: int, operators: Mapping[str, Any], depth: int) -> list[Condition]:
        self._check_depth(depth)
        if not operators:
            raise ItemSetError(f"{self._named(index)} has an empty condition: give an operator such as $eq")
        return [self._operator(index, operator, value, depth) for operator, value in operators.items()]

    def _operator(self, index: int, operator: str, value: Any, depth: int) -> Condition:
        self._count()
        named, name = self._named(index), f"{_shown(self._schema.field(index).name)} {operator} {_shown(value)}"
        if operator == "$not":
            if not isinstance(value, Mapping):
                raise ItemSetError(f"$not of {named} takes an object of operators, not {_shown(value)}")
            return name, _not(_all(self._operators(index, value, depth + 1)))
        if operator not in _OPERATORS:
            allowed = ", ".join(_OPERATORS)
            raise ItemSetError(f"{named} was given the operator {_shown(operator)}: use one of {allowed}")
        if operator == "$exists":
            if not isinstance(value, bool):
                raise ItemSetError(f"$exists of {named} takes true or false, not {_shown(value)}")
            return name, lambda batch: valid(batch.column(index)) == value
        if operator in ("$in", "$nin") and not isinstance(value, list | tuple):
            raise ItemSetError(f"{operator} of {named} takes a list, not {_shown(value)}")
        positive = {"$ne": "$eq", "$nin": "$in"}.get(operator, operator)
        compare = self._comparison(index, positive, value if positive == "$in" else [value])
        test: Test = lambda batch: _where(batch.column(index), compare)  # noqa: E731
        return name, test if positive == operator else _not(test)

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ItemSetError(f"the filter is nested more than {MAX_DEPTH} deep: write it flatter")

    def _count(self) -> None:
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            raise ItemSetError(f"the filter has more than {MAX_CONDITIONS} conditions: use $in, or fewer")

    def _comparison(self, index: int, operator: str, values: Iterable[Any]) -> Compare:
        named, kind = self._named(index), self._schema.field(index).type
        while is_list(kind) or pa.types.is_dictionary(kind):
            kind = kind.value_type
        label = kind_of(kind)
        if label == "bool" and operator in _COMPARED:
            raise ItemSetError(f"{named} takes $eq, $ne, $in, $nin and $exists, not {operator}")
        if label not in _EXPECTED:
            raise ItemSetError(f"{named} is of a type that filters do not know: cast it")
        parsed, (_, expected) = [], _EXPECTED[label]
        for value in values:
            try:
                parsed.append(_parse(value, label, kind))
            except (TypeError, ValueError, OverflowError):
                raise ItemSetError(f"{operator} of {named} was given {_shown(value)}: give {expected}") from None
        if label in ("integer", "date", "timestamp"):
            return _compare_integers(operator, parsed, kind)
        return _one_of(parsed, kind) if operator in ("$eq", "$in") else _compared(operator, parsed[0], kind)

    def _named(self, index: int) -> str:
        field = self._schema.field(index)
        return f"{_shown(field.name)} ({kind_of(field.type)})"


def known(schemas: Iterable[pa.Schema]) -> str:
    """Say which attributes there are, and of which types."""
    each = [*dict.fromkeys(f"{_shown(field.name)} ({kind_of(field.type)})" for schema in schemas for field in schema)]
    if not each:
        return "the set has none: build it with --attribute NAME, or serve FILE?attribute=NAME"
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return f"the set has {', '.join(each[:_NAMED])}{more}"


def _parse(value: Any, label: str, kind: Any) -> Any:
    """Return a value as it is compared. Dates and times become fractions: units of their type since 1970."""
    if not isinstance(value, _EXPECTED[label][0]) or isinstance(value, bool) != (label == "bool"):
        raise TypeError
    if label in ("integer", "float"):
        if not math.isfinite(value):
            raise ValueError
        return float(value) if label == "float" else value
    if label in ("date", "timestamp"):
        moment = datetime.fromisoformat(value)
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
        seconds = Fraction(since.days * 86_400 + since.seconds) + Fraction(since.microseconds, 10**6)
        if finer := re.search(r"(?<=[.,]\d{6})\d+", value):  # than the microseconds of Python's times
            seconds += Fraction(int(finer[0]), 10 ** (6 + len(finer[0])))
        return seconds / 86_400 if label == "date" else seconds * PER_SECOND[kind.unit]
    if label == "string":
        value.encode()  # half of a surrogate pair is a ValueError
    return value


def _compare_integers(operator: str, values: list[Any], kind: Any) -> Compare:
    """Compare integers, and what is stored as integers, with numbers of any size and fraction."""
    number = kind if pa.types.is_integer(kind) else pa.int32() if pa.types.is_date32(kind) else pa.int64()
    limits = np.iinfo(str(number))
    low, high, value = int(limits.min), int(limits.max), values[0] if values else 0
    if operator in ("$eq", "$in"):
        whole = [int(value) for value in values if value == math.floor(value) and low <= value <= high]
        compare = _one_of(whole, number)
    elif operator in ("$gt", "$gte"):
        bound = max(low, math.floor(value) + 1 if operator == "$gt" else math.ceil(value))
        compare = _compared("$gte", bound, number) if bound <= high else _one_of([], number)
    else:
        bound = min(high, math.ceil(value) - 1 if operator == "$lt" else math.floor(value))
        compare = _compared("$lte", bound, number) if bound >= low else _one_of([], number)
    return lambda array: compare(array.view(number))


def _compared(operator: str, value: Any, kind: Any) -> Compare:
    scalar = pa.scalar(value, kind)
    return lambda array: bools(pc.call_function(_COMPARED[operator], [array, scalar]))


def _one_of(values: list[Any], kind: Any) -> Compare:
    if not 0 < len(values) <= _FEW:
        given = pa.array(values, kind)
        return lambda array: are_among(array, given)
    scalars = [pa.scalar(value, kind) for value in values]
    return lambda array: bools(functools.reduce(pc.or_, (pc.equal(array, scalar) for scalar in scalars)))


def _where(array: pa.Array, compare: Compare) -> Rows:
    """Return where a comparison of single values holds: of a list, for one of its values."""
    if is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        ends = np.cumsum(lengths)
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(_where(array.flatten(), compare))))
        return before[ends] > before[ends - lengths]
    if pa.types.is_dictionary(array.type):  # compares the dictionary, and takes each row's result by its number
        if not len(array.dictionary):
            return np.zeros(len(array), np.bool_)
        results = pa.array(compare(array.dictionary).view(np.uint8))
        results = pc.take(results, array.indices, boundscheck=False)
        return np.frombuffer(results.buffers()[1], np.bool_, len(results), results.offset) & valid(results)
    return compare(array)


def _all(conditions: list[Condition]) -> Test:
    tests = [test for _, test in conditions] or [lambda batch: np.ones(len(batch), np.bool_)]
    return lambda batch: functools.reduce(np.bitwise_and, (test(batch) for test in tests))


def _not(test: Test) -> Test:
    return lambda batch: ~test(batch)


def digits(value: Any) -> int:
    """Return about how long a number is written, 0 if it is none."""
    return value.bit_length() // 3 if isinstance(value, int) else 20 * isinstance(value, float)


def _shown(value: Any) -> str:
    """Return the value as JSON, cut to a message's length, and written no further."""
    text = ""
    try:
        for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            text += part
            if len(text) > _SHOWN:
                break
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair, which no answer can carry
