"""The policy trainer: whatever the split, one gradient; whatever goes wrong, no weight moves."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from millrace.algorithms import weights
from millrace.data.packing import pack_demonstrations
from millrace.models.logprobs import chosen_logprobs
from millrace.training.optimizer import adamw, optimizer_tensors
from millrace.training.policy import PolicyTrainer, clipped_surrogate, imitation, kl_penalty
from tests.close import close_fp32
from tests.training.pieces import random_batch, tiny_model

CLIP = clipped_surrogate(low=0.2, high=0.2, dual=None)


def trainer(model=None, objective=CLIP, **more) -> PolicyTrainer:
    model = model or tiny_model()
    options = {
        "learning_rate": lambda step: 0.01,
        "temperature": 1.0,
        "max_tokens": 1000,
        "max_gradient_norm": 1e9,
    } | more
    optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.1)
    return PolicyTrainer(model, objective, optimizer, **options)


def gradients(one: PolicyTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in one.model.parameters()])


def weight_bits(one: PolicyTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in one.model.parameters()]


def plain_gradient(model, batch, temperature: float) -> torch.Tensor:
    """The clipped objective written out over the model's own logits, one segment at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(batch.num_segments):
        here = batch.segment_T == b
        logits = model.get_output_embeddings()(
            model.base_model(
                input_ids=batch.token_T[here][None], attention_mask=None, use_cache=False
            ).last_hidden_state[0]
        )
        logprob = (logits / temperature).log_softmax(-1)
        for t in range(1, int(here.sum())):
            if not batch.action_mask_T[here][t]:
                continue
            advantage = batch.advantage_T[here][t].double()
            token = batch.token_T[here][t]
            ratio = (logprob[t - 1, token] - batch.sampler_logprob_T[here][t].double()).exp()
            bounded = ratio.clamp(0.8, 1.2)
            total = total - batch.weight_T[here][t].double() * torch.minimum(
                advantage * ratio, advantage * bounded
            )
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_plain_autograd_of_the_whole_batch(seed, tied):
    batch = random_batch(seed)
    ours = trainer(tiny_model(seed, torch.float64, tied=tied), temperature=0.7)
    ours.forward_backward(batch)
    reference = tiny_model(seed, torch.float64, tied=tied)
    reference.set_attn_implementation("eager")
    expected = plain_gradient(reference, batch, temperature=0.7)
    assert expected.norm() > 1e-3
    # transformers normalises and rotates in float32 whatever the weights are.
    close_fp32(gradients(ours), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "token_weights",
    [
        weights.token_mean,
        weights.sequence_mean,
        weights.sequence_sum,
        partial(weights.fixed_length, length=9),
    ],
)
def test_the_gradient_is_the_same_however_the_batch_is_split_and_packed(token_weights):
    whole = trainer()
    whole.forward_backward(random_batch(5, token_weights=token_weights))
    expected = gradients(whole)
    order = [3, 0, 6, 2, 5, 1, 4]
    longest = int(random_batch(5).length_B.max())
    for given in (None, order):
        for max_tokens in (longest, longest + 5, 30, 1000):
            split = trainer(max_tokens=max_tokens)
            split.forward_backward(random_batch(5, token_weights=token_weights, order=given))
            close_fp32(gradients(split), expected, rtol=1e-4, atol=1e-6)
            report, straight = split.optim_step(), trainer()
            straight.forward_backward(random_batch(5, token_weights=token_weights))
            close_fp32(report.metrics["loss"], straight.optim_step().metrics["loss"])


def test_one_segment_at_a_time_adds_up_to_the_whole_batch():
    batch = random_batch(6)
    whole, parts = trainer(), trainer()
    logprob_N = whole.forward_backward(batch)
    pieces = [parts.forward_backward(batch.select([b])) for b in range(batch.num_segments)]
    close_fp32(torch.cat(pieces), logprob_N)
    close_fp32(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-6)
    ours, theirs = parts.optim_step(), whole.optim_step()
    for name, value in theirs.metrics.items():
        close_fp32(ours.metrics[name], value)


