"""A resumed run goes on where its log left it, or is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.data.prompts import PromptStream
from millrace.distributed.ranks import Ranks
from millrace.engines.in_process import InProcessBackend
from millrace.errors import CheckpointError
from millrace.eventlog.log import EventLog, read_events
from millrace.observability.metrics import Spans
from millrace.rollout.batches import LocalBatchSource
from millrace.run.build_algorithm import build_method
from tests.event_logs import change_events
from tests.rollout.test_batches import DIFFERENT, Echo, Table, prompts, values
from tests.run.pieces import parts, recipe

CONFIG = {"rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_staleness": 1}, "steps": 4}


def source_in(folder: Path) -> LocalBatchSource:
    """Of a run that samples one batch ahead, in this thread."""
    config, engine = recipe(**CONFIG), Echo()
    return LocalBatchSource(
        config.rollout,
        parts(method=build_method(config), train_prompts=prompts(8)),
        PromptStream(prompts(8), seed=0, shuffle=False),
        **values(config),
        backend=InProcessBackend(engine, Table({f"p{n}": DIFFERENT for n in range(8)}), engine.load),
        log=EventLog(folder / "events.log", lambda: 0.0),
        ranks=Ranks(),
        spans=Spans(),
        watchdog=None,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run left after its first batch; its checkpoint is in the same folder.

    Groups 0 and 1 are trained on, 2 and 3 are finished.
    """
    with source_in(tmp_path) as source:
        source.begin(None, 0)
        source.next_batch()
        source.update_weights(1)
        source.save(tmp_path)
    return tmp_path


def in_log(old: str, new: str) -> Callable[[Path], None]:
    """Other state in one event; the checkpoint still ends where a block does."""

    def change(folder: Path) -> None:
        def replaced(lines: list[str]) -> list[str]:
            assert sum(old in line for line in lines) == 1
            return [line.replace(old, new) for line in lines]

        change_events(folder / "events.log", replaced)
        state = json.loads((folder / "rollouts.json").read_text())
        state["log_bytes"] = (folder / "events.log").stat().st_size
        (folder / "rollouts.json").write_text(json.dumps(state))

    return change


def in_controller(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        path = folder / "rollouts.json"
        state = json.loads(path.read_text())
        change(state["rollouts"]["staleness"])
        path.write_text(json.dumps(state))

    return do


def lose_a_group(controller: dict[str, Any]) -> None:
    """As a controller that takes a group for trained on."""
    controller["queue"]["groups"].pop()
    controller["queue"]["arrived"].remove(3)
    controller["num_left"] += 1


def train_twice(controller: dict[str, Any]) -> None:
    """As a controller that has forgotten that a group was trained on."""
    controller["queue"]["groups"].insert(0, [1, "p1", 0, [0, 0], False])
    controller["queue"]["arrived"].insert(0, 1)
    controller["num_left"] -= 1


def cut(folder: Path) -> None:
    path = folder / "events.log"
    path.write_bytes(path.read_bytes()[:-1])


TAMPERED = {
    "a start": (in_log('"number": 3, "prompt": "p3"', '"number": 3, "prompt": "p7"'), "group 3 .* log"),
    "a finish": (
        in_log('"number": 3, "oldest_steps"', '"number": 2, "oldest_steps"'),
        "group 2 is finished already",
    ),
    "a file that was cut": (cut, "it was cut or replaced since"),
    "a batch": (
        in_controller(lambda controller: controller.update(num_taken=2)),
        "num_taken is 2 .* and 1 in the log",
    ),
    "a number": (
        in_controller(lambda controller: controller.update(num_started=9)),
        "num_started is 9 .* and 4 in the log",
    ),
    "a lost group": (
        in_controller(lose_a_group),
        r"group 3 .* is not queued .* \['p3', 0, \[0, 0\]\] in the log",
    ),
    "a group twice": (in_controller(train_twice), r"group 1 .* is \['p1', 0, .* and not queued in the log"),
    "a count": (
        in_controller(lambda controller: controller.update(num_left=3)),
        "4 groups started, 5 are known",
    ),
    "an age": (
        in_controller(lambda controller: controller["queue"]["groups"][0].__setitem__(3, [0, 1])),
        r"group 2 .* is \['p2', 0, \[0, 1\]\] .* and \['p2', 0, \[0, 0\]\] in the log",
    ),
    "a repeat": (
        in_controller(lambda controller: controller["repeats"].append("p2")),
        r"repeats is \['p2'\]",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_log_and_a_checkpoint_that_do_not_go_together_are_refused(saved: Path, what: str) -> None:
    tamper, why = TAMPERED[what]
    tamper(saved)
    with source_in(saved) as source, pytest.raises(CheckpointError, match=why) as error:
        source.begin(saved, 1)
    assert str(error.value).startswith(f"checkpoint {saved} and the run's event log do not go together: ")
    assert str(error.value).endswith("to resume from the one before it, or start a new run")


def test_an_honest_run_goes_on_to_its_end_however_often_it_is_taken_up(saved: Path) -> None:
    trained = []
    for version in (1, 2, 3):
        with source_in(saved) as source:
            source.begin(saved, version)
            trained += [group.prompt.id for group in source.next_batch()[0].groups]
            source.update_weights(version + 1)
            source.save(saved)
    assert trained == ["p2", "p3", "p4", "p5", "p6", "p7"]
    assert [event["kind"] for event in read_events(saved / "events.log")].count("resume") == 3


def test_where_the_newest_checkpoint_is_refused_the_one_before_is_gone_on_from(saved: Path) -> None:
    older, position = saved / "older", (saved / "events.log").stat().st_size
    older.mkdir()
    for name in ("rollouts.json", "rollouts.safetensors"):
        shutil.copy(saved / name, older)
    with source_in(saved) as source:
        source.begin(saved, 1)
        source.next_batch()
        source.update_weights(2)
        source.save(saved)
    log = bytearray((saved / "events.log").read_bytes())
    log[position + 20] ^= 1
    (saved / "events.log").write_bytes(log)
    with source_in(saved) as source, pytest.raises(CheckpointError, match="block 3 of the event log is dam"):
        source.begin(saved, 2)
    with source_in(saved) as source:
        source.begin(older, 1)
        assert [group.prompt.id for group in source.next_batch()[0].groups] == ["p2", "p3"]


def test_a_fresh_run_reads_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EventLog, "events")
    with source_in(tmp_path) as source:
        source.begin(None, 0)
        assert len(source.next_batch()[0].groups) == 2
