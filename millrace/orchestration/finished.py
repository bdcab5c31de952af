"""Groups, finished or not, for checkpoints, as words that JSON carries and columns of numbers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from millrace.orchestration.columns import from_columns, to_columns
from millrace.types import Group, Outcome, Prompt, Trajectory, Turn

# Tokens that environments said; the other columns are those of completions.
_OBSERVATIONS = "observations"


def pack_groups(groups: Mapping[int, Group]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Groups by their number; of a prompt only its id is kept."""
    turns = [turn for group in groups.values() for t in group.trajectories for turn in t.turns]
    completions, columns = to_columns([turn.completion for turn in turns])
    said = [token for turn in turns for token in turn.observation]
    words = {
        "completions": completions,
        "observations": [len(turn.observation) for turn in turns],
        "groups": [
            {
                "number": number,
                "prompt": group.prompt.id,
                "trajectories": [
                    {"num_turns": len(t.turns), "outcome": None if t.outcome is None else asdict(t.outcome)}
                    for t in group.trajectories
                ],
            }
            for number, group in groups.items()
        ],
    }
    return words, columns | {_OBSERVATIONS: np.array(said, np.int64)}


def unpack_groups(
    words: Mapping[str, Any], columns: Mapping[str, np.ndarray], prompts: Mapping[str, Prompt]
) -> dict[int, Group]:
    """What `pack_groups` packed.

    Args:
        words: its words.
        columns: its columns.
        prompts: by id.

    Raises:
        ValueError: a column is longer or shorter than the words say.
    """
    drawn = {name: column for name, column in columns.items() if name != _OBSERVATIONS}
    said, turns, at = columns[_OBSERVATIONS].tolist(), [], 0
    for length, completion in zip(
        words["observations"], from_columns(words["completions"], drawn), strict=True
    ):
        turns.append(Turn(tuple(said[at : at + length]), completion))
        at += length
    if at != len(said):
        raise ValueError(f"column {_OBSERVATIONS} holds {len(said)} numbers; the turns have {at}")
    each = iter(turns)

    def trajectory(one: Mapping[str, Any]) -> Trajectory:
        outcome = None if one["outcome"] is None else Outcome(**one["outcome"])
        return Trajectory(tuple(next(each) for _ in range(one["num_turns"])), outcome)

    return {
        group["number"]: Group(
            prompts[group["prompt"]], tuple(trajectory(one) for one in group["trajectories"])
        )
        for group in words["groups"]
    }
