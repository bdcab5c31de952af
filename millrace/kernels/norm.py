"""Root-mean-square normalization in one pass over each row, on the CPU; row by row, in a fixed order.

N = rows, D = width. In float32:

    y = g * x * k,  k = 1 / sqrt(mean of x^2 + eps)

| form | g | bfloat16 is rounded | in |
|---|---|---|---|
| llama | weight | after x * k and at the end | Llama, Qwen, Mistral, Phi-3, Mixtral |
| olmo2 | weight | at the end | OLMo 2 |
| gemma | 1 + weight | at the end | Gemma |

A row's result has the same bits in any batch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.compiled import NUMBERS, array, compiled, memory, narrow, number_of, put, readable, wide

Form = Literal["llama", "olmo2", "gemma"]
FORMS: tuple[Form, ...] = get_args(Form)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, form: Form) -> Tensor:
    """Divide each row of x [..., D] by its root mean square and scale it, in the dtype of x.

    Differentiable in x and the weight, once. Compiled for float32 and bfloat16 on the CPU; elsewhere
    `rms_norm_plain` runs, which sums in another order. The module's table explains the forms.

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
    """
    ours = x.dtype in NUMBERS and readable(x, weight_D)
    if not ours or x.shape[-1:] != weight_D.shape or not x.numel():
        return rms_norm_plain(x, weight_D, eps, form=form)
    if torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad):
        normed: Tensor = _Norm.apply(x, weight_D, eps, form)
        return normed
    return _forward(x, weight_D, eps, form)[0]


def rms_norm_plain(x: Tensor, weight_D: Tensor, eps: float, *, form: Form) -> Tensor:
    """Reference for `rms_norm`: the sequence of operations in transformers' classes."""
    wide_x = x.to(torch.float32)
    wide_x = wide_x * torch.rsqrt(wide_x.pow(2).mean(-1, keepdim=True) + eps)
    if form == "llama":
        return weight_D * wide_x.to(x.dtype)
    gain_D = weight_D if form == "olmo2" else 1.0 + weight_D.float()
    return (wide_x * gain_D).to(x.dtype)


def _forward(x: Tensor, weight_D: Tensor, eps: float, form: Form) -> tuple[Tensor, Tensor]:
    x, weight_D = x.contiguous(), weight_D.contiguous()
    width = len(weight_D)
    y, scale_N = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.numel() // width)
    addresses = x.data_ptr(), weight_D.data_ptr(), y.data_ptr(), scale_N.data_ptr()
    round_first = form == "llama" and x.dtype is torch.bfloat16
    _normed(addresses, (len(scale_N), width), NUMBERS[x.dtype], eps, form == "gemma", round_first)
    return y, scale_N


def _rows(x: Tensor) -> Any:
    return array(x).reshape(-1, x.shape[-1])


def _gain(weight_D: Tensor, form: Form) -> Any:
    # A copy: torch cannot free memory that numpy has viewed, and a sharded weight's memory must be freed.
    gain_D = weight_D.clone().float().numpy()
    if form == "gemma":
        gain_D += np.float32(1)
    return gain_D


class _Norm(torch.autograd.Function):
    """With u = g dy: dx = k (u - x k^2 mean(u x)), dg = sum over rows of dy x k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, form: Form) -> Tensor:
        y, scale_N = _forward(x, weight_D, eps, form)
        ctx.save_for_backward(x, weight_D, scale_N)
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
def _normed(addresses: Any, shape: Any, number: Any, eps: Any, plus_one: bool, round_first: bool) -> None:
    num_rows, width = shape
    x_ND, weight_D = memory(addresses[0], shape, number), memory(addresses[1], (width,), number)
    y_ND = memory(addresses[2], shape, number)
    scale_N = memory(addresses[3], (num_rows,), np.float32(0))
    gain_D = gain_of(weight_D, np.float32(1 if plus_one else 0))
    norm_rows(x_ND, gain_D, (np.float32(eps), round_first), scale_N, y_ND)


@compiled()
def gain_of(weight_D: Any, plus: Any) -> Any:
    """Return the array g, float32."""
    gain_D = np.empty(len(weight_D), np.float32)
    for d in range(len(weight_D)):
        gain_D[d] = number_of(weight_D[d]) + plus
    return gain_D


@compiled()
def norm_rows(x_ND: Any, gain_D: Any, options: Any, scale_N: Any, y_ND: Any) -> None:
    """Compute the rows of y, and k of each; `options` are eps, and whether x * k is rounded to bfloat16."""
    eps, round_first = options
    wide_D = np.empty(len(gain_D), np.float32)
    for n in range(len(x_ND)):
        x_D, y_D = x_ND[n], y_ND[n]
        for d in range(len(gain_D)):
            wide_D[d] = number_of(x_D[d])
        scale_N[n] = _scale(wide_D, eps)
        for d in range(len(gain_D)):
            y = wide_D[d] * scale_N[n]
            if round_first:
                y = wide(narrow(y))
            put(y_D, d, y * gain_D[d])


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
    for d in range(len(gain_D)):
        weight_slope_D[d] = total_D[d]
