"""Engines in subprocesses, which generate while the trainer trains; scoring runs in a thread of this process.

`EngineSupervisor` starts and replaces the processes, `BlockingRequests` keeps the blocking requests. One
thread receives the messages of all engines, and every wait is for something that this thread has processed.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Self

from millrace.engines.handle import START_S, EngineHandle, EngineSettings, StartEngine, start
from millrace.engines.ray_placement import RayTrainerError
from millrace.engines.recorded import PREFIX, RecordedCommands, ReplayError, request_number
from millrace.engines.wire import Frame, FrameError, requests_to_frame, results_from_frame
from millrace.inference.engine import RequestFailed
from millrace.protocols import NamedTensors, Reward
from millrace.rollout.backend import (
    DRAINED,
    EngineJoined,
    EngineLost,
    Event,
    GenerateRequest,
    GenerateResult,
    Record,
    ScaleRequest,
    ScoreResult,
    WeightsLoaded,
)
from millrace.transport.canary import Canary
from millrace.transport.shared_memory import SharedWeights
from millrace.transport.sync import Note
from millrace.types import Completion, Prompt, SamplingParams


class BlockingRequests:
    """Blocking requests and their results, by id."""

    def __init__(self) -> None:
        """Start without requests."""
        self._results: dict[str, Completion | ValueError | None] = {}
        self._num_requests = 0

    def add(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[GenerateRequest]:
        """Register one request per prompt; the caller submits them and ends with `forget`.

        Args:
            prompts: token ids of each prompt.
            params: sampling parameters of each prompt.
        """
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        first, self._num_requests = self._num_requests, self._num_requests + len(prompts)
        requests = [
            GenerateRequest(f"{PREFIX}{first + place}", tuple(prompt), one)
            for place, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        self._results.update({request.id: None for request in requests})
        return requests

    def complete(self, id: str, result: Completion | ValueError) -> bool:
        """Store the result of a request; return False if the id is unknown here.

        Args:
            id: of the request.
            result: its completion, or why it was refused.
        """
        known = id in self._results
        if known:
            self._results[id] = result
        return known

    @property
    def unfinished(self) -> list[str]:
        """Ids of the unfinished requests."""
        return [id for id, result in self._results.items() if result is None]

    def missing(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """Return those requests that have no result yet."""
        return [request for request in requests if self._results[request.id] is None]

    def forget(self, requests: Sequence[GenerateRequest]) -> list[Completion | ValueError | None]:
        """Remove requests and return their results, None where there is none."""
        return [self._results.pop(request.id) for request in requests]


def completions(results: Sequence[Completion | ValueError | None]) -> list[Completion]:
    """Convert results to the return value of `Engine.generate`.

    Raises:
        ValueError: a request was refused.
        RequestFailed: the model produced non-finite logits.
    """
    completed = []
    for place, one in enumerate(results):
        if isinstance(one, ValueError):
            raise ValueError(f"prompt {place} of {len(results)}: {one}") from None
        assert one is not None
        if one.finish_reason == "error":
            raise RequestFailed(f"prompt {place} of {len(results)} failed: {one.reason}")
        completed.append(one)
    return completed


class EngineFailed(RuntimeError):
    """No engine can be started any more, or none was ready in time; the message gives the reason."""


class EngineSupervisor:
    """Supervisor of the engine processes of one runtime. Callers hold the lock of the `SubprocessBackend`.

    Attributes:
        alive: handles of the engines that are alive, by name, in the order of their start.
        target: number of engines; starting ones count, draining ones do not.
        opened: whether all initial engines have started. Before that, a lost engine is not replaced.
        blocking: blocking requests.
        records: log of blocking requests and started commands; None before `begin`.
        recorded: recorded commands in a replay, where no engine may be lost and engines are started by name.
    """

    def __init__(
        self,
        settings: EngineSettings,
        weights: int,
        emit: Callable[[Event], None],
        *,
        heartbeat_s: float,
        max_restarts: int,
        start: StartEngine = start,
        clock: Callable[[], float],
    ) -> None:
        """Start without engines.

        Args:
            settings: settings shared by all engines.
            weights: descriptor of the shared memory for weight updates.
            emit: callback for events.
            heartbeat_s: heartbeat timeout of a busy engine; after it, the engine counts as lost.
            max_restarts: maximum number of consecutive restarts of an engine without a completion.
            start: starts an engine process.
            clock: monotonic time in seconds.
        """
        self._start, self._clock = start, clock
        self.alive: dict[str, EngineHandle] = {}
        self.target, self.opened = 0, False
        self.blocking = BlockingRequests()
        self.records: list[Record] | None = None
        self.recorded: RecordedCommands | None = None
        self._settings, self._weights, self._emit = settings, weights, emit
        self._heartbeat_s, self._max_restarts = heartbeat_s, max_restarts
        self._num_started = 0

    def start(self, num_failed_restarts: int = 0, *, added: bool = False, name: str = "") -> None:
        """Start one more engine.

        Args:
            num_failed_restarts: see `EngineHandle`.
            added: see `EngineHandle`.
            name: recorded name in a replay; otherwise the next free one is taken.

        Raises:
            OSError, RayTrainerError: there are too few resources for it.
        """
        name = name or f"engine-{self._num_started}"
        self._num_started += 1
        handle = self.alive[name] = self._start(
            name, self._settings, self._weights, num_failed_restarts=num_failed_restarts, clock=self._clock
        )
        handle.added = added
        if self.recorded is not None:
            handle.begin(self.recorded)

    def scale(self, number: int) -> None:
        """Scale to a number of engines; surplus engines that have started are left to `retire`.

        Raises:
            OSError, RayTrainerError: there are too few resources for the initial engines.
        """
        self.target = number
        for handle in reversed(self._serving):
            if not handle.ready and len(self._serving) > number:
                self.end(handle)
        self._start_missing(added=self.opened)

    def retire(self, engine: str) -> None:
        """Drain an engine: end it after its in-flight requests. Ignore a lost one."""
        if (handle := self.alive.get(engine)) is None:
            return
        handle.draining = True
        self._end_drained(handle)
        # Another engine may have been lost meanwhile.
        self._start_missing()

    def watch(self, poll: select.poll) -> None:
        """Register the engines' connections: readable always, writable where data is unsent."""
        for handle in self.alive.values():
            poll.register(handle.channel, select.POLLIN | (select.POLLOUT if handle.channel.unsent else 0))

    def begin(self, recorded: RecordedCommands | None) -> None:
        """Start recording; nothing may be in flight. In a replay, send engines their recorded schedule."""
        self.records, self.blocking, self.recorded = [], BlockingRequests(), recorded
        for handle in self.alive.values():
            handle.begin(recorded)

    def submit(self, engine: str, requests: Sequence[GenerateRequest], *, blocking: bool) -> None:
        """Submit requests to an engine, unless it is lost, and record blocking ones.

        Args:
            engine: its name.
            requests: the requests.
            blocking: whether they are blocking requests.
        """
        if blocking and self.records is not None:
            numbers = [request_number(request.id) for request in requests]
            self.records.append(("blocking_request", {"engine": engine, "requests": numbers}))
        handle = self.alive.get(engine)
        if handle is not None:
            handle.send("submit", *requests_to_frame(requests), blocking=blocking)
            handle.in_flight.update(request.id for request in requests)

    def receive(self) -> None:
        """Process received messages; an engine that is dead, overdue or sends invalid frames is lost.

        Raises:
            EngineFailed, ReplayError: see `lose`.
            ValueError: an engine refused a request that is not a blocking one.
        """
        for handle in list(self.alive.values()):
            reason = ""
            try:
                for frame in handle.channel.take():
                    handle.last_message_s = self._clock()
                    self._handle(handle, frame)
                    if handle.name not in self.alive:
                        break
            except FrameError as error:
                reason = str(error)
            if handle.name not in self.alive:
                continue
            handle.channel.flush()
            if handle.channel.ended or handle.process.poll() is not None:
                reason = reason or handle.exit_reason()
            reason = reason or handle.overdue(self._heartbeat_s)
            if reason:
                self.lose(handle, reason)
            else:
                self._end_drained(handle)

    def _handle(self, handle: EngineHandle, frame: Frame) -> None:
        commands = handle.started_commands(frame.metadata.get("commands_started", ()))
        if commands and self.records is not None:
            self.records.append(("commands_started", {"engine": handle.name, "commands": commands}))
        if frame.kind == "ready":
            handle.ready = True
            if self.opened:
                self._emit(EngineJoined(handle.name))
        elif frame.kind == "completed":
            for id, began, ended, completion in results_from_frame(frame):
                handle.in_flight.discard(id)
                handle.num_completed += 1
                if not id.startswith(PREFIX):
                    self._emit(GenerateResult(handle.name, id, completion, began, ended))
                elif self.recorded is None or self.recorded.was_received(handle.name, id):
                    self.blocking.complete(id, completion)
        elif frame.kind == "loaded":
            self._loaded(handle, frame.metadata)
        elif frame.kind == "refused":
            error = ValueError(frame.metadata["reason"])
            handle.in_flight.difference_update(frame.metadata["ids"])
            known = [self.blocking.complete(id, error) for id in frame.metadata["ids"]]
            if not all(known):
                raise error

    def _loaded(self, handle: EngineHandle, report: Mapping[str, Any]) -> None:
        manifest = handle.loading
        assert manifest is not None
        if not report["error"]:
            handle.loaded, handle.loading = manifest, None
            if handle.report_loaded:
                handle.report_loaded = False
                self._emit(WeightsLoaded(handle.name, manifest["version"], report["at"]))
        elif handle.load_failed:
            self.lose(handle, f"it could not load version {manifest['version']}: {report['error']}")
        else:
            handle.load_failed = True
            handle.send("load", manifest)

    def lose(self, handle: EngineHandle, reason: str) -> None:
        """Kill an engine, and start a replacement if the number of engines falls below the target.

        Args:
            handle: its handle.
            reason: for the event and the error message.

        Raises:
            EngineFailed: an initial engine has not started, or too many consecutive restarts failed.
            ReplayError: this is a replay.
        """
        reason += handle.log_tail()
        self.end(handle)
        if self.recorded is not None:
            raise ReplayError(f"{handle.name} is lost, and in the run it was not lost here: {reason}")
        if not self.opened:
            raise EngineFailed(f"{handle.name} could not be started: {reason}")
        if handle.ready:
            self._emit(EngineLost(handle.name, reason))
        if len(self._serving) >= self.target:
            return
        added = handle.added and not handle.num_completed
        num_failed_restarts = 0 if handle.num_completed else handle.num_failed_restarts + 1
        if added and not handle.ready and self._serving:
            self._lower_target(f"{handle.name} could not be started: {reason}")
        elif num_failed_restarts > self._max_restarts:
            why = (
                f"{num_failed_restarts} engines were lost one after the other before they had completed a "
                f"request, at last {handle.name}: {reason}"
            )
            if not (added and self._serving):
                raise EngineFailed(why)
            self._lower_target(why)
        self._start_missing(num_failed_restarts, added=added)

    def end(self, handle: EngineHandle) -> None:
        """Kill an engine without an event."""
        del self.alive[handle.name]
        handle.kill()

    @property
    def _serving(self) -> list[EngineHandle]:
        return [handle for handle in self.alive.values() if not handle.draining]

    def _start_missing(self, num_failed_restarts: int = 0, *, added: bool = False) -> None:
        """Start missing engines; without resources for one, lower the target if other engines remain."""
        while len(self._serving) < self.target:
            try:
                self.start(num_failed_restarts, added=added)
            except (OSError, RayTrainerError) as error:
                if not (self.opened and self._serving):
                    raise
                self._lower_target(str(error))

    def _lower_target(self, reason: str) -> None:
        self.target = len(self._serving)
        self._emit(ScaleRequest(self.target, reason))

    def _end_drained(self, handle: EngineHandle) -> None:
        if handle.draining and not handle.in_flight:
            self.end(handle)
            self._emit(EngineLost(handle.name, DRAINED))

    def has_blocking_requests(self, engine: str) -> bool:
        """Whether this engine has blocking requests of the recorded run left to serve."""
        return self.recorded is not None and self.recorded.is_pending(engine, self.blocking.unfinished)

    def close(self) -> None:
        """Kill every engine."""
        while self.alive:
            self.alive.popitem()[1].kill()


