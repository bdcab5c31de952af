"""Whether a run goes on where its event log left it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.orchestration.flow import Flow
from millrace.training.checkpoint import CheckpointError


@contextmanager
def going_on(checkpoint: Path) -> Iterator[None]:
    """Whatever forbids to go on from a checkpoint, as one sentence.

    Raises:
        CheckpointError: the block raised ValueError, of a log, or AssertionError, of a flow.
    """
    try:
        yield
    except (ValueError, AssertionError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} and the run's event log do not go together: {error}. Move the "
            "checkpoint elsewhere to resume from the one before it, or start a new run"
        ) from error


def check_resumed(flow: Flow, left: Mapping[str, Any] | None) -> None:
    """Prove that no prompt was lost on the way through a checkpoint, and that none is trained on twice.

    Args:
        flow: as the checkpoint restored it.
        left: what `events.flow_after` found in the log; None on a rank that does not keep it.

    Raises:
        AssertionError: the flow is not sound, or not the one that the log tells of.
    """
    if left is not None:
        _compare(flow.state(), left)
    flow.check()


def _compare(state: Mapping[str, Any], left: Mapping[str, Any]) -> None:
    """What a flow holds with what the log leaves; the first difference is an AssertionError."""
    for name in ("num_taken", "num_started", "repeats"):
        if state[name] != left[name]:
            raise AssertionError(f"{name} is {state[name]} in the checkpoint and {left[name]} in the log")
    groups = {group[0]: [*group[:3], group[3] and list(group[3])] for group in state["line"]["groups"]}
    logged = {group[0]: group for group in left["groups"]}
    for number in sorted(groups.keys() | logged.keys()):
        if groups.get(number) != logged.get(number):
            raise AssertionError(
                f"group {number} (prompt, publishes when it started, births) is "
                f"{_told(groups.get(number))} in the checkpoint and {_told(logged.get(number))} in the log"
            )


def _told(group: list[Any] | None) -> str:
    return "not open" if group is None else str(group[1:])
