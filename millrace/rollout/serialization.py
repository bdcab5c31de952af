"""Serialization of completions and groups as JSON and arrays, for processes and checkpoints. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

import numpy as np

from millrace.types import Completion, Group, Outcome, Prompt, Support, Trajectory, Turn

# The JSON fields of one completion.
Fields = dict[str, Any]


def to_columns(completions: Sequence[Completion]) -> tuple[list[Fields], dict[str, np.ndarray]]:
    """Serialize completions: the JSON fields of each, and one concatenated array for each numeric field."""
    supports = [completion.support for completion in completions if completion.support is not None]
    scored = [c.prompt_logprobs for c in completions if c.prompt_logprobs is not None]
    fields = [
        {
            "num_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "text": completion.text,
            "reason": completion.reason,
            "support": None if completion.support is None else len(completion.support.token_ids),
            "prompt": None if completion.prompt_logprobs is None else len(completion.prompt_logprobs),
            "experts": None if completion.experts is None else completion.experts.shape,
        }
        for completion in completions
    ]
    columns = {
        "token_ids": _joined([np.array(c.token_ids, np.int64) for c in completions], np.int64),
        "logprobs": _joined([c.logprobs for c in completions], np.float32),
        "versions": _joined([c.versions for c in completions], np.int32),
        "support_token_ids": _joined([support.token_ids for support in supports], np.int32),
        "support_counts": _joined([support.counts for support in supports], np.int32),
        "support_logprobs": _joined([support.logprobs for support in supports], np.float32),
        "prompt_logprobs": _joined(scored, np.float32),
        "experts": _joined([c.experts.ravel() for c in completions if c.experts is not None], np.int16),
    }
    return fields, columns


def from_columns(fields: Sequence[Fields], columns: Mapping[str, np.ndarray]) -> list[Completion]:
    """Deserialize the completions of `to_columns`; their arrays are views of the columns.

    Raises:
        ValueError: the length of a column does not match the JSON fields.
    """
    at = dict.fromkeys(columns, 0)

    def take(name: str, count: int) -> np.ndarray:
        at[name] += count
        return columns[name][at[name] - count : at[name]]

    completions = []
    for one in fields:
        count, shape = one["num_tokens"], one["experts"]
        support = None
        if one["support"] is not None:
            tokens = take("support_token_ids", one["support"])
            support = Support(tokens, take("support_counts", count), take("support_logprobs", count))
        completions.append(
            Completion(
                token_ids=tuple(take("token_ids", count).tolist()),
                logprobs=take("logprobs", count),
                versions=take("versions", count),
                finish_reason=one["finish_reason"],
                text=one["text"],
                support=support,
                prompt_logprobs=None if one["prompt"] is None else take("prompt_logprobs", one["prompt"]),
                experts=None if shape is None else take("experts", prod(shape)).reshape(shape),
                reason=one["reason"],
            )
        )
    for name, column in columns.items():
        if len(column) != at[name]:
            raise ValueError(f"column {name} holds {len(column)} numbers; the completions have {at[name]}")
    return completions


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([*arrays, np.empty(0, dtype)]).astype(dtype)


# Tokens of the environments' observations; the other columns belong to completions.
_OBSERVATIONS = "observations"


def pack_groups(groups: Mapping[int, Group]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Serialize groups by number; a prompt is stored by its id only."""
    turns = [turn for group in groups.values() for t in group.trajectories for turn in t.turns]
    completions, columns = to_columns([turn.completion for turn in turns])
    observation_tokens = [token for turn in turns for token in turn.observation]
    fields = {
        "completions": completions,
        "observations": [len(turn.observation) for turn in turns],
        "turn_rewards": [turn.reward for turn in turns],
        "turn_states": [turn.state for turn in turns],
        "groups": [
            {
                "number": number,
                "prompt": group.prompt.id,
                "trajectories": [
                    {
                        "num_turns": len(t.turns),
                        "outcome": None if t.outcome is None else asdict(t.outcome),
                        "end": t.end,
                    }
                    for t in group.trajectories
                ],
            }
            for number, group in groups.items()
        ],
    }
    return fields, columns | {_OBSERVATIONS: np.array(observation_tokens, np.int64)}


def unpack_groups(
    fields: Mapping[str, Any], columns: Mapping[str, np.ndarray], prompts: Mapping[str, Prompt]
) -> dict[int, Group]:
    """Deserialize the groups of `pack_groups`.

    Raises:
        ValueError: the length of a column does not match the JSON fields.
    """
    completion_columns = {name: column for name, column in columns.items() if name != _OBSERVATIONS}
    observation_tokens, turns, at = columns[_OBSERVATIONS].tolist(), [], 0
    for length, completion, reward, state in zip(
        fields["observations"],
        from_columns(fields["completions"], completion_columns),
        fields["turn_rewards"],
        fields["turn_states"],
        strict=True,
    ):
        turns.append(Turn(tuple(observation_tokens[at : at + length]), completion, reward, state))
        at += length
    if at != len(observation_tokens):
        raise ValueError(
            f"column {_OBSERVATIONS} holds {len(observation_tokens)} numbers; the turns have {at}"
        )
    each = iter(turns)

    def trajectory(one: Mapping[str, Any]) -> Trajectory:
        outcome = None if one["outcome"] is None else Outcome(**one["outcome"])
        return Trajectory(tuple(next(each) for _ in range(one["num_turns"])), outcome, one["end"])

    return {
        group["number"]: Group(
            prompts[group["prompt"]], tuple(trajectory(one) for one in group["trajectories"])
        )
        for group in fields["groups"]
    }
