"""Root-mean-square normalisation in one pass over each row, on the CPU; every row alone, in a fixed order.

N = rows, D = width. In float32:

    y = g * x * k,  k = 1 / sqrt(mean of x^2 + eps)

| form | g | bfloat16 is rounded | in |
|---|---|---|---|
| llama | weight | after x * k and at the end | Llama, Qwen, Mistral, Phi-3, Mixtral |
| olmo2 | weight | at the end | OLMo 2 |
| gemma | 1 + weight | at the end | Gemma |

A row's result has the same bits whatever rows stand beside it.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.compiled import array, compiled, narrow, readable, wide

Form = Literal["llama", "olmo2", "gemma"]
FORMS: tuple[Form, ...] = get_args(Form)
DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, form: Form) -> Tensor:
    """Each row of x divided by its root mean square and scaled, in the dtype of x.

    Differentiable in x and the weight, once. Compiled for float32 and bfloat16 on the CPU; elsewhere the
    plain twin runs, which differs by the order of a sum.

    Args:
        x: [..., D].
        weight_D: in the dtype of x.
        eps: added to the mean square.
        form: what g is, and where a narrow dtype is rounded; see the top of the file.

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
    """
    ours = x.dtype in DTYPES and readable(x, weight_D)
    if not ours or x.shape[-1:] != weight_D.shape or not x.numel():
        return rms_norm_plain(x, weight_D, eps, form=form)
    if torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad):
        normed: Tensor = _Norm.apply(x, weight_D, eps, form)
        return normed
    return _forward(x, weight_D, eps, form)[0]


def rms_norm_plain(x: Tensor, weight_D: Tensor, eps: float, *, form: Form) -> Tensor:
    """The plain twin of `rms_norm`, one operation after the other, as the classes of transformers do it."""
    wide_x = x.to(torch.float32)
    wide_x = wide_x * torch.rsqrt(wide_x.pow(2).mean(-1, keepdim=True) + eps)
    if form == "llama":
        return weight_D * wide_x.to(x.dtype)
    gain_D = weight_D if form == "olmo2" else 1.0 + weight_D.float()
    return (wide_x * gain_D).to(x.dtype)


def _forward(x: Tensor, weight_D: Tensor, eps: float, form: Form) -> tuple[Tensor, Any]:
    """The result, and the array k of each row."""
    y = torch.empty(x.shape, dtype=x.dtype)
    scale_N = np.empty(x.numel() // len(weight_D), np.float32)
    arrays = _rows(x), _gain(weight_D, form), np.float32(eps), _rows(y), scale_N
    if x.dtype is torch.float32:
        _normed(*arrays)
    else:
        _normed_bfloat16(*arrays, form == "llama")
    return y, scale_N


def _rows(x: Tensor) -> Any:
    return array(x).reshape(-1, x.shape[-1])


def _gain(weight_D: Tensor, form: Form) -> Any:
    """The array g, float32, of memory of its own; no gradient is being recorded."""
    # torch never again lets go of memory that numpy has seen, and a sharded weight's memory comes and goes.
    gain_D = weight_D.clone().float().numpy()
    if form == "gemma":
        gain_D += np.float32(1)
    return gain_D


class _Norm(torch.autograd.Function):
    """With u = g dy: dx = k (u - x k^2 mean(u x)), dg = sum over rows of dy x k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, form: Form) -> Tensor:
        y, scale_N = _forward(x, weight_D, eps, form)
        ctx.save_for_backward(x, weight_D, torch.from_numpy(scale_N))
        ctx.form = form
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, scale_N = ctx.saved_tensors
        x_slope, weight_slope_D = torch.empty(x.shape), torch.empty(weight_D.shape)
        given = _rows(slope.float()), _rows(x.float()), _gain(weight_D, ctx.form), scale_N.numpy()
        _slopes(*given, _rows(x_slope), weight_slope_D.numpy())
        return x_slope.to(x.dtype), weight_slope_D.to(x.dtype), None, None


@compiled("contract", "reassoc")
def _scale(x_D: Any, eps: Any) -> Any:
    square = np.float32(0)
    for d in range(len(x_D)):
        square += x_D[d] * x_D[d]
    return np.float32(1) / np.sqrt(square / np.float32(len(x_D)) + eps)


@compiled()
def _normed(x_ND: Any, gain_D: Any, eps: Any, y_ND: Any, scale_N: Any) -> None:
    for n in range(len(x_ND)):
        scale_N[n] = _scale(x_ND[n], eps)
        for d in range(len(gain_D)):
            y_ND[n, d] = x_ND[n, d] * scale_N[n] * gain_D[d]


@compiled()
def _normed_bfloat16(x_ND: Any, gain_D: Any, eps: Any, y_ND: Any, scale_N: Any, round_first: Any) -> None:
    wide_D = np.empty(len(gain_D), np.float32)
    for n in range(len(x_ND)):
        for d in range(len(gain_D)):
            wide_D[d] = wide(x_ND[n, d])
        scale_N[n] = _scale(wide_D, eps)
        for d in range(len(gain_D)):
            y = wide_D[d] * scale_N[n]
            if round_first:
                y = wide(narrow(y))
            y_ND[n, d] = narrow(y * gain_D[d])


@compiled("contract", "reassoc")
def _slopes(
    slope_ND: Any, x_ND: Any, gain_D: Any, scale_N: Any, x_slope_ND: Any, weight_slope_D: Any
) -> None:
    total_D = np.zeros(len(gain_D))  # float64: a batch may hold a hundred thousand rows
    for n in range(len(x_ND)):
        scale, product = scale_N[n], np.float32(0)
        for d in range(len(gain_D)):
            product += gain_D[d] * slope_ND[n, d] * x_ND[n, d]
        share = product * scale * scale / np.float32(len(gain_D))
        for d in range(len(gain_D)):
            x_slope_ND[n, d] = scale * (gain_D[d] * slope_ND[n, d] - x_ND[n, d] * share)
            total_D[d] += slope_ND[n, d] * x_ND[n, d] * scale
    weight_slope_D[:] = total_D
