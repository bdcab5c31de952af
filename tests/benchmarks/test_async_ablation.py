"""Arms, losses and tables of the ablation of decoupled PPO."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import async_ablation
import pytest
import torch
from async_ablation import RATES, Results
from common import ablation_report as report
from common.stale_gradient import over_staleness
from common.stale_policies import (
    Arm,
    Problems,
    Training,
    cosine,
    expected_reward,
    fresh_weights,
    sample,
    train,
)
from torch import Tensor

from millrace.config.recipe import load_recipe
from millrace.data.batch import Batch
from millrace.run.build_algorithm import build_correction, build_objective
from millrace.training.policy import Predicted
from tests.close import close_fp32, close_fp64
from tests.training.pieces import random_batch

SETTINGS: dict[str, dict[str, Any]] = {
    "naive": {"policy.proximal": "sampler"},
    "decoupled": {"policy.proximal": "recompute", "policy.correction": {"high": 1e9}},
    "decoupled, 2": {"policy.proximal": "recompute", "policy.correction": {"high": 2.0}},
    "bypass": {"policy.loss": {"kind": "cispo", "clip_low": 1.0, "clip_high": 1.0}},
}


def run(kind: str, eta: int, seed: int, end: float, **more: Any) -> dict[str, Any]:
    figures = {name: [0.1, 0.2, 0.3, 0.4] for name in report.FIGURES} | more.pop("figures", {})
    arm = asdict(Arm(kind, eta, **{"rate": 1e-3, **more}))
    return arm | {"seed": seed, "accuracy": [0.5, end, end, end], "minibatch": figures}


def training(*arms: Arm) -> Training:
    problems = Problems(0)
    return Training(fresh_weights(problems.generator), problems, arms)


def of_recipe(settings: dict[str, Any], batch: Batch, policy_N: Tensor) -> Tensor:
    """The loss of each token, as a run with these settings computes it."""
    more = {"rollout.max_staleness": 4, "policy.optimizer_steps_per_batch": 4}
    policy = load_recipe("quickstart", settings | more).policy
    correction, _ = build_correction(policy.correction)
    mask_T = batch.action_mask_T
    if policy.proximal == "sampler":
        batch.proximal_logprob_T = None
    if correction is not None:
        logprobs = (batch.proximal_logprob_T[mask_T], batch.sampler_logprob_T[mask_T])
        factor_N = correction(*logprobs, batch.segment_T[mask_T], batch.num_segments)
        batch.correction_T = torch.ones(len(mask_T)).masked_scatter(mask_T, factor_N)
    return build_objective(policy, None, 9)(Predicted(policy_N, policy_N, 0), batch)[0]


def test_every_arm_is_one_of_its_stage():
    mirror = async_ablation.mirror_arms([1e-3, 2e-3])
    assert len(set(async_ablation.rate_arms())) == len(RATES)
    assert len(set(mirror)) == 2 * (1 + 5 * 2) and {arm.minibatches for arm in mirror} == {4}
    deciding = async_ablation.deciding_arms(16, [4, 8], 1e-3)
    assert len(set(deciding)) == 2 * 2 * (3 + 2) and {arm.minibatches for arm in deciding} == {16}
    assert {arm.cap for arm in deciding if arm.kind == "bypass"} == {None}


def test_losses_are_those_of_the_settings():
    arms = [
        Arm("naive", 4, 1e-3),
        Arm("decoupled", 4, 1e-3),
        Arm("decoupled", 4, 1e-3, cap=2.0),
        Arm("bypass", 4, 1e-3),
    ]
    generator = torch.Generator().manual_seed(0)
    for number, settings in enumerate(SETTINGS.values()):
        batch = random_batch(number, num_segments=6)
        mask_T = batch.action_mask_T
        batch.sampler_logprob_T, batch.proximal_logprob_T, policy_T = (
            -torch.rand(len(mask_T), generator=generator) * 2 * mask_T for _ in range(3)
        )
        batch.advantage_T = torch.randn(len(mask_T), generator=generator) * mask_T
        each = (policy_T, batch.sampler_logprob_T, batch.proximal_logprob_T, batch.advantage_T)
        stacked = [one[mask_T].view(1, -1, 1).expand(4, -1, -1) for one in each]
        ours = training(*arms).token_losses(*stacked)[number, :, 0]
        close_fp32(ours, of_recipe(settings, batch, policy_T[mask_T]))


def test_tokens_are_as_old_as_the_arm_says():
    several = training(*(Arm("naive", eta, 1e-2) for eta in (0, 1, 2)))
    before = []
    for _ in range(3):
        before.append(several.weights[0].clone())
        several.batch()
    old, now = several.sampler_weights()[0], several.weights[0]
    assert torch.equal(old[0], now[0])
    assert torch.equal(old[1], before[2][1]) and torch.equal(old[2], before[1][2])
    assert not torch.equal(before[0][1], before[1][1]) and not torch.equal(before[2][1], now[1])


@pytest.mark.slow
def test_without_staleness_naive_is_decoupled_and_all_begin_alike():
    found = train(0, [Arm(kind, 0, 1e-2) for kind in ("naive", "decoupled")], 2)
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert found[0]["accuracy"][0] >= 0.5 and found[0]["minibatch"]["outside"][0] == 0
    (alone,) = train(0, [Arm("naive", 0, 1e-2)], 2)
    close_fp32(alone["accuracy"], found[0]["accuracy"])


def test_the_expected_reward_is_the_fraction_of_right_samples():
    problems = Problems(3)
    weights = fresh_weights(problems.generator)
    right = 0
    for _ in range(50):
        answer, _ = sample(weights, problems.digits_P4, problems.noise(400))
        right += int((answer[0] == problems.answer_PC).all(1).sum())
    exact = float(expected_reward(weights, problems)[0])
    assert abs(right / 20_000 - exact) < 4 * (exact / 20_000) ** 0.5


def test_a_run_is_kept_and_known(tmp_path):
    path = tmp_path / "found.json"
    Results(path).add([run("naive", 4, 1, 0.7)])
    again = Results(path)
    assert (Arm("naive", 4, 1e-3), 1) in again
    assert (Arm("naive", 4, 1e-3), 0) not in again and (Arm("naive", 4, 2e-3), 1) not in again
    assert json.loads(path.read_text())["hypothesis"] == report.HYPOTHESIS
    again.add(gradients=[{"seed": 2}])
    assert Results(path).gradients == [{"seed": 2}] and len(Results(path).runs) == 1


def test_stage_b_is_where_stage_a_differs_most():
    runs = [run("naive", eta, seed, 0.7) for eta in (0, 2, 4, 8) for seed in (0, 1)]
    runs += [
        run("decoupled", eta, seed, end) for eta, end in ((2, 0.71), (4, 0.5), (8, 0.8)) for seed in (0, 1)
    ]
    assert report.where_it_differs(runs, [1e-3], [2, 4, 8]) == ([4, 8], 1e-3)
    assert report.best_rate([*runs, run("naive", 0, 0, 0.9, rate=2e-3)], [1e-3, 2e-3]) == 2e-3


def test_the_hypothesis_is_compared_with_paired_differences():
    far, wide = {"outside": [0.2] * 4}, {"ess": [0.5] * 4}
    runs = [run("naive", 4, seed, 0.6 + seed / 10, figures=far) for seed in range(3)]
    # Seeds differ by 0.1, and each difference is about 0.1, so that only paired ones are not 0.
    runs += [
        run("decoupled", 4, seed, 0.7 + seed / 10 + seed / 1000, figures={"ess": [0.9] * 4})
        for seed in range(3)
    ]
    runs += [run("decoupled", 4, seed, 0.7 - seed / 10, figures=wide, cap=2.0) for seed in range(3)]
    wins, unclear = report.cells(runs)
    assert (wins.expected, wins.found) == ("wins", "wins")
    assert (unclear.expected, unclear.found) == ("loses", "equal")
    close_fp64(report.half_width([0.0, 1.0]), 12.706204736432095 / 2)  # scipy.stats.t.ppf(0.975, 1) / 2
    assert "| wins | 1 | 0 | 0 | +0.101 |" in report.verdict_table([wins, unclear])
    assert report.collapsed([run("naive", 4, 0, 0.4), run("naive", 4, 1, 0.6)]) == "1 of 2"
    assert "decoupled equal" in report.picture(runs)


def test_a_page_without_a_place_for_the_tables_is_refused():
    page = f"a\n{report.BEGIN}\nold\n{report.END}\nb\n"
    assert report.page_with(page, "new") == f"a\n{report.BEGIN}\n\nnew\n{report.END}\nb\n"
    with pytest.raises(ValueError, match="the page has no <!-- ablation: begin"):
        report.page_with("a", "new")


@pytest.mark.slow
def test_all_tables_are_written_of_what_has_run():
    runs = [
        run(kind, eta, seed, 0.7) for kind in ("naive", "decoupled") for eta in (0, 2, 4) for seed in (0, 1)
    ]
    runs += [run("bypass", 4, seed, 0.6) for seed in (0, 1)]
    gradients = [
        {"seed": seed, "staleness": 4, "naive": [0.1] * 4, "decoupled": [0.3] * 4} for seed in (0, 1)
    ]
    text = report.tables(runs, gradients, rates=[1e-3], factors=[1], small=0.25, etas=[2, 4])
    assert (
        "| 0.001 | 4 | 0.700 ± 0.000 | 0.700 ± 0.000 | +0.000 ± 0.000 | 10.0 % | 0.10 | 0 of 2; 0 of 2 |"
        in text
    )
    assert (
        "| 4 | 4 | whitened | 0.700 ± 0.000 | +0.000 ± 0.000 | - | - | -0.100 ± 0.000 | 10 % | 0.10 | 2 |"
        in text
    )


@pytest.mark.slow
def test_gradients_are_compared_at_the_same_weights():
    (naive,) = train(0, [Arm("naive", 2, 1e-2)], 5)
    figures = naive["minibatch"]
    assert figures["cosine_naive"] == figures["cosine"] and len(figures["cosine"]) == 4
    assert set(async_ablation.gradients_of(naive)) == {"naive", "decoupled"}
    close_fp32(cosine([torch.tensor([[[1.0, 0.0]]])], [torch.tensor([[[-3.0, 4.0]]])]), [0.6])


def test_the_clip_turns_the_gradient_of_old_tokens_and_weights_do_not():
    fresh, old = over_staleness((0, 8), range(2)).values()
    close_fp64([fresh["naive"], fresh["decoupled"], fresh["ess"], fresh["outside"]], [1.0, 1.0, 1.0, 0.0])
    assert old["naive"] < 0.2 < 0.9 < old["decoupled"]
    assert old["outside"] > 0.2 and old["decoupled, minibatch"] < old["decoupled"]
