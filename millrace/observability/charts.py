"""Curves and bars as SVG, for the report and the README. No library and no script: a string goes in a page.

Colours are CSS variables with a light and a dark value. A hidden `<title>` on each mark is its tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

Point = tuple[float, float | None]
MOST_POINTS = 400
MOST_TOOLTIPS = 60
TOP, RIGHT, BOTTOM, LEFT = 30, 14, 38, 54

LIGHT = (
    "--paper:#f4f7f8;--card:#ffffff;--ink:#14232b;--muted:#566871;--line:#dde5e9;--shade:#eaf0f2;"
    "--c1:#0b6a94;--c2:#c26a12;--c3:#1b8168;--c4:#7453a6;--c5:#b03f52;--c6:#8c7410;--c7:#7c8b93;"
    "--c8:#4a5bb5;--c9:#a4467f;--c10:#5f8f2e;--c11:#2f8fa3;--c12:#8a6a4f;--c13:#2b3f73"
)
DARK = (
    "--paper:#0e161b;--card:#16212a;--ink:#e4edf1;--muted:#94a6b0;--line:#2a3943;--shade:#1f2d37;"
    "--c1:#57b6e2;--c2:#eda04f;--c3:#4fc2a2;--c4:#b297e3;--c5:#ec8497;--c6:#d8bf52;--c7:#8b9ba5;"
    "--c8:#93a2f0;--c9:#e58bc2;--c10:#a5d06f;--c11:#6fcfe0;--c12:#c9a98b;--c13:#5b6fb8"
)
CHART_STYLE = """
.chart text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--muted)}
.chart .value{font-weight:650}
.chart .title{fill:var(--ink);font-size:15px;font-weight:650}
.chart .grid{stroke:var(--line);stroke-width:1}
.chart .shade{fill:var(--shade)}
.chart .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .faint{stroke-width:1;opacity:.38}
.chart .dot{stroke:var(--card);stroke-width:1.5}
.chart .hit{fill:transparent}
.chart .hit:hover{fill:var(--ink);fill-opacity:.25}
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve, broken where y is None or not finite.

    The label is shown beside its last value once there are several; points are (x, y) by rising x; colours
    are 1 to 11; `faint` is for raw values behind their smoothed curve, `marked` adds a dot at each point. One
    that is not `joined` is its dots alone, in any order and without a last value.
    """

    label: str
    points: Sequence[Point]
    colour: int = 1
    faint: bool = False
    marked: bool = False
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Shade:
    """A stretch of the x axis set apart by a tint, with its name."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    height: int
    top: int

    def x(self, value: float) -> float:
        fraction = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + fraction * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        fraction = (value - self.y_low) / (self.y_high - self.y_low)
        return self.height - BOTTOM - fraction * (self.height - BOTTOM - self.top)


def curve_svg(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    width: int = 420,
    height: int = 250,
    y_range: tuple[float, float] | None = None,
    shade: Shade | None = None,
    standalone: bool = False,
) -> str:
    """Curves over one pair of axes, the last series on top; ValueError without a finite point.

    The title is the accessible name for screen readers, visible only if `standalone`: a whole SVG file with
    its title, colours and background, rather than part of a page. Width and height are in the picture's own
    units, about pixels. `y_range` is that of the data if None.
    """
    kept = [(one, _thinned(one.points)) for one in series]
    places = [(x, y) for _, points in kept for x, y in points if y is not None]
    if not places:
        raise ValueError(f"the chart {title!r} has no finite point to draw")
    x_low, x_high = _spread(min(x for x, _ in places), max(x for x, _ in places))
    x_low = 0.0 if 0 < x_low < 0.1 * x_high else x_low
    if shade:
        x_low, x_high = min(x_low, shade.start), max(x_high, shade.end)
    y_low, y_high = y_range or _aired(*_spread(min(y for _, y in places), max(y for _, y in places)))
    frame = _Frame(x_low, x_high, y_low, y_high, width, height, TOP + (36 if standalone else 0))
    named = [(one, points) for one, points in kept if not one.faint]
    parts = [_shading(frame, shade) if shade else "", _heading(frame, y_label, named), _axes(frame, x_label)]
    parts += [_curve(frame, one, points) for one, points in kept]
    parts += [_tooltips(frame, one, points, x_label) for one, points in named]
    return _picture("".join(parts), title, width, height, standalone)


