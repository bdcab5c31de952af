"""Many small policies trained side by side on tokens of older weights, each by a method of its own.

The task is addition: a policy reads two numbers below 20 and writes two digits, one after the other; the
reward is 1 for the right sum. It is a perceptron with one hidden layer over the digits of the problem and
those written so far, so that the weights of all policies are stacked and one matrix product serves all. The
probability of the right answer is a product of two probabilities: the expected reward over all problems,
and its exact gradient, need no sampling. Losses, advantages and weights are those of `millrace.algorithms`.

R = policies, B = answers of a batch, C = 2 digits of an answer, P = problems, I = inputs, H = hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from millrace.algorithms import advantages, losses, ratios
from millrace.algorithms.masked import whiten

DIGITS, LENGTH, BELOW = 10, 2, 20
# Of the problem, the place in the answer, and the digit written before.
INPUTS, HIDDEN = 4 * DIGITS + LENGTH + DIGITS, 128
PROMPTS, SAMPLES = 32, 8
CLIP, BYPASS_CAP = 0.2, 2.0
BETAS, EPSILON, DECAY, MAX_GRAD_NORM, WARMUP = (0.9, 0.95), 1e-5, 0.05, 1.0, 4
EVALUATE_EVERY, EXACT_EVERY = 5, 5
# Start weights answer about half of the problems.
SFT_RATE, SFT_SIZE, SFT_TARGET, SFT_MOST = 3e-3, 256, 0.5, 3000
Weights = tuple[Tensor, ...]


@dataclass(frozen=True)
class Arm:
    """How a policy is trained; `cap` bounds the weights of decoupled, None does not."""

    kind: str
    staleness: int
    rate: float
    minibatches: int = 4
    cap: float | None = None
    advantage: str = "whitened"


class Problems:
    """All sums of two numbers below 20, and what is random in the runs of a seed."""

    def __init__(self, seed: int) -> None:
        """Order the problems by their numbers."""
        self.generator = torch.Generator().manual_seed(seed)
        a_P, b_P = torch.arange(BELOW).repeat_interleave(BELOW), torch.arange(BELOW).repeat(BELOW)
        self.digits_P4 = torch.stack([a_P // 10, a_P % 10, b_P // 10, b_P % 10], 1)
        sum_P = a_P + b_P
        self.answer_PC = torch.stack([sum_P // 10, sum_P % 10], 1)

    def some(self, num: int) -> Tensor:
        """Indices of problems."""
        return torch.randint(len(self.answer_PC), (num,), generator=self.generator)

    def noise(self, num: int) -> Tensor:
        """Gumbel noise for the digits of so many answers, [B, C, 10]."""
        uniform = torch.rand(num, LENGTH, DIGITS, generator=self.generator).clamp(1e-9, 1 - 1e-7)
        return -(-uniform.log()).log()


def fresh_weights(generator: torch.Generator) -> Weights:
    """Random weights of one policy."""
    into = torch.randn(1, INPUTS, HIDDEN, generator=generator) / 3
    out = torch.randn(1, HIDDEN, DIGITS, generator=generator) / HIDDEN**0.5
    return into, torch.zeros(1, 1, HIDDEN), out, torch.zeros(1, 1, DIGITS)


def log_distributions(weights: Weights, digits_B4: Tensor, answer_RBC: Tensor) -> Tensor:
    """Log-probabilities of every digit at each place of answers, [R, B, C, 10]."""
    num_policies, num_answers = answer_RBC.shape[:2]
    problem = one_hot(digits_B4, DIGITS).flatten(1).float()[None, :, None]
    place = torch.eye(LENGTH)[None, None]
    first = one_hot(answer_RBC[..., :1], DIGITS).float()
    written = torch.cat([torch.zeros_like(first), first], 2)
    shape = (num_policies, num_answers, LENGTH, -1)
    inputs = torch.cat([problem.expand(*shape), place.expand(*shape), written], 3)
    into, into_bias, out, out_bias = weights
    hidden = torch.relu(torch.baddbmm(into_bias, inputs.flatten(1, 2), into))
    return torch.baddbmm(out_bias, hidden, out).unflatten(1, (num_answers, LENGTH)).log_softmax(-1)


def logprobs(weights: Weights, digits_B4: Tensor, answer_RBC: Tensor) -> Tensor:
    """Log-probability of each digit of answers, [R, B, C]."""
    table = log_distributions(weights, digits_B4, answer_RBC)
    return table.gather(3, answer_RBC[..., None])[..., 0]


def sample(weights: Weights, digits_B4: Tensor, noise_BC10: Tensor) -> tuple[Tensor, Tensor]:
    """Answers and their log-probabilities, both [R, B, C]; policies share the noise."""
    answer = torch.zeros(len(weights[0]), len(digits_B4), LENGTH, dtype=torch.long)
    for place in range(LENGTH):
        table = log_distributions(weights, digits_B4, answer)
        answer[..., place] = (table[:, :, place] + noise_BC10[:, place]).argmax(-1)
    return answer, logprobs(weights, digits_B4, answer)


def expected_reward(weights: Weights, problems: Problems) -> Tensor:
    """The probability of the right answer, as a mean over all problems, [R]."""
    right_PC = problems.answer_PC.expand(len(weights[0]), -1, -1)
    return logprobs(weights, problems.digits_P4, right_PC).sum(2).exp().mean(1)


class Adam:
    """AdamW with a learning rate for each policy, and gradients clipped to a norm for each."""

    def __init__(self, weights: Weights, rate_R: Tensor) -> None:
        """The moments begin at 0."""
        self._rate, self._num_steps = rate_R[:, None, None], 0
        self._moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in weights]

    def step(self, weights: Weights, gradients: Sequence[Tensor]) -> Tensor:
        """Move the weights; the norms of the gradients before clipping, [R]."""
        self._num_steps += 1
        rate = self._rate * min(1.0, self._num_steps / WARMUP)
        norm_R = torch.stack([one.flatten(1).square().sum(1) for one in gradients]).sum(0).sqrt()
        scale = (MAX_GRAD_NORM / (norm_R + 1e-6)).clamp(max=1)[:, None, None]
        for weight, gradient, (first, second) in zip(weights, gradients, self._moments, strict=True):
            gradient = gradient * scale
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            mean = first / (1 - BETAS[0] ** self._num_steps)
            deviation = (second / (1 - BETAS[1] ** self._num_steps)).sqrt()
            if weight.shape[1] > 1:
                weight.mul_(1 - rate * DECAY)
            weight.sub_(rate * mean / (deviation + EPSILON))
        return norm_R


def start_weights(problems: Problems) -> Weights:
    """Supervised training until about half of the answers are right."""
    weights = fresh_weights(problems.generator)
    adam = Adam(weights, torch.tensor([SFT_RATE]))
    for step in range(SFT_MOST):
        which = problems.some(SFT_SIZE)
        held = tuple(one.requires_grad_() for one in weights)
        loss = -logprobs(held, problems.digits_P4[which], problems.answer_PC[which][None]).mean()
        gradients = torch.autograd.grad(loss, held)
        weights = tuple(one.detach() for one in held)
        adam.step(weights, gradients)
        if step % 20 == 19 and float(expected_reward(weights, problems)) >= SFT_TARGET:
            return weights
    raise RuntimeError(f"{SFT_MOST} steps of supervised training did not reach {SFT_TARGET}")


class Training:
    """Policies that begin at the same weights and see the same problems and noise, each by its arm."""

    def __init__(self, start: Weights, problems: Problems, arms: Sequence[Arm]) -> None:
        """All arms have the same number of minibatches."""
        self._problems, self._arms = problems, arms
        (self._minibatches,) = {arm.minibatches for arm in arms}
        self.weights = tuple(one.expand(len(arms), -1, -1).clone() for one in start)
        self._history = [tuple(one.clone() for one in self.weights)]
        self._adam = Adam(self.weights, torch.tensor([arm.rate for arm in arms]))
        caps = [float("inf") if arm.cap is None else arm.cap for arm in arms]
        self._cap = torch.tensor(caps)[:, None, None]
        self._decoupled, self._bypass = (
            torch.tensor([arm.kind == kind for arm in arms])[:, None, None]
            for kind in ("decoupled", "bypass")
        )
        self._grouped = torch.tensor([arm.advantage == "group" for arm in arms])[:, None, None]
        self._staleness = torch.tensor([arm.staleness for arm in arms])

    def rewards(self) -> Tensor:
        """Expected reward, [R]."""
        return expected_reward(self.weights, self._problems)

    def sampler_weights(self) -> Weights:
        """The weights of `staleness` batches ago; of the beginning, where there are none."""
        now = len(self._history) - 1
        found = tuple(torch.empty_like(one) for one in self.weights)
        for staleness in self._staleness.unique().tolist():
            inside = self._staleness == staleness
            for one, old in zip(found, self._history[max(0, now - staleness)], strict=True):
                one[inside] = old[inside]
        return found

    @torch.no_grad()
    def batch(self) -> list[dict[str, Tensor]]:
        """Sample a batch, train on it; the figures of each minibatch, [R] each."""
        problems, num_answers = self._problems, PROMPTS * SAMPLES
        which = problems.some(PROMPTS).repeat_interleave(SAMPLES)
        digits, right = problems.digits_P4[which], problems.answer_PC[which]
        answer, sampler = sample(self.sampler_weights(), digits, problems.noise(num_answers))
        reward = (answer == right).all(2).float()
        advantage = self._advantages(reward)
        proximal = logprobs(self.weights, digits, answer)
        exact = len(self._history) % EXACT_EVERY == 0
        found = []
        for part in torch.arange(num_answers).chunk(self._minibatches):
            terms = (sampler[:, part], proximal[:, part], advantage[:, part])
            found.append(self._minibatch(digits[part], answer[:, part], *terms, exact=exact))
        self._history.append(tuple(one.clone() for one in self.weights))
        return found

    def _advantages(self, reward_RB: Tensor) -> Tensor:
        """[R, B, C]: returns whitened over the tokens of the batch, or GRPO's."""
        group_N = torch.arange(reward_RB.numel() // SAMPLES).repeat_interleave(SAMPLES)
        grouped = advantages.group_normalised(reward_RB.flatten(), group_N, reward_RB.numel() // SAMPLES)
        return_RBC = reward_RB[..., None].expand(-1, -1, LENGTH)
        whitened = torch.stack([whiten(one.flatten()).view_as(one) for one in return_RBC])
        return torch.where(self._grouped, grouped.view_as(reward_RB)[..., None], whitened)

    def _minibatch(
        self,
        digits: Tensor,
        answer: Tensor,
        sampler: Tensor,
        proximal: Tensor,
        advantage: Tensor,
        *,
        exact: bool,
    ) -> dict[str, Tensor]:
        start = torch.where(self._decoupled, proximal, sampler)
        with torch.enable_grad():
            held = tuple(one.detach().requires_grad_() for one in self.weights)
            policy = logprobs(held, digits, answer)
            loss = self.token_losses(policy, sampler, proximal, advantage)
            gradients = torch.autograd.grad(loss.mean((1, 2)).sum(), held, retain_graph=exact)
        found = self._figures(policy.detach(), start, sampler, advantage)
        if exact:
            exact_gradients = self._exact_gradients()
            found["cosine"] = cosine(gradients, exact_gradients)
            found |= self._compared(held, policy, (sampler, proximal, advantage), exact_gradients)
        found["grad_norm"] = self._adam.step(self.weights, gradients)
        return found

    def token_losses(self, policy: Tensor, sampler: Tensor, proximal: Tensor, advantage: Tensor) -> Tensor:
        """The loss of each token by the arm of its policy; all are [R, B, C]."""
        start = torch.where(self._decoupled, proximal, sampler)
        weight = (proximal - sampler).clamp(-20, 20).exp()
        factor = torch.where(self._decoupled, torch.minimum(weight, self._cap), 1.0)
        clipped = losses.ppo_clip(policy, start, advantage, low=CLIP, high=CLIP) * factor
        bypassed = losses.cispo(policy, sampler, advantage, low=1.0, high=BYPASS_CAP - 1)
        return torch.where(self._bypass, bypassed, clipped)

    def _figures(
        self, policy: Tensor, start: Tensor, sampler: Tensor, advantage: Tensor
    ) -> dict[str, Tensor]:
        """Of a minibatch before its step.

        Names:
            spent: fraction of tokens whose ratio to the sampler is outside the clip.
            outside: whose ratio to what the loss compares with is.
            cut: of those, whose gradient the clip takes away: on the side of their advantage.
            raised: with a negative advantage and a ratio above the clip, whose gradient is kept.
            ess: effective sample share of the weights policy / sampler.
            kl: KL(policy || sampler), estimated by w log w - w + 1.
        """
        gap = policy - sampler
        ratio, weight = (policy - start).exp(), gap.clamp(-20, 20).exp()
        cut = losses.clipped(policy, start, advantage, low=CLIP, high=CLIP) & ~self._bypass
        each = {
            "spent": (weight - 1).abs() > CLIP,
            "outside": (ratio - 1).abs() > CLIP,
            "cut": cut,
            "raised": (advantage < 0) & (ratio > 1 + CLIP),
            "kl": weight * gap - weight + 1,
        }
        found = {name: value.float().mean((1, 2)) for name, value in each.items()}
        share = [ratios.effective_sample_size(one.flatten()) for one in weight]
        return found | {"ess": torch.tensor(share)}

    @torch.enable_grad()
    def _exact_gradients(self) -> tuple[Tensor, ...]:
        """Of the expected reward."""
        held = tuple(one.detach().requires_grad_() for one in self.weights)
        return torch.autograd.grad(expected_reward(held, self._problems).sum(), held)

    @torch.enable_grad()
    def _compared(
        self, held: Weights, policy: Tensor, terms: tuple[Tensor, Tensor, Tensor], exact: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Cosines of what naive and decoupled (no cap) would do with the same tokens, at the same weights."""
        sampler, proximal, advantage = terms
        weight = (proximal - sampler).clamp(-20, 20).exp()
        each = {
            "cosine_naive": losses.ppo_clip(policy, sampler, advantage, low=CLIP, high=CLIP),
            "cosine_decoupled": losses.ppo_clip(policy, proximal, advantage, low=CLIP, high=CLIP) * weight,
        }
        return {
            name: cosine(torch.autograd.grad(loss.mean((1, 2)).sum(), held, retain_graph=True), exact)
            for name, loss in each.items()
        }


def cosine(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Cosine of the direction of a descent with the exact gradient of the reward, [R]; 0 for no gradient."""
    pairs = [(-a.flatten(1), b.flatten(1)) for a, b in zip(gradients, exact, strict=True)]
    inner, ours, theirs = (
        torch.stack([(a * b).sum(1) for a, b in each]).sum(0)
        for each in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
    )
    return inner / (ours * theirs).sqrt().clamp(min=1e-30)


def train(seed: int, arms: Sequence[Arm], num_batches: int) -> list[dict[str, Any]]:
    """Train a policy by each arm: its expected reward every five batches, and the means of its figures.

    The figures are those of each minibatch, over the batches.
    """
    problems = Problems(seed)
    training = Training(start_weights(problems), problems, arms)
    rewards, notes = [training.rewards()], []
    for step in range(1, num_batches + 1):
        notes.append(training.batch())
        if step % EVALUATE_EVERY == 0 or step == num_batches:
            rewards.append(training.rewards())
    names = dict.fromkeys(name for note in notes for name in note[0])
    figures = {name: _mean([note for note in notes if name in note[0]], name) for name in names}
    return [
        {
            "accuracy": [rounded(each[place]) for each in rewards],
            "minibatch": {name: [rounded(one[place]) for one in mean] for name, mean in figures.items()},
        }
        for place in range(len(arms))
    ]


def _mean(notes: Sequence[Sequence[Mapping[str, Tensor]]], name: str) -> Tensor:
    """The mean of a figure over batches, [minibatches, R]."""
    return torch.stack([torch.stack([part[name] for part in note]) for note in notes]).mean(0)


def rounded(value: Tensor) -> float:
    """Four digits, so that the file of results stays small."""
    return float(f"{float(value):.4g}")
