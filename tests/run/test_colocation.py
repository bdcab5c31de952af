"""Trainer and engine by turns: who is there when, and that a run has the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from millrace import resume, train
from millrace.inference.engine import PagedEngine
from millrace.models.load import fresh_config, fresh_model
from millrace.run import loop, run
from millrace.run.colocation import Colocation
from millrace.run.run import Controller
from millrace.training.scorer import ModelScorer
from tests.end_to_end.runs import OVERRIDES, check_equal
from tests.end_to_end.tiny import metrics_of, tiny_recipe
from tests.models.tiny import SIZES, VOCABULARY, random_batch

pytestmark = pytest.mark.together

METHOD = {**OVERRIDES, "advantage.kind": "gae", "critic": {"learning_rate": 1e-3}, "sft.steps": 4}


class Sleeping:
    """An engine that says what it is told."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def sleep(self, tags) -> None:
        self._said.append(f"engine sleeps: {' '.join(tags)}")

    def wake(self, tags) -> None:
        self._said.append(f"engine wakes: {' '.join(tags)}")

    def memory_bytes(self) -> dict[str, int]:
        return {}


def turns_of(
    linear: nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Colocation, list[str]]:
    """Turns that say what they do, over one layer."""
    said: list[str] = []
    turns = Colocation(Sleeping(said), cuda=False, folder=folder)
    turns.own([("the policy", linear, None)])
    said.clear()
    for name in ("sleep", "wake"):
        monkeypatch.setattr(turns._trainer, name, lambda name=name: said.append(f"trainer {name}s"))
    return turns, said


def test_whoever_leaves_does_so_before_the_other_comes(tmp_path, monkeypatch):
    turns, said = turns_of(nn.Linear(2, 2), tmp_path, monkeypatch)
    turns.sample()
    assert said == ["trainer sleeps", "engine wakes: weights kv_cache"]
    said.clear()
    turns.train()
    assert said == ["engine sleeps: weights kv_cache", "trainer wakes"]
    said.clear()
    turns.meet()
    assert said == ["engine sleeps: kv_cache", "trainer wakes", "engine wakes: weights"]


def test_those_that_were_the_trainers_are_there_when_others_become_it(tmp_path):
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    expected = first.weight.detach().clone()
    turns = Colocation(Sleeping([]), cuda=False, folder=tmp_path)
    turns.own([("the policy", first, None)])
    turns.sample()
    assert not torch.equal(first.weight, expected)
    turns.own([("the policy", second, None)])
    assert torch.equal(first.weight, expected)
    turns.sample()
    assert torch.equal(first.weight, expected)


def test_without_an_engine_that_takes_turns_nothing_moves(tmp_path):
    linear = nn.Linear(64, 64)
    expected = linear.weight.detach().clone()
    turns = Colocation(None, cuda=False, folder=tmp_path)
    turns.own([("the policy", linear, None)])
    for move in (turns.sample, turns.train, turns.meet):
        move()
        assert torch.equal(linear.weight, expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run `apart` in turns and the run `together`, and what was in memory when."""
    folder = tmp_path_factory.mktemp("turns")
    for name, more in (("together", {}), ("apart", {"engine.colocated": True})):
        assert train(tiny_recipe(folder, {**METHOD, **more, "name": name}), quiet=True).status == "finished"
    return folder / "runs"


@pytest.mark.slow
@pytest.mark.world
def test_a_run_in_turns_has_the_bits_of_one_without(runs):
    check_equal(runs / "apart", runs / "together")
    assert metrics_of(runs / "apart")[-1]["during"] == "reinforcement"


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("colocated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_whose_reference_is_away_has_the_same_bits(runs, colocated):
    name, more = f"reference-{colocated}", {"policy.kl.offload": True, "engine.colocated": colocated}
    report = train(tiny_recipe(runs.parent, {**METHOD, **more, "name": name}), quiet=True)
    assert report.status == "finished"
    check_equal(runs / name, runs / "together")


def test_a_reference_is_there_only_while_it_scores(tmp_path):
    # Only whole pages are given back.
    config = fresh_config("qwen3", SIZES | {"intermediate_size": 512}, vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=0, dtype=torch.float32).requires_grad_(False)
    widest = max(model.parameters(), key=torch.numel)
    scorer, batch = ModelScorer(model, temperature=1.0, max_tokens=1000), random_batch(0)
    expected_T, whole = scorer.logprobs(batch), widest.clone()
    turns = Colocation(None, cuda=False, folder=tmp_path)
    scorer.move_out(turns.offload([("the reference", model, None)]))
    for _ in range(2):
        assert not torch.equal(widest, whole)
        assert torch.equal(scorer.logprobs(batch), expected_T)
    assert not torch.equal(widest, whole)


@pytest.mark.slow
@pytest.mark.world
def test_taken_up_it_has_the_same_bits(runs, tmp_path):
    again = runs / "again"
    shutil.copytree(runs / "apart", again)
    (again / "summary.json").unlink()
    newest = sorted(path.name for path in (again / "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(again / "checkpoints" / newest)
    assert resume(again, quiet=True).status == "finished"
    check_equal(again, runs / "together")


def fraction_there(run: Controller) -> float:
    """How much of the widest weight is in memory: given back, it reads as 0."""
    assert run.trainer is not None
    widest = max(run.trainer.model.parameters(), key=torch.numel)
    return float(widest.count_nonzero()) / widest.numel()


@pytest.mark.slow
def test_while_one_works_the_other_is_away(tmp_path, monkeypatch):
    seen: set[tuple[str, bool, bool, bool]] = set()
    controllers: list[Controller] = []

    def looking(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any, **options: Any) -> Any:
            held = controllers[0].components.sleeper.memory_bytes()
            there = fraction_there(controllers[0]) > 0.9
            seen.add((name, there, held["weights"] > 0, held["kv_cache"] > 0))
            return real(*arguments, **options)

        return look

    real = Controller.__init__

    def made(self: Controller, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        controllers.append(self)
        transport = self.components.transport
        transport.update_weights = looking("weight_sync", transport.update_weights)

    monkeypatch.setattr(Controller, "__init__", made)
    monkeypatch.setattr(loop, "train_on", looking("train", loop.train_on))
    monkeypatch.setattr(PagedEngine, "generate", looking("sample", PagedEngine.generate))
    monkeypatch.setattr(run, "snapshot", looking("save", run.snapshot))
    train(tiny_recipe(tmp_path, {"steps": 2, "sft": None, "engine.colocated": True}), quiet=True)
    assert seen == {
        ("train", True, False, False),
        ("sample", False, True, True),
        ("weight_sync", True, True, False),
        ("save", True, True, False),
    }
