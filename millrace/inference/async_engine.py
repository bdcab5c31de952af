"""Asynchronous engine: a background thread steps it, coroutines submit requests and read tokens.

Commands (abort, pause, weight update, ...) go into a queue, which the thread empties before each step. So
only one thread uses the engine, and in-flight requests see a change between two tokens.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from millrace.inference.engine import EngineStats, KvPolicy, PagedEngine, PauseMode, Tag
from millrace.inference.request import Request
from millrace.types import Completion, SamplingParams

T = TypeVar("T")
# A command for the engine's thread, and the future of its result.
Call = tuple[Callable[[], Any], Future[Any]]


class EngineFull(RuntimeError):
    """The queue of waiting requests is full; try again later."""


class EngineClosed(RuntimeError):
    """The engine has stopped; the message names the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """Tokens that a request generated since the last piece, at least one."""

    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    versions: np.ndarray

    @classmethod
    def behind(cls, first: int, completion: Completion) -> TokenChunk:
        """Return the tokens of a completion from this index on."""
        rest = slice(first, None)
        return cls(completion.token_ids[rest], completion.logprobs[rest], completion.versions[rest])


class Stream:
    """The caller's end of one request: an asynchronous iterator over pieces, and the final completion.

    Leaving the iterator does not end the request; `AsyncEngine.abort` does.
    """

    def __init__(self, id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self.loop = loop
        self._pieces: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        self._completion: asyncio.Future[Completion] = loop.create_future()
        # Retrieve the exception, so that asyncio logs no warning for an abandoned stream.
        self._completion.add_done_callback(lambda done: done.cancelled() or done.exception())

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenChunk:
        piece = await self._pieces.get()
        if piece is None:
            self._pieces.put_nowait(None)
            raise StopAsyncIteration
        return piece

    async def completion(self) -> Completion:
        """Wait until the request ends and return its whole completion; EngineClosed if the engine failed."""
        return await asyncio.shield(self._completion)

    def put(self, item: TokenChunk | Completion | Exception) -> None:
        """Add a piece, or the end of the request; call it in the thread of the event loop."""
        if isinstance(item, TokenChunk):
            self._pieces.put_nowait(item)
            return
        self._pieces.put_nowait(None)
        if self._completion.done():
            return
        if isinstance(item, Completion):
            self._completion.set_result(item)
        else:
            self._completion.set_exception(item)


def request_ids(ids: Sequence[str] | None, num: int, group: int, live: Container[str]) -> list[str]:
    """Return the ids of `num` new samples, by default those of a group; ValueError if one is in `live`."""
    taken = next((id for id in ids or () if id in live), None)
    if taken is not None:
        raise ValueError(f"request id {taken!r} is taken by an unfinished request; choose another")
    return list(ids or [f"request-{group}-{place}" for place in range(num)])


@dataclass(slots=True)
class _Live:
    """An unfinished request with its stream; `num_given` tokens of it are in the stream already."""

    stream: Stream
    request: Request | None = None
    num_given: int = 0


class AsyncEngine:
    """Runs a PagedEngine in a background thread. Use it as an asynchronous context manager.

    It rejects requests while `max_waiting` requests are queued.
    """

    def __init__(self, engine: PagedEngine, *, max_waiting: int = 1_024) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._mailbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._num_submitted = 0
        self._num_unseen = 0
        self._lock = threading.Lock()
        self._closed: str | None = "it was not started; use `async with`"
        self._finished: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="millrace-engine", daemon=True)

    async def __aenter__(self) -> AsyncEngine:
        self._closed = None
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = self._closed or "it was closed"
            self._mailbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def version(self) -> int:
        """Policy version of the current weights."""
        return self._engine.version

    def stats(self) -> EngineStats:
        """Return the current load and the counters."""
        return self._engine.stats()

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, id: str | None = None, priority: int = 0
    ) -> Stream:
        """Queue one request; see `submit_siblings`."""
        return self.submit_siblings(prompt, [params], ids=None if id is None else [id], priority=priority)[0]

    def submit_siblings(
        self,
        prompt: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        ids: Sequence[str] | None = None,
        priority: int = 0,
    ) -> list[Stream]:
        """Queue samples of one prompt, which is computed once for all of them; see `PagedEngine.add`.

        Raises:
            ValueError: a request cannot be served, or an id is in use.
            EngineFull: too many requests are queued.
            EngineClosed: the engine has stopped.
        """
        for wanted in params:
            self._engine.check_request(prompt, wanted)
        with self._lock:
            self._require_open()
            names = request_ids(ids, len(params), self._num_submitted + 1, self._live)
            num_waiting = self._engine.stats().num_waiting + self._num_unseen
            if num_waiting + len(params) > self._max_waiting:
                raise EngineFull(
                    f"{num_waiting} requests wait; the engine queues at most {self._max_waiting}"
                )
            self._num_submitted += 1
            self._num_unseen += len(params)
            lives = [_Live(Stream(name, asyncio.get_running_loop())) for name in names]
            self._live.update(zip(names, lives, strict=True))

            def add() -> None:
                with self._lock:
                    self._num_unseen -= len(params)
                try:
                    requests = self._engine.add(prompt, params, ids=names, priority=priority)
                except Exception as error:  # no future is awaited here: the streams carry the error
                    for live in lives:
                        self._end(live, error)
                    return
                for request, live in zip(requests, lives, strict=True):
                    live.request = request

            self._mailbox.put((add, Future()))
        return [live.stream for live in lives]

    async def abort(self, id: str) -> Completion | None:
        """Abort a request and return its partial completion; None if no unfinished request has this id."""

        def action() -> Completion | None:
            live = self._live.get(id)
            if live is None:
                return None
            completion = self._engine.abort(id)
            assert completion is not None
            self._submit_to_thread(live, completion)
            return completion

        return await self._call(action)

    async def respond(self) -> None:
        """Return once the engine has handled a command between two steps; EngineClosed if it has stopped."""
        await self._call(lambda: None)

    async def pause(self, mode: PauseMode, *, timeout_s: float = 600.0) -> None:
        """Stop computing until `resume`; see `PagedEngine.pause`.

        Raises:
            TimeoutError: with mode finish, the running requests did not end in time; they continue.
            RuntimeError: with mode finish, `resume` was called before they had ended.
        """
        if mode != "finish":
            await self._call(lambda: self._pause_at_once(mode))
            return
        idle: Future[None] = Future()

        def stop_admitting() -> None:
            self._engine.stop_admitting()
            self._finished.append(idle)

        await self._call(stop_admitting)
        try:
            await asyncio.wait_for(asyncio.wrap_future(idle), timeout_s)
        except TimeoutError:
            num = self._engine.stats().num_running
            await self.resume()
            raise TimeoutError(
                f"pause(finish) waited {timeout_s:g} s for {num} running requests to end; they go on"
            ) from None

    async def resume(self) -> None:
        """End a `pause`: admit and compute requests again."""

        def action() -> None:
            self._settle(RuntimeError("the engine was resumed before its running requests had ended"))
            self._engine.resume()

        await self._call(action)

    async def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], policy_version: int, *, kv: KvPolicy = "recompute"
    ) -> None:
        """Replace every weight between two steps; see `PagedEngine.update_weights`."""
        await self._call(lambda: self._engine.update_weights(tensors, policy_version, kv=kv))

    async def fingerprint(self) -> dict[str, str]:
        """Return a checksum of each weight in the engine."""
        return await self._call(self._engine.fingerprint)

    async def sleep(self, tags: Collection[Tag]) -> None:
        """Free memory; see `PagedEngine.sleep`."""
        await self._call(lambda: self._engine.sleep(tags))

    async def wake(self, tags: Collection[Tag]) -> None:
        """Allocate the freed memory again; see `PagedEngine.wake`."""
        await self._call(lambda: self._engine.wake(tags))

    async def _call(self, action: Callable[[], T]) -> T:
        done: Future[T] = Future()
        # The thread closes under the same lock: no command may enter the queue after its last read.
        with self._lock:
            self._require_open()
            self._mailbox.put((action, done))
        return await asyncio.wrap_future(done)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(f"the engine takes no requests: {self._closed}")

    # ---- in the engine's thread

    def _run(self) -> None:
        reason = "it was closed"
        try:
            while self._empty_mailbox():
                self._give(self._engine.step())
            self._pause_at_once("abort")
        except Exception as error:  # any error must reach every waiting caller
            reason = f"its thread failed: {type(error).__name__}: {error}"
        with self._lock:
            self._closed = reason
        self._end_everything(reason)

    def _empty_mailbox(self) -> bool:
        """Run the queued commands; block for more if no step would compute anything. False means stop."""
        while True:
            self._report_idle()
            try:
                call = self._mailbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            action, result = call
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(action())
            except Exception as error:  # it goes to the caller alone
                result.set_exception(error)

    def _pause_at_once(self, mode: PauseMode) -> None:
        self._engine.pause(mode)
        for live in list(self._live.values()):
            if live.request is not None and live.request.finish_reason is not None:
                self._submit_to_thread(live, self._engine.completion(live.request))

    def _report_idle(self) -> None:
        if self._finished and not self._engine.stats().num_running:
            self._engine.pause("keep")
            self._settle(None)

    def _settle(self, error: Exception | None) -> None:
        """Resolve the futures of `pause` with mode finish; cancelled ones are skipped."""
        for idle in self._finished:
            if not idle.set_running_or_notify_cancel():
                continue
            if error is None:
                idle.set_result(None)
            else:
                idle.set_exception(error)
        self._finished.clear()

    def _give(self, touched: Sequence[Request]) -> None:
        for request in touched:
            live = self._live[request.id]
            if request.finish_reason is not None:
                self._submit_to_thread(live, self._engine.completion(request))
                continue
            token_L, logprob_L, version_L = self._engine.generated(request, live.num_given)
            live.num_given += len(token_L)
            self._push(live.stream, TokenChunk(tuple(token_L.tolist()), logprob_L, version_L))

    def _submit_to_thread(self, live: _Live, completion: Completion) -> None:
        if len(completion.token_ids) > live.num_given:
            self._push(live.stream, TokenChunk.behind(live.num_given, completion))
        self._end(live, completion)

    def _end(self, live: _Live, end: Completion | Exception) -> None:
        del self._live[live.stream.id]
        self._push(live.stream, end)

    def _push(self, stream: Stream, item: TokenChunk | Completion | Exception) -> None:
        # A closed event loop raises RuntimeError: its stream has no reader, and the other streams continue.
        with suppress(RuntimeError):
            stream.loop.call_soon_threadsafe(stream.put, item)

    def _end_everything(self, reason: str) -> None:
        closed = EngineClosed(f"the engine stopped: {reason}")
        for live in list(self._live.values()):
            self._end(live, closed)
        self._settle(closed)
        while not self._mailbox.empty():
            call = self._mailbox.get()
            if call is not None and call[1].set_running_or_notify_cancel():
                call[1].set_exception(closed)
