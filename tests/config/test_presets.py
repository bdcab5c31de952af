"""A preset computes what the other system computes: the loss of a step, written a second time and padded.

B = answers, W = padded width; group_B = the prompt of each answer, mask_BW = its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from millrace.config.recipe import recipe_names, recipe_text
from millrace.data.batch import Batch
from millrace.run.build_algorithm import build_method
from tests.close import close_fp32
from tests.config.steps import critic_loss, estimated, policy_loss
from tests.config.trees import on_quickstart

PRESETS = [name for name in recipe_names() if "@" in name]
LENGTHS = [3, 1, 4, 2, 5, 2, 3, 1, 6]
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])


@dataclass(frozen=True, eq=False)
class Answers:
    """What a step knows of its answers, padded; numbers outside the mask mean nothing."""

    mask_BW: Tensor
    group_B: Tensor
    reward_B: Tensor
    new_BW: Tensor
    old_BW: Tensor
    sampler_BW: Tensor
    reference_BW: Tensor
    value_BW: Tensor

    @property
    def packed(self) -> Batch:
        """The same, without the padding."""
        count_T = torch.arange(int(self.mask_BW.sum()))
        segment_T, position_T = self.mask_BW.nonzero(as_tuple=True)
        last_T = torch.cat([segment_T[1:] != segment_T[:-1], torch.tensor([True])])
        return Batch(
            token_T=count_T,
            position_T=position_T,
            segment_T=segment_T,
            action_mask_T=count_T >= 0,
            sampler_logprob_T=self.sampler_BW[self.mask_BW],
            version_T=torch.zeros_like(count_T),
            reward_T=self.reward_B[segment_T] * last_T,
            advantage_T=torch.zeros(len(count_T)),
            weight_T=torch.zeros(len(count_T)),
            reference_logprob_T=self.reference_BW[self.mask_BW],
            value_T=self.value_BW[self.mask_BW],
        )


def answers(seed: int, *, on_policy: bool = False) -> Answers:
    """Nine ragged answers to three prompts: rewards of all kinds, of one kind, and one right of three."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    old_BW, *noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(5))
    old_BW = old_BW - 3
    new_BW = old_BW + (0 if on_policy else 0.8 * noise[0])
    reward_B = torch.rand(len(LENGTHS), generator=generator, dtype=torch.float64)
    reward_B[3:6], reward_B[6:] = 0.3, torch.tensor([0.1, 1.0, 0.1], dtype=torch.float64)
    return Answers(
        torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None],
        GROUPS,
        reward_B,
        new_BW,
        old_BW,
        old_BW + 1.2 * noise[1],
        new_BW + 0.5 * noise[2],
        noise[3],
    )


def advantages(name: str, of: Answers) -> Tensor:
    """What the preset makes of the rewards, for each token."""
    return estimated(on_quickstart(name), of.packed, of.reward_B, of.group_B)[0]


