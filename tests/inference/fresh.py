"""Engines over tiny models, and requests of every kind for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.inference.engine import PagedEngine
from millrace.models.load import Model
from millrace.types import Completion, SamplingParams
from tests.models.tiny import VOCABULARY

SMALL: dict[str, Any] = {
    "max_cache_tokens": 512,
    "block_size": 4,
    "max_batch_tokens": 24,
    "max_requests": 8,
}


def decode(tokens: Sequence[int]) -> str:
    """Two digits a token; token 0 is special and leaves no text."""
    return "".join(f"{token:02d}" for token in tokens if token)


def paged(model: Model, **sizes: Any) -> PagedEngine:
    """A small engine: chunks of prompts, few rows, blocks of four."""
    return PagedEngine(model, decode, **{**SMALL, **sizes})


def random_prompts(seed: int, num: int, longest: int = 15) -> list[tuple[int, ...]]:
    numbers = np.random.default_rng(seed)
    return [tuple(numbers.integers(1, VOCABULARY, numbers.integers(1, longest)).tolist()) for _ in range(num)]


def random_requests(seed: int, num: int) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts, some of them equal or with a common beginning, of which some want few tokens and some many."""
    numbers = np.random.default_rng(seed)
    prompts = random_prompts(seed, num, 30)
    for i in range(0, num, 3):
        other = prompts[int(numbers.integers(num))]
        prompts[i] = other if i % 2 else other + prompts[i][:5]
    params = [
        SamplingParams(
            max_tokens=int(numbers.integers(1, 20)),
            temperature=float(numbers.choice([0.0, 0.7, 1.0])),
            seed=int(numbers.integers(1 << 40)),
            stop_token_ids=(0, 3) if i % 2 else (),
        )
        for i in range(num)
    ]
    return prompts, params


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> bool:
    """Whether tokens, reasons and texts agree."""
    return [(c.token_ids, c.finish_reason, c.text) for c in ours] == [
        (c.token_ids, c.finish_reason, c.text) for c in theirs
    ]
