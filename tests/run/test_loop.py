"""Whole runs of the smallest recipe: what they do in which order, say, and stop for."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace import resume, train
from millrace.observability.tables import read_table
from millrace.run import run as controller
from millrace.run.health import health_checks
from millrace.run.health.health_checks import RunStopped
from millrace.training.policy import PolicyTrainer, imitation
from millrace.transport.weight_update import WeightSyncError
from tests.close import close_fp32
from tests.end_to_end.runs import OVERRIDES
from tests.end_to_end.tiny import metrics_of, tiny_recipe
from tests.training.pieces import NORMS

DOCS = Path(__file__).parents[2] / "docs"
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
SUMMARY = (DOCS / "run_folder.md").read_text(encoding="utf-8")
SFT = {"stage", "step", "loss", "learning_rate", "grad_norm", "time/step_s", "time/wall_s"}
# These say themselves what they are.
EVALUATION = {
    "stage",
    "step",
    "during",
    "measure",
    "accuracy",
    "reward/mean",
    "reward/failed_fraction",
    "length/mean",
    "length/truncated_fraction",
    "time/evaluate_s",
    "time/wall_s",
}
# What came between two records, where there was such.
BETWEEN = {
    f"time/{part}_s"
    for part in ("start", "score", "weight_sync", "save", "report", "rollout_manager", "bookkeeping")
}
REINFORCEMENT = {
    "stage",
    "step",
    "version",
    "reward/mean",
    "reward/std",
    "reward/invalid_fraction",
    "reward/failed_fraction",
    "group/zero_std_fraction",
    "length/mean",
    "length/max",
    "length/truncated_fraction",
    "policy/loss",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/kl_reference",
    "policy/kl_coefficient",
    "policy/grad_norm",
    *(f"policy/{name}" for name in NORMS),
    "policy/learning_rate",
    "policy/skipped_steps",
    *(f"mismatch/{name}" for name in ("k1", "k3", "mean", "max", "chi_square_token", "chi_square_sequence")),
    *(f"mismatch/perplexity_{name}" for name in ("trainer", "sampler", "ratio")),
    "mismatch/ess",
    "mismatch/current",
    "tokens/sampled",
    "tokens/trained",
    *(f"time/{part}_s" for part in ("sample", "score", "train", "weight_sync", "other", "step", "wall")),
    *(f"time/train/{part}_s" for part in ("pack", "reference", "advantage", "policy")),
    "time/tokens_per_s",
    "time/tflops_per_rank",
    *(f"memory/{phase}_peak_bytes" for phase in ("sample", "score", "train", "weight_sync")),
}
# What sampling ahead of training adds.
AHEAD = {
    "mismatch/fresh_mean",
    "mismatch/fresh_max",
    *(f"staleness/{name}" for name in ("mean", "max", "dropped_groups")),
    *(f"selection_bias/{name}" for name in ("dropped_fraction", "length", "reward", "difficulty")),
}
# What a method adds.
OPTIONAL = {
    *(f"time/train/{part}_s" for part in ("old_logprobs", "values", "critic")),
    "group/dynamic_sampling_rounds",
    "policy/correction_clip_fraction",
    "policy/correction",
    *(f"critic/{name}" for name in ("loss", "clip_fraction", "value", "explained_variance")),
    *(f"critic/{name}" for name in ("grad_norm", "learning_rate", "skipped_steps", *NORMS)),
}
METHODS = {
    "advantage.kind": "gae",
    "critic": {"learning_rate": 1e-3},
    "sft.steps": 9,
    "sft.learning_rate": 3e-2,
    "rewards": [{"kind": "format", "pattern": "[0-4]"}],
    "rollout.dynamic_sampling_rounds": 1,
    "policy.kl.coefficient": 0.1,
    "policy.proximal": "recompute",
    "policy.correction": {"high": 5.0},
}


def run(folder: Path, **overrides):
    return train(tiny_recipe(folder, overrides), quiet=True)


def row_of(key: str, page: str) -> bool:
    """Whether the first column of a table on a page has the key."""
    return any(f"`{key}`" in line.split(" | ")[0] for line in page.splitlines() if line.startswith("| "))


def undocumented(keys: set[str]) -> set[str]:
    return {key for key in keys if not row_of(key, METRICS)}


def stages(report) -> list[str]:
    letters = {"sft": "w", "evaluation": "e", "reinforcement": "r"}
    return [f"{letters[record['stage']]}{record['step']}" for record in metrics_of(report.run)]


def accuracies(monkeypatch, *values: float) -> None:
    """Let evaluations give these accuracies, in order; of exact matches they are mean rewards too."""
    left, real = list(values), controller.evaluate

    def pretend(*arguments, **named):
        found = real(*arguments, **named)
        for name in ("accuracy", "reward"):
            object.__setattr__(found, name, left[0])
        del left[0]
        return found

    monkeypatch.setattr(controller, "evaluate", pretend)


def test_a_run_does_everything_in_order_and_records_it(tmp_path):
    report = run(tmp_path, **{"policy.kl.coefficient": 0.1})
    assert stages(report) == [
        *("w1", "w2", "e2", "w3", "e3"),
        *("e0", "r1", "r2", "e2", "r3", "r4", "e4"),
    ]
    records = metrics_of(report.run)
    keys = {record["stage"]: set(record) for record in records}
    assert set().union(*records) >= BETWEEN
    own = {"sft": SFT, "evaluation": EVALUATION, "reinforcement": REINFORCEMENT}
    keys = {
        stage: {key for key in found if key in own[stage] or key not in BETWEEN}
        for stage, found in keys.items()
    }
    assert keys == {"sft": SFT, "evaluation": EVALUATION, "reinforcement": REINFORCEMENT}
    assert [r["during"] for r in records if r["stage"] == "evaluation"] == ["sft"] * 2 + ["reinforcement"] * 3
    assert undocumented(BETWEEN.union(*keys.values())) == set()
    assert [field.name for field in dataclasses.fields(report) if not row_of(field.name, SUMMARY)] == []
    assert [r["version"] for r in records if r["stage"] == "reinforcement"] == [4, 5, 6, 7]
    assert all(r["mismatch/max"] < 1e-4 for r in records if r["stage"] == "reinforcement")
    walls = [record["time/wall_s"] for record in records]
    assert walls == sorted(walls)

    assert (report.status, report.steps, report.sft_steps, report.skipped_steps) == ("finished", 4, 3, 0)
    assert (report.num_train_prompts, report.eval_size, report.filtered_prompts) == (32, 8, 0)
    assert (report.scored_demonstrations, report.right_demonstrations) == (8, 8)
    batches = [record for record in records if record["stage"] == "reinforcement"]
    assert report.tokens_sampled == sum(record["tokens/sampled"] for record in batches)
    # A SFT answer is a digit and the end; with a penalty reinforcement trains on all it sampled.
    assert report.tokens_trained == 3 * 8 * 2 + sum(record["tokens/trained"] for record in batches)
    assert report.tokens_trained == 3 * 8 * 2 + report.tokens_sampled


@pytest.mark.world
def test_everything_that_a_method_records_is_documented(tmp_path):
    report = run(tmp_path, **METHODS)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    assert set().union(*batches) - BETWEEN == (REINFORCEMENT | OPTIONAL) - BETWEEN
    assert undocumented(OPTIONAL | AHEAD) == set()


@pytest.mark.slow
def test_the_run_folder_holds_a_table_a_batch_and_the_answers_before_and_after(tmp_path):
    report = run(tmp_path)
    folder = Path(report.run)
    names = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert names == [f"step-00000{n}.parquet" for n in (1, 2, 3, 4)]
    rows = read_table(folder / "rollouts" / "step-000002.parquet")
    assert len(rows) == 16
    assert {row["step"] for row in rows} == {2}
    assert {row["version"] for row in rows} == {4}
    assert sorted({row["sample"] for row in rows}) == [0, 1, 2, 3]
    for name in ("before", "after"):
        answers = read_table(folder / "evaluations" / f"{name}.parquet")
        assert [row["prompt_id"] for row in answers] == [f"eval:{n}" for n in range(8)]


@pytest.mark.slow
def test_no_prompt_comes_back_before_all_have_been_seen(tmp_path):
    report = run(tmp_path, **{"steps": 9, "rollout.samples_per_prompt": 2})
    seen = [
        row["prompt_id"]
        for step in range(1, 9)
        for row in read_table(Path(report.run) / "rollouts" / f"step-{step:06d}.parquet")
        if row["sample"] == 0
    ]
    assert len(seen) == len(set(seen)) == 32


@pytest.mark.slow
def test_supervised_training_alone_has_a_before_an_after_and_a_best(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.1, 0.3, 0.6, 0.5)
    report = run(tmp_path, **{"steps": 0, "policy": {}, "sft.steps": 6})
    assert stages(report) == ["e0", "w1", "w2", "e2", "w3", "w4", "e4", "w5", "w6", "e6"]
    assert (report.steps, report.sft_steps, report.tokens_sampled) == (0, 6, 0)
    assert (report.eval_before, report.eval_best, report.eval_after) == (0.1, 0.6, 0.5)
    assert report.best_checkpoint == "sft-000004"
    best = json.loads((Path(report.run) / "best.json").read_text())
    assert best == {"checkpoint": "sft-000004", "measure": "reward/mean", "value": 0.6}
    answers = Path(report.run) / "evaluations"
    assert sorted(p.stem for p in answers.glob("*.parquet")) == ["after", "before"]
    kept = [f"sft-00000{step}" for step in (0, 2, 4, 6)]
    assert sorted(p.stem for p in (answers / "held_out").iterdir()) == kept


@pytest.mark.slow
def test_sft_weighs_tokens_by_its_own_setting(tmp_path):
    def losses(name, **overrides):
        report = run(tmp_path, name=name, steps=0, **{"sft.steps": 2, **overrides})
        return [record["loss"] for record in metrics_of(report.run) if record["stage"] == "sft"]

    plain = losses("plain")
    assert losses("policy", **{"policy.loss_aggregation": "sequence_sum"}) == plain
    other = losses("own", **{"sft.loss_aggregation": "token_sum"})
    # Eight answers of a digit and the end of text: sixteen tokens in each step.
    close_fp32(torch.tensor(other[0]), 16 * plain[0])


def test_supervised_training_alone_stops_at_its_gate(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.0, 0.3, 0.55)
    report = run(tmp_path, **{"steps": 0, "policy": {}, "sft.steps": 8, "sft.stop_accuracy": [0.5, 0.7]})
    assert (report.status, report.sft_steps, report.eval_after) == ("finished", 4, 0.55)
    assert report.warnings == []


@pytest.mark.slow
def test_sft_ends_when_its_gate_opens(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.1, 0.5, 0.5, 0.5)
    report = run(tmp_path, **{"steps": 1, "sft.steps": 8, "sft.stop_accuracy": [0.5, 0.7]})
    assert (report.sft_steps, report.eval_before, report.warnings) == (4, 0.5, [])


@pytest.mark.slow
def test_sft_that_misses_its_gate_goes_on_and_says_so(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.1, 0.2, 0.2, 0.2)
    report = run(tmp_path, **{"steps": 1, "sft.stop_accuracy": [0.5, 0.7]})
    assert (report.status, report.sft_steps) == ("finished", 3)
    assert report.warnings == [
        "SFT ended at accuracy 0.200, below 0.5 of sft.stop_accuracy, after 3 steps; raise sft.steps"
    ]


@pytest.mark.slow
def test_sft_that_shoots_past_its_gate_says_so(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.9, 0.9, 0.9)
    report = run(tmp_path, **{"steps": 1, "sft.stop_accuracy": [0.5, 0.7]})
    assert report.sft_steps == 2
    assert report.warnings == [
        "SFT ended at accuracy 0.900, above 0.7 of sft.stop_accuracy; evaluate more often (evaluation.every) "
        "or lower sft.learning_rate"
    ]


@pytest.mark.slow
def test_without_sft_reinforcement_starts_at_version_0(tmp_path):
    report = run(tmp_path, sft=None)
    assert stages(report) == ["e0", "r1", "r2", "e2", "r3", "r4", "e4"]
    assert (report.sft_steps, report.steps) == (0, 4)
    assert metrics_of(report.run)[1]["version"] == 1


@pytest.mark.slow
def test_a_collapse_is_said(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.1, 0.1, 0.8, 0.3, 0.8)
    report = run(tmp_path)
    assert report.warnings == [
        "the policy has collapsed: mean reward is 0.300, its best was 0.800 (step-000000); "
        "lower policy.optimizer.learning_rate or sample more per batch"
    ]


@pytest.mark.world
def test_equal_rewards_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(health_checks, "EQUAL_BATCHES", 3)
    report = run(tmp_path, rewards=[{"kind": "format", "pattern": "(?s).*", "weight": 0.5}])
    assert report.warnings == [
        "all rewards have been 0.5 for 3 batches, so nothing is learned; "
        "look at the rollouts, and at the reward"
    ]
    assert report.eval_after == 0.5


def spoil(monkeypatch, *attempts: int) -> None:
    """Make the gradient of these attempts of reinforcement NaN."""
    real = PolicyTrainer.optim_step

    def spoiled(self):
        if self._objective is not imitation and self.num_attempts in attempts:
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
        return real(self)

    monkeypatch.setattr(PolicyTrainer, "optim_step", spoiled)


@pytest.mark.slow
def test_a_step_without_finite_gradient_is_skipped_counted_and_said(tmp_path, monkeypatch):
    spoil(monkeypatch, 1)
    report = run(tmp_path, **{"policy.kl.coefficient": 0.1})
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    assert [record["version"] for record in batches] == [4, 4, 5, 6]
    assert [record["policy/skipped_steps"] for record in batches] == [0, 1, 0, 0]
    assert (report.status, report.skipped_steps) == ("finished", 1)
    evidence = Path(report.run) / "evidence" / "step-000002-attempt-000002.safetensors"
    assert report.warnings == [
        f"the gradient was not finite, so an optimizer step was skipped; its batch is in {evidence}"
    ]
    rows = read_table(Path(report.run) / "rollouts" / "step-000002.parquet")
    assert int(load_file(evidence)["action_mask_T"].sum()) == sum(row["num_tokens"] for row in rows)


@pytest.mark.slow
def test_steps_without_finite_gradient_stop_the_run_with_evidence_and_it_can_be_resumed(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        spoil(patch, 2, 3)
        with pytest.raises(RunStopped) as caught:
            run(tmp_path, **{"policy.kl.coefficient": 0.1, "limits.nonfinite_steps": 2})
    folder = tmp_path / "runs" / "run"
    assert str(caught.value).startswith(
        "2 optimizer steps in a row had no finite gradient (limits.nonfinite_steps); the batches are in "
        f"{folder / 'evidence'}."
    )
    assert len(list((folder / "evidence").glob("*.safetensors"))) == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["warnings"][-1]) == ("failed", str(caught.value))
    assert (folder / "report.html").is_file()

    report = resume(folder, quiet=True)
    assert (report.status, report.steps, report.skipped_steps, report.warnings) == ("finished", 4, 0, [])


@pytest.mark.slow
def test_sft_that_blows_up_stops_too(tmp_path):
    with pytest.raises(RunStopped, match="3 optimizer steps in a row had no finite gradient"):
        run(
            tmp_path,
            **{"sft.learning_rate": 1e30, "sft.steps": 9, "limits.nonfinite_steps": 3},
        )
    records = metrics_of(tmp_path / "runs" / "run")
    norms = [record["grad_norm"] for record in records if record["stage"] == "sft"]
    assert (norms[0] is None, norms[-3:]) == (False, [None] * 3)


@pytest.mark.world
def test_failing_rewards_stop_the_run_with_their_reason(tmp_path, monkeypatch):
    (tmp_path / "failing_reward.py").write_text(
        "def grade(prompt, completion, answer, row):\n    raise KeyError('no grade')\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunStopped) as caught:
        run(tmp_path, rewards=[{"kind": "function", "function": "failing_reward:grade"}], sft=None)
    text = str(caught.value)
    assert text.startswith(
        "100% of the rewards of the held-out answers failed, more than limits.failed_rewards = 20%; "
        "the first: "
    )
    assert "no grade" in text
    assert not (tmp_path / "runs" / "run").exists(), "a failed start left a folder"


@pytest.mark.world
def test_rewards_that_give_reference_answers_no_marks_are_said_once(tmp_path):
    report = run(tmp_path, rewards=[{"kind": "exact"}, {"kind": "format", "pattern": "[0-6]"}])
    (warning,) = report.warnings
    assert warning.startswith(f"{8 - report.right_demonstrations} of 8 held-out reference answers do not ")
    assert warning.endswith("reward 1 of 2")
    assert 0 < report.right_demonstrations < 8


@pytest.mark.slow
def test_weights_that_do_not_arrive_stop_the_run_by_name(tmp_path, monkeypatch):
    real = PolicyTrainer.named_tensors

    def lossy(self):
        for name, tensor in real(self):
            if self.version < 6 or "q_norm" not in name:
                yield name, tensor

    monkeypatch.setattr(PolicyTrainer, "named_tensors", lossy)
    with pytest.raises(WeightSyncError) as caught:
        run(tmp_path)
    assert str(caught.value) == (
        "the sampler refused version 6: 2 weights were not sent, the first being "
        "model.layers.0.self_attn.q_norm.weight; it was tried twice"
    )
    assert stages(type("Run", (), {"run": tmp_path / "runs" / "run"}))[-1] == "e2"


def test_a_changed_weight_on_the_way_stops_the_run_by_name(tmp_path, monkeypatch):
    real = controller.Controller.update_weights

    def altered(self):
        load = self.components.transport._update_engine
        self.components.transport._update_engine = lambda sent, version: load(
            [(n, t + 1 if n == "model.norm.weight" else t) for n, t in sent], version
        )
        real(self)

    monkeypatch.setattr(controller.Controller, "update_weights", altered)
    with pytest.raises(WeightSyncError, match=r"first being model\.norm\.weight; it was tried twice$"):
        run(tmp_path)


@pytest.mark.slow
@pytest.mark.world
def test_the_reference_is_where_reinforcement_began(tmp_path):
    """At its first batch the penalty is zero, and its folder outlives every other one."""
    report = run(tmp_path, **OVERRIDES | {"policy.optimizer_steps_per_batch": 1, "checkpoint.keep": 1})
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    distances = [record["policy/kl_reference"] for record in batches]
    assert distances[0] == 0.0
    assert distances[-1] > 0.0
    names = {path.name for path in (Path(report.run) / "checkpoints").iterdir()}
    assert {"step-000000", "step-000007"} <= names <= {"step-000000", "step-000007", report.best_checkpoint}


@pytest.mark.slow
def test_times_of_a_step_add_up(tmp_path):
    for record in metrics_of(run(tmp_path).run):
        if record["stage"] == "reinforcement":
            parts = [
                record[f"time/{part}_s"] for part in ("sample", "score", "train", "weight_sync", "other")
            ]
            assert abs(sum(parts) - record["time/step_s"]) < 1e-9
            assert all(part > 0 for part in parts)
