"""Completions on their way to another process: words that JSON carries, and columns of numbers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from millrace.types import Completion, Support

# What JSON can carry of one completion.
Words = dict[str, Any]


def to_columns(completions: Sequence[Completion]) -> tuple[list[Words], dict[str, np.ndarray]]:
    """The words of each completion, and the numbers of all, one after the other in each column."""
    supports = [completion.support for completion in completions if completion.support is not None]
    scored = [c.prompt_logprobs for c in completions if c.prompt_logprobs is not None]
    words = [
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
    return words, columns


def from_columns(words: Sequence[Words], columns: Mapping[str, np.ndarray]) -> list[Completion]:
    """The completions that `to_columns` took apart; their arrays are views of the columns.

    Raises:
        ValueError: a column is longer or shorter than the words say.
    """
    at = dict.fromkeys(columns, 0)

    def take(name: str, count: int) -> np.ndarray:
        at[name] += count
        return columns[name][at[name] - count : at[name]]

    completions = []
    for one in words:
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


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, dtype)]).astype(dtype)
