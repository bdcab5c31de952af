"""Token sampling and log-probabilities from logits: input validation and dispatch.

N = rows, V = vocabulary. The arithmetic is in `sampling_plain`: a row gives the same bits in a batch of any
size, and `sample` and `row_logprob` give the same bits for the same token. On a CPU compiled kernels run,
elsewhere the plain implementations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.kernels.sampling_plain import row_logprob_plain, sample_plain, truncate_plain

DTYPES = (torch.float32, torch.float64)


def sample(logit_NV: Tensor, temperature_N: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token (int64) for each row, with its log-probability log softmax(logits / temperature).

    The token is the first with a cumulative mass above u times the total; a token without mass is never
    sampled. At temperature 0 it is the most likely token (the lowest id of equals), with its log-probability
    at temperature 1. Logits are float32 or float64, without gradient; minus infinity excludes a token. u is
    float64 in [0, 1). Log-probabilities have the dtype of the logits, NaN for a row without distribution. A
    shape or dtype that does not fit, and logits that require a gradient, are a ValueError.
    """
    columns = _columns(logit_NV, temperature_N=temperature_N, uniform_N=uniform_N)
    if logit_NV.device.type == "cpu":
        from millrace.kernels import sampling_cpu

        return sampling_cpu.sample(logit_NV.contiguous(), columns[0], columns[1].double())
    return sample_plain(logit_NV, *columns)


def row_logprob(logit_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    """Compute the log-probability of one given token for each row, [N], bit for bit that of `sample`.

    Temperature 0 counts as 1. The result has the dtype of the logits; NaN for a row without distribution.
    Errors are those of `sample`, and a ValueError for a target outside the vocabulary.
    """
    target_N, temperature_N = _columns(logit_NV, target_N=target_N, temperature_N=temperature_N)
    outside_N = (target_N < 0) | (target_N >= logit_NV.shape[1])
    if outside_N.any():
        raise ValueError(
            f"target_N holds {int(target_N[outside_N][0])}; the vocabulary has {logit_NV.shape[1]} tokens"
        )
    if logit_NV.device.type == "cpu":
        from millrace.kernels import sampling_cpu

        return sampling_cpu.row_logprob(logit_NV.contiguous(), target_N.long(), temperature_N)
    return row_logprob_plain(logit_NV, target_N, temperature_N)


def truncate(
    logit_NV: Tensor, temperature_N: Tensor, *, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> None:
    """Truncate the distribution of each row: set the logits of excluded tokens to minus infinity, in place.

    First min-p excludes tokens with less than min_p times the mass of the most likely token. Then top-k keeps
    the k most likely of the rest. Then top-p keeps the fewest of these that hold top_p of their mass. Ties go
    to the lower id; the most likely token is always kept. The order is vLLM's.

    Logits are contiguous; temperatures are above 0. top_k are integers, 0 is off; top_p float64 in (0, 1], 1
    is off; min_p float64 in [0, 1], 0 is off. Other errors are those of `sample`.
    """
    columns = _columns(
        logit_NV, temperature_N=temperature_N, top_k_N=top_k_N, top_p_N=top_p_N, min_p_N=min_p_N
    )
    if not logit_NV.is_contiguous():
        raise ValueError(
            f"logit_NV has strides {logit_NV.stride()}; it is changed in place and must be contiguous"
        )
    if logit_NV.device.type == "cpu":
        from millrace.kernels import sampling_cpu

        temperature_N, top_k_N, top_p_N, min_p_N = columns
        sampling_cpu.truncate(logit_NV, temperature_N, top_k_N.long(), top_p_N.double(), min_p_N.double())
    else:
        truncate_plain(logit_NV, *columns)


def _columns(logit_NV: Tensor, **columns: Tensor) -> list[Tensor]:
    if logit_NV.dim() != 2 or logit_NV.shape[1] == 0 or logit_NV.dtype not in DTYPES:
        raise ValueError(
            f"logit_NV is {logit_NV.dtype} of shape {tuple(logit_NV.shape)}; "
            "expected float32 or float64 of shape (N, V) with V at least 1"
        )
    if logit_NV.requires_grad:
        raise ValueError("logit_NV requires a gradient, which sampling would drop; detach it")
    for name, column_N in columns.items():
        if column_N.shape != logit_NV.shape[:1]:
            raise ValueError(
                f"{name} has shape {tuple(column_N.shape)}; expected ({len(logit_NV)},), one for each row"
            )
    return [column_N.contiguous() for column_N in columns.values()]
