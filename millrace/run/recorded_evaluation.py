"""What an evaluation received that a replay cannot compute: replies of environments, scores of a judge."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from millrace.environments.running_episodes import EnvironmentReply
from millrace.observability.files import read_json
from millrace.rollout.recorder import outcome_record
from millrace.run.folder import RunFolder
from millrace.types import Outcome


@dataclass(frozen=True, slots=True)
class RecordedEvaluation:
    """The contents of `recorded/NAME.json`.

    Attributes:
        replies: fields of each `EnvironmentReply`.
        outcomes: of the reward, each as `recorder.outcome_record`; None if they are computed again.
    """

    replies: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[dict[str, Any]] | None = None


def read_recorded(folder: RunFolder, name: str) -> RecordedEvaluation | None:
    """Read what the evaluation before a checkpoint of this name received; None if the run did not record it.

    Raises:
        FileError: the file is damaged.
    """
    path = folder.recorded / f"{name}.json"
    return read_json(path, RecordedEvaluation) if path.is_file() else None


def write_recorded(
    folder: RunFolder, name: str, replies: list[EnvironmentReply], outcomes: list[Outcome] | None
) -> None:
    """Write what an evaluation received; a later one of this name, after a resume, replaces it."""
    folder.recorded.mkdir(exist_ok=True)
    scores = None if outcomes is None else [outcome_record(one) for one in outcomes]
    found = RecordedEvaluation([asdict(reply) for reply in replies], scores)
    folder.write_json(folder.recorded / f"{name}.json", asdict(found))
