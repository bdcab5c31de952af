"""The compiled scans against the loop: every length, every dtype, any number of parts and threads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels import linear_scan as plain
from millrace.kernels import linear_scan_cpu as cpu
from millrace.kernels import team
from tests.close import CLOSE, close_as, close_fp32, close_fp64
from tests.kernels.packed_rows import Rows, gae_by_sums, random_rows

compiled_only = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="runs as Python, so there is nothing compiled to test"
)


# Around the tile of 64 tokens, and segments of nothing between others.
LENGTHS = [64, 1, 0, 63, 65, 128, 0, 2, 130]


def scanned(rows: Rows, *, reverse: bool) -> Tensor:
    out_T = torch.full_like(rows.x_T, float("nan"))
    cpu.linear_scan(rows.x_T, rows.w_T, out_T, reverse=reverse)
    return out_T


def estimated(rows: Rows, gamma: float) -> tuple[Tensor, Tensor]:
    out = torch.full_like(rows.value_T, float("nan")), torch.full_like(rows.value_T, float("nan"))
    arguments: dict[str, Any] = {"gamma": gamma, "decay_B": gamma * rows.lam_B}
    cpu.gae(rows.reward_T, rows.value_T, rows.length_B, out, bootstrap_B=rows.bootstrap_B, **arguments)
    return out


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_scan_equals_the_loop(seed: int, reverse: bool, dtype: torch.dtype) -> None:
    rows = random_rows(seed, dtype)
    close_as(dtype, scanned(rows, reverse=reverse), plain.loop(*rows.scan(), reverse=reverse))


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("seed", range(5))
def test_gae_equals_its_definition(seed: int, dtype: torch.dtype) -> None:
    rows = random_rows(seed, dtype, lengths=LENGTHS)
    for ours_T, sums_T in zip(estimated(rows, 0.97), gae_by_sums(rows, 0.97), strict=True):
        close_as(dtype, ours_T, sums_T)


@pytest.mark.parametrize("tokens", [1, 7, 64, 200])
@pytest.mark.parametrize("threads", [2, 3])
def test_parts_on_threads_equal_one_part(monkeypatch: pytest.MonkeyPatch, threads: int, tokens: int) -> None:
    rows = random_rows(4, torch.float64, lengths=LENGTHS)
    rows.lam_B[-1] = 0.9  # so that the last part hands something on
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: threads)
    expected = estimated(rows, 0.97), scanned(rows, reverse=True), scanned(rows, reverse=False)
    monkeypatch.setattr(cpu, "PART_TOKENS", tokens)
    monkeypatch.setattr(team, "PARTS_PER_THREAD", 100)
    for ours_T, whole_T in zip(estimated(rows, 0.97), expected[0], strict=True):
        close_fp64(ours_T, whole_T)
    close_fp64(scanned(rows, reverse=True), expected[1])
    close_fp64(scanned(rows, reverse=False), expected[2])


def test_each_part_gets_the_carry_of_the_parts_to_its_right() -> None:
    heads = np.array([[0.0, 0.0], [20.5, 2.0], [40.5, 0.0], [60.5, 2.0]])
    # From the right: 60.5, then 40.5 whose share of it is 0, then 20.5 + 2 * 40.5.
    assert cpu._chained(heads).tolist() == [101.5, 40.5, 60.5, 0.0]
    assert cpu._chained(heads[:1]).tolist() == [0.0]


def test_rows_are_cut_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cpu, "cuts", lambda most: asked.append(most) or (1, 1))
    rows = random_rows(4, torch.float64, lengths=LENGTHS)
    for tokens in (sum(LENGTHS), sum(LENGTHS) + 1, 10):
        monkeypatch.setattr(cpu, "PART_TOKENS", tokens)
        scanned(rows, reverse=True)
        estimated(rows, 0.97)
    assert asked == [1, 1, 0, 0, sum(LENGTHS) // 10, sum(LENGTHS) // 10]


def test_a_carry_that_nothing_gets_through_is_left_behind_even_if_it_is_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "PART_TOKENS", 2)
    x_T = torch.tensor([1.0, 2.0, 3.0, 4.0, float("nan"), 6.0])
    w_T = torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5, 0.0])
    out_T = torch.empty(6)
    cpu.linear_scan(x_T, w_T, out_T, reverse=True)
    close_fp32(out_T, [2.75, 3.5, 3.0, float("nan"), float("nan"), 6.0], equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # where it runs as Python
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_only_what_stands_before_it_in_its_segment(bad: float) -> None:
    rows = random_rows(2, torch.float64, lengths=[70, 100, 3])
    rows.reward_T[120] = bad
    clean = random_rows(2, torch.float64, lengths=[70, 100, 3])
    advantage_T, return_T = estimated(rows, 0.97)
    expected_T, _ = estimated(clean, 0.97)
    beyond_T = torch.arange(173)
    spoiled_T = (beyond_T >= 70) & (beyond_T <= 120)
    assert not advantage_T[spoiled_T].isfinite().any() and not return_T[spoiled_T].isfinite().any()
    close_fp64(advantage_T[~spoiled_T], expected_T[~spoiled_T])


@compiled_only
def test_float32_is_rounded_once_however_long_the_segment() -> None:
    draw = torch.Generator().manual_seed(0)
    reward_T, value_T = torch.randn(2, 100_001, generator=draw)
    rows = Rows(
        x_T=reward_T,
        w_T=torch.ones(100_001),
        reward_T=reward_T,
        value_T=value_T,
        length_B=torch.tensor([100_001]),
        lam_B=torch.ones(1, dtype=torch.float64),
        bootstrap_B=torch.zeros(1),
    )
    # gamma = lambda = 1: the values cancel, and an advantage is the rest of the rewards less the value.
    rest_T = reward_T.double().flip(0).cumsum(0).flip(0)
    advantage_T, return_T = estimated(rows, 1.0)
    close_fp64(advantage_T, rest_T - value_T, rtol=1.2e-7)
    close_fp64(return_T, rest_T, rtol=1.2e-7)
    close_fp64(scanned(rows, reverse=True), rest_T, rtol=1.2e-7)


@pytest.mark.slow
@compiled_only
def test_a_million_tokens_of_mixed_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    lengths = [*torch.randint(1, 4000, (240,), generator=draw).tolist(), 500_000]
    rows = random_rows(1, torch.float32, lengths=lengths)
    assert len(rows.value_T) > 900_000
    looped = torch.empty_like(rows.value_T), torch.empty_like(rows.value_T)
    settings: dict[str, Any] = {"gamma": 0.999, "decay_B": 0.999 * rows.lam_B}
    plain.gae(
        rows.reward_T,
        rows.value_T,
        rows.length_B,
        looped,
        bootstrap_B=rows.bootstrap_B,
        scan=plain.loop,
        **settings,
    )
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: 2)
    for ours_T, looped_T in zip(estimated(rows, 0.999), looped, strict=True):
        close_fp32(ours_T, looped_T, rtol=1.2e-7, atol=0)


@pytest.mark.world
@compiled_only
def test_threads_work_in_a_forked_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "PART_TOKENS", 100)
    rows = random_rows(4, torch.float64, lengths=LENGTHS)
    expected_T = scanned(rows, reverse=True)
    child = os.fork()
    if child == 0:
        os._exit(int(not torch.equal(scanned(rows, reverse=True), expected_T)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
