"""The policy trainer: whatever the split, one gradient; whatever goes wrong, no weight moves."""

from __future__ import annotations

import math
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from millrace.algorithms import kl, ratios, weights
from millrace.algorithms.losses import LossTerms
from millrace.config import method_sections as words
from millrace.config.sections import PolicyConfig
from millrace.data.batch import Batch
from millrace.data.packing import pack_demonstrations
from millrace.models.logprobs import chosen_logprobs
from millrace.run.build_algorithm import build_loss
from millrace.training.kl_control import KlControl
from millrace.training.optimizer import adamw, optimizer_tensors
from millrace.training.policy import KlPenalty, PolicyObjective, PolicyTrainer, imitation
from millrace.training.scorer import ModelScorer
from tests.close import close_fp32, close_fp64
from tests.data.pieces import outside, truncated
from tests.training.pieces import NORMS, VOCAB_SIZE, full_batch, plain_logits, random_batch, tiny_model

CLIP = PolicyObjective(build_loss(words.PpoClipLoss(clip_low=0.2, clip_high=0.2)))
# Every kind of loss, and both forms of those that have two; bounds narrow enough to act.
LOSSES = [
    words.PpoClipLoss(dual_clip=1.5),
    words.ReinforceLoss(kind="reinforce"),
    words.GspoLoss(kind="gspo", clip_low=0.1, clip_high=0.1),
    words.GspoLoss(kind="gspo", clip_low=0.1, clip_high=0.1, gradient="token"),
    words.GmpoLoss(kind="gmpo"),
    words.CispoLoss(kind="cispo"),
    words.SapoLoss(kind="sapo"),
    words.DppoLoss(kind="dppo", clip_low=0.02, clip_high=0.02),
    words.DppoLoss(kind="dppo", divergence="kl", clip_low=0.02, clip_high=0.02),
    words.DroLoss(kind="dro"),
    words.ToprLoss(kind="topr"),
    words.ClipCovLoss(kind="clip_cov"),
    words.KlCovLoss(kind="kl_cov"),
    words.FunctionLoss(kind="function", function="tests.plugin_functions:smooth"),
]
WEIGHTS = [
    weights.token_mean,
    weights.token_sum,
    weights.sequence_mean,
    weights.sequence_sum,
    partial(weights.fixed_length, length=9),
]
ORDER = [3, 0, 6, 2, 5, 1, 4]


def trainer(model=None, objective=CLIP, **more) -> PolicyTrainer:
    model = model or tiny_model()
    options = {
        "learning_rate": lambda step: 0.01,
        "temperature": 1.0,
        "max_tokens": 1000,
        "max_grad_norm": 1e9,
    } | more
    optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.1)
    return PolicyTrainer(model, objective, optimizer, **options)


def gradients(one: PolicyTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in one.model.parameters()])


def weight_bits(one: PolicyTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in one.model.parameters()]


def chosen(batch: Batch, name: str) -> Tensor:
    return getattr(batch, name)[batch.action_mask_T].double()


def over_supports(logit_NV: Tensor, batch: Batch) -> Tensor:
    """Log-probabilities over what each token was drawn among; elsewhere far below."""
    if batch.support is not None:
        logit_NV = logit_NV.masked_fill(outside(batch.chosen_support, VOCAB_SIZE), -1e9)
    return logit_NV.log_softmax(-1)


