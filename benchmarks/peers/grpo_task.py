"""The task of the GRPO benchmark, the same on both sides. Plain Python, so that a peer can import it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from time import perf_counter
from typing import Any

# Fields of transformers' Qwen3Config: 0.8 M parameters.
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
PROMPTS, SAMPLES, TOKENS, WARM, STEPS = 16, 8, 8, 5, 30
SUMS = [(a, b) for a in range(40) for b in range(40)]
MARK = "RESULT "  # libraries print to the same stream


def reward(text: str) -> float:
    """Arithmetic of the letters: random weights earn different rewards, so that gradients flow."""
    return float(sum(map(ord, text)) % 7)


class Parts:
    """Seconds spent in parts of a step, inner ones not counted in outer ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what runs inside as `name`."""
        self._inner.append(0.0)
        start = perf_counter()
        yield
        took = perf_counter() - start
        self.seconds[name] += took - self._inner.pop()
        if self._inner:
            self._inner[-1] += took

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return call(*args, **kwargs)

        return counted

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


def tell(steps: list[tuple[float, dict[str, float]]], packages: tuple[str, ...]) -> None:
    """Print one side's result: for each measured step, its seconds and those of its parts."""
    told = {
        "seconds": [seconds for seconds, _ in steps],
        "parts": [parts for _, parts in steps],
        "versions": {name: metadata.version(name) for name in packages},
    }
    print("\n" + MARK + json.dumps(told), flush=True)
