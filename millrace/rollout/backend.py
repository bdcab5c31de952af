"""Where engines and rewards run: in this thread, in processes, on a cluster, or on a virtual clock. No torch.

`rollout/manager.py` decides, a `Runtime` carries out and tells what happened. Orders return at once or
after a copy; whatever takes long ends in an event that `wait` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.types import Completion, Outcome, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One completion wanted.

    Attributes:
        id: never used before; a completion that is drawn again elsewhere has another.
        prompt: its tokens, every turn so far among them.
        params: how to draw, the seed among them.
        drawn: what was drawn of it before, perhaps with other weights; the completion begins with it. An
            engine in the trainer's thread draws it again.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    drawn: Completion | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draw ended: complete, aborted with what it had (`finish_reason` abort), or failed (error).

    Attributes:
        engine: that drew it.
        id: of the draw.
        completion: what was drawn; the version of its tokens never falls.
        began: number of the engine step before which the engine took the draw up.
        ended: number of the engine step before which the draw had ended, an abort among the causes.
    """

    engine: str
    id: str
    completion: Completion
    began: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine draws with these weights from its step `at` on; checksums of both sides agree."""

    engine: str
    version: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """A call of the reward ended.

    Attributes:
        id: of the call.
        outcomes: one for each text, in order; those of a call that died or hung are failures that say why.
    """

    id: str
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """An engine died, hangs, or could not prove its weights.

    What it was drawing is gone, and its name is not used again.
    """

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A new engine, or one restarted under a new name; it has no weights before its first `load`."""

    engine: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """So many engines are wanted from now on: somebody asked for them, or no more can be had.

    Attributes:
        number: 1 or more.
        reason: why they are fewer than were asked for; empty where they are what was asked for.
    """

    number: int
    reason: str = ""


Event = Drawn | Loaded | Judged | Lost | Joined | Wanted
# Why an engine is lost that was retired.
RETIRED = "it was retired: fewer engines are wanted"
# A kind of the event log and its facts.
Record = tuple[str, dict[str, Any]]


class ScaleRequests(Protocol):
    """Requests for another number of engines while a run goes on.

    Attributes:
        heard: the request that was read last; empty before any.
    """

    heard: str

    def look(self) -> list[Wanted]:
        """What was asked for since the last look."""
        ...

    def close(self) -> None:
        """Take no more requests."""
        ...


class Runtime(Protocol):
    """What carries out orders.

    One thread calls `wait`; another may call the rest meanwhile. Events may come late, twice or in another
    order than they happened. An order for an engine that is lost, or about a draw that has ended, is ignored:
    the event that says so is under way.
    """

    def now(self) -> float:
        """Seconds on the clock that deadlines are meant in."""
        ...

    def engines(self) -> list[str]:
        """Those that are alive; they have no weights before their first `load`."""
        ...

    def submit(self, engine: str, draws: Sequence[Draw]) -> None:
        """Begin to draw; samples of one prompt come in one call. Each ends in `Drawn`, or all in `Lost`."""
        ...

    def abort(self, engine: str, ids: Sequence[str]) -> None:
        """End draws now, with what they have."""
        ...

    def offer(self, version: int) -> None:
        """Copy the trainer's weights as they are, for engines to load; once it returns they may change again.

        The trainer's own thread alone calls it: where ranks share the weights out, all of them take part.
        """
        ...

    def load(self, engine: str, version: int) -> None:
        """Have the engine load the version that was offered last; ends in `Loaded` or `Lost`."""
        ...

    def lose(self, engine: str, reason: str) -> None:
        """Give an engine up that did not answer in time, as if it had died; ends in `Lost`."""
        ...

    def want(self, number: int) -> None:
        """Have so many engines from now on, also where some are lost later.

        Those that are missing are started, which ends in `Joined`, or in `Wanted` where they cannot be had.
        Where there are too many, those end that have not joined; of the others `retire` says which.
        """
        ...

    def retire(self, engine: str) -> None:
        """End an engine that nobody wants any more and that draws nothing; ends in `Lost`."""
        ...

    def judge(self, id: str, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
        """Score texts, each an answer to the prompt in its place; ends in `Judged`."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """What happened, at least one event; empty if nothing did in time.

        Raises:
            RuntimeError: nothing can happen any more, such as an engine that dies each time it is started.
        """
        ...

    def begin(self) -> None:
        """Keep `records` from here on; nothing is under way."""
        ...

    def records(self) -> list[Record]:
        """What a replay has to know beside events, since the last call: see `recorded.Script`."""
        ...

    def close(self) -> None:
        """End every engine and reward; harmless when called twice."""
        ...


class Unrecorded:
    """A runtime in which all follows from the order of calls, so that a replay has to know no more."""

    def begin(self) -> None:
        """Nothing is kept."""

    def records(self) -> list[Record]:
        """None."""
        return []


def named(event: Event) -> str:
    """An event in a few words, which tell it from every other one of a run."""
    match event:
        case Drawn():
            return f"drawn {event.id}"
        case Judged():
            return f"judged {event.id}"
        case Loaded():
            return f"loaded {event.engine} {event.version}"
        case Lost():
            return f"lost {event.engine} {event.reason}"
        case Joined():
            return f"joined {event.engine}"
        case Wanted():
            return f"wanted {event.number} {event.reason}".rstrip()
