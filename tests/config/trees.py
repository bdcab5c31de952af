"""Small recipes as plain trees, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.recipe import ConfigError, validate

BASE: dict[str, Any] = {"steps": 3, "data": {"train": "sums.jsonl"}, "rewards": [{"kind": "exact"}]}


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
