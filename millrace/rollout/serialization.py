"""The encoding of requests, completions and groups between processes and in checkpoints. No torch.

All of them are JSON fields and named arrays: `pack_...` returns both, and `unpack_...` takes them. `encode`
makes bytes of them for a message; a checkpoint has the fields in a JSON file and the arrays in a safetensors
file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from millrace.rollout.backend import GenerateRequest
from millrace.rollout.sampled_batch import SampledBatch
from millrace.types import (
    Completion,
    Group,
    Outcome,
    Prompt,
    SamplingParams,
    Support,
    TopTokens,
    Trajectory,
    Turn,
)

Fields: TypeAlias = Mapping[str, Any]
Arrays: TypeAlias = Mapping[str, np.ndarray]
Packed: TypeAlias = tuple[dict[str, Any], dict[str, np.ndarray]]

DTYPES = ("uint8", "int16", "int32", "int64", "float32")
_LENGTH = struct.Struct("<I")
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
# Arrays beside the columns of completions: tokens of prompts, and of the environments' observations.
_PROMPTS, _OBSERVATIONS = "tokens", "observations"


def encode(fields: Fields, arrays: Arrays) -> tuple[bytes, list[memoryview]]:
    """Return a header, JSON of the fields and of the arrays' names, dtypes and shapes, and the raw arrays."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    entries = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({**fields, "arrays": entries}).encode()
    return header, [array.reshape(-1).view(np.uint8).data for array in contiguous.values()]


