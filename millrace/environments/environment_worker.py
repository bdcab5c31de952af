"""The worker process of environments: many episodes at a time, on an event loop and a pool of threads."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import EnvironmentFailed, RunningEpisodes, bounded
from millrace.errors import SetupError
from millrace.observability.plain import plain_text
from millrace.processes.worker import WorkerChannel
from millrace.rewards.row_encoding import decode_row
from millrace.types import Action, Reply, Task

# Steps that are not coroutines run in so many threads.
NUM_THREADS = 64
# A step that hangs in a thread keeps it; with so many of them the worker ends, and another replaces it.
MAX_STUCK = 16


def serve(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Run the steps that the parent sends until it closes the channel."""
    try:
        make = environment_factory(*(settings[key] for key in ("kind", "function", "options")))
    except SetupError as error:
        channel.refuse(plain_text(str(error), 2000))
        return
    channel.started()
    sizes = settings["max_characters"], settings["max_reply_bytes"]
    asyncio.run(_Worker(channel, make, *sizes).run())


class _Worker:
    def __init__(
        self, channel: WorkerChannel, make: Callable[[], Any], max_characters: int, max_reply_bytes: int
    ) -> None:
        self._channel, self._max_characters = channel, max_characters
        self._max_reply_bytes = max_reply_bytes
        self._episodes = RunningEpisodes(make, self._call)
        # The task and all actions of each episode in progress.
        self._given: dict[str, tuple[Task, list[Action]]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "environment")
        self._running: dict[int, asyncio.Task[None]] = {}
        self._num_stuck = 0

    async def run(self) -> None:
        """Run until the parent closes; frames are read by a thread, since the socket blocks."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def read() -> None:
            for id, body in self._channel:
                loop.call_soon_threadsafe(self._received, id, body)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()
        # Threads that hang would keep the process.
        os._exit(0)

    def _received(self, id: int, body: bytes) -> None:
        message = json.loads(body) if body else {}
        if "closed" in message:
            self._given.pop(message["closed"], None)
            self._spawn(id, self._episodes.close(message["closed"]))
        elif body:
            self._spawn(id, self._step(id, message))
        elif id in self._running:
            self._running.pop(id).cancel()

    def _spawn(self, id: int, work: Any) -> None:
        task = self._running[id] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._running.pop(id, None))

    async def _step(self, id: int, message: dict[str, Any]) -> None:
        episode, timeout_s = message["episode"], message["timeout_s"]
        what, work = self._asked(message)
        try:
            reply, state = await asyncio.wait_for(self._with_state(episode, work), timeout_s)
        except EnvironmentFailed as error:
            answer: dict[str, Any] = {"failure": str(error)}
        except TimeoutError:
            answer = {"failure": f"{what} took longer than {timeout_s:g} s"}
            await self._episodes.close(episode)
        else:
            answer = {**asdict(bounded(reply, self._max_characters)), "saved": state}
        body = json.dumps(answer).encode()
        if len(body) > self._max_reply_bytes:
            answer = {
                "failure": f"replied with {len(body)} bytes, and at most {self._max_reply_bytes} are read"
            }
            body = json.dumps(answer).encode()
            await self._episodes.close(episode)
        if "failure" in answer or answer["done"]:
            self._given.pop(episode, None)
        self._channel.reply(id, body)

    def _asked(self, message: dict[str, Any]) -> tuple[str, Awaitable[Reply]]:
        """Return what a message asks for, in words, and the reply to it."""
        episode = message["episode"]
        if message["refuses"]:
            return "a reply after a refused one", self._episodes.refuse(episode)
        if (given := message["task"]) is not None:
            self._given[episode] = Task(**given | {"row": decode_row(given["row"])}), []
        task, actions = self._given[episode]
        tuples = ("token_ids", "logprobs", "token_texts")
        actions += [
            Action(**given | {name: tuple(given[name]) for name in tuples}) for given in message["actions"]
        ]
        repeated, state = message["is_repeated"], message["state"]
        what = f"step {len(actions)}" if actions else "begin"
        return what, self._episodes.reply(episode, task, actions, is_repeated=repeated, state=state)

    async def _with_state(self, episode: str, reply: Awaitable[Reply]) -> tuple[Reply, Any]:
        """Return a reply, and what `save` returns after it."""
        return await reply, await self._episodes.save(episode)

    async def _call(self, method: Callable[..., Any], *given: Any) -> Any:
        """Call a coroutine function here, another function in a thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*given)
        future = self._threads.submit(method, *given)
        try:
            found = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.done():
                self._num_stuck += 1
                if self._num_stuck == MAX_STUCK:
                    os._exit(1)
            raise
        return await found if inspect.isawaitable(found) else found
