"""Which scan runs, what every scan agrees on, and what is refused with which words."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from millrace.kernels import dispatch
from millrace.kernels import linear_scan as plain
from millrace.kernels.dispatch import Scan, gae, linear_scan
from tests.close import CLOSE, close_as, close_fp64
from tests.kernels.packed_rows import gae_by_sums, random_rows

SCANS: list[Scan] = list(get_args(Scan))


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter takes about a second for the usual ones.
    tokens = {torch.float32: 16, torch.float64: 16}
    monkeypatch.setattr("millrace.kernels.linear_scan_triton.BLOCK", tokens)
    monkeypatch.setattr("millrace.kernels.linear_scan_triton.WINDOW", 4)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("scan", SCANS)
def test_every_scan_gives_the_same(scan: Scan, dtype: torch.dtype) -> None:
    rows = random_rows(11, dtype, longest=20)
    results = gae(**rows.gae(), gamma=0.9, scan=scan)
    for ours_T, sums_T in zip(results, gae_by_sums(rows, 0.9), strict=True):
        assert ours_T.dtype == dtype
        close_as(dtype, ours_T, sums_T, atol=1e-5)
    for reverse in (True, False):
        expected_T = linear_scan(rows.x_T.double(), rows.w_T.double(), reverse=reverse, scan="loop")
        ours_T = linear_scan(*rows.scan(), reverse=reverse, scan=scan)
        assert ours_T.dtype == dtype
        close_as(dtype, ours_T, expected_T, atol=1e-5)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("scan", SCANS)
def test_three_segments_by_hand(scan: Scan) -> None:
    reward_T, value_T = double(0.0, 1.0, 2.0, -1.0), double(2.0, 4.0, 1.0, 3.0)
    length_B, bootstrap_B = torch.tensor([2, 0, 2], dtype=torch.int32), double(8.0, 99.0, -4.0)
    # gamma 0.5, decay 0.25. 1 + 0.5 * 8 - 4 = 1; 0 + 0.5 * 4 - 2 + 0.25 * 1 = 0.25
    # -1 - 0.5 * 4 - 3 = -6; 2 + 0.5 * 3 - 1 + 0.25 * -6 = 1
    advantage_T, return_T = gae(
        reward_T, value_T, length_B, gamma=0.5, lam=0.5, bootstrap_B=bootstrap_B, scan=scan
    )
    assert advantage_T.tolist() == [0.25, 1.0, 1.0, -6.0]
    assert return_T.tolist() == [2.25, 5.0, 2.0, -3.0]
    # Without a bootstrap value the last state is worth 0: 1 - 4 = -3; 0 + 2 - 2 + 0.25 * -3 = -0.75
    advantage_T, return_T = gae(reward_T, value_T, length_B, gamma=0.5, lam=0.5, scan=scan)
    assert advantage_T.tolist() == [-0.75, -3.0, 1.5, -4.0]
    assert return_T.tolist() == [1.25, 1.0, 2.5, -1.0]
    # By default the neighbour is the next token: -3 + 0.5 * 2 = -2.
    assert linear_scan(double(-3.0, 2.0), double(0.5, 0.0), scan=scan).tolist() == [-2.0, 2.0]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("scan", SCANS)
def test_results_go_into_given_buffers(scan: Scan) -> None:
    rows = random_rows(12, torch.float32, longest=9)
    out = torch.empty_like(rows.value_T), torch.empty_like(rows.value_T)
    results = gae(**rows.gae(), gamma=0.9, scan=scan, out=out)
    assert results[0] is out[0] and results[1] is out[1]
    for ours_T, fresh_T in zip(out, gae(**rows.gae(), gamma=0.9, scan=scan), strict=True):
        assert ours_T.tolist() == fresh_T.tolist()
    scanned_T = linear_scan(*rows.scan(), scan=scan, out_T=out[0])
    assert scanned_T is out[0]
    assert scanned_T.tolist() == linear_scan(*rows.scan(), scan=scan).tolist()


@pytest.mark.parametrize("scan", SCANS)
def test_rows_with_gaps_in_memory_and_rows_of_nothing(scan: Scan) -> None:
    rows = random_rows(13, torch.float64, lengths=[4, 2])
    wide_TT = torch.stack([rows.x_T, rows.w_T], 1)
    expected = linear_scan(*rows.scan(), scan="loop").tolist()
    close_fp64(linear_scan(wide_TT[:, 0], wide_TT[:, 1], scan=scan), expected)
    values_TT = torch.stack([rows.reward_T, rows.value_T], 1)
    advantage_T, _ = gae(values_TT[:, 0], values_TT[:, 1], rows.length_B, gamma=0.9, lam=0.5, scan=scan)
    together_T, _ = gae(rows.reward_T, rows.value_T, rows.length_B, gamma=0.9, lam=0.5, scan="loop")
    close_fp64(advantage_T, together_T)
    nothing_T, no_length_B = double(), torch.zeros(0, dtype=torch.int64)
    assert linear_scan(nothing_T, nothing_T, scan=scan).shape == (0,)
    assert gae(nothing_T, nothing_T, no_length_B, gamma=1, lam=1, scan=scan)[1].shape == (0,)


class Row(Tensor):
    """A row that claims to lie on another device."""

    place = "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device(self.place)


@pytest.mark.parametrize(
    ("device", "checked", "num_tokens", "module", "name"),
    [
        ("cpu", False, 9_999, "linear_scan", "loop"),
        ("cpu", False, 10_000, "linear_scan_cpu", "numba"),
        ("cuda", True, 1, "linear_scan_triton", "triton"),
        ("cuda", False, 10_000, "linear_scan", "loop"),
        ("mps", False, 10_000, "linear_scan", "loop"),
    ],
)
def test_auto_is_what_suits_the_device(
    device: str, checked: bool, num_tokens: int, module: str, name: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "is_checked", lambda kernel, device: checked)
    row_T = torch.zeros(num_tokens).as_subclass(Row)
    row_T.place = device
    for chosen, asked in zip(
        dispatch._implementation("auto", row_T), dispatch._implementation(name, row_T), strict=True
    ):
        function = getattr(chosen, "func", chosen)
        assert function.__module__ == f"millrace.kernels.{module}"
        assert getattr(chosen, "keywords", None) == getattr(asked, "keywords", None)


def test_the_plain_scans_are_the_ones_that_were_asked_for() -> None:
    for name, scan in (("loop", plain.loop), ("chunked", plain.chunked)):
        assert [one.keywords for one in dispatch._implementation(name, double())] == [{"scan": scan}] * 2


ROW_4 = double(1.0, 2.0, 3.0, 4.0)
LENGTH_2 = torch.tensor([1, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_T": torch.ones(2, 3)}, "x_T has shape (2, 3); a packed row has one dimension"),
        ({"x_T": LENGTH_2}, "x_T is torch.int64; a scan takes torch.bfloat16, torch.float32, torch.float64"),
        (
            {"x_T": torch.ones(4).half()},
            "x_T is torch.float16; a scan takes torch.bfloat16, torch.float32, torch.float64",
        ),
        ({"w_T": torch.ones(5)}, "w_T has shape (5,); expected (4,)"),
        ({"w_T": torch.ones(4)}, "w_T is torch.float32, but x_T is torch.float64"),
        ({"w_T": ROW_4.to("meta")}, "w_T is meta, but x_T is cpu"),
        (
            {"x_T": ROW_4.clone().requires_grad_()},
            "x_T requires a gradient, which a scan would drop; detach it",
        ),
        (
            {"w_T": ROW_4.clone().requires_grad_()},
            "w_T requires a gradient, which a scan would drop; detach it",
        ),
        ({"scan": "fast"}, "scan is 'fast'; there are auto, loop, chunked, numba, triton"),
        ({"out_T": torch.ones(4)}, "out_T is torch.float32, but x_T is torch.float64"),
        ({"out_T": torch.ones(8).double()[::2]}, "out_T has stride 2; a result goes to a contiguous tensor"),
        ({"out_T": ROW_4}, "out_T shares memory with x_T; a result goes to memory of its own"),
    ],
)
def test_a_scan_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        linear_scan(**({"x_T": ROW_4, "w_T": ROW_4} | change))
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_T": torch.ones(1, 4)}, "reward_T has shape (1, 4); a packed row has one dimension"),
        ({"value_T": torch.ones(4)}, "value_T is torch.float32, but reward_T is torch.float64"),
        ({"value_T": double(1.0)}, "value_T has shape (1,); expected (4,)"),
        ({"length_B": torch.tensor([1, 2])}, "length_B adds up to 3, but the row has 4 tokens"),
        ({"length_B": torch.tensor([5, -1])}, "length_B holds -1; a segment has 0 tokens or more"),
        (
            {"length_B": double(1, 3)},
            "length_B is torch.float64 of shape (2,); expected integers of shape (B,)",
        ),
        (
            {"length_B": torch.tensor(4)},
            "length_B is torch.int64 of shape (); expected integers of shape (B,)",
        ),
        ({"gamma": 1.5}, "gamma is 1.5; it lies in [0, 1]"),
        ({"gamma": -0.1}, "gamma is -0.1; it lies in [0, 1]"),
        ({"gamma": float("nan")}, "gamma is nan; it lies in [0, 1]"),
        ({"lam": 1.25}, "lam is 1.25; it lies in [0, 1]"),
        ({"lam": double(0.5, -0.25)}, "lam is -0.25; it lies in [0, 1]"),
        ({"lam": double(float("nan"), 0.5)}, "lam is nan; it lies in [0, 1]"),
        ({"lam": double(0.5)}, "lam has shape (1,); expected one number, or (2,)"),
        ({"bootstrap_B": double(1.0)}, "bootstrap_B has shape (1,); expected (2,)"),
        ({"bootstrap_B": torch.ones(2)}, "bootstrap_B is torch.float32, but value_T is torch.float64"),
        ({"scan": None}, "scan is None; there are auto, loop, chunked, numba, triton"),
        ({"out": (ROW_4.clone(), torch.ones(4))}, "out[1] is torch.float32, but reward_T is torch.float64"),
        ({"out": (double(1.0), ROW_4.clone())}, "out[0] has shape (1,); expected (4,)"),
    ],
)
def test_gae_refuses(change: dict[str, Any], message: str) -> None:
    fine = {"reward_T": ROW_4, "value_T": ROW_4, "length_B": LENGTH_2, "gamma": 0.9, "lam": 0.5}
    with pytest.raises(ValueError) as refusal:
        gae(**(fine | change))
    assert str(refusal.value) == message


def test_gamma_and_lambda_may_be_0_and_1() -> None:
    for number in (0, 1):
        advantage_T, _ = gae(ROW_4, ROW_4, LENGTH_2, gamma=number, lam=number)
        # gamma 0: r - V = 0 here. Both 1: the rest of the rewards less V.
        assert advantage_T.tolist() == ([0, 0, 0, 0] if number == 0 else [0, 7, 4, 0])


def test_a_scan_on_the_wrong_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="^scan is 'triton', which runs on CUDA, and the row is on cpu$"):
        dispatch._implementation("triton", ROW_4)
    with pytest.raises(ValueError, match="^scan is 'numba', which runs on the CPU, and the row is on meta$"):
        dispatch._implementation("numba", ROW_4.to("meta"))


def test_buffers_beside_the_inputs_are_fine_and_overlapping_ones_are_refused() -> None:
    pool_T = torch.arange(20, dtype=torch.float64)
    beside = {"x_T": pool_T[:4], "w_T": pool_T[12:19:2]}
    assert linear_scan(**beside, out_T=pool_T[4:8]) is not None
    assert linear_scan(**beside, out_T=pool_T[8:12]) is not None
    for start, other in ((1, "x_T"), (3, "x_T"), (9, "w_T"), (15, "w_T")):
        with pytest.raises(ValueError, match=f"^out_T shares memory with {other};"):
            linear_scan(**beside, out_T=pool_T[start : start + 4])
    both_T = pool_T[4:12]
    with pytest.raises(ValueError, match=r"^out\[1\] shares memory with out\[0\];"):
        gae(pool_T[:4], pool_T[:4], LENGTH_2, gamma=1, lam=1, out=(both_T[:4], both_T[3:7]))
    with pytest.raises(ValueError, match=r"^out\[1\] shares memory with value_T;"):
        gae(pool_T[:4], both_T[4:], LENGTH_2, gamma=1, lam=1, out=(both_T[:4], both_T[4:]))


@pytest.mark.world
def test_numba_and_triton_are_imported_only_when_they_run() -> None:
    code = """
import sys, torch
from millrace.kernels.dispatch import linear_scan
x_T = torch.ones(9000)
for scan in ("auto", "loop", "chunked"):
    linear_scan(x_T, x_T, scan=scan)
print("numba" in sys.modules, "triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False\n", done.stderr