def test_it_returns_the_log_probabilities_before_the_update_in_packed_order():
    batch, one = random_batch(1), trainer(temperature=1.3)
    with torch.no_grad():
        expected_N, _ = chosen_logprobs(tiny_model(), batch, temperature=1.3)
    found_N = one.forward_backward(batch)
    close_fp32(found_N, expected_N)
    assert not found_N.requires_grad


def test_metrics_are_the_loss_and_means_over_the_shares():
    batch, model = random_batch(2), tiny_model()
    one = trainer(model, max_tokens=int(batch.length_B.max()))
    logprob_N, entropy_N = chosen_logprobs(model, batch, temperature=1.0)
    mask = batch.action_mask_T
    weight_N = batch.weight_T[mask] / 2
    batch.weight_T = batch.weight_T / 2  # shares that add up to one half: a mean must divide by it
    ratio_N = (logprob_N - batch.sampler_logprob_T[mask]).exp()
    advantage_N = batch.advantage_T[mask]
    loss_N = -torch.minimum(advantage_N * ratio_N, advantage_N * ratio_N.clamp(0.8, 1.2))
    outside_N = ((advantage_N > 0) & (ratio_N > 1.2)) | ((advantage_N < 0) & (ratio_N < 0.8))
    one.forward_backward(batch)
    report = one.optim_step()
    assert 0 < outside_N.sum() < len(outside_N)
    close_fp32(report.metrics["loss"], (loss_N * weight_N).sum())
    close_fp32(report.metrics["entropy"], 2 * (entropy_N * weight_N).sum())
    close_fp32(report.metrics["clip_share"], 2 * (outside_N * weight_N).sum())


def test_the_metrics_of_a_step_start_from_nothing():
    one = trainer(learning_rate=lambda step: 0.0)
    reports = []
    for _ in range(2):
        one.forward_backward(random_batch(2))
        reports.append(one.optim_step())
    assert reports[0].metrics == reports[1].metrics
    assert reports[0].gradient_norm == reports[1].gradient_norm > 0


def test_the_learning_rate_is_that_of_the_attempt_and_the_version_counts_steps():
    one = trainer(learning_rate=lambda step: [0.5, 0.25][step], version=7)
    rates = []
    for _ in range(2):
        one.forward_backward(random_batch(3))
        rates.append(one.optim_step().learning_rate)
    assert (rates, one.version, one.num_attempts) == ([0.5, 0.25], 9, 2)


def test_a_gradient_above_the_bound_is_scaled_to_it_and_reported_unscaled():
    one = trainer(max_gradient_norm=0.01)
    one.forward_backward(random_batch(3))
    norm = float(gradients(one).norm())
    seen = []
    one.optimizer.step = lambda: seen.append(float(gradients(one).norm()))
    report = one.optim_step()
    close_fp32(report.gradient_norm, norm)
    assert norm > 0.1
    close_fp32(seen[0], 0.01, rtol=1e-3)


def test_a_gradient_below_the_bound_is_left_alone():
    one = trainer(max_gradient_norm=1e6)
    one.forward_backward(random_batch(3))
    norm = float(gradients(one).norm())
    seen = []
    one.optimizer.step = lambda: seen.append(float(gradients(one).norm()))
    one.optim_step()
    assert seen == [norm]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_reported(value):
    one = trainer()
    one.forward_backward(random_batch(0))
    one.optim_step()
    bits, state = weight_bits(one), {k: v.clone() for k, v in _state(one).items()}
    bad = random_batch(1)
    bad.advantage_T[bad.action_mask_T.nonzero()[0, 0]] = value
    one.forward_backward(bad)
    report = one.optim_step()
    assert report.skipped
    assert not math.isfinite(report.gradient_norm)
    assert not math.isfinite(report.metrics["loss"])
    assert (one.version, one.num_attempts) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(bits, weight_bits(one), strict=True))
    assert state.keys() == _state(one).keys()
    assert all(torch.equal(state[key], value) for key, value in _state(one).items())
    # The bad gradient is gone with its batch.
    one.forward_backward(random_batch(2))
    after = one.optim_step()
    assert (after.skipped, one.version, one.num_attempts) == (False, 2, 3)
    assert math.isfinite(after.metrics["loss"])


def _state(one: PolicyTrainer) -> dict[str, torch.Tensor]:
    return optimizer_tensors(one.optimizer, one.model)


