"""What the policy minimises: which log-probabilities meet, what is multiplied, what is added."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from millrace.algorithms import kl
from millrace.algorithms.losses import LossTerms
from millrace.data.batch import Batch
from millrace.training.kl_control import KlControl
from millrace.training.policy import KlPenalty, PolicyObjective, imitation
from tests.close import close_fp32
from tests.training.pieces import full_batch, predicted, random_batch


def ratio(terms: LossTerms) -> tuple[Tensor, None]:
    return -terms.advantage_N * (terms.policy_N - terms.start_N).exp(), None


def seen_by(batch: Batch, logprob_N: Tensor, *, version: int = 0, **more) -> LossTerms:
    """The terms that a policy loss is given."""
    seen: list[LossTerms] = []

    def look(terms: LossTerms) -> tuple[Tensor, None]:
        seen.append(terms)
        return terms.policy_N, None

    PolicyObjective(look, **more)(predicted(logprob_N, version=version), batch)
    return seen[0]


def logprobs(batch: Batch, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    drawn_N = torch.randn(int(batch.action_mask_T.sum()), generator=generator)
    return batch.sampler_logprob_T[batch.action_mask_T] + 0.2 * drawn_N


def test_imitation_is_the_negative_log_probability_and_reports_nothing():
    loss_N, report = imitation(predicted(torch.tensor([-1.5, -0.25])), random_batch(0))
    assert (loss_N.tolist(), report) == ([1.5, 0.25], {})


def test_a_loss_is_given_the_chosen_tokens_alone():
    batch = full_batch(3)
    mask_T, logprob_N = batch.action_mask_T, logprobs(batch)
    terms = seen_by(batch, logprob_N)
    assert terms.policy_N is logprob_N
    assert terms.start_N.tolist() == batch.proximal_logprob_T[mask_T].tolist()
    assert terms.advantage_N.tolist() == batch.advantage_T[mask_T].tolist()
    assert terms.segment_N.tolist() == batch.segment_T[mask_T].tolist()
    assert terms.selected_N.tolist() == batch.selected_T[mask_T].tolist()
    assert terms.num_segments == 7


def test_without_proximal_log_probabilities_the_ratio_is_taken_to_the_sampler():
    batch = random_batch(3)
    terms = seen_by(batch, logprobs(batch))
    assert terms.start_N.tolist() == batch.sampler_logprob_T[batch.action_mask_T].tolist()
    assert terms.selected_N is None


def interpolated(batch: Batch, logprob_N: Tensor, version: int) -> list[float]:
    """Token by token: a token of lag n has 1 / n of the sampler's and the rest of the policy's."""
    places = batch.action_mask_T.nonzero()[:, 0].tolist()
    found = []
    for place, policy in zip(places, logprob_N.tolist(), strict=True):
        lag = max(1, version - int(batch.version_T[place]))
        found.append(float(batch.sampler_logprob_T[place]) / lag + policy * (lag - 1) / lag)
    return found


def test_interpolation_goes_from_sampler_to_policy_by_version_and_has_no_gradient():
    batch = full_batch(4)
    logprob_N = logprobs(batch).requires_grad_()
    assert batch.version_T[batch.action_mask_T].unique().tolist() == [0, 1, 2, 3, 4]
    terms = seen_by(batch, logprob_N, version=4, interpolate=True)
    close_fp32(terms.start_N, interpolated(batch, logprob_N, 4))
    assert not terms.start_N.requires_grad
    later = seen_by(batch, logprob_N, version=9, interpolate=True)
    close_fp32(later.start_N, interpolated(batch, logprob_N, 9))


def test_the_batchs_correction_multiplies_the_policy_loss_alone_and_is_reported():
    batch = full_batch(5)
    logprob_N = logprobs(batch)
    mask_T = batch.action_mask_T
    penalty = KlPenalty(KlControl(0.3), kl.k2)
    given = predicted(logprob_N, entropy=1.5)
    loss_N, report = PolicyObjective(ratio, entropy_coefficient=0.2, penalty=penalty)(given, batch)
    ratio_N = (logprob_N - batch.proximal_logprob_T[mask_T]).exp()
    distance_N = logprob_N - batch.reference_logprob_T[mask_T]
    expected_N = -batch.advantage_T[mask_T] * ratio_N * batch.correction_T[mask_T]
    close_fp32(loss_N, expected_N - 0.2 * 1.5 + 0.3 * 0.5 * distance_N**2)
    assert set(report) == {"correction", "kl_reference"}
    close_fp32(report["correction"], batch.correction_T[mask_T])
    close_fp32(report["kl_reference"], 0.5 * distance_N**2)


def test_with_interpolation_the_correction_weighs_its_start_against_the_sampler():
    batch = full_batch(6)
    logprob_N = logprobs(batch)
    mask_T = batch.action_mask_T
    asked: list[tuple[Tensor, int]] = []

    def capped(start_N: Tensor, sampler_N: Tensor, segment_N: Tensor, num_segments: int) -> Tensor:
        asked.append((segment_N, num_segments))
        return (start_N - sampler_N).exp().clamp(max=1.1)

    def above(start_N: Tensor, sampler_N: Tensor, segment_N: Tensor, num_segments: int) -> Tensor:
        return (start_N - sampler_N).exp() > 1.1

    loss_N, report = PolicyObjective(ratio, interpolate=True, correction=capped, bounded=above)(
        predicted(logprob_N, version=4), batch
    )
    start_N = torch.tensor(interpolated(batch, logprob_N, 4))
    factor_N = (start_N - batch.sampler_logprob_T[mask_T]).exp().clamp(max=1.1)
    assert 0 < int((factor_N == 1.1).sum()) < len(factor_N)
    # A factor that comes with the batch, such as 0 for tokens left out, stays.
    both_N = factor_N * batch.correction_T[mask_T]
    close_fp32(loss_N, -batch.advantage_T[mask_T] * (logprob_N - start_N).exp() * both_N)
    close_fp32(report["correction"], both_N)
    close_fp32(report["correction_clip_fraction"], factor_N == 1.1)
    ((segment_N, num_segments),) = asked
    assert (segment_N.tolist(), num_segments) == (batch.segment_T[mask_T].tolist(), 7)


def test_tokens_without_gradient_are_reported_where_the_loss_has_bounds():
    batch = random_batch(0)
    logprob_N = logprobs(batch)

    def bounded(terms: LossTerms) -> tuple[Tensor, Tensor]:
        return terms.policy_N, terms.advantage_N > 0

    report = PolicyObjective(bounded)(predicted(logprob_N), batch)[1]
    expected_N = (batch.advantage_T[batch.action_mask_T] > 0).float()
    assert report.keys() == {"clip_fraction"}
    assert report["clip_fraction"].tolist() == expected_N.tolist()
    # Without a coefficient the entropy adds nothing.
    loss_N, report = PolicyObjective(ratio)(predicted(logprob_N, entropy=1.5), batch)
    assert (report, loss_N.tolist()) == ({}, ratio(seen_by(batch, logprob_N))[0].tolist())


# With d = log pi - log ref = 0.5: values d, d^2 / 2, e^-d - 1 + d, |d|, and what they add to the slope.
ESTIMATORS = {
    "k1": (kl.k1, 0.5, 1.0),
    "k2": (kl.k2, 0.125, 0.5),
    "k3": (kl.k3, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
    "abs": (kl.absolute, 0.5, 1.0),
    "k1+": (kl.straight_through(kl.k1), 0.5, 0.5),
    "k3+": (kl.straight_through(kl.k3), math.exp(-0.5) - 0.5, 0.5),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_kl_penalty_has_the_value_and_slope_of_its_estimator(name):
    batch = random_batch(0)
    mask_T = batch.action_mask_T
    batch.reference_logprob_T = torch.where(mask_T, batch.sampler_logprob_T - 0.5, 0.0)
    logprob_N = batch.sampler_logprob_T[mask_T].clone().requires_grad_()
    estimator, value, slope = ESTIMATORS[name]
    loss_N, report = KlPenalty(KlControl(0.3), estimator)(predicted(logprob_N), batch)
    loss_N.sum().backward()
    close_fp32(loss_N, torch.full_like(loss_N, 0.3 * value))
    close_fp32(report["kl_reference"], torch.full_like(loss_N, value))
    close_fp32(logprob_N.grad, torch.full_like(loss_N, 0.3 * slope))
    assert not report["kl_reference"].requires_grad


def test_the_kl_penalty_follows_its_control():
    batch = full_batch(0)
    control = KlControl(0.25, target=0.1, horizon=50)
    penalty, given = KlPenalty(control, kl.k1), predicted(logprobs(batch))
    before_N = penalty(given, batch)[0]
    control.update(5.0, 10)
    close_fp32(penalty(given, batch)[0], before_N * (1 + 0.2 * 10 / 50))


def test_a_kl_penalty_without_reference_log_probabilities_is_refused():
    with pytest.raises(ValueError) as caught:
        KlPenalty(KlControl(0.1), kl.k3)(predicted(torch.zeros(3)), random_batch(0))
    assert str(caught.value) == ("a KL penalty needs the batch's reference log-probabilities; score it first")
