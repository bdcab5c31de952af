"""Loss and gradient of an optimizer step do not depend on how its segments were split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from millrace.algorithms import losses
from millrace.algorithms.kl import k1, k2, k3, straight_through
from millrace.algorithms.ratios import divide_by_mean, icepop, importance_weights, truncate
from millrace.algorithms.weights import fixed_length, sequence_mean, sequence_sum, token_mean, token_sum
from tests.close import close_fp64

TOKEN_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token_mean": token_mean,
    "token_sum": token_sum,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "fixed_length": partial(fixed_length, length=7),
}


@dataclass(frozen=True, eq=False)
class Tokens:
    """Chosen tokens; what a method fixes once for the step travels with them."""

    token_T: Tensor
    sampler_T: Tensor
    advantage_T: Tensor
    segment_T: Tensor
    selected_T: Tensor
    correction_T: Tensor
    weight_T: Tensor

    def part(self, segments: list[int]) -> Tokens:
        """The tokens of some segments, in the order given, as a micro-batch that counts from 0."""
        places = [(self.segment_T == segment).nonzero()[:, 0] for segment in segments]
        order_T = torch.cat(places)
        cut = Tokens(*(getattr(self, field.name)[order_T] for field in fields(self)))
        numbers = [torch.full((len(place),), i) for i, place in enumerate(places)]
        return replace(cut, segment_T=torch.cat(numbers))


Objective = Callable[[Tensor, Tokens], Tensor]
TOKEN_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ppo_clip": partial(losses.ppo_clip, low=0.2, high=0.28, dual=1.5),
    "cispo": partial(losses.cispo, low=0.2, high=0.28),
    "sapo": partial(losses.sapo, positive=1.0, negative=1.05),
    "dppo_tv": partial(losses.dppo_tv, low=0.02, high=0.03, cap=1.5),
    "dppo_kl": partial(losses.dppo_kl, low=0.01, high=0.02, cap=1.5),
    "dro": partial(losses.dro, beta=0.3),
}
SEQUENCE_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]] = {
    "gspo": partial(losses.gspo, low=0.05, high=0.08),
    "gspo_token": partial(losses.gspo_token, low=0.05, high=0.08),
    "gmpo": partial(losses.gmpo, low=0.2, high=0.3),
    "topr": losses.topr,
}


def by_token(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Objective:
    return lambda policy_T, t: function(policy_T, t.sampler_T, t.advantage_T)


def by_sequence(function: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]) -> Objective:
    return lambda policy_T, t: function(
        policy_T, t.sampler_T, t.advantage_T, t.segment_T, int(t.segment_T.max()) + 1
    )


EVERY: dict[str, Objective] = {
    "reinforce": lambda policy_T, t: losses.reinforce(policy_T, t.advantage_T),
    "kl_cov": lambda policy_T, t: losses.kl_cov(
        policy_T, t.sampler_T, t.advantage_T, t.selected_T, coefficient=0.3
    ),
    "clip_cov": lambda policy_T, t: (
        TOKEN_LOSSES["ppo_clip"](policy_T, t.sampler_T, t.advantage_T) * ~t.selected_T
    ),
    "value_loss": lambda policy_T, t: losses.value_loss(policy_T, t.sampler_T, t.advantage_T, clip=0.5),
    **{f.__name__: partial(lambda f, policy_T, t: f(policy_T, t.sampler_T), f) for f in (k1, k2, k3)},
    "k3+": lambda policy_T, t: straight_through(k3)(policy_T, t.sampler_T),
    **{name: by_token(function) for name, function in TOKEN_LOSSES.items()},
    **{name: by_sequence(function) for name, function in SEQUENCE_LOSSES.items()},
}


def logits() -> Tensor:
    """Of a policy with one logit for each token."""
    return torch.linspace(-1, 1, 11, dtype=torch.float64).requires_grad_()


def random_step(seed: int, aggregation: str) -> Tokens:
    """Nine segments of 1 to 8 tokens, some not chosen, one without any."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(1, 9, (9,), generator=generator)
    segment_T = torch.repeat_interleave(torch.arange(9), length_B)
    mask_T = (torch.rand(len(segment_T), generator=generator) < 0.7) & (segment_T != 4)
    mask_T[0] = True
    weight_T = TOKEN_WEIGHTS[aggregation](mask_T, segment_T).double()[mask_T]
    segment_N, token_N = segment_T[mask_T], torch.randint(0, 11, mask_T.shape, generator=generator)[mask_T]
    policy_N = logits().detach().log_softmax(-1)[token_N]
    moved_N, advantage_N = torch.randn(2, len(token_N), generator=generator, dtype=torch.float64)
    sampler_N = policy_N + 0.3 * moved_N
    selected_N = losses.kl_cov_selection(losses.covariance(policy_N, advantage_N), fraction=0.2)
    correction_N = importance_weights(policy_N - sampler_N, segment_N, 9, level="sequence")
    correction_N = divide_by_mean(truncate(correction_N, high=2.0), segment_N, 9, level="sequence")
    return Tokens(token_N, sampler_N, advantage_N, segment_N, selected_N, correction_N, weight_T)


