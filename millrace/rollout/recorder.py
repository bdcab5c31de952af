"""The recorder: writes the commands and events of an engine backend to the event log. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import nan
from typing import Any, get_args

from millrace.environments.running_episodes import CloseEpisode, StepEnvironment
from millrace.rollout.backend import EngineBackend, EngineCommand, Event, ScoreResult, Submit
from millrace.rollout.staleness import EventCallback
from millrace.types import Outcome

# What follows from a command or an event in a replay, or is too large for a log.
_NOT_RECORDED = ("completion", "outcomes", "began", "ended", "at", "prompts", "texts", "episodes", "recorded")


# For each class: its kind in the log, and the recorded fields.
_SHAPES = {
    of: (
        re.sub(r"(?<!^)(?=[A-Z])", "_", of.__name__).lower(),
        [field.name for field in fields(of) if field.name not in _NOT_RECORDED],
    )
    for of in (*get_args(EngineCommand), *get_args(Event))
}


def as_record(item: EngineCommand | Event) -> dict[str, Any]:
    """Return a command or an event as JSON data that identifies it within a run."""
    kind, names = _SHAPES[type(item)]
    if isinstance(item, Submit):
        return {"kind": kind, "engine": item.engine, "ids": [request.id for request in item.requests]}
    record = {"kind": kind, **{name: getattr(item, name) for name in names}}
    if record.get("saved", ...) is None:
        # Few environments can be saved.
        del record["saved"]
    return record


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON data, in which null is NaN; see `recorded_outcome`."""
    return {
        "kind": outcome.kind,
        "value": _finite(outcome.value),
        "reason": outcome.reason,
        "parts": {name: _finite(value) for name, value in outcome.parts.items()},
        "extras": dict(outcome.extras),
    }


def recorded_outcome(record: Mapping[str, Any]) -> Outcome:
    """Return the outcome of which `outcome_record` gave these fields."""
    parts = {name: _number(value) for name, value in record["parts"].items()}
    return Outcome(record["kind"], _number(record["value"]), record["reason"], parts, record["extras"])


def _finite(value: float) -> float | None:
    return None if value != value else value


def _number(value: float | None) -> float:
    return nan if value is None else value


class RecordingBackend:
    """An `EngineBackend` that records what another one executes and reports.

    An event counts as received when `poll` returns it: the log has it between the decisions before and after.
    """

    def __init__(
        self,
        backend: EngineBackend,
        log_event: EventCallback,
        scale_requests: Callable[[], Sequence[Event]] = tuple,
        *,
        with_scores: bool = False,
    ) -> None:
        """Wrap a backend.

        Args:
            backend: executes the commands.
            log_event: receives an event `command` for each command, and `events_received` for the events
                that are handled together, like `log.EventLog.add`.
            scale_requests: returns the scale requests since its last call; they are events, too.
            with_scores: whether a replay needs the outcomes of rewards, because it cannot compute them.
        """
        self._backend, self._log_event, self._scale_requests = backend, log_event, scale_requests
        self._with_scores = with_scores
        self.now, self.engines = backend.now, backend.engines
        self.wait, self.close = backend.wait, backend.close

    def execute(self, command: EngineCommand) -> None:
        """Record and execute a command; the steps of environments are known by their replies."""
        if not isinstance(command, StepEnvironment | CloseEpisode):
            record = as_record(command)
            self._log_event("command", command=record.pop("kind"), **record)
        self._backend.execute(command)

    def poll(self) -> list[Event]:
        """Return and record the events since the last call."""
        events = [*self._scale_requests(), *self._backend.poll()]
        if events:
            self._log_event("events_received", events=[self._record(event) for event in events])
        return events

    def _record(self, event: Event) -> dict[str, Any]:
        if self._with_scores and isinstance(event, ScoreResult):
            return as_record(event) | {"outcomes": [outcome_record(one) for one in event.outcomes]}
        return as_record(event)
