"""Worker process of one engine: it runs engine steps, and receives commands between two steps.

`handle.start` starts it. It ends when the trainer closes the connection, and its keeper kills it when the
trainer process dies.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from millrace.engines.build_engine import open_engine
from millrace.engines.wire import COMMANDS, Channel, Frame
from millrace.inference.engine import KvPolicy, PagedEngine
from millrace.inference.request import Request
from millrace.processes.worker import WorkerChannel
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import pack_results, unpack_requests
from millrace.transport.shared_memory import MappedWeights, WeightManifest
from millrace.transport.weight_update import WeightReceiver, WeightSyncError
from millrace.types import Completion

# Heartbeat interval of a busy engine; a longer step delays the heartbeat.
HEARTBEAT_S = 1.0


def serve(channel: WorkerChannel, settings: Mapping[str, Any]) -> None:
    """Run an engine until the trainer closes the connection.

    The settings are those of `EngineSettings`, whose files are in `folder` until they are read, and the
    inherited descriptor of the shared memory `weights`.
    """
    engine, connection = open_worker(channel, settings, COMMANDS)
    kv, interrupt = settings["kv"], settings["interrupt"]
    EngineWorker(engine, connection, settings["weights"], kv=kv, interrupt=interrupt).serve()


def open_worker(
    channel: WorkerChannel, settings: Mapping[str, Any], kinds: Collection[str]
) -> tuple[PagedEngine, Channel]:
    """Build the engine of this process, with random weights, and the connection that takes these commands."""
    torch.set_num_threads(settings["threads"])
    try:
        engine = open_engine(Path(settings["folder"]))
    finally:
        shutil.rmtree(settings["folder"])
    return engine, Channel(channel.connection, channel.key, kinds)


def add_samples(engine: PagedEngine, requests: Sequence[GenerateRequest], *, priority: int = 0) -> str:
    """Add the samples of one prompt to an engine; return why it refuses them, which is the caller's error."""
    try:
        engine.add(
            requests[0].prompt,
            [request.params for request in requests],
            ids=[request.id for request in requests],
            partial_outputs=[request.partial_output for request in requests],
            priority=priority,
        )
    except ValueError as error:
        return str(error)
    return ""


