"""The subcommand `report`: a page about an index, one HTML file that stands alone, of what a model will walk."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import itemset
from itemset.building.progress import steps_bar
from itemset.cli import report
from itemset.cli.choice_stats import Shape, shape_of
from itemset.cli.options import Command, output_file, tokenizer_of, unwritable
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.trie.attributes import is_list, kind_of

PARTS = 8  # of a page, for a bar
SAMPLES = 20  # items that are shown
COUNTED = 200_000  # rows whose attributes are counted, if there are more
COMPARED = 20_000  # items of each set that are looked up in the other
_LEVELS = 24  # that charts have room for
_SEED = 0
_WIDTH, _BAR, _LABEL = 640, 22, 170  # of charts
_PLOT, _LEFT, _BOTTOM = 200, 60, 36

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


def add_to(command: Command) -> None:
    """Add the subcommand."""
    sub = command(
        "report",
        write_report,
        "write a page about an index file: sizes, levels, what a model chooses, attributes, some items",
        "itemset report films.itemset --tokenizer DIR -o films.html",
    )
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--compare", metavar="FILE", help="an earlier index file: which items came and went")
    sub.add_argument("--tokenizer", metavar="DIR", help="the tokenizer that the set was built with, to show texts")
    sub.add_argument("-o", "--output", metavar="FILE", required=True, help="the HTML file to write")


def write_report(args: argparse.Namespace) -> None:
    """Write a page about an index."""
    output = output_file(args.output)
    for given in filter(None, (args.file, args.compare)):
        if output.exists() and os.path.exists(given) and output.samefile(given):
            raise ItemSetError(f"{output} is the index itself: give the page another name")
    s = itemset.load(args.file)
    before = itemset.load(args.compare) if args.compare else None
    tokenizer = tokenizer_of(args, s, before)
    with steps_bar("report", PARTS) as done:
        text = page_of(
            s, str(args.file), before=before, name_before=str(args.compare), tokenizer=tokenizer, on_part=done
        )
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(output, error) from error
    report.print_table([("file", f"{output} ({len(text.encode()):,} bytes)")])


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
        _bars(rows)
        + _note("Keys and attributes not counted. No index of such sets can be smaller than the limit on average.")
        + _bars(parts)
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
    chosen = [step.chosen / len(s) for step in steps]
    alone = [step.alone / len(s) for step in steps]
    lengths = f"{s.longest}" if s.shortest == s.longest else f"{s.shortest} to {s.longest}"
    return (
        _note(
            f"Of an item's tokens ({lengths}, and an end) a model chooses {shape.choices:.2f} on average; the others "
            "are forced, and forced drafts propose them. Items for which a model chooses, by tokens so far:"
        )
        + _bars([(f"after {k}", one, f"{one:.1%}") for k, one in enumerate(chosen)])
        + _note("Items that are certain, by tokens so far, all that is left being forced:")
        + _bars([(f"after {k}", one, f"{one:.1%}") for k, one in enumerate(alone)])
        + _bars([(f"after {k}", step.widest, f"{step.widest:,} tokens") for k, step in enumerate(steps)])
        + _note(
            f"The widest choice, by tokens so far: how many may follow. {shape.prefixes:,} items are the beginning "
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
    ) + _curve(points, "first tokens, the most used first", "items")


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


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return horizontal bars. rows: of each its name, its length, not negative, and what is written beside it."""
    longest = max((value for _, value, _ in rows), default=0) or 1
    room = _WIDTH - _LABEL - 130
    parts = []
    for i, (name, value, text) in enumerate(rows):
        y, width = i * _BAR, max(1.0, room * value / longest)
        parts.append(
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y + 4}" width="{width:.1f}" height="{_BAR - 8}" rx="2"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{escape(text)}</text>'
        )
    return _svg(len(rows) * _BAR + 4, "".join(parts))


def _curve(points: Sequence[tuple[float, float]], x_name: str, y_name: str) -> str:
    """Return a line through points whose coordinates are shares, 0 to 1, over the diagonal."""

    def at(x: float, y: float) -> str:
        return f"{_LEFT + x * (_WIDTH - _LEFT - 20):.1f},{_PLOT - y * (_PLOT - 10):.1f}"

    marks = "".join(
        f'<text class="small" x="{at(mark, 0).split(",")[0]}" y="{_PLOT + 14}" text-anchor="middle">{mark:.0%}</text>'
        f'<text class="small" x="{_LEFT - 6}" y="{float(at(0, mark).split(",")[1]) + 4:.1f}" text-anchor="end">'
        f"{mark:.0%}</text>"
        for mark in (0, 0.25, 0.5, 0.75, 1)
    )
    lines = f'<polyline class="even" points="{at(0, 0)} {at(1, 1)}"/>'
    lines += f'<polyline class="line" points="{" ".join(at(*point) for point in points)}"/>'
    below = f'<text class="small" x="{_WIDTH}" y="{_PLOT + 30}" text-anchor="end">{escape(x_name)}</text>'
    side = f'<text class="small" x="{_LEFT + 6}" y="12">{escape(y_name)}</text>'
    return _svg(_PLOT + _BOTTOM, lines + marks + side + below)


def _svg(height: float, inner: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{inner}</svg>'
