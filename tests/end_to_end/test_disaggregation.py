"""Runs whose engine has prefill and decode workers: the numbers of one engine, also if workers are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.config.engine_section import EngineConfig
from millrace.engines.build_prefill_decode import worker_identity
from millrace.errors import SetupError
from millrace.models.load import Model
from millrace.planner.engine_cost import EngineCost
from millrace.planner.engine_cost_file import MeasuredEngine, read_cost, write_cost
from millrace.replay.replay import replay
from millrace.run import build_engines
from millrace.run.loop import train
from millrace.run.run import Controller
from tests.end_to_end.async_runs import check_run, engines_below, events_of, run, trained
from tests.end_to_end.runs import LIMIT_S
from tests.end_to_end.test_environments import recipe
from tests.end_to_end.test_mixtures import options
from tests.end_to_end.tiny import metrics_of, tiny_recipe, without_times
from tests.planner.costs import measurement
from tests.rewards.helpers import ends_within

pytestmark = pytest.mark.world
# Prompts of a few tokens have whole blocks of two.
APART: dict[str, Any] = {
    "engine.disaggregation": {"prefill": 1, "decode": 1, "apart_above": 2},
    "engine.block_size": 2,
}
WHOLE: dict[str, Any] = {"engine.num_engines": 1, "engine.block_size": 2}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated distribution": {"rollout.top_p": 0.8},
    "adapter": {"model.adapter": {"rank": 4, "alpha": 8.0}},
}


def batches(path: Path) -> list[dict[str, Any]]:
    return [one for one in metrics_of(path) if one["stage"] == "reinforcement"]


def weights(path: Path) -> bytes:
    """Those of the last checkpoint."""
    newest = sorted((path / "checkpoints").glob("step-*"))[-1]
    return b"".join(one.read_bytes() for one in sorted((newest / "model").glob("*.safetensors")))


def check_same_run(apart: Path, whole: Path) -> None:
    """Fail unless tokens, log-probabilities, metrics and weights agree bit for bit."""
    assert repr(trained(apart)) == repr(trained(whole))
    ours, theirs = without_times(metrics_of(apart)), without_times(metrics_of(whole))
    assert [
        {key: value for key, value in one.items() if not key.startswith("engine/")} for one in ours
    ] == theirs
    assert weights(apart) == weights(whole)
    last = batches(apart)[-1]
    assert last["engine/prompt_tokens_imported"] > 0
    assert last["engine/imported_fraction"] == 1
    assert last["engine/blocks_refused"] == last["engine/workers_lost"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_with_workers_is_the_run_with_one_engine(variant: str, tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    for name, engine in (("apart", APART), ("whole", WHOLE)):
        words = {"deterministic": True, **VARIANTS[variant], **engine}
        assert run(tmp_path, name, **words).status == "finished"
    check_same_run(tmp_path / "runs" / "apart", tmp_path / "runs" / "whole")
    with pytest.raises(
        SetupError, match=r"generated with engine.disaggregation, whose workers' steps are not"
    ):
        replay(tmp_path / "runs" / "apart", quiet=True)


@pytest.mark.slow
def test_experts_of_imported_tokens_are_replayed(tmp_path: Path) -> None:
    """A mixture of experts has no deterministic mode; other experts than the sampler's would be seen."""
    tiny_recipe(tmp_path)
    assert run(tmp_path, **{**options("replay"), **APART, "name": "experts"}).status == "finished"
    found = batches(tmp_path / "runs" / "experts")
    assert max(one["mismatch/max"] for one in found) < 1e-5
    assert found[-1]["engine/prompt_tokens_imported"] > 0


@pytest.mark.slow
def test_episodes_of_several_turns_with_workers_are_those_of_one_engine(tmp_path: Path) -> None:
    for name, engine in (("apart", APART), ("whole", WHOLE)):
        # Of completions with one token the prefill worker samples all.
        words = {"deterministic": True, "rollout.max_tokens": 2, **engine}
        assert train(recipe(tmp_path, name, **words), quiet=True).status == "finished"
    check_same_run(tmp_path / "runs" / "apart", tmp_path / "runs" / "whole")
    assert max(row["num_turns"] for rows in trained(tmp_path / "runs" / "apart") for row in rows) > 1