# Polling interval for dead and overdue engines.
POLL_S = 1.0


class SubprocessBackend:
    """An `EngineBackend` over subprocesses, to be closed or used as a context manager.

    It is also a `protocols.Engine` and its `WeightTransport`. Its `generate` runs concurrently with the
    other requests on an engine with the newest weights, and emits no events. It is thread-safe.
    """

    def __init__(
        self,
        settings: EngineSettings,
        reward: Reward,
        named_tensors: Callable[[], NamedTensors],
        *,
        canary: Callable[[], Canary] | None = None,
        num_engines: int = 1,
        heartbeat_s: float = 300.0,
        load_s: float = 600.0,
        max_restarts: int = 3,
        start: StartEngine = start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start engines, and wait until all of them are ready.

        Args:
            settings: settings shared by all engines.
            reward: scores in a thread of its own; closed with this runtime.
            named_tensors: returns the trainer's current weights.
            canary: returns the trainer's canary under these weights; None for no check.
            num_engines: initial number of engines.
            heartbeat_s: heartbeat timeout of a busy engine; after it, the engine counts as lost.
            load_s: timeout for loading weights; an engine that still loads the previous ones then is lost.
            max_restarts: maximum number of consecutive restarts of an engine without a completion.
            start: starts an engine process.
            clock: monotonic time in seconds.

        Raises:
            EngineFailed: one of them cannot be started.
        """
        self._reward, self._load_s, self._clock = reward, load_s, clock
        self._named_tensors, self._canary = named_tensors, canary
        self._weights = SharedWeights(delta=settings.delta)
        # Manifest of the weights in the shared memory; None while they are incomplete.
        self._manifest: Note | None = None
        self._events: list[Event] = []
        self._failure: BaseException | None = None
        self._closing = False
        self._engines = EngineSupervisor(
            settings,
            self._weights.handle,
            self._events.append,
            heartbeat_s=heartbeat_s,
            max_restarts=max_restarts,
            start=start,
            clock=clock,
        )
        # Lock for everything above; notified of every change.
        self._changed = threading.Condition()
        # Lock for writing weights.
        self._writing = threading.Lock()
        self._reward_thread = ThreadPoolExecutor(1, "millrace-reward")
        self._unscored: list[tuple[str, Sequence[Prompt], Sequence[str]]] = []
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._receive_messages, name="millrace-engines", daemon=True)
        self._thread.start()
        self._start(num_engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all engines, close the reward and release the shared memory."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            # Waits in other threads must end.
            self._fail(RuntimeError("the engines were closed during a wait"))
        self._wake()
        self._thread.join()
        self._engines.close()
        self._reward_thread.shutdown(wait=False, cancel_futures=True)  # a running call may hang until `close`
        self._reward.close()
        self._reward_thread.shutdown()
        self._weights.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    # ---- EngineBackend

    def now(self) -> float:
        """Return the time of `clock` in seconds."""
        return self._clock()

    def engines(self) -> list[str]:
        """Return the names of the engines that are alive and ready."""
        with self._changed:
            return [name for name, handle in self._engines.alive.items() if handle.ready]

    def begin(self, recorded: RecordedCommands | None = None) -> None:
        """Start recording for `records`; nothing may be in flight.

        Args:
            recorded: recorded commands in a replay; there, only `end` and `start` end and start engines.
        """
        with self._notifying():
            self._engines.begin(recorded)

    def records(self) -> list[Record]:
        """Return new records, which a replay needs besides the events; see `EngineBackend`."""
        with self._changed:
            records = self._engines.records or []
            if records:
                self._engines.records = []
        return records

    def end(self, engine: str) -> None:
        """Replay only: kill an engine after its pending results were delivered."""
        engines = self._engines
        what = f"{engine} to complete the requests whose results the run received"
        self._wait_for(what, lambda: not engines.has_blocking_requests(engine), self._load_s)
        with self._notifying():
            engines.end(engines.alive[engine])

    def start(self, engine: str) -> None:
        """Replay only: start an engine of this name; `EngineJoined` follows."""
        with self._notifying():
            self._engines.start(name=engine)

    def submit(self, engine: str, requests: Sequence[GenerateRequest], *, blocking: bool = False) -> None:
        """Submit requests; see `EngineBackend`. If an engine refuses one, `wait` raises ValueError.

        Args:
            engine: its name.
            requests: the requests.
            blocking: whether they are blocking requests of `generate`.
        """
        with self._notifying():
            self._engines.submit(engine, requests, blocking=blocking)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """Abort requests; they end with the tokens generated so far."""
        with self._notifying():
            if (handle := self._engines.alive.get(engine)) is not None:
                handle.send("abort", {"ids": list(ids)})

    def update_weights(self, version: int) -> None:
        """Copy the trainer's weights to the shared memory, after all engines have loaded the previous ones.

        See `EngineBackend`. If `send` has written this version already, nothing is copied.
        """
        with self._writing:
            if self._manifest is None or self._manifest["version"] != version:
                self._write(self._named_tensors(), version)

    def load(self, engine: str, version: int) -> None:
        """Command an engine to load the weights of the last `update_weights`; see `EngineBackend`."""
        with self._writing, self._notifying():
            assert self._manifest is not None and self._manifest["version"] == version, (
                "no weight update had this version last"
            )
            if (handle := self._engines.alive.get(engine)) is not None:
                handle.report_loaded = True
                self._start_load(handle)

    def lose(self, engine: str, reason: str) -> None:
        """Kill an engine and replace it; see `EngineBackend`."""
        with self._notifying():
            if (handle := self._engines.alive.get(engine)) is not None:
                self._engines.lose(handle, reason)

    def scale(self, number: int) -> None:
        """Scale to a number of engines; see `EngineBackend`."""
        with self._notifying():
            self._engines.scale(number)

    def retire(self, engine: str) -> None:
        """Drain an engine: end it after its in-flight requests; see `EngineBackend`."""
        with self._notifying():
            self._engines.retire(engine)

    def score(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts in the reward thread, in one batch with others that are queued by then."""
        with self._changed:
            self._unscored.append((id, prompts, texts))
        self._reward_thread.submit(self._score)

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for events, and return those since the last call.

        Raises:
            EngineFailed: too many consecutive restarts of an engine failed.
            ValueError: an engine refused a request.
            Exception: any error of the reward.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._failure, timeout_s)
            self._raise_failure()
            events = list(self._events)
            self._events.clear()
        return events

    # ---- Engine and WeightTransport

    @property
    def metrics(self) -> Mapping[str, float]:
        """See `SharedWeights`."""
        return self._weights.metrics

    @property
    def version(self) -> int:
        """Policy version that `generate` samples from."""
        manifest = self._manifest
        if manifest is None:
            raise RuntimeError("no engine was given weights yet; call send() first")
        return int(manifest["version"])

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Generate one completion for each prompt, in order; see `protocols.Engine`.

        If an engine is lost, another one generates the unfinished completions.

        Args:
            prompts: token ids of each prompt.
            params: sampling parameters of each prompt.

        Raises:
            RequestFailed: the model produced non-finite logits.
            EngineFailed: no engine had the newest weights in time.
        """
        with self._changed:
            blocking = self._engines.blocking
            requests = blocking.add(prompts, params)
            try:
                while missing := blocking.missing(requests):
                    engine, missing = self._choose_engine(missing)
                    self.submit(engine, missing, blocking=True)
                    self._await_results(engine, lambda: not blocking.missing(requests))
            finally:
                results = blocking.forget(requests)
        return completions(results)

    def send(self, named_tensors: NamedTensors, version: int) -> None:
        """Update one engine for `generate`, which verifies the weights; the others load them on `load`.

        Args:
            named_tensors: the new weights.
            version: their policy version.

        Raises:
            EngineFailed: no engine has verified them in time.
        """
        with self._writing:
            self._write(named_tensors, version)
        with self._changed:
            self._engine_with_weights()

    def _start(self, num_engines: int) -> None:
        """Start the initial engines, and wait until all of them are ready."""
        try:
            with self._notifying():
                self._engines.scale(num_engines)
            self._wait_for(
                f"{num_engines} engines to start", lambda: len(self.engines()) == num_engines, START_S
            )
        except BaseException:
            self.close()
            raise
        self._engines.opened = True

    def _await_results(self, engine: str, done: Callable[[], object]) -> None:
        """Wait for a result, or until the engine is lost; its heartbeat timeout bounds the wait."""
        self._changed.wait_for(lambda: self._failure or done() or engine not in self._engines.alive)
        self._raise_failure()

    def _choose_engine(self, missing: list[GenerateRequest]) -> tuple[str, list[GenerateRequest]]:
        """Choose an engine for blocking requests, and those of them that it serves."""
        if self._engines.recorded is None:
            engine = self._engine_with_weights()
        else:
            engine, ids = self._engines.recorded.next_blocking([request.id for request in missing])
            missing = [request for request in missing if request.id in ids]
            self._wait_for(f"{engine} to start", lambda: engine in self._engines.alive, START_S)
        return engine, missing

    def _engine_with_weights(self) -> str:
        """Wait for an engine with the newest weights; command one to load them if necessary."""

        def find() -> EngineHandle | None:
            if self._manifest is None:
                return None
            alive = self._engines.alive.values()
            ready = [handle for handle in alive if handle.ready and not handle.draining]
            current = [
                handle for handle in ready if handle.loaded is self._manifest and handle.loading is None
            ]
            if not current and ready and self._engines.records is None:
                self._start_load(ready[0])
                self._wake()
            return current[0] if current else None

        self._wait_for("an engine to load the newest weights", find, self._load_s)
        handle = find()
        assert handle is not None
        return handle.name

    # ---- weights

    def _write(self, named_tensors: NamedTensors, version: int) -> None:
        """Write weights to the shared memory, after all loads of the previous ones have ended."""
        with self._changed:
            self._manifest = None
            self._changed.wait_for(lambda: self._failure or not self._loading_engines(), self._load_s)
            for handle in self._loading_engines():
                late = f"it was still loading {self._load_s:g} s after version {version} was written"
                self._engines.lose(handle, late)
            self._raise_failure()
        manifest = self._weights.write(named_tensors, version, self._canary)
        with self._changed:
            self._manifest = manifest
            self._changed.notify_all()

    def _loading_engines(self) -> list[EngineHandle]:
        return [handle for handle in self._engines.alive.values() if handle.loading is not None]

    def _start_load(self, handle: EngineHandle) -> None:
        assert self._manifest is not None
        if handle.loading is None:
            handle.loading, handle.load_failed = self._manifest, False
            handle.send("load", self._manifest)

    # ---- receiver thread

    def _receive_messages(self) -> None:
        try:
            while not self._closing:
                poll = select.poll()
                poll.register(self._wake_receiver, select.POLLIN)
                with self._changed:
                    self._engines.watch(poll)
                poll.poll(POLL_S * 1000)
                with self._changed:
                    with suppress(BlockingIOError):
                        self._wake_receiver.recv(1 << 16)
                    self._engines.receive()
                    self._changed.notify_all()
        except Exception as error:  # re-raised in the waiting threads
            self._fail(error)

    def _score(self) -> None:
        """Score all queued texts in one batch, so that small requests do not leave reward workers idle."""
        with self._changed:
            calls, self._unscored = self._unscored, []
        if not calls:
            return
        try:
            prompts = [prompt for _, given, _ in calls for prompt in given]
            outcomes = iter(self._reward.score(prompts, [text for *_, texts in calls for text in texts]))
        except Exception as error:  # re-raised in the waiting threads
            self._fail(error)
            return
        with self._changed:
            self._events.extend(
                ScoreResult(id, tuple(islice(outcomes, len(texts)))) for id, _, texts in calls
            )
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_for(self, what: str, ready: Callable[[], object], deadline_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure or ready(), deadline_s):
                raise EngineFailed(f"waited {deadline_s:g} s for {what}")
            self._raise_failure()

    @contextmanager
    def _notifying(self) -> Iterator[None]:
        """Hold the lock for a change of engines or their commands; wake all waiting threads afterwards."""
        with self._changed:
            yield
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        """Wake the receiver thread; a full pipe wakes it as well."""
        with suppress(BlockingIOError):
            self._wake_sender.send(b".")
