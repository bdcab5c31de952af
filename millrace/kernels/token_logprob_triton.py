"""Log-probability and entropy of chosen tokens as Triton kernels: the logits are never in memory.

N = tokens, D = model width, V = vocabulary, or one rank's shard of it, S = parts of the vocabulary.

Forward: one program per tile of tokens and part of the vocabulary. It loops over tiles of the vocabulary,
computes their logits on chip, and accumulates the numbers of `token_logprob_parts` with a running maximum
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); `merged` reduces the parts of all
tiles and ranks.

Backward: one program per tile of tokens and vocabulary recomputes the logits and writes d loss / d (W h + b),
in the dtype of the hidden states. This is done for one block of tokens and vocabulary at a time, of a size
independent of N and V, and two ordinary matrix products compute both gradients from it. So the order of every
sum is deterministic, which atomics would not be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.head import Head
from millrace.kernels.token_logprob_parts import add_product, merged, summed, zeros

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Tokens, vocabulary entries and widths of a tile: 64 KiB of both factors in flight, and accumulators that
# fill half of the registers of eight warps.
TILES = {2: (128, 128, 64), 4: (64, 128, 32)}
# Parts of the vocabulary. Fewer would leave a GPU idle with few tokens; the number does not depend on the
# number of tokens, so that a token has the same bits in any batch.
PARTS = 16
# Tokens and vocabulary entries of one block of logit gradients: 64 MiB in bfloat16, and products large enough
# that adding to the gradients costs a few percent of them.
BLOCK = (8192, 4096)
# Below every logit, but finite: the difference of two of them is 0, that of two infinities is NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = math.log2(math.e)
# A float32 product as three tf32 products rounds much like float32, but runs on tensor cores.
PRECISION = tl.constexpr("tf32x3")


def token_logprob(
    hidden_ND: Tensor, head: Head, target_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprob.token_logprob` without support; a target in no part gets minus infinity.

    Hidden states and head have one dtype in DTYPES. Both results are [N], float32, differentiable once.
    """
    logprob_N, entropy_N = _Fused.apply(hidden_ND, head.weight_VD, head.bias_V, target_N, head, temperature)
    return logprob_N, entropy_N


