"""Small recipes as plain trees, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.recipe import ConfigError, load_recipe, validate
from millrace.config.settings import RunConfig

BASE: dict[str, Any] = {"steps": 3, "data": {"train": "sums.jsonl"}, "rewards": [{"kind": "exact"}]}
# Shipped recipes that hold data and rewards; the others are methods.
TASKS = ("quickstart", "gsm8k_smoke", "supervised", "calculator", "guess")


def on_quickstart(method: str) -> RunConfig:
    """A shipped method, on the quickstart's task."""
    path = {"advantage.path": "teacher"} if method == "distillation" else {}
    return load_recipe("quickstart", {"base": method, **path})


def message_of(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        validate({**BASE, **tree}, "mine")
    return str(error.value)


def data(**more: Any) -> dict[str, Any]:
    return {"data": {"train": "sums.jsonl", **more}}


def kl(**more: Any) -> dict[str, Any]:
    return {"kl": {"coefficient": 0.1, **more}}


def reject(**more: Any) -> dict[str, Any]:
    return {"policy": {"proximal": "recompute", "correction": {"reject": {"high": 2.0, **more}}}}


def task(**more: Any) -> dict[str, Any]:
    return {"data": {"train": "reasoning-gym:chain_sum", **more}}
