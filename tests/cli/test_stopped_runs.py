"""Runs stopped by engines, weights or waits: their rows of docs/errors.md, and that they go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.engines import handle
from millrace.engines.in_process import InProcessBackend
from tests.cli.lab import Lab, Result


def no_engine(lab: Lab) -> Result:
    lab.write("broken.py", ["raise SystemExit(3)"])
    lab.patch.syspath_prepend(".")
    lab.patch.setattr(handle, "ENTRY", "broken:serve")
    return lab.train("engine.num_engines=1")


def no_answer(lab: Lab) -> Result:
    """The reward never says what the first group is worth, and while nothing happens time flies."""
    real, now_s = InProcessBackend.wait, [0.0]

    def wait(self: InProcessBackend, timeout_s: float) -> list:
        self._calls.clear()
        if self._requests or self._events:
            return real(self, timeout_s)
        now_s[0] += timeout_s
        return []

    lab.patch.setattr(InProcessBackend, "wait", wait)
    lab.patch.setattr(InProcessBackend, "now", lambda self: now_s[0])
    return lab.train("timeouts.phase_s=600", "rollout.prompts_per_step=1")


def weights_out_of_bounds(lab: Lab) -> Result:
    reward = "rewards=[{kind: function, function: 'judges:varied', timeout_s: 9}]"
    words = ("data.answer_column=null", "data.eval_size=4", "evaluation.every=1")
    return lab.train("policy.optimizer.learning_rate=1e38", reward, *words)


STOPPED: dict[str, Callable[[Lab], Result]] = {
    "an engine cannot be started": no_engine,
    "a batch is not complete in time": no_answer,
    "weights diverged": weights_out_of_bounds,
}


@pytest.mark.slow
def test_a_run_that_stalled_goes_on_once_nobody_hangs(lab):
    assert no_answer(lab).code == 1
    lab.patch.undo()
    lab.patch.chdir(lab.folder)
    result = lab("resume", "runs/tiny-1", "--quiet")
    assert (result.code, result.err) == (0, "")


@pytest.mark.slow
@pytest.mark.world
def test_a_run_whose_weights_grew_goes_on_with_a_lower_rate(lab):
    assert weights_out_of_bounds(lab).code == 1
    recipe = Path("runs/tiny-1/recipe.yaml")
    text = recipe.read_text()
    assert text.count("1.0e+38") == 1
    recipe.write_text(text.replace("1.0e+38", "0.001"))
    result = lab("resume", "runs/tiny-1", "--quiet")
    assert (result.code, result.err) == (0, "")
