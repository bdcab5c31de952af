"""Engines that are added and retired while a run goes on, and the run repeated bit for bit."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.observability import watchdog
from millrace.rollout.backend import DRAINED, ScaleRequest
from millrace.rollout.manager import RolloutManager
from millrace.run import scaling
from millrace.run.run import Controller
from millrace.run.scaling import ScaleRequestFile, engines_of, request_engines
from millrace.run.status import read_status
from tests.end_to_end.async_runs import check_run, events_of, run
from tests.end_to_end.runs import LIMIT_S
from tests.end_to_end.test_replay import check_repeats
from tests.end_to_end.tiny import tiny_recipe

# Answers long enough that an engine is drawing when it is to leave.
AHEAD: dict[str, Any] = {
    "rollout.max_staleness": 2,
    "steps": 16,
    "rollout.max_tokens": 30,
    "engine.num_engines": 1,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with one engine, got another one after two steps, and retired one after six."""
    folder = tmp_path_factory.mktemp("engines")
    tiny_recipe(folder)
    path, record, said = folder / "runs" / "changed", Controller.record, []
    begin, poll, running, kept = RolloutManager.begin, ScaleRequestFile.poll, [], []
    retiring = threading.Thread(target=lambda: request_engines(path, 1, said.append))

    def asking(self: Controller, stage: str, numbers: dict[str, Any]) -> None:
        record(self, stage, numbers)
        if stage != "reinforcement":
            return
        if self.progress.step == 2:
            until(lambda: read_status(path).engines)
            assert request_engines(path, 2, said.append).target == 2
            until(lambda: not any("first" in one for one in doing(path, 2)))
        elif self.progress.step == 6:
            # While the run goes on, so that there is something to hand over.
            retiring.start()
        elif self.progress.step == 14:
            retiring.join()
            until(lambda: doing(path, 1))

    def beginning(self: RolloutManager, version: int) -> None:
        running.append(self)
        begin(self, version)

    def late(self: ScaleRequestFile) -> list[ScaleRequest]:
        """Return the request to scale down while both generate."""
        kept.extend(poll(self))
        activity = running[-1].engines().activity.values()
        both = sum(told.startswith("generates ") for told in activity) == 2
        return [kept.pop()] if kept and (both or kept[0].number > 1) else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutManager, "begin", beginning)
        patch.setattr(ScaleRequestFile, "poll", late)
        patch.setattr(watchdog, "LOOK_S", 0.1)
        patch.setattr(Controller, "record", asking)
        patch.setattr(scaling, "CHECK_S", 0.02)
        assert run(folder, path.name, **AHEAD).status == "finished"
    assert said == [f"waiting for run {path} to read the request, at most 60 s"] * 2
    return path


def doing(path: Path, number: int) -> list[str]:
    """What the engines do, once there are so many."""
    found = list(engines_of(path).activity.values())
    return found if len(found) == number else ["first"] * (number > 1)


def arrived(events: list[dict[str, Any]]) -> set[tuple[int, int, int]]:
    """Number, sample and turn of all that came."""
    return {(one["number"], one["sample"], one["turn"]) for one in events if one["kind"] == "completed"}


def until(there: Any) -> None:
    ends_s = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@pytest.mark.slow
def test_engines_join_and_leave_and_no_group_is_lost_or_doubled(path: Path) -> None:
    check_run(path, steps=AHEAD["steps"], bound=2)
    events = events_of(path)
    assert [event["engines"] for event in events if event["kind"] == "scale"] == [2, 1]
    assert [event["engine"] for event in events if event["kind"] == "engine_joined"] == [
        "engine-0",
        "engine-1",
    ]
    assert {event["engine"] for event in events if event["kind"] == "completed"} == {"engine-0", "engine-1"}
    ((gone, reason),) = [
        (event["engine"], event["reason"]) for event in events if event["kind"] == "engine_lost"
    ]
    assert reason == DRAINED
    (leaving,) = [event["draining"] for event in events if event["kind"] == "scale" and event["draining"]]
    assert leaving == [gone]
    left = [place for place, event in enumerate(events) if event["kind"] == "scale"][1]
    assert not [event for event in events[left:] if event["kind"] == "dispatch" and event["engine"] == gone]
    # It was drawing then, and all of that has come; from whom is up to the clock.
    drawing = {
        (event["number"], sample, event["turn"])
        for event in events[:left]
        if event["kind"] == "dispatch" and event["engine"] == gone
        for sample in event["samples"]
    } - arrived(events[:left])
    assert drawing and drawing <= arrived(events[left:])
    assert not (path / "scale.json").exists()


@pytest.mark.slow
def test_the_replay_is_the_run_bit_for_bit(path: Path) -> None:
    check_repeats(path)
