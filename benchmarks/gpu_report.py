"""What `gpu.py` has measured, in words: tables, and which goals are met."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]

TOP = 50  # candidates of PPV's approximate baseline
PEERS_A = ("xgrammar", "copy + xgrammar", "copy bound", "STATIC", "STATIC eager")
PEERS_B = ("PPV exact", f"PPV top-{TOP}", "CPU trie")
BEAM = ("uniform", 2 * 10**7, 140, 2_048)
LARGE = (512, 151_936)


def table(records: list[Record], peers: tuple[str, ...]) -> str:
    """A line a record; after each peer's time, ours divided by it. Columns that no record has are omitted."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    lines = ["| " + " | ".join(f"{name} (ours / it)" if name in peers else name for name in columns) + " |"]
    lines.append("|" + "--:|" * len(columns))
    for record in records:
        cells = []
        for name in columns:
            value = record.get(name, "")
            cell = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            cells.append(f"{cell} ({record['ours'] / value:.2f})" if name in peers and value else cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(part: str, report: Record) -> str:
    """The tables of a part, as far as it came."""
    name, peers = {"goals": ("goals", PEERS_A), "a": ("A", PEERS_A), "b": ("B", PEERS_B)}[part]
    kind = ("vocabulary", "set", "items", "children", "rows")
    records = sorted(report[name], key=lambda record: [record[key] for key in kind if key in record])
    text = f"\n{name}: µs of a step\n{table(records, peers)}\n"
    if part == "a" and report["constants"]:
        text += f"\nOther constants, µs\n{table(report['constants'], ())}\n"
    return text


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


def plot(records: list[Record], path: str) -> None:
    import matplotlib.pyplot as plt

    records = sorted(records, key=lambda record: int(record["rows"]))
    vocabularies = sorted({record["vocabulary"] for record in records})
    largest = max(record["items"] for record in records)
    figure, axes = plt.subplots(1, len(vocabularies), figsize=(5 * len(vocabularies), 4), squeeze=False)
    for axis, vocabulary in zip(axes[0], vocabularies, strict=True):
        here = [record for record in records if record["vocabulary"] == vocabulary]
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in here:
            name = f"ours, {record['items']:,} {record['set']}"
            lines.setdefault(name, []).append((record["rows"], record["ours"]))
            if record["set"] == "uniform" and record["items"] == largest:
                for peer in PEERS_A:
                    if peer in record:
                        lines.setdefault(peer, []).append((record["rows"], record[peer]))
        for name, points in lines.items():
            axis.loglog(*zip(*points, strict=True), marker="o", ls="-" if name.startswith("ours") else "--", label=name)
        axis.set(xlabel="rows", ylabel="µs a step", title=f"{vocabulary:,} tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
