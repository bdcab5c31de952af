"""Trainers and engines that die while sampling is ahead of training: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.engines.subprocesses import SubprocessBackend, SupervisedEngine
from millrace.rollout.backend import Event
from tests.crash_points import CrashPoint, install
from tests.end_to_end.async_runs import check_run, events_of, prompts_of
from tests.end_to_end.runs import (
    OVERRIDES,
    Undisturbed,
    check_equal,
    dies,
    files,
    finished,
)
from tests.end_to_end.tiny import tiny_recipe

STEPS, SFT = 4, 2
SETTINGS: dict[str, Any] = {
    "rollout.max_staleness": 2,
    "engine.num_engines": 1,
    "sft.steps": SFT,
    "steps": STEPS,
    "checkpoint.keep": 1,
    "policy.optimizer_steps_per_batch": 1,
}
NUM_CHUNKS = 16
# For each of the points of the default selection, spread evenly, where the second process dies; see `die`.
AGAIN = (0, 0, 1, 0, 2, 0)
pytestmark = pytest.mark.timeout(1200)
# Commands and events of every run with an engine process. Of the 32 and 128 each third and sixteenth.
MOMENTS = [
    *(f"before load ({number})" for number in range(1, 5)),
    *(f"{when} blocking ({number})" for number in range(1, 5) for when in ("before", "after")),
    *(f"before submit ({number})" for number in range(1, 33, 3)),
    *(f"after GenerateResult ({number})" for number in range(1, 129, 16)),
]
# Those of the first two evaluations, before the event log is there.
EARLY = [
    *(f"before load ({number})" for number in (1, 2)),
    *(f"{when} blocking ({number})" for number in (1, 2) for when in ("before", "after")),
]


DEATH = "an engine dies"


# ---- trainers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    found = Undisturbed.run(tmp_path_factory.mktemp("trainer"), SETTINGS)
    check_run(found.folder, steps=STEPS, bound=2, sft=SFT)
    kinds = [event["kind"] for event in events_of(found.folder)]
    assert kinds[: kinds.index("take")].count("start") == 3 * OVERRIDES["rollout.prompts_per_step"]
    return found


def check_same(undisturbed: Undisturbed, folder: Path) -> None:
    """Timing decides which weights sample which token, but not which prompts are sampled."""
    check_run(folder, steps=STEPS, bound=2, sft=SFT)
    assert prompts_of(folder) == prompts_of(undisturbed.folder)
    assert files(folder) == files(undisturbed.folder)


@pytest.mark.slow_beyond(1)
@pytest.mark.world
@pytest.mark.parametrize("number", range(len(AGAIN)))
def test_a_trainer_that_dies_before_an_effect_is_resumed_and_leaves_nothing_behind(
    number: int, undisturbed: Undisturbed
) -> None:
    place = number * (len(undisturbed.effects) - 1) // (len(AGAIN) - 1)
    undisturbed.die(place, lambda folder: check_same(undisturbed, folder), again=AGAIN[number])


@pytest.mark.only_whole
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_trainer_that_dies_before_any_effect_is_resumed_and_leaves_nothing_behind(
    chunk: int, undisturbed: Undisturbed
) -> None:
    # Before that it does what the run of `test_kill` does.
    first = undisturbed.effects.index("open events.log")
    for place in range(first + chunk, len(undisturbed.effects), NUM_CHUNKS):
        undisturbed.die(place, lambda folder: check_same(undisturbed, folder), again=place // NUM_CHUNKS % 3)


# ---- engines


def with_deadly_moments(moments: Sequence[str], log: Path, point: CrashPoint) -> None:
    """Log commands to an engine and events from it, and kill it at some moments.

    Moments are `before` and `after` a command, such as `before load (2)`, and `after` an event. An engine
    whose death the trainer has not noticed may still be given commands; it dies once, and that is logged too.

    Args:
        moments: as they stand in the log.
        log: file to which moments are appended, one a line.
        point: of the trainer.
    """
    log.touch()
    install(point)
    submit, update_weights = SupervisedEngine.submit, SupervisedEngine.update_weights
    poll = SubprocessBackend.poll
    count: Counter[str] = Counter()
    killed: set[str] = set()

    def numbered(name: str) -> str:
        count[name] += 1
        return f"{name} ({count[name]})"

    def reach(moment: str, engine: SupervisedEngine) -> None:
        dies = moment in moments and engine.name not in killed
        with log.open("a") as file:
            file.write(f"{moment}\n")
            # One that has not started yet is replaced without an event.
            if dies and engine.ready:
                file.write(f"{DEATH} {moment}\n")
        if dies:
            killed.add(engine.name)
            pid = engine.handle._popen.pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
            # Until it is dead; the exit code is left to the trainer, which may have read it already.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def submitting(self: SupervisedEngine, requests: Any, *, blocking: bool) -> None:
        name = numbered("blocking" if blocking else "submit")
        reach(f"before {name}", self)
        submit(self, requests, blocking=blocking)
        reach(f"after {name}", self)

    def updating(self: SupervisedEngine, manifest: Any) -> None:
        name = numbered("load")
        reach(f"before {name}", self)
        update_weights(self, manifest)
        reach(f"after {name}", self)

    def polling(self: SubprocessBackend) -> list[Event]:
        events = poll(self)
        for event in events:
            moment = f"after {numbered(type(event).__name__)}"
            for engine in list(self._engines.alive.values()):
                reach(moment, engine)
        return events

    SupervisedEngine.submit = submitting  # type: ignore[method-assign]
    SupervisedEngine.update_weights = updating  # type: ignore[method-assign]
    SubprocessBackend.poll = polling  # type: ignore[method-assign]


def live(base: Path, name: str, *moments: str, **settings: Any) -> list[str]:
    """Run the tiny recipe of a folder to its end while its engines die at some moments.

    Returns:
        all moments, and `DEATH` with the moment of each death.
    """
    folder, log = base / "runs" / name, base / f"{name}.moments"
    setup: Callable[[CrashPoint], None] = partial(with_deadly_moments, moments, log)
    point = CrashPoint(folder, base / f"{name}.log")
    assert not dies(base / "tiny.yaml", folder, point, setup=setup, **SETTINGS | settings)
    assert finished(folder)
    reached = log.read_text().splitlines()
    assert set(moments) <= set(reached)
    return reached


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `undisturbed`, which samples in the trainer's process."""
    base = tmp_path_factory.mktemp("engine")
    tiny_recipe(base)
    live(base, "undisturbed", **{"rollout.max_staleness": 0, "engine.num_engines": 0, "deterministic": True})
    return base


