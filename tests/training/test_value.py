"""The critic: its values stand where the choice was made; its gradient is the same however it is split."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from millrace.algorithms.weights import sequence_mean, token_mean
from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.models.heads import packed_scores, scalar_model
from millrace.models.load import Model
from millrace.training.optimizer import adamw, optimizer_tensors
from millrace.training.value import ValueTrainer
from millrace.types import Completion, Outcome, Trajectory, Turn
from tests.close import close_fp32
from tests.training.pieces import NORMS, VOCAB_SIZE, tiny_model

COLUMNS = ("value_T", "return_T")


def critic(seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    model = scalar_model(tiny_model(seed, dtype))
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(model.score.weight, generator=generator)
    return model


def trainer(model: Model | None = None, **more) -> ValueTrainer:
    model = model or critic()
    options = {
        "learning_rate": lambda step: 0.01,
        "clip": 0.3,
        "coefficient": 0.7,
        "max_tokens": 1000,
        "max_grad_norm": 1e9,
    } | more
    return ValueTrainer(model, adamw(model, betas=(0.9, 0.999), weight_decay=0.0), **options)


def turns(*parts: tuple[tuple[int, ...], tuple[int, ...]]) -> Trajectory:
    made = [
        Turn(given, Completion(drawn, np.zeros(len(drawn)), np.zeros(len(drawn), int), "stop", ""))
        for given, drawn in parts
    ]
    return Trajectory(tuple(made), Outcome("score", 1.0))


def valued_batch(seed: int, *, order: list[int] | None = None, token_weights=token_mean) -> Batch:
    """One, two and three turns, one of them without a chosen token; values and returns of either sign."""
    rng = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, VOCAB_SIZE, rng.integers(least, most)).tolist())

    made = [turns(*((tokens(1, 5), tokens(1, 7)) for _ in range(count))) for count in (1, 2, 1, 3, 1)]
    made.insert(2, turns((tokens(2, 5), ())))
    numbers = [rng.standard_normal((2, one.num_tokens)) for one in made]
    chosen = list(range(len(made))) if order is None else order
    batch = pack([made[i] for i in chosen])
    batch.weight_T = token_weights(batch.action_mask_T, batch.segment_T)
    columns = np.concatenate([numbers[i] for i in chosen], 1)
    for name, column in zip(COLUMNS, columns, strict=True):
        setattr(batch, name, torch.from_numpy(column).float() * batch.action_mask_T)
    return batch


def gradients(one: ValueTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in one.model.parameters()])


def own_scores(model: Model, token_S: torch.Tensor) -> torch.Tensor:
    """The score after each token of one segment, by the module's own forward of each beginning."""
    model.set_attn_implementation("eager")
    scores = [model(token_S[None, :end], use_cache=False).logits[0, 0] for end in range(1, len(token_S) + 1)]
    model.set_attn_implementation("millrace")
    return torch.stack(scores)


@pytest.mark.world
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_tokens", [25, 1000])
def test_a_value_is_the_score_before_the_token_and_the_final_one_that_after_the_last(seed, max_tokens):
    batch, model = valued_batch(seed), critic(seed)
    value_T, final_B = trainer(model, max_tokens=max_tokens).values(batch)
    expected, finals = [], []
    with torch.no_grad():
        for b in range(batch.num_segments):
            here = batch.segment_T == b
            score_S = own_scores(model, batch.token_T[here])
            expected += [
                float(score_S[t - 1]) if chosen else 0.0 for t, chosen in enumerate(batch.action_mask_T[here])
            ]
            finals.append(float(score_S[-1]))
    close_fp32(value_T, expected, rtol=1e-4, atol=1e-5)
    close_fp32(final_B, finals, rtol=1e-4, atol=1e-5)
    assert not value_T.requires_grad and not final_B.requires_grad
    assert (value_T.dtype, final_B.dtype) == (torch.float32, torch.float32)
    assert 0 < int(batch.action_mask_T.sum()) < batch.num_tokens


