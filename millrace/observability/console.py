"""Live view of a run in a terminal; plain lines without a terminal."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from millrace.observability.measure import measure_words, set_line, set_values
from millrace.observability.plain import plain_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

PLAIN_EVERY_S = 10.0
SPARK = "▁▂▃▄▅▆▇█"
SPARK_LENGTH = 200
# Maximum characters of one printed line.
MAX_LINE = 5000
# Key of the curve of the evaluation metric.
MEASURED = "measured"
# Metric, what a person calls it, and how it is written.
NUMBERS = (
    ("loss", "loss", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("length/mean", "length", "{:.0f} tokens"),
    ("time/tokens_per_s", "speed", "{:,.0f} tokens/s"),
)
# Beginning of the keys of the parts of `train`.
TRAIN_PARTS = "time/train/"
PARTS = (
    ("sample", "cyan"),
    ("score", "yellow"),
    ("environment", "bright_yellow"),
    ("train", "magenta"),
    ("weight_sync", "green"),
    ("evaluate", "blue"),
    ("save", "red"),
    ("report", "bright_magenta"),
    ("start", "white"),
    ("rollout_manager", "bright_cyan"),
    ("bookkeeping", "bright_blue"),
    ("other", "bright_black"),
)


@dataclass(slots=True)
class _Stage:
    name: str
    total: int
    done: int
    start_s: float
    first: tuple[int, float] | None = None
    end_s: float | None = None


class Console:
    """Shows the progress of a run; use it as a context manager.

    In a terminal: progress with the time left, the current metrics, curves of the reward and of the
    evaluation metric, and the time breakdown, with permanent lines above. Elsewhere: a plain line at most
    every 10 s and for each evaluation, without control codes. If the terminal goes away, the console stops
    writing; the run continues.

    `facts` are pairs such as `("model", "0.9 M parameters")`; the clock is monotonic, in seconds.
    """

    def __init__(
        self,
        title: str,
        facts: list[tuple[str, str]],
        *,
        file: TextIO | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = _clean(title)
        self._facts = [(_clean(name), _clean(value)) for name, value in facts]
        self._file = file or sys.stdout
        self._quiet = quiet
        self._clock = clock
        self._waiting: Callable[[], str] = str
        self._live: Live | None = None
        self._width: Callable[[], int] = lambda: 80
        self._stages: tuple[_Stage, ...] = ()
        self._numbers: dict[tuple[str, str, str], float] = {}
        self._curves: dict[str, tuple[float, ...]] = {}
        self._measure = ""
        self._seconds: dict[str, float] = {}
        self._train_parts: dict[str, float] = {}
        self._last_line_s = -math.inf

    def show_waits(self, line: Callable[[], str]) -> None:
        """Show a line about the longest pending wait, unless it is empty; it is called at each refresh."""
        self._waiting = line

    def __enter__(self) -> Console:
        if self._quiet:
            return self
        if self._has_terminal():
            from rich.console import Console as Terminal
            from rich.live import Live

            terminal = Terminal(file=self._file, force_terminal=True, highlight=False)
            self._live = Live(get_renderable=self._view, console=terminal, refresh_per_second=4)
            self._width = lambda: terminal.width
            self._live.start()
        else:
            self._line(self._title)
            if self._facts:
                self._line("  ".join(f"{name}: {value}" for name, value in self._facts))
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            self._attempt(live.stop)

    def stage(self, name: str, total: int, done: int = 0) -> None:
        """Begin a stage of `total` steps, `done` of which were completed before a resume."""
        now = self._clock()
        self._end_stage(now)
        self._stages = (*self._stages, _Stage(_clean(name), total, done, now))
        self._numbers, self._seconds, self._train_parts = {}, {}, {}
        self._last_line_s = -math.inf
        if self._live is None and not self._quiet:
            self._line(f"{name}: {total} steps" + (f", continued after {done}" if done else ""))

    def update(self, record: Mapping[str, float | int | str]) -> None:
        """Process one record of metrics; an evaluation prints a permanent line."""
        self._seconds = {
            part: self._seconds.get(part, 0.0) + _finite(record.get(f"time/{part}_s", 0.0))
            for part, _ in PARTS
        }
        parts = {key: value for key, value in record.items() if key.startswith(TRAIN_PARTS)}
        self._train_parts |= {
            key: self._train_parts.get(key, 0.0) + _finite(value) for key, value in parts.items()
        }
        if record["stage"] == "evaluation":
            self._measure = str(record["measure"])
            self._keep(MEASURED, record, self._measure)
            self.say(_evaluation_line(record), "bold green")
            for name, values in set_values(record).items():
                self.say(set_line(name, values, record), "green")
            return
        if self._stages:
            stage = self._stages[-1]
            stage.done = int(record["step"])
            stage.first = stage.first or (stage.done, self._clock())
            if stage.done >= stage.total:
                self._end_stage(self._clock())
        # New objects, never changed in place: another thread renders the view.
        self._numbers = {(key, name, form): float(record[key]) for key, name, form in _numbers_of(record)}
        for key, _, _ in self._numbers:
            if key.startswith("reward/"):
                self._keep(key, record, key)
        self._plain_progress()

    def say(self, text: str, style: str = "") -> None:
        """Print a permanent line without markup above a live view; styles are rich's, such as "yellow"."""
        if self._quiet:
            return
        if self._live is None:
            self._line(_clean(text))
            return
        from rich.text import Text

        live, line = self._live, Text(_clean(text), style=style)
        self._attempt(lambda: live.console.print(line))

    def _has_terminal(self) -> bool:
        from rich.console import Console as Terminal

        encoding = (getattr(self._file, "encoding", None) or "ascii").lower()
        is_terminal = self._file.isatty() and encoding.startswith("utf")
        return is_terminal and not Terminal(file=self._file, force_terminal=True).is_dumb_terminal

    def _end_stage(self, now: float) -> None:
        if self._stages and self._stages[-1].end_s is None:
            self._stages[-1].end_s = now

    def _keep(self, key: str, record: Mapping[str, float | int | str], metric: str) -> None:
        value = record.get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            self._curves = {**self._curves, key: (*self._curves.get(key, ()), float(value))[-SPARK_LENGTH:]}

    def _attempt(self, act: Callable[[], Any]) -> None:
        """If the terminal is gone, stop writing. The run and its metrics file continue."""
        try:
            act()
        except OSError:
            self._quiet, self._live = True, None

    def _line(self, text: str) -> None:
        if self._quiet:
            return
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        known = text.encode(encoding, "backslashreplace").decode(encoding)
        self._attempt(lambda: (self._file.write(f"{known}\n"), self._file.flush()))

    def _plain_progress(self) -> None:
        if self._live is not None or self._quiet or not self._stages:
            return
        now, stage = self._clock(), self._stages[-1]
        if now - self._last_line_s < PLAIN_EVERY_S and stage.done < stage.total:
            return
        self._last_line_s = now
        words = [f"{stage.name} {stage.done}/{stage.total}"]
        words += [f"{name} {form.format(value)}" for (_, name, form), value in self._numbers.items()]
        self._line("  ".join([*words, *filter(None, [_time_left(stage, now)])]))

    def _view(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        facts = Text("  ").join(
            Text.assemble((f"{name} ", "bright_black"), value) for name, value in self._facts
        )
        parts: list[RenderableType] = [facts, Text(), self._progress(), Text(), self._current()]
        if any(self._seconds.values()):
            parts += [Text(), self._time_fractions()]
        title = Text(f" {self._title} ", style="bold cyan")
        # In the border, so that nothing moves when it comes and goes.
        waiting = self._waiting()
        return Panel(
            Group(*parts),
            title=title,
            title_align="left",
            subtitle=Text(waiting, style="yellow") if waiting else None,
            subtitle_align="left",
            border_style="bright_black",
            padding=(1, 2),
        )

    def _progress(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, justify="right", style="bright_black")
        for stage in self._stages:
            bar = ProgressBar(
                total=stage.total, completed=stage.done, complete_style="cyan", finished_style="green"
            )
            table.add_row(stage.name, bar, f"{stage.done}/{stage.total}", _time_left(stage, self._clock()))
        return table

    def _current(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bright_black")
        table.add_column(no_wrap=True, style="bold")
        table.add_column(ratio=1, no_wrap=True, overflow="crop")
        # What the border, the names and the numbers leave for the curves.
        room = min(max(self._width() - 32, 4), 48)
        if measured := self._curves.get(MEASURED):
            words, curve = measure_words(self._measure), sparkline(measured, room)
            is_long = room > 24 and not self._measure.startswith("eval/")
            name = f"held-out {words}" if is_long else words
            table.add_row(name, f"{measured[-1]:.3f}", Text(curve, style="green"))
        for (key, name, form), value in self._numbers.items():
            curve = sparkline(self._curves.get(key, ()), room)
            table.add_row(name, form.format(value), Text(curve, style="cyan"))
        return table

    def _time_fractions(self) -> Text:
        from rich.text import Text

        total = sum(self._seconds.values())
        line = Text("time  ", style="bright_black")
        for part, style in PARTS:
            if seconds := self._seconds.get(part):
                line.append("■ ", style=style)
                line.append(f"{part} {100 * seconds / total:.0f}%  ", style="default")
            if part == "train" and self._train_parts:
                line.append(self._train_fractions(total), style="bright_black")
        return line

    def _train_fractions(self, total: float) -> str:
        """The parts of training, the largest first; what rounds to nothing is left out."""
        parts = sorted(self._train_parts.items(), key=lambda part: part[1], reverse=True)
        percents = [(key.removeprefix(TRAIN_PARTS)[:-2], round(100 * spent / total)) for key, spent in parts]
        words = [f"{name} {percent}%" for name, percent in percents if percent]
        return f"({', '.join(words)})  " if words else ""


def sparkline(values: Sequence[float], length: int) -> str:
    """A curve in one line of text: at most `length` characters, the means of equal stretches of `values`."""
    if not values:
        return ""
    length = min(length, len(values))
    edges = [len(values) * n // length for n in range(length + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high == low:
        return SPARK[3] * length
    return "".join(SPARK[round((mean - low) / (high - low) * (len(SPARK) - 1))] for mean in means)


def clock_text(seconds: float) -> str:
    """Seconds as a person reads them: 0:42, 12:05, 3:04:05."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def _time_left(stage: _Stage, now: float) -> str:
    """Without the first step, in which kernels may be compiled; empty while it is unknown."""
    if stage.end_s is not None:
        return clock_text(stage.end_s - stage.start_s)
    if stage.first is None or stage.done <= stage.first[0]:
        return ""
    done, since_s = stage.first
    pace_s = (now - since_s) / (stage.done - done)
    return f"{clock_text(pace_s * (stage.total - stage.done))} left"


def _evaluation_line(record: Mapping[str, float | int | str]) -> str:
    measure = str(record["measure"])
    done = f"step {record['step']} of SFT" if record["during"] == "sft" else f"batch {record['step']}"
    held_out = "" if measure.startswith("eval/") else "held-out "
    words = [f"{held_out}{measure_words(measure)} {float(record[measure]):.3f} after {done}"]
    if "time/wall_s" in record:
        words.append(f"at {clock_text(float(record['time/wall_s']))}")
    return ", ".join(words)


def _numbers_of(record: Mapping[str, float | int | str]) -> Iterator[tuple[str, str, str]]:
    for key, name, form in NUMBERS:
        if key in record:
            yield key, name, form
        if key == "reward/mean":
            parts = [part for part in record if re.fullmatch("reward/[^/]+/mean", part)]
            yield from ((part, _clean(part.split("/")[1]), form) for part in parts)


def _finite(value: float | int | str) -> float:
    return float(value) if math.isfinite(float(value)) else 0.0


def _clean(text: str) -> str:
    """With control characters, which could move the cursor or recolour the terminal, as escapes."""
    return "\n".join(plain_text(line, MAX_LINE) for line in text.split("\n"))
