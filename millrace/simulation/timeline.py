"""Timelines of engines and trainer in simulated runs, as SVG: one panel per run, all on one time axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape

from millrace.observability.charts import CHART_STYLE, DARK, LIGHT, number_text
from millrace.simulation.simulate import Simulated

# Maximum number of lanes; more engines are averaged within lanes.
MOST_LANES = 8
NUM_BINS = 240
# Number of shades of a lane, for the number of running requests.
NUM_SHADES = 5
# Length of the time axis, in steps of the slowest run.
NUM_STEPS = 3
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 900, 96, 16, 66, 40
LANE, GAP, HEADING = 13, 3, 24
ENGINE, UPDATE, TRAIN = "--c1", "--c2", "--c3"
Bar = tuple[float, float, str, float, str]


def timeline_svg(runs: Mapping[str, Simulated], *, title: str) -> str:
    """Render several runs, at least one, by display name as a standalone SVG file."""
    if not runs:
        raise ValueError("there is no run to plot")
    longest_s = NUM_STEPS * max(run.step_s for run in runs.values())
    window_s = min(longest_s, *(run.end_s - run.begin_s for run in runs.values()))
    body, top = _legend(), TOP
    for name, run in runs.items():
        body += f'<text class="value" x="16" y="{top + 14}">{escape(name)}</text>'
        top += HEADING
        for label, bars in _lanes(run, window_s):
            body += f'<text x="{LEFT - 8}" y="{top + LANE - 2}" text-anchor="end">{escape(label)}</text>'
            body += (
                f'<rect class="shade" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}"/>'
            )
            body += "".join(_rect(bar, window_s, top) for bar in bars)
            top += LANE + GAP
        top += GAP
    body += _axis(window_s, top)
    height = top + BOTTOM
    style = f".chart{{{LIGHT}}}@media(prefers-color-scheme:dark){{.chart{{{DARK}}}}}{CHART_STYLE}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"><style>{style}</style>'
        f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill:var(--card)"/>'
        f'<text class="title" x="16" y="27">{escape(title)}</text>{body}</svg>\n'
    )


def _lanes(run: Simulated, window_s: float) -> Iterator[tuple[str, list[Bar]]]:
    yield "training", list(_training(run, window_s))
    num_lanes = min(run.num_engines, MOST_LANES)
    # The index of the first engine of each lane.
    first = [-(-number * run.num_engines // num_lanes) for number in range(num_lanes + 1)]
    generating = [[0.0] * NUM_BINS for _ in range(num_lanes)]
    updated = [[0.0] * NUM_BINS for _ in range(num_lanes)]
    bin_s = window_s / NUM_BINS
    for name, begin_s, end_s, num_running in run.within():
        lane = int(re.sub(r"\D", "", name)) * num_lanes // run.num_engines
        each = 1 / (first[lane + 1] - first[lane])
        begin, end = (begin_s - run.begin_s) / bin_s, min((end_s - run.begin_s) / bin_s, float(NUM_BINS))
        table = generating[lane] if num_running else updated[lane]
        for place in range(int(begin), min(int(end) + 1, NUM_BINS)):
            share = max(0.0, min(end, place + 1) - max(begin, place))
            table[place] += share * each * max(1, num_running)
    most = max((max(lane) for lane in generating), default=0.0) or 1.0
    for number in range(num_lanes):
        begin, last = first[number], first[number + 1] - 1
        label = f"engine {begin}" if begin == last else f"{begin} to {last}"
        yield label, list(_sampling(generating[number], updated[number], most, bin_s))


def _training(run: Simulated, window_s: float) -> Iterator[Bar]:
    for step in run.steps:
        for begin_s, end_s, colour, what in (
            (step.taken_s, step.trained_s, TRAIN, "train"),
            (step.trained_s, step.end_s, UPDATE, "weight update"),
        ):
            begin_s, end_s = begin_s - run.begin_s, min(end_s - run.begin_s, window_s)
            if begin_s < end_s:
                yield begin_s, end_s, colour, 1.0, f"{what}: {number_text(end_s - begin_s)} s"


def _sampling(generating: list[float], updated: list[float], most: float, bin_s: float) -> Iterator[Bar]:
    """Merge neighbouring bins of the same shade into bars."""
    shades: list[tuple[str, float]] = []
    for running, updating in zip(generating, updated, strict=True):
        if updating > 0.5:
            shades.append((UPDATE, NUM_SHADES))
        else:
            shades.append((ENGINE, -(-running * NUM_SHADES // most)))
    begin = 0
    for place in range(1, NUM_BINS + 1):
        if place < NUM_BINS and shades[place] == shades[begin]:
            continue
        colour, shade = shades[begin]
        if shade:
            mean = sum(generating[begin:place]) / (place - begin)
            what = "load weights" if colour == UPDATE else f"{number_text(mean)} answers at once"
            yield begin * bin_s, place * bin_s, colour, 0.15 + 0.85 * shade / NUM_SHADES, what
        begin = place


def _rect(bar: Bar, window_s: float, top: int) -> str:
    begin_s, end_s, colour, opacity, what = bar
    scale = (WIDTH - LEFT - RIGHT) / window_s
    return (
        f'<rect x="{LEFT + begin_s * scale:.1f}" y="{top}" width="{max(0.4, (end_s - begin_s) * scale):.1f}" '
        f'height="{LANE}" style="fill:var({colour});fill-opacity:{opacity:.2f}">'
        f"<title>{escape(what)}</title></rect>"
    )


def _legend() -> str:
    parts, left = [], 16
    for colour, what in (
        (ENGINE, "engines generate; darker: more answers at once"),
        (UPDATE, "new weights"),
        (TRAIN, "training"),
    ):
        parts.append(f'<rect x="{left}" y="40" width="12" height="12" style="fill:var({colour})"/>')
        parts.append(f'<text x="{left + 18}" y="50">{what}</text>')
        left += 44 + round(6.2 * len(what))
    return "".join(parts)


def _axis(window_s: float, top: int) -> str:
    parts = []
    for place in range(6):
        x = LEFT + place / 5 * (WIDTH - LEFT - RIGHT)
        text = number_text(place / 5 * window_s)
        parts.append(f'<text x="{x:.0f}" y="{top + 14}" text-anchor="middle">{text}</text>')
    centre = (LEFT + WIDTH - RIGHT) / 2
    return "".join(parts) + f'<text x="{centre:.0f}" y="{top + 31}" text-anchor="middle">seconds</text>'
