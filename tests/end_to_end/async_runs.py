"""Runs whose engine draws ahead of training: what must hold for each, and where its processes are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace import resume, train
from millrace.config.recipe import load_recipe
from millrace.eventlog.log import check_log, read_events
from millrace.observability.tables import read_table
from millrace.run.progress import RunReport
from tests.end_to_end.runs import OVERRIDES
from tests.end_to_end.tiny import metrics_of
from tests.family import below, name_of
from tests.forked import ENGINE

SAMPLES = 4
AHEAD: dict[str, Any] = {"rollout.max_staleness": 2, "steps": 16}


def run(folder: Path, name: str, **more: Any) -> RunReport:
    """The tiny recipe of a folder, in this process."""
    overrides = {"name": name, "output": str(folder / "runs"), **OVERRIDES, **more}
    return train(load_recipe(folder / "tiny.yaml", overrides), recipe="tiny", quiet=True)


def go_on(folder: Path, name: str) -> RunReport:
    """What is left of a run, in this process."""
    return resume(folder / "runs" / name, quiet=True)


def engines_below(process: int) -> list[int]:
    """The engines' processes of a run, by the process that trains."""
    return [pid for pid in below(process) if name_of(pid) == ENGINE]


def events_of(path: Path) -> list[dict[str, Any]]:
    """The event log of a run."""
    return read_events(path / "events.log")


def trained(path: Path) -> list[list[dict[str, Any]]]:
    """The rows of each batch."""
    return [read_table(table) for table in sorted((path / "rollouts").iterdir())]


def prompts_of(path: Path) -> list[list[str]]:
    """The prompts of each batch, one for each group."""
    return [[row["prompt_id"] for row in rows[::SAMPLES]] for rows in trained(path)]


def check_run(path: Path, *, steps: int, bound: int, sft: int = OVERRIDES["sft.steps"]) -> list[int]:
    """Fail unless a finished run lost no group, trained each once, and none older than it may be.

    Returns:
        the greatest staleness of each batch.
    """
    events, batches = events_of(path), [r for r in metrics_of(path) if r["stage"] == "reinforcement"]
    assert check_log(events) == []
    assert [batch["step"] for batch in batches] == list(range(1, steps + 1))
    # Rounding is no news, whatever else is older.
    assert all(batch.get("mismatch/current", 0.0) < 1e-5 for batch in batches)
    # The weights of each publish; the first ones are SFT's.
    versions = [sft, *(batch["version"] for batch in batches)]
    assert versions == sorted(set(versions))
    starts = {event["number"]: event["prompt"] for event in events if event["kind"] == "start"}
    # Of a group that is drawn again, what arrived last.
    newest = {(e["number"], e["sample"]): e["newest_step"] for e in events if e["kind"] == "completed"}
    takes = [event for event in events if event["kind"] == "take"]
    for place, (take, batch, rows) in enumerate(zip(takes, batches, trained(path), strict=True)):
        told = [(row["prompt_id"], row["version"]) for row in rows]
        assert told == [
            (starts[number], versions[newest[number, sample]])
            for number in take["numbers"]
            for sample in range(SAMPLES)
        ]
        assert max(take["staleness"]) == batch["staleness/max"] <= bound
        assert all(0 <= place - versions.index(version) <= age for (_, version), age in _aged(told, take))
    return [batch["staleness/max"] for batch in batches]


def _aged(told: list[tuple[str, int]], take: dict[str, Any]) -> Iterator[tuple[tuple[str, int], int]]:
    """Each row with the staleness of its group, which is that of the oldest token."""
    ages = [age for age in take["staleness"] for _ in range(SAMPLES)]
    return zip(told, ages, strict=True)
