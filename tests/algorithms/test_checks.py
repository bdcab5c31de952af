from __future__ import annotations

import re

import pytest
import torch

from millrace.algorithms.checks import (
    check_finite,
    check_ids,
    check_lengths,
    check_positive,
    check_segments,
    check_shapes,
    refuse,
    require,
)


def test_a_setting_is_refused_by_name_and_value() -> None:
    require(True, "low", 0.2, "below 1")
    with pytest.raises(ValueError, match=re.escape("low is 1.2; it must be below 1") + "$"):
        require(False, "low", 1.2, "below 1")


def test_the_first_tensor_of_another_shape_is_named() -> None:
    check_shapes(a_T=torch.zeros(3))
    check_shapes(a_T=torch.zeros(3), b_T=torch.ones(3, dtype=torch.long), c_T=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=re.escape("c_T has shape (1,), but a_T (3,)") + "$"):
        check_shapes(a_T=torch.zeros(3), b_T=torch.zeros(3), c_T=torch.zeros(1), d_T=torch.zeros(2))


def test_checks_name_what_they_refuse() -> None:
    with pytest.raises(ValueError, match=r"^b_T has shape \(2, 1\), but a_T \(2,\)$"):
        check_shapes(a_T=torch.zeros(2), b_T=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"^c_T has shape \(3,\), but a_T \(2,\)$"):
        check_shapes(a_T=torch.zeros(2), b_T=torch.ones(2), c_T=torch.zeros(3))
    with pytest.raises(ValueError, match=r"^b_KN\[1, 2\] is -inf; it must be finite$"):
        check_finite(a=None, b_KN=torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, -torch.inf]]))
    with pytest.raises(ValueError, match=r"^x_N\[1\] is nan; it must be finite$"):
        check_finite(x_N=torch.tensor([0.0, torch.nan, torch.inf]))
    with pytest.raises(ValueError, match=r"^epsilon is 0; it must be above 0$"):
        check_positive(alpha=0.5, epsilon=0)
    with pytest.raises(ValueError, match=r"^alpha is nan; it must be above 0$"):
        check_positive(alpha=float("nan"))
    with pytest.raises(ValueError, match=r"^x_N\[2\] is 3; it is odd$"):
        refuse(torch.tensor([False, False, True]), torch.tensor([2, 1, 3]), "x_N", "it is odd")
    with pytest.raises(
        ValueError, match=r"^segment_N\[1\] is 0; it must not be below the segment before it$"
    ):
        check_segments(2, segment_N=torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"^length_B\[1\] is -1; it must be at least 0$"):
        check_lengths(length_B=torch.tensor([0, -1]))


@pytest.mark.parametrize(("bad", "place"), [(-1, 0), (3, 1), (17, 2)])
def test_ids_lie_from_0_to_below_their_number(bad: int, place: int) -> None:
    id_N = torch.tensor([0, 2, 1])
    check_ids(3, id_N=id_N)
    id_N[place] = bad
    with pytest.raises(ValueError, match=rf"^id_N\[{place}\] is {bad}; it must lie in \[0, 3\)$"):
        check_ids(3, id_N=id_N)
