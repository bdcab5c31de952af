"""What a run says, or stops for, when it goes wrong."""

from __future__ import annotations

import json
import math
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from millrace.config.method_sections import COMPARING, AdvantageConfig
from millrace.protocols import StepReport
from millrace.run.evaluation import Evaluation
from millrace.run.health.health_checks import (
    EQUAL_BATCHES,
    RunStopped,
    check_collapse,
    check_evaluation,
    check_failures,
    check_imports,
    check_mismatch,
    check_rewards,
    check_steps,
)
from millrace.run.progress import Progress
from tests.training.pieces import random_batch

APART = ("returns", "gae", "n_step", "v_trace", "reinforce_plus_plus", "greedy_baseline", "function")
GOOD = StepReport(False, 1.0, 0.1, {"loss": 1.0})
BAD = StepReport(True, math.nan, 0.1, {"loss": math.inf})


def rewards(
    progress: Progress,
    *,
    std: float = 0.0,
    equal: float = 1.0,
    failed: float = 0.0,
    limit: float = 0.2,
    kind: str = "group",
) -> str | None:
    record = {
        "reward/mean": 0.25,
        "reward/std": std,
        "reward/failed_fraction": failed,
        "group/zero_std_fraction": equal,
    }
    return check_rewards(progress, record, kind=kind, limit=limit, reason="the judge hung")


def test_failed_rewards_above_the_limit_stop_the_run_with_one_reason():
    assert rewards(Progress(), failed=0.2) is None
    with pytest.raises(RunStopped) as caught:
        rewards(Progress(), failed=0.25)
    assert str(caught.value) == (
        "25% of the rewards of this batch failed, more than limits.failed_rewards = 20%; "
        "the first: the judge hung"
    )


def test_equal_rewards_are_said_once_after_twenty_batches_in_a_row():
    progress = Progress()
    said = [rewards(progress) for _ in range(EQUAL_BATCHES + 5)]
    assert EQUAL_BATCHES == 20
    assert [number for number, text in enumerate(said, start=1) if text] == [20]
    assert said[19] == (
        "all rewards have been 0.25 for 20 batches, so nothing is learned; "
        "look at the rollouts, and at the reward"
    )
    # One batch that differs starts the count again.
    assert rewards(progress, std=0.1, equal=0.75) is None
    assert [bool(rewards(progress)) for _ in range(20)] == [False] * 19 + [True]


@pytest.mark.parametrize("kind", COMPARING)
def test_where_samples_are_compared_groups_of_equal_reward_teach_nothing_though_groups_differ(kind):
    progress = Progress()
    said = [rewards(progress, std=0.4, kind=kind) for _ in range(20)]
    assert [bool(text) for text in said] == [False] * 19 + [True]
    assert said[-1] == (
        "the rewards of each prompt's samples have all been equal for 20 batches, so nothing is learned; "
        "look at the rollouts, and at the reward"
    )


@pytest.mark.parametrize("kind", APART)
def test_where_samples_are_not_compared_only_equal_rewards_of_the_whole_batch_are_said(kind):
    """With one sample for each prompt every group is equal."""
    progress = Progress()
    assert [rewards(progress, std=0.4, kind=kind) for _ in range(25)] == [None] * 25
    said = [rewards(progress, kind=kind) for _ in range(20)]
    assert [bool(text) for text in said] == [False] * 19 + [True]
    assert said[-1].startswith("all rewards have been 0.25 for 20 batches, so nothing is learned;")


def test_a_teacher_teaches_whatever_the_rewards_are():
    progress = Progress()
    assert [rewards(progress, kind="teacher") for _ in range(25)] == [None] * 25
    with pytest.raises(RunStopped):
        rewards(progress, kind="teacher", failed=1.0)


def test_every_kind_of_advantage_has_its_alarm():
    kinds = {
        get_args(one.model_fields["kind"].annotation)[0] for one in get_args(get_args(AdvantageConfig)[0])
    }
    assert kinds == {*APART, "teacher", *COMPARING}


