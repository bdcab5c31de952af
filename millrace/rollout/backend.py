"""Where engines and rewards run: in this thread, in processes, on a cluster, or on a virtual clock. No torch.

`rollout/manager.py` makes the decisions. An `EngineBackend` executes its commands and reports events. A
command returns at once or after a copy; its result arrives later as an event from `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.types import Completion, Outcome, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for one completion.

    Attributes:
        id: unique; a completion that is regenerated on another engine gets a new id.
        prompt: token ids, including every turn so far.
        params: sampling parameters, including the seed.
        partial_output: the prefix generated earlier, perhaps with other weights; the completion starts with
            it. An engine in the trainer's thread regenerates it.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    partial_output: Completion | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The result of a request: complete, aborted with partial output (`finish_reason` abort), or an error.

    Attributes:
        engine: name of the engine that generated it.
        id: of the request.
        completion: the generated tokens; their versions never decrease.
        began: number of the engine step before which the engine admitted the request.
        ended: number of the engine step before which the request had ended, also by an abort.
    """

    engine: str
    id: str
    completion: Completion
    began: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """An engine samples with these weights from its step `at` on; checksums of both sides agree."""

    engine: str
    version: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The result of a reward call.

    Attributes:
        id: of the call.
        outcomes: one for each text, in order; if the call crashed or hung, failures with the reason.
    """

    id: str
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine crashed, hangs, or failed to verify its weights.

    Its in-flight requests are lost, and its name is not reused.
    """

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A new engine, or an engine restarted under a new name; it has no weights before its first `load`."""

    engine: str


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A new target number of engines, from a scale request or because no more engines can be started.

    Attributes:
        number: the target, 1 or more.
        reason: why the target is below the requested number; empty if it equals it.
    """

    number: int
    reason: str = ""


Event = GenerateResult | WeightsLoaded | ScoreResult | EngineLost | EngineJoined | ScaleRequest
# The reason in `EngineLost` of an engine that was drained and stopped.
DRAINED = "it was drained: the target number of engines is lower"
# An event kind of the event log and its fields.
Record = tuple[str, dict[str, Any]]


class ScaleRequests(Protocol):
    """Scale requests: changes of the number of engines at run time.

    Attributes:
        last_request: the request that was read last; empty before the first.
    """

    last_request: str

    def poll(self) -> list[ScaleRequest]:
        """Return the requests since the last call."""
        ...

    def close(self) -> None:
        """Accept no more requests."""
        ...


class EngineBackend(Protocol):
    """An engine backend: executes commands and reports events.

    One thread calls `wait`; another thread may call the other methods at the same time. Events may arrive
    late, twice or out of order. A command for a lost engine or for a finished request is ignored: the event
    that reports it is still in flight.
    """

    def now(self) -> float:
        """Return the time in seconds on the clock of all deadlines."""
        ...

    def engines(self) -> list[str]:
        """Return the names of the live engines; an engine has no weights before its first `load`."""
        ...

    def submit(self, engine: str, requests: Sequence[GenerateRequest]) -> None:
        """Submit requests, those of one prompt together; each ends in `GenerateResult` or `EngineLost`."""
        ...

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """Abort requests and return their partial output."""
        ...

    def update_weights(self, version: int) -> None:
        """Copy the trainer's weights for engines to load; after it returns the trainer may change them.

        Call it from the trainer's thread only. If the weights are sharded, all ranks take part.
        """
        ...

    def load(self, engine: str, version: int) -> None:
        """Load the newest copied version into the engine; ends in `WeightsLoaded` or `EngineLost`."""
        ...

    def lose(self, engine: str, reason: str) -> None:
        """Stop an engine that missed its deadline, as if it had crashed; ends in `EngineLost`."""
        ...

    def scale(self, number: int) -> None:
        """Set the target number of engines, also for replacing engines that are lost later.

        Scaling up starts the missing engines; each ends in `EngineJoined`, or in `ScaleRequest` if it cannot
        be started. Scaling down stops engines that have not joined; the caller picks the others with
        `retire`.
        """
        ...

    def retire(self, engine: str) -> None:
        """Stop a surplus engine that has no in-flight request; ends in `EngineLost`."""
        ...

    def score(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts, each an answer to the prompt in its place; ends in `ScoreResult`."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """Return at least one event; empty after a timeout.

        Raises:
            RuntimeError: no event can occur any more, for instance because the engine crashes at every start.
        """
        ...

    def begin(self) -> None:
        """Start keeping `records`; nothing is in flight."""
        ...

    def records(self) -> list[Record]:
        """Return what a replay needs besides events, since the last call; see `RecordedCommands`."""
        ...

    def close(self) -> None:
        """Stop every engine and reward worker; a second call has no effect."""
        ...


class Unrecorded:
    """A backend that is a function of the order of calls, so a replay needs no further records."""

    def begin(self) -> None:
        """Keep nothing."""

    def records(self) -> list[Record]:
        """Return no records."""
        return []


def event_name(event: Event) -> str:
    """Describe an event in a few words that are unique within a run."""
    match event:
        case GenerateResult():
            return f"generated {event.id}"
        case ScoreResult():
            return f"scored {event.id}"
        case WeightsLoaded():
            return f"weights_loaded {event.engine} {event.version}"
        case EngineLost():
            return f"engine_lost {event.engine} {event.reason}"
        case EngineJoined():
            return f"engine_joined {event.engine}"
        case ScaleRequest():
            return f"scale {event.number} {event.reason}".rstrip()
