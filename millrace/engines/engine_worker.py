"""Worker process of one engine: it runs engine steps, and receives commands between two steps.

`handle.start` starts it with one argument in JSON. It ends when the trainer closes the connection, and its
keeper kills it when the trainer process dies.
"""

from __future__ import annotations

import json
import select
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from millrace.engines.build_engine import open_engine
from millrace.engines.handle import EngineStart
from millrace.engines.recorded import LETTERS
from millrace.engines.wire import ORDERS, Channel, Frame, drawn_as_frame, draws_of
from millrace.inference.engine import KvPolicy, PagedEngine
from millrace.inference.request import Request
from millrace.transport.local import WeightSyncError
from millrace.transport.shared_memory import MappedWeights
from millrace.transport.sync import Note, WeightReceiver
from millrace.types import Completion

# Heartbeat interval of a busy engine; a longer step delays the heartbeat.
BEAT_S = 1.0


def main(text: str) -> None:
    """Run an engine until the trainer closes the connection.

    Args:
        text: the fields of `EngineStart` as JSON.
    """
    start = EngineStart(**json.loads(text))
    torch.set_num_threads(start.threads)
    try:
        engine = open_engine(Path(start.folder))
    finally:
        shutil.rmtree(start.folder)
    line = Channel(socket.socket(fileno=start.line), ORDERS)
    EngineWorker(engine, line, start.weights, kv=start.kv, interrupt=start.interrupt).serve()


