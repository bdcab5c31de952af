"""Every way of leaving a run and taking it up again ends with the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from millrace import resume, train
from millrace.config.recipe import load_recipe
from millrace.run.folder import RunFolderError
from millrace.run.run import Controller
from tests.end_to_end.runs import OVERRIDES, check_equal, contents, interrupt_at
from tests.end_to_end.tiny import metrics_of, tiny_recipe, write_sums

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with the run `undisturbed`."""
    folder = tmp_path_factory.mktemp("resume")
    tiny_recipe(folder)
    run(folder, "undisturbed")
    return folder / "runs"


def run(folder: Path, name: str, **more):
    overrides = {"name": name, "output": str(folder / "runs"), **OVERRIDES, **more}
    return train(load_recipe(folder / "tiny.yaml", overrides), recipe="tiny", quiet=True)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("stage", "step", "saved"),
    [
        ("sft", 3, "sft-000003"),
        pytest.param("sft", 9, "sft-000009", marks=pytest.mark.slow),
        ("reinforcement", 3, "step-000003"),
        pytest.param("reinforcement", 7, "step-000007", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_saves_and_a_resumed_run_has_the_same_bits(stage, step, saved, runs, monkeypatch):
    name = f"left-{saved}"
    with monkeypatch.context() as patch:
        interrupt_at(patch, stage, step)
        report = run(runs.parent, name)
    assert report.status == "interrupted"
    assert json.loads((runs / name / "summary.json").read_text())["status"] == "interrupted"
    assert (runs / name / "checkpoints" / saved).is_dir()
    assert metrics_of(report.run)[-1]["step"] == step

    assert resume(runs / name, quiet=True).status == "finished"
    check_equal_but_for_saving(runs / name, runs / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", pytest.param("reinforcement", marks=pytest.mark.slow)])
def test_with_rows_on_disk_a_resumed_run_has_the_bits_of_rows_in_memory(stage, runs, monkeypatch):
    name = f"streamed-{stage}"
    with monkeypatch.context() as patch:
        patch.setattr("millrace.data.streamed_prompts.AHEAD", 5)
        interrupt_at(patch, stage, 5)
        assert run(runs.parent, name, **{"data.streaming": True}).status == "interrupted"
    assert resume(runs / name, quiet=True).status == "finished"
    check_equal_but_for_saving(runs / name, runs / "undisturbed")


def check_equal_but_for_saving(actual: Path, expected: Path) -> None:
    """Ctrl-C saves where no checkpoint was due, so how many were saved, and which are left, differs."""
    ours, theirs = contents(actual), contents(expected)
    for found in (ours, theirs):
        del found["checkpoints"], found["state"]["order"]
    assert [key for key in theirs if ours[key] != theirs[key]] == []


# A critic that learns alone at first, a penalty whose coefficient is steered, groups that are replaced.
PPO = {
    "advantage.kind": "gae",
    "critic": {"learning_rate": 1e-2, "warmup_steps": 3},
    "rollout.dynamic_sampling_rounds": 2,
    "policy.kl": {"coefficient": 0.05, "estimator": "k2", "place": "reward", "target": 0.01, "horizon": 200},
}


@pytest.fixture(scope="module")
def ppo(runs) -> Path:
    """The folder of `runs`, with a run `ppo` of a critic, a steered penalty and refilled groups."""
    run(runs.parent, "ppo", **PPO)
    batches = [record for record in metrics_of(runs / "ppo") if record["stage"] == "reinforcement"]
    assert [record["version"] for record in batches[:3]] == [9] * 3
    assert batches[-1]["version"] > 9
    assert len({record["policy/kl_coefficient"] for record in batches}) == 7
    assert sum(record.get("group/dynamic_sampling_rounds", 0) for record in batches) > 3
    (critic,) = contents(runs / "ppo")["critic"]
    assert len(critic) > 10_000
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_critic_coefficient_and_refilled_prompts_are_taken_up_with_the_same_bits(step, ppo, monkeypatch):
    name = f"ppo-left-{step}"
    with monkeypatch.context() as patch:
        interrupt_at(patch, "reinforcement", step)
        assert run(ppo.parent, name, **PPO).status == "interrupted"
    state = json.loads((ppo / name / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())
    assert state["critic_attempts"] > 0
    assert state["kl_coefficient"] != 0.05
    assert resume(ppo / name, quiet=True).status == "finished"
    check_equal_but_for_saving(ppo / name, ppo / "ppo")


@pytest.mark.slow
def test_eight_bit_moments_of_policy_and_critic_are_taken_up_with_the_same_bits(runs, monkeypatch):
    changes = PPO | {"policy.optimizer.kind": "adamw_8bit"}
    run(runs.parent, "codes", **changes)
    for saved in sorted((runs / "codes" / "checkpoints").glob("step-*/optimizer/*/*.safetensors")):
        with safe_open(saved, framework="pt") as file:
            codes = [file.get_tensor(name) for name in file.keys() if name.startswith("state1/")]  # noqa: SIM118
        # Those of the embedding; all other weights of so small a model have too few numbers.
        assert [code.numel() for code in codes if code.dtype == torch.uint8] == [257 * 16]
    for stage, step in (("sft", 5), ("reinforcement", 5)):
        name = f"codes-left-{stage}"
        with monkeypatch.context() as patch:
            interrupt_at(patch, stage, step)
            assert run(runs.parent, name, **changes).status == "interrupted"
        assert resume(runs / name, quiet=True).status == "finished"
        check_equal_but_for_saving(runs / name, runs / "codes")


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_left_at_once_a_run_with_a_critic_goes_on_from_its_last_checkpoint(step, ppo, monkeypatch):
    """As if it were killed when this step is recorded: nothing of the step is saved."""
    name, record = f"ppo-killed-{step}", Controller.record

    def dying(self, *arguments):
        record(self, *arguments)
        if (arguments[0], self.progress.step) == ("reinforcement", step):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "record", dying)
        with pytest.raises(KeyboardInterrupt):
            run(ppo.parent, name, **PPO)
    assert not (ppo / name / "checkpoints" / f"step-{step:06d}").exists()
    assert resume(ppo / name, quiet=True).status == "finished"
    check_equal(ppo / name, ppo / "ppo")


@pytest.mark.slow
def test_a_run_left_twice_in_a_row_and_taken_up_has_the_same_bits(runs, monkeypatch):
    for number, step in enumerate((2, 4)):
        with monkeypatch.context() as patch:
            interrupt_at(patch, "reinforcement", step)
            report = resume(runs / "twice", quiet=True) if number else run(runs.parent, "twice")
        assert report.status == "interrupted"
    resume(runs / "twice", quiet=True)
    check_equal(runs / "twice", runs / "undisturbed")


def test_a_finished_run_is_not_resumed_and_not_touched(runs):
    before = contents(runs / "undisturbed")
    for _ in range(2):
        with pytest.raises(RunFolderError) as caught:
            resume(runs / "undisturbed", quiet=True)
        report = runs / "undisturbed" / "report.html"
        assert str(caught.value) == f"run {runs / 'undisturbed'} is finished; look at {report}"
    assert contents(runs / "undisturbed") == before


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_bits_are_the_same(runs, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, "reinforcement", 6)
        run(runs.parent, "damaged")
    weights = runs / "damaged" / "checkpoints" / "step-000006" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)

    report = resume(runs / "damaged", quiet=True)
    sentence = f"checkpoint {weights.parents[1]} is damaged: model/model.safetensors is not what was saved"
    assert report.warnings == [f"{sentence}; it is passed over"]
    check_equal(runs / "damaged", runs / "undisturbed", but=("summary", "state"))


@pytest.mark.slow
def test_without_a_whole_checkpoint_the_run_starts_over(runs, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, "sft", 5)
        run(runs.parent, "lost")
    for checkpoint in (runs / "lost" / "checkpoints").iterdir():
        (checkpoint / "state.json").unlink()
    report = resume(runs / "lost", quiet=True)
    assert [sentence.partition(" is damaged: ")[2] for sentence in report.warnings] == [
        "state.json is missing; it is passed over"
    ] * len(report.warnings)
    assert len(report.warnings) == 2
    check_equal(runs / "lost", runs / "undisturbed", but=("summary", "state"))


@pytest.mark.slow
def test_a_damaged_reference_policy_stops_the_run_by_name(runs, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, "reinforcement", 4)
        run(runs.parent, "reference")
    start = runs / "reference" / "checkpoints" / "step-000000"
    (start / "model" / "config.json").unlink()
    with pytest.raises(RuntimeError) as caught:
        resume(runs / "reference", quiet=True)
    assert str(caught.value) == f"checkpoint {start} is damaged: model/config.json is missing"


@pytest.mark.slow
def test_other_data_than_the_checkpoint_was_made_with_is_refused(runs, tmp_path, monkeypatch):
    tiny_recipe(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_at(patch, "reinforcement", 3)
        run(tmp_path, "moved")
    write_sums(tmp_path, num_rows=30)
    with pytest.raises(ValueError, match="the checkpoint was made with 32 prompts and the data now has 22;"):
        resume(tmp_path / "runs" / "moved", quiet=True)


def test_killed_between_a_checkpoint_and_its_bookkeeping_the_best_is_still_named(runs, tmp_path):
    shutil.copytree(runs / "undisturbed", tmp_path / "undisturbed")
    folder = tmp_path / "undisturbed"
    (folder / "summary.json").unlink()
    (folder / "best.json").unlink()
    shutil.copytree(folder / "checkpoints" / "step-000007", folder / "checkpoints" / "step-000001")
    resume(folder, quiet=True)
    check_equal(folder, runs / "undisturbed")


@pytest.mark.slow
def test_one_seed_gives_one_run_and_another_seed_another(runs):
    run(runs.parent, "same")
    check_equal(runs / "same", runs / "undisturbed")
    run(runs.parent, "other", seed=1)
    ours, theirs = contents(runs / "other"), contents(runs / "undisturbed")
    assert ours["weights"] != theirs["weights"]
    assert ours["prompts"] != theirs["prompts"]


@pytest.mark.slow
def test_a_mixture_of_sources_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    tiny_recipe(tmp_path)
    halves = [{"question": f"{a + b}-{b}=", "answer": str(a)} for a in range(10) for b in range(10 - a)]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in halves))
    own = [{"kind": "number", "weight": 1.5}]
    changes = {
        "data.sources": [
            {"name": "sums", "data": str(tmp_path / "sums.jsonl"), "weight": 0.75},
            {"name": "differences", "data": str(tmp_path / "more.jsonl"), "weight": 0.25, "rewards": own},
        ]
    }
    run(tmp_path, "undisturbed", **changes)
    for stage, step in (("sft", 5), ("reinforcement", 3)):
        name = f"left-{stage}"
        with monkeypatch.context() as patch:
            interrupt_at(patch, stage, step)
            assert run(tmp_path, name, **changes).status == "interrupted"
        assert resume(tmp_path / "runs" / name, quiet=True).status == "finished"
        check_equal_but_for_saving(tmp_path / "runs" / name, tmp_path / "runs" / "undisturbed")
    batches = [one for one in metrics_of(tmp_path / "runs" / "left-sft") if one["stage"] == "reinforcement"]
    assert [one["source/differences/fraction"] for one in batches] == [0.25] * 7
