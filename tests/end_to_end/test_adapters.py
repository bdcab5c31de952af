"""A policy learns from rewards through an adapter alone, is left and taken up, and is used like any other."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from millrace import resume, train
from millrace.config.recipe import load_recipe
from millrace.config.settings import RunConfig
from millrace.models.adapter_folder import WEIGHTS, load_adapter, save_adapter
from millrace.models.adapters import add_adapter, merged, trained_weights
from millrace.models.load import load_model
from millrace.run.offline import evaluate_checkpoint
from millrace.run.run import Controller
from tests.end_to_end.runs import contents
from tests.end_to_end.test_learning import LEARNING, write_copies
from tests.end_to_end.tiny import TREE, metrics_of, tiny_recipe

ADAPTER: dict[str, Any] = {"rank": 8, "alpha": 16.0}
SHORT = {"steps": 6, "evaluation.every": 2, "checkpoint.every": 2, "policy.kl.coefficient": 0.01}


def load(folder: Path, name: str, tree: dict[str, Any], overrides: dict[str, Any]) -> RunConfig:
    """The tiny recipe with other sections (None: without) and the settings of the learning test."""
    tree = {key: value for key, value in (TREE | tree).items() if value is not None}
    tree["data"] = {"train": str(folder / "copies.jsonl"), "eval_size": 8} | tree["data"]
    path = folder / "adapters.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_recipe(path, {"name": name, "output": str(folder / "runs"), "seed": 2} | overrides)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A folder with the data, the model that the learning test's SFT makes, and an adapter for it."""
    folder = tmp_path_factory.mktemp("adapters")
    write_copies(folder)
    tree = {"policy": None, "data": {"demonstration_column": "shown"}}
    warm = {key: value for key, value in LEARNING.items() if key.startswith(("model.", "sft."))}
    report = train(load(folder, "warm", tree, warm | {"steps": 0, "rollout.max_tokens": 2}), quiet=True)
    assert report.status == "finished"
    model = load_model(base_of(folder), dtype=torch.float32)
    add_adapter(model, rank=3, alpha=2.0, seed=1, targets=("q_proj", "down_proj"))
    with torch.no_grad():
        for weight in trained_weights(model):
            weight.fill_(0.02)
    save_adapter(model, folder / "adapter")
    return folder


def base_of(folder: Path) -> Path:
    return folder / "runs" / "warm" / "checkpoints" / "sft-000040" / "model"


def recipe(folder: Path, name: str, **more: Any) -> RunConfig:
    """Reinforcement of that model through an adapter."""
    base = {"path": str(base_of(folder)), "adapter": ADAPTER}
    tree = {"model": base, "tokenizer": None, "sft": None, "data": {}}
    left = ("model.", "sft.", "data.", "seed")
    learning = {key: value for key, value in LEARNING.items() if not key.startswith(left)}
    return load(folder, name, tree, learning | more)


@pytest.mark.slow
def test_sampled_rewards_teach_through_an_adapter_alone(start):
    more = {"steps": 60, "policy.optimizer.learning_rate": 1e-2, "policy.kl.coefficient": 0.01}
    report = train(recipe(start, "learns", **more), quiet=True)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    rewards = [record["reward/mean"] for record in batches]
    assert sum(rewards[:5]) / 5 < 0.4  # one of four digits is right by chance
    assert sum(rewards[-10:]) / 10 > 0.55
    assert report.eval_before is not None and report.eval_after is not None
    assert report.eval_after > report.eval_before
    assert max(record["mismatch/max"] for record in batches if "mismatch/max" in record) < 1e-4
    # The reference is the base, from which a fresh adapter does not differ.
    distance = [record["policy/kl_reference"] for record in batches]
    assert distance[0] == 0.0
    assert distance[-1] > 0.1
    checkpoint = Path(report.run) / "checkpoints" / "step-000060"
    optimizer = load_file(checkpoint / "optimizer" / "model" / "rank-00000.safetensors")
    assert len(optimizer) == 3 * 2 * 14
    assert all(".lora_" in name for name in optimizer)
    base = load_model(base_of(start), dtype=torch.float32)
    load_adapter(base, checkpoint / "model" / "adapter")
    held = load_file(checkpoint / "model" / "model.safetensors")
    made = dict(merged(base).named_parameters())
    assert [name for name in held if not torch.equal(held[name], made[name])] == []
    moved = [
        name
        for name in held
        if not torch.equal(held[name], load_file(base_of(start) / "model.safetensors")[name])
    ]
    assert len(moved) == 14
    assert evaluate_checkpoint(report.run, "last").accuracy == report.eval_after


