"""`millrace engines` says which engines a run has, or why none can be added: its rows of docs/errors.md."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from millrace.engines import handle, ray_placement
from millrace.rollout.backend import ScaleRequest
from millrace.run import scaling
from millrace.run.scaling import ScaleRequestFile
from tests.cli.lab import Lab, Result
from tests.forked import forked_engines

RUN = "runs/tiny-1"
TOLD = {"target": 2, "activity": {"engine-0": "generates 4 answers"}, "reason": "", "last_request": ""}


def aside(lab: Lab) -> None:
    """A run whose engines have processes of their own, as far as its folder tells."""
    lab.train("steps=1")
    recipe = Path(RUN, "recipe.yaml")
    told = yaml.safe_load(recipe.read_text())
    told["engine"]["num_engines"] = 1
    recipe.write_text(yaml.safe_dump(told))


def while_running(lab: Lab, told: dict[str, Any] | None = None, number: str = "3") -> Result:
    """Ask for engines of a run while another process seems to train it, and to say this in its status."""
    status = {"pid": 7, "at": {"stage": "reinforcement", "step": 0, "steps": 1}, "waits": []}
    if told is not None:
        Path(RUN, "status.json").write_text(json.dumps(status | {"engines": told}))
    with open(Path(RUN, ".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lab("engines", RUN, *[number] * bool(number))


def killed(lab: Lab) -> Result:
    aside(lab)
    Path(RUN, "summary.json").unlink()
    return lab("engines", RUN, "3")


def unread(lab: Lab) -> Result:
    seconds = iter(range(0, 1000, 50))
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda seconds: None)
    lab.patch.setattr(scaling, "time", clock)
    aside(lab)
    return while_running(lab, TOLD)


def ends_meanwhile(lab: Lab) -> Result:
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: Path(RUN, "status.json").unlink())
    lab.patch.setattr(scaling, "time", clock)
    aside(lab)
    return while_running(lab, TOLD)


def no_room(lab: Lab) -> Result:
    """The run is asked at its first look, and each engine but the first needs room on a full cluster."""
    real, requests = handle.start, [[ScaleRequest(2)]]
    group = SimpleNamespace(wait=lambda limit_s: False)
    util = SimpleNamespace(placement_group=lambda shares: group, remove_placement_group=lambda group: None)
    ray = SimpleNamespace(util=util, available_resources=dict)

    def start(name: str, *given: Any) -> handle.EngineHandle:
        if name != "engine-0":
            ray_placement.one_more(ray, {"CPU": 1})
        return real(name, *given)

    lab.patch.setattr(handle, "start", start)
    lab.patch.setattr(ScaleRequestFile, "poll", lambda self: requests.pop() if requests else [])
    with forked_engines():
        return lab.train("steps=2", "engine.num_engines=1")


ENGINES: dict[str, Callable[[Lab], Result]] = {
    "fewer than one engine is requested": lambda lab: (aside(lab), while_running(lab, TOLD, "0"))[1],
    "the run is over": lambda lab: (aside(lab), lab("engines", RUN, "3"))[1],
    "the run was killed": killed,
    "the trainer's process generates": lambda lab: (lab.train("steps=1"), while_running(lab))[1],
    "trainer and engine are colocated": lambda lab: (lab.train("engine.colocated=true"), while_running(lab))[
        1
    ],
    "the run is in SFT, or has just begun": lambda lab: (aside(lab), while_running(lab))[1],
    "the run does not read the request": unread,
    "the run ends before it reads the request": ends_meanwhile,
    "there are no resources for one more engine": no_room,
}


@pytest.mark.slow
def test_it_says_what_the_status_of_the_run_says(lab):
    aside(lab)
    result = while_running(lab, TOLD, "")
    expected = f"run {RUN}: target 2 engines, 1 alive\n  engine-0: generates 4 answers\n  1 starting\n"
    assert (result.code, result.err, result.out) == (0, "", expected)


@pytest.mark.slow
def test_the_answer_comes_once_the_run_has_read_the_request(lab):
    def answer(_: float) -> None:
        request = json.loads(Path(RUN, "scale.json").read_text())
        assert request["engines"] == 3
        told = json.loads(Path(RUN, "status.json").read_text())
        told["engines"] |= {"target": 3, "last_request": request["id"]}
        Path(RUN, "status.json").write_text(json.dumps(told))

    lab.patch.setattr(scaling, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=answer))
    aside(lab)
    result = while_running(lab, TOLD)
    assert result.err == f"waiting for run {RUN} to read the request, at most 60 s\n"
    assert result.out.splitlines() == [
        f"run {RUN}: target 3 engines, 1 alive",
        "  engine-0: generates 4 answers",
        "  2 starting",
    ]


def test_an_unread_request_is_deleted(lab):
    unread(lab)
    assert not Path(RUN, "scale.json").exists()
