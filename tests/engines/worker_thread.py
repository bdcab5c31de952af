"""A worker of an engine in a thread, and the trainer's end of its connection."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from millrace.engines.wire import COMMANDS, REPORTS, Channel
from millrace.processes.worker import KEY_BYTES
from millrace.transport.shared_memory import SharedWeights
from tests.engines.test_engine_worker import LIMIT_S, Trainer

KEY = bytes(KEY_BYTES)


class Served:
    """What a test has of a worker.

    Attributes:
        trainer: the other end of its connection.
        loop: the worker's, once it runs.
        error: what ended it.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.trainer = Trainer(Channel(ours, KEY, REPORTS), SharedWeights(), [])
        self.error: Exception | None = None

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a function in the worker's thread."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (function(*arguments), done.set()))
        assert done.wait(LIMIT_S)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Let the worker's event loop turn until a condition holds."""
        for _ in range(100_000):
            if holds():
                return
            self.call(lambda: None)
        raise AssertionError("the worker did not do it")

    def fails(self) -> str:
        """Wait until the worker has failed; return its sentence."""
        while not self.trainer.channel.ended:
            assert select.select([self.trainer.channel], [], [], LIMIT_S)[0]
            self.trainer.frames += self.trainer.channel.receive()
        return str(self.error)


S = TypeVar("S", bound=Served)


@contextmanager
def in_thread(served: S, make: Callable[[Channel, int], Any], *failures: type[Exception]) -> Iterator[S]:
    """Run a worker, made of its channel and the descriptor of the weights, which may end by `failures`."""
    ready = threading.Event()

    async def run() -> None:
        served.loop = asyncio.get_running_loop()
        worker = make(Channel(served.theirs, KEY, COMMANDS), served.trainer.weights.handle)
        ready.set()
        try:
            await worker.serve()
        except failures as error:
            served.error = error
        finally:
            served.theirs.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield served
    finally:
        served.trainer.channel.close()
        thread.join(LIMIT_S)
        served.trainer.weights.close()
    assert not thread.is_alive()
