"""What no advantage can be computed from is refused in one sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from millrace.algorithms.advantages import (
    baseline_centred,
    gpg,
    group_centred,
    group_decoupled,
    group_normalised,
    leave_one_out,
    leave_one_out_normalised,
    length_weighted_centred,
    optimal_token_baseline,
    pass_at_k,
    reinforce_plus_plus_baseline,
)

GROUP_ESTIMATORS = [group_centred, group_normalised, leave_one_out, leave_one_out_normalised, gpg, pass_at_k]


def double(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


GROUPED = {"reward_N": double(1, 2, 3), "group_N": torch.tensor([0, 1, 1]), "num_groups": 2}
WITH_LENGTHS = GROUPED | {"length_N": torch.tensor([1, 2, 1])}
TOKENS = {
    "return_T": double(1, 2, 3),
    "logprob_T": double(-1, -1, -1),
    "square_T": double(0.5, 0.5, 0.5),
    "position_T": torch.tensor([0, 1, 0]),
    "segment_T": torch.tensor([0, 0, 1]),
    "group_B": torch.tensor([0, 0]),
}
CENTRED = {
    "return_T": TOKENS["return_T"],
    "baseline_N": double(1, 2),
    "segment_T": TOKENS["segment_T"],
}
DECOUPLED = {
    "reward_KN": torch.ones(2, 3),
    "group_N": GROUPED["group_N"],
    "num_groups": 2,
    "weight_K": double(1, 1),
}
NAN = double(1, torch.nan, 3)
BAD = [
    *[(f, GROUPED, {"reward_N": NAN}, r"reward_N\[1\] is nan; it must be finite") for f in GROUP_ESTIMATORS],
    *[
        (f, GROUPED, {"reward_N": double(1, 2)}, r"group_N has shape \(3,\), but reward_N \(2,\)")
        for f in GROUP_ESTIMATORS
    ],
    *[
        (f, GROUPED, {"num_groups": 1}, r"group_N\[1\] is 1; it must lie in \[0, 1\)")
        for f in GROUP_ESTIMATORS
    ],
    (group_centred, GROUPED, {"group_N": torch.tensor([0, -1, 1])}, r"group_N\[1\] is -1; it must lie in"),
    (
        group_centred,
        GROUPED,
        {"reward_N": double(1, 2, torch.inf)},
        r"reward_N\[2\] is inf; it must be finite",
    ),
    *[
        (
            f,
            WITH_LENGTHS,
            {"length_N": torch.tensor([1, 1])},
            r"length_N has shape \(2,\), but reward_N \(3,\)",
        )
        for f in (length_weighted_centred, reinforce_plus_plus_baseline)
    ],
    *[
        (
            f,
            WITH_LENGTHS,
            {"length_N": torch.tensor([1, 1, -4])},
            r"length_N\[2\] is -4; it must be at least 0",
        )
        for f in (length_weighted_centred, reinforce_plus_plus_baseline)
    ],
    (length_weighted_centred, WITH_LENGTHS, {"reward_N": NAN}, r"reward_N\[1\] is nan; it must be finite"),
    (
        group_decoupled,
        DECOUPLED,
        {"reward_KN": torch.ones(2, 2)},
        r"reward_KN has shape \(2, 2\), but there are 2 weights and 3 trajectories",
    ),
    (group_decoupled, DECOUPLED, {"weight_K": double(1, 1, 1)}, "but there are 3 weights and 3 trajectories"),
    (group_decoupled, DECOUPLED, {"weight_K": NAN[:2]}, r"weight_K\[1\] is nan; it must be finite"),
    (
        group_decoupled,
        DECOUPLED,
        {"reward_KN": torch.ones(2, 3) / 0},
        r"reward_KN\[0, 0\] is inf; it must be",
    ),
    (
        group_decoupled,
        DECOUPLED,
        {"weight_K": double(), "reward_KN": torch.ones(0, 3)},
        r"weight_K is \[\]; it must be at least one weight",
    ),
    (baseline_centred, CENTRED, {"return_T": NAN}, r"return_T\[1\] is nan; it must be finite"),
    (baseline_centred, CENTRED, {"baseline_N": NAN}, r"baseline_N\[1\] is nan; it must be finite"),
    (baseline_centred, CENTRED, {"baseline_N": double(1)}, r"segment_T\[2\] is 1; it must lie in \[0, 1\)"),
    (baseline_centred, CENTRED, {"return_T": double(1)}, r"segment_T has shape \(3,\), but return_T \(1,\)"),
    *[
        (optimal_token_baseline, TOKENS, {name: NAN}, rf"{name}\[1\] is nan; it must be finite")
        for name in ("return_T", "logprob_T", "square_T", "weight_T")
    ],
    *[
        (optimal_token_baseline, TOKENS, {name: TOKENS["group_B"]}, rf"{name} has shape \(2,\), but return_T")
        for name in ("logprob_T", "square_T", "position_T", "segment_T", "weight_T")
    ],
    (
        optimal_token_baseline,
        TOKENS,
        {"group_B": torch.tensor([0])},
        r"segment_T\[2\] is 1; it must lie in \[0, 1\)",
    ),
    (
        optimal_token_baseline,
        TOKENS,
        {"segment_T": torch.tensor([1, 0, 0])},
        r"segment_T\[1\] is 0; it must not be below the segment before it",
    ),
    (optimal_token_baseline, TOKENS, {"epsilon": 0.0}, "epsilon is 0.0; it must be above 0"),
]


@pytest.mark.parametrize(
    ("function", "good", "bad", "sentence"),
    [pytest.param(*entry, id=f"{entry[0].__name__} {entry[3]}") for entry in BAD],
)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], good: dict[str, Any], bad: dict[str, Any], sentence: str
) -> None:
    assert function(**good).isfinite().all()
    with pytest.raises(ValueError, match=sentence):
        function(**(good | bad))