def plain_gradient(model, batch, temperature: float) -> torch.Tensor:
    """The clipped objective written out over the model's own logits."""
    logprob_NV = over_supports(plain_logits(model, batch, temperature), batch)
    total = torch.zeros((), dtype=torch.float64)
    columns = ("token_T", "sampler_logprob_T", "advantage_T", "weight_T")
    for row_V, token, sampler, advantage, weight in zip(
        logprob_NV, *(chosen(batch, name) for name in columns), strict=True
    ):
        ratio = (row_V[int(token)] - sampler).exp()
        total = total - weight * torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("drawn_among_some", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_plain_autograd_of_the_whole_batch(seed, tied, drawn_among_some):
    batch = random_batch(seed)
    if drawn_among_some:
        batch = truncated(batch, VOCAB_SIZE, seed)
    ours = trainer(tiny_model(seed, torch.float64, tied=tied), temperature=0.7)
    ours.forward_backward(batch)
    reference = tiny_model(seed, torch.float64, tied=tied)
    expected = plain_gradient(reference, batch, temperature=0.7)
    assert expected.norm() > 1e-3
    # transformers normalises and rotates in float32 whatever the weights are.
    close_fp32(gradients(ours), expected, rtol=1e-4, atol=1e-6)


def test_every_kind_of_loss_is_in_the_list_and_every_way_to_weigh_too():
    kinds = {kind.model_fields["kind"].annotation for kind in get_args(get_args(words.LossConfig)[0])}
    assert {get_args(kind)[0] for kind in kinds} == {loss.kind for loss in LOSSES}
    names = {one.func.__name__ if isinstance(one, partial) else one.__name__ for one in WEIGHTS}
    assert names == set(get_args(PolicyConfig.model_fields["loss_aggregation"].annotation))


def stepped(objective, batch: Batch, **more) -> tuple[Tensor, dict[str, float]]:
    """The gradient and the metrics of one optimizer step."""
    one = trainer(tiny_model(1, torch.float64), objective, version=4, **more)
    one.forward_backward(batch)
    return gradients(one), one.optim_step().metrics


def check_split(objective, token_weights, *, drawn_among_some: bool = False, **more) -> None:
    batch = full_batch(5, token_weights=token_weights)
    if drawn_among_some:
        batch = truncated(batch, VOCAB_SIZE, 5)
    expected, metrics = stepped(objective, batch, max_tokens=1000, **more)
    assert expected.norm() > 1e-3
    longest = int(batch.length_B.max())
    for order, max_tokens in ((ORDER, longest), (None, longest + 5)):
        again = batch if order is None else batch.select(order)
        found, others = stepped(objective, again, max_tokens=max_tokens, **more)
        close_fp64(found, expected, rtol=1e-7, atol=1e-9 * float(expected.norm()))
        # Sums of the metrics are float32.
        assert others.keys() == metrics.keys()
        for name, value in metrics.items():
            close_fp32(others[name], value, rtol=1e-4)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("token_weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
def test_no_loss_depends_on_how_the_batch_is_split_or_packed(loss, token_weights):
    check_split(PolicyObjective(build_loss(loss)), token_weights)


def capped(proximal_N: Tensor, sampler_N: Tensor, segment_N: Tensor, num_segments: int) -> Tensor:
    log_ratio_N = proximal_N - sampler_N
    weight_N = ratios.importance_weights(log_ratio_N, segment_N, num_segments, level="geometric")
    return ratios.truncate(weight_N, high=1.05)


def other_model(temperature: float):
    """A scorer with frozen weights of its own; what it holds of a forward's size is not used."""
    reference = tiny_model(9, torch.float64)
    return ModelScorer(reference, temperature=temperature, max_tokens=1), reference


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("drawn_among_some", [False, True])
@pytest.mark.parametrize("what", ["entropy", "kl", "full kl", "interpolation"])
def test_what_is_added_to_the_loss_does_not_depend_on_the_split_either(what, drawn_among_some):
    if what == "entropy":
        more = {"entropy_coefficient": 0.3}
    elif what == "kl":
        more = {"penalty": KlPenalty(KlControl(0.4), kl.straight_through(kl.k3))}
    elif what == "full kl":
        more = {"penalty": KlPenalty(KlControl(0.7), None)}
    else:
        more = {"interpolate": True, "correction": capped}
    objective = PolicyObjective(build_loss(words.PpoClipLoss()), **more)
    reference = other_model(1.0)[0] if what == "full kl" else None
    check_split(objective, weights.sequence_mean, drawn_among_some=drawn_among_some, reference=reference)


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


def test_metrics_are_the_loss_and_weighted_means():
    batch, model = random_batch(2), tiny_model()
    one = trainer(model, max_tokens=int(batch.length_B.max()))
    logprob_N, entropy_N = chosen_logprobs(model, batch, temperature=1.0)
    mask = batch.action_mask_T
    weight_N = batch.weight_T[mask] / 2
    batch.weight_T = batch.weight_T / 2  # weights that add up to one half: a mean must divide by it
    ratio_N = (logprob_N - batch.sampler_logprob_T[mask]).exp()
    advantage_N = batch.advantage_T[mask]
    loss_N = -torch.minimum(advantage_N * ratio_N, advantage_N * ratio_N.clamp(0.8, 1.2))
    outside_N = ((advantage_N > 0) & (ratio_N > 1.2)) | ((advantage_N < 0) & (ratio_N < 0.8))
    one.forward_backward(batch)
    report = one.optim_step()
    assert 0 < outside_N.sum() < len(outside_N)
    close_fp32(report.metrics["loss"], (loss_N * weight_N).sum())
    close_fp32(report.metrics["entropy"], 2 * (entropy_N * weight_N).sum())
    close_fp32(report.metrics["clip_fraction"], 2 * (outside_N * weight_N).sum())


def test_the_metrics_of_a_step_start_from_nothing():
    one = trainer(learning_rate=lambda step: 0.0)
    reports = []
    for _ in range(2):
        one.forward_backward(random_batch(2))
        reports.append(one.optim_step())
    assert reports[0].metrics == reports[1].metrics
    assert reports[0].grad_norm == reports[1].grad_norm > 0


def test_the_learning_rate_is_that_of_the_attempt_and_the_version_counts_steps():
    one = trainer(learning_rate=lambda step: [0.5, 0.25][step], version=7)
    rates = []
    for _ in range(2):
        one.forward_backward(random_batch(3))
        rates.append(one.optim_step().learning_rate)
    assert (rates, one.version, one.num_attempts) == ([0.5, 0.25], 9, 2)


def test_a_gradient_above_the_bound_is_scaled_to_it_and_reported_unscaled():
    one = trainer(max_grad_norm=0.01)
    one.forward_backward(random_batch(3))
    norm = float(gradients(one).norm())
    seen = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(float(gradients(one).norm())))
    report = one.optim_step()
    hook.remove()
    close_fp32(report.grad_norm, norm)
    assert norm > 0.1
    close_fp32(seen[0], 0.01, rtol=1e-3)


def test_a_gradient_below_the_bound_is_left_alone():
    one = trainer(max_grad_norm=1e6)
    one.forward_backward(random_batch(3))
    norm = float(gradients(one).norm())
    seen = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(float(gradients(one).norm())))
    one.optim_step()
    hook.remove()
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
    assert not math.isfinite(report.grad_norm)
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
    assert (report.skipped, report.grad_norm, one.version) == (False, 0.0, 2)
    assert report.metrics.keys() == NORMS
    assert any(not torch.equal(a, b) for a, b in zip(before, weight_bits(one), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weight_bits(zero), weight_bits(one), strict=True))