def decode(header: bytes, data: bytearray) -> Packed:
    """Decode the header and the concatenated arrays of `encode`; the arrays are views of `data`.

    Raises:
        ValueError: the bytes are no such encoding; the message names the fault.
    """
    try:
        found = json.loads(header)
        entries = [(name, dtype, [int(n) for n in shape]) for name, dtype, shape in found.pop("arrays")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a header cannot be read: {type(error).__name__}: {error}") from None
    arrays, start = {}, 0
    for name, dtype, shape in entries:
        if dtype not in DTYPES:
            raise ValueError(f"array {name} is {dtype}; it may be {', '.join(DTYPES)}")
        stop = start + np.dtype(dtype).itemsize * math.prod(shape)
        if min(shape, default=0) < 0 or stop > len(data):
            raise ValueError(
                f"array {name} has shape {shape}, for which the {len(data)} bytes do not suffice"
            )
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
        start = stop
    if start != len(data):
        raise ValueError(f"{len(data) - start} bytes belong to no array")
    return found, arrays


def to_bytes(fields: Fields, arrays: Arrays) -> bytes:
    """Encode fields and arrays as one piece: the header's length, the header, the arrays."""
    header, data = encode(fields, arrays)
    return b"".join([_LENGTH.pack(len(header)), header, *data])


def from_bytes(encoded: bytes) -> Packed:
    """Decode the result of `to_bytes`; ValueError as in `decode`."""
    (length,) = _LENGTH.unpack_from(encoded)
    start = _LENGTH.size + length
    return decode(encoded[_LENGTH.size : start], bytearray(encoded[start:]))


def pack_completions(completions: Sequence[Completion]) -> Packed:
    """Pack completions: the JSON fields of each, and one concatenated array for each numeric field."""
    supports = [completion.support for completion in completions if completion.support is not None]
    scored = [c.prompt_logprobs for c in completions if c.prompt_logprobs is not None]
    tops = [c.prompt_top for c in completions if c.prompt_top is not None]
    each = [
        {
            "num_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "text": completion.text,
            "reason": completion.reason,
            "support": None if completion.support is None else len(completion.support.token_ids),
            "prompt": None if completion.prompt_logprobs is None else len(completion.prompt_logprobs),
            "top": None if completion.prompt_top is None else len(completion.prompt_top.token_ids),
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
        "prompt_top_token_ids": _joined([top.token_ids for top in tops], np.int32),
        "prompt_top_logprobs": _joined([top.logprobs for top in tops], np.float32),
        "experts": _joined([c.experts.ravel() for c in completions if c.experts is not None], np.int16),
    }
    return {"completions": each}, columns


def unpack_completions(fields: Fields, columns: Arrays) -> list[Completion]:
    """Unpack the completions of `pack_completions`; their arrays are views of the columns.

    Raises:
        ValueError: the length of a column does not match the JSON fields.
    """
    at = dict.fromkeys(columns, 0)

    def take(name: str, count: int) -> np.ndarray:
        at[name] += count
        return columns[name][at[name] - count : at[name]]

    completions = []
    for one in fields["completions"]:
        count, shape = one["num_tokens"], one["experts"]
        support = top = None
        if one["support"] is not None:
            tokens = take("support_token_ids", one["support"])
            support = Support(tokens, take("support_counts", count), take("support_logprobs", count))
        # Checkpoints of earlier versions have none.
        if (num_top := one.get("top")) is not None:
            top = TopTokens(take("prompt_top_token_ids", num_top), take("prompt_top_logprobs", num_top))
        completions.append(
            Completion(
                token_ids=tuple(take("token_ids", count).tolist()),
                logprobs=take("logprobs", count),
                versions=take("versions", count),
                finish_reason=one["finish_reason"],
                text=one["text"],
                support=support,
                prompt_logprobs=None if one["prompt"] is None else take("prompt_logprobs", one["prompt"]),
                prompt_top=top,
                experts=None if shape is None else take("experts", math.prod(shape)).reshape(shape),
                reason=one["reason"],
            )
        )
    for name, column in columns.items():
        if len(column) != at[name]:
            raise ValueError(f"column {name} holds {len(column)} numbers; the completions have {at[name]}")
    return completions


def pack_requests(requests: Sequence[GenerateRequest]) -> Packed:
    """Pack requests; neighbours with one prompt share its tokens."""
    groups = [(prompt, list(group)) for prompt, group in groupby(requests, lambda one: one.prompt)]
    entries = [
        {
            "num_tokens": len(prompt),
            "requests": [
                (one.id, _changed_fields(one.params), one.partial_output is not None) for one in group
            ],
        }
        for prompt, group in groups
    ]
    tokens = [token for prompt, _ in groups for token in prompt]
    partial = [one.partial_output for one in requests if one.partial_output is not None]
    fields, columns = pack_completions(partial) if partial else ({"completions": []}, {})
    return {"prompts": entries, **fields}, {_PROMPTS: np.array(tokens, np.int64), **columns}


def unpack_requests(fields: Fields, arrays: Arrays) -> list[list[GenerateRequest]]:
    """Unpack the requests of `pack_requests`, grouped by prompt.

    Raises:
        ValueError: the length of a column does not match the JSON fields.
    """
    groups = []
    start = 0
    partial = iter(unpack_completions(fields, _without(arrays, _PROMPTS)))
    for entry in fields["prompts"]:
        stop = start + entry["num_tokens"]
        prompt = tuple(arrays[_PROMPTS][start:stop].tolist())
        groups.append(
            [
                GenerateRequest(
                    id, prompt, SamplingParams(**_tuples(params)), next(partial) if has_partial else None
                )
                for id, params, has_partial in entry["requests"]
            ]
        )
        start = stop
    return groups


def pack_results(results: Sequence[tuple[str, int, int, Completion]]) -> Packed:
    """Pack finished requests.

    Args:
        results: (id, engine step of the start, engine step of the end, completion) of each request.
    """
    fields, columns = pack_completions([completion for *_, completion in results])
    return {"requests": [(id, began, ended) for id, began, ended, _ in results], **fields}, columns


def unpack_results(fields: Fields, columns: Arrays) -> list[tuple[str, int, int, Completion]]:
    """Unpack the finished requests of `pack_results`.

    Raises:
        ValueError: the length of a column does not match the JSON fields.
    """
    pairs = zip(fields["requests"], unpack_completions(fields, columns), strict=True)
    return [(*request, completion) for request, completion in pairs]


def pack_groups(groups: Mapping[int, Group]) -> Packed:
    """Pack groups by number; a prompt is stored by its id only."""
    turns = [turn for group in groups.values() for t in group.trajectories for turn in t.turns]
    fields, columns = pack_completions([turn.completion for turn in turns])
    observation_tokens = [token for turn in turns for token in turn.observation]
    fields |= {
        "observations": [len(turn.observation) for turn in turns],
        "turn_rewards": [turn.reward for turn in turns],
        "turn_states": [turn.state for turn in turns],
        "turn_calls": [(turn.calls, turn.invalid_calls) for turn in turns],
        "turn_progress": [turn.progress for turn in turns],
        "turn_branch": [(turn.after, turn.refused) for turn in turns],
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


def unpack_groups(fields: Fields, columns: Arrays, prompts: Mapping[str, Prompt]) -> dict[int, Group]:
    """Unpack the groups of `pack_groups`; `prompts` by id.

    Raises:
        ValueError: the length of a column does not match the JSON fields.
    """
    completions = unpack_completions(fields, _without(columns, _OBSERVATIONS))
    observation_tokens, turns, at = columns[_OBSERVATIONS].tolist(), [], 0
    for length, completion, reward, state, (calls, invalid_calls), progress, (after, refused) in zip(
        fields["observations"],
        completions,
        fields["turn_rewards"],
        fields["turn_states"],
        # Checkpoints of earlier versions have none of these.
        fields.get("turn_calls", [(None, 0)] * len(completions)),
        fields.get("turn_progress", [None] * len(completions)),
        fields.get("turn_branch", [(None, 0)] * len(completions)),
        strict=True,
    ):
        observation = tuple(observation_tokens[at : at + length])
        rest = calls, invalid_calls, progress, after, refused
        turns.append(Turn(observation, completion, reward, state, *rest))
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


def pack_batch(sampled: SampledBatch, metrics: Mapping[str, float]) -> Packed:
    """Pack a batch and its metrics."""
    groups, columns = pack_groups(dict(enumerate(sampled.groups)))
    fields = {
        "groups": groups,
        "metrics": dict(metrics),
        "left_out": sorted(sampled.left_out),
        "baselines": sampled.baselines,
        "num_greedy_tokens": sampled.num_greedy_tokens,
        "num_rounds": sampled.num_rounds,
    }
    return fields, columns


def unpack_batch(
    fields: Fields, columns: Arrays, prompts: Mapping[str, Prompt]
) -> tuple[SampledBatch, dict[str, float]]:
    """Unpack the batch of `pack_batch`; `prompts` by id."""
    batch = SampledBatch(
        list(unpack_groups(fields["groups"], columns, prompts).values()),
        frozenset(fields["left_out"]),
        fields["baselines"],
        fields["num_greedy_tokens"],
        fields["num_rounds"],
    )
    return batch, fields["metrics"]


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([*arrays, np.empty(0, dtype)]).astype(dtype)


def _without(arrays: Arrays, name: str) -> Arrays:
    return {other: array for other, array in arrays.items() if other != name}


def _changed_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    return {name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) != default}


def _tuples(value: Any) -> Any:
    """Convert lists from JSON back to tuples."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