class _Fused(torch.autograd.Function):
    """The forward keeps three numbers per token; the backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        head: Head,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        row_N = target_N - head.first_row
        number_2N, told_3N = merged(_parts(hidden_ND, head, row_N, temperature), head.group)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, row_N, told_3N)
        ctx.head, ctx.temperature = head, temperature
        ctx.set_materialize_grads(False)
        return number_2N.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, row_N, told_3N = ctx.saved_tensors
        head, factor = ctx.head, ctx.head.scale / ctx.temperature
        columns = [None if gradient_N is None else gradient_N * factor for gradient_N in gradients]
        needed = ctx.needs_input_grad
        hidden_total_ND = zeros(hidden_ND)
        # A frozen head needs neither the memory nor a third of the work.
        weight_gradient_VD = torch.empty_like(weight_VD) if needed[1] else None
        bias_gradient_V = torch.empty_like(bias_V) if needed[2] else None
        for words in _blocks(len(weight_VD), BLOCK[1]):
            part = replace(head, weight_VD=weight_VD[words], bias_V=None if bias_V is None else bias_V[words])
            weight_total_VD, bias_total_V = zeros(part.weight_VD), zeros(weight_VD[words, 0])
            for rows in _blocks(len(hidden_ND), BLOCK[0]):
                chunks = [None if column_N is None else column_N[rows] for column_N in columns]
                known = (row_N[rows] - words.start, *told_3N[:, rows], *chunks)
                slope_NV = _slopes(hidden_ND[rows], part, known, ctx.temperature)
                add_product(hidden_total_ND[rows], slope_NV, part.weight_VD)
                if needed[1]:
                    add_product(weight_total_VD, slope_NV.T, hidden_ND[rows])
                if needed[2]:
                    bias_total_V += slope_NV.sum(0, dtype=torch.float32)
            if weight_gradient_VD is not None:
                weight_gradient_VD[words] = weight_total_VD
            if bias_gradient_V is not None:
                bias_gradient_V[words] = bias_total_V
        hidden_gradient_ND = summed(hidden_total_ND, head.group).to(hidden_ND.dtype)
        return hidden_gradient_ND, weight_gradient_VD, bias_gradient_V, None, None, None


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _parts(hidden_ND: Tensor, head: Head, row_N: Tensor, temperature: float) -> Tensor:
    options = _options(hidden_ND, head, temperature)
    # Whole tiles; a small vocabulary has fewer parts.
    size = triton.cdiv(len(head.weight_VD), PARTS * options["WORDS"]) * options["WORDS"]
    num_parts = triton.cdiv(len(head.weight_VD), size)
    part_4SN = torch.empty(4, num_parts, len(hidden_ND), device=hidden_ND.device)
    grid = (num_parts, triton.cdiv(len(hidden_ND), options["TOKENS"]))
    if len(hidden_ND):
        with torch.cuda.device_of(hidden_ND):
            _walk[grid](*_inputs(hidden_ND, head), row_N, part_4SN, size=size, **options)
    return part_4SN


def _slopes(hidden_ND: Tensor, head: Head, known: tuple[Tensor | None, ...], temperature: float) -> Tensor:
    """Compute d loss / d (W h + b) of a block, [N, V], in the dtype of the hidden states.

    `known` has the row of each target; highest, log_total and mean from `merged`; and the gradients of both
    numbers times scale / temperature, None for 0.
    """
    options = _options(hidden_ND, head, temperature)
    slope_NV = hidden_ND.new_empty(len(hidden_ND), len(head.weight_VD))
    grid = (
        triton.cdiv(len(head.weight_VD), options["WORDS"]),
        triton.cdiv(len(hidden_ND), options["TOKENS"]),
    )
    with torch.cuda.device_of(hidden_ND):
        _slope[grid](*_inputs(hidden_ND, head), known, slope_NV, **options)
    return slope_NV


def _inputs(hidden_ND: Tensor, head: Head) -> tuple[Any, ...]:
    tensors, sizes = (hidden_ND, head.weight_VD, head.bias_V), (len(hidden_ND), len(head.weight_VD))
    return tensors, (*hidden_ND.stride(), *head.weight_VD.stride()), sizes


def _options(hidden_ND: Tensor, head: Head, temperature: float) -> dict[str, Any]:
    tokens, words, step = TILES[hidden_ND.element_size()]
    return {
        # Factor of the logits, or with a softcap, of tanh, which is computed from 2^(2 x log2 e).
        "scale": head.scale if head.softcap is None else 2 * head.scale * LOG2E / head.softcap,
        "coolness": 1 / temperature,
        "CAP": head.softcap,
        # Arithmetic in bfloat16 is wrong in the interpreter, where tensors are on the CPU.
        "FACTOR": DTYPES[hidden_ND.dtype] if hidden_ND.is_cuda else tl.float32,
        "WIDTH": hidden_ND.shape[1],
        "TOKENS": tokens,
        "WORDS": words,
        "STEP": step,
        "num_warps": 8,
    }


@triton.jit
def _walk(
    tensors: tl.tensor,
    strides: tl.tensor,
    sizes: tl.tensor,
    target: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    coolness: tl.tensor,
    CAP: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    num_tokens, num_words = sizes
    n = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.load(target + n, n < num_tokens, other=-1)
    row = tl.where(row < num_words, row, -1)
    highest = tl.full((TOKENS,), LOWEST, tl.float32)
    found = tl.full((TOKENS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    moment = tl.zeros((TOKENS,), tl.float32)
    for start in range(part * size, tl.minimum(part * size + size, num_words), WORDS):
        v = start + tl.arange(0, WORDS)
        z = coolness * _logit(
            tensors, strides, sizes, n, v,
            scale=scale, CAP=CAP, FACTOR=FACTOR, WIDTH=WIDTH, STEP=STEP,
        )  # fmt: skip
        # Not minus infinity: its product with p = 0 is NaN.
        z = tl.where((v < num_words)[None, :], z, LOWEST)
        found = tl.maximum(found, tl.max(tl.where(v[None, :] == row[:, None], z, float("-inf")), 1))
        higher = tl.maximum(highest, tl.max(z, 1))
        x = z - higher[:, None]
        mass = tl.exp(x)
        shift = highest - higher
        shrink = tl.exp(shift)
        moment = shrink * (moment + shift * total) + tl.sum(mass * x, 1)
        total = shrink * total + tl.sum(mass, 1)
        highest = higher
    to_number = num_parts.to(tl.int64) * num_tokens
    at = out + part.to(tl.int64) * num_tokens + n
    tl.store(at, highest, n < num_tokens)
    tl.store(at + to_number, found, n < num_tokens)
    tl.store(at + 2 * to_number, total, n < num_tokens)
    tl.store(at + 3 * to_number, moment, n < num_tokens)


@triton.jit
def _slope(
    tensors: tl.tensor,
    strides: tl.tensor,
    sizes: tl.tensor,
    known: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    coolness: tl.tensor,
    CAP: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """One tile of gradients: d logprob / d z = onehot - p, d entropy / d z = -p (z - E_p[z])."""
    num_tokens, num_words = sizes
    v = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    n = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = n < num_tokens
    logit = _logit(
        tensors, strides, sizes, n, v,
        scale=scale, CAP=CAP, FACTOR=FACTOR, WIDTH=WIDTH, STEP=STEP,
    )  # fmt: skip
    x = logit * coolness - tl.load(known[1] + n, there)[:, None]
    share = tl.exp(x - tl.load(known[2] + n, there)[:, None])
    slope = tl.zeros((TOKENS, WORDS), tl.float32)
    if known[4] is not None:
        gradient = tl.load(known[4] + n, there)[:, None]
        chosen = v[None, :] == tl.load(known[0] + n, there)[:, None]
        slope += tl.where(chosen, gradient, 0) - gradient * share
    if known[5] is not None:
        mean = tl.load(known[3] + n, there)[:, None]
        slope -= tl.load(known[5] + n, there)[:, None] * share * (x - mean)
    if CAP is not None:
        bend = logit / CAP
        slope *= 1 - bend * bend
    tl.store(out + n[:, None] * num_words + v[None, :], slope, there[:, None] & (v < num_words)[None, :])


@triton.jit
def _logit(
    tensors: tl.tensor,
    strides: tl.tensor,
    sizes: tl.tensor,
    n: tl.tensor,
    v: tl.tensor,
    scale: tl.tensor,
    CAP: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Logits of a tile of tokens and vocabulary, float32; arbitrary finite numbers out of range."""
    num_tokens, num_words = sizes
    hidden = tensors[0] + n[:, None] * strides[0]
    weight = tensors[1] + v[:, None].to(tl.int64) * strides[2]
    logit = tl.zeros((n.shape[0], v.shape[0]), tl.float32)
    for begin in range(0, WIDTH, STEP):
        d = begin + tl.arange(0, STEP)[None, :]
        h = tl.load(hidden + d * strides[1], (n < num_tokens)[:, None] & (d < WIDTH), other=0).to(FACTOR)
        w = tl.load(weight + d * strides[3], (v < num_words)[:, None] & (d < WIDTH), other=0).to(FACTOR)
        logit = tl.dot(h, tl.trans(w), logit, input_precision=PRECISION)
    if tensors[2] is not None:
        logit += tl.load(tensors[2] + v, v < num_words, other=0).to(tl.float32)[None, :]
    logit *= scale
    if CAP is not None:
        logit = CAP - 2 * CAP / (tl.exp2(logit) + 1)
    return logit