def test_rewards_may_fail_up_to_their_limit_but_never_all():
    check_failures(0.2, limit=0.2, reason="", of="this batch")
    check_failures(0.99, limit=1.0, reason="", of="this batch")
    with pytest.raises(RunStopped) as caught:
        check_failures(1.0, limit=1.0, reason="the judge hung", of="the held-out answers")
    assert str(caught.value) == (
        "100% of the rewards of the held-out answers failed, more than limits.failed_rewards = 100%; "
        "the first: the judge hung"
    )


def test_held_out_answers_without_a_score_stop_the_run_with_the_first_reason():
    rows = [{"outcome": "score", "reason": "fine"}, {"outcome": "failed", "reason": "the judge hung"}]
    check_evaluation(Evaluation(1.0, 1.0, 1.0, 0.0, 0.5, rows), limit=0.5)
    with pytest.raises(
        RunStopped, match="50% of the rewards of the held-out answers failed.*the judge hung$"
    ):
        check_evaluation(Evaluation(1.0, 1.0, 1.0, 0.0, 0.5, rows), limit=0.4)


def steps(progress: Progress, folder, *reports: StepReport, limit: int = 3) -> str | None:
    batches = [random_batch(0) for report in reports if report.skipped]
    return check_steps(progress, list(reports), batches, limit=limit, folder=folder)


def test_a_skipped_step_is_said_and_its_batch_is_kept(tmp_path):
    progress = Progress(stage="reinforcement", step=4, attempts=7)
    assert steps(progress, tmp_path, GOOD) is None
    path = tmp_path / "step-000004-attempt-000007"
    assert steps(progress, tmp_path, BAD) == (
        f"the gradient was not finite, so an optimizer step was skipped; its batch is in {path}.safetensors"
    )
    assert (progress.skipped_steps, progress.nonfinite_in_row) == (1, 1)
    kept, batch = load_file(path.with_suffix(".safetensors")), random_batch(0)
    for name in ("token_T", "segment_T", "action_mask_T", "sampler_logprob_T", "advantage_T", "weight_T"):
        assert torch.equal(kept[name], getattr(batch, name))
    assert json.loads(path.with_suffix(".json").read_text()) == {"grad_norm": "nan", "loss": "inf"}


def test_each_skipped_step_of_a_batch_keeps_its_own_evidence(tmp_path):
    steps(Progress(stage="reinforcement", step=4, attempts=7), tmp_path, BAD, GOOD, BAD, limit=9)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "step-000004-attempt-000005.safetensors",
        "step-000004-attempt-000007.safetensors",
    ]


def test_only_skipped_steps_in_a_row_stop_the_run(tmp_path):
    progress = Progress(stage="reinforcement")
    steps(progress, tmp_path, BAD, BAD, GOOD, BAD, BAD)
    assert (progress.nonfinite_in_row, progress.skipped_steps) == (2, 4)
    with pytest.raises(RunStopped) as caught:
        steps(progress, tmp_path, BAD)
    assert str(caught.value) == (
        "3 optimizer steps in a row had no finite gradient (limits.nonfinite_steps); the batches are in "
        f"{tmp_path}. Lower policy.optimizer.learning_rate or sft.learning_rate, or look for rewards that "
        "are not finite"
    )


def test_a_policy_below_half_of_its_best_has_collapsed():
    progress = Progress(eval_before=0.1, eval_best=0.8, best_checkpoint="step-000010")
    assert check_collapse(progress, "accuracy", 0.4) is None
    assert check_collapse(progress, "accuracy", 0.399) == (
        "the policy has collapsed: accuracy is 0.399, its best was 0.800 (step-000010); "
        "lower policy.optimizer.learning_rate or sample more per batch"
    )
    assert check_collapse(Progress(eval_best=0.09), "accuracy", 0.0) is None
    assert check_collapse(Progress(eval_best=0.1), "accuracy", 0.0) is not None
    assert check_collapse(Progress(), "accuracy", 0.0) is None


