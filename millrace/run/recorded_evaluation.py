"""What an evaluation got from outside its process, in a file for replays: replies of environments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from millrace.environments.running_episodes import EnvironmentReply
from millrace.observability.files import read_json
from millrace.run.folder import RunFolder


@dataclass(frozen=True, slots=True)
class RecordedEvaluation:
    """The contents of `recorded/NAME.json`.

    Attributes:
        replies: fields of each `EnvironmentReply`.
    """

    replies: list[dict[str, Any]] = field(default_factory=list)


def read_recorded(folder: RunFolder, name: str) -> RecordedEvaluation | None:
    """Read what the evaluation before this checkpoint got; None if the run did not record it.

    Raises:
        FileError: the file is damaged.
    """
    path = folder.recorded / f"{name}.json"
    return read_json(path, RecordedEvaluation) if path.is_file() else None


def write_recorded(folder: RunFolder, name: str, replies: list[EnvironmentReply]) -> None:
    """Write what an evaluation got; a later one of this name, after a resume, replaces it."""
    folder.recorded.mkdir(exist_ok=True)
    found = RecordedEvaluation([asdict(reply) for reply in replies])
    folder.write_json(folder.recorded / f"{name}.json", asdict(found))
