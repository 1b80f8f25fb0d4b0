"""The subcommand `report`: a page about an index, one HTML file that stands alone, of what a model will walk."""

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

import itemset
from itemset.cli import report
from itemset.cli.options import Command, output_file, tokenizer_of, unwritable
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.trie.attributes import is_list, kind_of

SAMPLES = 20  # items that are shown
COUNTED = 200_000  # rows whose attributes are counted, if there are more
COMPARED = 20_000  # items of each set that are looked up in the other
_LEVELS = 24  # that charts have room for
_SEED = 0
_WIDTH, _BAR, _LABEL = 640, 22, 170  # of bar charts


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
    text = page_of(s, args.file, before=before, name_before=str(args.compare), tokenizer=tokenizer)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(output, error) from error
    report.print_table([("file", f"{output} ({len(text.encode()):,} bytes)")])


def page_of(
    s: ItemSet, name: str, *, before: ItemSet | None = None, name_before: str = "", tokenizer: Any = None
) -> str:
    """Return the page as HTML, showing a bar on a terminal.

    name: of the set. before: another set, to be compared with; name_before: its name. tokenizer: the one of the set, if
    samples are to be shown as text. Raises ItemSetError if the attributes are damaged.
    """
    counts = report.count(s, tails=False)
    sections: list[tuple[str, Callable[[], str]]] = [
        ("What it holds", lambda: _table(report.facts(s))),
        (f"Since {name_before}", lambda: "" if before is None else _compared(s, before, tokenizer)),
        ("Size", lambda: _sizes(s)),
        ("Levels", lambda: _levels(s)),
        ("What a model chooses", lambda: _choices(s, counts)),
        ("How items are spread", lambda: _spread(counts)),
        ("Attributes", lambda: _attributes(s)),
        ("Some items", lambda: _samples(s, tokenizer)),
    ]
    body = ""
    for title, made in tqdm(sections, desc="report", unit=" parts", delay=1, disable=None, smoothing=0):
        if text := made():
            body += f"<section><h2>{escape(title)}</h2>{text}</section>\n"
    return _template("report_page.html").substitute(title=escape(name), body=body)


def _template(name: str) -> Template:
    return Template((Path(__file__).parent / name).read_text(encoding="utf-8"))


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
    costs = (
        (name, size, f"{size / len(s):.2f} bytes an item") for name, size, _ in report.costs(s) if size is not None
    )
    return (
        _bars(costs)
        + _note("Keys and attributes not counted. No index of such sets can be smaller than the limit on average.")
        + _bars((name, size, f"{size:,} bytes") for name, size in s.sections.items())
    )


def _levels(s: ItemSet) -> str:
    levels = report.levels(s)
    rows = [
        (f"{i}", f"{nodes:,}", f"{edges:,}", f"{edges / max(nodes, 1):.1f}", f"{tails:,}")
        for i, (nodes, edges, tails) in enumerate(levels[:_LEVELS])
    ]
    head = ("tokens before", "prefixes that items share", "children", "children each", "tokens of tails")
    rest = f" The first {_LEVELS} of {len(levels)} levels." if len(levels) > _LEVELS else ""
    return _table(rows, head) + _note(f"A tail is what is left of an item that stands alone.{rest}")


def _choices(s: ItemSet, counts: report.Counts) -> str:
    lengths = f"{s.longest}" if s.shortest == s.longest else f"{s.shortest} to {s.longest}"

    def by_tokens(numbers: NDArray[Any], form: str, unit: str = "") -> str:
        return _bars((f"after {k}", one, f"{one:{form}}{unit}") for k, one in enumerate(numbers[:_LEVELS].tolist()))

    return (
        _note(
            f"Of an item's tokens ({lengths}, and an end) a model chooses {counts.chosen.sum() / len(s):.2f} on "
            "average; the others are forced, and forced drafts propose them. Items for which a model chooses, by "
            "tokens so far:"
        )
        + by_tokens(counts.chosen / len(s), ".1%")
        + _note("Items that are certain, by tokens so far, all that is left being forced:")
        + by_tokens(1 - counts.shared / len(s), ".1%")
        + by_tokens(counts.widest, ",", " tokens")
        + _note(
            f"The widest choice, by tokens so far: how many may follow. {counts.ends:,} items are the "
            "beginning of another."
        )
    )


def _spread(counts: report.Counts) -> str:
    share = np.cumsum(np.sort(counts.by_first)[::-1]) / counts.by_first.sum()
    places = np.unique(np.linspace(0, len(share) - 1, 101).astype(int))
    points = " ".join(f"{(place + 1) / len(share):.4f},{share[place]:.4f}" for place in places)
    most = max(1, round(len(share) / 100))
    return _note(
        f"{len(share):,} tokens begin an item. The {most:,} most used begin {share[most - 1]:.1%} of all items, "
        f"the first alone {share[0]:.1%}. Evenly spread, the line would be the diagonal."
    ) + _template("report_curve.svg").substitute(points=f"0,0 {points}")


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
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return _table(rows, ("attribute", "type", "missing", "distinct", "values")) + note


def _values(column: pa.ChunkedArray, drawn: NDArray[np.int64] | None) -> tuple[str, str]:
    """Return how many distinct values there are in the rows drawn, and the extremes, or the most frequent ones."""
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
    return (str(key), " ".join(map(str, tokens)), *([] if tokenizer is None else [tokenizer.decode(tokens)]))


def _some_keys(s: ItemSet, count: int) -> list[Any]:
    """Return keys drawn at random, the same each time, or all if there are no more."""
    keys = s.keys
    if len(keys) > count:
        keys = keys.take(pa.array(np.sort(np.random.default_rng(_SEED).choice(len(keys), count, replace=False))))
    return keys.to_pylist()  # type: ignore[no-any-return]


def _compared(s: ItemSet, before: ItemSet, tokenizer: Any) -> str:
    if s.digest == before.digest:
        return _note("The same items.")
    rows = [("items", f"{len(before):,}", f"{len(s):,}"), ("keys", f"{len(before.keys):,}", f"{len(s.keys):,}")]
    page = _table(rows, ("", "before", "now"))
    for title, one, other in (("came", s, before), ("went", before, s)):
        keys = _some_keys(one, COMPARED)
        missing = [
            (key, item)
            for key, item in zip(keys, one.tokens(keys), strict=True)
            if other.find(item) is None or key not in other.keys_of([item])[0]
        ]
        said = f"{len(missing):,} keys {title}."
        if len(keys) < len(one.keys):
            share = len(missing) / len(keys)
            said = f"About {share:.1%} of the keys {title}: of {len(keys):,} drawn at random, {len(missing):,}."
        page += _note(said) + _table(_shown(*item, tokenizer) for item in missing[:SAMPLES])
    return page


def _bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Return horizontal bars. rows: of each its name, its length, not negative, and what is written beside it."""
    rows = list(rows)
    longest = max((value for _, value, _ in rows), default=0) or 1
    bars = ""
    for y, (name, value, text) in zip(range(0, len(rows) * _BAR, _BAR), rows, strict=True):
        width = max(1.0, (_WIDTH - _LABEL - 130) * value / longest)
        bars += (
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y + 4}" width="{width:.1f}" height="{_BAR - 8}" rx="2"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{escape(text)}</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {len(rows) * _BAR + 4}" role="img">{bars}</svg>'
