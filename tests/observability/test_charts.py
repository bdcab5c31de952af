from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from millrace.observability.charts import Series, Shade, bar_svg, curve_svg, number_text, smoothed

SVG = "{http://www.w3.org/2000/svg}"


def drawn(points, **options) -> ElementTree.Element:
    text = curve_svg(
        [Series("reward", points, marked=True)],
        title="Reward",
        x_label="batches",
        y_label="mean",
        standalone=True,
        **options,
    )
    return ElementTree.fromstring(text)


def path_of(points, **options) -> str:
    (path,) = drawn(points, **options).iter(f"{SVG}path")
    return path.attrib["d"]


def places(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def test_a_curve_runs_from_the_left_edge_to_the_right_and_higher_values_stand_higher():
    path = places(path_of([(0, 0.0), (1, 1.0), (2, 0.5)], width=420, height=250, y_range=(0, 1)))
    assert [x for x, _ in path] == [54.0, 230.0, 406.0]
    low, high, middle = (y for _, y in path)
    assert (low, high, middle) == (212.0, 66.0, 139.0)


@pytest.mark.parametrize("gap", [None, math.nan, math.inf])
def test_a_curve_breaks_where_a_value_is_missing(gap):
    path = path_of([(0, 1.0), (1, 2.0), (2, gap), (3, 1.0), (4, 2.0)])
    assert re.sub(r"[\d. -]", "", path) == "MLML"


def test_a_long_curve_is_thinned_but_keeps_its_spike_and_its_ends():
    points = [(step, 1.0 + 0.001 * (step % 7)) for step in range(20_000)]
    points[12_345] = (12_345, 9.0)
    path = places(path_of(points, y_range=(0, 10)))
    assert len(path) <= 402
    assert min(y for _, y in path) == 80.6, "nine tenths of the way from 212 up to 66"
    assert path[-1][0] == 406.0


def test_one_point_and_a_constant_curve_can_be_drawn():
    assert len(list(drawn([(5, 0.25)]).iter(f"{SVG}circle"))) == 2, "a dot and its tooltip"
    noisy = [(step, 0.3 + (1e-16 if step % 2 else 0.0)) for step in range(10)]
    heights = {y for _, y in places(path_of(noisy))}
    assert len(heights) == 1, "rounding is no signal"


def test_a_value_outside_a_fixed_range_stays_in_the_frame():
    assert places(path_of([(0, 0.5), (1, 7.0)], y_range=(0, 1)))[1][1] == 66.0


def test_a_chart_without_a_finite_point_is_refused_by_name():
    with pytest.raises(ValueError, match="the chart 'Reward' has no finite point to draw"):
        drawn([(0, None), (1, math.nan)])
    with pytest.raises(ValueError, match="the bar 'Time' has no part to draw"):
        bar_svg([], title="Time", unit="s")


def test_tooltips_and_the_last_value_say_the_numbers():
    chart = drawn([(1, 0.25), (2, 0.75)])
    tips = [tip.text for tip in chart.iter(f"{SVG}title")]
    assert tips == ["reward 0.25, batches 1", "reward 0.75, batches 2"]
    (value,) = (text.text for text in chart.iter(f"{SVG}text") if text.attrib.get("class") == "value")
    assert value == "0.75"


def test_several_curves_are_named_beside_their_last_values_and_raw_ones_are_not():
    series = [
        Series("raw", [(0, 1), (1, 2)], faint=True),
        Series("a", [(0, 1), (1, 2)]),
        Series("b", [(0, 3)], 2),
    ]
    text = curve_svg(series, title="t", x_label="x", y_label="y")
    assert ">a 2</text>" in text and ">b 3</text>" in text and ">raw" not in text


def test_words_are_escaped():
    text = curve_svg(
        [Series("<b>", [(0, 1)])], title='"><script>', x_label="<x>", y_label="<y>", shade=Shade(0, 1, "<s>")
    )
    text += bar_svg([("<part>", 1.0, 1)], title="<t>", unit="<u>")
    assert not re.search(r"<(b|script|x|y|s|part|t|u)>", text)


def test_points_that_are_not_joined_are_dots_without_a_last_value():
    cloud = Series("wins", [(1, 0.9), (0, 0.5)], joined=False)
    chart = curve_svg([cloud, Series("loses", [(0, 0.1), (1, 0.2)])], title="t", x_label="x", y_label="y")
    assert chart.count('class="dot"') == 2 and chart.count("<path") == 1
    assert ">wins<" in chart and ">loses 0.2<" in chart


def test_a_bar_divides_its_width_by_size():
    bar = bar_svg([("sample", 3.0, 1), ("train", 1.0, 2)], title="Time", unit="s")
    starts = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', bar)]
    assert starts == [0.0, 750.0]
    assert "sample: 3.0 s (75 %)" in bar


def test_a_smoothed_value_is_the_mean_of_its_finite_neighbours():
    points = [(0, 1.0), (1, 2.0), (2, None), (3, 6.0)]
    assert smoothed(points, 1) == [(0, 1.5), (1, 1.5), (2, 4.0), (3, 6.0)]
    assert smoothed([(0, None)], 3) == [(0, None)]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.95, "0.95"), (3e-4, "3e-4"), (-2.5e-9, "-2.5e-9"), (1e-3, "1e-3"), (8123.4, "8123")]
    + [(12_000, "12k"), (3_450_000, "3.45M"), (2e12, "2000G")],
)
def test_a_number_is_written_in_few_characters(value: float, shown: str):
    assert number_text(value) == shown


def test_ticks_of_close_values_can_be_told_apart():
    chart = drawn([(0, 2.001), (1, 2.004)])
    ticks = [text.text for text in chart.iter(f"{SVG}text") if text.text and text.text.startswith("2.00")]
    assert len(ticks) > 3 and len(set(ticks)) >= len(ticks) - 1, "the last value may repeat a tick"
