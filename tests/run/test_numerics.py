"""The doctor's checks of a recipe: nothing is found where all is well, and each fault in its own row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from millrace import train
from millrace.algorithms import losses
from millrace.config.settings import RunConfig
from millrace.data.batch import Batch
from millrace.errors import SetupError
from millrace.kernels import linear_scan_cpu
from millrace.rewards.text import ExactReward
from millrace.run import build, build_algorithm, numerics, train_step
from millrace.run.health.health_checks import RunStopped
from millrace.run.numerics import Check, check_numerics
from millrace.training import policy, value
from millrace.training.scorer import ModelScorer
from millrace.types import Outcome
from tests.end_to_end.tiny import tiny_recipe

TWO = {"policy.optimizer_steps_per_batch": 2}
FOUR = {"policy.optimizer_steps_per_batch": 4, "rollout.prompts_per_step": 4}
PPO = {"advantage": {"kind": "gae", "lam": 0.9}, "critic": {}}
KL = {"policy.kl": {"coefficient": 0.3}}
SAMPLER = "sampler's log-probabilities = trainer's"
PACKED = "log-probabilities: one row of all = each alone"
SCAN = "advantages: the scan = a plain loop"
MERGED, LEFT_OUT = "equal sequences merged", "those without advantage left out"
CUTS = ("micro-batches of half the tokens", "a micro-batch for each sequence")
ORDER, RANKS = "another packing order", "two ranks"


def rows(*layouts: str, of: tuple[str, ...] = ("loss", "gradient")) -> list[str]:
    return [f"{what}: {layout}" for layout in layouts for what in of]


def recipe(folder, overrides=None) -> RunConfig:
    """The tiny recipe with two prompts a batch: a micro-batch for each sequence is most of the work."""
    return tiny_recipe(folder, {"rollout.prompts_per_step": 2} | (overrides or {}))


def wrong(folder, overrides=None) -> list[str]:
    return [check.name for check in check_numerics(recipe(folder, overrides)) if not check.passed]


@pytest.fixture(scope="module")
def checks(tmp_path_factory) -> list[Check]:
    return check_numerics(recipe(tmp_path_factory.mktemp("right")))


def test_a_recipe_that_is_right_passes_every_check(checks):
    assert [check.name for check in checks] == [
        *(SAMPLER, PACKED),
        *rows(MERGED, LEFT_OUT, *CUTS, ORDER, RANKS),
    ]
    assert [check.name for check in checks if not check.passed] == []
    assert [check.allowed for check in checks] == [1e-3] * 2 + [1e-4] * 12
    assert {check.unit for check in checks} == {"nats, the largest", "of the loss", "of its norm"}
    # Rounding is there, so something was compared.
    assert max(check.difference for check in checks) > 1e-8


@pytest.mark.slow
def test_with_a_critic_its_gradient_and_the_scan_are_checked_too(tmp_path):
    checks = check_numerics(recipe(tmp_path, PPO))
    assert [check.name for check in checks] == [
        *(SAMPLER, PACKED, SCAN),
        *rows(MERGED, of=("loss", "gradient", "critic's gradient")),
        *rows(LEFT_OUT),
        *rows(*CUTS, ORDER, RANKS, of=("loss", "gradient", "critic's gradient")),
    ]
    assert [check.name for check in checks if not check.passed] == []
    assert checks[2].allowed == 1e-5


@pytest.mark.slow
def test_a_penalty_has_a_gradient_without_advantage_so_nothing_is_left_out(tmp_path):
    checks = check_numerics(recipe(tmp_path, KL))
    assert [check.name for check in checks][2:] == rows(MERGED, *CUTS, ORDER, RANKS)
    assert [check.name for check in checks if not check.passed] == []


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "clip_cov", "fraction": 0.3, "covariance_low": 0.0},
        {"kind": "kl_cov", "fraction": 0.3},
    ],
)
def test_a_selection_is_made_once_and_then_any_layout_gives_the_same(tmp_path, loss):
    checks = check_numerics(recipe(tmp_path, {"policy.loss": loss, **TWO}))
    assert [check.name for check in checks][2:] == rows(*CUTS, ORDER, RANKS)
    assert [check.name for check in checks if not check.passed] == []


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "overrides",
    [
        {"policy.loss": {"kind": "gspo"}, "policy.loss_aggregation": "sequence_mean"},
        {"policy.loss": {"kind": "gmpo"}, "policy.loss_aggregation": "fixed_length"},
        {"policy.kl": {"coefficient": 0.3, "estimator": "full"}},
        {"policy.kl": {"coefficient": 0.3, "place": "reward"}, "advantage": {"kind": "reinforce_plus_plus"}},
        {"policy.proximal": "recompute", "policy.correction": {"level": "sequence", "normalise": True}},
        {"policy.proximal": "interpolate", "policy.correction": {"level": "geometric"}, **FOUR},
        {"policy.entropy_coefficient": 0.1, "precision": "bfloat16"},
        {"rollout.top_p": 0.8, "rollout.top_k": 5, "policy.kl": {"coefficient": 0.3, "estimator": "full"}},
    ],
    ids=["gspo", "gmpo", "full_kl", "kl_in_reward", "corrected", "interpolated", "entropy", "truncated"],
)
def test_no_method_depends_on_the_layout(tmp_path, overrides):
    assert wrong(tmp_path, overrides) == []


@pytest.mark.slow
def test_a_teacher_is_asked_as_in_training(tmp_path):
    report = train(tiny_recipe(tmp_path, {"sft": None, "steps": 1}), quiet=True)
    kind = {"kind": "teacher", "path": report.run, "gamma": 0.5}
    assert wrong(tmp_path, {"advantage": kind}) == []


@pytest.mark.slow
def test_greedy_answers_without_a_score_do_not_disturb(tmp_path, monkeypatch):
    real = numerics.as_sampled

    def failed(rolled):
        sampled = real(rolled)
        return replace(sampled, baselines=[math.nan] * len(sampled.groups))

    monkeypatch.setattr(numerics, "as_sampled", failed)
    assert wrong(tmp_path, {"advantage": {"kind": "greedy_baseline"}}) == []


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_table_and_another_seed_another(checks, tmp_path):
    assert check_numerics(recipe(tmp_path)) == checks
    assert check_numerics(recipe(tmp_path, {"seed": 1})) != checks


@pytest.mark.slow
def test_precision_sets_what_rounding_may_do(tmp_path, monkeypatch):
    checks = check_numerics(recipe(tmp_path, {"precision": "float64"}))
    assert {check.allowed for check in checks} == {10 * 1e-6, 1e-6}
    assert all(check.passed for check in checks)
    # Packing order changes the last of 53 bits, not of 24, but for shared tokens, whose slopes norms round.
    monkeypatch.setattr("millrace.models.logprobs.common_beginnings", lambda *row: None)
    checks = check_numerics(recipe(tmp_path, {"precision": "float64"}))
    assert max(check.difference for check in checks if check.name.startswith("gradient")) < 1e-13


def test_a_nan_does_not_pass_and_what_is_allowed_does():
    assert not Check("x", math.nan, 0.5, "nats").passed
    assert Check("x", 0.5, 0.5, "nats").passed
    assert not Check("x", 0.5000001, 0.5, "nats").passed


def divided_by_tokens(objective):
    """What the field's trainers do: a mean over the micro-batch."""

    def per_micro_batch(predicted, batch):
        loss_N, report = objective(predicted, batch)
        return loss_N / len(loss_N), report

    return per_micro_batch


