"""How fast the machine could possibly sample: operations and bytes of a workload against measured rates.

M = rows of a matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers.workloads import Workload

# Rates are measured for so many rows, and the highest counts: with few, products wait for memory, which the
# bytes tell already.
ROWS_M = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192)}


@dataclass(frozen=True)
class Step:
    """One forward of the best possible schedule.

    Attributes:
        tokens: rows of every product but the last.
        draws: rows of the product that makes logits.
        context: (query, key) pairs that attention looks at.
        cache_reads: tokens whose keys and values are read.
    """

    tokens: int
    draws: int
    context: int
    cache_reads: int


def steps(one: Workload) -> list[Step]:
    """All prompts at once, equal ones computed once, then a token of every unfinished request a step."""
    unique = {tuple(prompt) for prompt in one.prompts}
    prompts = [len(prompt) for prompt in unique]
    pairs = sum(length * (length + 1) // 2 for length in prompts)
    found = [Step(sum(prompts), len(one.prompts), pairs, sum(prompts))]
    requests = list(zip(map(len, one.prompts), one.lengths, strict=True))
    for drawn in range(1, max(one.lengths)):
        known = [prompt + drawn for prompt, length in requests if length > drawn]
        found.append(Step(len(known), len(known), sum(known), sum(known)))
    return found


def layer_products(shape: dict[str, Any]) -> list[tuple[int, int]]:
    """(outputs, inputs) of a layer's products: queries with keys and values, output, gate with up, down."""
    width, mlp, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    return [(queries + 2 * keys, width), (width, queries), (2 * mlp, width), (width, mlp)]


@dataclass(frozen=True)
class Machine:
    """Measured rates.

    Attributes:
        flops_per_s: operations of the products of all layers.
        bytes_per_s: memory read.
    """

    flops_per_s: float
    bytes_per_s: float


def floor_s(one: Workload, shape: dict[str, Any], itemsize: int, machine: Machine) -> float:
    """Seconds below which no engine of this dtype gets: the slower of arithmetic and memory, step by step."""
    layers, head = shape["num_hidden_layers"], shape["vocab_size"] * shape["hidden_size"]
    products = layers * sum(rows * columns for rows, columns in layer_products(shape))
    queries = shape["num_attention_heads"] * shape["head_dim"]
    cached = 2 * layers * shape["num_key_value_heads"] * shape["head_dim"] * itemsize
    total = 0.0
    for step in steps(one):
        operations = 2 * (step.tokens * products + step.draws * head) + 4 * layers * queries * step.context
        moved = (products + head) * itemsize + step.cache_reads * cached
        total += max(operations / machine.flops_per_s, moved / machine.bytes_per_s)
    return total


def measure(shape: dict[str, Any], dtype: str, device: str, *, repeats: int) -> Machine:
    """The rates of this machine, by the fastest product that torch has for the dtype."""
    import torch
    import torch.nn.functional as F
    from peers.products import has_bf16

    kind = getattr(torch, dtype)
    weights = [
        torch.randn(size, dtype=kind, device=device) * 0.02
        for _ in range(shape["num_hidden_layers"])
        for size in layer_products(shape)
    ]
    calls: list[Callable[..., Any]] = [F.linear]
    if device == "cpu" and (kind != torch.bfloat16 or has_bf16()):
        # oneDNN, which is faster than MKL for float32 on AMD's processors.
        calls.append(lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""))
    flops_per_s = 0.0
    with torch.no_grad():
        for rows in ROWS_M[device]:
            inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=kind, device=device) for w in weights}
            best = min(
                _seconds(
                    lambda call=call, x=inputs: [call(x[w.shape[1]], w) for w in weights], device, repeats
                )
                for call in calls
            )
            flops_per_s = max(flops_per_s, 2 * rows * sum(weight.numel() for weight in weights) / best)
        large = torch.zeros(1 << (31 if device == "cuda" else 27), device=device)
        target = torch.empty_like(large)
        moved = large.numel() * large.element_size()
        rate = max(
            moved / _seconds(lambda: large.sum(), device, repeats),
            2 * moved / _seconds(lambda: target.copy_(large), device, repeats),
        )
    return Machine(flops_per_s, rate)


def _seconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """The fastest of several calls: a floor knows no busy minute."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - start)
    return min(found[1:])