def test_a_step_without_any_gradient_moves_by_momentum_and_counts():
    one, zero = trainer(), trainer()
    for each in (one, zero):
        each.forward_backward(random_batch(0))
        each.optim_step()
    before = weight_bits(one)
    report = one.optim_step()
    still = random_batch(1)
    still.advantage_T.zero_()
    zero.forward_backward(still)
    zero.optim_step()
    assert (report.skipped, report.gradient_norm, report.metrics, one.version) == (False, 0.0, {}, 2)
    assert any(not torch.equal(a, b) for a, b in zip(before, weight_bits(one), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weight_bits(zero), weight_bits(one), strict=True))


def test_imitation_is_the_mean_negative_log_probability():
    batch = pack_demonstrations([((1, 2), (3, 4, 0)), ((5,), (6, 0))], weights.token_mean)
    one = trainer(objective=imitation)
    logprob_N = one.forward_backward(batch)
    report = one.optim_step()
    assert len(logprob_N) == 5
    close_fp32(report.metrics["loss"], -logprob_N.mean())
    assert set(report.metrics) == {"loss", "entropy"}


def test_dual_clipping_bounds_the_loss_of_a_bad_token():
    batch = random_batch(0, num_segments=1)
    batch.advantage_T[batch.action_mask_T] = -1.0
    mask = batch.action_mask_T
    logprob_N = batch.sampler_logprob_T[mask] + 2.0  # a ratio of e^2 = 7.39
    bounded_N, _ = clipped_surrogate(low=0.2, high=0.2, dual=3.0)(logprob_N, batch)
    free_N, _ = CLIP(logprob_N, batch)
    close_fp32(bounded_N, torch.full_like(bounded_N, 3.0))
    close_fp32(free_N, torch.full_like(free_N, math.e**2))


# With d = log pi - log ref = 0.5: values d, d^2 / 2, e^-d - 1 + d, and what they add to the slope.
KL = {"k1": (0.5, 1.0), "k2": (0.125, 0.5), "k3": (math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_penalty_has_the_value_and_slope_of_its_estimator(estimator):
    batch = random_batch(0)
    mask = batch.action_mask_T
    batch.reference_logprob_T = torch.where(mask, batch.sampler_logprob_T - 0.5, 0.0)
    logprob_N = batch.sampler_logprob_T[mask].clone().requires_grad_()
    loss_N, report = kl_penalty(coefficient=0.3, estimator=estimator)(logprob_N, batch)
    loss_N.sum().backward()
    value, slope = KL[estimator]
    close_fp32(loss_N, torch.full_like(loss_N, 0.3 * value))
    close_fp32(report["kl_reference"], torch.full_like(loss_N, value))
    close_fp32(logprob_N.grad, torch.full_like(loss_N, 0.3 * slope))
    assert not report["kl_reference"].requires_grad


def test_the_kl_penalty_is_added_to_the_policy_loss():
    batch = random_batch(0)
    mask = batch.action_mask_T
    batch.reference_logprob_T = torch.where(mask, batch.sampler_logprob_T - 0.5, 0.0)
    penalty = kl_penalty(coefficient=0.3, estimator="k2")
    both = clipped_surrogate(low=0.2, high=0.2, dual=None, kl_loss=penalty)
    logprob_N = batch.sampler_logprob_T[mask] + 0.1
    loss_N, report = both(logprob_N, batch)
    close_fp32(loss_N, CLIP(logprob_N, batch)[0] + penalty(logprob_N, batch)[0])
    assert set(report) == {"clip_share", "kl_reference"}


def test_a_kl_penalty_without_reference_log_probabilities_is_refused():
    with pytest.raises(ValueError, match="a KL penalty needs the batch's reference log-probabilities"):
        kl_penalty(coefficient=0.1, estimator="k3")(torch.zeros(3), random_batch(0))


def test_named_tensors_names_every_weight_once_without_gradient():
    one = trainer(tiny_model(tied=True))
    named = dict(one.named_tensors())
    assert named.keys() == {name for name, _ in one.model.named_parameters()}
    assert "lm_head.weight" not in named
    assert not any(tensor.requires_grad for tensor in named.values())
