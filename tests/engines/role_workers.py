"""Prefill and decode workers in threads of the test, and the engine over them."""

from __future__ import annotations

import asyncio
import copy
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from torch import Tensor

from millrace.engines.kv_network import KvNetwork
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
from millrace.engines.prefill_decode_handle import ROLE_COMMANDS, ROLE_REPORTS
from millrace.engines.prefill_decode_route import RouteKind, RoutePolicy
from millrace.engines.prefill_decode_worker import PrefillDecodeWorker
from millrace.engines.wire import Channel, Frame
from millrace.inference.engine import PagedEngine
from millrace.inference.scheduler import Plan
from millrace.models.load import Model, named_weights
from millrace.processes.worker import KEY_BYTES
from tests.inference.fresh import decode, paged

KEY = bytes(KEY_BYTES)
LIMIT_S = 60.0
BLOCK = 4


class Killed(BaseException):
    """A worker ends here, as by SIGKILL: what it has not sent is lost."""


class ThreadWorker:
    """A worker in a thread of `threads`."""

    def __init__(
        self, name: str, engine: PagedEngine, weights: int, slots: Sequence[int], threads: Threads
    ) -> None:
        ours, theirs = socket.socketpair()
        self.name, self.engine, self.sent = name, engine, list[str]()
        self._channel, self._dead, self._threads = Channel(ours, KEY, ROLE_REPORTS), False, threads
        channel = threads.channels(name, theirs)
        worker = PrefillDecodeWorker(engine, channel, weights, slots, network=threads.networks())

        def serve() -> None:
            try:
                worker.serve()
            except Killed:
                channel.close()
            finally:
                theirs.close()

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._dead or self._channel.ended

    def watch(self) -> list[tuple[int, int]]:
        return self._channel.watch()

    def send(self, kind: str, metadata: Any, arrays: Any = None) -> None:
        self.sent.append(kind)
        self._channel.send(kind, metadata, arrays)

    def receive(self) -> list[Frame]:
        frames = []
        for frame in self._channel.receive():
            changed = self._threads.receives(self.name, frame)
            if changed is None:
                self._dead = True
                break
            frames.append(changed)
        return frames

    def exit_reason(self) -> str:
        if not self.ended:
            return ""
        assert self._threads.may_end.wait(LIMIT_S)
        return "its thread was ended by the test"

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        self._channel.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        if self._dead and self._threads.unkillable:
            raise subprocess.TimeoutExpired("the worker", LIMIT_S)

    async def commanded(self, kind: str, times: int) -> None:
        """Wait until so many commands of a kind were sent to it."""
        while self.sent.count(kind) < times:
            await asyncio.sleep(0)


class Hold:
    """Stops a worker's engine after steps of these numbers, from 1, each until `release_after`."""

    def __init__(self, worker: ThreadWorker, *numbers: int) -> None:
        self._worker, self._numbers, self._num_steps = worker, numbers, 0
        self._reached, self._go = threading.Semaphore(0), threading.Semaphore(0)
        worker.engine.watch_steps(self._held)

    def _held(self, plan: Plan, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps in self._numbers:
            self._reached.release()
            assert self._go.acquire(timeout=LIMIT_S)

    async def release_after(self, work: Coroutine[Any, Any, Any], kind: str) -> Any:
        """Begin `work` at the next stop, and release once it has sent a command of this kind."""
        assert await asyncio.to_thread(self._reached.acquire, timeout=LIMIT_S)
        num, task = self._worker.sent.count(kind), asyncio.ensure_future(work)
        await self._worker.commanded(kind, num + 1)
        self._go.release()
        return await task


class Threads:
    """Starts workers in threads over copies of one model; `started` are all of them.

    `receives` may change each report, and makes it None where the worker dies. The process of a dead worker
    ends only when it `may_end`, and never if it is `unkillable`. `channels` makes the workers' ends of the
    connections; they may raise Killed. `networks` makes that of each worker, None for shared memory.
    """

    def __init__(
        self, model: Model, receives: Callable[[str, Frame], Frame | None] = lambda name, frame: frame
    ) -> None:
        self.model, self.receives, self.started = model, receives, list[ThreadWorker]()
        self.may_end, self.unkillable = threading.Event(), False
        self.networks: Callable[[], KvNetwork | None] = lambda: None
        self.channels: Callable[[str, socket.socket], Channel] = lambda name, theirs: Channel(
            theirs, KEY, ROLE_COMMANDS
        )
        self.may_end.set()

    def __call__(self, name: str, weights: int, slots: Sequence[int]) -> ThreadWorker:
        engine = paged(copy.deepcopy(self.model), max_cache_tokens=1024, max_requests=16, block_size=BLOCK)
        self.started.append(ThreadWorker(name, engine, weights, slots, self))
        return self.started[-1]

    def named(self, role: str) -> list[ThreadWorker]:
        return [one for one in self.started if one.name.startswith(role)]


def over(
    threads: Threads,
    kind: RouteKind = "apart",
    *,
    apart_above: int = 0,
    num_prefill: int = 1,
    num_decode: int = 1,
    max_samples: int = 64,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    **options: Any,
) -> PrefillDecodeEngine:
    twin = paged(copy.deepcopy(threads.model), max_cache_tokens=1024, max_requests=16, block_size=BLOCK)
    return PrefillDecodeEngine(
        threads,
        named_weights(threads.model) if tensors is None else tensors,
        twin.check_request,
        decode,
        block_size=BLOCK,
        num_workers={"prefill": num_prefill, "decode": num_decode},
        route=RoutePolicy(kind, apart_above),
        max_samples=max_samples,
        **options,
    )


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time can be set `forward_s` seconds."""

    forward_s = 0.0

    def time(self) -> float:
        return super().time() + self.forward_s


def within(work: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await work

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(limited())
