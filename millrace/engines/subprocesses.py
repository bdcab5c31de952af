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
from millrace.engines.recorded import PREFIX, RecordedCommands, ReplayError, number_of
from millrace.engines.wire import Frame, FrameError, drawn_of, draws_as_frame
from millrace.inference.engine import RequestFailed
from millrace.protocols import NamedTensors, Reward
from millrace.rollout.backend import (
    RETIRED,
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
        self._found: dict[str, Completion | ValueError | None] = {}
        self._num_asked = 0

    def ask(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[GenerateRequest]:
        """Register one request per prompt; the caller submits them and ends with `forget`.

        Args:
            prompts: token ids of each prompt.
            params: sampling parameters of each prompt.
        """
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        first, self._num_asked = self._num_asked, self._num_asked + len(prompts)
        draws = [
            GenerateRequest(f"{PREFIX}{first + place}", tuple(prompt), wanted)
            for place, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
        ]
        self._found.update({draw.id: None for draw in draws})
        return draws

    def answer(self, id: str, found: Completion | ValueError) -> bool:
        """Store the result of a request; return False if the id is unknown here.

        Args:
            id: of the request.
            found: its completion, or why it was refused.
        """
        asked = id in self._found
        if asked:
            self._found[id] = found
        return asked

    @property
    def open(self) -> list[str]:
        """Ids of the unfinished requests."""
        return [id for id, found in self._found.items() if found is None]

    def missing(self, draws: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """Return those requests that have no result yet."""
        return [draw for draw in draws if self._found[draw.id] is None]

    def forget(self, draws: Sequence[GenerateRequest]) -> list[Completion | ValueError | None]:
        """Remove requests and return their results, None where there is none."""
        return [self._found.pop(draw.id) for draw in draws]


def completions(found: Sequence[Completion | ValueError | None]) -> list[Completion]:
    """Convert results to the return value of `Engine.generate`.

    Raises:
        ValueError: a request was refused.
        RequestFailed: the model produced non-finite logits.
    """
    drawn = []
    for place, one in enumerate(found):
        if isinstance(one, ValueError):
            raise ValueError(f"prompt {place} of {len(found)}: {one}") from None
        assert one is not None
        if one.finish_reason == "error":
            raise RequestFailed(f"prompt {place} of {len(found)} failed: {one.reason}")
        drawn.append(one)
    return drawn


class EngineFailed(RuntimeError):
    """No engine can be started any more, or none was ready in time; the message gives the reason."""


class EngineSupervisor:
    """Supervisor of the engine processes of one runtime. Callers hold the lock of the `SubprocessBackend`.

    Attributes:
        living: handles of the engines that are alive, by name, in the order of their start.
        wanted: target number of engines; starting ones count, draining ones do not.
        opened: whether all initial engines have started. Before that, a lost engine is not replaced.
        direct: blocking requests.
        records: log of blocking requests and started commands; None before `begin`.
        script: recorded commands in a replay, where no engine may be lost and engines are started by name.
    """

    def __init__(
        self,
        settings: EngineSettings,
        weights: int,
        tell: Callable[[Event], None],
        *,
        silence_s: float,
        max_barren: int,
        start: StartEngine = start,
        clock: Callable[[], float],
    ) -> None:
        """Start without engines.

        Args:
            settings: settings shared by all engines.
            weights: descriptor of the shared memory for weight updates.
            tell: callback for events.
            silence_s: heartbeat timeout of a busy engine; after it, the engine counts as lost.
            max_barren: maximum number of consecutive restarts of an engine without a completion.
            start: starts an engine process.
            clock: monotonic time in seconds.
        """
        self._start, self._clock = start, clock
        self.living: dict[str, EngineHandle] = {}
        self.wanted, self.opened = 0, False
        self.direct = BlockingRequests()
        self.records: list[Record] | None = None
        self.script: RecordedCommands | None = None
        self._settings, self._weights, self._tell = settings, weights, tell
        self._silence_s, self._max_barren = silence_s, max_barren
        self._num_started = 0

    def start(self, num_barren: int = 0, *, added: bool = False, name: str = "") -> None:
        """Start one more engine.

        Args:
            num_barren: see `EngineHandle`.
            added: see `EngineHandle`.
            name: recorded name in a replay; otherwise the next free one is taken.

        Raises:
            OSError, RayTrainerError: there are too few resources for it.
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
        """Scale to a number of engines; surplus engines that have started are left to `retire`.

        Raises:
            OSError, RayTrainerError: there are too few resources for the initial engines.
        """
        self.wanted = number
        for child in reversed(self._staying):
            if not child.ready and len(self._staying) > number:
                self.end(child)
        self._fill(added=self.opened)

    def retire(self, engine: str) -> None:
        """Drain an engine: end it after its in-flight requests. Ignore a lost one."""
        if (child := self.living.get(engine)) is None:
            return
        child.leaves = True
        self._let_go(child)
        # Another engine may have been lost meanwhile.
        self._fill()

    def watch(self, poll: select.poll) -> None:
        """Register the engines' connections: readable always, writable where data is unsent."""
        for child in self.living.values():
            poll.register(child.line, select.POLLIN | (select.POLLOUT if child.line.unsent else 0))

    def begin(self, script: RecordedCommands | None) -> None:
        """Start recording; nothing may be in flight. In a replay, send engines their recorded schedule."""
        self.records, self.direct, self.script = [], BlockingRequests(), script
        for child in self.living.values():
            child.begin(script)

    def ask(self, engine: str, draws: Sequence[GenerateRequest], *, direct: bool) -> None:
        """Submit requests to an engine, unless it is lost, and record blocking ones.

        Args:
            engine: its name.
            draws: the requests.
            direct: whether they are blocking requests.
        """
        if direct and self.records is not None:
            numbers = [number_of(draw.id) for draw in draws]
            self.records.append(("asked", {"engine": engine, "draws": numbers}))
        child = self.living.get(engine)
        if child is not None:
            child.give("submit", *draws_as_frame(draws), direct=direct)
            child.drawing.update(draw.id for draw in draws)

    def hear(self) -> None:
        """Process received messages; an engine that is dead, overdue or sends invalid frames is lost.

        Raises:
            EngineFailed, ReplayError: see `lose`.
            ValueError: an engine refused a request that is not a blocking one.
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

    def _handle(self, child: EngineHandle, frame: Frame) -> None:
        orders = child.took(frame.note.get("took", ()))
        if orders and self.records is not None:
            self.records.append(("took", {"engine": child.name, "orders": orders}))
        if frame.kind == "ready":
            child.ready = True
            if self.opened:
                self._tell(EngineJoined(child.name))
        elif frame.kind == "drawn":
            for id, began, ended, completion in drawn_of(frame):
                child.drawing.discard(id)
                child.num_drawn += 1
                if not id.startswith(PREFIX):
                    self._tell(GenerateResult(child.name, id, completion, began, ended))
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

    def _loaded(self, child: EngineHandle, note: Mapping[str, Any]) -> None:
        order = child.order
        assert order is not None
        if not note["error"]:
            child.held, child.order = order, None
            if child.announce:
                child.announce = False
                self._tell(WeightsLoaded(child.name, order["version"], note["at"]))
        elif child.failed_once:
            self.lose(child, f"it could not load version {order['version']}: {note['error']}")
        else:
            child.failed_once = True
            child.give("load", order)

    def lose(self, child: EngineHandle, reason: str) -> None:
        """Kill an engine, and start a replacement if the number of engines falls below the target.

        Args:
            child: its handle.
            reason: for the event and the error message.

        Raises:
            EngineFailed: an initial engine has not started, or too many consecutive restarts failed.
            ReplayError: this is a replay.
        """
        reason += child.last_words()
        self.end(child)
        if self.script is not None:
            raise ReplayError(f"{child.name} is lost, and in the run it was not lost here: {reason}")
        if not self.opened:
            raise EngineFailed(f"{child.name} could not be started: {reason}")
        if child.ready:
            self._tell(EngineLost(child.name, reason))
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

    def end(self, child: EngineHandle) -> None:
        """Kill an engine without an event."""
        del self.living[child.name]
        child.kill()

    @property
    def _staying(self) -> list[EngineHandle]:
        return [child for child in self.living.values() if not child.leaves]

    def _fill(self, num_barren: int = 0, *, added: bool = False) -> None:
        """Start missing engines; without resources for one, lower the target if other engines remain."""
        while len(self._staying) < self.wanted:
            try:
                self.start(num_barren, added=added)
            except (OSError, RayTrainerError) as error:
                if not (self.opened and self._staying):
                    raise
                self._do_without(str(error))

    def _do_without(self, reason: str) -> None:
        self.wanted = len(self._staying)
        self._tell(ScaleRequest(self.wanted, reason))

    def _let_go(self, child: EngineHandle) -> None:
        if child.leaves and not child.drawing:
            self.end(child)
            self._tell(EngineLost(child.name, RETIRED))

    def owes(self, engine: str) -> bool:
        """Whether this engine has blocking requests of the recorded run left to serve."""
        return self.script is not None and self.script.open(engine, self.direct.open)

    def close(self) -> None:
        """Kill every engine."""
        while self.living:
            self.living.popitem()[1].kill()


# Polling interval for dead and overdue engines.
LOOK_S = 1.0


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
        silence_s: float = 300.0,
        load_s: float = 600.0,
        max_barren: int = 3,
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
            silence_s: heartbeat timeout of a busy engine; after it, the engine counts as lost.
            load_s: timeout for loading weights; an engine that still loads the previous ones then is lost.
            max_barren: maximum number of consecutive restarts of an engine without a completion.
            start: starts an engine process.
            clock: monotonic time in seconds.

        Raises:
            EngineFailed: one of them cannot be started.
        """
        self._reward, self._load_s, self._clock = reward, load_s, clock
        self._named_tensors, self._canary = named_tensors, canary
        self._weights = SharedWeights(delta=settings.delta)
        # Manifest of the weights in the shared memory; None while they are incomplete.
        self._note: Note | None = None
        self._events: list[Event] = []
        self._failure: BaseException | None = None
        self._closing = False
        self._engines = EngineSupervisor(
            settings,
            self._weights.handle,
            self._events.append,
            silence_s=silence_s,
            max_barren=max_barren,
            start=start,
            clock=clock,
        )
        # Lock for everything above; notified of every change.
        self._news = threading.Condition()
        # Lock for writing weights.
        self._writing = threading.Lock()
        self._judges = ThreadPoolExecutor(1, "millrace-reward")
        self._unscored: list[tuple[str, Sequence[Prompt], Sequence[str]]] = []
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="millrace-engines", daemon=True)
        self._thread.start()
        self._start(num_engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all engines, close the reward and release the shared memory."""
        with self._news:
            if self._closing:
                return
            self._closing = True
            # Waits in other threads must end.
            self._fail(RuntimeError("the engines were ended while somebody waited for them"))
        self._wake()
        self._thread.join()
        self._engines.close()
        self._judges.shutdown(wait=False, cancel_futures=True)  # a running call may hang until `close`
        self._reward.close()
        self._judges.shutdown()
        self._weights.close()
        self._bell.close()
        self._ring.close()

    # ---- EngineBackend

    def now(self) -> float:
        """Return the time of `clock` in seconds."""
        return self._clock()

    def engines(self) -> list[str]:
        """Return the names of the engines that are alive and ready."""
        with self._news:
            return [name for name, child in self._engines.living.items() if child.ready]

    def begin(self, script: RecordedCommands | None = None) -> None:
        """Start recording for `records`; nothing may be in flight.

        Args:
            script: recorded commands in a replay; there, only `end` and `start` end and start engines.
        """
        with self._changing():
            self._engines.begin(script)

    def records(self) -> list[Record]:
        """Return new records, which a replay needs besides the events; see `EngineBackend`."""
        with self._news:
            found = self._engines.records or []
            if found:
                self._engines.records = []
        return found

    def end(self, engine: str) -> None:
        """Replay only: kill an engine after its pending results were delivered."""
        engines = self._engines
        what = f"{engine} to draw what the run heard of it"
        self._await(what, lambda: not engines.owes(engine), self._load_s)
        with self._changing():
            engines.end(engines.living[engine])

    def start(self, engine: str) -> None:
        """Replay only: start an engine of this name; `EngineJoined` follows."""
        with self._changing():
            self._engines.start(name=engine)

    def submit(self, engine: str, draws: Sequence[GenerateRequest], *, direct: bool = False) -> None:
        """Submit requests; see `EngineBackend`. If an engine refuses one, `wait` raises ValueError.

        Args:
            engine: its name.
            draws: the requests.
            direct: whether they are blocking requests of `generate`.
        """
        with self._changing():
            self._engines.ask(engine, draws, direct=direct)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """Abort requests; they end with the tokens generated so far."""
        with self._changing():
            if (child := self._engines.living.get(engine)) is not None:
                child.give("abort", {"ids": list(ids)})

    def offer(self, version: int) -> None:
        """Copy the trainer's weights to the shared memory, after all engines have loaded the previous ones.

        See `EngineBackend`. If `send` has written this version already, nothing is copied.
        """
        with self._writing:
            if self._note is None or self._note["version"] != version:
                self._write(self._named_tensors(), version)

    def load(self, engine: str, version: int) -> None:
        """Command an engine to load the weights of the last `offer`; see `EngineBackend`."""
        with self._writing, self._changing():
            assert self._note is not None and self._note["version"] == version, "it was not offered last"
            if (child := self._engines.living.get(engine)) is not None:
                child.announce = True
                self._order_load(child)

    def lose(self, engine: str, reason: str) -> None:
        """Kill an engine and replace it; see `EngineBackend`."""
        with self._changing():
            if (child := self._engines.living.get(engine)) is not None:
                self._engines.lose(child, reason)

    def want(self, number: int) -> None:
        """Scale to a number of engines; see `EngineBackend`."""
        with self._changing():
            self._engines.want(number)

    def retire(self, engine: str) -> None:
        """Drain an engine: end it after its in-flight requests; see `EngineBackend`."""
        with self._changing():
            self._engines.retire(engine)

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts in the reward thread, in one batch with others that are queued by then."""
        with self._news:
            self._unscored.append((id, prompts, texts))
        self._judges.submit(self._score)

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait for events, and return those since the last call.

        Raises:
            EngineFailed: too many consecutive restarts of an engine failed.
            ValueError: an engine refused a request.
            Exception: any error of the reward.
        """
        with self._news:
            self._news.wait_for(lambda: self._events or self._failure, timeout_s)
            self._require_whole()
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
        note = self._note
        if note is None:
            raise RuntimeError("no engine was given weights yet; call send() first")
        return int(note["version"])

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
        with self._news:
            direct = self._engines.direct
            draws = direct.ask(prompts, params)
            try:
                while missing := direct.missing(draws):
                    engine, missing = self._whom(missing)
                    self.submit(engine, missing, direct=True)
                    self._await_answer(engine, lambda: not direct.missing(draws))
            finally:
                found = direct.forget(draws)
        return completions(found)

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
        with self._news:
            self._holder()

    def _start(self, num_engines: int) -> None:
        """Start the initial engines, and wait until all of them are ready."""
        try:
            with self._changing():
                self._engines.want(num_engines)
            self._await(
                f"{num_engines} engines to start", lambda: len(self.engines()) == num_engines, START_S
            )
        except BaseException:
            self.close()
            raise
        self._engines.opened = True

    def _await_answer(self, engine: str, there: Callable[[], object]) -> None:
        """Wait for a result, or until the engine is lost; its heartbeat timeout bounds the wait."""
        self._news.wait_for(lambda: self._failure or there() or engine not in self._engines.living)
        self._require_whole()

    def _whom(self, missing: list[GenerateRequest]) -> tuple[str, list[GenerateRequest]]:
        """Choose an engine for blocking requests, and those of them that it serves."""
        if self._engines.script is None:
            engine = self._holder()
        else:
            engine, ids = self._engines.script.ask([draw.id for draw in missing])
            missing = [draw for draw in missing if draw.id in ids]
            self._await(f"{engine} to be there", lambda: engine in self._engines.living, START_S)
        return engine, missing

    def _holder(self) -> str:
        """Wait for an engine with the newest weights; command one to load them if necessary."""

        def found() -> EngineHandle | None:
            if self._note is None:
                return None
            living = self._engines.living.values()
            ready = [child for child in living if child.ready and not child.leaves]
            holding = [child for child in ready if child.held is self._note and child.order is None]
            if not holding and ready and self._engines.records is None:
                self._order_load(ready[0])
                self._wake()
            return holding[0] if holding else None

        self._await("an engine to hold the newest weights", found, self._load_s)
        child = found()
        assert child is not None
        return child.name

    # ---- weights

    def _write(self, named_tensors: NamedTensors, version: int) -> None:
        """Write weights to the shared memory, after all loads of the previous ones have ended."""
        with self._news:
            self._note = None
            self._news.wait_for(lambda: self._failure or not self._readers(), self._load_s)
            for child in self._readers():
                late = f"it was still loading {self._load_s:g} s after version {version} was there"
                self._engines.lose(child, late)
            self._require_whole()
        note = self._weights.write(named_tensors, version, self._canary)
        with self._news:
            self._note = note
            self._news.notify_all()

    def _readers(self) -> list[EngineHandle]:
        return [child for child in self._engines.living.values() if child.order is not None]

    def _order_load(self, child: EngineHandle) -> None:
        assert self._note is not None
        if child.order is None:
            child.order, child.failed_once = self._note, False
            child.give("load", self._note)

    # ---- receiver thread

    def _listen(self) -> None:
        try:
            while not self._closing:
                poll = select.poll()
                poll.register(self._bell, select.POLLIN)
                with self._news:
                    self._engines.watch(poll)
                poll.poll(LOOK_S * 1000)
                with self._news:
                    with suppress(BlockingIOError):
                        self._bell.recv(1 << 16)
                    self._engines.hear()
                    self._news.notify_all()
        except Exception as error:  # re-raised in the waiting threads
            self._fail(error)

    def _score(self) -> None:
        """Score all queued texts in one batch, so that small requests do not leave reward workers idle."""
        with self._news:
            calls, self._unscored = self._unscored, []
        if not calls:
            return
        try:
            prompts = [prompt for _, given, _ in calls for prompt in given]
            outcomes = iter(self._reward.score(prompts, [text for *_, texts in calls for text in texts]))
        except Exception as error:  # re-raised in the waiting threads
            self._fail(error)
            return
        with self._news:
            self._events.extend(
                ScoreResult(id, tuple(islice(outcomes, len(texts)))) for id, _, texts in calls
            )
            self._news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _await(self, what: str, ready: Callable[[], object], deadline_s: float) -> None:
        with self._news:
            if not self._news.wait_for(lambda: self._failure or ready(), deadline_s):
                raise EngineFailed(f"waited {deadline_s:g} s for {what}")
            self._require_whole()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change of engines or their commands; wake all waiting threads afterwards."""
        with self._news:
            yield
            self._news.notify_all()
        self._wake()

    def _wake(self) -> None:
        """Wake the receiver thread; a full pipe wakes it as well."""
        with suppress(BlockingIOError):
            self._ring.send(b".")
