"""A runtime that does only what a test tells it, and rollouts over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from millrace.data.prompts import PromptStream
from millrace.environments.running_episodes import CloseEpisode, EnvironmentReply, StepEnvironment
from millrace.rollout.backend import (
    Abort,
    EngineCommand,
    EngineLost,
    Event,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    Retire,
    Scale,
    Score,
    ScoreResult,
    StopEngine,
    Submit,
    UpdateWeights,
    WeightsLoaded,
)
from millrace.rollout.episodes import EpisodeRules
from millrace.rollout.manager import RolloutManager
from millrace.rollout.staleness import StalenessController, StalenessPolicy
from millrace.types import Completion, Episode, Outcome, Prompt, SamplingParams

RULES = EpisodeRules(
    seed=0,
    max_turns=10,
    max_tokens=10_000,
    ends_at_length=True,
    attempts=2,
    invalid_score=0.0,
    scored=True,
)
PROMPTS = {f"p{i}": Prompt(f"p{i}", (100 + i, 5), f"text {i}") for i in range(6)}


class Manual:
    """Keeps commands as tuples in `commands`; `poll` gives what is in `events`; `wait` lets time pass.

    The replies of `environment` wait in `replies`.
    """

    def __init__(
        self,
        *engines: str,
        sleeps: bool = False,
        environment: Callable[[StepEnvironment], EnvironmentReply] | None = None,
    ) -> None:
        self.environment = environment
        self.replies: list[EnvironmentReply] = []
        self.alive = list(engines)
        self.commands: list[tuple[Any, ...]] = []
        self.episodes: list[Episode] = []
        self.events: list[Event] = []
        self.requests: dict[str, tuple[str, GenerateRequest]] = {}
        self.calls: dict[str, list[tuple[str, str]]] = {}
        self.now_s, self.sleeps = 0.0, sleeps

    def now(self) -> float:
        return self.now_s

    def engines(self) -> list[str]:
        return list(self.alive)

    def execute(self, command: EngineCommand) -> None:
        match command:
            case Submit(engine, requests):
                self.commands.append(("submit", engine, [request.id for request in requests]))
                self.requests |= {request.id: (engine, request) for request in requests}
            case Abort(engine, ids):
                self.commands.append(("abort", engine, list(ids)))
            case UpdateWeights(version):
                self.updated = version
            case LoadWeights(engine, version):
                assert version == self.updated
                self.commands.append(("load", engine, version))
            case StopEngine(engine, reason):
                self.commands.append(("stop", engine, reason))
                self.events.append(EngineLost(engine, reason))
            case Scale(number):
                self.commands.append(("scale", number))
            case Retire(engine):
                self.commands.append(("retire", engine))
            case StepEnvironment():
                assert self.environment is not None
                self.replies.append(self.environment(command))
            case CloseEpisode(episode):
                self.commands.append(("close", episode))
            case Score(id, prompts, texts, episodes):
                self.episodes += episodes
                self.commands.append(("score", id, list(texts)))
                answers = zip(prompts, texts, strict=True)
                self.calls[id] = [(prompt.id, text) for prompt, text in answers]

    def wait(self, timeout_s: float) -> None:
        if not self.events:
            self.now_s += timeout_s
            if self.sleeps:
                time.sleep(0.001)

    def poll(self) -> list[Event]:
        found, self.events = self.events, []
        return found

    def close(self) -> None:
        self.alive.clear()

    def taken(self, kind: str) -> list[tuple[Any, ...]]:
        """The orders of this kind so far; they are forgotten."""
        found = [command for command in self.commands if command[0] == kind]
        self.commands = [command for command in self.commands if command[0] != kind]
        return found

    def generated(
        self, id: str, *, version: int | tuple[int, int] = 0, text: str | None = None, reason: str = "stop"
    ) -> GenerateResult:
        """The draw is over: two tokens, of which the first is the seed, of one version or two."""
        engine, request = self.requests[id]
        return GenerateResult(engine, id, completion(request, version, text, reason), 3, 5)

    def scored(self, id: str) -> ScoreResult:
        """An answer to each text."""
        return ScoreResult(id, tuple(Outcome("score", worth(text)) for _, text in self.calls[id]))


def worth(text: str) -> float:
    return float(sum(text.encode()))


def completion(
    request: GenerateRequest, version: Any = 0, text: str | None = None, reason: Any = "stop"
) -> Completion:
    seed = request.params.seed
    return Completion(
        token_ids=(seed, 9),
        logprobs=np.array([-0.25, -seed / 7], np.float32),
        versions=np.broadcast_to(np.array(version, np.int32), 2),
        finish_reason=reason,
        text=f"says {seed}" if text is None else text,
        reason="the logits are not finite" if reason == "error" else "",
    )


def seeded(number: int, sample: int, turn: int) -> SamplingParams:
    return SamplingParams(max_tokens=50, seed=100 * number + 10 * sample + turn)


class Notes(list):
    """A log in memory, which begins as a run's does."""

    def add(self, kind: str, /, **facts: Any) -> None:
        self.append({"kind": kind, **facts})

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self if event["kind"] in kinds]


def rollouts_over(
    backend: Any,
    *,
    num_batches: int = 3,
    groups_per_step: int = 2,
    staleness: int = 0,
    begin: int | None = 0,
    notes: Notes | None = None,
    rules: dict[str, Any] | None = None,
    **given: Any,
) -> tuple[RolloutManager, StalenessController, Notes]:
    notes = Notes() if notes is None else notes
    kept = StalenessPolicy(groups_per_step=groups_per_step, staleness=staleness, **rules or {})
    if not notes:
        notes.add("begin", rules=asdict(kept), num_batches=num_batches)
    controller = StalenessController(kept, num_batches=num_batches, log_event=notes.add)
    rollouts = RolloutManager(
        controller,
        backend,
        PromptStream(list(PROMPTS.values()), seed=0, shuffle=False),
        **{
            "prompts": PROMPTS,
            "params": seeded,
            "num_samples": 2,
            "log_event": notes.add,
        }
        | ({"episode_rules": RULES} if getattr(backend, "environment", None) else {})
        | given,
    )
    if getattr(backend, "environment", None):
        rollouts.handle = partial(handle_with_replies, rollouts.handle, backend)
    if begin is not None:
        rollouts.begin(begin)
    return rollouts, controller, notes


def handle_with_replies(handle: Callable[[Any], None], backend: Manual, events: Sequence[Event]) -> None:
    """Handle events, then the replies of the environment to them."""
    handle(events)
    while backend.replies:
        replies, backend.replies = backend.replies, []
        handle(replies)


def serving(*engines: str, version: int = 0) -> list[Event]:
    return [WeightsLoaded(engine, version) for engine in engines]