def test_a_measure_below_zero_collapses_when_half_of_what_it_gained_is_lost():
    progress = Progress(eval_before=-1.0, eval_best=-0.2)
    assert check_collapse(progress, "reward/mean", -0.59) is None
    assert (check_collapse(progress, "reward/mean", -0.61) or "").startswith(
        "the policy has collapsed: mean reward is -0.610, its best was -0.200 "
    )
    # Nothing was gained, so nothing is lost.
    assert check_collapse(Progress(eval_before=-0.2, eval_best=-0.2), "reward/mean", -0.9) is None


def apart(record, batch, folder, **limits):
    return check_mismatch(
        record,
        batch,
        **{"k3": None, "ess": None, "correction_clip_fraction": None, **limits},
        folder=folder,
    )


@pytest.mark.parametrize(
    ("metric", "limit", "found", "sentence"),
    [
        ("mismatch/k3", {"k3": 0.2}, 0.3, "mismatch/k3 has passed limits.mismatch_k3 = 0.2"),
        (
            "mismatch/ess",
            {"ess": 0.5},
            0.4,
            "mismatch/ess has fallen below limits.ess = 0.5",
        ),
        (
            "policy/correction_clip_fraction",
            {"correction_clip_fraction": 0.0},
            0.1,
            "policy/correction_clip_fraction has passed limits.correction_clip_fraction = 0",
        ),
    ],
)
def test_a_sampler_that_came_apart_from_the_trainer_is_told_once_with_its_first_batch(
    metric, limit, found, sentence, tmp_path
):
    record = {metric: found, "mismatch/max": 2.0, "policy/loss": 1.0}
    first, second = random_batch(1), random_batch(2)
    (told,) = apart(record, first, tmp_path / "evidence", **limit)
    path = tmp_path / "evidence" / sentence.split("limits.")[1].split()[0]
    assert told.startswith(f"trainer and sampler have come apart: {sentence}; the first batch is in {path}.")
    assert apart(record, second, tmp_path / "evidence", **limit) == [told]
    kept = load_file(path.with_suffix(".safetensors"))
    assert torch.equal(kept["token_T"], first.token_T)
    assert torch.equal(kept["version_T"], first.version_T)
    assert json.loads(path.with_suffix(".json").read_text()) == {metric: str(found), "mismatch/max": "2.0"}


def test_each_limit_that_was_passed_has_its_own_sentence_and_batch(tmp_path):
    record = {"mismatch/k3": 9.0, "mismatch/ess": 0.1, "policy/correction_clip_fraction": 0.9}
    told = apart(record, random_batch(1), tmp_path, k3=0.2, ess=0.5, correction_clip_fraction=0.5)
    assert len(told) == len(set(told)) == 3
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == [
        "correction_clip_fraction",
        "ess",
        "mismatch_k3",
    ]


@pytest.mark.parametrize(
    ("record", "limits"),
    [
        ({"mismatch/k3": 0.2}, {"k3": 0.2}),
        ({"mismatch/k3": 9.0}, {}),
        ({}, {"k3": 0.2, "ess": 1.0, "correction_clip_fraction": 0.0}),
        ({"mismatch/ess": 0.5}, {"ess": 0.5}),
        ({"mismatch/ess": 0.1}, {}),
        ({"policy/correction_clip_fraction": 0.5}, {"correction_clip_fraction": 0.5}),
        ({"policy/correction_clip_fraction": 1.0}, {}),
    ],
)
def test_a_mismatch_within_its_limit_is_no_news(tmp_path, record, limits):
    assert apart(record, random_batch(1), tmp_path, **limits) == []
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_are_computed_twice_are_a_warning() -> None:
    assert check_imports({}) is None
    assert check_imports({"engine/imported_fraction": 0.995}) is None
    found = check_imports({"engine/imported_fraction": 0.98})
    assert found is not None
    assert found.startswith("decode workers import too few of the keys and values")