def test_a_critic_in_float64_gives_values_in_float32():
    value_T, final_B = trainer(critic(dtype=torch.float64)).values(valued_batch(0))
    assert (value_T.dtype, final_B.dtype) == (torch.float32, torch.float32)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("clip", [0.3, None])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_plain_autograd_of_the_formula(seed, clip):
    batch = valued_batch(seed, token_weights=sequence_mean)
    ours = trainer(critic(seed, torch.float64), clip=clip, max_tokens=30)
    ours.forward_backward(batch)
    reference = critic(seed, torch.float64)
    total, num_held = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch.num_segments):
        here = batch.segment_T == b
        score_S = own_scores(reference, batch.token_T[here])
        for t in batch.action_mask_T[here].nonzero()[:, 0].tolist():
            v, old = score_S[t - 1], batch.value_T[here][t].double()
            target, weight = batch.return_T[here][t].double(), batch.weight_T[here][t].double()
            loss = (v - target) ** 2
            if clip is not None:
                held = (torch.minimum(torch.maximum(v, old - clip), old + clip) - target) ** 2
                num_held += int(held > loss)
                loss = torch.maximum(loss, held)
            total = total + 0.7 * loss * weight
    total.backward()
    assert (num_held > 0) == (clip is not None)
    close_fp32(gradients(ours), gradients(trainer(reference)), rtol=1e-4, atol=1e-6)
    close_fp32(ours.optim_step().metrics["loss"], total)


@pytest.mark.slow
def test_the_gradient_and_the_metrics_are_the_same_however_the_batch_is_split_and_packed():
    whole = trainer()
    whole.forward_backward(valued_batch(5))
    expected = gradients(whole)
    report = whole.optim_step()
    assert expected.norm() > 1e-2
    longest = int(valued_batch(5).length_B.max())
    for order in (None, [3, 0, 5, 2, 1, 4]):
        for max_tokens in (longest, longest + 7, 1000):
            split = trainer(max_tokens=max_tokens)
            split.forward_backward(valued_batch(5, order=order))
            close_fp32(gradients(split), expected, rtol=1e-4, atol=1e-5)
            again = split.optim_step()
            assert again.metrics.keys() == report.metrics.keys()
            for name, value in report.metrics.items():
                close_fp32(again.metrics[name], value, rtol=1e-4)


def test_one_segment_at_a_time_adds_up_to_the_whole_batch():
    batch = valued_batch(6)
    whole, parts = trainer(), trainer()
    whole.forward_backward(batch)
    for b in range(batch.num_segments):
        parts.forward_backward(batch.select([b]))
    close_fp32(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-5)
    close_fp32(parts.optim_step().metrics["loss"], whole.optim_step().metrics["loss"])


def test_metrics_are_the_loss_and_weighted_means():
    batch, model = valued_batch(2, token_weights=sequence_mean), critic()
    batch.weight_T = batch.weight_T / 2  # weights that add up to one half: a mean must divide by it
    one = trainer(model)
    with torch.no_grad():
        score_T = packed_scores(model, batch.token_T, batch.position_T, batch.length_B).double().numpy()
    index_N = batch.action_mask_T.nonzero()[:, 0].numpy()
    value_N = score_T[index_N - 1]
    old_N, return_N, weight_N = (
        column_T.double().numpy()[index_N] for column_T in (batch.value_T, batch.return_T, batch.weight_T)
    )
    free_N = (value_N - return_N) ** 2
    held_N = (np.clip(value_N, old_N - 0.3, old_N + 0.3) - return_N) ** 2
    normalised_N = weight_N / weight_N.sum()
    error_N = return_N - value_N

    def variance(x_N: np.ndarray) -> float:
        return np.average((x_N - np.average(x_N, weights=normalised_N)) ** 2, weights=normalised_N)

    one.forward_backward(batch)
    metrics = one.optim_step().metrics
    assert 0 < (held_N > free_N).sum() < len(free_N)
    close_fp32(metrics["loss"], 0.7 * (np.maximum(free_N, held_N) * weight_N).sum())
    close_fp32(metrics["clip_fraction"], np.average(held_N > free_N, weights=normalised_N))
    close_fp32(metrics["value"], np.average(value_N, weights=normalised_N))
    close_fp32(metrics["explained_variance"], 1 - variance(error_N) / variance(return_N))


