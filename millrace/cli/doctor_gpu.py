"""`millrace doctor --gpu`: which of the GPU kernels are right on this device, and how fast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from millrace.errors import SetupError
from millrace.kernels import device_record
from millrace.kernels.device_checks import (
    WHOLE,
    Checked,
    CheckSizes,
    as_json,
    check_kernels,
    num_cases,
    passed,
    time_kernels,
)
from millrace.observability.plain import plain_text

MAX_PROBLEMS = 20


def check_gpu(report: Path, gpu: str) -> None:
    """Check the first CUDA device; without one, print what would be checked.

    Args:
        report: file to write.
        gpu: what is known about the GPU.

    Raises:
        SetupError: the report or the record cannot be written.
        typer.Exit: a kernel is wrong on this device; exit code 1.
    """
    if not torch.cuda.is_available():
        typer.secho("what is checked on a GPU", bold=True)
        for kernel, count in num_cases(WHOLE).items():
            _fact(kernel, f"{count} comparisons with torch in float64")
        folder = device_record.record_path("").parent
        _fact("then", f"times, a report in {report}, and the record of the device in {folder}")
        typer.secho("problems", bold=True)
        typer.echo(f"  nothing was checked; GPU: {gpu}")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    about = {
        "device": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": torch.version.cuda,
    }
    if check_device(device, about, report):
        raise typer.Exit(1)


def check_device(
    device: torch.device, about: dict[str, Any], report: Path, sizes: CheckSizes = WHOLE
) -> list[str]:
    """Compare the kernels with torch on a device, write the report and the record, and return the problems.

    Raises:
        SetupError: the report or the record cannot be written.
    """
    name = about["device"]
    typer.secho(f"GPU kernels on {name}, compared with torch; compiling takes a minute or two", bold=True)
    checks = list(check_kernels(device, sizes))
    right = passed(checks)
    for kernel, good in right.items():
        of_kernel = [check for check in checks if check.kernel == kernel]
        num_right = sum(check.passed for check in of_kernel)
        used = "" if good else "; WRONG here: torch's operations are used instead"
        _fact(kernel, f"{num_right} of {len(of_kernel)} comparisons within rounding{used}")
    times = list(time_kernels(device, sizes)) if all(right.values()) else []
    for timed in times:
        _fact(
            timed.kernel, f"{1e3 * timed.kernel_s:.2f} ms, torch {1e3 * timed.torch_s:.2f} ms: {timed.case}"
        )
    written = about | device_record.versions() | as_json(checks, times)
    try:
        report.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        _fact("report", str(report))
        _fact("record", str(device_record.write_record(name, right)))
    except OSError as error:
        raise SetupError(f"{error.filename} cannot be written: {error.strerror}") from error
    problems = _problems(checks)
    typer.secho("problems", bold=True)
    for problem in problems[:MAX_PROBLEMS] or ["none"]:
        typer.echo(f"  {problem}")
    if len(problems) > MAX_PROBLEMS:
        typer.echo(f"  and {len(problems) - MAX_PROBLEMS} more; {report} has all")
    return problems


def _problems(checks: Sequence[Checked]) -> list[str]:
    found = []
    for check in checks:
        if not check.passed:
            why = check.error or f"{check.share:.3g} times as far off as rounding explains"
            found.append(f"{check.kernel}, {check.case}: {plain_text(why, 300)}")
    return found


def _fact(name: str, value: str) -> None:
    typer.echo(f"  {name:17} {value}")
