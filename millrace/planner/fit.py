"""Which layout fits, and what to change where none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from millrace.errors import PlanError
from millrace.planner.layout import Layout
from millrace.planner.memory import EIGHT_BIT_MOMENT, Memory, Workload, memory_per_rank
from millrace.planner.model_shape import ModelShape

# Of a device's memory, what tensors may take; the rest is for driver, communication library and holes.
USABLE_SHARE = 0.95
# Why a layout cannot be used, None where it can.
Refuse = Callable[[Layout], str | None]
# Accelerators that a fast link joins, within which products and experts are shared.
MACHINE = 8


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout, the memory of its fullest rank, whether that fits a device, and a sentence on it."""

    layout: Layout
    memory: Memory
    fits: bool
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and the fit with it and those before it."""

    text: str
    fit: Fit


def gigabytes(num_bytes: float) -> str:
    """In units of 10^9 bytes, as datasheets count."""
    return f"{num_bytes / 1e9:.2f}" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f}"


def fits(memory: Memory, device_bytes: float) -> bool:
    """Whether the fullest rank stays within the usable fraction of a device."""
    return memory.peak <= USABLE_SHARE * device_bytes


def judge(shape: ModelShape, layout: Layout, work: Workload, device_bytes: float, why: str = "") -> Fit:
    """Memory and fit of a layout; PlanError if it does not divide the model."""
    memory = memory_per_rank(shape, layout, work, device_bytes)
    return Fit(layout, memory, fits(memory, device_bytes), why)


def choose(shape: ModelShape, work: Workload, num_ranks: int, device_bytes: float, *, refuse: Refuse) -> Fit:
    """The simplest layout of all ranks that fits; where none does, the one that takes least.

    dp_shard alone comes first; tensor, expert, context and pipeline parallel are added in this order, as
    little of each as is needed. `refuse` is asked about every layout that divides the model. If no layout can
    be used, a PlanError names why the first one cannot.
    """
    tried: list[Fit] = []
    reasons: list[str] = []
    for layout in _candidates(num_ranks):
        reason = layout.misfit(shape) or refuse(layout)
        if reason is not None:
            reasons.append(reason)
            continue
        tried.append(judge(shape, layout, work, device_bytes))
        if tried[-1].fits:
            break
    if not tried:
        raise PlanError(f"no layout of {num_ranks} ranks can be used: {reasons[0]}")
    if tried[-1].fits:
        simplest = (
            f"the simplest that fits: {tried[0].layout} would take {gigabytes(tried[0].memory.peak)} GB"
        )
        why = "the simplest layout there is" if len(tried) == 1 else simplest
        return replace(tried[-1], why=why)
    least = min(tried, key=lambda fit: fit.memory.peak)
    return replace(least, why=f"none of {len(tried)} layouts fits, this one takes least")


def _candidates(num_ranks: int) -> Iterator[Layout]:
    powers = (1, 2, 4, MACHINE)
    for pp, cp, ep, tp in product(powers, repeat=4):
        inner = pp * cp * tp
        # What no layout may be, whatever the model.
        if num_ranks % inner or (num_ranks // inner) % ep or (cp > 1 and max(ep, pp) > 1):
            continue
        yield Layout(dp_shard=num_ranks // inner, tp=tp, pp=pp, cp=cp, ep=ep)


def advice(
    shape: ModelShape, work: Workload, fit: Fit, device_bytes: float, *, refuse: Refuse
) -> list[Advice]:
    """Changes that help, each on top of the ones before it, until the run fits or nothing is left.

    The layout may change with each of them, and by itself before them.
    """
    found: list[Advice] = []
    num_ranks = fit.layout.num_ranks
    for text, changes in {"another layout": {}, **_changes(work, num_ranks)}.items():
        if fit.fits:
            break
        changed = replace(work, **changes)
        better = choose(shape, changed, num_ranks, device_bytes, refuse=refuse)
        if better.fits or better.memory.peak < fit.memory.peak:
            work, fit = changed, better
            found.append(Advice(text, better))
    return found


def _changes(work: Workload, num_ranks: int) -> dict[str, dict[str, Any]]:
    """Settings that may be changed, cheapest first, and what of the work they change."""
    requests = max(1, min(work.max_requests, work.num_sequences) // 4)
    again = {"mesh.activation_checkpointing=full": {"checkpointing": "full"}}
    both: dict[str, dict[str, Any]] = {
        f"policy.tokens_per_micro_batch={work.longest}": {"micro_batch_tokens": work.longest},
        f"engine.max_num_seqs={requests} engine.cache_tokens={requests * work.longest}": {
            "max_requests": requests,
            "cache_tokens": requests * work.longest,
        },
    }
    if num_ranks == 1:
        # It keeps whole weights.
        coded = {"moment_bytes": min(work.moment_bytes, EIGHT_BIT_MOMENT)}
        return both | again | {"policy.optimizer.kind=adamw_8bit": coded}
    # The first and the third act on sharded weights alone.
    narrow = {"mesh.compute_dtype=bfloat16": {"compute_bytes": min(work.compute_bytes, 2)}}
    return narrow | again | {"mesh.offload=true": {"offload": True}} | both