def test_imitation_is_the_mean_negative_log_probability():
    batch = pack_demonstrations([((1, 2), (3, 4, 0)), ((5,), (6, 0))], weights.token_mean)
    one = trainer(objective=imitation)
    logprob_N = one.forward_backward(batch)
    report = one.optim_step()
    assert len(logprob_N) == 5
    close_fp32(report.metrics["loss"], -logprob_N.mean())
    assert set(report.metrics) - NORMS == {"loss", "entropy"}


def test_named_tensors_names_every_weight_once_without_gradient():
    one = trainer(tiny_model(tied=True))
    named = dict(one.named_tensors())
    assert named.keys() == {name for name, _ in one.model.named_parameters()}
    assert "lm_head.weight" not in named
    assert not any(tensor.requires_grad for tensor in named.values())


def still(terms: LossTerms) -> tuple[Tensor, None]:
    """A policy loss of 0."""
    return 0.0 * terms.policy_N, None


def test_the_gradient_of_the_entropy_bonus_is_the_slope_of_the_loss():
    batch = full_batch(2)
    bonus = PolicyObjective(still, entropy_coefficient=0.7)

    def loss_at(distance: float) -> float:
        """The loss after a move of the weights along one random direction."""
        model = tiny_model(0, torch.float64)
        with torch.no_grad():
            for parameter, way in zip(model.parameters(), direction, strict=True):
                parameter.add_(distance * way)
            entropy_N = torch.distributions.Categorical(logits=plain_logits(model, batch, 0.9)).entropy()
        return -0.7 * float((entropy_N * chosen(batch, "weight_T")).sum())

    one = trainer(tiny_model(0, torch.float64), bonus, temperature=0.9)
    generator = torch.Generator().manual_seed(1)
    direction = [
        torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in one.model.parameters()
    ]
    one.forward_backward(batch)
    pairs = zip(one.model.parameters(), direction, strict=True)
    slope = sum(float((parameter.grad * way).sum()) for parameter, way in pairs)
    assert abs(slope) > 1e-2
    close_fp32(slope, (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3, rtol=1e-2)
    close_fp32(one.optim_step().metrics["loss"], loss_at(0.0))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("drawn_among_some", [False, True])
def test_the_full_kl_penalty_is_that_of_the_whole_logits(drawn_among_some):
    batch = full_batch(2)
    if drawn_among_some:
        batch = truncated(batch, VOCAB_SIZE, 2)
    scorer, reference = other_model(0.9)
    penalised = PolicyObjective(still, penalty=KlPenalty(KlControl(0.7), None))
    one = trainer(tiny_model(0, torch.float64), penalised, temperature=0.9, reference=scorer)
    one.forward_backward(batch)
    found = gradients(one)

    model = tiny_model(0, torch.float64)
    own_NV = over_supports(plain_logits(model, batch, 0.9), batch)
    other_NV = over_supports(plain_logits(reference, batch, 0.9), batch).detach()
    divergence_N = (own_NV.exp() * (own_NV - other_NV)).sum(-1)
    loss = 0.7 * (divergence_N * chosen(batch, "weight_T")).sum()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert expected.norm() > 1e-2
    close_fp32(found, expected, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in reference.parameters())
    metrics = one.optim_step().metrics
    close_fp32(metrics["loss"], loss)
    close_fp32(metrics["kl_reference"], loss / 0.7)
