"""The engines' processes of a run: one that is lost is replaced, unless that came to nothing too often."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.orchestration.runtime.base import (
    RETIRED,
    Draw,
    Drawn,
    Event,
    Joined,
    Loaded,
    Lost,
    Record,
    Wanted,
)
from millrace.orchestration.runtime.child import Child, Settings, StartChild, start
from millrace.orchestration.runtime.direct import Direct
from millrace.orchestration.runtime.frames import Frame, FrameError, drawn_of, draws_as_frame
from millrace.orchestration.runtime.ray_room import RayTrainerError
from millrace.orchestration.runtime.script import PREFIX, ReplayError, Script, number_of


class EngineFailed(RuntimeError):
    """No engine can be had any more, or none was ready in time; the message says why."""


class Children:
    """Engines of one runtime. Whoever calls holds the lock of a `ProcessRuntime`.

    Attributes:
        living: those that are not lost by name, in the order in which they were started.
        wanted: so many, those included that are being started and not those that leave.
        opened: every first engine has started; until then, one that is lost is not replaced.
        direct: draws whose caller waits.
        records: of what engines were asked for such callers, and took up; None before `begin`.
        script: what engines do in a replay, where none may be lost and others are started by name.
    """

    def __init__(
        self,
        settings: Settings,
        weights: int,
        tell: Callable[[Event], None],
        *,
        silence_s: float,
        max_barren: int,
        start: StartChild = start,
        clock: Callable[[], float],
    ) -> None:
        """No engine yet.

        Args:
            settings: of each engine.
            weights: descriptor of the memory through which weights come.
            tell: is told what happens.
            silence_s: an engine that works and is not heard of for so long is lost.
            max_barren: so many engines may be lost one after the other in one place without having drawn.
            start: makes them.
            clock: seconds, never going back.
        """
        self._start, self._clock = start, clock
        self.living: dict[str, Child] = {}
        self.wanted, self.opened = 0, False
        self.direct = Direct()
        self.records: list[Record] | None = None
        self.script: Script | None = None
        self._settings, self._weights, self._tell = settings, weights, tell
        self._silence_s, self._max_barren = silence_s, max_barren
        self._num_started = 0

    def start(self, num_barren: int = 0, *, added: bool = False, name: str = "") -> None:
        """Start one engine more, after so many that were lost without having drawn anything.

        Args:
            num_barren: so many.
            added: see `Child`.
            name: in a replay, what it is called.

        Raises:
            OSError, RayTrainerError: there is no room for it.
        """
        name = name or f"engine-{self._num_started}"
        self._num_started += 1
        child = self.living[name] = self._start(
            name, self._settings, self._weights, num_barren=num_barren, clock=self._clock
        )
        child.added = added
        if self.script is not None:
            child.begin(self.script)

    def want(self, number: int) -> None:
        """Have so many engines from now on; those that are too many and have started are for `retire`.

        Raises:
            OSError, RayTrainerError: there is no room for the first ones.
        """
        self.wanted = number
        for child in reversed(self._staying):
            if not child.ready and len(self._staying) > number:
                self.end(child)
        self._fill(added=self.opened)

    def retire(self, engine: str) -> None:
        """End an engine, unless it is lost, once it has drawn what somebody waits for."""
        if (child := self.living.get(engine)) is None:
            return
        child.leaves = True
        self._let_go(child)
        # Another one may have been lost meanwhile.
        self._fill()

    def watch(self, poll: select.poll) -> None:
        """Have `poll` end when an engine says something, or its line takes what waits in it."""
        for child in self.living.values():
            poll.register(child.line, select.POLLIN | (select.POLLOUT if child.line.unsent else 0))

    def begin(self, script: Script | None) -> None:
        """Keep records from here on, nothing being under way; in a replay, have engines follow a script."""
        self.records, self.direct, self.script = [], Direct(), script
        for child in self.living.values():
            child.begin(script)

    def ask(self, engine: str, draws: Sequence[Draw], *, direct: bool) -> None:
        """Have an engine draw, unless it is lost; keep a record of draws whose caller waits."""
        if direct and self.records is not None:
            numbers = [number_of(draw.id) for draw in draws]
            self.records.append(("asked", {"engine": engine, "draws": numbers}))
        child = self.living.get(engine)
        if child is not None:
            child.give("submit", *draws_as_frame(draws), direct=direct)
            child.drawing.update(draw.id for draw in draws)

    def hear(self) -> None:
        """Take in what engines have said; those that are dead, late or not understood are lost.

        Raises:
            EngineFailed, ReplayError: as `lose`.
            ValueError: a draw for which nobody waits cannot be served.
        """
        for child in list(self.living.values()):
            reason = ""
            try:
                for frame in child.line.take():
                    child.heard_s = self._clock()
                    self._handle(child, frame)
                    if child.name not in self.living:
                        break
            except FrameError as error:
                reason = str(error)
            if child.name not in self.living:
                continue
            child.line.flush()
            if child.line.ended or child.process.poll() is not None:
                reason = reason or child.obituary()
            reason = reason or child.overdue(self._silence_s)
            if reason:
                self.lose(child, reason)
            else:
                self._let_go(child)

    def _handle(self, child: Child, frame: Frame) -> None:
        orders = child.took(frame.note.get("took", ()))
        if orders and self.records is not None:
            self.records.append(("took", {"engine": child.name, "orders": orders}))
        if frame.kind == "ready":
            child.ready = True
            if self.opened:
                self._tell(Joined(child.name))
        elif frame.kind == "drawn":
            for id, began, ended, completion in drawn_of(frame):
                child.drawing.discard(id)
                child.num_drawn += 1
                if not id.startswith(PREFIX):
                    self._tell(Drawn(child.name, id, completion, began, ended))
                elif self.script is None or self.script.heard(child.name, id):
                    self.direct.answer(id, completion)
        elif frame.kind == "loaded":
            self._loaded(child, frame.note)
        elif frame.kind == "refused":
            error = ValueError(frame.note["reason"])
            child.drawing.difference_update(frame.note["ids"])
            answered = [self.direct.answer(id, error) for id in frame.note["ids"]]
            if not all(answered):
                raise error

    def _loaded(self, child: Child, note: Mapping[str, Any]) -> None:
        order = child.order
        assert order is not None
        if not note["error"]:
            child.held, child.order = order, None
            if child.announce:
                child.announce = False
                self._tell(Loaded(child.name, order["version"], note["at"]))
        elif child.failed_once:
            self.lose(child, f"it could not load version {order['version']}: {note['error']}")
        else:
            child.failed_once = True
            child.give("load", order)

    def lose(self, child: Child, reason: str) -> None:
        """End an engine, and start another one in its place, if one is missing then.

        Raises:
            EngineFailed: one of the first has not started, or too many in this place came to nothing.
            ReplayError: there is a script.
        """
        reason += child.last_words()
        self.end(child)
        if self.script is not None:
            raise ReplayError(f"{child.name} is lost, and in the run it was not lost here: {reason}")
        if not self.opened:
            raise EngineFailed(f"{child.name} could not be started: {reason}")
        if child.ready:
            self._tell(Lost(child.name, reason))
        if len(self._staying) >= self.wanted:
            return
        added = child.added and not child.num_drawn
        num_barren = 0 if child.num_drawn else child.num_barren + 1
        if added and not child.ready and self._staying:
            self._do_without(f"{child.name} could not be started: {reason}")
        elif num_barren > self._max_barren:
            why = (
                f"{num_barren} engines were lost one after the other before they had drawn anything, at last "
                f"{child.name}: {reason}"
            )
            if not (added and self._staying):
                raise EngineFailed(why)
            self._do_without(why)
        self._fill(num_barren, added=added)

    def end(self, child: Child) -> None:
        """End an engine, without a word."""
        del self.living[child.name]
        child.kill()

    @property
    def _staying(self) -> list[Child]:
        return [child for child in self.living.values() if not child.leaves]

    def _fill(self, num_barren: int = 0, *, added: bool = False) -> None:
        """Start what is missing; where others go on, what there is no room for is done without."""
        while len(self._staying) < self.wanted:
            try:
                self.start(num_barren, added=added)
            except (OSError, RayTrainerError) as error:
                if not (self.opened and self._staying):
                    raise
                self._do_without(str(error))

    def _do_without(self, reason: str) -> None:
        self.wanted = len(self._staying)
        self._tell(Wanted(self.wanted, reason))

    def _let_go(self, child: Child) -> None:
        if child.leaves and not child.drawing:
            self.end(child)
            self._tell(Lost(child.name, RETIRED))

    def owes(self, engine: str) -> bool:
        """Whether somebody waits for draws that this engine made in the run, or will ask for such."""
        return self.script is not None and self.script.open(engine, self.direct.open)

    def close(self) -> None:
        """End every engine."""
        while self.living:
            self.living.popitem()[1].kill()
