"""Which layout fits, and what to change where none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from millrace.planner.errors import PlanError
from millrace.planner.layout import Split
from millrace.planner.memory import Memory, Workload, memory_per_rank
from millrace.planner.model_shape import ModelShape

# Of a device's memory, what tensors may take; the rest is for driver, communication library and holes.
USABLE_SHARE = 0.95
# Accelerators that a fast link joins, within which products and experts are shared.
MACHINE = 8


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout and what it takes.

    Attributes:
        split: the layout.
        memory: of its fullest rank.
        fits: whether that is within the usable share of a device.
        why: in a sentence.
    """

    split: Split
    memory: Memory
    fits: bool
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and what the run takes with it and those before it."""

    text: str
    fit: Fit


def gigabytes(num_bytes: float) -> str:
    """In units of 10^9 bytes, as datasheets count."""
    return f"{num_bytes / 1e9:.2f}" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f}"


def fits(memory: Memory, device_bytes: float) -> bool:
    """Whether the fullest rank stays within the usable share of a device."""
    return memory.peak <= USABLE_SHARE * device_bytes


def choose(shape: ModelShape, work: Workload, num_ranks: int, device_bytes: float) -> Fit:
    """The simplest layout of all ranks that fits; where none does, the one that takes least.

    dp_shard alone comes first; tensor, expert, context and pipeline parallel are added in this order, as
    little of each as is needed.
    """
    tried: list[Fit] = []
    for split in _candidates(shape, num_ranks):
        try:
            memory = memory_per_rank(shape, split, work, device_bytes)
        except PlanError:
            continue  # it does not divide this model
        good = fits(memory, device_bytes)
        tried.append(Fit(split, memory, good, ""))
        if good:
            break
    if tried[-1].fits:
        simplest = f"the simplest that fits: {tried[0].split} would take {gigabytes(tried[0].memory.peak)} GB"
        why = "the simplest layout there is" if len(tried) == 1 else simplest
        return replace(tried[-1], why=why)
    least = min(tried, key=lambda fit: fit.memory.peak)
    return replace(least, why=f"none of {len(tried)} layouts fits, this one takes least")


def _candidates(shape: ModelShape, num_ranks: int) -> Iterator[Split]:
    """Every split into powers of two besides dp_shard, simplest first."""
    powers = (1, 2, 4, MACHINE)
    experts = powers if shape.num_experts else (1,)
    for pp, cp, ep, tp in product(powers, powers, experts, powers):
        inner = pp * cp * tp
        if num_ranks % inner == 0 and (num_ranks // inner) % ep == 0 and 1 in (ep, cp):
            yield Split(dp_shard=num_ranks // inner, tp=tp, pp=pp, cp=cp, ep=ep)


def advice(shape: ModelShape, work: Workload, fit: Fit, device_bytes: float, *, free: bool) -> list[Advice]:
    """Changes that help, each on top of the ones before it, until the run fits or nothing is left.

    Args:
        shape: the model's.
        work: what does not fit.
        fit: the layout that it does not fit in.
        device_bytes: memory of one device.
        free: whether the layout may change too.
    """
    found: list[Advice] = []
    for text, changes in _changes(work, fit.split).items():
        if fit.fits:
            break
        changed = replace(work, **changes)
        if free:
            better = choose(shape, changed, fit.split.num_ranks, device_bytes)
        else:
            memory = memory_per_rank(shape, fit.split, changed, device_bytes)
            better = Fit(fit.split, memory, fits(memory, device_bytes), "")
        if better.fits or better.memory.peak < fit.memory.peak:
            work, fit = changed, better
            found.append(Advice(text, better))
    return found


def _changes(work: Workload, split: Split) -> dict[str, dict[str, Any]]:
    """What may be changed, cheapest first, and how."""
    requests = max(1, min(work.max_requests, work.num_sequences) // 4)
    shared = min(split.num_ranks, MACHINE)
    return {
        "--compute bfloat16": {"compute_bytes": min(work.compute_bytes, 2)},
        "--checkpointing full": {"checkpointing": "full"},
        f"policy.tokens_per_micro_batch={work.longest}": {"micro_batch_tokens": work.longest},
        "--offload": {"offload": True},
        f"engine.max_requests={requests} engine.cache_tokens={requests * work.longest}": {
            "max_requests": requests,
            "cache_tokens": requests * work.longest,
        },
        f"--sampler-tp {shared}": {"sampler_tp": max(work.sampler_tp, shared)},
    }
