"""The smallest recipe that does all a run does: sums of digits, and a Qwen3 of a few thousand weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from millrace.config.recipe import load_recipe
from millrace.config.settings import RunConfig
from millrace.observability.files import read_json_lines

TREE: dict[str, Any] = {
    "steps": 4,
    "threads": 1,
    "device": "cpu",
    "loggers": [],
    "model": {
        "shape": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 32,
            "max_position_embeddings": 48,
            "tie_word_embeddings": True,
            "initializer_range": 0.1,
        }
    },
    "tokenizer": {"vocab_size": 257},
    "data": {"eval_size": 8},
    "sft": {"steps": 3, "sequences_per_step": 8, "learning_rate": 1e-2},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 3},
    "rewards": [{"kind": "exact"}],
    "policy": {"optimizer": {"learning_rate": 1e-3}},
    "evaluation": {"every": 2},
    "checkpoint": {"every": 2},
}


def write_sums(folder: Path, num_rows: int = 40) -> Path:
    """Sums of two digits that are one digit, one object a line."""
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    path = folder / "sums.jsonl"
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs[:num_rows]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_recipe(folder: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """The tiny recipe with its data and run folders below `folder`, and dotted overrides; null leaves out."""
    path = folder / "tiny.yaml"
    tree = TREE | {"data": TREE["data"] | {"train": str(write_sums(folder))}}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_recipe(path, {"name": "run", "output": str(folder / "runs")} | (overrides or {}))


def metrics_of(run: str | Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return read_json_lines(Path(run) / "metrics.jsonl")


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records as they must repeat: everything but what the clock and the system's memory say."""
    measured = ("time/", "memory/")
    return [
        {key: value for key, value in record.items() if not key.startswith(measured)} for record in records
    ]
