"""Engines in processes that do what they did in a run, and events as the run heard them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.engines.recorded import ReplayError
from millrace.engines.subprocesses import ProcessRuntime
from millrace.eventlog.log import EventLog
from millrace.observability.sinks import Sink
from millrace.replay.compare import Comparison
from millrace.replay.recorded_log import Part, Replayed
from millrace.rollout.backend import Draw, Event, Lost, Record, Runtime, Wanted, named
from millrace.run.folder import RunFolder
from millrace.types import Prompt

# How long to wait before looking again whether the run's log says to hear something.
LOOK_S = 0.01


class Replaying:
    """A `backend.Runtime` over processes, whose events come together as they came together in a run.

    What an engine says too early is kept. Engines end and start where the log says that they were lost and
    joined.
    """

    def __init__(self, runtime: ProcessRuntime, score: Replayed, *, limit_s: float) -> None:
        """Nothing has happened.

        Args:
            runtime: of the processes.
            score: says what comes next.
            limit_s: nothing at all may be missing for longer; twice this, for the trainer may be at work.
        """
        self._runtime, self._score, self._limit_s = runtime, score, limit_s
        # What has happened and was not heard in the run so far.
        self._early: dict[str, Event] = {}
        # Of what is heard next, what has happened; and who is being started for it.
        self._batch: list[Event] = []
        self._starts = ""
        self._moved_s = self.now()

    def begin(self) -> None:
        """Have the engines do what they did in the run."""
        self._runtime.begin(self._score.script)

    def now(self) -> float:
        """Seconds of the processes' clock."""
        return self._runtime.now()

    def engines(self) -> list[str]:
        """Those that are alive."""
        return self._runtime.engines()

    def submit(self, engine: str, draws: Sequence[Draw]) -> None:
        """Begin to draw, when the engine did."""
        self._runtime.submit(engine, draws)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """End draws, when the engine did."""
        self._runtime.abort(engine, ids)

    def offer(self, version: int) -> None:
        """Copy the trainer's weights."""
        self._runtime.offer(version)

    def load(self, engine: str, version: int) -> None:
        """Load the trainer's weights, when the engine did."""
        self._runtime.load(engine, version)

    def lose(self, engine: str, reason: str) -> None:
        """Nobody is given up but by the log."""
        raise ReplayError(f"{engine} is given up, and in the run it was not: {reason}")

    def want(self, number: int) -> None:
        """Engines start and end where the log says that they joined and were lost."""

    def retire(self, engine: str) -> None:
        """Likewise."""

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts again."""
        self._runtime.judge(id, prompts, texts)

    def records(self) -> list[Record]:
        """The log has them already."""
        self._runtime.records()
        return []

    def close(self) -> None:
        """End every engine and reward."""
        self._runtime.close()

    def wait(self, timeout_s: float) -> list[Event]:
        """What the run heard next, once all of it has happened; nothing until it is its turn.

        Raises:
            ReplayError: it does not happen.
        """
        head = self._score.head
        if head is None or head["kind"] != "heard":
            self._moved_s = self.now()
            self._listen(min(timeout_s, LOOK_S))
            return []
        wanted = head["events"]
        while len(self._batch) < len(wanted):
            event = self._next(wanted[len(self._batch)])
            if event is not None:
                self._batch.append(event)
                self._moved_s = self.now()
            elif not self._listen(timeout_s):
                if self.now() > self._moved_s + 2 * self._limit_s:
                    missing = wanted[len(self._batch)]
                    raise ReplayError(
                        f"{self._score.place}: the run heard {missing!r} here; the replay waits in vain"
                    )
                return []
        batch, self._batch = self._batch, []
        return batch

    def _next(self, name: str) -> Event | None:
        """The event of this name, if it has happened or can be made to happen."""
        kind, _, rest = name.partition(" ")
        if kind == "lost":
            engine, _, reason = rest.partition(" ")
            if engine in self._runtime.engines():
                self._runtime.end(engine)
            return Lost(engine, reason)
        if kind == "wanted":
            number, _, reason = rest.partition(" ")
            return Wanted(int(number), reason)
        event = self._early.pop(name, None)
        if kind == "joined" and event is None and self._starts != rest:
            self._starts = rest
            self._runtime.start(rest)
        return event

    def _listen(self, timeout_s: float) -> bool:
        """Hear what happens; whether anything did."""
        events = self._runtime.wait(timeout_s)
        self._early.update((named(event), event) for event in events)
        if events:
            self._moved_s = self.now()
        return bool(events)


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A part of a run that another process repeats; a `run.run.Repeats`.

    Attributes:
        original: the run's folder.
        part: that is repeated.
    """

    original: RunFolder
    part: Part

    @property
    def threads(self) -> Sequence[int]:
        """Those of each rank; see `Part`."""
        return self.part.threads

    def over(self, stage: str, step: int) -> bool:
        """Whether the run has to leave here."""
        return self.part.over(stage, step)

    def logged(
        self, runtime: Runtime, path: Path, clock: Callable[[], float], *, limit_s: float
    ) -> tuple[Runtime, EventLog]:
        """A runtime and the log of its run, both of which follow the part that is repeated.

        Args:
            runtime: draws and judges.
            path: of the log.
            clock: its seconds.
            limit_s: see `Replaying`.
        """
        log = Replayed(path, clock, self.part)
        # Engines in this process do all in the order of calls.
        if isinstance(runtime, ProcessRuntime):
            runtime = Replaying(runtime, log, limit_s=limit_s)
        return runtime, log

    def comparison(self, folder: RunFolder) -> Sink:
        """Compares each record of the repetition with the run's."""
        return Comparison(self.original, folder)
