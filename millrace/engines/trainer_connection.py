"""A worker's connection to the trainer in an event loop, and the tasks that its commands start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from millrace.engines.wire import Channel, Frame


class TrainerConnection:
    """Receives commands and sends reports; an error of a task ends `serve`.

    It belongs to the running event loop.

    Attributes:
        num_turns: number of commands that were started and of completions; results are numbered by it.
    """

    def __init__(self, channel: Channel) -> None:
        self.num_turns = 0
        self._channel = channel
        self._started: list[tuple[int, list[str]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, handle: Callable[[Frame], None]) -> None:
        """Report `ready`, and handle commands until the trainer closes the connection.

        Raises:
            Exception: that of a task.
        """
        self.send("ready")
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._channel.fileno(), readable.set)
        try:
            while not self._channel.ended:
                for frame in self._channel.receive():
                    handle(frame)
                waiting = asyncio.ensure_future(readable.wait())
                either: list[asyncio.Future[Any]] = [waiting, self._failure]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                readable.clear()
                if self._failure.done():
                    self._failure.result()
        finally:
            loop.remove_reader(self._channel.fileno())
            loop.remove_writer(self._channel.fileno())
            if not self._failure.done():
                self._failure.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def note(self, frame: Frame) -> None:
        """Count a command that is started; the next report names it."""
        self.num_turns += 1
        self._started.append((self.num_turns, [frame.kind]))

    def restart_turns(self) -> None:
        """Count from 0 again."""
        self.num_turns, self._started = 0, []

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def send(
        self,
        kind: str,
        metadata: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Send a report with the commands that were started since the last one; see `Channel.send`."""
        started, self._started = self._started, []
        self._channel.send(kind, {**(metadata or {}), "commands_started": started}, arrays)
        if self._channel.unsent:
            asyncio.get_running_loop().add_writer(self._channel.fileno(), self._flush)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._failure.done():
            return
        if (error := task.exception()) is not None:
            self._failure.set_exception(error)

    def _flush(self) -> None:
        self._channel.flush()
        if not self._channel.unsent:
            asyncio.get_running_loop().remove_writer(self._channel.fileno())
