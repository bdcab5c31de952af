"""Every method of a recipe runs to its end, moves the weights and says only finite numbers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file

from millrace import train
from millrace.config import method_sections as words
from millrace.config.sections import PolicyConfig
from millrace.config.settings import RunConfig
from millrace.data.tokenizers import load_tokenizer, train_tokenizer
from millrace.errors import SetupError
from millrace.models.heads import load_scalar_model, row_scores, scalar_model
from millrace.models.load import fresh_config, fresh_model, load_model, save_model
from millrace.observability.tables import read_table
from millrace.run.build import build
from millrace.training.scorer import ModelScorer
from tests.close import close_fp32
from tests.end_to_end.tiny import metrics_of, tiny_recipe
from tests.training.pieces import SHAPE, random_batch

SHORT = {
    "sft": None,
    "steps": 2,
    "evaluation.every": 9,
    "checkpoint.every": 9,
    "checkpoint.keep": 9,
    "policy.optimizer.learning_rate": 1e-2,
}
# Of random answers of 16 tokens out of 257, half end before the limit.
ENDS = {"rollout.stop": list("abcdefghijkl"), "rollout.max_tokens": 16}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {
        "policy.loss.dual_clip": 3.0,
        "policy.kl": {"coefficient": 0.1, "estimator": "k1"},
        "policy.loss_aggregation": "sequence_mean",
    },
    "others": {
        "advantage.baseline": "others",
        "policy.loss.kind": "reinforce",
        "policy.kl": {"coefficient": 0.1, "estimator": "k2", "target": 1e-3, "horizon": 100},
        "policy.loss_aggregation": "sequence_sum",
    },
    "rloo": {
        "advantage.kind": "leave_one_out",
        "policy.loss.kind": "gspo",
        "policy.kl": {"coefficient": 0.1, "estimator": "k3"},
        "policy.loss_aggregation": "token_sum",
    },
    "reinforce_pp": {
        "advantage.kind": "reinforce_plus_plus",
        "policy.loss.kind": "gmpo",
        "policy.kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"},
        "policy.loss_aggregation": "fixed_length",
    },
    "reinforce_pp_baseline": {
        "advantage.kind": "reinforce_plus_plus_baseline",
        "policy.loss.kind": "cispo",
        "policy.kl": {"coefficient": 0.1, "estimator": "abs"},
    },
    "remax": {
        "advantage.kind": "greedy_baseline",
        "rollout.samples_per_prompt": 1,
        "policy.loss.kind": "sapo",
        "policy.kl": {"coefficient": 0.1, "estimator": "k1+"},
    },
    "opo": {
        "advantage.kind": "length_weighted",
        "policy.loss.kind": "dppo",
        "policy.kl": {"coefficient": 0.1, "estimator": "k3+"},
    },
    "gpg": {
        "advantage.kind": "gpg",
        "policy.loss": {"kind": "dppo", "divergence": "kl"},
        "policy.kl": {"coefficient": 0.1, "estimator": "full"},
        "policy.entropy_coefficient": 0.01,
    },
    "passk": {"advantage.kind": "pass_at_k", "policy.loss.kind": "dro"},
    "gdpo": {
        "advantage.kind": "group_decoupled",
        "rewards": [{"kind": "model", "path": "judge"}, {"kind": "exact", "weight": 0.5}],
        "policy.loss.kind": "topr",
    },
    "token_baseline": {
        "advantage.kind": "token_baseline",
        "policy.loss": {"kind": "clip_cov", "fraction": 0.2},
        "policy.proximal": "recompute",
        "policy.correction": {"reject": {"high": 2.0}},
    },
    "token_baseline of actions": {
        "advantage": {"kind": "token_baseline", "align": "action"},
        "policy.loss": {"kind": "kl_cov", "fraction": 0.2},
        "policy.proximal": "recompute",
        "policy.correction": {
            "level": "sequence",
            "action": "mask",
            "low": 0.5,
            "normalise": True,
            "reject": {"estimator": "k2", "level": "sum", "high": 2.0},
        },
    },
    "reinforce": {
        "advantage": {"kind": "returns", "gamma": 0.9},
        "policy.optimizer_steps_per_batch": 4,
        "policy.loss": {"kind": "gspo", "gradient": "token"},
        "policy.proximal": "interpolate",
        "policy.correction": {
            "level": "geometric",
            "reject": {"estimator": "k3", "level": "mean", "high": 2.0},
        },
    },
    "ppo": {
        "advantage": {"kind": "gae", "bootstrap_truncated": True, "critic_lam": 0.5},
        "critic": {},
        "policy.kl": {"coefficient": 0.1, "estimator": "k2", "place": "reward"},
    },
    "credit of turns": {"advantage": {"kind": "gae", "credit": "gae_turn"}, "critic": {}},
    **{
        f"credit {credit} of {kind}": {"advantage": {"kind": kind, "credit": credit}}
        for kind in ("group", "leave_one_out")
        for credit in ("return_to_go", "turn_index", "anchor", "progress")
    },
    "n_step": {"advantage": {"kind": "n_step", "num_steps": 2}, "critic": {}},
    "v_trace": {
        "advantage.kind": "v_trace",
        "critic": {},
        "policy.proximal": "recompute",
        "policy.correction": {"reject": {"estimator": "k2", "level": "max", "high": 2.0}},
    },
    "plug-ins": {
        "advantage": {"kind": "function", "function": "tests.plugin_functions:median"},
        "policy.loss": {"kind": "function", "function": "tests.plugin_functions:smooth"},
        "policy.truncated_answers": "mask",
        "policy.correction": {"kind": "function", "function": "tests.plugin_functions:halved"},
        **ENDS,
    },
    "bypass": {
        "policy.loss": {"kind": "ppo_clip", "clip_high": 0.28},
        "policy.optimizer_steps_per_batch": 2,
        "policy.correction": {"action": "none", "reject": {"high": 1.5}},
    },
    "without truncated answers": {"policy.truncated_answers": "filter", **ENDS},
    "dapo": {"rollout.dynamic_sampling_rounds": 2, "rollout.overlong_fraction": 0.5},
    "distillation": {
        "advantage": {"kind": "teacher", "path": "runs/teacher"},
        "policy.loss.kind": "reinforce",
        "policy.optimizer_steps_per_batch": 1,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A reward model in `judge`, which tells any two answers apart, and a run in `runs/teacher`."""
    folder = tmp_path_factory.mktemp("methods")
    tokenizer = train_tokenizer([], vocab_size=257, across_words=False)
    config = fresh_config("qwen3", SHAPE, vocab_size=257, eos_token_id=tokenizer.eos_token_id)
    judge = scalar_model(fresh_model(config, seed=1, dtype=torch.float32))
    torch.nn.init.normal_(judge.score.weight, generator=torch.Generator().manual_seed(2))
    save_model(judge, folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    learned = {"name": "teacher", "sft.steps": 60, "sft.learning_rate": 3e-2, "steps": 1}
    train(tiny_recipe(folder, learned), quiet=True)
    return folder


def recipe(folder: Path, case: str, **more: Any) -> RunConfig:
    below = {
        "rewards": [{"kind": "model", "path": "judge"}],
        "policy.optimizer_steps_per_batch": 2,
        "name": case.replace(" ", "_"),
    }
    return tiny_recipe(folder, SHORT | below | CASES.get(case, {}) | more)


def start_and_end(report) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    checkpoints = Path(report.run) / "checkpoints"
    first, last = (
        load_file(checkpoints / f"step-{step:06d}" / "model" / "model.safetensors")
        for step in (0, report.steps)
    )
    return first, last


def batches_of(report) -> list[dict[str, Any]]:
    return [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("name", CASES)
def test_a_method_runs_to_its_end_and_moves_the_weights(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    config = recipe(folder, name)
    report = train(config, quiet=True)
    assert (report.status, report.steps, report.skipped_steps, report.warnings[1:]) == ("finished", 2, 0, [])
    first, last = start_and_end(report)
    assert all(tensor.isfinite().all() for tensor in last.values())
    moved = {key for key in first if not torch.equal(first[key], last[key])}
    assert len(moved) == len(first)
    for record in batches_of(report):
        numbers = {key: value for key, value in record.items() if key != "stage"}
        assert {key for key, value in numbers.items() if value is None or not math.isfinite(value)} == set()
        assert record["policy/grad_norm"] > 0
        assert ("critic/loss" in record) == (config.critic is not None)
        assert ("policy/kl_reference" in record) == (config.policy.kl is not None)
    assert batches_of(report)[-1]["version"] == 2 * config.policy.optimizer_steps_per_batch


def sections(config: BaseModel) -> Iterator[BaseModel]:
    """A section and all below it."""
    yield config
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from sections(value)


def choices(kind: type[BaseModel]) -> set[tuple[str, str, str]]:
    """Every word that a section's settings may be: section, setting, word."""
    return {
        (kind.__name__, name, word)
        for name, info in kind.model_fields.items()
        if get_origin(info.annotation) is Literal
        for word in get_args(info.annotation)
    }


@pytest.mark.slow
def test_every_word_a_method_may_hold_is_tried(folder):
    tried = {
        (type(section).__name__, name, getattr(section, name))
        for case in CASES
        for section in sections(recipe(folder, case))
        for name in type(section).model_fields
        if isinstance(getattr(section, name), str)
    }
    kinds = [*get_args(get_args(words.AdvantageConfig)[0]), *get_args(get_args(words.LossConfig)[0])]
    kinds += get_args(get_args(words.CorrectionConfig)[0])
    kinds += [words.RejectionConfig, words.KlConfig, words.CriticConfig, PolicyConfig]
    known = set().union(*map(choices, kinds))
    assert len(known) > 50
    assert known - tried == set()
    # Sections of method_sections.py that this list does not know of would not be asked for.
    there = {
        value.__name__
        for value in vars(words).values()
        if isinstance(value, type) and value.__module__ == words.__name__
    }
    assert there == {kind.__name__ for kind in kinds} - {"PolicyConfig"}


@pytest.mark.slow
def test_the_reward_of_a_model_is_its_score_of_prompt_and_answer(folder, monkeypatch):
    monkeypatch.chdir(folder)
    report = train(recipe(folder, "judged", **{"steps": 1}), quiet=True)
    rows = read_table(Path(report.run) / "rollouts" / "step-000001.parquet")
    judge = load_scalar_model(folder / "judge", dtype=torch.float32)
    tokenizer = load_tokenizer(folder / "judge")
    token_ids = [
        [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id] for row in rows
    ]
    with torch.no_grad():
        close_fp32([row["reward"] for row in rows], row_scores(judge, token_ids), rtol=1e-4, atol=1e-5)
    assert len({row["reward"] for row in rows}) > 10


@pytest.mark.slow
def test_a_student_comes_closer_to_its_teacher(folder, monkeypatch):
    monkeypatch.chdir(folder)
    more = {"steps": 45, "evaluation.every": 99, "checkpoint.every": 99, "name": "student"}
    more |= {"rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 8}
    report = train(recipe(folder, "distillation", **more), quiet=True)
    gains = []
    for step in (1, 45):
        rows = read_table(Path(report.run) / "rollouts" / f"step-{step:06d}.parquet")
        gains.append(sum(row["advantage"] for row in rows) / len(rows))
    # The mean advantage is minus an estimate of the divergence, in nats per token.
    assert gains[0] < -6
    assert gains[1] > 0.75 * gains[0]


def refused(folder: Path, path: str) -> str:
    with pytest.raises((SetupError, RuntimeError)) as caught:
        build(recipe(folder, "distillation", **{"advantage.path": path}), None)
    return str(caught.value)


def test_a_teacher_that_cannot_teach_is_refused_before_anything_runs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    assert refused(folder, "runs/nobody") == (
        "advantage.path runs/nobody does not exist; give a model folder, a checkpoint or a run (millrace "
        "train quickstart makes runs/quickstart-1)"
    )
    other = tmp_path / "other"
    shutil.copytree(folder / "runs" / "teacher" / "checkpoints" / "step-000000" / "model", other)
    train_tokenizer(["sums of words"] * 9, vocab_size=260, across_words=False).save_pretrained(other)
    assert refused(folder, str(other)) == (
        f"advantage.path {other} reads other tokens than the policy; give a model with the policy's "
        "tokenizer, or set tokenizer.path to that of the other model"
    )
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    assert refused(folder, str(empty)) == f"run {empty} has no best checkpoint yet; use --checkpoint last"


@pytest.mark.slow
def test_a_teacher_is_a_run_at_its_best_or_a_checkpoint_or_a_model_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    best = json.loads((folder / "runs" / "teacher" / "best.json").read_text())["checkpoint"]
    checkpoint = f"runs/teacher/checkpoints/{best}"
    model = load_model(folder / checkpoint / "model", dtype=torch.float32)
    batch = random_batch(0)
    expected_T = ModelScorer(model, temperature=1.0, max_tokens=1000).logprobs(batch)
    for path in ("runs/teacher", checkpoint, f"{checkpoint}/model"):
        parts = build(recipe(folder, "distillation", **{"advantage.path": path}), None)
        assert torch.equal(parts.teacher.logprobs(batch), expected_T)
