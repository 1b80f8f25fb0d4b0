"""What `gpu.py` has measured, in words: tables, and which goals are met."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]

BEAM = ("uniform", 2 * 10**7, 140, 2_048)
LARGE = (512, 151_936)


def goals(report: Record) -> str:
    """Which goals are met, each by its worst cell of those that were measured."""
    at = {(r["set"], r["items"], r["rows"], r["vocabulary"]): r for r in [*report["goals"], *report["A"]]}
    ours = {key: record["ours"] for key, record in at.items()}
    sizes = sorted({items for kind, items, *_ in at if kind == "uniform"}) or [0]
    least, most = sizes[0], sizes[-1]
    growth, skew = {}, {}
    for key, t in ours.items():
        small, even = ("uniform", least, *key[2:]), ("uniform", *key[1:])
        if key[:2] == ("uniform", most) and least < most and small in ours:
            growth[key] = t / ours[small]
        if key[0] == "Zipf" and even in ours:
            skew[key] = t / ours[even]
    beam = {key: t for key, t in ours.items() if key == BEAM}
    bitmask, copy = (
        {key: r["ours"] / r[peer] for key, r in at.items() if peer in r} for peer in ("xgrammar", "copy bound")
    )
    large = {key: ratio for key, ratio in copy.items() if key[2:] == LARGE}
    lines = ["| goal | at most | worst | where | |", "|---|--:|--:|---|---|"]
    for name, bound, values in (
        ("µs, 140 rows of 2,048 tokens, 2 x 10^7 items", 5.5, beam),
        ("ours / one write of the logits, 512 rows of 151,936 tokens", 1.3, large),
        ("ours / xgrammar, the bitmask on the device", 1.0, bitmask),
        (f"{most:,} items / {least:,} items", 1.5, growth),
        ("Zipf / uniform", 2.0, skew),
    ):
        if values:
            kind, items, rows, vocabulary = max(values, key=values.__getitem__)
            worst = values[kind, items, rows, vocabulary]
            where = f"{rows} rows of {vocabulary:,}, {items:,} {kind} items"
            lines.append(f"| {name} | {bound} | {worst:.2f} | {where} | {'met' if worst <= bound else 'MISSED'} |")
        else:
            lines.append(f"| {name} | {bound} | | not measured | |")
    return "\n".join(lines)
