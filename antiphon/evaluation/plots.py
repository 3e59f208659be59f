"""Plots of an evaluation, as SVG: a panel for each task, a line for each way of playing.

What is on the horizontal axis is the condition that was given as a list of numbers; where there
are several the first of AXES. Lines are told apart by everything else that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

AXES = {
    "latency_ms": "injected latency in ms",
    "jitter_ms": "injected jitter in ms",
    "loss": "probability of loss",
    "robots": "robots",
}
FIELDS = (*AXES, "control", "images")

PANEL_WIDTH, PANEL_HEIGHT = 360, 240
LEFT, TOP, BOTTOM, GAP = 56, 40, 48, 16
LEGEND_LINE = 18
APART = 5
MARGIN = 20
COLOURS = ("#1f6feb", "#d1572c", "#2d8a4e", "#8250df", "#9a6700", "#57606a")


@dataclass(frozen=True)
class Point:
    """A value, and the interval that it lies in, if there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """Points of one name in one panel."""

    panel: str
    name: str
    points: list[Point]


def write_plots(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `success.svg`, `step_time.svg` and `misses.svg`; the paths of those that there is
    something to draw of."""
    axis = next((name for name in AXES if _differs(results, name)), None)
    if axis is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, title, unit, value in (
        ("success", "Episodes that succeed, with 95 % interval", "%", _success),
        ("step_time", "Step time, 99th percentile", "ms", _step_time),
        ("misses", "Steps without a fresh action", "%", _misses),
    ):
        lines = list(_lines(results, axis, value))
        if lines:
            path = folder / f"{name}.svg"
            path.write_text(draw(lines, title, AXES[axis], unit))
            written.append(path)
    return written


def _success(x: float, figures: dict[str, Any]) -> Point | None:
    if figures["success"] is None:
        return None
    low, high = figures["success_95"]
    return Point(x, figures["success"] * 100, low * 100, high * 100)


def _step_time(x: float, figures: dict[str, Any]) -> Point | None:
    p99 = figures["step_time_ms"]["p99"]
    return None if p99 is None else Point(x, p99)


def _misses(x: float, figures: dict[str, Any]) -> Point | None:
    return Point(x, figures["miss_share"] * 100)


def _differs(results: Sequence[dict[str, Any]], name: str) -> bool:
    return len({result[name] for result in results}) > 1


def _lines(
    results: Sequence[dict[str, Any]],
    axis: str,
    value: Callable[[float, dict[str, Any]], Point | None],
) -> Iterator[Line]:
    telling = [name for name in FIELDS if name != axis and _differs(results, name)]
    found: dict[tuple[str, str], list[Point]] = {}
    for result in results:
        name = ", ".join(
            str(result[each]) if isinstance(result[each], str) else f"{each} {result[each]:g}"
            for each in telling
        )
        for figures in result["tasks"]:
            point = value(result[axis], figures)
            if point is not None:
                found.setdefault((figures["task"], name or result["control"]), []).append(point)
    for (panel, name), points in found.items():
        yield Line(panel, name, sorted(points, key=lambda point: point.x))


def draw(lines: Sequence[Line], title: str, axis: str, unit: str) -> str:
    """The lines as one SVG document. `axis` names the horizontal axis, `unit` the other one's."""
    panels = list(dict.fromkeys(line.panel for line in lines))
    names = list(dict.fromkeys(line.name for line in lines))
    points = [point for line in lines for point in line.points]
    right = max(point.x for point in points) or 1.0
    top = 100.0 if unit == "%" else _round_up(max(point.y for point in points))
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP)
    height = TOP + PANEL_HEIGHT + BOTTOM + LEGEND_LINE * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(LEFT, 18, title, size=14),
    ]
    for index, panel in enumerate(panels):
        place = _Panel(LEFT + index * (PANEL_WIDTH + GAP), right, top)
        parts += place.frame(panel, unit if index == 0 else None, axis)
        ticks = sorted({point.x for line in lines if line.panel == panel for point in line.points})
        parts += place.marks(ticks)
        for line in lines:
            if line.panel == panel:
                number = names.index(line.name)
                # Side by side, so that equal values hide none.
                aside = (number - (len(names) - 1) / 2) * APART
                parts += place.line(line, COLOURS[number % len(COLOURS)], aside)
    for index, name in enumerate(names):
        y = TOP + PANEL_HEIGHT + BOTTOM + LEGEND_LINE * index
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="{LEFT}" y="{y - 6}" width="18" height="4" fill="{colour}"/>')
        parts.append(_text(LEFT + 26, y, name))
    return "\n".join([*parts, "</svg>\n"])


class _Panel:
    """One diagram: x from 0 to `right`, y from 0 to `top`, its left edge at `left`."""

    def __init__(self, left: float, right: float, top: float) -> None:
        self._left, self._right, self._top = left, right, top

    def _x(self, value: float) -> float:
        return round(self._left + MARGIN + value / self._right * (PANEL_WIDTH - 2 * MARGIN), 1)

    def _y(self, value: float) -> float:
        return round(TOP + PANEL_HEIGHT * (1 - value / self._top), 1)

    def frame(self, name: str, unit: str | None, axis: str) -> list[str]:
        """Box, names, and the scale of the vertical axis where there is room for it."""
        parts = [_text(self._left + 4, TOP - 6, name)]
        for quarter in range(5):
            value = self._top * quarter / 4
            y = self._y(value)
            parts.append(
                f'<path d="M{self._left} {y}H{self._left + PANEL_WIDTH}" stroke="#d0d7de"/>'
            )
            if unit is not None:
                parts.append(_text(self._left - 6, y + 4, f"{value:g} {unit}", anchor="end"))
        middle = self._left + PANEL_WIDTH / 2
        parts.append(_text(middle, TOP + PANEL_HEIGHT + 32, axis, anchor="middle"))
        return parts

    def marks(self, values: Sequence[float]) -> list[str]:
        """The values of the horizontal axis that were played."""
        y = TOP + PANEL_HEIGHT + 16
        return [_text(self._x(value), y, f"{value:g}", anchor="middle") for value in values]

    def line(self, line: Line, colour: str, aside: float) -> list[str]:
        """Points, joined, with their intervals, so far to the side."""
        joined = " ".join(f"{self._x(point.x) + aside},{self._y(point.y)}" for point in line.points)
        parts = [f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>']
        for point in line.points:
            x, y = self._x(point.x) + aside, self._y(point.y)
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
            if point.low is not None and point.high is not None:
                low, high = self._y(point.low), self._y(point.high)
                parts.append(f'<path d="M{x} {low}V{high}" stroke="{colour}"/>')
        return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _round_up(value: float) -> float:
    """The next of 1, 2, 4 or 8 times a power of ten, so that quarters of it are short."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value > 0:
        power /= 10
    return next((power * each for each in (1, 2, 4, 8) if power * each >= value), power * 10)
