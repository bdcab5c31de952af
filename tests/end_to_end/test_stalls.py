"""A run in which somebody hangs ends by itself, says who waits for whom, and goes on when it is taken up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forked
from tests.cli.lab import Lab
from tests.end_to_end.async_runs import engines_below
from tests.rewards.helpers import comes

# A first step may take that long where a machine is busy.
PHASE_S = 15
START_S = 120.0
STEPS = 60
HANGING = """import os, time

def once_told(prompt, completion, answer, row):
    while os.path.exists("hang"):
        time.sleep(0.1)
    return float(len(completion))
"""
WORDS = (
    f"steps={STEPS}",
    f"timeouts.phase_s={PHASE_S}",
    "rollout.max_staleness=1",
    "data.answer_column=null",
    "data.eval_size=1",
    "rewards=[{kind: function, function: 'hanging:once_told', timeout_s: 600}]",
    "rollout.prompts_per_step=2",
    "evaluation.every=1000",
    "checkpoint.every=1",
)


# An engine that starts in the place of another hangs as well.
STOPPING = """import os, signal

if os.path.exists("stop"):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def stop_engines(trainer: int) -> None:
    Path("stop").touch()
    for engine in engines_below(trainer):
        os.kill(engine, signal.SIGSTOP)


def hold_rewards(trainer: int) -> None:
    Path("hang").touch()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hang", "for_whom"), [(stop_engines, "engine"), (hold_rewards, "(its reward)")], ids=["engine", "reward"]
)
def test_a_run_that_hangs_ends_with_who_waits_for_whom_and_goes_on(
    hang: Callable[[int], None], for_whom: str, tmp_path, capsys, monkeypatch
):
    lab = Lab(tmp_path, capsys, monkeypatch)
    lab.write("hanging.py", HANGING.splitlines())
    lab.write("sitecustomize.py", STOPPING.splitlines())
    trainer = forked.command(["train", "tiny.yaml", *WORDS], PYTHONPATH=".")
    try:
        begun = Path("runs/tiny-1/checkpoints/step-000001")
        comes(lambda: begun.exists() or trainer.poll() is not None, START_S)
        assert begun.exists() and trainer.poll() is None
        hung_s = time.monotonic()
        while trainer.poll() is None and time.monotonic() < hung_s + 6 * PHASE_S:
            hang(trainer.pid)
            time.sleep(0.1)
    finally:
        trainer.kill()
        _, said = trainer.communicate()
    assert trainer.returncode == 1, said
    assert said.startswith("error: trainer waits for ")
    assert f"at most {PHASE_S} s: " in said
    assert for_whom in said
    assert said.endswith("; continue with: millrace resume runs/tiny-1\n")
    for file in ("hang", "stop"):
        Path(file).unlink(missing_ok=True)
    assert lab.run_apart("resume", "runs/tiny-1", limit_s=START_S).err == ""