@pytest.mark.slow
def test_a_loss_divided_by_the_tokens_of_its_micro_batch_is_found(tmp_path, monkeypatch):
    real = build.build_objective
    monkeypatch.setattr(build, "build_objective", lambda *given: divided_by_tokens(real(*given)))
    assert wrong(tmp_path) == rows(MERGED, LEFT_OUT, *CUTS, RANKS)


@pytest.mark.slow
def test_so_is_a_penalty_because_the_weights_are_off_the_reference(tmp_path, monkeypatch):
    real = build_algorithm.KlPenalty
    monkeypatch.setattr(build_algorithm, "KlPenalty", lambda *given: divided_by_tokens(real(*given)))
    assert set(rows(*CUTS, RANKS, of=("gradient",))) <= set(wrong(tmp_path, KL))


@pytest.mark.slow
def test_so_is_a_clip_because_ratios_are_not_1(tmp_path, monkeypatch):
    real = losses.ppo_clip

    def tighter_on_short_rows(*tensors, low, high, dual):
        room = 1e-3 * len(tensors[0])
        return real(*tensors, low=room, high=room, dual=dual)

    monkeypatch.setattr(losses, "ppo_clip", tighter_on_short_rows)
    assert set(rows(*CUTS, RANKS)) <= set(wrong(tmp_path))


