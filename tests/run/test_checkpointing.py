"""Checkpoints are written while training goes on, by all ranks, and a failed one leaves those before it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from millrace import resume, train
from millrace.distributed import tensor as tensor_parallel
from millrace.distributed.fsdp import Sharding, shard
from millrace.distributed.mesh import make_mesh
from millrace.distributed.pipeline import Pipeline
from millrace.distributed.ranks import Ranks
from millrace.errors import CheckpointError
from millrace.models.load import fresh_config, fresh_model, load_model
from millrace.models.saving import full_tensors, save_config
from millrace.planner.layout import Layout
from millrace.run import checkpointing
from millrace.run.checkpointing import POLICY, Saver, restore_optimizer, snapshot
from millrace.run.run import Controller
from millrace.training.checkpoint import newest_checkpoint, verify_checkpoint, write_state
from millrace.training.optimizer import adamw, start_optimizer
from tests.end_to_end.runs import check_equal
from tests.end_to_end.tiny import metrics_of, tiny_recipe
from tests.forked import process
from tests.ranks import run_ranks

PLAIN = Sharding(precision=None, reshard_after_forward=True, offload=False, checkpointing="none")
# Sizes that four ranks do not share evenly.
SHAPE = {
    "hidden_size": 18,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def made(**layout: int) -> Any:
    """What `snapshot` reads of a trainer."""
    config = fresh_config("qwen3", SHAPE, vocab_size=42, eos_token_id=0)
    model = fresh_model(config, seed=3, dtype=torch.float32)
    mesh = make_mesh(Layout(**layout), "cpu")
    named_tensors = partial(full_tensors, model)
    if mesh.size("pp") > 1:
        pipeline = Pipeline(model, mesh, wrap=partial(shard, mesh=mesh, sharding=PLAIN))
        named_tensors = lambda: pipeline.everywhere(full_tensors(model))  # noqa: E731
    else:
        tensor_parallel.apply(model, mesh, sequence=False)
        shard(model, mesh, PLAIN)
    optimizer = adamw(model, betas=(0.9, 0.95), weight_decay=0.0)
    return SimpleNamespace(model=model, optimizer=optimizer, named_tensors=named_tensors)


@torch.no_grad()
def expected(trainer: Any) -> dict[str, Tensor]:
    """A state that can be told from the weights, whatever the layout."""
    found: dict[str, Tensor] = {}
    for name, weight in named(trainer):
        found[f"exp_avg/{name}"] = weight * 2
        found[f"exp_avg_sq/{name}"] = weight * weight
        found[f"step/{name}"] = torch.tensor(float(len(name)))
    return found


def named(trainer: Any) -> list[tuple[str, Tensor]]:
    """The last stage of a pipeline holds the tied head on its own."""
    weights = trainer.model.named_parameters()
    return [(name.replace("lm_head", "model.embed_tokens"), weight) for name, weight in weights]


def save(folder: Path, trainer: Any, ranks: Ranks) -> None:
    for name, tensor in start_optimizer(trainer.optimizer, trainer.model).items():
        tensor.copy_(expected(trainer)[name])

    def begin(aside: Path) -> None:
        save_config(trainer.model, aside / POLICY)
        write_state(aside, {"order": 1})

    saver = Saver(ranks)
    saver.save(folder, {POLICY: snapshot(trainer, ranks)}, begin=begin, done=lambda: None)
    saver.settle()


def check_restored(folder: Path, trainer: Any, ranks: Ranks) -> None:
    restore_optimizer(trainer, folder, POLICY, ranks)
    wanted = expected(trainer)
    for name, weight in named(trainer):
        for moment, tensor in trainer.optimizer.state[weight].items():
            ours, theirs = tensor, wanted[f"{moment}/{name}"]
            if isinstance(ours, DTensor):
                ours, theirs = ours.to_local(), theirs.to_local()
            assert torch.equal(ours, theirs), (folder.name, moment, name)


def on_ranks(
    rank: int, size: int, folder: str, layouts: dict[str, dict[str, int]], sources: list[str]
) -> None:
    """Save in each layout, and read in each of them what is there already."""
    for name, layout in layouts.items():
        ranks = Ranks(rank, size)
        save(Path(folder) / name, made(**layout), ranks)
        for source in sources:
            check_restored(Path(folder) / source, made(**layout), ranks)


def check_alone(folder: Path, names: list[str]) -> None:
    """One process reads, whole and bit for bit, what ranks saved."""
    weights = made().model.state_dict()
    for name in names:
        assert newest_checkpoint(folder)[1] == []
        verify_checkpoint(folder / name)
        check_restored(folder / name, made(), Ranks())
        held = load_model(folder / name / POLICY, dtype=torch.float32).state_dict()
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[key], weights[key]) for key in weights)


@pytest.mark.slow
@pytest.mark.world
def test_one_process_and_two_ranks_read_what_the_other_saved(tmp_path):
    save(tmp_path / "alone", made(), Ranks())
    run_ranks(2, on_ranks, 2, str(tmp_path), {"two": {"dp_shard": 2}}, ["alone"])
    check_alone(tmp_path, ["alone", "two"])
    # Both wrote, each about half.
    sizes = [path.stat().st_size for path in (tmp_path / "two").rglob("*.safetensors")]
    assert len(sizes) == 4
    whole = [path.stat().st_size for path in (tmp_path / "alone").rglob("*.safetensors")]
    assert max(sizes) < 0.7 * max(whole)


@pytest.mark.slow
def test_four_ranks_read_what_two_saved_and_one_what_four_did_in_any_layout(tmp_path):
    run_ranks(2, on_ranks, 2, str(tmp_path), {"two": {"dp_shard": 2}}, [])
    layouts = {
        "four": {"dp_shard": 4},
        "groups": {"dp_replicate": 2, "dp_shard": 2},
        "tensor": {"dp_shard": 2, "tp": 2},
        "stages": {"dp_shard": 2, "pp": 2},
    }
    run_ranks(4, on_ranks, 4, str(tmp_path), layouts, ["two"])
    again = {"tensor again": {"tp": 2}, "stages again": {"pp": 2}}
    run_ranks(2, on_ranks, 2, str(tmp_path), again, [*layouts])
    check_alone(tmp_path, [*layouts, *again])


def write_gone_wrong(rank: int, folder: str) -> None:
    """One rank's disk is full: all say so, and the next checkpoint is whole. Then that rank is killed."""
    ranks, trainer, root = Ranks(rank, 2), made(dp_shard=2), Path(folder)
    save(root / "step-1", trainer, ranks)
    real = checkpointing.write_parts

    def full(*arguments: Any, **named: Any) -> list[Path]:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **named)

    checkpointing.write_parts = full
    with pytest.raises(CheckpointError) as caught:
        save(root / "step-2", trainer, ranks)
    assert str(caught.value) == (
        f"checkpoint {root / 'step-2'} cannot be written: No space left on device; what was saved before is "
        "intact"
    )
    ranks.barrier()
    assert sorted(path.name for path in root.iterdir()) == ["step-1"]
    ranks.barrier()
    checkpointing.write_parts = real
    save(root / "step-3", trainer, ranks)
    checkpointing.write_parts = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else []
    save(root / "step-4", trainer, ranks)


