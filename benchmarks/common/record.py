"""The file of results of a benchmark: where and with what it ran, and what it found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from millrace.planner.engine_cost_file import processor_name

processor = processor_name
RESULTS = Path(__file__).resolve().parents[1] / "results"


def heading(benchmark: str, machine: str, *packages: str) -> dict[str, Any]:
    """The first entries of a file of results; `packages` are those whose versions matter."""
    found: dict[str, Any] = {"benchmark": benchmark, "date": date.today().isoformat(), "machine": machine}
    if packages:
        found["versions"] = {name: metadata.version(name) for name in packages}
    return found


def write(name: str, written: Mapping[str, Any]) -> None:
    """Write results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