def grouped(reward_B: Tensor, group_B: Tensor, of_group: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of each group's rewards, put back in place."""
    advantage_B = torch.zeros_like(reward_B)
    for group in group_B.unique():
        advantage_B[group_B == group] = of_group(reward_B[group_B == group])
    return advantage_B


def normalised(epsilon: float) -> Callable[[Tensor], Tensor]:
    return lambda reward_n: (reward_n - reward_n.mean()) / (reward_n.std() + epsilon)


def clipped(of: Answers, new_BW: Tensor, advantage_BW: Tensor, *, dual: float | None = None) -> Tensor:
    """PPO's loss at 0.2, with a bound for negative advantages, written with `where`."""
    ratio_BW = (new_BW - of.old_BW).exp()
    loss_BW = torch.max(-advantage_BW * ratio_BW, -advantage_BW * ratio_BW.clamp(0.8, 1.2))
    if dual is None:
        return loss_BW
    return torch.where(advantage_BW < 0, torch.min(-advantage_BW * dual, loss_BW), loss_BW)


def token_mean(of: Answers, loss_BW: Tensor) -> Tensor:
    return (loss_BW * of.mask_BW).sum() / of.mask_BW.sum()


def verl(of: Answers, new_BW: Tensor) -> Tensor:
    advantage_B = grouped(of.reward_B, of.group_B, normalised(1e-6))
    return token_mean(of, clipped(of, new_BW, advantage_B[:, None], dual=3.0))


def trl(of: Answers, new_BW: Tensor) -> Tensor:
    advantage_B = grouped(of.reward_B, of.group_B, normalised(1e-4))
    weight_B = ((of.old_BW - of.sampler_BW) * of.mask_BW).sum(1).exp()
    weight_B = torch.where(weight_B > 3.0, 0.0, weight_B)
    return token_mean(of, clipped(of, new_BW, advantage_B[:, None]) * weight_B[:, None])


def openrlhf(of: Answers, new_BW: Tensor) -> Tensor:
    """With the penalty on a token for itself alone; `on_policy`, where its gradient is that of k2."""
    advantage_B = grouped(of.reward_B, of.group_B, normalised(1e-9))
    own_BW = advantage_B[:, None] - 0.01 * (of.old_BW - of.reference_BW)
    return token_mean(of, clipped(of, new_BW, own_BW))


def nemo(of: Answers, new_BW: Tensor) -> Tensor:
    def against_the_others(reward_n: Tensor) -> Tensor:
        found = []
        for i, reward in enumerate(reward_n):
            others = torch.cat([reward_n[:i], reward_n[i + 1 :]])
            advantage = reward - others.mean()
            found.append(advantage / (others.std() + 1e-6) if others.unique().numel() > 1 else advantage)
        return torch.stack(found)

    advantage_B = grouped(of.reward_B, of.group_B, against_the_others)
    back_BW = of.reference_BW - new_BW
    # The probability of the sample is 1 here, but its gradient is not 0.
    sampled_BW = (new_BW - new_BW.detach()).exp()
    penalty_BW = 0.01 * sampled_BW * (back_BW.exp() - 1 - back_BW)
    return token_mean(of, clipped(of, new_BW, advantage_B[:, None]) + penalty_BW)


def areal(of: Answers, new_BW: Tensor) -> Tensor:
    first_B = grouped(10 * (of.reward_B - 0.5), of.group_B, normalised(1e-5))
    token_T = first_B[:, None].expand_as(new_BW)[of.mask_BW]
    advantage_BW = ((first_B - token_T.mean()) / (token_T.std() + 1e-5))[:, None]
    weight_BW = (of.old_BW - of.sampler_BW).exp()
    weight_BW = torch.where(weight_BW <= 5.0, weight_BW, 0.0)
    return token_mean(of, clipped(of, new_BW, advantage_BW) * weight_BW)


def returns_less_values(of: Answers) -> Tensor:
    """The reward of the answer is still to come at each of its tokens, since nothing is discounted."""
    return of.reward_B[:, None] - of.value_BW


def ppo_verl(of: Answers, new_BW: Tensor) -> Tensor:
    advantage_BW = returns_less_values(of)
    token_T = advantage_BW[of.mask_BW]
    white_BW = (advantage_BW - token_T.mean()) / (token_T.var() + 1e-8).sqrt()
    return token_mean(of, clipped(of, new_BW, white_BW, dual=3.0))


def answer_mean(of: Answers, loss_BW: Tensor) -> Tensor:
    return ((loss_BW * of.mask_BW).sum(1) / of.mask_BW.sum(1)).mean()


def ppo_slime(of: Answers, new_BW: Tensor) -> Tensor:
    return answer_mean(of, clipped(of, new_BW, returns_less_values(of)))


PEERS = {
    "grpo@verl": verl,
    "grpo@trl": trl,
    "grpo@openrlhf": openrlhf,
    "grpo@nemo": nemo,
    "grpo@areal": areal,
    "ppo@verl": ppo_verl,
    "ppo@slime": ppo_slime,
}
# AReaL's clip at 0.4, and the penalty that OpenRLHF takes off the reward, can be told from ours off policy.
ON_POLICY = ("grpo@openrlhf", "grpo@areal")


def test_every_preset_is_compared_with_its_peer() -> None:
    assert sorted(PEERS) == PRESETS


@pytest.mark.slow_beyond(9)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", PRESETS)
def test_the_gradient_of_a_step_is_that_of_the_other_system(name: str, seed: int) -> None:
    of = answers(seed, on_policy=name in ON_POLICY)
    new_BW = of.new_BW.clone().requires_grad_()
    expected = PEERS[name](of, new_BW)
    (gradient_BW,) = torch.autograd.grad(expected, new_BW)
    batch, new_T = of.packed, of.new_BW[of.mask_BW].requires_grad_()
    batch.advantage_T = advantages(name, of)
    loss = policy_loss(on_quickstart(name), batch, new_T, of.old_BW[of.mask_BW])
    (gradient_T,) = torch.autograd.grad(loss, new_T)
    close_fp32(gradient_T, gradient_BW[of.mask_BW], rtol=5e-5, atol=1e-7)
    if name != "grpo@openrlhf":  # a penalty in the loss has a value of its own
        close_fp32(loss, expected, rtol=5e-5)


@pytest.mark.parametrize("name", ["grpo@trl", "grpo@areal"])
def test_the_batches_above_hold_tokens_that_a_correction_leaves_out_and_others(name: str) -> None:
    correction, left = build_method(on_quickstart(name)).correction, []
    assert correction is not None
    for seed in range(5):
        of, batch = answers(seed), answers(seed).packed
        of_T = of.old_BW[of.mask_BW], of.sampler_BW[of.mask_BW]
        factor_T = correction(*of_T, batch.segment_T, batch.num_segments)
        left += (factor_T == 0).tolist()
    assert 0.05 < sum(left) / len(left) < 0.6


def one_token_each(reward: list[float], group: list[int]) -> Answers:
    """Answers of one token, of which nothing but the reward matters."""
    one_BW = torch.ones(len(reward), 1, dtype=torch.float64)
    return Answers(one_BW > 0, torch.tensor(group), torch.tensor(reward, dtype=torch.float64), *[one_BW] * 5)


@pytest.mark.parametrize(
    ("name", "reward", "expected"),
    [
        # Mean 0.5, squares 0.25 and 0.25 over 3: a deviation of 0.40825.
        ("grpo@verl", [1.0, 0.0, 0.5, 0.5], [1.22474, -1.22474, 0.0, 0.0]),
        ("grpo@trl", [1.0, 0.0, 0.5, 0.5], [0.5 / 0.40835, -0.5 / 0.40835, 0.0, 0.0]),
        ("grpo@openrlhf", [1.0, 0.0, 0.5, 0.5], [1.22474, -1.22474, 0.0, 0.0]),
        # A hundred thousandth of it: now what stands beside the deviation of 4.0825e-6 is seen.
        ("grpo@verl", [1e-5, 0.0, 5e-6, 5e-6], [5 / 5.0825, -5 / 5.0825, 0.0, 0.0]),
        ("grpo@trl", [1e-5, 0.0, 5e-6, 5e-6], [5 / 104.0825, -5 / 104.0825, 0.0, 0.0]),
        ("grpo@openrlhf", [1e-5, 0.0, 5e-6, 5e-6], [5 / 4.0835, -5 / 4.0835, 0.0, 0.0]),
        # The one right answer is not divided; the others see (1, 0, 0), whose deviation is 0.57735.
        ("grpo@nemo", [1.0, 0.0, 0.0, 0.0], [1.0, -0.57735, -0.57735, -0.57735]),
        ("grpo@nemo", [1.0, 1.0, 0.0, 0.0], [1.1547, 1.1547, -1.1547, -1.1547]),
        # Whitened over four tokens, to which 1e-6 makes no difference.
        ("grpo@areal", [1e-5, 0.0, 5e-6, 5e-6], [1.22474, -1.22474, 0.0, 0.0]),
    ],
)
def test_rewards_of_a_group_become_these_advantages(
    name: str, reward: list[float], expected: list[float]
) -> None:
    close_fp32(advantages(name, one_token_each(reward, [0, 0, 0, 0])), expected, rtol=2e-5)


def test_many_equal_groups_shrink_advantages_but_not_those_that_are_whitened() -> None:
    of = one_token_each([1.0, 0.0, 0.5, 0.5, 0.5, 0.5], [0, 0, 1, 1, 2, 2])
    # 0.70711 and its negative among four zeros: squares of 1 over 5 are a variance of 0.2.
    for name, factor in {"grpo@verl": 1.0, "grpo@areal": 5**0.5}.items():
        close_fp32(advantages(name, of), [0.70711 * factor, -0.70711 * factor, 0, 0, 0, 0], rtol=2e-5)


def test_an_answer_alone_in_its_group_has_its_raw_reward_in_verl_alone() -> None:
    of = one_token_each([0.7, 0.3, 0.3], [0, 1, 1])
    first = {name: float(advantages(name, of)[0]) for name in PRESETS if name.startswith("grpo")}
    close_fp32(first.pop("grpo@verl"), 0.7 / (1 + 1e-6))
    assert set(first.values()) == {0.0}


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_the_critic_is_that_of_slime(seed: int) -> None:
    of = answers(seed)
    moved_BW = of.value_BW + 0.5 * (of.old_BW - of.sampler_BW)
    return_BW = of.reward_B[:, None].expand_as(moved_BW)
    held_BW = of.value_BW + (moved_BW - of.value_BW).clamp(-0.2, 0.2)
    expected = answer_mean(of, torch.max((moved_BW - return_BW) ** 2, (held_BW - return_BW) ** 2))
    found = critic_loss(on_quickstart("ppo@slime"), of.packed, moved_BW[of.mask_BW], return_BW[of.mask_BW])
    close_fp32(found, expected)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_how_it_differs_and_what_it_does_not_reproduce(name: str) -> None:
    method = name.partition("@")[0]
    assert f"\n# Unlike our {method}: " in recipe_text(name)
    assert "\n# Not reproduced: " in recipe_text(name)
