"""What the benchmark of weight sync counts; nothing here looks at a clock."""

from __future__ import annotations

import pytest
import weight_sync

from tests.close import close_fp64


def test_ratios_are_of_medians_without_the_first_round() -> None:
    turns = [{"whole": 9.0, "put": 9.0, "verify": 9.0}] + 3 * [{"whole": 4.0, "put": 2.5, "verify": 0.2}]
    seconds = {"copy": [{"whole": 9.0}] + 3 * [{"whole": 2.0}]} | dict.fromkeys(weight_sync.SIDES, turns)
    found = weight_sync.summary(seconds, 5 * 10**9)
    close_fp64(found["copy"]["gb_per_s"], 2.5)
    for side in weight_sync.SIDES:
        close_fp64(found[side]["gb_per_s"], 2.0)
        close_fp64(found[side]["put_over_copy"], 0.8)
        close_fp64(found[side]["whole_over_copy"], 0.5)
        close_fp64(found[side]["verify_fraction"], 0.05)


@pytest.mark.slow
def test_a_smaller_step_changes_fewer_elements() -> None:
    (small,), (large,) = weight_sync.payload_fractions(1e-6, 1), weight_sync.payload_fractions(1e-4, 1)
    assert 0.0 < small < 0.3 < large < 1.0