@pytest.mark.slow
def test_a_cost_model_places_samples_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_recipe(tmp_path)
    file, cost = tmp_path / "cost.json", EngineCost(1e-6, 1e-3, 0.0, 1e-3, 0.0)

    def measured(model: Model, options: EngineConfig, threads: int) -> MeasuredEngine:
        # A file of these very workers, in which steps are cheap and tokens are not.
        found = worker_identity(model, options, threads)
        write_cost(replace(measurement(), engine=found, cost=cost), file)
        return found

    words = {"deterministic": True, "engine.block_size": 2}
    workers = {"prefill": 1, "decode": 1, "cost": str(file)}
    with pytest.raises(SetupError, match=r"engine.disaggregation.cost: .*cost.json: No such file"):
        run(tmp_path, "missing", **words, **{"engine.disaggregation": workers})
    with monkeypatch.context() as patch:
        patch.setattr(build_engines, "worker_identity", measured)
        assert run(tmp_path, "apart", **words, **{"engine.disaggregation": workers}).status == "finished"
    assert run(tmp_path, "whole", **{**words, **WHOLE}).status == "finished"
    apart, whole = tmp_path / "runs" / "apart", tmp_path / "runs" / "whole"
    assert repr(trained(apart)) == repr(trained(whole))
    assert weights(apart) == weights(whole)
    # Prompts that come at once are served whole: by both workers, where the rule of lengths has one decode.
    assert batches(apart)[-1]["engine/prompt_tokens_imported"] == 0
    write_cost(replace(read_cost(file), engine=replace(read_cost(file).engine, block_size=16)), file)
    with pytest.raises(SetupError, match=r"was measured on another engine: its block_size is 16 and not 2"):
        run(tmp_path, "other", **words, **{"engine.disaggregation": workers})


def killing(monkeypatch: pytest.MonkeyPatch, victims: Callable[[int], list[int]]) -> list[int]:
    """Kill the processes that `victims` returns of each number of finished batches; return those killed."""
    record, killed = Controller.record, list[int]()

    def recording(self: Controller, stage: str, numbers: dict[str, Any]) -> None:
        record(self, stage, numbers)
        if stage == "reinforcement":
            for pid in victims(self.progress.step):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    monkeypatch.setattr(Controller, "record", recording)
    return killed


def workers() -> tuple[int, list[int]]:
    """The process of the engine of this run, and those of its workers."""
    below = {engine: engines_below(engine) for engine in engines_below(os.getpid())}
    (found,) = [(engine, own) for engine, own in below.items() if own]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("partial", [True, False])
def test_killed_workers_cost_a_run_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    """Ahead of training, three of the four workers die one after the other, so some of each role."""
    tiny_recipe(tmp_path)
    first: list[int] = []

    def victims(step: int) -> list[int]:
        if step == 2:
            first.extend(workers()[1])
        return first[step - 2 : step - 1] if 2 <= step <= 4 else []

    killed = killing(monkeypatch, victims)
    words = {
        **APART,
        "engine.disaggregation": {"prefill": 2, "decode": 2, "apart_above": 2},
        "rollout.max_staleness": 2,
        "rollout.partial_rollout": partial,
        "steps": 12,
    }
    assert run(tmp_path, "killed", **words).status == "finished"
    path = tmp_path / "runs" / "killed"
    check_run(path, steps=12, bound=2)
    assert len(set(killed)) == 3
    assert batches(path)[-1]["engine/workers_lost"] == 3
    events = [event for one in events_of(path) for event in one.get("events", [one])]
    assert not [event for event in events if event.get("kind") == "engine_lost"]


@pytest.mark.slow
def test_an_engine_that_dies_with_its_workers_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_recipe(tmp_path)
    left: list[int] = []

    def engine(step: int) -> list[int]:
        if step != 2:
            return []
        number, own = workers()
        left.extend(own)
        return [number]

    killed = killing(monkeypatch, engine)
    assert run(tmp_path, "killed", **APART, **{"rollout.max_staleness": 2, "steps": 6}).status == "finished"
    path = tmp_path / "runs" / "killed"
    check_run(path, steps=6, bound=2)
    assert len(killed) == 1
    assert len(left) == 2
    assert [pid for pid in left if not ends_within(pid, LIMIT_S)] == []
    events = [event for one in events_of(path) for event in one.get("events", [one])]
    assert any(event.get("kind") == "engine_lost" for event in events)
