"""Every policy and value loss that verl computed: loss, gradient and clip fraction, in every aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import (
    cispo,
    clipped,
    covariance,
    dppo_kl,
    dppo_kl_clipped,
    dppo_tv,
    dppo_tv_clipped,
    gmpo,
    gspo_token,
    kl_cov,
    kl_cov_selection,
    ppo_clip,
    reinforce,
    sapo,
    sequence_log_ratio,
    value_clipped,
    value_loss,
)
from millrace.algorithms.masked import segment_mean
from millrace.algorithms.ratios import importance_weights, truncate
from tests.algorithms.verl_weights import verl_weights
from tests.close import close_fp64
from tests.golden.verl import CASES, Rows, rows

EVERY_LOSS = [(case, key) for case in CASES for key in case["losses"]]
EVERY_VALUE = [(case, key) for case in CASES for key in case["value_loss"]]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The chosen tokens of a case, with a policy that wants a gradient."""

    policy_N: Tensor
    sampler_N: Tensor
    advantage_N: Tensor
    segment_N: Tensor
    num_segments: int

    @property
    def three(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.policy_N, self.sampler_N, self.advantage_N

    @property
    def five(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        return *self.three, self.segment_N, self.num_segments


# verl's settings -> loss [N], and which tokens its clip fraction counts (None: it reports none, or another).
Translation = Callable[[Tokens, dict[str, Any]], tuple[Tensor, Tensor | None]]


def bounds(settings: dict[str, Any]) -> dict[str, float]:
    return {"low": settings.get("clip_ratio_low", 0.2), "high": settings.get("clip_ratio_high", 0.2)}


def vanilla(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    dual = settings.get("clip_ratio_c", 3.0)
    return ppo_clip(*t.three, **bounds(settings), dual=dual), clipped(*t.three, **bounds(settings))


def gspo_verl(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    ratio_N = sequence_log_ratio(t.policy_N, t.sampler_N, t.segment_N, t.num_segments)
    outside_N = clipped(ratio_N, torch.zeros_like(ratio_N), t.advantage_N, **bounds(settings))
    return gspo_token(*t.five, **bounds(settings)), outside_N


def gpg_verl(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, None]:
    return reinforce(t.policy_N, t.advantage_N), None


def kl_cov_verl(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, None]:
    selected_N = kl_cov_selection(covariance(t.policy_N, t.advantage_N), fraction=2e-4)
    return kl_cov(*t.three, selected_N, coefficient=0.1), None


def geo_mean(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, None]:
    return gmpo(*t.five, **bounds(settings)), None


def cispo_verl(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    low, high = bounds(settings)["low"], bounds(settings)["high"]
    ratio_N = (t.policy_N - t.sampler_N).exp()
    return cispo(*t.three, low=low, high=high), (ratio_N < 1 - low) | (ratio_N > 1 + high)


def sapo_verl(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, None]:
    return sapo(*t.three, positive=1.0, negative=1.05), None


def dppo_tv_verl(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    # verl asks for a cap of 20 but reads the field whose default is 3.
    return dppo_tv(*t.three, **bounds(settings), cap=3.0), dppo_tv_clipped(*t.three, **bounds(settings))


def dppo_kl_verl(t: Tokens, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return dppo_kl(*t.three, **bounds(settings), cap=3.0), dppo_kl_clipped(*t.three, **bounds(settings))


TRANSLATIONS: dict[str, Translation] = {
    "vanilla": vanilla,
    "gspo": gspo_verl,
    "gpg": gpg_verl,
    "kl_cov": kl_cov_verl,
    "geo_mean": geo_mean,
    "cispo": cispo_verl,
    "sapo": sapo_verl,
    "dppo_tv": dppo_tv_verl,
    "dppo_kl": dppo_kl_verl,
}
# These ignore the aggregation they are told, and take the mean over rows.
ALWAYS_SEQUENCE_MEAN = ("geo_mean", "sapo")


def tokens(row: Rows) -> Tokens:
    policy_N, sampler_N, advantage_N = (row.input(name)[row.mask_T] for name in ("new", "old", "advantages"))
    return Tokens(
        policy_N.requires_grad_(), sampler_N, advantage_N, row.segment_T[row.mask_T], len(row.group_B)
    )


def correction(row: Rows, t: Tokens, name: str) -> Tensor:
    """min(old / rollout, 2) for each token; verl's geo_mean takes its geometric mean over the row."""
    log_N = t.sampler_N - row.input("rollout")[row.mask_T]
    weight_N = truncate(importance_weights(log_N, t.segment_N, t.num_segments, level="token"), high=2.0)
    if name != "geo_mean":
        return weight_N
    return segment_mean(weight_N.log(), t.segment_N, t.num_segments).exp()[t.segment_N]


@pytest.mark.slow_beyond(159)
@pytest.mark.parametrize(
    ("case", "key"), EVERY_LOSS, ids=[f"seed {case['seed']} {key}" for case, key in EVERY_LOSS]
)
def test_loss_gradient_and_clip_fraction_are_those_of_verl(case: dict[str, Any], key: str) -> None:
    row, golden = rows(case), case["losses"][key]
    settings = dict(golden["settings"])
    name, aggregation, weighted = (settings.pop(key) for key in ("name", "agg", "is_weights"))
    t = tokens(row)
    loss_N, outside_N = TRANSLATIONS[name](t, settings)
    if weighted:
        loss_N = loss_N * correction(row, t, name)
    if name in ALWAYS_SEQUENCE_MEAN:
        aggregation = "seq-mean-token-mean"
    loss = (loss_N * verl_weights(row, aggregation)[row.mask_T]).sum()
    (gradient_N,) = torch.autograd.grad(loss, t.policy_N)
    close_fp64(loss, golden["loss"], rtol=1e-6, atol=1e-6)
    close_fp64(gradient_N, row.pack(golden["grad"])[row.mask_T], rtol=1e-6, atol=1e-6)
    if outside_N is not None:
        fraction = outside_N.double().mean()
        close_fp64(fraction, golden["metrics"]["actor/pg_clipfrac"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "key"), EVERY_VALUE, ids=[f"seed {case['seed']} {key}" for case, key in EVERY_VALUE]
)
def test_value_loss_gradient_and_clip_fraction_are_those_of_verl(case: dict[str, Any], key: str) -> None:
    row, golden = rows(case), case["value_loss"][key]
    value_N, old_N, return_N = (row.input(name)[row.mask_T] for name in ("new_values", "values", "returns"))
    value_N.requires_grad_()
    loss = (value_loss(value_N, old_N, return_N, clip=0.5) * verl_weights(row, key)[row.mask_T]).sum()
    (gradient_N,) = torch.autograd.grad(loss, value_N)
    close_fp64(loss, golden["loss"], rtol=1e-6, atol=1e-6)
    close_fp64(gradient_N, row.pack(golden["grad"])[row.mask_T], rtol=1e-6, atol=1e-6)
    outside_N = value_clipped(value_N, old_N, return_N, clip=0.5)
    close_fp64(outside_N.double().mean(), golden["clipfrac"], rtol=1e-6, atol=1e-6)


def test_no_gradient_of_verl_lies_outside_the_mask() -> None:
    for case in CASES:
        row = rows(case)
        for golden in [*case["losses"].values(), *case["value_loss"].values()]:
            whole = torch.tensor(golden["grad"], dtype=torch.float64)
            inside = row.pad(row.mask_T.double()) > 0
            assert whole[~inside].eq(0).all()
