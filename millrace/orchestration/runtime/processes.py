"""Engines in processes of their own, which draw while the trainer trains; rewards in a thread of this one.

One thread listens to all engines, and whoever waits here waits for what it has heard.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from millrace.orchestration.runtime.base import Draw, Drawn, Event, Joined, Judged, Loaded
from millrace.orchestration.runtime.child import START_S, Child, Settings, StartChild, start
from millrace.orchestration.runtime.children import Children
from millrace.orchestration.runtime.direct import Direct, completions
from millrace.orchestration.runtime.frames import Frame, drawn_of, draws_as_frame
from millrace.protocols import NamedTensors, Reward
from millrace.transport.memory import SharedWeights
from millrace.transport.sync import Note
from millrace.types import Completion, Outcome, Prompt, SamplingParams

# How often engines are looked at that say nothing.
LOOK_S = 1.0


class ProcessRuntime:
    """A `base.Runtime` of processes on this machine, to be closed or used as a context manager.

    It is a `protocols.Engine` too: what its `generate` asks for is drawn beside everything else, by an engine
    that holds the newest weights, and is no event. Several threads may call it.
    """

    def __init__(
        self,
        settings: Settings,
        reward: Reward,
        named_tensors: Callable[[], NamedTensors],
        *,
        num_engines: int = 1,
        silence_s: float = 300.0,
        load_s: float = 600.0,
        max_barren: int = 3,
        start: StartChild = start,
    ) -> None:
        """Start engines, and wait until all of them are there.

        Args:
            settings: of each engine.
            reward: judges, in a thread of its own; it is closed with this.
            named_tensors: the trainer's weights as they are when it is called.
            num_engines: at any time.
            silence_s: an engine that works and is not heard of for so long is lost.
            load_s: one that still loads a version so long after the next one is there is lost.
            max_barren: so many engines may be lost one after the other in one place without having drawn.
            start: makes their processes.

        Raises:
            EngineFailed: one of them cannot be started.
        """
        self._reward, self._named_tensors, self._load_s = reward, named_tensors, load_s
        self._weights = SharedWeights()
        # Of the version in the shared memory; None while nothing whole is there.
        self._note: Note | None = None
        self._events: list[Event] = []
        self._direct = Direct()
        self._fingerprint: dict[str, str] | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._engines = Children(
            settings,
            self._weights.handle,
            self._events.append,
            silence_s=silence_s,
            max_barren=max_barren,
            start=start,
        )
        # Held for everything above; notified when any of it has changed.
        self._news = threading.Condition()
        # Held by who writes weights.
        self._writing = threading.Lock()
        self._judges = ThreadPoolExecutor(1, "millrace-reward")
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="millrace-engines", daemon=True)
        self._thread.start()
        self._start(num_engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._judges.shutdown(cancel_futures=True)
        self._reward.close()
        self._weights.close()
        self._bell.close()
        self._ring.close()

    # ---- what a Runtime does

    def now(self) -> float:
        """Seconds of this machine's monotonic clock."""
        return time.monotonic()

    def engines(self) -> list[str]:
        """Those that have started and are not lost."""
        with self._news:
            return [name for name, child in self._engines.living.items() if child.ready]

    def submit(self, engine: str, draws: Sequence[Draw]) -> None:
        """Begin to draw; see `base.Runtime`. Of what cannot be served `wait` raises ValueError."""
        with self._news:
            child = self._engines.living.get(engine)
            if child is not None:
                child.give("submit", *draws_as_frame(draws))
                child.drawing.update(draw.id for draw in draws)
        self._wake()

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """End draws now, with what they have."""
        with self._news:
            child = self._engines.living.get(engine)
            if child is not None:
                child.give("abort", {"ids": list(ids)})
        self._wake()

    def offer(self, version: int) -> None:
        """Copy the trainer's weights, once no engine loads the last ones any more; see `base.Runtime`."""
        with self._writing:
            self._write(self._named_tensors(), version)

    def load(self, engine: str, version: int) -> None:
        """Have an engine load what was offered last; see `base.Runtime`."""
        with self._writing, self._news:
            assert self._note is not None and self._note["version"] == version, "it was not offered last"
            child = self._engines.living.get(engine)
            if child is not None:
                child.announce = True
                self._order_load(child)
        self._wake()

    def lose(self, engine: str, reason: str) -> None:
        """Give an engine up; see `base.Runtime`."""
        with self._news:
            child = self._engines.living.get(engine)
            if child is not None:
                self._engines.lose(child, reason)
            self._news.notify_all()
        self._wake()

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts in the rewards' thread."""
        self._judges.submit(self._reward.score, prompts, texts).add_done_callback(partial(self._judged, id))

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

    # ---- what an Engine does

    @property
    def version(self) -> int:
        """Of the weights that `generate` draws with."""
        note = self._note
        if note is None:
            raise RuntimeError("no engine was given weights yet; call load_weights() first")
        return int(note["version"])

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Draw one completion for each prompt, in order; see `protocols.Engine`.

        What an engine has not drawn when it is lost is drawn by another one.

        Raises:
            RequestFailed: the model gave logits that are not finite.
            TimeoutError: no engine had the newest weights in time.
        """
        with self._news:
            draws = self._direct.ask(prompts, params)
            try:
                while missing := self._direct.missing(draws):
                    engine = self._holder()
                    self.submit(engine, missing)
                    self._await_answer(engine, lambda: not self._direct.missing(draws))
            finally:
                found = self._direct.forget(draws)
        return completions(found)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Give weights to an engine that `generate` may ask; the others get them when `load` says so."""
        with self._writing:
            self._write(named_tensors, version)
        with self._news:
            self._holder()

    def fingerprint(self) -> dict[str, str]:
        """A checksum of each weight as an engine holds it that `generate` may ask."""
        with self._news:
            self._fingerprint = None
            while self._fingerprint is None:
                engine = self._holder()
                self._engines.living[engine].give("fingerprint", {})
                self._engines.living[engine].asked = True
                self._wake()
                self._await_answer(engine, lambda: self._fingerprint)
            return self._fingerprint

    def _start(self, num_engines: int) -> None:
        """Start the first engines, and wait until all of them are there."""
        try:
            with self._news:
                for _ in range(num_engines):
                    self._engines.start()
            self._wake()
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

    def _holder(self) -> str:
        """Wait for an engine that holds the newest weights, and have one load them if need be."""

        def found() -> Child | None:
            if self._note is None:
                return None
            ready = [child for child in self._engines.living.values() if child.ready]
            holding = [child for child in ready if child.held is self._note and child.order is None]
            if not holding and ready:
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
        note = self._weights.write(named_tensors, version)
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
                    for child, frame in self._engines.hear():
                        self._handle(child, frame)
                    self._news.notify_all()
        except Exception as error:  # whoever waits must hear of it
            self._fail(error)

    def _handle(self, child: Child, frame: Frame) -> None:
        if frame.kind == "ready":
            child.ready = True
            if self._engines.opened:
                self._events.append(Joined(child.name))
        elif frame.kind == "drawn":
            for id, began, ended, completion in drawn_of(frame):
                child.drawing.discard(id)
                child.num_drawn += 1
                if not self._direct.answer(id, completion):
                    self._events.append(Drawn(child.name, id, completion, began, ended))
        elif frame.kind == "loaded":
            self._loaded(child, frame.note)
        elif frame.kind == "fingerprint":
            child.asked = False
            self._fingerprint = dict(frame.note)
        elif frame.kind == "refused":
            error = ValueError(frame.note["reason"])
            child.drawing.difference_update(frame.note["ids"])
            answered = [self._direct.answer(id, error) for id in frame.note["ids"]]
            if not all(answered):
                self._fail(error)

    def _loaded(self, child: Child, note: Mapping[str, Any]) -> None:
        order = child.order
        assert order is not None
        if not note["error"]:
            child.held, child.order = order, None
            if child.announce:
                child.announce = False
                self._events.append(Loaded(child.name, order["version"], note["at"]))
        elif child.failed_once:
            self._engines.lose(child, f"it could not load version {order['version']}: {note['error']}")
        else:
            child.failed_once = True
            child.give("load", order)

    def _judged(self, id: str, future: Future[list[Outcome]]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._fail(error)
            return
        with self._news:
            self._events.append(Judged(id, tuple(future.result())))
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
                raise TimeoutError(f"waited {deadline_s:g} s for {what}")
            self._require_whole()

    def _wake(self) -> None:
        """Have the listening thread look again; a pipe that is full wakes it as well."""
        with suppress(BlockingIOError):
            self._ring.send(b".")
