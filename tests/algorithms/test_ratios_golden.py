"""verl's rollout correction: importance weights and the masks that rejection leaves."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from torch import Tensor

from millrace.algorithms.ratios import (
    Estimator,
    Level,
    Reduction,
    divide_by_mean,
    icepop,
    importance_weights,
    rejection,
    truncate,
)
from tests.close import close_fp64
from tests.golden.verl import CASES, rows

EVERY = [(case, key) for case in CASES for key in case["correction"]]
WEIGHTS = re.compile(r"is level=(?P<level>\w+) threshold=(?P<bounds>[\d._]+) normalize=(?P<normal>\w+)")
REJECTION = re.compile(r"rejection (?P<level>\w+)_(?P<estimator>k\d) (?P<bounds>[\d._]+)")
LEVELS: dict[str, Reduction] = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


def bounds_of(text: str) -> tuple[float | None, float]:
    """`2.0` is an upper bound, `0.5_5.0` both."""
    *low, high = (float(word) for word in text.split("_"))
    return (low[0] if low else None), high


def weights(found: re.Match[str], log_N: Tensor, segment_N: Tensor, num_segments: int) -> Tensor:
    level, (low, high) = cast(Level, found["level"]), bounds_of(found["bounds"])
    raw_N = importance_weights(log_N, segment_N, num_segments, level=level)
    w_N = truncate(raw_N, high=high) if low is None else icepop(raw_N, low=low, high=high)
    if found["normal"] == "True":
        return divide_by_mean(w_N, segment_N, num_segments, level=level)
    assert found["normal"] == "False"
    return w_N


@pytest.mark.parametrize(("case", "key"), EVERY, ids=[f"seed {case['seed']} {key}" for case, key in EVERY])
def test_weights_and_masks_are_those_of_verl(case: dict[str, Any], key: str) -> None:
    row = rows(case)
    log_N = (row.input("old") - row.input("rollout"))[row.mask_T]
    segment_N, num_segments = row.segment_T[row.mask_T], len(row.group_B)
    if as_weights := WEIGHTS.fullmatch(key):
        found_N = weights(as_weights, log_N, segment_N, num_segments)
    else:
        as_mask = REJECTION.fullmatch(key)
        assert as_mask, f"{key} has no translation"
        low, high = bounds_of(as_mask["bounds"])
        found_N = rejection(
            log_N,
            segment_N,
            num_segments,
            estimator=cast(Estimator, as_mask["estimator"]),
            level=LEVELS[as_mask["level"]],
            low=low,
            high=high,
        )
    golden_N = row.pack(case["correction"][key])[row.mask_T]
    close_fp64(found_N.double(), golden_N, rtol=1e-6, atol=1e-6)