def random_split(seed: int, segments: list[int]) -> list[list[int]]:
    """The segments in random order, cut into two to five micro-batches."""
    generator = torch.Generator().manual_seed(1000 + seed)
    order = [segments[i] for i in torch.randperm(len(segments), generator=generator).tolist()]
    num_cuts = int(torch.randint(1, 5, (), generator=generator))
    cuts = sorted((torch.randperm(len(order) - 1, generator=generator)[:num_cuts] + 1).tolist())
    return [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]


def loss_and_gradient(objective: Objective, micros: list[Tokens]) -> tuple[float, Tensor]:
    logit_V, total = logits(), 0.0
    for micro in micros:
        loss_T = objective(logit_V.log_softmax(-1)[micro.token_T], micro)
        loss = (loss_T * micro.correction_T * micro.weight_T).sum()
        loss.backward()
        total += loss.item()
    assert logit_V.grad is not None
    return total, logit_V.grad


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("aggregation", TOKEN_WEIGHTS)
@pytest.mark.parametrize("seed", range(20))
def test_every_loss_is_the_same_under_any_split(seed: int, aggregation: str) -> None:
    step = random_step(seed, aggregation)
    split = random_split(seed, step.segment_T.unique().tolist())
    micros = [step.part(segments) for segments in split]
    assert len(micros) > 1 and sum(len(micro.token_T) for micro in micros) == len(step.token_T)
    for objective in EVERY.values():
        loss, gradient_V = loss_and_gradient(objective, [step])
        part, part_gradient_V = loss_and_gradient(objective, micros)
        close_fp64(part, loss, atol=1e-11)
        close_fp64(part_gradient_V, gradient_V, atol=1e-11)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(20))
def test_importance_weights_by_segment_are_the_same_under_any_split(seed: int) -> None:
    step = random_step(seed, "token_mean")
    for segments in random_split(seed, step.segment_T.unique().tolist()):
        part = step.part(segments)
        for level in ("token", "sequence", "geometric"):
            whole_T = importance_weights(step.sampler_T, step.segment_T, 9, level=level)
            inside_T = torch.cat([whole_T[step.segment_T == segment] for segment in segments])
            found_T = importance_weights(part.sampler_T, part.segment_T, len(segments), level=level)
            close_fp64(icepop(found_T, low=1e-9, high=0.9), icepop(inside_T, low=1e-9, high=0.9))


def test_a_selection_made_on_a_micro_batch_would_differ() -> None:
    step = random_step(0, "token_mean")
    micros = [step.part(segments) for segments in random_split(0, step.segment_T.unique().tolist())]
    policy_V = logits().detach().log_softmax(-1)
    found = [
        losses.kl_cov_selection(losses.covariance(policy_V[m.token_T], m.advantage_T), fraction=0.2)
        for m in micros
    ]
    assert any((x != m.selected_T).any() for x, m in zip(found, micros, strict=True))
