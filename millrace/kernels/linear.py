"""y = x W^T + b on the CPU by the fastest available library, and in tiles with batch-invariant results.

M = rows, D = input width, N = output width.

| | float32 | bfloat16 | float64, other devices |
|---|---|---|---|
| plain weight | oneDNN from `PRODUCT` or `WEIGHT` on | `F.linear` (oneDNN inside) | `F.linear` |
| packed weight | `product_cpu` | `product_cpu` | `product_cpu` in float64 |
| with gradient | oneDNN from `RECORDED_PRODUCT` on | `F.linear` | `F.linear` |

Except for packed weights and `invariant_linear`, the last bits of a row depend on M, which decides the
library and, within a library, the algorithm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels import product_cpu
from millrace.kernels.compiled import readable
from millrace.kernels.product_cpu import PackedWeight

# Below both, oneDNN's fixed cost of about 12 microseconds exceeds the time that its product saves.
PRODUCT = 6 << 20  # M D N
WEIGHT = 1 << 18  # D N
# Below this, a custom autograd node costs more than it saves.
RECORDED_PRODUCT = 1 << 25  # M D N
# Unaligned rows may be multiplied in another order.
ALIGNED_BYTES = 64


def linear(
    x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None, *, packed: PackedWeight | None = None
) -> Tensor:
    """Compute x W^T + b, [..., N], as `F.linear` does; differentiable once in all three.

    `packed` is the same weight packed by `pack`, used if no gradient is recorded.
    """
    recorded = _recorded(x, weight_ND, bias_N)
    if packed is not None and not recorded and not torch.is_autocast_enabled("cpu"):
        return product_cpu.product(x, packed, bias_N)
    if not _quicker(x, weight_ND, recorded) or not _fits(x, weight_ND, bias_N):
        return F.linear(x, weight_ND, bias_N)
    if recorded:
        return _Linear.apply(x, weight_ND, bias_N, None)
    return _onednn(x, weight_ND, bias_N)


def pack(weight_ND: Tensor) -> PackedWeight | None:
    """Copy a weight into the layout that `product_cpu` reads; None where that gives no speedup."""
    odd = weight_ND.dtype == torch.bfloat16 and weight_ND.shape[1] % 2
    if odd or not readable(weight_ND) or not product_cpu.usable(weight_ND.dtype):
        return None
    return product_cpu.pack(weight_ND)


def invariant_linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None, *, tile: int = 32) -> Tensor:
    """Compute x W^T + b, [..., N], batch-invariant: a row's bits depend only on the row, weights and tile.

    Every product has `tile` rows, the last one padded with zeros, and runs in one library on aligned memory;
    float64 takes `product_cpu` where it is usable, whose rows are independent of each other.
    The backward is not batch-invariant. A tile below 1, or shapes or dtypes that do not fit, are a
    ValueError.
    """
    if tile < 1:
        raise ValueError(f"tile is {tile}; a tile must hold at least 1 row")
    if x.shape[-1:] != weight_ND.shape[1:] or x.dtype != weight_ND.dtype:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and {x.dtype}, but weight_ND {tuple(weight_ND.shape)} and "
            f"{weight_ND.dtype}; the width and the dtype must be the same"
        )
    if _recorded(x, weight_ND, bias_N):
        return _Linear.apply(x, weight_ND, bias_N, tile)
    return _in_tiles(x, weight_ND, bias_N, tile)


def _in_tiles(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None, tile: int) -> Tensor:
    if x.dtype == torch.float64 and readable(x) and readable(weight_ND) and product_cpu.usable(x.dtype):
        # BLAS divides a row's sum among threads on some processors.
        return product_cpu.product(x, product_cpu.pack(weight_ND), bias_N)
    x_MD = x.reshape(-1, x.shape[-1])
    product = _onednn if x.dtype != torch.float64 and _onednn_has(x_MD, weight_ND) else F.linear
    weight_ND = _laid_out(weight_ND, 1)
    parts = [product(part, weight_ND, bias_N) for part in _laid_out(x_MD, tile).split(tile)]
    if parts:
        parts[-1] = parts[-1][: len(x_MD) - tile * (len(parts) - 1)]
    # Not a view: a model may modify it in place.
    result = x.new_empty(*x.shape[:-1], len(weight_ND))
    torch.cat(parts, out=result.view(-1, len(weight_ND)))
    return result


def _laid_out(x_MD: Tensor, tile: int) -> Tensor:
    """Return the rows; a padded, aligned copy if they do not fill whole tiles or are unaligned."""
    missing = -len(x_MD) % tile
    short = -x_MD.shape[1] % (ALIGNED_BYTES // x_MD.element_size())
    if missing or short or x_MD.data_ptr() % ALIGNED_BYTES or not x_MD.is_contiguous():
        return F.pad(x_MD, (0, short, 0, missing)).contiguous()
    return x_MD


class _Linear(torch.autograd.Function):
    """dx = dy W, dW = dy^T x, db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ND: Tensor, bias_N: Tensor | None, tile: int | None) -> Tensor:
        ctx.save_for_backward(x, weight_ND)
        return _onednn(x, weight_ND, bias_N) if tile is None else _in_tiles(x, weight_ND, bias_N, tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ND = ctx.saved_tensors
        slope_MN = slope.reshape(-1, slope.shape[-1])
        x_slope = linear(slope, weight_ND.T) if ctx.needs_input_grad[0] else None
        # oneDNN would first have to transpose both sides; BLAS does not.
        weight_slope_ND = slope_MN.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return x_slope, weight_slope_ND, slope_MN.sum(0) if ctx.needs_input_grad[2] else None, None


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _quicker(x: Tensor, weight_ND: Tensor, recorded: bool) -> bool:
    if x.dtype is not torch.float32:
        return False
    product = x.numel() * len(weight_ND)
    return product >= RECORDED_PRODUCT if recorded else product >= PRODUCT or weight_ND.numel() >= WEIGHT


def _fits(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> bool:
    """Return whether oneDNN takes the arguments; the errors of `F.linear` are better for the rest."""
    tensors = (x, weight_ND) if bias_N is None else (x, weight_ND, bias_N)
    return (
        x.shape[-1:] == weight_ND.shape[1:] and _onednn_has(*tensors) and not torch.is_autocast_enabled("cpu")
    )


def _onednn_has(*tensors: Tensor) -> bool:
    # Without AVX-512 oneDNN has no bfloat16 products.
    pairs = any(tensor.dtype is torch.bfloat16 for tensor in tensors)
    if pairs and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return readable(*tensors) and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _onednn(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_ND, bias_N, "none", [], "")
    return product