def test_without_a_clip_nothing_is_held():
    one = trainer(clip=None)
    one.forward_backward(valued_batch(2))
    assert one.optim_step().metrics["clip_fraction"] == 0.0


def test_the_variance_of_equal_returns_explains_nothing():
    batch, one = valued_batch(1), trainer()
    batch.return_T = 0.1 * batch.action_mask_T
    one.forward_backward(batch)
    assert set(one.optim_step().metrics) - NORMS == {"loss", "clip_fraction", "value"}


def test_a_batch_whose_tokens_have_no_weight_moves_nothing_and_divides_by_nothing():
    batch, one = valued_batch(1), trainer()
    batch.weight_T = torch.zeros_like(batch.weight_T)
    batch.return_T = 0.1 * batch.action_mask_T
    one.forward_backward(batch)
    report = one.optim_step()
    assert (report.grad_norm, report.skipped) == (0.0, False)
    assert report.metrics == {"loss": 0.0, "clip_fraction": 0.0, "value": 0.0} | dict.fromkeys(NORMS, 0.0)


def test_the_metrics_of_a_step_start_from_nothing():
    one = trainer(learning_rate=lambda step: 0.0)
    reports = []
    for _ in range(2):
        one.forward_backward(valued_batch(2))
        reports.append(one.optim_step())
    assert reports[0] == reports[1]
    assert one.optim_step().metrics.keys() == NORMS


def test_the_learning_rate_is_that_of_the_attempt():
    one = trainer(learning_rate=lambda step: [0.5, 0.25][step])
    rates = []
    for _ in range(2):
        one.forward_backward(valued_batch(3))
        rates.append(one.optim_step().learning_rate)
    assert (rates, one.num_attempts) == ([0.5, 0.25], 2)


def test_a_gradient_above_the_bound_is_scaled_to_it_and_reported_unscaled():
    one = trainer(max_grad_norm=0.01)
    one.forward_backward(valued_batch(3))
    norm = float(gradients(one).norm())
    seen = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(float(gradients(one).norm())))
    close_fp32(one.optim_step().grad_norm, norm)
    hook.remove()
    assert norm > 0.1
    close_fp32(seen[0], 0.01, rtol=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_reported(value):
    one = trainer()
    one.forward_backward(valued_batch(0))
    one.optim_step()
    weights = [p.detach().clone() for p in one.model.parameters()]
    state = {name: t.clone() for name, t in optimizer_tensors(one.optimizer, one.model).items()}
    bad = valued_batch(1)
    bad.return_T[bad.action_mask_T.nonzero()[0, 0]] = value
    one.forward_backward(bad)
    report = one.optim_step()
    assert report.skipped and not math.isfinite(report.metrics["loss"])
    assert one.num_attempts == 2
    assert all(torch.equal(a, b) for a, b in zip(weights, one.model.parameters(), strict=True))
    after = optimizer_tensors(one.optimizer, one.model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
    one.forward_backward(valued_batch(2))
    assert not one.optim_step().skipped


@pytest.mark.slow
def test_it_learns_the_returns_of_a_batch():
    batch, one = valued_batch(4), trainer(clip=None, coefficient=0.5)
    for _ in range(60):
        one.forward_backward(batch)
        report = one.optim_step()
    assert report.metrics["explained_variance"] > 0.95
    value_T, _ = one.values(batch)
    assert (value_T - batch.return_T).square().mean() < 0.05 * batch.return_T.square().mean()


@pytest.mark.parametrize("missing", COLUMNS)
def test_a_batch_without_values_or_returns_is_refused(missing):
    with pytest.raises(ValueError, match="^the critic needs the batch's value_T and return_T; compute them"):
        trainer().forward_backward(replace(valued_batch(0), **{missing: None}))


def test_a_clip_that_is_no_bound_is_refused():
    with pytest.raises(ValueError, match=r"^clip is -0\.3"):
        trainer(clip=-0.3).forward_backward(valued_batch(0))


def test_a_sequence_longer_than_a_micro_batch_is_refused():
    with pytest.raises(ValueError, match="tokens but a micro-batch holds 3"):
        trainer(max_tokens=3).values(valued_batch(0))