class EngineWorker:
    """An engine that executes the commands of its connection."""

    def __init__(
        self,
        engine: PagedEngine,
        line: Channel,
        weights: int,
        *,
        kv: KvPolicy,
        interrupt: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to serve; generation starts after the first weights are loaded and verified.

        Args:
            engine: owned from now on.
            line: connection to the trainer.
            weights: descriptor of the shared memory for weight updates.
            kv: see `PagedEngine.load_weights`.
            interrupt: see `EngineSettings`.
            clock: monotonic time in seconds.
        """
        self._clock = clock
        self._engine, self._line, self._interrupt = engine, line, interrupt
        self._carrier = MappedWeights(weights, self._answer)
        self._receiver = WeightReceiver(
            self._carrier, partial(engine.load_weights, kv=kv), engine.fingerprint, engine.logprobs_of
        )
        self._proved, self._load_waits = False, False
        self._num_steps, self._num_turns, self._last_word_s = 0, 0, 0.0
        # Frames that were received and not yet executed; (turn, number of commands) that is not yet reported.
        self._inbox: list[Frame] = []
        self._took: list[tuple[int, int]] = []
        # Replay only: (turn, number of commands to start before it).
        self._script: deque[tuple[int, int]] = deque()
        # Engine step at the start of each unfinished request, by id.
        self._began: dict[str, int] = {}
        # Submits, and aborts after them, that are deferred until the weight update.
        self._held_back: list[Frame] = []
        self._orders: dict[str, Callable[[Frame], None]] = {
            "submit": self._submit,
            "abort": self._abort,
            "load": self._order_load,
        }

    def serve(self) -> None:
        """Execute commands and engine steps until the trainer closes the connection."""
        self._say("ready")
        while not self._line.ended:
            frames = self._mail()
            if count := sum(frame.kind in LETTERS for frame in frames):
                self._took.append((self._num_turns, count))
            for frame in frames:
                self._orders[frame.kind](frame)
            # Without verified weights no in-flight request can finish, so loading does not wait for them.
            loads = self._load_waits and (self._interrupt or not self._began or not self._proved)
            if loads:
                self._load()
            steps = self._works
            if steps:
                self._step()
            # An engine is a deterministic function of its turns and of the commands started before each turn.
            self._num_turns += loads or steps

    @property
    def _works(self) -> bool:
        return self._proved and self._engine.has_work

    def _mail(self) -> list[Frame]:
        """Return the received frames, in a replay those that are scheduled for this turn; block if idle."""
        busy = self._works or self._load_waits
        self._read(0 if busy or self._script else None)
        if self._inbox and self._inbox[0].kind == "begin":
            self._begin(self._inbox.pop(0))
        count = len(self._inbox)
        if self._script:
            turn, count = self._script[0]
            if self._num_turns < turn:
                if not busy:
                    raise RuntimeError(
                        f"the replay is not the run: turn {self._num_turns} has nothing to do, and the next "
                        f"order came before turn {turn}"
                    )
                return []
            while len(self._inbox) < count and not self._line.ended:
                self._read(BEAT_S)
                self._beat()
            self._script.popleft()
        frames, self._inbox = self._inbox[:count], self._inbox[count:]
        return frames

    def _read(self, timeout_s: float | None) -> None:
        write = [self._line] if self._line.unsent else []
        select.select([self._line], write, [], timeout_s)
        self._line.flush()
        self._inbox += self._line.take()

    def _begin(self, frame: Frame) -> None:
        """Reset the counters; nothing may be in flight. In a replay, set the recorded schedule."""
        self._num_steps, self._num_turns, self._took = 0, 0, []
        self._script = deque((turn, count) for turn, count in frame.note["script"])

    def _submit(self, frame: Frame) -> None:
        if self._load_waits and not self._interrupt:
            self._held_back.append(frame)
            return
        for draws in draws_of(frame):
            ids = [draw.id for draw in draws]
            try:
                params, drawn = [draw.params for draw in draws], [draw.drawn for draw in draws]
                self._engine.add(draws[0].prompt, params, ids=ids, drawn=drawn)
            except ValueError as error:  # an invalid request is the caller's error
                self._say("refused", {"ids": ids, "reason": str(error)})
            else:
                self._began.update(dict.fromkeys(ids, self._num_steps))

    def _abort(self, frame: Frame) -> None:
        if self._held_back:
            self._held_back.append(frame)
        ended = [(id, self._engine.abort(id)) for id in frame.note["ids"]]
        self._tell_drawn([(id, completion) for id, completion in ended if completion is not None])

    def _order_load(self, frame: Frame) -> None:
        self._carrier.note = dict(frame.note)
        self._load_waits = True

    def _load(self) -> None:
        self._load_waits, self._proved = False, False
        # The reply holds the error. Generation pauses until a weight update is verified.
        with suppress(WeightSyncError):
            self._receiver.receive()
            self._proved = True
        held_back, self._held_back = self._held_back, []
        for frame in held_back:
            self._orders[frame.kind](frame)

    def _answer(self, note: Note) -> None:
        self._say("loaded", {"version": self._carrier.note["version"], "at": self._num_steps, **note})

    def _step(self) -> None:
        touched = self._engine.step()
        self._num_steps += 1
        ended = [request for request in touched if request.finish_reason is not None]
        if ended:
            self._tell_drawn(self._completions(ended))
        else:
            self._beat()

    def _beat(self) -> None:
        if not self._line.unsent and self._clock() > self._last_word_s + BEAT_S:
            self._say("beat")

    def _completions(self, ended: Sequence[Request]) -> list[tuple[str, Completion]]:
        texts: dict[tuple[int, ...], str] = {}
        return [(request.id, self._engine.completion(request, texts)) for request in ended]

    def _tell_drawn(self, ended: Sequence[tuple[str, Completion]]) -> None:
        drawn = [(id, self._began.pop(id), self._num_steps, completion) for id, completion in ended]
        if drawn:
            self._say("drawn", *drawn_as_frame(drawn))

    def _say(
        self, kind: str, note: Note | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Send a report with the commands that were started since the last report."""
        self._last_word_s = self._clock()
        took, self._took = self._took, []
        self._line.put(kind, {**(note or {}), "took": took}, arrays)


if __name__ == "__main__":
    main(sys.argv[1])