def test_so_is_the_critics_loss(tmp_path, monkeypatch):
    real = value.value_loss
    monkeypatch.setattr(
        value, "value_loss", lambda *given, **more: real(*given, **more) / math.sqrt(len(given[0]))
    )
    assert wrong(tmp_path, PPO) == rows(MERGED, *CUTS, RANKS, of=("critic's gradient",))


@pytest.mark.slow
def test_a_loss_that_depends_on_its_place_in_the_row_is_found(tmp_path, monkeypatch):
    real = build.build_objective

    def by_place(*given):
        def objective(predicted, batch):
            loss_N, report = real(*given)(predicted, batch)
            # However small the gradient is: it is compared with itself.
            return 1e-6 * loss_N * (1 + 0.01 * torch.arange(len(loss_N))), report

        return objective

    monkeypatch.setattr(build, "build_objective", by_place)
    every = rows(MERGED, LEFT_OUT, *CUTS, ORDER, RANKS, of=("gradient",))
    assert [name for name in wrong(tmp_path) if name.startswith("gradient")] == every


@pytest.mark.slow
def test_duplicates_whose_weights_are_lost_are_found(tmp_path, monkeypatch):
    # The first sequence stands twice, whatever the policy says.
    lossy = lambda batch: batch.select(list(range(1, batch.num_segments)))  # noqa: E731
    monkeypatch.setattr(numerics, "without_duplicates", lossy)
    assert wrong(tmp_path) == rows(MERGED)


@pytest.mark.slow
def test_a_sequence_that_should_not_have_been_left_out_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(
        train_step, "with_gradient", lambda batch: batch.select([*range(2, batch.num_segments)])
    )
    assert wrong(tmp_path) == rows(LEFT_OUT)


def checked(folder, monkeypatch, overrides) -> tuple[Batch, torch.Tensor]:
    """The batch whose layout is changed, and the policy's log-probabilities of its chosen tokens."""
    real, seen = numerics.moving_part, []

    def watched(train_step, batch, seed):
        seen.append((batch, train_step.trainer.scorer.logprobs(batch)[batch.action_mask_T]))
        return real(train_step, batch, seed)

    monkeypatch.setattr(numerics, "moving_part", watched)
    assert wrong(folder, overrides) == []
    return seen[0]


@pytest.mark.slow
def test_the_batch_holds_all_that_training_could_bring(tmp_path, monkeypatch):
    given = PPO | {"policy.proximal": "recompute", "policy.correction": {"high": 9.0}}
    given |= {"rollout.prompts_per_step": 4}
    batch, logprob_N = checked(tmp_path, monkeypatch, given)
    mask_T = batch.action_mask_T
    assert batch.num_segments == 17
    # Sampler, start of the batch and now are three sets of weights, and the critic has values of its own.
    assert batch.proximal_logprob_T is not None and batch.correction_T is not None
    moved_N = (logprob_N - batch.proximal_logprob_T[mask_T]).abs()
    assert 0.02 < float(moved_N.mean()) < 0.3
    assert 0.02 < float((batch.correction_T[mask_T].log()).abs().mean()) < 0.3
    assert batch.value_T is not None and batch.return_T is not None
    assert float(batch.value_T[mask_T].std()) > 1e-4
    assert float(batch.return_T[mask_T].std()) > 0.3
    assert float(batch.advantage_T[mask_T].std()) > 0.5
    assert float(batch.advantage_T[~mask_T].abs().max()) == 0
    # The twin agrees with the first, and every fourth sequence has no advantage.
    first, twin = (batch.select([b]) for b in (0, 1))
    for name in ("token_T", "advantage_T", "return_T", "reward_T", "correction_T"):
        assert getattr(first, name).tolist() == getattr(twin, name).tolist(), name
    still = [b for b in range(17) if not batch.advantage_T[batch.segment_T == b].any()]
    assert still == [4, 8, 12, 16]


