"""A page about an index: one HTML file that stands alone, for people who want to see what a model will walk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from itemset import charts, report
from itemset.item_set import ItemSet
from itemset.shape import Shape, shape_of
from itemset.trie.attributes import is_list, kind_of

PARTS = 8  # of a page, for a bar
SAMPLES = 20  # items that are shown
COUNTED = 200_000  # rows whose attributes are counted, if there are more
COMPARED = 20_000  # items of each set that are looked up in the other
_LEVELS = 24  # that charts have room for
_SEED = 0

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6b7a; --bar: #3f78b5; --back: #fff; --rule: #dde3e8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --soft: #9aa8b5; --bar: #6ba3dd; --back: #14191f; --rule: #2c363f; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 46rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; } p { color: var(--soft); margin: .3rem 0; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; }
td, th { border-bottom: 1px solid var(--rule); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.t { overflow-wrap: anywhere; }
svg { width: 100%; margin: .4rem 0; } text { font-size: 12px; fill: var(--ink); } text.small { font-size: 11px;
  fill: var(--soft); } .bar { fill: var(--bar); } polyline { fill: none; stroke: var(--bar); stroke-width: 2; }
polyline.even { stroke: var(--rule); stroke-dasharray: 4; }
"""


def page_of(
    s: ItemSet,
    name: str,
    *,
    before: ItemSet | None = None,
    name_before: str = "",
    tokenizer: Any = None,
    on_part: Callable[[], object] = lambda: None,
) -> str:
    """Return the page as HTML.

    name: of the set. before: another set, to be compared with; name_before: its name. tokenizer: the one of the set, if
    samples are to be shown as text. on_part: called after each of its PARTS. Raises ItemSetError if the attributes are
    damaged.
    """
    shape = functools.cache(lambda: shape_of(s))
    sections: list[tuple[str, Callable[[], str]]] = [
        ("What it holds", lambda: _table(report.facts(s))),
        (f"Since {name_before}", lambda: "" if before is None else _compared(s, before, tokenizer)),
        ("Size", lambda: _sizes(s)),
        ("Levels", lambda: _levels(s)),
        ("What a model chooses", lambda: _choices(s, shape())),
        ("How items are spread", lambda: _spread(shape())),
        ("Attributes", lambda: _attributes(s)),
        ("Some items", lambda: _samples(s, tokenizer)),
    ]
    body = ""
    for title, made in sections:
        if text := made():
            body += f"<section><h2>{escape(title)}</h2>{text}</section>\n"
        on_part()
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(name)}</title>'
    head += f"<style>{_STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body><h1>{escape(name)}</h1>\n{body}</body></html>\n"


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table. Under a head, numbers are set to the right."""

    def kind_of_cell(text: str) -> str:
        return "n" if head and text.replace(",", "").replace(".", "").isdigit() else "t" if len(text) > 24 else ""

    def cells(row: Sequence[str], tag: str) -> str:
        parts = (f'<{tag} class="{kind_of_cell(one)}">{escape(one)}</{tag}>' for one in row)
        return f"<tr>{''.join(parts)}</tr>"

    return f"<table>{cells(head, 'th') if head else ''}{''.join(cells(row, 'td') for row in rows)}</table>"


def _note(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _sizes(s: ItemSet) -> str:
    static, least, items = report.static_bytes(s), report.least_bytes(s), len(s)
    costs = [("this index", float(s.nbytes)), ("information limit", least)]
    if static is not None:
        costs.insert(1, ("STATIC's layout", float(static)))
    rows = [(name, size, f"{size / items:.2f} bytes an item") for name, size in costs]
    parts = [(name, float(size), f"{size:,} bytes") for name, size in s.sections.items()]
    return (
        charts.bars(rows)
        + _note("Keys and attributes not counted. No index of such sets can be smaller than the limit on average.")
        + charts.bars(parts)
    )


def _levels(s: ItemSet) -> str:
    levels = report.levels(s)
    rows = [
        (f"{i}", f"{one.nodes:,}", f"{one.edges:,}", f"{one.edges / max(one.nodes, 1):.1f}", f"{one.tail_tokens:,}")
        for i, one in enumerate(levels[:_LEVELS])
    ]
    head = ("tokens before", "prefixes that items share", "children", "children each", "tokens of tails")
    rest = f" The first {_LEVELS} of {len(levels)} levels." if len(levels) > _LEVELS else ""
    return _table(rows, head) + _note(f"A tail is what is left of an item that stands alone.{rest}")


def _choices(s: ItemSet, shape: Shape) -> str:
    steps = shape.steps[:_LEVELS]
    labels = [f"{k}" for k in range(len(steps))]
    chosen = [step.chosen / len(s) for step in steps]
    alone = [step.alone / len(s) for step in steps]
    lengths = f"{s.longest}" if s.shortest == s.longest else f"{s.shortest} to {s.longest}"
    return (
        _note(
            f"Of an item's tokens ({lengths}, and an end) a model chooses {shape.choices:.2f} on average; the others "
            "are forced, and forced drafts propose them. Items for which a model chooses, after so many tokens:"
        )
        + charts.columns(chosen, labels, [f"{one:.1%}" for one in chosen], "tokens before")
        + _note("Items that are certain after so many tokens, all that is left being forced:")
        + charts.columns(alone, labels, [f"{one:.1%}" for one in alone], "tokens before")
        + charts.bars([(f"after {k}", step.widest, f"{step.widest:,} tokens") for k, step in enumerate(steps)])
        + _note(
            f"The widest choice after so many tokens: how many may follow. {shape.prefixes:,} items are the beginning "
            "of another."
        )
    )


def _spread(shape: Shape) -> str:
    share = np.cumsum(shape.by_first) / shape.by_first.sum()
    places = np.unique(np.linspace(0, len(share) - 1, 101).astype(int))
    points = [(0.0, 0.0), *((float(place + 1) / len(share), float(share[place])) for place in places)]
    most = max(1, round(len(share) / 100))
    return _note(
        f"{len(share):,} tokens begin an item. The {most:,} most used begin {share[most - 1]:.1%} of all items, "
        f"the first alone {share[0]:.1%}. Evenly spread, the line would be the diagonal."
    ) + charts.curve(points, "first tokens, the most used first", "items")


def _attributes(s: ItemSet) -> str:
    table = s.attributes
    if not table.num_columns:
        return ""
    drawn, note = None, ""
    if table.num_rows > COUNTED:
        drawn = np.unique(np.random.default_rng(_SEED).integers(0, table.num_rows, COUNTED))
        note = _note(f"Distinct and frequent values are those of {len(drawn):,} rows drawn at random.")
    rows = [
        (name, kind_of(column.type), f"{column.null_count:,}", *_values(column, drawn))
        for name, column in _named(table)
    ]
    return _table(rows, ("attribute", "type", "missing", "distinct", "values")) + note


def _named(table: pa.Table) -> Iterable[tuple[str, pa.ChunkedArray]]:
    return zip(table.column_names, table.columns, strict=True)


def _values(column: pa.ChunkedArray, drawn: NDArray[np.int64] | None) -> tuple[str, str]:
    """Return how many distinct values there are, and the extremes, or the most frequent ones. drawn: rows to count."""
    ordered = pa.types.is_floating(column.type) or pa.types.is_integer(column.type) or pa.types.is_temporal(column.type)
    ends = pc.min_max(column).as_py() if ordered else {}
    if drawn is not None:
        column = column.take(pa.array(drawn))
    if is_list(column.type):
        column = pa.chunked_array([pc.list_flatten(column).combine_chunks()])
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    distinct = f"{'' if drawn is None else 'at least '}{pc.count_distinct(column).as_py():,}"
    if ordered:
        return distinct, f"{ends['min']} to {ends['max']}"
    counts = pc.value_counts(column.drop_null()).to_pylist()
    often = sorted(counts, key=lambda one: (-one["counts"], str(one["values"])))[:5]
    return distinct, ", ".join(f"{str(one['values'])[:40]} ({one['counts']:,})" for one in often)


def _samples(s: ItemSet, tokenizer: Any) -> str:
    keys = _some_keys(s, SAMPLES)
    rows = [_shown(key, tokens, tokenizer) for key, tokens in zip(keys, s.tokens(keys), strict=True)]
    return _table(rows, ("key", "tokens", *([] if tokenizer is None else ["text"])))


def _shown(key: int | str, tokens: list[int], tokenizer: Any) -> tuple[str, ...]:
    text = " ".join(map(str, tokens))
    return (str(key), text, *([] if tokenizer is None else [tokenizer.decode(tokens)]))


def _some_keys(s: ItemSet, count: int) -> list[Any]:
    """Return keys drawn at random, the same each time, or all if there are no more."""
    keys = s.keys
    if len(keys) > count:
        keys = keys.take(pa.array(np.sort(np.random.default_rng(_SEED).choice(len(keys), count, replace=False))))
    found: list[Any] = keys.to_pylist()
    return found


def _compared(s: ItemSet, before: ItemSet, tokenizer: Any) -> str:
    if s.digest == before.digest:
        return _note("The same items.")
    rows = [("items", f"{len(before):,}", f"{len(s):,}"), ("keys", f"{len(before.keys):,}", f"{len(s.keys):,}")]
    parts = [_table(rows, ("", "before", "now"))]
    for title, one, other in (("came", s, before), ("went", before, s)):
        keys = _some_keys(one, COMPARED)
        missing = [
            (key, item)
            for key, item in zip(keys, one.tokens(keys), strict=True)
            if other.find(item) is None or key not in other.keys_of([item])[0]
        ]
        whole = len(keys) == len(one.keys)
        share = len(missing) / len(keys)
        said = f"{len(missing):,} keys {title}" if whole else f"About {share:.1%} of the keys {title}"
        note = "" if whole else f": of {len(keys):,} drawn at random, {len(missing):,}"
        parts.append(_note(f"{said}{note}.") + _table([_shown(*item, tokenizer) for item in missing[:SAMPLES]]))
    return "".join(parts)
