"""The worker process of an isolated reward: scores completions one after another, or on an event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from millrace.observability.plain import plain_text
from millrace.processes.worker import START, WorkerChannel, limit_resources
from millrace.rewards.confinement import refuse_beyond, refuse_effects
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.row_encoding import decode_row
from millrace.rewards.sandbox import Permissions
from millrace.rewards.verifiers import ScoringFunction, is_async, make_scoring_function, verdict, verdict_async


class ScoreChannel(Protocol):
    """The part of a `WorkerChannel` that scoring uses."""

    def __iter__(self) -> Iterable[tuple[int, bytes]]: ...

    def reply(self, id: int, body: bytes) -> None:
        """Send the reply to a request."""


def serve(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Score completions until the parent closes the channel; see `ScoreRequests` for its messages."""
    spec, permissions = settings["spec"], Permissions(**settings["permissions"])
    own_function = spec["kind"] == "function"
    if own_function:
        limit_resources(permissions.memory_bytes, permissions.file_bytes)
        refuse_beyond(permissions.writable, network=permissions.network)
    try:
        score = make_scoring_function(spec)
        if settings["concurrency"] is not None and not is_async(score):
            raise RewardError(
                f"reward function {spec['function']}: concurrency is for `async def` functions, which this "
                "is not; remove it, or raise workers"
            )
    except RewardError as error:
        channel.reply(START, plain_text(str(error), 2000).encode())
        return
    if not own_function:  # only now, since its libraries write caches where they are imported
        limit_resources(permissions.memory_bytes, permissions.file_bytes)
        refuse_effects()
    channel.reply(START, b"")
    if is_async(score):
        asyncio.run(score_concurrently(channel, score, settings["timeout_s"]))
    else:
        score_in_turn(channel, score)


class ScoreRequests:
    """Reads the parent's messages.

    A message without reply lists prompts, for the completions that follow. A request is the place of its
    prompt in that list and the text of the completion; or it asks whether the function is `async def`.
    """

    def __init__(self) -> None:
        self._prompts: list[tuple[str, str, dict[str, Any]]] = []

    def read(self, body: bytes) -> tuple[str, str, str, dict[str, Any]] | bool | None:
        """Return prompt, completion, answer and row to score; True if asked; None if there is no reply."""
        message = json.loads(body)
        if message == "is_async":
            return True
        if isinstance(message, dict):
            self._prompts = [(text, answer, decode_row(row)) for text, answer, row in message["prompts"]]
            return None
        place, completion = message
        text, answer, row = self._prompts[place]
        return text, completion, answer, row


def score_in_turn(channel: ScoreChannel, score: ScoringFunction) -> None:
    """Score one completion after another; the parent enforces the timeout."""
    requests = ScoreRequests()
    for id, body in channel:
        found = requests.read(body)
        if isinstance(found, tuple):
            channel.reply(id, json.dumps(verdict(score, *found)).encode())
        elif found:
            channel.reply(id, b"false")


async def score_concurrently(channel: ScoreChannel, score: ScoringFunction, timeout_s: float) -> None:
    """Score each completion as soon as it arrives; one that takes longer than `timeout_s` fails alone.

    The parent limits how many there are at once. The channel is read in a thread, since its socket blocks.
    """
    requests, ended, loop = ScoreRequests(), asyncio.Event(), asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    async def answer(id: int, work: tuple[str, str, str, dict[str, Any]]) -> None:
        task = asyncio.create_task(verdict_async(score, *work))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        # A function may ignore its cancellation, so that is not waited for.
        task.cancel()
        found = task.result() if done else ("failed", 0.0, f"took longer than {timeout_s:g} s")
        channel.reply(id, json.dumps(found).encode())

    def received(id: int, body: bytes) -> None:
        found = requests.read(body)
        if isinstance(found, tuple):
            task = asyncio.create_task(answer(id, found))
            running.add(task)
            task.add_done_callback(running.discard)
        elif found:
            channel.reply(id, b"true")

    def receive() -> None:
        for id, body in channel:
            loop.call_soon_threadsafe(received, id, body)
        loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    await ended.wait()
    if running:
        await asyncio.wait(running)
