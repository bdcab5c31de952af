"""The coefficient of a KL penalty: as given, or steered to a target."""

from __future__ import annotations

import pytest

from millrace.training.kl_control import KlControl
from tests.close import close_fp64


def test_without_a_target_the_coefficient_stays():
    control = KlControl(0.3)
    control.update(7.0, 20_000)
    assert control.coefficient == 0.3


@pytest.mark.parametrize(
    ("divergence", "error"),
    # Too far by a half, by far too much, not far enough by a twentieth, not far at all; at the target.
    [(0.09, 0.2), (5.0, 0.2), (0.057, -0.05), (0.0, -0.2), (0.06, 0.0)],
)
def test_the_coefficient_is_steered_by_at_most_a_fifth_a_horizon(divergence, error):
    control = KlControl(0.3, target=0.06, horizon=400)
    control.update(divergence, 80)
    close_fp64(control.coefficient, 0.3 * (1 + error * 80 / 400))
    control.update(divergence, 80)
    close_fp64(control.coefficient, 0.3 * (1 + error * 80 / 400) ** 2)


def test_the_horizon_is_ten_thousand_sequences_unless_said_otherwise():
    control = KlControl(1.0, target=0.1)
    control.update(1.0, 500)
    close_fp64(control.coefficient, 1.01)


def test_a_horizon_shorter_than_a_batch_is_refused():
    with pytest.raises(ValueError) as caught:
        KlControl(1.0, target=0.1, horizon=7).update(1.0, 8)
    assert str(caught.value) == "horizon is 7; it must be at least the 8 sequences of a step"
