from __future__ import annotations

import io
import math
import re

import pytest

from millrace.observability.console import Console, clock_text, sparkline

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def reinforcement(step: int, reward: float = 0.5) -> dict[str, float | int | str]:
    return {
        "stage": "reinforcement",
        "step": step,
        "reward/mean": reward,
        "policy/entropy": 0.75,
        "time/sample_s": 3.0,
        "time/train_s": 1.0,
        "time/train/policy_s": 0.75,
        "time/train/reference_s": 0.01,
        "time/tokens_per_s": 8123.4,
    }


EVALUATION = {
    "stage": "evaluation",
    "during": "reinforcement",
    "step": 4,
    "measure": "accuracy",
    "accuracy": 0.625,
    "time/wall_s": 62.0,
}


def play(file: io.StringIO, *, num_steps: int = 4, title: str = "quickstart-1", quiet: bool = False) -> None:
    now = [0.0]
    with Console(title, [("model", "0.9 M")], file=file, quiet=quiet, clock=lambda: now[0]) as console:
        console.stage("reinforcement", 8)
        for step in range(1, num_steps + 1):
            now[0] += 3.0
            console.update(reinforcement(step))
        console.update(EVALUATION)
        console.say("checkpoint 4 saved")


def test_without_a_terminal_there_is_a_line_every_ten_seconds_and_no_control_codes():
    file = io.StringIO()
    play(file, num_steps=5)
    assert file.getvalue().splitlines() == [
        "quickstart-1",
        "model: 0.9 M",
        "reinforcement: 8 steps",
        "reinforcement 1/8  reward 0.500  entropy 0.750  speed 8,123 tokens/s",
        "reinforcement 5/8  reward 0.500  entropy 0.750  speed 8,123 tokens/s  0:09 left",
        "held-out accuracy 0.625 after batch 4, at 1:02",
        "checkpoint 4 saved",
    ]


def test_each_of_several_rewards_and_what_is_no_part_of_a_step_are_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    parts = {"reward/near/mean": 0.125, "reward/near/failed_fraction": 0.0, "reward/exact/mean": 0.75}
    measured = {"measure": "reward/near/mean", "reward/near/mean": 0.375, "time/evaluate_s": 4.0}
    for file in (io.StringIO(), Terminal()):
        with Console("run", [], file=file, clock=lambda: 0.0) as console:
            console.stage("reinforcement", 1)
            console.update(reinforcement(1) | parts | {"time/save_s": 2.0})
            console.update({**EVALUATION, **measured})
        shown = CONTROL.sub("", file.getvalue())
        assert "held-out mean near reward 0.375 after batch 4" in shown
        if isinstance(file, Terminal):
            view = shown[shown.rindex("run ") :]
            found = re.findall(r"(near|exact|held-out mean near reward) +([0-9.]+)", view)
            assert found == [("held-out mean near reward", "0.375"), ("near", "0.125"), ("exact", "0.750")]
            assert "sample 30%  ■ train 10%  (policy 8%)  ■ evaluate 40%  ■ save 20%" in view
        else:
            assert "reward 0.500  near 0.125  exact 0.750  entropy" in shown


def test_the_last_step_always_has_its_line():
    file = io.StringIO()
    play(file, num_steps=8)
    assert "reinforcement 8/8  reward 0.500  entropy 0.750  speed 8,123 tokens/s  0:24\n" in file.getvalue()


