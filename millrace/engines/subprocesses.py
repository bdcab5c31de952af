"""Engines in processes of their own, which sample while the trainer trains; rewards in a thread of this one.

`Children` starts and replaces the processes, `Direct` holds requests whose caller blocks. One thread listens
to all engines, and every wait is for what it has received.
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

from millrace.engines.handle import START_S, Child, Settings, StartChild, start
from millrace.engines.ray_placement import RayTrainerError
from millrace.engines.recorded import PREFIX, ReplayError, Script, number_of
from millrace.engines.wire import Frame, FrameError, drawn_of, draws_as_frame
from millrace.inference.engine import RequestFailed
from millrace.protocols import NamedTensors, Reward
from millrace.rollout.backend import (
    RETIRED,
    Draw,
    Drawn,
    Event,
    Joined,
    Judged,
    Loaded,
    Lost,
    Record,
    Wanted,
)
from millrace.transport.canary import Canary
from millrace.transport.memory import SharedWeights
from millrace.transport.sync import Note
from millrace.types import Completion, Prompt, SamplingParams


class Direct:
    """What was asked for, by id, and what came of it."""

    def __init__(self) -> None:
        """Nothing is asked for."""
        self._found: dict[str, Completion | ValueError | None] = {}
        self._num_asked = 0

    def ask(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Draw]:
        """Draws for these prompts, to be submitted and in the end collected."""
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        first, self._num_asked = self._num_asked, self._num_asked + len(prompts)
        draws = [
            Draw(f"{PREFIX}{first + place}", tuple(prompt), wanted)
            for place, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
        ]
        self._found.update({draw.id: None for draw in draws})
        return draws

    def answer(self, id: str, found: Completion | ValueError) -> bool:
        """Take in what came of a draw; False if it was not asked for here."""
        asked = id in self._found
        if asked:
            self._found[id] = found
        return asked

    @property
    def open(self) -> list[str]:
        """Ids of all that is asked for and not there."""
        return [id for id, found in self._found.items() if found is None]

    def missing(self, draws: Sequence[Draw]) -> list[Draw]:
        """Those of which nothing came yet."""
        return [draw for draw in draws if self._found[draw.id] is None]

    def forget(self, draws: Sequence[Draw]) -> list[Completion | ValueError | None]:
        """What came of draws, which nobody waits for any more."""
        return [self._found.pop(draw.id) for draw in draws]


def completions(found: Sequence[Completion | ValueError | None]) -> list[Completion]:
    """What was drawn, as `Engine.generate` gives it.

    Raises:
        ValueError: a draw could not be served.
        RequestFailed: the model gave logits that are not finite.
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


# How often engines are looked at that say nothing.
LOOK_S = 1.0


