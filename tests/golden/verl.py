"""The numbers of `verl.json` as float64 tensors; README.md says what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("verl.json").read_text(encoding="utf-8"))


def column(numbers: list[float]) -> Tensor:
    """One field as float64."""
    return torch.tensor(numbers, dtype=torch.float64)
