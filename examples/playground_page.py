"""What the playground shows, as HTML: bars, paths, and answers with their items marked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from playground_client import Path, Ranked, Step

SHOWN = 5  # texts of allowed tokens, for each place
ROWS = 20  # of a histogram
CSS = """
.pg table {width: 100%; border: none !important; border-collapse: collapse; font-size: 14px}
.pg th, .pg td {padding: 4px 10px; border: none !important; vertical-align: middle;
  border-bottom: 1px solid var(--border-color-primary) !important}
.pg th {text-align: left; font-weight: 600}
.pg td.number {text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap}
.pg .bar {background: #2f6fb3; height: 14px; border-radius: 2px; min-width: 2px}
.pg .bar.second {background: #d9822b}
.pg .token {font-family: monospace; background: var(--background-fill-secondary); border: 1px solid #8888;
  border-radius: 4px; padding: 1px 5px; white-space: pre}
.pg .token.forced {background: #2f6fb3; color: white}
.pg .token.no {text-decoration: line-through; opacity: 0.75}
.pg mark {background: #ffd86b; color: #222; border-radius: 3px; padding: 0 3px}
.pg pre {white-space: pre-wrap; font-size: 14px; padding: 12px; border: 1px solid var(--border-color-primary)}
.pg .error {border-left: 4px solid #c0392b; padding: 8px 12px; font-family: monospace; white-space: pre-wrap}
.pg .note {opacity: 0.8; font-size: 13px; margin: 8px 0}
"""


def page(*parts: str) -> str:
    return f'<div class="pg">{"".join(parts)}</div>'


def error(message: str) -> str:
    return page(f'<div class="error">{escape(message)}</div>')


def note(text: str) -> str:
    return f'<div class="note">{text}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already; those of numbers begin with a tag of their own."""
    cells = ["".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def number(text: str) -> str:
    return f'<td class="number">{text}</td>'


def bar(share: float, kind: str = "") -> str:
    return f'<div class="bar {kind}" style="width: {100 * share:.1f}%"></div>'


def token(text: str, kind: str = "") -> str:
    return f'<span class="token {kind}">{escape(text).replace(chr(10), "↵")}</span>'


def percent(probability: float) -> str:
    return f"{100 * probability:.1f}%" if probability >= 0.001 else f"{100 * probability:.1g}%"


def ranked(found: Sequence[Ranked]) -> str:
    """Show a ranked list. A bar's length is the distance of the item's score from the last one's."""
    if not found:
        return page(note("The list is empty."))
    best, last = found[0].score, found[-1].score
    boosted = any(one.score != one.logprob for one in found)
    rows = [
        (
            number(str(rank)),
            escape(one.text),
            number(f"{one.score:.2f}"),
            *([number(f"{one.logprob:.2f}")] if boosted else []),
            f'<td style="width: 30%">{bar(0.04 + 0.96 * (one.score - last) / ((best - last) or 1))}</td>',
            escape(", ".join(map(str, one.keys))),
            escape(", ".join(f"{name}: {_value(value)}" for name, value in one.attributes.items())),
        )
        for rank, one in enumerate(found, 1)
    ]
    return page(
        table(["", "item", "score", *["log-probability"] * boosted, "", "keys", "attributes"], rows),
        note(
            "A score is the sum of the model's log-probabilities of the item's tokens and its end, over the whole "
            f"vocabulary{', and the boosts' if boosted else ''}. The bars go from the last item's score to the best "
            "one's."
        ),
    )


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def path(found: Path) -> str:
    """Show a sampled answer, token by token."""
    ends = "no item: a limit has cut it" if found.item is None else f"key {found.item.get('key')}"
    end = found.steps[-1].text
    line = "".join(token(step.text, "forced" if step.forced else "") for step in found.steps)
    known = [step for step in found.steps if step.allowed]
    summary = f"{len(found.steps)} tokens, {sum(step.overruled for step in found.steps)} of them not the model's first"
    if known:
        summary += f", {sum(step.forced for step in known)} forced (blue)"
    heads = ["", "token", "id", "allowed there", "the model's own odds", "what the model wanted"]
    rows = [
        (
            number(str(place)),
            token(step.text, "forced" if step.forced else ""),
            number(str(step.token)),
            _allowed(step),
            number(percent(step.probability)),
            " ".join(
                f"{token(text, 'no' if step.allows(text, end) is False else '')} {percent(share)}"
                for text, share in step.wanted
            ),
        )
        for place, step in enumerate(found.steps, 1)
    ]
    told = (
        "Struck out: not allowed there."
        if any(step.allowed and step.allowed.texts is not None for step in known)
        else "How many tokens were allowed is in the index, and which of these in the tokenizer: start the playground "
        "with --item-set NAME=FILE and --tokenizer DIR to see it. A list that was typed has no index."
    )
    return page(
        f"<p>{line}</p><p><b>{escape(found.text)}</b> ({escape(ends)}): {summary}.</p>",
        table(heads, rows),
        note(
            "The probabilities are the model's own, over its whole vocabulary, after the same tokens without the set. "
            + told
        ),
    )


def _allowed(step: Step) -> str:
    if step.allowed is None:
        return "?"
    allowed = step.allowed
    texts = allowed.texts or []
    shown = [token(text) for text in texts[:SHOWN]] + ["..."] * (len(texts) > SHOWN) + ["the end"] * allowed.ends
    return f"{allowed.count:,} {'(forced)' if step.forced else ''} {' '.join(shown)}"


def compared(sampled: Counter[str], drawn: Counter[str], exact: int) -> str:
    """Show histograms of one prompt's answers: sampled under the mask, and drawn from the model's own distribution."""
    totals = sampled.total() or 1, drawn.total() or 1
    names = sorted(sampled | drawn, key=lambda name: (-drawn[name], -sampled[name], name))
    most = max([sampled[name] / totals[0] for name in names] + [drawn[name] / totals[1] for name in names])

    def cells(share: float, kind: str) -> tuple[str, str]:
        return f'<td style="width: 25%">{bar(share / most, kind) if share else ""}</td>', number(f"{100 * share:.0f}%")

    rows = [
        (
            escape(name),
            *cells(sampled[name] / totals[0], ""),
            *cells(drawn[name] / totals[1], "second"),
        )
        for name in names[:ROWS]
    ]
    distance = sum(abs(sampled[name] / totals[0] - drawn[name] / totals[1]) for name in names) / 2
    left = f" {len(names) - ROWS} more items are not shown." if len(names) > ROWS else ""
    return page(
        table(["item", f"{totals[0]} sampled under the mask", "", f"{totals[1]} drawn", ""], rows),
        note(
            f"{exact} of {drawn.total()} draws are exact. The two histograms are {distance:.2f} apart (total "
            f"variation; 0: equal, 1: nothing in common); chance alone puts some of it there.{left}"
        ),
    )


def marked(text: str, items: Sequence[dict[str, Any]]) -> str:
    """Show an answer with its items marked, and a table of them."""
    parts, at = [], 0
    for item in items:
        start, length = _found(text, item["text"], at)
        if start < 0:
            continue
        parts += [escape(text[at:start]), f"<mark>{escape(text[start : start + length])}</mark>"]
        at = start + length
    rows = [
        (
            escape(item.get("path", "")),
            escape(item["text"]),
            escape(item.get("set", "inline")),
            escape(", ".join(map(str, item["keys"]))),
        )
        for item in items
    ]
    told = table(["where", "item", "set", "keys"], rows) if rows else note("There is no item in it.")
    return page(f"<pre>{''.join(parts)}{escape(text[at:])}</pre>", told)


def _found(text: str, item: str, start: int) -> tuple[int, int]:
    """Return where an item stands next, and its length there: in JSON it is escaped."""
    forms = {item, json.dumps(item)[1:-1], json.dumps(item, ensure_ascii=False)[1:-1]}
    places = [(place, len(form)) for form in forms if (place := text.find(form, start)) >= 0]
    return min(places, default=(-1, 0))
