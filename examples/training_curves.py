"""The picture of the training example: a panel for each measure, a line for each way, the seeds thin beside it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

COLOURS = ("#868e96", "#e8590c", "#1c7ed6", "#2b8a3e")
WIDE, HIGH, LEFT, TOP = 230, 170, 42, 46  # of a panel, and where the first begins
STRIDE = WIDE + 50


def picture(runs: Sequence[dict[str, Any]], measures: Sequence[str], every: int) -> str:
    """Return an SVG of `training.learn`'s curves: one value of each measure every `every` steps."""
    ways = list(dict.fromkeys(run["way"] for run in runs))
    size = f"{LEFT + STRIDE * len(measures)} {TOP + HIGH + 62}"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="13">']
    lines += ["<title>GRPO of a small recommender by four kinds of probabilities, three seeds</title>"]
    lines += ['<rect width="100%" height="100%" fill="white"/>']
    for i, measure in enumerate(measures):
        columns = [(run["way"], [row[i] for row in run["curve"]]) for run in runs]
        lines += _panel(measure, columns, ways, every, LEFT + i * STRIDE)
    for i, way in enumerate(ways):
        x, y = LEFT + i * 175, TOP + HIGH + 46
        lines += [f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" stroke="{COLOURS[i]}" stroke-width="3"/>']
        lines += [f'<text x="{x + 28}" y="{y}">{way}</text>']
    return "\n".join([*lines, "</svg>", ""])


def _panel(
    title: str, columns: Sequence[tuple[str, list[float]]], ways: Sequence[str], every: int, left: int
) -> list[str]:
    top = max(max(values) for _, values in columns) * 1.05
    last = len(columns[0][1]) - 1

    def line(values: Sequence[float], colour: str, width: float, opacity: float) -> str:
        points = (f"{left + WIDE * i / last:.1f},{TOP + HIGH * (1 - one / top):.1f}" for i, one in enumerate(values))
        style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
        return f'<polyline points="{" ".join(points)}" {style}/>'

    lines = [f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{title}</text>']
    lines += [f'<rect x="{left}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#ced4da"/>']
    for share in (0, 0.5, 1):
        y = TOP + HIGH * (1 - share)
        lines += [f'<text x="{left - 4}" y="{y + 4:.0f}" text-anchor="end" font-size="11">{share * top:.2f}</text>']
    for share, anchor in ((0, "start"), (1, "end")):
        text = f"{round(last * every * share)}" + (" steps" if share else "")
        x = left + WIDE * share
        lines += [f'<text x="{x}" y="{TOP + HIGH + 16}" text-anchor="{anchor}" font-size="11">{text}</text>']
    for way, values in columns:
        lines += [line(values, COLOURS[ways.index(way)], 1, 0.35)]
    for way, colour in zip(ways, COLOURS, strict=False):
        mine = [values for name, values in columns if name == way]
        lines += [line([mean(column) for column in zip(*mine, strict=True)], colour, 2.5, 1)]
    return lines