def check_replaced(base: Path, moments: Sequence[str], staleness: int) -> None:
    """Fail unless a run goes on by itself and loses nothing when its engine dies at some moments."""
    name = f"dies-{staleness}-{'-'.join(moments)}".translate(str.maketrans(" ", "-", "()"))
    path, exact = base / "runs" / name, {"deterministic": not staleness}
    try:
        reached = live(base, name, *moments, **exact, **{"rollout.max_staleness": staleness})
        # The log begins after the second evaluation.
        num_logged = sum(f"{DEATH} {moment}" in reached for moment in moments if moment not in EARLY)
        assert any(f"{DEATH} {moment}" in reached for moment in moments)
        fates = [
            event["kind"] for event in events_of(path) if event["kind"] in ("engine_lost", "engine_joined")
        ]
        expected = ["engine_joined", *["engine_lost", "engine_joined"] * num_logged]
        # The log may be closed before an engine that is needed no more has joined.
        assert fates in (expected, expected[:-1] if num_logged else expected)
        if staleness:
            check_run(path, steps=STEPS, bound=staleness, sft=SFT)
        else:
            check_equal(path, base / "runs" / "undisturbed")
    except Exception as error:
        error.add_note(f"its engine died {', then '.join(moments)}")
        raise
    shutil.rmtree(path)


@pytest.mark.slow_beyond(1)
@pytest.mark.world
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    "moments",
    [
        ("after submit (4)", "after GenerateResult (40)", "before load (5)"),
        # The evaluation after the second step.
        ("before blocking (3)",),
        ("after blocking (3)",),
    ],
    ids=["three", "before an evaluation", "in an evaluation"],
)
def test_a_run_goes_on_by_itself_when_its_engine_dies(
    moments: tuple[str, ...], staleness: int, folder: Path
) -> None:
    check_replaced(folder, moments, staleness)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_goes_on_by_itself_at_whatever_command_or_event_its_engine_dies(
    moment: str, staleness: int, folder: Path
) -> None:
    check_replaced(folder, (moment,), staleness)
