"""The bias meter: silent while chance drops, and loud once slow or hard groups are dropped."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from millrace.rollout.selection_bias import WINDOW, BiasMeter
from tests.close import close_fp64


def test_the_differences_are_those_of_numpy():
    meter = BiasMeter()
    groups = [
        ([10, 30], [1.0, 0.0], [True, True]),
        ([50, 70], [1.0, 1.0], [True, False]),
        ([90, 20], [math.nan, math.nan], [False, False]),
        ([90, 120], [0.0, 0.0], [False, False]),
    ]
    for group in groups:
        meter.add(*group)
    length = np.array([10, 30, 50, 70, 90, 20, 90, 120])
    reward, hard = np.array([1, 0, 1, 1, 0, 0]), np.array([0.5, 0.5, 0, 0, 1, 1])
    record = meter.record()
    assert list(record) == [
        "selection_bias/dropped_fraction",
        "selection_bias/length",
        "selection_bias/reward",
        "selection_bias/difficulty",
    ]
    assert record["selection_bias/dropped_fraction"] == 5 / 8
    for name, values in (("length", length), ("reward", reward), ("difficulty", hard)):
        close_fp64(record[f"selection_bias/{name}"], (values[:3].mean() - values.mean()) / values.std())


def fill(
    meter: BiasMeter, rng: random.Random, dropped: str, *, groups: int = 400, fraction: float = 0.2
) -> None:
    """Groups whose long answers are the wrong ones; a fifth is dropped: the longest, or any."""
    for _ in range(groups):
        hardness = rng.random()
        rewards = [float(rng.random() > hardness) for _ in range(8)]
        lengths = [100 + 200 * hardness + rng.gauss(0, 30) for _ in range(8)]
        drop = hardness > 1 - fraction if dropped == "long" else rng.random() < fraction
        meter.add(lengths, rewards, [not drop] * 8)


@pytest.mark.parametrize("seed", range(3))
def test_a_warning_where_dropping_selects_and_none_where_chance_drops(seed):
    meter = BiasMeter()
    fill(meter, random.Random(seed), "any")
    assert meter.warning() is None
    meter = BiasMeter()
    fill(meter, random.Random(seed), "long")
    warning = meter.warning()
    assert warning is not None
    for name, sign in (("length", "-"), ("reward", "+"), ("difficulty", "-")):
        assert f"{name} {sign}0." in warning
    assert "(of the last 400 groups " in warning


def test_rewards_that_fail_where_answers_are_long_are_warned_of():
    meter, rng = BiasMeter(), random.Random(0)
    for _ in range(400):
        lengths = [rng.randint(1, 100) for _ in range(8)]
        meter.add(lengths, [math.nan if n > 60 else 1.0 for n in lengths], [n <= 60 for n in lengths])
    warning = str(meter.warning())
    assert "length -0." in warning and "see why rewards fail" in warning


def test_few_groups_tell_nothing():
    meter = BiasMeter()
    assert meter.record() == {} and meter.warning() is None
    # The longer half is dropped: by one standard deviation, where chance has an error of 1 / sqrt(groups).
    for number in range(8):
        meter.add([10 if number % 2 else 90], [math.nan], [number % 2 == 1])
    assert list(meter.record()) == ["selection_bias/dropped_fraction", "selection_bias/length"]
    close_fp64(meter.record()["selection_bias/length"], -1.0)
    assert meter.warning() is None
    for number in range(2):
        meter.add([10 if number else 90], [math.nan], [number == 1])
    assert "length -1.00 " in str(meter.warning())


def test_groups_without_a_reward_tell_nothing_of_rewards():
    meter = BiasMeter()
    for number in range(8):
        meter.add([50], [number % 2], [number % 2 == 1])
    for _ in range(40):
        meter.add([50], [math.nan], [True])
    close_fp64(meter.record()["selection_bias/reward"], 1.0)
    close_fp64(meter.record()["selection_bias/difficulty"], -1.0)
    assert meter.warning() is None


def test_a_difference_that_is_sure_but_small_is_no_warning():
    meter = BiasMeter()
    for number in range(WINDOW):
        dropped = number % 10 == 0
        long = number % 50 != 0 if dropped else number % 2 == 0
        meter.add([90 if long else 10], [0.0], [not dropped])
    sure = 3 * math.sqrt(0.1 / 0.9 / WINDOW)
    assert sure < -meter.record()["selection_bias/length"] < 0.1
    assert meter.warning() is None


def test_withheld_trajectories_count():
    meter = BiasMeter()
    for number in range(400):
        meter.add([10, 20, 30, 90 + number % 3], [1.0, 1.0, 1.0, 0.0], [True, True, True, False])
    record = meter.record()
    assert record["selection_bias/dropped_fraction"] == 0.25
    assert record["selection_bias/reward"] > 0.5
    # The difficulty is the group's, of which all have a part.
    assert "selection_bias/difficulty" not in record
    assert "length -0." in str(meter.warning())


def test_only_the_last_groups_are_compared_and_kept():
    meter = BiasMeter()
    fill(meter, random.Random(0), "long", groups=WINDOW)
    assert meter.warning() is not None
    again = BiasMeter()
    again.load_state(json.loads(json.dumps(meter.state())))
    assert again.record() == meter.record()
    for one in (meter, again):
        fill(one, random.Random(1), "any", groups=WINDOW)
    assert again.record() == meter.record()
    assert meter.warning() is None and len(meter.state()) == WINDOW


def test_facts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a group has 2 lengths, 1 rewards and 2 flags of use"):
        BiasMeter().add([1, 2], [0.0], [True, True])
    with pytest.raises(ValueError, match="a group has 0 lengths"):
        BiasMeter().add([], [], [])
