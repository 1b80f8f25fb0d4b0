"""Charts as SVG text, for a page that must stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _BAR, _LABEL = 640, 22, 170
_PLOT, _LEFT, _BOTTOM = 200, 60, 36


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
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


def columns(values: Sequence[float], labels: Sequence[str], texts: Sequence[str], x_name: str) -> str:
    """Return a column for each value, with its label below and its text as a tooltip and, if there is room, above.

    values: not negative.
    """
    highest, count = max(values, default=0) or 1, max(len(values), 1)
    step = (_WIDTH - _LEFT) / count
    parts = [_x_name(x_name)]
    for i, (value, label, text) in enumerate(zip(values, labels, texts, strict=True)):
        height, x = (_PLOT - 24) * value / highest, _LEFT + i * step
        parts.append(
            f'<rect class="bar" x="{x + step * 0.1:.1f}" y="{_PLOT - height:.1f}" width="{step * 0.8:.1f}" '
            f'height="{max(height, 0.5):.1f}"><title>{escape(f"{label}: {text}")}</title></rect>'
            f'<text x="{x + step / 2:.1f}" y="{_PLOT + 14}" text-anchor="middle">{escape(label)}</text>'
        )
        if step > 44:
            parts.append(
                f'<text class="small" x="{x + step / 2:.1f}" y="{_PLOT - height - 4:.1f}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
    return _svg(_PLOT + _BOTTOM, "".join(parts))


def curve(points: Sequence[tuple[float, float]], x_name: str, y_name: str) -> str:
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
    side = f'<text class="small" x="{_LEFT + 6}" y="12">{escape(y_name)}</text>'
    return _svg(_PLOT + _BOTTOM, lines + marks + side + _x_name(x_name))


def _x_name(name: str) -> str:
    return f'<text class="small" x="{_WIDTH}" y="{_PLOT + 30}" text-anchor="end">{escape(name)}</text>'


def _svg(height: float, inner: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{inner}</svg>'
