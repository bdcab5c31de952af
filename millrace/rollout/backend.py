"""Where engines and rewards run: in this thread, in processes, on a cluster, or on a virtual clock. No torch.

`rollout/manager.py` makes the decisions. An `EngineBackend` executes its commands and reports events. Both
are data: `recorder.py` writes them to the event log, and a replay reads them from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.environments.running_episodes import CloseEpisode, EnvironmentReply, StepEnvironment
from millrace.protocols import EpisodeReward
from millrace.types import Completion, Episode, Outcome, Prompt, SamplingParams


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
    """A new engine, or one restarted under a new name; it has no weights before its first `LoadWeights`."""

    engine: str


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A new target number of engines, from a scale request or because no more engines can be started.

    Attributes:
        number: the target, 1 or more.
        reason: why the target is below the requested number; empty if it equals it.
        id: of the user's request; empty if there is none.
    """

    number: int
    reason: str = ""
    id: str = ""


# For one engine: pairs of a turn and the names of the commands that it started before it.
Turns = Sequence[tuple[int, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class CommandsStarted:
    """Which commands an engine started before which of its turns, a turn being a step or a weight update.

    An engine is a deterministic function of its weights and of these. `blocking_submit` is a `submit` for a
    caller who waits, such as an evaluation. No decision depends on this event; a replay needs it.
    """

    engine: str
    commands: Turns


@dataclass(frozen=True, slots=True)
class BlockingRequest:
    """Blocking requests, by number, were submitted to an engine. No decision depends on it, as above."""

    engine: str
    requests: Sequence[int]


Event = (
    GenerateResult
    | WeightsLoaded
    | ScoreResult
    | EngineLost
    | EngineJoined
    | ScaleRequest
    | CommandsStarted
    | BlockingRequest
    | EnvironmentReply
)
# The reason in `EngineLost` of an engine that was drained and stopped.
DRAINED = "it was drained: the target number of engines is lower"


@dataclass(frozen=True, slots=True)
class RestartTurns:
    """Engines count their turns from here on, and report `CommandsStarted`; nothing may be in flight.

    Attributes:
        recorded: replay only: for each engine, what it starts before which turn and in which order, whatever
            comes first here.
    """

    recorded: Mapping[str, Turns] | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit requests, those of one prompt together; each ends in `GenerateResult` or `EngineLost`."""

    engine: str
    requests: Sequence[GenerateRequest]


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort requests and return their partial output."""

    engine: str
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Copy the trainer's weights for engines to load; afterwards the trainer may change them.

    Only the trainer's thread executes it. If the weights are sharded, all ranks take part.
    """

    version: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load the newest copied version into the engine; ends in `WeightsLoaded` or `EngineLost`."""

    engine: str
    version: int


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Stop an engine that missed its deadline, as if it had crashed; ends in `EngineLost`."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Set the target number of engines, also for replacing engines that are lost later.

    Scaling up starts the missing engines; each ends in `EngineJoined`, or in `ScaleRequest` if it cannot be
    started. Scaling down stops engines that have not joined; the caller picks the others with `Retire`.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Stop a surplus engine that has no in-flight request; ends in `EngineLost`."""

    engine: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Replay only: start an engine of this name, which repeats its recorded turns; ends in `EngineJoined`."""

    engine: str
    recorded: Turns


@dataclass(frozen=True, slots=True)
class Score:
    """Score texts, each an answer to the prompt in its place; ends in `ScoreResult`.

    `episodes` are those that the texts end; empty if the reward does not look at them.
    """

    id: str
    prompts: Sequence[Prompt]
    texts: Sequence[str]
    episodes: Sequence[Episode] = ()


EngineCommand = (
    RestartTurns
    | Submit
    | Abort
    | UpdateWeights
    | LoadWeights
    | StopEngine
    | Scale
    | Retire
    | StartEngine
    | Score
    | StepEnvironment
    | CloseEpisode
)


def score_all(reward: EpisodeReward, calls: Sequence[Score]) -> list[Outcome]:
    """Score the texts of several calls in one call of the reward; return their outcomes in order."""
    prompts = [prompt for call in calls for prompt in call.prompts]
    texts = [text for call in calls for text in call.texts]
    episodes = [episode for call in calls for episode in call.episodes]
    return reward.score(prompts, texts, episodes)


class ScaleRequests(Protocol):
    """Scale requests: changes of the number of engines at run time."""

    def poll(self) -> list[ScaleRequest]:
        """Return the requests since the last call."""
        ...

    def close(self) -> None:
        """Accept no more requests."""
        ...


class EngineBackend(Protocol):
    """An engine backend: executes commands and reports events.

    One thread calls `wait`; another thread may call the other methods at the same time. A command returns at
    once or after a copy. Events may arrive late, twice or out of order. A command for a lost engine or for a
    finished request is ignored: the event that reports it is still in flight.
    """

    def now(self) -> float:
        """Return the time in seconds on the clock of all deadlines."""
        ...

    def engines(self) -> list[str]:
        """Return the names of the live engines; an engine has no weights before its first `LoadWeights`."""
        ...

    def execute(self, command: EngineCommand) -> None:
        """Execute a command; its result arrives later as an event."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` returns events, at most until the timeout.

        Raises:
            RuntimeError: no event can occur any more, for instance because the engine crashes at every start.
        """
        ...

    def poll(self) -> list[Event]:
        """Return the events since the last call, without waiting."""
        ...

    def close(self) -> None:
        """Stop every engine and reward worker; a second call has no effect."""
        ...
