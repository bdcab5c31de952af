"""What the GRPO benchmark counts and compares; nothing here looks at a clock."""

from __future__ import annotations

import grpo_step
import pytest
import torch
from peers import grpo_task

from tests.close import close_fp64


def test_inner_parts_are_not_counted_in_outer_ones(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(grpo_task, "perf_counter", lambda: next(ticks))
    parts = grpo_task.Parts()
    inner = parts.around("inner", lambda value: value + 1)
    with parts("outer"):
        assert inner(4) == 5
    assert parts.take() == {"inner": 2.0, "outer": 8.0}
    assert parts.take() == {}


@pytest.mark.slow
@pytest.mark.world
def test_our_side_takes_whole_steps(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    threads = torch.get_num_threads()
    try:
        steps = grpo_step.our_steps(1, 2)
    finally:
        torch.set_num_threads(threads)
    assert len(steps) == 2
    for seconds, parts in steps:
        assert {"sample", "score", "forward, backward", "update", "hand over weights"} <= parts.keys()
        assert 0 < parts["forward, backward"] < seconds


def test_both_sides_are_paid_alike():
    space = {}
    exec(compile(grpo_step.REWARD, "reward", "exec"), space)  # noqa: S102
    for text in ("", "12+7=", "hello"):
        assert space["by_letters"](None, text, None, None) == grpo_task.reward(text)
    assert grpo_task.reward("12+7=") == (49 + 50 + 43 + 55 + 61) % 7


def test_a_summary_is_of_the_median_step_of_the_median_run():
    def run(*seconds):
        return {
            "seconds": list(seconds),
            "parts": [{"sample": one / 4, "update": one / 8} for one in seconds],
            "versions": {"trl": "1"},
        }

    found = grpo_step.summary([run(0.2, 0.4, 9.0), run(0.8, 0.8, 0.1), run(0.1, 0.1, 0.1)])
    assert found["runs_s"] == [0.4, 0.8, 0.1]
    close_fp64(found["step_s"], 0.4)
    close_fp64(found["sequences_per_s"], 128 / 0.4)
    close_fp64([found["parts_s"][name] for name in ("sample", "update", "rest")], [0.05, 0.025, 0.325])


def test_without_a_compiler_mkl_stays_as_it_is_and_the_output_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(grpo_step.shutil, "which", lambda name: None)
    assert grpo_step.without_brake(tmp_path) == ""
    assert "no C compiler was found" in capsys.readouterr().out


@pytest.mark.world
def test_a_side_that_fails_shows_its_last_messages(tmp_path):
    script = tmp_path / "side.py"
    script.write_text("raise RuntimeError('no such optimizer')")
    with pytest.raises(SystemExit, match="(?s)trl did not run:.*no such optimizer"):
        grpo_step.run_side("trl", grpo_step.Side(grpo_step.sys.executable, script), 1)
