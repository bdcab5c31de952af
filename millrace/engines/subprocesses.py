"""Engines in subprocesses, which generate while the trainer trains; scoring runs in a thread of this process.

`EngineSupervisor` starts and replaces the engines, `BlockingRequests` keeps the blocking requests. One thread
receives the messages of all engines, and every wait is for something that this thread has processed.
"""

from __future__ import annotations

import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Self

from millrace.engines.handle import EngineHandle, EngineSettings, EngineStarter, start
from millrace.engines.ray_placement import RayTrainerError
from millrace.engines.wire import Frame, FrameError
from millrace.environments.running_episodes import CloseEpisode, EnvironmentHost, StepEnvironment
from millrace.environments.synchronous import MakeHost
from millrace.inference.engine import RequestFailed
from millrace.processes.wake import Wake
from millrace.protocols import EpisodeReward, NamedTensors
from millrace.rollout.backend import (
    DRAINED,
    Abort,
    BlockingRequest,
    CommandsStarted,
    EngineCommand,
    EngineJoined,
    EngineLost,
    Event,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    RestartTurns,
    Retire,
    Scale,
    ScaleRequest,
    Score,
    ScoreResult,
    StartEngine,
    StopEngine,
    Submit,
    Turns,
    UpdateWeights,
    WeightsLoaded,
    score_all,
)
from millrace.rollout.serialization import pack_requests, unpack_results
from millrace.transport.canary import Canary
from millrace.transport.shared_memory import SharedWeights, WeightManifest
from millrace.types import Completion, SamplingParams

# Startup timeout: import torch, build the model, load compiled kernels.
START_S = 300.0
# The counter of an engine with workers that is no total: imported over expected blocks.
FRACTION = "imported_fraction"
# Prefix of the ids of blocking requests; a number follows.
PREFIX = "blocking-"


