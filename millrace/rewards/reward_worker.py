"""The worker process of an isolated reward: scores completions one after another, or on an event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from millrace.observability.plain import plain_text
from millrace.processes.worker import WorkerChannel, limit_resources
from millrace.rewards.confinement import refuse_beyond, refuse_effects
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.row_encoding import decode_row
from millrace.rewards.sandbox import Permissions
from millrace.rewards.verifiers import (
    ScoringFunction,
    is_async,
    make_scoring_function,
    sees_episodes,
    verdict,
    verdict_async,
)
from millrace.types import Episode, EpisodeTurn


class ScoreChannel(Protocol):
    """The part of a `WorkerChannel` that scoring uses."""

    def __iter__(self) -> Iterator[tuple[int, bytes]]: ...

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
        channel.refuse(plain_text(str(error), 2000))
        return
    if not own_function:  # only now, since its libraries write caches where they are imported
        limit_resources(permissions.memory_bytes, permissions.file_bytes)
        refuse_effects()
    channel.started(is_async=is_async(score), sees_episodes=sees_episodes(spec))
    if is_async(score):
        asyncio.run(score_concurrently(channel, score, timeout_s=settings["timeout_s"]))
    else:
        score_in_turn(channel, score)


class ScoreRequests:
    """Reads the parent's messages.

    A message without reply lists prompts, for the completions that follow. A request has the place of its
    prompt in that list, the text of the completion, and the episode if the function sees those.
    """

    def __init__(self) -> None:
        self._prompts: list[tuple[str, str, dict[str, Any]]] = []

    def read(self, body: bytes) -> tuple[Any, ...] | None:
        """Return the arguments of the function; None for a list of prompts."""
        message = json.loads(body)
        if isinstance(message, dict):
            self._prompts = [(text, answer, decode_row(row)) for text, answer, row in message["prompts"]]
            return None
        place, completion, *episodes = message
        text, answer, row = self._prompts[place]
        return text, completion, answer, row, *map(_episode, episodes)


def _episode(fields: Mapping[str, Any]) -> Episode:
    return Episode(**{**fields, "turns": tuple(EpisodeTurn(**turn) for turn in fields["turns"])})


def score_in_turn(channel: ScoreChannel, score: ScoringFunction) -> None:
    """Score one completion after another; the parent enforces the timeout."""
    requests = ScoreRequests()
    for id, body in channel:
        if (given := requests.read(body)) is not None:
            channel.reply(id, json.dumps(verdict(score, *given)).encode())


async def score_concurrently(channel: ScoreChannel, score: ScoringFunction, *, timeout_s: float) -> None:
    """Score each completion as soon as it arrives; one that takes longer than `timeout_s` fails alone.

    The parent limits how many there are at once. The channel is read in a thread, since its socket blocks.
    """
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    requests = ScoreRequests()

    async def answer(id: int, work: tuple[Any, ...]) -> None:
        task = asyncio.create_task(verdict_async(score, *work))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        # A function may ignore its cancellation, so that is not waited for.
        task.cancel()
        found = task.result() if done else ("failed", 0.0, f"took longer than {timeout_s:g} s", {})
        channel.reply(id, json.dumps(found).encode())

    def received(id: int, body: bytes) -> None:
        if (given := requests.read(body)) is not None:
            task = asyncio.create_task(answer(id, given))
            running.add(task)
            task.add_done_callback(running.discard)

    def receive() -> None:
        for id, body in channel:
            loop.call_soon_threadsafe(received, id, body)
        loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    await ended.wait()
    if running:
        await asyncio.wait(running)