class EngineWorker:
    """An engine that executes the commands of its connection."""

    def __init__(
        self,
        engine: PagedEngine,
        channel: Channel,
        weights: int,
        *,
        kv: KvPolicy,
        interrupt: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to serve; generation starts after the first weights are loaded and verified."""
        self._clock = clock
        self._engine, self._channel, self._interrupt = engine, channel, interrupt
        self._transport = MappedWeights(weights, self._report_loaded)
        self._receiver = WeightReceiver(
            self._transport, partial(engine.update_weights, kv=kv), engine.fingerprint, engine.logprobs_of
        )
        self._verified, self._update_pending = False, False
        self._num_steps, self._num_turns, self._last_message_s = 0, 0, 0.0
        # Frames that were received and not yet executed; (turn, commands) that are not yet reported.
        self._inbox: list[Frame] = []
        self._started: list[tuple[int, list[str]]] = []
        # Replay only: (turn, commands to start before it).
        self._recorded: deque[tuple[int, list[str]]] | None = None
        # Engine step at the start of each unfinished request, by id.
        self._start_steps: dict[str, int] = {}
        # Submits, and aborts after them, that are deferred until the weight update.
        self._deferred: list[Frame] = []
        self._handlers: dict[str, Callable[[Frame], None]] = {
            "submit": self._submit,
            "blocking_submit": self._submit,
            "abort": self._abort,
            "update_weights": self._request_update,
        }

    def serve(self) -> None:
        """Execute commands and engine steps until the trainer closes the connection."""
        self._send("ready")
        while not self._channel.ended:
            frames = self._next_commands()
            if started := [frame.kind for frame in frames if frame.kind in COMMANDS]:
                self._started.append((self._num_turns, started))
            for frame in frames:
                self._handlers[frame.kind](frame)
            # Without verified weights no in-flight request can finish, so loading does not wait for them.
            updates = self._update_pending and (
                self._interrupt or not self._start_steps or not self._verified
            )
            if updates:
                self._update_weights()
            steps = self._busy
            if steps:
                self._step()
            # An engine is a deterministic function of its turns and of the commands started before each turn.
            self._num_turns += updates or steps

    @property
    def _busy(self) -> bool:
        return self._verified and self._engine.has_work

    def _next_commands(self) -> list[Frame]:
        """Return the received commands, in a replay those recorded for this turn; block if idle."""
        busy = self._busy or self._update_pending
        self._read(0 if busy or self._recorded else None)
        if self._inbox and self._inbox[0].kind == "restart_turns":
            self._restart_turns(self._inbox.pop(0))
        if self._recorded:
            return self._recorded_commands(busy)
        frames, self._inbox = self._inbox, []
        if self._recorded is not None:
            # The run recorded no start of further commands, so no recorded report depends on them; here they
            # might start too early. But callers wait for blocking requests.
            frames = [frame for frame in frames if frame.kind == "blocking_submit"]
        return frames

    def _recorded_commands(self, busy: bool) -> list[Frame]:
        """Return the commands that the recorded engine started before this turn, in its order."""
        assert self._recorded
        turn, kinds = self._recorded[0]
        if self._num_turns < turn:
            if not busy:
                raise RuntimeError(
                    f"the replay is not the run: turn {self._num_turns} has nothing to do, and the next "
                    f"order came before turn {turn}"
                )
            return []
        frames: list[Frame] = []
        while len(frames) < len(kinds) and not self._channel.ended:
            # Blocking requests come from another thread than the rest, so only these may overtake each other.
            kind = kinds[len(frames)]
            place = self._first(blocking=kind == "blocking_submit")
            if place is None:
                self._read(HEARTBEAT_S)
                self._send_heartbeat()
                continue
            frames.append(self._inbox.pop(place))
            if frames[-1].kind != kind:
                raise RuntimeError(f"the replay is not the run: it gets {frames[-1].kind} and started {kind}")
        self._recorded.popleft()
        return frames

    def _first(self, *, blocking: bool) -> int | None:
        kinds = [frame.kind == "blocking_submit" for frame in self._inbox]
        return kinds.index(blocking) if blocking in kinds else None

    def _read(self, timeout_s: float | None) -> None:
        self._inbox += self._channel.wait(timeout_s)

    def _restart_turns(self, frame: Frame) -> None:
        """Reset the counters; nothing may be in flight."""
        self._num_steps, self._num_turns, self._started = 0, 0, []
        recorded = frame.metadata["recorded"]
        self._recorded = None if recorded is None else deque((turn, kinds) for turn, kinds in recorded)

    def _submit(self, frame: Frame) -> None:
        if self._update_pending and not self._interrupt:
            self._deferred.append(frame)
            return
        for requests in frame.unpack(unpack_requests):
            ids = [request.id for request in requests]
            if reason := add_samples(self._engine, requests):
                self._send("refused", {"ids": ids, "reason": reason})
            else:
                self._start_steps.update(dict.fromkeys(ids, self._num_steps))

    def _abort(self, frame: Frame) -> None:
        if self._deferred:
            self._deferred.append(frame)
        ended = [(id, self._engine.abort(id)) for id in frame.metadata["ids"]]
        self._send_results([(id, completion) for id, completion in ended if completion is not None])

    def _request_update(self, frame: Frame) -> None:
        self._transport.expect(cast("WeightManifest", frame.metadata))
        self._update_pending = True

    def _update_weights(self) -> None:
        self._update_pending, self._verified = False, False
        # The reply holds the error. Generation pauses until a weight update is verified.
        with suppress(WeightSyncError):
            self._receiver.update_weights()
            self._verified = True
        deferred, self._deferred = self._deferred, []
        for frame in deferred:
            self._handlers[frame.kind](frame)

    def _report_loaded(self, error: str, verify_s: float) -> None:
        version = self._transport.manifest["version"]
        report = {"version": version, "at": self._num_steps, "error": error, "verify_s": verify_s}
        self._send("weights_loaded", report)

    def _step(self) -> None:
        touched = self._engine.step()
        self._num_steps += 1
        ended = [request for request in touched if request.finish_reason is not None]
        if ended:
            self._send_results(self._completions(ended))
        else:
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        if not self._channel.unsent and self._clock() > self._last_message_s + HEARTBEAT_S:
            self._send("heartbeat")

    def _completions(self, ended: Sequence[Request]) -> list[tuple[str, Completion]]:
        texts: dict[tuple[int, ...], str] = {}
        return [(request.id, self._engine.completion(request, texts)) for request in ended]

    def _send_results(self, ended: Sequence[tuple[str, Completion]]) -> None:
        results = [(id, self._start_steps.pop(id), self._num_steps, completion) for id, completion in ended]
        if results:
            self._send("completed", *pack_results(results))

    def _send(
        self,
        kind: str,
        metadata: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Send a report with the commands that were started since the last report."""
        self._last_message_s = self._clock()
        started, self._started = self._started, []
        self._channel.send(kind, {**(metadata or {}), "commands_started": started}, arrays)
