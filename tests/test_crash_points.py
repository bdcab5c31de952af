"""Crash points: every durable effect is counted, and a process dies just before the one that is named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from millrace.observability.files import read_json_lines
from millrace.observability.sinks import JsonlSink
from tests.crash_points import (
    CrashPoint,
    effects_of,
    environment_of_ranks,
    install_in_rank,
    left_behind,
    log_of_rank,
)
from tests.crash_points import install as install_point
from tests.end_to_end.runs import HANG_S
from tests.forked import process

pytestmark = [pytest.mark.world, pytest.mark.timeout(600)]
ZEROS = {"zeros": np.zeros(1000)}


def remove_tree(folder: Path) -> None:
    """A folder below a folder: what is removed has no path, but a name in a folder that is open."""
    shutil.rmtree(folder / "tree")


def make_tree(folder: Path) -> None:
    (folder / "tree" / "inner").mkdir(parents=True)


def change_nothing(folder: Path) -> None:
    (folder / "tree").mkdir(exist_ok=True)
    (folder / "absent").unlink(missing_ok=True)
    (folder / "renamed.txt").read_text()
    (folder.parent / "outside.txt").write_text("outside")
    (folder / "ignored.txt").write_text("ignored")


# What a process does, one after the other, and the effects of each.
STEPS: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda folder: folder.mkdir(), ["mkdir ."]),
    (lambda folder: (folder / "text.txt").write_text("text"), ["open text.txt", "write text.txt"]),
    (lambda folder: (folder / "text.txt").write_text("longer"), ["open text.txt (2)", "write text.txt (2)"]),
    (
        lambda folder: os.replace(folder / "text.txt", folder / "renamed.txt"),
        ["rename text.txt to renamed.txt"],
    ),
    (make_tree, ["mkdir tree", "mkdir tree/inner"]),
    (change_nothing, []),
    (lambda folder: os.link(folder / "renamed.txt", folder / "tree/link.txt"), ["link tree/link.txt"]),
    (lambda folder: os.symlink("link.txt", folder / "tree/symlink.txt"), ["symlink tree/symlink.txt"]),
    (lambda folder: os.truncate(folder / "renamed.txt", 2), ["truncate renamed.txt"]),
    (lambda folder: (folder / "tree/link.txt").unlink(), ["remove tree/link.txt"]),
    (lambda folder: (folder / "tree/symlink.txt").unlink(), ["remove tree/symlink.txt"]),
    (remove_tree, ["rmdir tree/inner", "rmdir tree"]),
    (
        lambda folder: safetensors.numpy.save_file(ZEROS, folder / "a.safetensors"),
        ["open a.safetensors", "write a.safetensors"],
    ),
    (
        lambda folder: safetensors.torch.save_file({"zeros": torch.zeros(1000)}, folder / "b.safetensors"),
        ["open b.safetensors", "write b.safetensors"],
    ),
    (
        lambda folder: pq.write_table(pa.table(ZEROS), folder / "c.parquet"),
        ["open c.parquet", "write c.parquet"],
    ),
]
EFFECTS = [effect for _, effects in STEPS for effect in effects]


def act(point: CrashPoint) -> None:
    install_point(point)
    for step, _ in STEPS:
        step(point.folder)


def ends_with(function: Callable[[CrashPoint], None], point: CrashPoint) -> int | None:
    """The exit code of a process that does something."""
    started = process(function, point)
    started.join(HANG_S)
    return started.exitcode


def contents(folder: Path) -> dict[str, bytes | None]:
    paths = folder.rglob("*") if folder.is_dir() else ()
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths
    }


@pytest.mark.slow
def test_every_durable_effect_below_the_folder_is_counted(tmp_path: Path) -> None:
    point = CrashPoint(tmp_path / "run", tmp_path / "log", ignoring=("ignored.txt",))
    assert ends_with(act, point) == 0
    assert effects_of(point.log) == EFFECTS
    assert left_behind(point.log) == []


@pytest.mark.slow
@pytest.mark.parametrize("by", ["name", "number"])
def test_a_process_dies_before_the_effect_and_after_all_others(by: str, tmp_path: Path) -> None:
    number = 0
    for place, (_, effects) in enumerate(STEPS):
        before = tmp_path / f"{place}" / "run"
        before.parent.mkdir()
        for step, _ in STEPS[:place]:
            step(before)
        for index, effect in enumerate(effects):
            number += 1
            aside = tmp_path / f"{place}-{index}"
            aside.mkdir()
            which = number if by == "number" else effect
            point = CrashPoint(aside / "run", aside / "log", which, ("ignored.txt",))
            assert ends_with(act, point) == -signal.SIGKILL
            assert effects_of(point.log) == EFFECTS[:number]
            if index == 0:
                assert contents(point.folder) == contents(before), effect


@pytest.mark.parametrize(("effect", "num_bytes"), [("write text.txt (2)", 0), ("write a.safetensors", 4036)])
def test_of_a_file_that_is_being_written_nothing_or_half_is_there(
    effect: str, num_bytes: int, tmp_path: Path
) -> None:
    point = CrashPoint(tmp_path / "run", tmp_path / "log", effect)
    assert ends_with(act, point) == -signal.SIGKILL
    assert (point.folder / effect.split()[1]).stat().st_size == num_bytes


def append(point: CrashPoint) -> None:
    install_point(point)
    sink = JsonlSink(point.folder / "metrics.jsonl")
    for number in range(3):
        sink.write({"number": number})
    sink.rewind(len('{"number": 0}\n'))
    sink.write({"number": 3})
    sink.close()


def test_of_a_line_that_is_being_appended_half_is_there(tmp_path: Path) -> None:
    point = CrashPoint(tmp_path / "run", tmp_path / "log")
    point.folder.mkdir()
    assert ends_with(append, point) == 0
    lines = [f"append metrics.jsonl{number}" for number in ("", " (2)", " (3)", " (4)")]
    assert effects_of(point.log) == ["open metrics.jsonl", *lines[:3], "truncate metrics.jsonl", lines[3]]
    metrics = point.folder / "metrics.jsonl"
    assert read_json_lines(metrics) == [{"number": 0}, {"number": 3}]

    metrics.unlink()
    assert ends_with(append, CrashPoint(point.folder, tmp_path / "second", lines[2])) == -signal.SIGKILL
    assert metrics.read_text() == '{"number": 0}\n{"number": 1}\n{"numbe'
    JsonlSink(metrics).close()
    assert read_json_lines(metrics) == [{"number": 0}, {"number": 1}]


def leave_a_child(point: CrashPoint) -> None:
    install_point(point)
    subprocess.Popen(["sleep", "600"])
    point.folder.mkdir()


def test_a_process_that_dies_says_which_processes_it_leaves(tmp_path: Path) -> None:
    point = CrashPoint(tmp_path / "run", tmp_path / "log", 1)
    assert ends_with(leave_a_child, point) == -signal.SIGKILL
    (left,) = left_behind(point.log)
    assert Path(f"/proc/{left}/cmdline").read_bytes() == b"sleep\x00600\x00"
    os.kill(left, signal.SIGKILL)


def optimize(point: CrashPoint) -> None:
    os.environ.update(environment_of_ranks(point.folder.parent / "site", point, victim=1), RANK="1")
    sys.orig_argv = ["python", "-m", "millrace.cli.main"]
    install_in_rank()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for _ in range(3):
        optimizer.step()


def test_a_rank_dies_before_an_optimizer_step(tmp_path: Path) -> None:
    point = CrashPoint(tmp_path / "run", tmp_path / "log", "optimizer step (2)", steps=True)
    assert ends_with(optimize, point) == -signal.SIGKILL
    assert effects_of(log_of_rank(point.log, 1)) == ["optimizer step", "optimizer step (2)"]
