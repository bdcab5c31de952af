"""Whole runs with plug-ins: what they change, that a stopped one resumes to the same bits, what fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from millrace import resume, train
from millrace.data.plugin import PluginError
from millrace.errors import SetupError
from millrace.run.callbacks import POINTS
from millrace.run.health.health_checks import RunStopped
from tests import plugin_functions as functions
from tests.end_to_end.tiny import metrics_of, tiny_recipe, without_times

pytestmark = pytest.mark.slow
HERE = "tests.plugin_functions"
DIALS = {
    "sft.steps": 2,
    "steps": 4,
    "policy.loss": {"kind": "function", "function": f"{HERE}:smooth", "options": {"slope": 2.0}},
    "advantage": {"kind": "function", "function": f"{HERE}:median"},
    "policy.correction": {"kind": "function", "function": f"{HERE}:halved"},
    "policy.epochs_per_batch": 2,
    "policy.optimizer_steps_per_batch": 2,
    "policy.shuffle_minibatches": True,
    "policy.truncated_answers": "mask",
    "rollout.dynamic_sampling_rounds": 1,
    "rollout.group_filter": "length",
    "data.train_size": 20,
    "loggers": [f"{HERE}:Lines"],
}


def outcome(run: Path) -> tuple[list, dict]:
    """The records of a run without times, and its last weights."""
    weights = load_file(run / "checkpoints" / "step-000004" / "model" / "model.safetensors")
    return without_times(metrics_of(run)), weights


def check_equal(one: Path, other: Path) -> None:
    (records, weights), (expected, tensors) = outcome(one), outcome(other)
    assert records == expected
    assert all(weights[name].equal(tensors[name]) for name in tensors)


@pytest.mark.parametrize("optimizer", [f"{HERE}:sgd", "muon"])
def test_a_run_that_a_callback_stops_resumes_to_the_same_bits(tmp_path, optimizer):
    dials = DIALS | {"policy.optimizer.kind": optimizer, "policy.optimizer.learning_rate": 0.02}
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = train(tiny_recipe(tmp_path / "whole", dials), quiet=True)
    stops = dials | {"callbacks": [f"{HERE}:Stops"]}
    stopped = train(tiny_recipe(tmp_path / "stopped", stops), quiet=True)
    assert (whole.status, stopped.status) == ("finished", "interrupted")
    assert [record["step"] for record in metrics_of(stopped.run) if record["stage"] == "reinforcement"] == [
        1,
        2,
    ]
    resumed = resume(stopped.run, quiet=True)
    assert resumed.status == "finished"
    check_equal(Path(resumed.run), Path(whole.run))
    lines = (Path(whole.run) / "lines.txt").read_text().splitlines()
    assert lines[-1] == "evaluation 4 of 4" and "sft 2 of 4" in lines


def test_callbacks_change_gradients_and_keep_files_of_their_own_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(functions.FixedNorms, "seen", seen := [])
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    changes = {
        "sft.steps": 2,
        "policy.optimizer_steps_per_batch": 2,
        "rewards": [{"kind": "format", "pattern": "(?s).{2}"}],  # some of the first answers earn it
        "callbacks": [f"{HERE}:FixedNorms"],
    }
    whole = train(tiny_recipe(tmp_path / "whole", changes), quiet=True)
    in_whole = list(seen)
    _, weights = outcome(Path(whole.run))
    norms = [tensor for name, tensor in weights.items() if "norm" in name]
    assert norms and all(bool((tensor == 1).all()) for tensor in norms)
    assert any(kind == "advantages" and most > 0 for kind, _, most in in_whole)
    assert [count for kind, count, _ in in_whole if kind == "optimizer step"] == list(range(1, 11))
    # SFT updates before its evaluation, reinforcement after each batch of two optimizer steps.
    versions = [each[1:] for each in in_whole if each[0] == "weight update"]
    assert versions == [("sft", 2), *(("reinforcement", version) for version in (4, 6, 8, 10))]

    seen.clear()
    changes["callbacks"].append(f"{HERE}:Stops")
    stopped = train(tiny_recipe(tmp_path / "stopped", changes), quiet=True)
    resumed = resume(stopped.run, quiet=True)
    assert (stopped.status, resumed.status) == ("interrupted", "finished")
    check_equal(Path(resumed.run), Path(whole.run))
    # The sampler of the second process gets the weights of the checkpoint.
    assert seen.count(("weight update", "reinforcement", 6)) == 2
    seen.remove(("weight update", "reinforcement", 6))
    assert seen == in_whole


@pytest.mark.parametrize("point", [point for point in POINTS if point not in ("on_start", "on_end")])
def test_a_run_in_which_a_callback_raises_can_be_resumed(tmp_path, monkeypatch, point):
    config = tiny_recipe(tmp_path, {"sft.steps": 2, "callbacks": [f"{HERE}:Fails"]})
    monkeypatch.setattr(functions.Fails, "point", point)
    with pytest.raises(RunStopped) as caught:
        train(config, quiet=True)
    message = str(caught.value)
    assert f"callbacks {HERE}:Fails {point} raised LookupError: {point} (plugin_functions.py line" in message
    assert message.endswith(f"continue with: millrace resume {tmp_path / 'runs' / 'run'}")
    monkeypatch.setattr(functions.Fails, "point", "")
    assert resume(tmp_path / "runs" / "run", quiet=True).status == "finished"


def test_a_plug_in_that_fails_in_a_run_is_named_and_the_run_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(functions.Notes, "seen", [])
    loss = {"kind": "function", "function": f"{HERE}:mean_loss"}
    config = tiny_recipe(tmp_path, DIALS | {"policy.loss": loss, "callbacks": [f"{HERE}:Notes"]})
    with pytest.raises(RunStopped) as caught:
        train(config, quiet=True)
    message = str(caught.value)
    assert (
        f"policy.loss.function {HERE}:mean_loss returned a tensor of shape []; return one of shape ["
        in message
    )
    assert message.endswith(f"continue with: millrace resume {tmp_path / 'runs' / 'run'}")
    assert functions.Notes.seen[0] == ("start", "sft", 0, 2)
    assert [each[0] for each in functions.Notes.seen[-2:]] == ["batch", "end"]
    assert functions.Notes.seen[-1] == ("end", "failed")


def test_a_plug_in_that_is_not_there_stops_a_run_before_it_begins(tmp_path):
    for changes in (
        {"policy.loss": {"kind": "function", "function": f"{HERE}:gone"}},
        {"advantage": {"kind": "function", "function": f"{HERE}:gone"}},
        {"policy.correction": {"kind": "function", "function": f"{HERE}:gone"}},
        {"policy.optimizer.kind": f"{HERE}:gone"},
        {"rollout.group_filter": f"{HERE}:gone", "rollout.dynamic_sampling_rounds": 1},
        {"callbacks": [f"{HERE}:gone"]},
        {"loggers": [f"{HERE}:gone"]},
    ):
        with pytest.raises(
            SetupError, match=f"{HERE}:gone: module {HERE} does not have a function gone; correct it"
        ):
            train(tiny_recipe(tmp_path, changes), quiet=True)
        assert not (tmp_path / "runs" / "run").exists()
    assert issubclass(PluginError, RuntimeError)
