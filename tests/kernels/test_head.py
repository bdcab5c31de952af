from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from millrace.kernels.head import Head, Supports, runs
from tests.close import close_fp32

GROUP: Any = object()


def test_the_head_scales_then_caps() -> None:
    head = Head(torch.tensor([[1.0]]), torch.tensor([1.0]), scale=0.5, softcap=2.0)
    close_fp32(head.logits(torch.tensor([[3.0]])), [[2 * math.tanh(1.0)]])
    close_fp32(Head(torch.tensor([[1.0]]), scale=2.0).logits(torch.tensor([[3.0]])), [[6.0]])
    narrow = Head(torch.ones(1, 1, dtype=torch.bfloat16)).logits(torch.ones(1, 1).bfloat16())
    assert narrow.dtype == torch.float32
    assert Head(torch.ones(1, 1).double()).logits(torch.ones(1, 1).double()).dtype == torch.float64


def test_a_head_with_a_tile_gives_a_row_the_same_bits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_VD, hidden_ND = (torch.randn(n, 64, generator=generator) for n in (50, 33))
    head = Head(weight_VD, tile=4)
    together_NV = head.logits(hidden_ND)
    close_fp32(together_NV, hidden_ND.double() @ weight_VD.double().T, atol=1e-4)
    for n in (0, 7, 32):
        assert torch.equal(head.logits(hidden_ND[n : n + 1])[0], together_NV[n])


def test_what_a_head_refuses() -> None:
    weight_VD = torch.ones(3, 2)
    needs_0 = "it is 0 or more, and 0 without a group: a whole head begins with token 0"
    refused: dict[str, dict[str, Any]] = {
        "softcap is 0.0; it must be above 0, or None for no bound": {"softcap": 0.0},
        "bias_V has shape (1,), the weight (3, 2)": {"bias_V": torch.zeros(1)},
        f"first_row is 1; {needs_0}": {"first_row": 1},
        f"first_row is -1; {needs_0}": {"first_row": -1, "group": GROUP},
        "weight_VD has no row; give each rank of the group at least one": {
            "weight_VD": torch.ones(0, 2),
            "group": GROUP,
        },
        "tile is 4 for a shard; a row's own bits are for whole heads only": {"tile": 4, "group": GROUP},
    }
    for sentence, options in refused.items():
        with pytest.raises(ValueError) as error:
            Head(**({"weight_VD": weight_VD} | options))
        assert str(error.value) == sentence


def test_what_a_head_takes() -> None:
    one = Head(torch.ones(1, 2), torch.zeros(1), softcap=0.5, group=GROUP)
    assert (one.first_row, Head(torch.ones(1, 2), first_row=1, group=GROUP).first_row) == (0, 1)
    assert Head(torch.ones(0, 2)).logits(torch.ones(3, 2)).shape == (3, 0)
    assert Head(torch.ones(1, 2), tile=4).tile == 4


def test_runs_are_neighbours_end_to_end() -> None:
    assert runs(torch.tensor([5, 0, 9, 2]), torch.tensor([2, 0, 1, 3])).tolist() == [5, 6, 9, 2, 3, 4]
    assert runs(torch.tensor([4]), torch.tensor([0])).tolist() == []


@pytest.mark.parametrize(
    ("index", "tokens", "counts"),
    [
        (slice(1, 3), [7, 8, 9], [0, 3]),
        (torch.tensor([3, 0, 2]), [6, 4, 5, 7, 8, 9], [1, 2, 3]),
        (torch.tensor([True, False, False, True]), [4, 5, 6], [2, 1]),
    ],
)
def test_supports_are_indexed_like_a_column(
    index: slice | torch.Tensor, tokens: list[int], counts: list[int]
) -> None:
    support = Supports(torch.tensor([4, 5, 7, 8, 9, 6]), torch.tensor([2, 0, 3, 1])).to("cpu")
    assert support.row_M.tolist() == [0, 0, 2, 2, 2, 3]
    part = support[index]
    assert (part.token_M.tolist(), part.count_N.tolist()) == (tokens, counts)