class ProcessRuntime:
    """A `backend.Runtime` of processes on this machine, to be closed or used as a context manager.

    It is a `protocols.Engine` and its `WeightTransport` too: what its `generate` asks for is drawn beside
    everything else, by an engine that holds the newest weights, and is no event. Several threads may call it.
    """

    def __init__(
        self,
        settings: Settings,
        reward: Reward,
        named_tensors: Callable[[], NamedTensors],
        *,
        canary: Callable[[], Canary] | None = None,
        num_engines: int = 1,
        silence_s: float = 300.0,
        load_s: float = 600.0,
        max_barren: int = 3,
        start: StartChild = start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start engines, and wait until all of them are there.

        Args:
            settings: of each engine.
            reward: judges, in a thread of its own; it is closed with this.
            named_tensors: the trainer's weights as they are when it is called.
            canary: what it says of a few tokens then; None for none.
            num_engines: at first.
            silence_s: an engine that works and is not heard of for so long is lost.
            load_s: one that still loads a version so long after the next one is there is lost.
            max_barren: so many engines may be lost one after the other in one place without having drawn.
            start: makes their processes.
            clock: seconds, never going back.

        Raises:
            EngineFailed: one of them cannot be started.
        """
        self._reward, self._load_s, self._clock = reward, load_s, clock
        self._named_tensors, self._canary = named_tensors, canary
        self._weights = SharedWeights(delta=settings.delta)
        # Of the version in the shared memory; None while nothing whole is there.
        self._note: Note | None = None
        self._events: list[Event] = []
        self._failure: BaseException | None = None
        self._closing = False
        self._engines = Children(
            settings,
            self._weights.handle,
            self._events.append,
            silence_s=silence_s,
            max_barren=max_barren,
            start=start,
            clock=clock,
        )
        # Held for everything above; notified when any of it has changed.
        self._news = threading.Condition()
        # Held by who writes weights.
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
        """End every engine and reward, and give the shared memory back."""
        with self._news:
            if self._closing:
                return
            self._closing = True
            # Whoever still waits in another thread must not wait for ever.
            self._fail(RuntimeError("the engines were ended while somebody waited for them"))
        self._wake()
        self._thread.join()
        self._engines.close()
        self._judges.shutdown(wait=False, cancel_futures=True)  # who judges now may hang until it is closed
        self._reward.close()
        self._judges.shutdown()
        self._weights.close()
        self._bell.close()
        self._ring.close()

    # ---- what a Runtime does

    def now(self) -> float:
        """Seconds of the clock that it was given."""
        return self._clock()

    def engines(self) -> list[str]:
        """Those that have started and are not lost."""
        with self._news:
            return [name for name, child in self._engines.living.items() if child.ready]

    def begin(self, script: Script | None = None) -> None:
        """Keep `records` from here on, where nothing is under way.

        Args:
            script: in a replay, what engines do: they are lost and started as `end` and `start` say.
        """
        with self._changing():
            self._engines.begin(script)

    def records(self) -> list[Record]:
        """What a replay has to know beside events; see `backend.Runtime`."""
        with self._news:
            found = self._engines.records or []
            if found:
                self._engines.records = []
        return found

    def end(self, engine: str) -> None:
        """In a replay, end an engine once those have heard of it who wait for what it draws."""
        engines = self._engines
        what = f"{engine} to draw what the run heard of it"
        self._await(what, lambda: not engines.owes(engine), self._load_s)
        with self._changing():
            engines.end(engines.living[engine])

    def start(self, engine: str) -> None:
        """In a replay, start an engine of this name; ends in `Joined`."""
        with self._changing():
            self._engines.start(name=engine)

    def submit(self, engine: str, draws: Sequence[Draw], *, direct: bool = False) -> None:
        """Begin to draw; see `backend.Runtime`. Of what cannot be served `wait` raises ValueError."""
        with self._changing():
            self._engines.ask(engine, draws, direct=direct)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """End draws now, with what they have."""
        with self._changing():
            if (child := self._engines.living.get(engine)) is not None:
                child.give("abort", {"ids": list(ids)})

    def offer(self, version: int) -> None:
        """Copy the trainer's weights, once no engine loads the last ones any more; see `backend.Runtime`.

        Where `send` has brought this version already, they lie there.
        """
        with self._writing:
            if self._note is None or self._note["version"] != version:
                self._write(self._named_tensors(), version)

    def load(self, engine: str, version: int) -> None:
        """Have an engine load what was offered last; see `backend.Runtime`."""
        with self._writing, self._changing():
            assert self._note is not None and self._note["version"] == version, "it was not offered last"
            if (child := self._engines.living.get(engine)) is not None:
                child.announce = True
                self._order_load(child)

    def lose(self, engine: str, reason: str) -> None:
        """Give an engine up; see `backend.Runtime`."""
        with self._changing():
            if (child := self._engines.living.get(engine)) is not None:
                self._engines.lose(child, reason)

    def want(self, number: int) -> None:
        """Have so many engines; see `backend.Runtime`."""
        with self._changing():
            self._engines.want(number)

    def retire(self, engine: str) -> None:
        """End an engine once it has drawn what the callers of `generate` wait for; see `backend.Runtime`."""
        with self._changing():
            self._engines.retire(engine)

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts in the rewards' thread, together with others that wait by then."""
        with self._news:
            self._unscored.append((id, prompts, texts))
        self._judges.submit(self._score)

    def wait(self, timeout_s: float) -> list[Event]:
        """What happened since the last call.

        Raises:
            EngineFailed: engines are lost as fast as they are started.
            ValueError: a draw cannot be served.
            Exception: whatever the reward raised.
        """
        with self._news:
            self._news.wait_for(lambda: self._events or self._failure, timeout_s)
            self._require_whole()
            events = list(self._events)
            self._events.clear()
        return events

    # ---- what an Engine and a WeightTransport do

    @property
    def metrics(self) -> Mapping[str, float]:
        """See `SharedWeights`."""
        return self._weights.metrics

    @property
    def version(self) -> int:
        """Of the weights that `generate` draws with."""
        note = self._note
        if note is None:
            raise RuntimeError("no engine was given weights yet; call send() first")
        return int(note["version"])

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Draw one completion for each prompt, in order; see `protocols.Engine`.

        What an engine has not drawn when it is lost is drawn by another one.

        Raises:
            RequestFailed: the model gave logits that are not finite.
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
        """Give weights to an engine that `generate` may ask, which proves them; the others load when told to.

        Raises:
            EngineFailed: no engine has proved them in time.
        """
        with self._writing:
            self._write(named_tensors, version)
        with self._news:
            self._holder()

    def _start(self, num_engines: int) -> None:
        """Start the first engines, and wait until all of them are there."""
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
        """Wait until something is there or the engine is lost, as it is when it is silent for too long."""
        self._news.wait_for(lambda: self._failure or there() or engine not in self._engines.living)
        self._require_whole()

    def _whom(self, missing: list[Draw]) -> tuple[str, list[Draw]]:
        """Who is to draw for a caller who waits, and what of it."""
        if self._engines.script is None:
            engine = self._holder()
        else:
            engine, ids = self._engines.script.ask([draw.id for draw in missing])
            missing = [draw for draw in missing if draw.id in ids]
            self._await(f"{engine} to be there", lambda: engine in self._engines.living, START_S)
        return engine, missing

    def _holder(self) -> str:
        """Wait for an engine that holds the newest weights, and have one load them if need be."""

        def found() -> Child | None:
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
        """Put weights where every engine can read them, once nobody reads there any more."""
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

    def _readers(self) -> list[Child]:
        return [child for child in self._engines.living.values() if child.order is not None]

    def _order_load(self, child: Child) -> None:
        assert self._note is not None
        if child.order is None:
            child.order, child.failed_once = self._note, False
            child.give("load", self._note)

    # ---- the thread that listens

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
        except Exception as error:  # whoever waits must hear of it
            self._fail(error)

    def _score(self) -> None:
        """One call for all that waits, so that few answers at a time do not leave reward workers idle."""
        with self._news:
            calls, self._unscored = self._unscored, []
        if not calls:
            return
        try:
            prompts = [prompt for _, given, _ in calls for prompt in given]
            outcomes = iter(self._reward.score(prompts, [text for *_, texts in calls for text in texts]))
        except Exception as error:  # whoever waits must hear of it
            self._fail(error)
            return
        with self._news:
            self._events.extend(Judged(id, tuple(islice(outcomes, len(texts)))) for id, _, texts in calls)
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
        """Within the block engines change, or what they are to do; who waits looks again after it."""
        with self._news:
            yield
            self._news.notify_all()
        self._wake()

    def _wake(self) -> None:
        """Have the listening thread look again; a pipe that is full wakes it as well."""
        with suppress(BlockingIOError):
            self._ring.send(b".")
