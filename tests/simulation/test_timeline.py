"""The picture of simulated runs: where its bars are, and what they say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from millrace.simulation.simulate import Simulated, SimulatedStep, Stretch
from millrace.simulation.timeline import LEFT, MOST_LANES, NUM_BINS, RIGHT, WIDTH, timeline_svg
from tests.close import close_fp64

STEPS = tuple(SimulatedStep(t, t + 4.0, t + 8.0, t + 10.0, 50, (0,)) for t in (100.0, 110.0, 120.0, 130.0))
SPACE = WIDTH - LEFT - RIGHT


def bars(svg: str) -> list[tuple[str, float, float, float, str]]:
    """Colour, begin and end in shares of the width, opacity and tooltip of every bar."""
    found = []
    for rect in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"):
        (title,) = rect.findall("{http://www.w3.org/2000/svg}title") or [None]
        if title is not None:
            colour, opacity = re.fullmatch(r"fill:var\((.*)\);fill-opacity:(.*)", rect.get("style")).groups()
            begin = (float(rect.get("x")) - LEFT) / SPACE
            end = begin + float(rect.get("width")) / SPACE
            found.append((colour, begin, end, float(opacity), title.text))
    return found


def test_bars_are_where_things_happen():
    """Three steps of 10 s are shown: 30 s in all, of which a bin is an eighth of a second."""
    stretches = (
        Stretch("engine-0", 90.0, 103.0, 8),
        Stretch("engine-0", 103.0, 104.0, 2),
        Stretch("engine-0", 118.0, 120.0, 0),
    )
    found = bars(timeline_svg({"sync": Simulated(1, STEPS, stretches)}, title="who works"))
    trained = [bar for bar in found if bar[0] == "--c3"]
    close_fp64([bar[1] for bar in trained], [4 / 30, 14 / 30, 24 / 30], atol=1e-3)
    close_fp64([bar[2] for bar in trained], [8 / 30, 18 / 30, 28 / 30], atol=1e-3)
    assert {bar[4] for bar in trained} == {"train: 4 s"}
    generating = [bar for bar in found if bar[0] == "--c1"]
    close_fp64([bar[1:3] for bar in generating], [(0.0, 3 / 30), (3 / 30, 4 / 30)], atol=2 / NUM_BINS)
    assert [bar[3:] for bar in generating] == [(1.0, "8 answers at once"), (0.49, "2 answers at once")]
    updates = [bar for bar in found if bar[4] == "load weights"]
    close_fp64(updates[0][1:3], (18 / 30, 20 / 30), atol=2 / NUM_BINS)
    assert [bar[4] for bar in found if bar[0] == "--c2"].count("weight update: 2 s") == 3


def test_many_engines_share_lanes_and_runs_share_seconds():
    short = tuple(SimulatedStep(t, t + 1.0, t + 1.5, t + 2.0, 50, (0,)) for t in range(0, 40, 2))
    stretches = tuple(Stretch(f"engine-{n}", 0.0, 5.0, 4) for n in range(10))
    runs = {"one": Simulated(20, short, stretches), "two <b>": Simulated(1, STEPS, ())}
    svg = timeline_svg(runs, title="a & b")
    lanes = re.findall(r'text-anchor="end">([^<]*)</text>', svg)
    shared = ["0 to 2", "3 to 4", "5 to 7", "8 to 9", "10 to 12", "13 to 14", "15 to 17", "18 to 19"]
    assert lanes == ["training", *shared, "training", "engine 0"]
    assert len(lanes) == MOST_LANES + 3
    generating = [bar for bar in bars(svg) if bar[0] == "--c1"]
    # Ten of twenty engines draw, in the first four lanes, for 5 of 30 s.
    assert [bar[4] for bar in generating] == ["4 answers at once"] * 4
    close_fp64([bar[2] for bar in generating], [5 / 30] * 4, atol=2 / NUM_BINS)
    assert "two &lt;b&gt;" in svg and "a &amp; b" in svg


def test_nothing_is_no_picture():
    with pytest.raises(ValueError, match="no run to plot"):
        timeline_svg({}, title="nothing")