def bar_svg(parts: Sequence[tuple[str, float, int]], *, title: str, unit: str) -> str:
    """Render one stacked bar of name, size above 0 and colour (1 to 13) of each part; ValueError for none."""
    if not parts:
        raise ValueError(f"the bar {title!r} has no part to draw")
    total = sum(size for _, size, _ in parts)
    drawn, start = [], 0.0
    for name, size, colour in parts:
        width = 1000 * size / total
        tip = escape(f"{name}: {size:,.1f} {unit} ({100 * size / total:.0f} %)")
        drawn.append(
            f'<rect x="{start:.2f}" y="0" width="{max(width - 1.5, 0.5):.2f}" height="26" '
            f'style="fill:var(--c{colour})"><title>{tip}</title></rect>'
        )
        start += width
    return (
        f'<svg class="chart bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    )


def smoothed(points: Sequence[Point], half_width: int) -> list[Point]:
    """Each y as the mean of the finite ones at most `half_width` places away."""
    means: list[Point] = []
    for place, (x, _) in enumerate(points):
        near = points[max(place - half_width, 0) : place + half_width + 1]
        finite = [y for _, y in near if _is_finite(y)]
        means.append((x, sum(finite) / len(finite) if finite else None))
    return means


def number_text(value: float) -> str:
    """A number in few characters: 0.95, 12.3, 8.1k, 3e-4."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 2e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if abs(scaled) < 1e3 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most about MOST_POINTS points: of each stretch the lowest and highest, so that no spike is lost."""
    clean: list[Point] = [(x, y if _is_finite(y) else None) for x, y in points if math.isfinite(x)]
    if len(clean) <= MOST_POINTS:
        return clean
    kept: list[Point] = []
    num_stretches = MOST_POINTS // 2
    edges = [len(clean) * n // num_stretches for n in range(num_stretches + 1)]
    for low, high in zip(edges, edges[1:], strict=False):
        finite = [(y, place) for place in range(low, high) if (y := clean[place][1]) is not None]
        if not finite:
            kept.append(clean[low])
            continue
        places = {min(finite)[1], max(finite)[1], *([len(clean) - 1] if high == len(clean) else [])}
        kept += [clean[place] for place in sorted(places)]
    return kept


def _spread(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) * 0.5 or 0.5
    return low - margin, high + margin


def _step(low: float, high: float, most: int) -> float:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _aired(low: float, high: float) -> tuple[float, float]:
    air = 0.06 * (high - low)
    return (0.0 if 0 <= low < 0.4 * high else low - air), high + air


def _ticks(low: float, high: float, most: int) -> list[float]:
    step = _step(low, high, most)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [place * step for place in range(first, last + 1)]


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    largest = max(abs(tick) for tick in ticks)
    distance = ticks[1] - ticks[0] if len(ticks) > 1 else largest
    if not 2e-3 < largest < 1e4 or distance == 0:
        return [number_text(tick) for tick in ticks]
    decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
    return [f"{tick:.{decimals}f}" for tick in ticks]


def _axes(frame: _Frame, x_label: str) -> str:
    parts = []
    ticks = _ticks(frame.y_low, frame.y_high, 4)
    for value, text in zip(ticks, _tick_texts(ticks), strict=True):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    base = frame.height - BOTTOM
    ticks = _ticks(frame.x_low, frame.x_high, 5)
    for value, text in zip(ticks, _tick_texts(ticks), strict=True):
        parts.append(f'<text x="{frame.x(value):.1f}" y="{base + 16}" text-anchor="middle">{text}</text>')
    centre = (LEFT + frame.width - RIGHT) / 2
    parts.append(f'<text x="{centre:.0f}" y="{base + 33}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(parts)


def _heading(frame: _Frame, y_label: str, curves: Sequence[tuple[Series, list[Point]]]) -> str:
    height = frame.top - 16
    parts = [f'<text x="{16 if frame.top > TOP else 4}" y="{height}">{escape(y_label)}</text>']
    right = frame.width - RIGHT
    for one, points in reversed(curves):
        finite = [y for _, y in points if y is not None]
        words = [one.label] if len(curves) > 1 else []
        values = [number_text(y) for y in finite[-1:]] if one.joined else []
        shown = " ".join([*words, *values])
        parts.append(
            f'<text class="value" x="{right}" y="{height}" text-anchor="end" '
            f'style="fill:var(--c{one.colour})">{escape(shown)}</text>'
        )
        right -= round(7.4 * len(shown)) + 14
    return "".join(parts)


def _shading(frame: _Frame, shade: Shade) -> str:
    start, end = frame.x(shade.start), frame.x(shade.end)
    name = escape(shade.label)
    label = f'<text x="{start + 6:.1f}" y="{frame.top + 13}">{name}</text>' if end - start > 60 else ""
    return (
        f'<rect class="shade" x="{start:.1f}" y="{frame.top}" width="{end - start:.1f}" '
        f'height="{frame.height - BOTTOM - frame.top}"><title>{name}</title></rect>{label}'
    )


def _curve(frame: _Frame, one: Series, points: Sequence[Point]) -> str:
    path, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(x):.1f} {_held(frame, y):.1f}")
        pen = "L"
    kind = "curve faint" if one.faint else "curve"
    drawn = f'<path class="{kind}" style="stroke:var(--c{one.colour})" d="{"".join(path)}"/>'
    drawn = drawn if one.joined else ""
    alone = sum(y is not None for _, y in points) == 1
    if one.marked or alone or not one.joined:
        drawn += "".join(
            f'<circle class="dot" style="fill:var(--c{one.colour})" cx="{frame.x(x):.1f}" '
            f'cy="{_held(frame, y):.1f}" r="3.5"/>'
            for x, y in points
            if y is not None
        )
    return drawn


def _held(frame: _Frame, value: float) -> float:
    return frame.y(min(max(value, frame.y_low), frame.y_high))


def _tooltips(frame: _Frame, one: Series, points: Sequence[Point], x_label: str) -> str:
    finite = [(x, y) for x, y in points if y is not None]
    every = max(1, math.ceil(len(finite) / MOST_TOOLTIPS))
    return "".join(
        f'<circle class="hit" cx="{frame.x(x):.1f}" cy="{_held(frame, y):.1f}" r="7">'
        f"<title>{escape(one.label)} {y:.4g}, {escape(x_label)} {x:.6g}</title></circle>"
        for x, y in finite[::-1][::every][::-1]
    )


def _picture(body: str, title: str, width: int, height: int, standalone: bool) -> str:
    head = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    if not standalone:
        return f'<svg class="chart" {head}>{body}</svg>'
    style = f".chart{{{LIGHT}}}@media(prefers-color-scheme:dark){{.chart{{{DARK}}}}}{CHART_STYLE}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}" height="{height}" {head}>'
        f'<style>{style}</style><rect width="{width}" height="{height}" rx="10" style="fill:var(--card)"/>'
        f'<text class="title" x="16" y="27">{escape(title)}</text>{body}</svg>\n'
    )