class BlockingRequests:
    """Blocking requests and their results, by id.

    A replay places them on the recorded engines: see `replay.recorded_log.RecordedBlockingRequests`.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._results: dict[str, Completion | ValueError | None] = {}
        self._num_requests = 0

    def add(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[GenerateRequest]:
        """Register one request per prompt; the caller submits them and ends with `forget`."""
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        first, self._num_requests = self._num_requests, self._num_requests + len(prompts)
        requests = [
            GenerateRequest(f"{PREFIX}{first + place}", tuple(prompt), one)
            for place, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        self._results.update({request.id: None for request in requests})
        return requests

    def place(
        self, missing: list[GenerateRequest], newest: Callable[[], str]
    ) -> tuple[str, list[GenerateRequest]]:
        """Choose an engine, and those of the requests that it serves.

        Args:
            missing: requests without a result.
            newest: waits for an engine with the newest weights, and returns its name.
        """
        return newest(), missing

    def complete(self, engine: str, id: str, result: Completion | ValueError) -> bool:
        """Store the completion of a request, or why it was refused; return False for an unknown id."""
        known = id in self._results
        if known:
            self._results[id] = result
        return known

    @property
    def unfinished(self) -> list[str]:
        """Ids of the unfinished requests."""
        return [id for id, result in list(self._results.items()) if result is None]

    def missing(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """Return those requests that have no result yet."""
        return [request for request in requests if self._results[request.id] is None]

    def forget(self, requests: Sequence[GenerateRequest]) -> list[Completion | ValueError | None]:
        """Remove requests and return their results, None where there is none."""
        return [self._results.pop(request.id) for request in requests]


def request_number(id: str) -> int:
    """Return the number in the id of a blocking request, from 0; ValueError for any other id."""
    return int(id.removeprefix(PREFIX))


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


def _totals(counters: Mapping[str, float]) -> dict[str, int]:
    """Return the counters that grow."""
    return {name: int(value) for name, value in counters.items() if name != FRACTION}


class EngineFailed(RuntimeError):
    """No engine can be started any more, or none was ready in time; the message gives the reason."""


@dataclass(slots=True, eq=False)
class SupervisedEngine:
    """One engine of an `EngineSupervisor`.

    Attributes:
        name: engine name.
        handle: where it runs.
        clock: monotonic time in seconds.
        num_failed_restarts: consecutive predecessors that were lost before they generated a completion.
        added: whether it was added at run time and neither it nor a predecessor has generated; the run can
            go on without it.
        ready: whether startup has finished.
        draining: whether it is draining: it ends after its in-flight requests.
        in_flight: ids of the in-flight requests.
        num_completed: number of finished requests.
        loaded: the weight update that it verified last.
        loading: the weight update that it is loading.
        load_failed: whether `loading` has failed once.
        report_loaded: whether to emit `WeightsLoaded` for `loading`.
        last_message_s: time of its last message, or of the command that ended its idle time.
        counters: what an engine with workers has reported, since it was started.
    """

    name: str
    handle: EngineHandle
    clock: Callable[[], float] = time.monotonic
    num_failed_restarts: int = 0
    added: bool = False
    ready: bool = False
    draining: bool = False
    in_flight: set[str] = field(default_factory=set)
    num_completed: int = 0
    loaded: WeightManifest | None = None
    loading: WeightManifest | None = None
    load_failed: bool = False
    report_loaded: bool = False
    last_message_s: float = field(init=False)
    counters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_message_s = self.clock()

    @property
    def busy(self) -> bool:
        """Whether a message from it is expected."""
        generates = bool(self.in_flight) and self.loaded is not None
        return not self.ready or self.loading is not None or generates

    def submit(self, requests: Sequence[GenerateRequest], *, blocking: bool) -> None:
        """Submit requests; if it was idle, the heartbeat timeout starts now."""
        if not self.busy:
            self.last_message_s = self.clock()
        self.handle.send("blocking_submit" if blocking else "submit", *pack_requests(requests))
        self.in_flight.update(request.id for request in requests)

    def update_weights(self, manifest: WeightManifest) -> None:
        """Command it to load the weights in the shared memory; the heartbeat timeout starts now."""
        held = None if self.loaded is None or self.load_failed else self.loaded["version"]
        self.loading, self.last_message_s = manifest, self.clock()
        self.handle.update_weights(manifest, held)

    def overdue(self, heartbeat_s: float, start_s: float = START_S) -> str:
        """Return the reason if its heartbeat, or its start, has timed out, otherwise an empty string.

        Received messages must be processed before this call.
        """
        if not self.busy:
            return ""
        timeout_s = heartbeat_s if self.ready else start_s
        if self.clock() <= self.last_message_s + timeout_s:
            return ""
        task = "to start" if not self.ready else f"to generate {len(self.in_flight)} completions"
        if self.loading is not None:
            task = f"to load version {self.loading['version']}"
        return f"it had {task} and sent no message for {timeout_s:g} s"


class EngineSupervisor:
    """Supervisor of the engines of one backend. Callers hold the lock of the `SubprocessBackend`.

    Attributes:
        alive: the engines that are alive, by name, in the order of their start.
        target: number of engines; starting ones count, draining ones do not.
        opened: whether all initial engines have started. Before that, a lost engine is not replaced.
        past: counters of the engines that have ended.
        restarted: whether engines have restarted their turns, so that `CommandsStarted` is emitted and only
            `LoadWeights` makes them load weights.
        blocking: blocking requests.
    """

    def __init__(
        self,
        settings: EngineSettings,
        weights: int,
        emit: Callable[[Event], None],
        *,
        heartbeat_s: float,
        start_s: float = START_S,
        max_restarts: int,
        start: EngineStarter = start,
        clock: Callable[[], float],
    ) -> None:
        """Start without engines; see `SubprocessBackend`. `weights` is a descriptor of shared memory."""
        self._start, self._clock = start, clock
        self.alive: dict[str, SupervisedEngine] = {}
        self.target, self.opened, self.restarted = 0, False, False
        self.blocking = BlockingRequests()
        self.past: Counter[str] = Counter()
        self._settings, self._weights, self._emit = settings, weights, emit
        self._heartbeat_s, self._start_s, self._max_restarts = heartbeat_s, start_s, max_restarts
        self._num_started = 0

    def start(self, num_failed_restarts: int = 0, *, added: bool = False, name: str = "") -> None:
        """Start one more engine; see `SupervisedEngine`. By default it gets the next free name.

        Raises:
            OSError, RayTrainerError: there are too few resources for it.
        """
        name = name or f"engine-{self._num_started}"
        self._num_started += 1
        handle = self._start(name, self._settings, self._weights)
        self.alive[name] = SupervisedEngine(name, handle, self._clock, num_failed_restarts, added)

    def repeat(self, engine: str, recorded: Turns) -> None:
        """Start an engine of this name that repeats its recorded turns."""
        self.start(name=engine)
        self.alive[engine].handle.send("restart_turns", {"recorded": recorded})

    def scale(self, number: int) -> None:
        """Scale to a number of engines; surplus engines that have started are left to `retire`.

        Raises:
            OSError, RayTrainerError: there are too few resources for the initial engines.
        """
        self.target = number
        for engine in reversed(self._serving):
            if not engine.ready and len(self._serving) > number:
                self.end(engine)
        self._start_missing(added=self.opened)

    def retire(self, name: str) -> None:
        """Drain an engine: end it after its in-flight requests. Ignore a lost one."""
        if (engine := self.alive.get(name)) is None:
            return
        engine.draining = True
        self._end_drained(engine)
        # Another engine may have been lost meanwhile.
        self._start_missing()

    def finish_start(self) -> None:
        """Replace lost engines from now on: all initial engines have started."""
        self.opened = True

    def watch(self, poll: select.poll) -> None:
        """Register what the engines wait for."""
        for engine in self.alive.values():
            for descriptor, events in engine.handle.watch():
                poll.register(descriptor, events)

    def restart_turns(self, command: RestartTurns) -> None:
        """Execute the command; nothing may be in flight."""
        self.restarted, self.blocking, recorded = True, BlockingRequests(), command.recorded
        for engine in self.alive.values():
            turns = None if recorded is None else recorded.get(engine.name, ())
            engine.handle.send("restart_turns", {"recorded": turns})

    def submit(self, engine: str, requests: Sequence[GenerateRequest], *, blocking: bool = False) -> None:
        """Submit requests to an engine, unless it is lost."""
        if blocking and self.restarted:
            self._emit(BlockingRequest(engine, [request_number(request.id) for request in requests]))
        if (one := self.alive.get(engine)) is not None:
            one.submit(requests, blocking=blocking)

    def receive(self) -> None:
        """Process received messages; an engine that is dead, overdue or sends invalid frames is lost.

        Raises:
            EngineFailed: see `lose`.
            ValueError: an engine refused a request that is not a blocking one.
        """
        for engine in list(self.alive.values()):
            reason = ""
            try:
                for frame in engine.handle.receive():
                    engine.last_message_s = self._clock()
                    self._handle(engine, frame)
                    if engine.name not in self.alive:
                        break
            except FrameError as error:
                reason = str(error)
            if engine.name not in self.alive:
                continue
            reason = reason or engine.handle.exit_reason() or engine.overdue(self._heartbeat_s, self._start_s)
            if reason:
                self.lose(engine, reason)
            else:
                self._end_drained(engine)

    def _handle(self, engine: SupervisedEngine, frame: Frame) -> None:
        commands = frame.metadata.get("commands_started")
        if commands and self.restarted:
            self._emit(CommandsStarted(engine.name, commands))
        engine.counters = frame.metadata.get("counters", engine.counters)
        if frame.kind == "ready":
            engine.ready = True
            if self.opened:
                self._emit(EngineJoined(engine.name))
        elif frame.kind == "completed":
            for id, began, ended, completion in frame.unpack(unpack_results):
                engine.in_flight.discard(id)
                engine.num_completed += 1
                if id.startswith(PREFIX):
                    self.blocking.complete(engine.name, id, completion)
                else:
                    self._emit(GenerateResult(engine.name, id, completion, began, ended))
        elif frame.kind == "weights_loaded":
            self._weights_loaded(engine, frame.metadata)
        elif frame.kind == "refused":
            error = ValueError(frame.metadata["reason"])
            engine.in_flight.difference_update(frame.metadata["ids"])
            known = [self.blocking.complete(engine.name, id, error) for id in frame.metadata["ids"]]
            if not all(known):
                raise error

    def _weights_loaded(self, engine: SupervisedEngine, report: Mapping[str, Any]) -> None:
        manifest = engine.loading
        assert manifest is not None
        if not report["error"]:
            engine.loaded, engine.loading = manifest, None
            if engine.report_loaded:
                engine.report_loaded = False
                self._emit(WeightsLoaded(engine.name, manifest["version"], report["at"]))
        elif engine.load_failed:
            self.lose(engine, f"it could not load version {manifest['version']}: {report['error']}")
        else:
            engine.load_failed = True
            engine.update_weights(manifest)

    def lose(self, engine: SupervisedEngine, reason: str) -> None:
        """Kill an engine, and start a replacement if the number of engines falls below the target.

        Raises:
            EngineFailed: an initial engine has not started, or too many consecutive restarts failed.
        """
        reason += engine.handle.log_tail()
        self.end(engine)
        if not self.opened:
            raise EngineFailed(f"{engine.name} could not be started: {reason}")
        is_missing = len(self._serving) < self.target
        if engine.ready or not is_missing:
            self._emit(EngineLost(engine.name, reason))
        if not is_missing:
            return
        added = engine.added and not engine.num_completed
        num_failed_restarts = 0 if engine.num_completed else engine.num_failed_restarts + 1
        if added and not engine.ready and self._serving:
            self._lower_target(f"{engine.name} could not be started: {reason}")
        elif num_failed_restarts > self._max_restarts:
            why = (
                f"{num_failed_restarts} engines were lost one after the other before they had completed a "
                f"request, at last {engine.name}: {reason}"
            )
            if not (added and self._serving):
                raise EngineFailed(why)
            self._lower_target(why)
        self._start_missing(num_failed_restarts, added=added)

    def end(self, engine: SupervisedEngine) -> None:
        """Kill an engine without an event."""
        del self.alive[engine.name]
        self.past.update(_totals(engine.counters))
        engine.handle.kill()

    def metrics(self) -> dict[str, float]:
        """Return the counters of engines with workers; empty for others. See docs/metrics.md."""
        each = [engine.counters for engine in self.alive.values() if engine.counters]
        totals = Counter(self.past)
        for counters in each:
            totals.update(_totals(counters))
        found = {f"engine/{name}": float(value) for name, value in totals.items()}
        if each:
            found[f"engine/{FRACTION}"] = min(counters[FRACTION] for counters in each)
        return found

    @property
    def _serving(self) -> list[SupervisedEngine]:
        return [engine for engine in self.alive.values() if not engine.draining]

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

    def _end_drained(self, engine: SupervisedEngine) -> None:
        if engine.draining and not engine.in_flight:
            self.end(engine)
            self._emit(EngineLost(engine.name, DRAINED))

    def close(self) -> None:
        """Kill every engine."""
        while self.alive:
            self.alive.popitem()[1].handle.kill()


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
        reward: EpisodeReward,
        named_tensors: Callable[[], NamedTensors],
        *,
        canary: Callable[[], Canary] | None = None,
        num_engines: int = 1,
        heartbeat_s: float = 300.0,
        start_s: float = START_S,
        load_s: float = 600.0,
        max_restarts: int = 3,
        start: EngineStarter = start,
        make_environments: MakeHost | None = None,
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
            start_s: timeout for the start of an engine.
            load_s: timeout for loading weights; an engine that still loads the previous ones then is lost.
            max_restarts: maximum number of consecutive restarts of an engine without a completion.
            start: starts an engine.
            make_environments: makes the host of the environments, closed with this; or None.
            clock: monotonic time in seconds.

        Raises:
            EngineFailed: one of them cannot be started.
        """
        self._reward, self._named_tensors, self._canary = reward, named_tensors, canary
        self._load_s, self._start_s, self._clock = load_s, start_s, clock
        self._weights = SharedWeights(delta=settings.delta)
        self._manifest: WeightManifest | None = None  # of complete weights in the shared memory
        self._failure: BaseException | None = None
        self._events, self._closing = list[Event](), False
        self._engines = EngineSupervisor(
            settings,
            self._weights.handle,
            self._events.append,
            heartbeat_s=heartbeat_s,
            start_s=start_s,
            max_restarts=max_restarts,
            start=start,
            clock=clock,
        )
        # Lock for everything above, notified of every change; and lock for writing weights.
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self._reward_thread = ThreadPoolExecutor(1, "millrace-reward")
        self._unscored, self._wake = list[Score](), Wake()
        self._thread = threading.Thread(target=self._receive_messages, name="millrace-engines", daemon=True)
        self._thread.start()
        self._environments: EnvironmentHost | None = None
        self._make_environments = make_environments
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
        self._wake.set()
        self._thread.join()
        self._engines.close()
        self._reward_thread.shutdown(wait=False, cancel_futures=True)  # a running call may hang until `close`
        self._reward.close()
        self._reward_thread.shutdown()
        if self._environments is not None:
            self._environments.close()
        self._weights.close()
        self._wake.close()

    # ---- EngineBackend

    def now(self) -> float:
        """Return the time of `clock` in seconds."""
        return self._clock()

    def engines(self) -> list[str]:
        """Return the names of the engines that are alive and ready."""
        with self._changed:
            return [name for name, handle in self._engines.alive.items() if handle.ready]

    @property
    def blocking(self) -> BlockingRequests:
        """The blocking requests; `RestartTurns` begins with new ones."""
        return self._engines.blocking

    def replay_blocking(self, requests: BlockingRequests) -> None:
        """Take the blocking requests of a replay, after `RestartTurns`."""
        self._engines.blocking = requests

    def execute(self, command: EngineCommand) -> None:
        """Execute a command; see `EngineBackend`. `wait` raises ValueError for a refused request."""
        match command:
            case UpdateWeights(version):
                self._copy_weights(version)
            case LoadWeights(_, version):
                with self._writing:
                    assert self._manifest is not None and self._manifest["version"] == version, (
                        "no weight update had this version last"
                    )
                    self._execute(command)
            case Score():
                with self._changed:
                    self._unscored.append(command)
                # In one batch with others that are queued when the thread is free.
                self._reward_thread.submit(self._score)
            case StepEnvironment() if self._make_environments is not None:
                # A replay has no steps, and starts no environment.
                self._environments = self._environments or self._make_environments(self._post)
                self._environments.execute(command)
            case CloseEpisode() if self._environments is not None:
                self._environments.execute(command)
            case _:
                self._execute(command)

    def _execute(self, command: EngineCommand) -> None:
        """Execute a command for the engines, or for one of them unless it is lost."""
        engines = self._engines
        with self._notifying():
            match command:
                case RestartTurns():
                    engines.restart_turns(command)
                case Submit(name, requests):
                    engines.submit(name, requests)
                case Abort(name, ids) if name in engines.alive:
                    engines.alive[name].handle.send("abort", {"ids": list(ids)})
                case LoadWeights(name) if name in engines.alive:
                    engines.alive[name].report_loaded = True
                    self._update_engine(engines.alive[name])
                case StopEngine(name, reason) if name in engines.alive:
                    engines.lose(engines.alive[name], reason)
                case Scale(number):
                    engines.scale(number)
                case Retire(name):
                    engines.retire(name)
                case StartEngine(name, recorded):
                    engines.repeat(name, recorded)

    def wait(self, timeout_s: float) -> None:
        """Wait for events.

        Raises:
            EngineFailed: too many consecutive restarts of an engine failed.
            ValueError: an engine refused a request.
            Exception: any error of the reward.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._failure, timeout_s)
            self._raise_failure()

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
        return events

    # ---- Engine and WeightTransport

    @property
    def metrics(self) -> Mapping[str, float]:
        """See `SharedWeights` and `EngineSupervisor.metrics`."""
        with self._changed:
            return self._weights.metrics | self._engines.metrics()

    @property
    def version(self) -> int:
        """Policy version that `generate` samples from."""
        manifest = self._manifest
        if manifest is None:
            raise RuntimeError("no engine was given weights yet; call update_weights() first")
        return int(manifest["version"])

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Generate one completion for each prompt, in order; see `protocols.Engine`.

        If an engine is lost, another one generates the unfinished completions.

        Raises:
            RequestFailed: the model produced non-finite logits.
            EngineFailed: no engine had the newest weights in time.
        """
        with self._changed:
            blocking, alive = self.blocking, self._engines.alive
            requests = blocking.add(prompts, params)
            try:
                while missing := blocking.missing(requests):
                    engine, missing = blocking.place(missing, self._engine_with_weights)
                    self._wait_for(f"{engine} to start", partial(alive.__contains__, engine), self._start_s)
                    with self._notifying():
                        self._engines.submit(engine, missing, blocking=True)
                    self._await_results(engine, lambda: not blocking.missing(requests))
            finally:
                results = blocking.forget(requests)
        return completions(results)

    def update_weights(self, tensors: NamedTensors, policy_version: int) -> None:
        """Update one engine for `generate`, which verifies the weights; `LoadWeights` updates the others.

        Raises:
            EngineFailed: no engine has verified them in time.
        """
        with self._writing:
            self._write(tensors, policy_version)
        with self._changed:
            self._engine_with_weights()

    def _start(self, num_engines: int) -> None:
        """Start the initial engines, and wait until all of them are ready."""
        try:
            with self._notifying():
                self._engines.scale(num_engines)
            self._wait_for(
                f"{num_engines} engines to start", lambda: len(self.engines()) == num_engines, self._start_s
            )
        except BaseException:
            self.close()
            raise
        self._engines.finish_start()

    def _await_results(self, engine: str, done: Callable[[], object]) -> None:
        """Wait for a result, or until the engine is lost; its heartbeat timeout bounds the wait."""
        self._changed.wait_for(lambda: self._failure or done() or engine not in self._engines.alive)
        self._raise_failure()

    def _engine_with_weights(self) -> str:
        """Wait for an engine with the newest weights; command one to load them if necessary."""

        def find() -> SupervisedEngine | None:
            if self._manifest is None:
                return None
            alive = self._engines.alive.values()
            ready = [engine for engine in alive if engine.ready and not engine.draining]
            current = [one for one in ready if one.loaded is self._manifest and one.loading is None]
            if not current and ready and not self._engines.restarted:
                self._update_engine(ready[0])
                self._wake.set()
            return current[0] if current else None

        self._wait_for("an engine to load the newest weights", find, self._load_s)
        engine = find()
        assert engine is not None
        return engine.name

    # ---- weights

    def _copy_weights(self, version: int) -> None:
        """Copy the trainer's weights to the shared memory, after all engines have loaded the previous ones.

        If `update_weights` has written this version already, nothing is copied.
        """
        with self._writing:
            if self._manifest is None or self._manifest["version"] != version:
                self._write(self._named_tensors(), version)

    def _write(self, tensors: NamedTensors, version: int) -> None:
        """Write weights to the shared memory, after all loads of the previous ones have ended."""
        with self._changed:
            self._manifest = None
            self._changed.wait_for(lambda: self._failure or not self._loading_engines(), self._load_s)
            for engine in self._loading_engines():
                late = f"it was still loading {self._load_s:g} s after version {version} was written"
                self._engines.lose(engine, late)
            self._raise_failure()
        manifest = self._weights.write(tensors, version, self._canary)
        with self._changed:
            self._manifest = manifest
            self._changed.notify_all()

    def _loading_engines(self) -> list[SupervisedEngine]:
        return [engine for engine in self._engines.alive.values() if engine.loading is not None]

    def _update_engine(self, engine: SupervisedEngine) -> None:
        assert self._manifest is not None
        if engine.loading is None:
            engine.load_failed = False
            engine.update_weights(self._manifest)

    # ---- receiver thread

    def _receive_messages(self) -> None:
        try:
            while not self._closing:
                poll = select.poll()
                poll.register(self._wake, select.POLLIN)
                with self._changed:
                    self._engines.watch(poll)
                poll.poll(POLL_S * 1000)
                with self._changed:
                    self._wake.clear()
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
            outcomes = iter(score_all(self._reward, calls))
        except Exception as error:  # re-raised in the waiting threads
            self._fail(error)
            return
        with self._changed:
            self._events.extend(
                ScoreResult(call.id, tuple(islice(outcomes, len(call.texts)))) for call in calls
            )
            self._changed.notify_all()

    def _post(self, event: Event) -> None:
        """Add an event of another thread."""
        with self._changed:
            self._events.append(event)
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
        self._wake.set()
