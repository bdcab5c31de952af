"""Messages and processes of prefill and decode workers, and of the engine of a run that has them.

Messages have the form of `wire`, over the socket of a child process. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, Protocol

import numpy as np

from millrace.engines.handle import EngineSettings, SubprocessEngine, engine_program
from millrace.engines.wire import Frame, parsed
from millrace.planner.engine_cost import EngineCost

ENTRY = "millrace.engines.prefill_decode_worker:serve"
DISAGGREGATED_ENTRY = "millrace.engines.disaggregated_worker:serve"
# Frame kinds that a worker receives, and those that it sends.
ROLE_COMMANDS = ("submit", "prefill", "abort", "update_weights", "pause", "resume", "fingerprint", "ping")
ROLE_REPORTS = (
    "ready",
    "pieces",
    "prefilled",
    "imported",
    "refused",
    "weights_loaded",
    "answered",
    "heartbeat",
)

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


class RoleHandle(Protocol):
    """One worker from the serving process's side; only `exit_reason` and `kill` block, for seconds."""

    @property
    def ended(self) -> bool:
        """Whether no report will come any more."""
        ...

    def watch(self) -> list[tuple[int, int]]:
        """Send what is left to send; return the descriptors and events of `select.poll` to wait for."""
        ...

    def send(
        self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Send a command as a frame; see `ROLE_COMMANDS`."""
        ...

    def receive(self) -> list[Frame]:
        """Return the reports that have arrived; FrameError if one is invalid."""
        ...

    def exit_reason(self) -> str:
        """Return why it has ended; empty while it runs."""
        ...

    def log_tail(self) -> str:
        """Return the tail of its log as a clause for an error message; empty if it printed nothing."""
        ...

    def kill(self) -> None:
        """Kill it and release its resources."""
        ...


class RoleStarter(Protocol):
    """Starts a worker, which reports `ready` once it is up."""

    def __call__(self, name: str, weights: int, slots: Sequence[int]) -> RoleHandle:
        """Start a worker that inherits the descriptors of `weights` and of the memory of each transfer.

        Raises:
            OSError: there are too few resources for it.
        """
        ...


class RoleProcess(SubprocessEngine):
    """A worker in a process of this machine."""

    @property
    def ended(self) -> bool:
        """See `RoleHandle`."""
        return bool(self._channel.ended or self._channel.fault)

    def receive(self) -> list[Frame]:
        """See `RoleHandle`."""
        return [parsed(body, data, ROLE_REPORTS) for _, body, data in self.exchange()]


def start_role(
    settings: EngineSettings,
    cost: EngineCost | None,
    name: str,
    weights: int,
    slots: Sequence[int],
) -> RoleProcess:
    """Start a worker process; see `RoleStarter`.

    `settings` are those of all workers. With a `cost` model they report how far their steps are from it.
    """
    costs = None if cost is None else asdict(cost)
    program = engine_program(name, settings, weights, ENTRY, slots=list(slots), cost=costs)
    return RoleProcess(replace(program, pass_fds=(weights, *slots)), time.monotonic)


def start_disaggregated(
    workers: Mapping[str, int], name: str, settings: EngineSettings, weights: int
) -> SubprocessEngine:
    """Start the process of an engine, which starts its workers; see `EngineStarter`.

    `workers` are the fields of `DisaggregationConfig`; the threads of the settings are those of a worker.
    """
    program = engine_program(name, settings, weights, DISAGGREGATED_ENTRY, workers=dict(workers))
    return SubprocessEngine(program, time.monotonic)