@pytest.mark.slow
@pytest.mark.world
def test_what_one_rank_cannot_write_fails_for_all_and_a_killed_rank_leaves_what_was_saved(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 ended with exit code -9|rank 0 failed") as caught:
        run_ranks(2, write_gone_wrong, str(tmp_path))
    assert "Connection" in str(caught.value) or "exit code -9" in str(caught.value)
    for name in ("step-1", "step-3"):
        verify_checkpoint(tmp_path / name)
    assert not (tmp_path / "step-4").exists()
    assert newest_checkpoint(tmp_path)[1] == []


@pytest.mark.slow
def test_a_rank_whose_file_the_first_does_not_see_is_told_of(tmp_path, monkeypatch):
    # As the entries that another machine would tell of.
    monkeypatch.setattr(checkpointing, "flushed", lambda aside, files: {"model/model-2.safetensors": {}})
    with pytest.raises(
        CheckpointError, match="another rank wrote model/model-2.safetensors and the first one"
    ):
        save(tmp_path / "step-1", made(), Ranks())
    assert not list(tmp_path.glob("*step*"))


@pytest.mark.slow
def test_nothing_is_unpickled_from_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "step-1", made(), Ranks())

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was read")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    assert newest_checkpoint(tmp_path) == (tmp_path / "step-1", [])
    check_restored(tmp_path / "step-1", made(), Ranks())
    assert load_model(tmp_path / "step-1" / POLICY, dtype=torch.float32).config.hidden_size == 18
    # Nor is there one among its files.
    kinds = {path.suffix for path in (tmp_path / "step-1").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}


def blocked(monkeypatch: pytest.MonkeyPatch, number: int) -> threading.Event:
    """Let the writing of a run's n-th checkpoint, from 1, wait for the event that is given back."""
    go, calls, real = threading.Event(), [0], checkpointing.write_weights

    def waiting(*arguments: Any, **named: Any) -> list[Path]:
        calls[0] += 1
        if calls[0] == number and not go.wait(60):
            raise AssertionError("the run did not go on while its checkpoint was written")
        return real(*arguments, **named)

    monkeypatch.setattr(checkpointing, "write_weights", waiting)
    return go


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[Controller], None]) -> None:
    """Act when this batch of reinforcement is recorded."""
    record = Controller.record

    def acting(self: Controller, *arguments: Any) -> None:
        record(self, *arguments)
        if (arguments[0], self.progress.step) == ("reinforcement", step):
            act(self)

    monkeypatch.setattr(Controller, "record", acting)


