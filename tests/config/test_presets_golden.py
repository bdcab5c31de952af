"""The presets of verl give the numbers that verl gave, on its own random ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millrace.data.batch import Batch
from tests.close import close_fp32
from tests.config.steps import critic_loss, estimated, policy_loss
from tests.config.trees import on_quickstart
from tests.golden.verl import CASES, rows

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case['seed']}")


def batch_of(case: dict[str, Any]) -> Batch:
    row = rows(case)
    count_T = torch.arange(len(row.mask_T))
    return Batch(
        token_T=count_T,
        position_T=count_T,
        segment_T=row.segment_T,
        action_mask_T=row.mask_T,
        sampler_logprob_T=row.input("rollout"),
        version_T=torch.zeros_like(count_T),
        reward_T=row.input("rewards") * row.mask_T,
        advantage_T=row.input("advantages"),
        weight_T=torch.zeros(len(count_T)),
        value_T=row.input("values"),
    )


@EACH_CASE
@pytest.mark.parametrize(
    ("name", "golden"),
    [("grpo@verl", "grpo norm_by_std=True"), ("ppo@verl", "gae gamma=1.0 lam=1.0 (whitened)")],
)
def test_advantages_and_returns_are_the_numbers_verl_gave(
    name: str, golden: str, case: dict[str, Any]
) -> None:
    row, batch = rows(case), batch_of(case)
    reward_B = torch.zeros(len(row.group_B), dtype=torch.float64).index_add(0, row.segment_T, batch.reward_T)
    advantage_T, return_T = estimated(on_quickstart(name), batch, reward_B, row.group_B)
    expected = {key: row.pack(padded) for key, padded in case["advantages"][golden].items()}
    close_fp32(advantage_T, expected["advantages"])
    assert (return_T is None) == (name == "grpo@verl")
    if return_T is not None:
        close_fp32(return_T, expected["returns"])


@EACH_CASE
@pytest.mark.parametrize("name", ["grpo@verl", "ppo@verl"])
def test_the_loss_and_its_gradient_are_the_numbers_verl_gave(name: str, case: dict[str, Any]) -> None:
    row, golden = rows(case), case["losses"]["vanilla {} token-mean is=False"]
    new_T = row.input("new").requires_grad_()
    loss = policy_loss(on_quickstart(name), batch_of(case), new_T, row.input("old"))
    close_fp32(loss, golden["loss"])
    close_fp32(torch.autograd.grad(loss, new_T)[0], row.pack(golden["grad"]))


@EACH_CASE
def test_the_loss_of_the_critic_is_the_number_verl_gave(case: dict[str, Any]) -> None:
    row = rows(case)
    loss = critic_loss(
        on_quickstart("ppo@verl"), batch_of(case), row.input("new_values"), row.input("returns")
    )
    close_fp32(loss, case["value_loss"]["token-mean"]["loss"])