@pytest.mark.slow
def test_the_trainer_counts_as_two_steps_ahead_of_the_sampler(tmp_path, monkeypatch):
    real, lags = policy.interpolated_proximal, set()

    def watched(policy_T, sampler_T, version_T, *, version):
        lags.update((version - version_T).tolist())
        return real(policy_T, sampler_T, version_T, version=version)

    monkeypatch.setattr(policy, "interpolated_proximal", watched)
    assert wrong(tmp_path, {"policy.proximal": "interpolate", **FOUR}) == []
    assert lags == {2}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("off", "found"), [(0.0011, [SAMPLER]), (0.0009, [])])
def test_a_sampler_whose_log_probabilities_are_off_is_found(tmp_path, monkeypatch, off, found):
    real = numerics.pack

    def pack(trajectories):
        batch = real(trajectories)
        batch.sampler_logprob_T[batch.action_mask_T.nonzero()[-1]] += off
        return batch

    monkeypatch.setattr(numerics, "pack", pack)
    assert wrong(tmp_path) == found


@pytest.mark.slow
def test_sequences_that_see_each_other_are_found(tmp_path, monkeypatch):
    real = ModelScorer.logprobs

    def leaking(scorer, batch):
        return real(scorer, batch) - 0.001 * batch.segment_T * batch.action_mask_T

    monkeypatch.setattr(ModelScorer, "logprobs", leaking)
    assert wrong(tmp_path) == [SAMPLER, PACKED]


@pytest.mark.slow
def test_a_scan_that_is_off_is_found_though_the_row_is_short(tmp_path, monkeypatch):
    real = linear_scan_cpu.gae

    def off(reward_T, value_T, length_B, out, **more):
        real(reward_T, value_T, length_B, out, **more)
        out[0][3] += 0.01

    monkeypatch.setattr(linear_scan_cpu, "gae", off)
    assert wrong(tmp_path, PPO) == [SCAN]


@pytest.mark.slow
def test_the_batch_is_small_and_not_refilled(tmp_path, monkeypatch):
    real, seen = numerics.rollouts_of, []

    def watched(rollout, *given, **more):
        seen.append((rollout.prompts_per_step, rollout.dynamic_sampling_rounds))
        return real(rollout, *given, **more)

    monkeypatch.setattr(numerics, "rollouts_of", watched)
    for prompts in (3, 9):
        given = {"rollout.prompts_per_step": prompts, "rollout.dynamic_sampling_rounds": 2}
        given |= {"rollout.samples_per_prompt": 2}
        assert wrong(tmp_path, given) == []
    assert seen == [(3, 0), (8, 0)]


def test_one_sequence_alone_is_enough(tmp_path):
    one = {"rollout.prompts_per_step": 1, "rollout.samples_per_prompt": 1, "advantage": {"kind": "returns"}}
    checks = check_numerics(recipe(tmp_path, one))
    assert all(check.passed for check in checks)
    assert [check.name for check in checks][-2:] == rows(RANKS)  # of the sequence and its twin


def failing(num: int):
    """Rewards of which the first `num` of each batch fail."""
    real = ExactReward.score

    def score(reward, prompts, completions):
        outcomes = real(reward, prompts, completions)
        return [Outcome.failure("it hung")] * len(outcomes[:num]) + outcomes[num:]

    return score


def test_rewards_that_all_fail_stop_it_with_the_sentence_of_training(tmp_path, monkeypatch):
    monkeypatch.setattr(ExactReward, "score", failing(99))
    with pytest.raises(RunStopped) as stopped:
        check_numerics(recipe(tmp_path))
    assert str(stopped.value) == (
        "100% of the rewards of this batch failed, more than limits.failed_rewards = 20%; the first: "
        "exact: it hung"
    )


@pytest.mark.slow
def test_a_few_failed_rewards_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(ExactReward, "score", failing(1))
    assert wrong(tmp_path) == []


def test_supervised_training_alone_has_no_numbers_to_check(tmp_path):
    with pytest.raises(SetupError) as refused:
        check_numerics(recipe(tmp_path, {"steps": 0, "policy": {}}))
    assert str(refused.value) == (
        "steps is 0, so there is no reinforcement whose numbers could be checked; set steps=1"
    )
