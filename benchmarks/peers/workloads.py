"""What every engine is given: shapes, prompts and lengths. Plain Python, so that peers can import it."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Fields of transformers' Qwen3Config. `nano` is Qwen3-0.6B, `small` is for quick runs.
SHAPES: dict[str, dict[str, Any]] = {
    "rollout": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    "quickstart": {
        "vocab_size": 64,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
    },
    "nano": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
        "tie_word_embeddings": True,
    },
}
WORKLOADS = ("greedy", "groups", "quickstart 128", "quickstart 512", "quickstart 2048")
FIRST_TOKENS = 1000  # turns from here on are for the time to first token, with prompts of their own


@dataclass(frozen=True)
class Workload:
    """Requests that are handed over at once; each draws exactly its length, whatever the tokens.

    Attributes:
        name: of the case.
        shape: key of SHAPES.
        prompts: tokens of each request.
        lengths: tokens to draw for each request.
        temperature: 0 is greedy.
    """

    name: str
    shape: str
    prompts: list[list[int]]
    lengths: list[int]
    temperature: float

    @property
    def num_drawn(self) -> int:
        """Tokens that all requests draw together."""
        return sum(self.lengths)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read what `save` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def workload(name: str, *, turn: int = 0, quick: bool = False) -> Workload:
    """The requests of one case, by seed.

    Args:
        name: one of WORKLOADS, or `nano`.
        turn: other turns have other prompts of the same lengths, so that no prefix cache knows them.
        quick: a sixteenth of the requests and an eighth of the tokens.

    Raises:
        ValueError: there is no such case.
    """
    case, _, size = name.partition(" ")
    make = {"greedy": _greedy, "groups": _groups, "quickstart": _quickstart, "nano": _nano}.get(case)
    if make is None:
        raise ValueError(f"workload {name!r} is not known; there are {', '.join(WORKLOADS)} and nano")
    one = make(turn, int(size or 0))
    if turn >= FIRST_TOKENS:
        one = Workload(one.name, one.shape, one.prompts, [1] * len(one.prompts), one.temperature)
    if quick:
        share = max(8, len(one.prompts) // 16)
        lengths = [max(1, length // 8) for length in one.lengths[:share]]
        one = Workload(one.name, one.shape, one.prompts[:share], lengths, one.temperature)
    return one


def _greedy(turn: int, _: int) -> Workload:
    prompts = _prompts(turn, [64] * 32, 8192)
    return Workload("greedy", "rollout", prompts, [128] * 32, 0.0)


def _groups(turn: int, _: int) -> Workload:
    """Groups of 8 of one prompt. Most answers are short, a few reach the limit."""
    fixed = random.Random("groups")
    sizes = [fixed.randint(64, 256) for _ in range(16)]
    lengths = [min(512, max(8, round(fixed.lognormvariate(4.6, 0.9)))) for _ in range(128)]
    prompts = [prompt for prompt in _prompts(turn, sizes, 8192) for _ in range(8)]
    return Workload("groups", "rollout", prompts, lengths, 1.0)


def _quickstart(turn: int, size: int) -> Workload:
    """Sums such as `12 + 34 =` in letters, 8 samples each, an answer of 3 or 4 tokens, rarely up to 6."""
    lengths = random.Random(size).choices((2, 3, 4, 5, 6), (5, 45, 40, 5, 5), k=size)
    prompts = [prompt for prompt in _prompts(turn, [9] * (size // 8), 64) for _ in range(8)]
    return Workload(f"quickstart {size}", "quickstart", prompts, lengths, 1.0)


def _nano(turn: int, _: int) -> Workload:
    """The known test of nano-vllm's bench.py, in its order of draws: 256 requests, 133,966 tokens."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    lengths = [draw.randint(100, 1024) for _ in range(256)]
    # Only turn 0 is the test itself; the others must not be found in the prefix cache.
    prompts = [[(token + turn) % 10001 for token in prompt] for prompt in prompts]
    return Workload("nano", "nano", prompts, lengths, 0.6)


def _prompts(turn: int, sizes: list[int], vocab_size: int) -> list[list[int]]:
    draw = random.Random(f"prompts {turn}")
    return [[draw.randrange(vocab_size) for _ in range(size)] for size in sizes]
