"""verl's words for how tokens add up, as millrace's token weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from millrace.algorithms.weights import fixed_length, sequence_mean, sequence_sum, token_mean, token_sum
from tests.golden.verl import Rows

Shares = Callable[[Tensor, Tensor], Tensor]


def verl_weights(row: Rows, aggregation: str) -> Tensor:
    """The weight of each token [T] in float64; an unknown word is a KeyError."""
    ways: dict[str, Shares] = {
        "token-mean": token_mean,
        "token-sum": token_sum,
        "seq-mean-token-mean": sequence_mean,
        "seq-mean-token-sum": sequence_sum,
        "seq-mean-token-sum-norm": partial(fixed_length, length=row.width),  # verl's divisor: the padding
    }
    return ways[aggregation](row.mask_T, row.segment_T).double()
