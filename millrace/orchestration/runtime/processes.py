"""Engines in processes of their own, which draw while the trainer trains; rewards in a thread of this one.

One thread listens to all engines, and whoever waits here waits for what it has heard.
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
from typing import Self

from millrace.orchestration.runtime.base import Draw, Event, Judged, Record
from millrace.orchestration.runtime.child import START_S, Child, Settings, StartChild, start
from millrace.orchestration.runtime.children import Children, EngineFailed
from millrace.orchestration.runtime.direct import completions
from millrace.orchestration.runtime.script import Script
from millrace.protocols import NamedTensors, Reward
from millrace.transport.canary import Canary
from millrace.transport.memory import SharedWeights
from millrace.transport.sync import Note
from millrace.types import Completion, Prompt, SamplingParams

# How often engines are looked at that say nothing.
LOOK_S = 1.0


class ProcessRuntime:
    """A `base.Runtime` of processes on this machine, to be closed or used as a context manager.

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
        """What a replay has to know beside events; see `base.Runtime`."""
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
        """Begin to draw; see `base.Runtime`. Of what cannot be served `wait` raises ValueError."""
        with self._changing():
            self._engines.ask(engine, draws, direct=direct)

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """End draws now, with what they have."""
        with self._changing():
            if (child := self._engines.living.get(engine)) is not None:
                child.give("abort", {"ids": list(ids)})

    def offer(self, version: int) -> None:
        """Copy the trainer's weights, once no engine loads the last ones any more; see `base.Runtime`.

        Where `send` has brought this version already, they lie there.
        """
        with self._writing:
            if self._note is None or self._note["version"] != version:
                self._write(self._named_tensors(), version)

    def load(self, engine: str, version: int) -> None:
        """Have an engine load what was offered last; see `base.Runtime`."""
        with self._writing, self._changing():
            assert self._note is not None and self._note["version"] == version, "it was not offered last"
            if (child := self._engines.living.get(engine)) is not None:
                child.announce = True
                self._order_load(child)

    def lose(self, engine: str, reason: str) -> None:
        """Give an engine up; see `base.Runtime`."""
        with self._changing():
            if (child := self._engines.living.get(engine)) is not None:
                self._engines.lose(child, reason)

    def want(self, number: int) -> None:
        """Have so many engines; see `base.Runtime`."""
        with self._changing():
            self._engines.want(number)

    def retire(self, engine: str) -> None:
        """End an engine once it has drawn what the callers of `generate` wait for; see `base.Runtime`."""
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