@pytest.mark.parametrize("width", [40, 90])
def test_the_live_view_fits_the_terminal(monkeypatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    play(file)
    shown = CONTROL.sub("", file.getvalue()).replace("\r", "\n")
    view = shown[shown.rindex("quickstart-1") :]
    assert all(len(line) <= width for line in shown.split("\n"))
    for part in (
        "4/8",
        "0:12 left",
        "accuracy",
        "0.625",
        "reward",
        "0.500",
        "8,123 tokens/s",
        "sample 75%",
        "(policy 19%)",
    ):
        assert part in view
    assert "checkpoint 4 saved" in shown


def test_a_terminal_of_twenty_columns_does_not_stop_a_run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    play(file)
    assert "0.625 after batch 4" in CONTROL.sub("", file.getvalue())


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    play(file)
    assert "\x1b" not in file.getvalue() and "reinforcement 1/8" in file.getvalue()


def test_quiet_prints_nothing():
    for file in (io.StringIO(), Terminal()):
        play(file, quiet=True)
        assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("file", "times", "shown"),
    [(Terminal(), (9, 12), 1), (Terminal(), (9,), 0), (Terminal(), (12, 0), 0), (io.StringIO(), (9, 12), 0)],
)
def test_a_long_wait_is_shown_in_a_terminal_while_it_lasts(monkeypatch, file, times, shown):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    with Console("quickstart-1", [], file=file, clock=lambda: now[0]) as console:
        console.show_waits(lambda: f"waiting {now[0]:.0f} s of 600: trainer for batch 3" * (now[0] > 9))
        for now[0] in times:
            console.say("one line more")
    text = CONTROL.sub("", file.getvalue())
    # The last view stands.
    view = text[text.rindex("quickstart-1") :]
    assert view.count("╰─ waiting 12 s of 600: trainer for batch 3 ─") == shown


def test_text_is_neither_markup_nor_control_codes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for file in (io.StringIO(), Terminal()):
        with Console("[bold]run[/bold]", [], file=file) as console:
            console.say("[red]answer[/red] \x1b[2Jclears")
        assert r"[red]answer[/red] \x1b[2Jclears" in file.getvalue()
        assert "[bold]run[/bold]" in file.getvalue()
        assert "\x1b[2J" not in file.getvalue()


def test_letters_that_the_output_cannot_hold_are_escaped():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with Console("größe", [], file=file) as console:
        console.say("60 → 61")
    assert raw.getvalue().decode("ascii").splitlines() == [r"gr\xf6\xdfe", r"60 \u2192 61"]


def test_an_output_that_goes_away_silences_the_console_and_not_the_run():
    class Closed(io.StringIO):
        lines = 0

        def write(self, text: str) -> int:
            self.lines += 1
            if self.lines > 2:
                raise BrokenPipeError("the reader is gone")
            return super().write(text)

    file = Closed()
    play(file)
    assert file.getvalue().splitlines() == ["quickstart-1", "model: 0.9 M"]
    assert file.lines == 3, "after the first failure nothing more is tried"


def test_a_resumed_stage_counts_its_pace_from_its_first_record_on():
    now = [0.0]
    file = io.StringIO()
    with Console("run", [], file=file, clock=lambda: now[0]) as console:
        console.stage("reinforcement", 100, done=90)
        # Kernels are compiled in the first step.
        now[0] = 60.0
        console.update(reinforcement(91))
        now[0] = 72.0
        console.update(reinforcement(94))
    lines = file.getvalue().splitlines()
    assert "reinforcement: 100 steps, continued after 90" in lines
    assert lines[-2].startswith("reinforcement 91/100 ") and "left" not in lines[-2]
    assert lines[-1].endswith("0:24 left")


def test_a_number_that_is_not_finite_is_shown_and_breaks_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for file in (io.StringIO(), Terminal()):
        with Console("run", [], file=file) as console:
            console.stage("reinforcement", 2)
            console.update({**reinforcement(1, math.nan), "time/sample_s": math.inf})
        assert "nan" in file.getvalue()


def test_a_sparkline_shows_the_means_of_equal_stretches():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3, 3], 9) == "▄▄▄"
    assert sparkline([], 9) == ""


def test_seconds_are_written_as_a_clock():
    assert [clock_text(seconds) for seconds in (0.4, 59.6, 725, 11045)] == [
        "0:00",
        "1:00",
        "12:05",
        "3:04:05",
    ]
