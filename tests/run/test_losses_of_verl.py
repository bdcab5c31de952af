"""Losses and gradients over several epochs and minibatches, step by step those of verl 0.9.1.

T = tokens of the packed minibatch, B = rows, V = candidates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.config.settings import RunConfig
from millrace.data.batch import Batch
from millrace.run.build_algorithm import build_control, build_method, build_objective
from tests.close import close_fp64
from tests.run.pieces import recipe
from tests.training.pieces import predicted

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "verl_steps.json").read_text(encoding="utf-8"))
WIDTH, NUM_CANDIDATES = len(GOLDEN["inputs"]["mask"][0]), 5
MINIBATCHES = ([0, 1, 2], [3, 4, 5])
MODES = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_length",
}
CLIP = {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
REINFORCE = {"kind": "reinforce"}
TOKENS = {"estimator": "k1", "level": "token", "low": 0.8, "high": 1.25}
ARMS: dict[str, dict[str, Any]] = {
    "decoupled, truncated": {"loss": CLIP, "proximal": "recompute", "correction": {"high": 1.2}},
    "bypass": {"loss": CLIP},
    "bypass, tokens rejected": {"loss": CLIP, "correction": {"action": "none", "reject": TOKENS}},
    "bypass, sequences rejected": {
        "loss": CLIP,
        "correction": {"action": "none", "reject": {"estimator": "k3", "level": "mean", "high": 0.03}},
    },
    "bypass reinforce, tokens truncated": {"loss": REINFORCE, "correction": {"high": 1.2}},
    "bypass reinforce, sequences truncated": {
        "loss": REINFORCE,
        "correction": {"level": "sequence", "high": 1.2},
    },
    "bypass reinforce, truncated and rejected": {
        "loss": REINFORCE,
        "correction": {"high": 1.2, "reject": TOKENS},
    },
}


def column(name: str) -> Tensor:
    """An input of the case, padded."""
    dtype = torch.long if name == "action" else torch.float64
    return torch.tensor(GOLDEN["inputs"][name], dtype=dtype)


def logprobs(policy_V: Tensor) -> Tensor:
    """Log-probability of each padded token."""
    return (column("base") + policy_V).log_softmax(-1).gather(-1, column("action")[..., None])[..., 0]


def minibatch(config: RunConfig, rows: list[int], start_BT: Tensor) -> tuple[Batch, Tensor]:
    """The packed rows, with what precedes the steps, and where their tokens are in the padded ones."""
    mask_BT = column("mask")[rows].bool()
    segment_T, place_T = mask_BT.nonzero(as_tuple=True)
    rollout_T, start_T = column("rollout")[rows][mask_BT], start_BT[rows][mask_BT]
    zero_T, mask_T = torch.zeros_like(segment_T), torch.ones_like(segment_T).bool()
    method = build_method(config)
    batch = Batch(
        token_T=zero_T,
        position_T=place_T,
        segment_T=segment_T,
        action_mask_T=mask_T,
        sampler_logprob_T=rollout_T,
        version_T=zero_T,
        reward_T=zero_T.double(),
        advantage_T=column("advantages")[rows][mask_BT],
        weight_T=method.token_weights(mask_T, segment_T),
    )
    if method.recompute:
        batch.proximal_logprob_T = start_T
    if method.correction is not None:
        batch.correction_T = method.correction(start_T, rollout_T, segment_T, len(rows))
    return batch, mask_BT


def weights_of_kept(config: RunConfig, batch: Batch, factor_T: Tensor) -> Tensor:
    """Token weights where verl averages over a row's tokens that are not rejected, and we over all."""
    rows = int(batch.segment_T.max()) + 1
    kept_T = factor_T > 0
    count_B = torch.bincount(batch.segment_T, weights=kept_T.double(), minlength=rows).clamp(min=1)
    return kept_T / count_B[batch.segment_T] / rows


@pytest.mark.slow_beyond(29)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arm", ARMS)
def test_each_step_has_the_loss_and_gradient_of_verl(arm, mode):
    passes = {"optimizer_steps_per_batch": 2, "epochs_per_batch": 2, "loss_aggregation": MODES[mode]}
    config = recipe(policy=ARMS[arm] | passes, precision="float64", rollout={"max_tokens": WIDTH})
    objective = build_objective(config.policy, build_control(None), config.steps)
    golden = GOLDEN["cases"][f"{arm} | {mode}"]
    policy_V = torch.zeros(NUM_CANDIDATES, dtype=torch.float64, requires_grad=True)
    start_BT = logprobs(policy_V).detach()
    # verl adds 1e-8 to the number of tokens of a row.
    tolerance = 5e-8 if mode == "seq-mean-token-mean" else 1e-9
    assert len(golden["loss"]) == 4
    for step, rows in enumerate(MINIBATCHES * 2):
        batch, mask_BT = minibatch(config, rows, start_BT)
        loss_T, report = objective(predicted(logprobs(policy_V)[rows][mask_BT]), batch)
        weight_T = batch.weight_T
        if mode == "seq-mean-token-mean" and "reject" in arm and "sequences" not in arm:
            weight_T = weights_of_kept(config, batch, report["correction"])
        loss = (loss_T * weight_T).sum()
        (gradient_V,) = torch.autograd.grad(loss, policy_V)
        close_fp64(loss, golden["loss"][step], rtol=tolerance, atol=tolerance)
        close_fp64(gradient_V, golden["gradient"][step], rtol=tolerance, atol=tolerance)
        with torch.no_grad():
            policy_V -= GOLDEN["rate"] * gradient_V


def test_what_each_arm_does_shows_in_its_numbers():
    """Otherwise equal numbers would say nothing of truncation, rejection and clipping."""
    losses = {arm: GOLDEN["cases"][f"{arm} | token-mean"]["loss"] for arm in ARMS}
    assert len({tuple(found) for found in losses.values()}) == len(ARMS)