def interrupt_at(monkeypatch, step: int) -> None:
    """Press Ctrl-C when this batch is recorded."""
    record = Controller.record

    def pressing(self, *arguments):
        record(self, *arguments)
        if (arguments[0], self.progress.step) == ("reinforcement", step):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Controller, "record", pressing)


def check_equal(ours: Path, theirs: Path) -> None:
    one, two = contents(ours), contents(theirs)
    for found in (one, two):
        del found["checkpoints"], found["state"]["order"]  # Ctrl-C saves where no checkpoint was due
    assert [key for key in two if one[key] != two[key]] == []
    adapter = Path("checkpoints") / "step-000006" / "model" / "adapter" / WEIGHTS
    assert (ours / adapter).read_bytes() == (theirs / adapter).read_bytes()


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("path", [None, "adapter"])
def test_a_resumed_run_has_the_same_bits(path, start, monkeypatch):
    adapter = ADAPTER if path is None else {"path": str(start / path)}
    name = "fresh" if path is None else "given"
    more = SHORT | {"model.adapter": adapter}
    report = train(recipe(start, f"{name}-undisturbed", **more), quiet=True)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    # The reference is what the run began with, the adapter it was given included.
    distance = [record["policy/kl_reference"] for record in batches]
    assert distance[0] == 0.0
    assert distance[-1] > 0.0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        assert train(recipe(start, f"{name}-left", **more), quiet=True).status == "interrupted"
    runs = start / "runs"
    assert resume(runs / f"{name}-left", quiet=True).status == "finished"
    check_equal(runs / f"{name}-left", runs / f"{name}-undisturbed")


@pytest.mark.slow
def test_in_a_deterministic_run_sampler_and_trainer_agree_to_the_last_bit(start):
    report = train(recipe(start, "exact", **SHORT, deterministic=True), quiet=True)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    assert [record["mismatch/max"] for record in batches] == [0.0] * 6
    rewards = [record["reward/mean"] for record in batches]
    assert len(set(rewards)) > 1


@pytest.mark.slow
def test_a_run_is_not_taken_up_beside_another_base(start, monkeypatch):
    base = start / "moved"
    load_model(base_of(start), dtype=torch.float32).save_pretrained(base)
    for file in base_of(start).glob("*token*"):
        (base / file.name).write_bytes(file.read_bytes())
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        train(recipe(start, "moved", **SHORT, **{"model.path": str(base)}), quiet=True)
    model = load_model(base, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    model.save_pretrained(base)
    run = start / "runs" / "moved"
    with pytest.raises(ValueError) as caught:
        resume(run, quiet=True)
    adapter = run / "checkpoints" / "step-000003" / "model" / "adapter"
    assert str(caught.value) == (
        f"adapter {adapter} was trained beside other weights than model.path {base} now holds; put those "
        "back, or start a new run from the checkpoint's model folder, where they are merged"
    )
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_an_adapter_also_learns_in_sft_of_a_fresh_model_and_carries_a_critic(tmp_path):
    overrides = {
        "model.adapter": {"rank": 4},
        "advantage.kind": "gae",
        "critic": {},
        "policy.kl.coefficient": 0.01,
    }
    report = train(tiny_recipe(tmp_path, overrides), quiet=True)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    assert [record["policy/kl_reference"] for record in batches][0] == 0.0  # held to the warmed-up model
    assert [record["policy/kl_reference"] for record in batches][-1] > 0.0
    losses = [record["loss"] for record in metrics_of(report.run) if record["stage"] == "sft"]
    assert losses[-1] < losses[0]
    critic = load_file(Path(report.run) / "checkpoints" / "step-000004" / "critic" / "model.safetensors")
    assert not any("lora" in name for name in critic)