# Checkpoints at batches 0, 2 and 4.
QUICK = {"sft": None, "steps": 4, "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run each of whose checkpoints is written before it goes on."""
    folder = tmp_path_factory.mktemp("waiting")
    real = Saver.save

    def save_and_wait(self: Saver, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        self.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "save", save_and_wait)
        return Path(train(tiny_recipe(folder, QUICK), quiet=True).run)


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written_and_the_numbers_are_the_same(
    undisturbed, tmp_path, monkeypatch
):
    go = blocked(monkeypatch, 2)
    seen: list[list[str]] = []

    def look(controller: Controller) -> None:
        seen.append(sorted(path.name for path in controller.folder.checkpoints.iterdir()))
        go.set()

    at_step(monkeypatch, 3, look)
    run = Path(train(tiny_recipe(tmp_path, QUICK), quiet=True).run)
    assert seen == [[".aside-step-000002", "step-000000"]]
    check_equal(run, undisturbed)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_those_before(tmp_path, monkeypatch):
    calls, real = [0], checkpointing.seal_checkpoint

    def full(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "seal_checkpoint", full)
        # Until then the run does not know.
        at_step(patch, 3, lambda controller: controller._saver.wait())
        with pytest.raises(CheckpointError) as caught:
            train(tiny_recipe(tmp_path, QUICK), quiet=True)
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    sentence = (
        f"checkpoint {checkpoints / 'step-000002'} cannot be written: No space left on device; what was "
        "saved before is intact"
    )
    assert str(caught.value) == sentence
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["warnings"]) == ("failed", [sentence])
    assert [record["step"] for record in metrics_of(tmp_path / "runs" / "run")][-1] == 3
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000"]
    assert newest_checkpoint(checkpoints) == (checkpoints / "step-000000", [])


def test_a_mistake_in_the_thread_is_not_lost(tmp_path, monkeypatch):
    def mistaken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("here")

    monkeypatch.setattr(checkpointing, "write_parts", mistaken)
    with pytest.raises(ZeroDivisionError, match="here"):
        save(tmp_path / "step-1", made(), Ranks())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("times", [1, 2])
def test_a_run_that_is_left_waits_for_what_is_being_written(times, tmp_path, monkeypatch):
    """Also one that is left at once: nobody else may write to the folder meanwhile."""
    go = blocked(monkeypatch, 2)

    def leave(controller: Controller) -> None:
        threading.Timer(0.5, go.set).start()
        if times == 2:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 3, leave)
    if times == 2:
        with pytest.raises(KeyboardInterrupt):
            train(tiny_recipe(tmp_path, QUICK), quiet=True)
    else:
        assert train(tiny_recipe(tmp_path, QUICK), quiet=True).status == "interrupted"
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    last = "step-000002" if times == 2 else "step-000003"
    assert newest_checkpoint(checkpoints) == (checkpoints / last, [])
    assert not list(checkpoints.glob(".aside*"))


def killed_while_saving(folder: str) -> None:
    """A run that dies when its second checkpoint is written and not yet in its place."""
    calls, real = [0], checkpointing.seal_checkpoint

    def dying(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)

    checkpointing.seal_checkpoint = dying
    train(tiny_recipe(Path(folder), QUICK), quiet=True)


@pytest.mark.slow
@pytest.mark.world
def test_killed_while_saving_a_run_goes_on_from_the_checkpoint_before(undisturbed, tmp_path):
    trainer = process(killed_while_saving, str(tmp_path))
    trainer.join(60)
    assert trainer.exitcode == -signal.SIGKILL
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    assert (checkpoints / ".aside-step-000002" / "model" / "model.safetensors").is_file()
    assert newest_checkpoint(checkpoints) == (checkpoints / "step-000000", [])
    resume(tmp_path / "runs" / "run", quiet=True)
    check_equal(tmp_path / "runs" / "run", undisturbed)


@pytest.mark.slow
def test_the_reference_is_read_once_it_is_whole(tmp_path, monkeypatch):
    go = blocked(monkeypatch, 1)
    real = Controller.build_train_step

    def build(self: Controller, checkpoint: Path | None) -> Any:
        threading.Timer(0.5, go.set).start()
        return real(self, checkpoint)

    monkeypatch.setattr(Controller, "build_train_step", build)
    run = train(tiny_recipe(tmp_path, QUICK | {"steps": 1, "policy.kl.coefficient": 0.1}), quiet=True)
    assert (run.status, run.steps) == ("finished", 1)
