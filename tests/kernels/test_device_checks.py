"""The comparisons of `millrace doctor --gpu`, small and in Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.cli.doctor_gpu import check_device, check_gpu
from millrace.errors import SetupError
from millrace.kernels import device_checks, linear_scan_triton, paged_attention_triton, token_logprob_triton
from millrace.kernels.device_checks import Checked, CheckSizes, check_kernels, passed
from millrace.kernels.device_record import KERNELS, Kernel, checked_kernels, record_path

CPU = torch.device("cpu")
# bfloat16 is wrong in the interpreter.
SMALL = CheckSizes(
    dtypes=(torch.float32,),
    lengths=(1, 20),
    heads=((2, 16),),
    limits=({}, {"window": 9}),
    words=((5, 70, 16),),
    segments=(1, 5, 0, 30),
    timed_tokens=16,
    timed_words=(4, 70, 16),
)
FEW = replace(SMALL, lengths=(9,), limits=({},), segments=(1, 5), timed_tokens=8)
pytestmark = [
    pytest.mark.usefixtures("fixed_order"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("millrace.kernels.linear_scan_triton.BLOCK", dict.fromkeys(SCANNED, 16))
    monkeypatch.setattr("millrace.kernels.linear_scan_triton.WINDOW", 4)
    monkeypatch.setattr(device_checks, "REPEATS", 1)
    checked_kernels.cache_clear()


SCANNED = (torch.float32, torch.float64)
ABOUT = {"device": "an interpreter", "capability": "0.0", "cuda": None}


def test_the_kernels_are_right_here_and_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert check_device(CPU, ABOUT, report, SMALL) == []
    out = capsys.readouterr().out
    assert "paged_attention   4 of 4 comparisons within rounding\n" in out
    assert out.endswith("problems\n  none\n")
    written = json.loads(report.read_text())
    assert {one["kernel"] for one in written["checks"]} == set(KERNELS)
    assert all(one["passed"] for one in written["checks"])
    assert [one["kernel"] for one in written["times"]] == ["paged_attention", "token_logprob"]
    assert checked_kernels("an interpreter") == set(KERNELS)


def wrong(real: Callable[..., Any]) -> Callable[..., Any]:
    def altered(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        if result is None:
            written = args[3] if isinstance(args[3], tuple) else (args[2],)
            written[0][-1] += 0.01
            return None
        if isinstance(result, tuple):
            return (result[0] + 0.01, *result[1:])
        return result + 0.01

    return altered


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("module", "name", "kernel"),
    [
        (paged_attention_triton, "paged_attention", "paged_attention"),
        (paged_attention_triton, "store_kv", "paged_attention"),
        (token_logprob_triton, "token_logprob", "token_logprob"),
        (linear_scan_triton, "linear_scan", "linear_scan"),
        (linear_scan_triton, "gae", "linear_scan"),
    ],
)
def test_a_kernel_that_is_a_little_off_is_not_used(
    module: Any, name: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    assert passed(list(check_kernels(CPU, FEW))) == dict.fromkeys(KERNELS, True) | {kernel: False}


def test_a_kernel_that_fails_is_a_problem_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel image is\x1b available")

    monkeypatch.setattr(token_logprob_triton, "token_logprob", broken)
    problems = check_device(CPU, ABOUT, tmp_path / "report.json", FEW)
    assert len(problems) == 2
    assert problems[0].startswith(
        "token_logprob, float32, 5 x 70 x 16, soft cap None: RuntimeError: no kernel"
    )
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "0 of 2 comparisons within rounding; WRONG here: torch's operations are used instead" in out
    assert checked_kernels("an interpreter") == {"paged_attention", "linear_scan"}


def test_not_a_number_is_wrong() -> None:
    assert not Checked("linear_scan", "", float("nan")).passed
    assert device_checks._larger(float("nan"), 0.0) != device_checks._larger(1.0, 0.0)
    assert passed([]) == dict.fromkeys(KERNELS, False)


def test_a_report_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    few = replace(SMALL, dtypes=(), segments=(1,))
    with pytest.raises(SetupError, match=r"report\.json cannot be written: No such file or directory"):
        check_device(CPU, ABOUT, tmp_path / "missing" / "report.json", few)


def test_without_a_gpu_it_says_what_it_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_gpu(tmp_path / "report.json", "none: there is no NVIDIA driver")
    out = capsys.readouterr().out
    assert "paged_attention   66 comparisons with torch in float64" in out
    assert out.endswith("nothing was checked; GPU: none: there is no NVIDIA driver\n")
    assert not (tmp_path / "report.json").exists() and not record_path("x").parent.exists()
