"""The Triton kernels against the loop: compiled where there is a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from millrace.kernels import linear_scan_triton as gpu
from millrace.kernels.linear_scan import loop
from tests.close import CLOSE, close_as, close_fp64
from tests.kernels.packed_rows import Rows, gae_by_sums, random_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
UNSET = -1
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


LENGTHS = [5, 1, 0, 8, 16, 0, 2, 11, 1, 1, 1, 1]


@pytest.fixture(params=[(8, 2), (4, 16)], ids=["two windows", "one window"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few tokens, so that short rows have many."""
    block, window = request.param
    monkeypatch.setattr(gpu, "BLOCK", {torch.float32: block, torch.float64: block})
    if INTERPRETED:
        monkeypatch.setattr(gpu, "WINDOW", window)


def scanned(rows: Rows, *, reverse: bool) -> Tensor:
    out_T = torch.full_like(rows.x_T, 7.0, device=DEVICE)
    gpu.linear_scan(rows.x_T.to(DEVICE), rows.w_T.to(DEVICE), out_T, reverse=reverse)
    return out_T.cpu()


def estimated(rows: Rows, gamma: float) -> tuple[Tensor, Tensor]:
    out = torch.full((2, len(rows.value_T)), 7.0, dtype=rows.value_T.dtype, device=DEVICE).unbind()
    gpu.gae(
        rows.reward_T.to(DEVICE),
        rows.value_T.to(DEVICE),
        rows.length_B.to(DEVICE),
        out,
        gamma=gamma,
        decay_B=gamma * rows.lam_B,
        bootstrap_B=rows.bootstrap_B.to(DEVICE),
    )
    return out[0].cpu(), out[1].cpu()


@pytest.mark.slow_beyond(1)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("reverse", [True, False])
def test_the_scan_equals_the_loop(reverse: bool, dtype: torch.dtype) -> None:
    for seed in range(2):
        rows = random_rows(seed, dtype, longest=10)
        close_as(dtype, scanned(rows, reverse=reverse), loop(*rows.scan(), reverse=reverse), atol=1e-5)


@pytest.mark.slow_beyond(1)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_gae_equals_its_definition(dtype: torch.dtype) -> None:
    rows = random_rows(5, dtype, lengths=LENGTHS)
    for ours_T, sums_T in zip(estimated(rows, 0.97), gae_by_sums(rows, 0.97), strict=True):
        close_as(dtype, ours_T, sums_T)


@pytest.mark.slow
def test_tiles_of_their_usual_size() -> None:
    for dtype in (torch.float32, torch.float64):
        rows = random_rows(6, dtype, lengths=[700, 1, 400])
        for ours_T, sums_T in zip(estimated(rows, 0.97), gae_by_sums(rows, 0.97), strict=True):
            close_as(dtype, ours_T, sums_T)


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.usefixtures("small")
def test_rows_that_fill_their_tiles_and_rows_of_nothing() -> None:
    for lengths in ([], [0, 0], [1], [8], [16, 0], [7, 9]):
        rows = random_rows(7, torch.float64, lengths=lengths)
        for ours_T, sums_T in zip(estimated(rows, 0.9), gae_by_sums(rows, 0.9), strict=True):
            close_fp64(ours_T, sums_T)
        for reverse in (True, False):
            close_fp64(scanned(rows, reverse=reverse), loop(*rows.scan(), reverse=reverse))


@pytest.mark.slow_beyond(1)
@pytest.mark.usefixtures("small")
def test_nothing_crosses_a_share_of_zero_not_even_nan() -> None:
    rows = random_rows(8, torch.float64, lengths=[30])
    rows.w_T[:] = 0.5
    rows.w_T[[4, 20]] = 0.0
    rows.x_T[17] = float("nan")
    for reverse in (True, False):
        scanned_T = scanned(rows, reverse=reverse)
        close_fp64(scanned_T, loop(*rows.scan(), reverse=reverse), equal_nan=True)
        assert scanned_T.isnan().nonzero().flatten().tolist() == list(
            range(5 if reverse else 17, 18 if reverse else 20)
        )


@pytest.mark.slow_beyond(1)
@pytest.mark.usefixtures("small")
def test_a_nan_stays_in_its_segment_and_nothing_is_forgotten_at_gamma_and_lambda_1() -> None:
    rows = random_rows(9, torch.float64, lengths=[13, 20, 5])
    rows.lam_B[:] = 1.0
    rows.reward_T[30] = float("nan")
    advantage_T, return_T = estimated(rows, 1.0)
    expected_T, _ = gae_by_sums(rows, 1.0)
    close_fp64(advantage_T, expected_T, equal_nan=True)
    assert return_T.isnan().nonzero().flatten().tolist() == list(range(13, 31))


def test_a_launch_has_three_words_a_tile_and_a_counter() -> None:
    for dtype, wide, block in ((torch.bfloat16, torch.float32, 2048), (torch.float64, torch.float64, 1024)):
        state, num_tiles, options = gpu._prepared(torch.zeros(3 * block + 1, dtype=dtype))
        assert num_tiles == 4 and state.tolist() == [UNSET] * 13
        assert state.element_size() == wide.itemsize
        assert (options["BLOCK"], options["WINDOW"], options["num_warps"]) == (block, 256, 8)


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.arguments: tuple[object, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            self.arguments = arguments

        return launch


@pytest.mark.parametrize("small", [(8, 2)], indirect=True)
@pytest.mark.usefixtures("small")
def test_a_tile_is_told_between_which_segments_to_search(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Recorder()
    monkeypatch.setattr(gpu, "_gae", kernel)
    estimated(random_rows(0, torch.float64, lengths=[5, 1, 0, 8, 2]), 0.9)
    segment, end, *_, gamma = kernel.arguments[1]
    # Of tokens 0, 8 and, past the last tile, 15, the last of all.
    assert segment.tolist() == [0, 3, 4]
    assert end.tolist() == [5, 6, 6, 14, 16]
    assert gamma.tolist() == [0.9]


@triton.jit
def tell(word: tl.tensor, number: tl.tensor) -> None:
    gpu._tell(word, tl.load(number))


@triton.jit
def carry_of(
    share: tl.tensor,
    value: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    num_tiles: tl.tensor,
    *,
    LAST: tl.constexpr,
) -> None:
    k = tl.arange(0, 4)
    share, value = tl.load(share + k), tl.load(value + k)
    place = num_tiles - 1
    tl.store(out, gpu._carry(share, value, state, place, num_tiles, LAST=LAST, WINDOW=2))


def bits(*numbers: float) -> Tensor:
    return torch.tensor(numbers).view(torch.int32)


def state_of(shares: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """What six tiles told before the last one starts."""
    unset = torch.tensor([UNSET], dtype=torch.int32)
    return torch.cat([shares, unset, values, unset, known, unset]).to(DEVICE)


def look_back(state: Tensor, last: int = 0) -> float:
    out_1 = torch.zeros(1, device=DEVICE)
    share_T, value_T = torch.tensor([0.5, 0.25, 2.0, -1.0]), torch.tensor([1.0, 4.0, 3.0, -2.0])
    carry_of[(1,)](share_T.to(DEVICE), value_T.to(DEVICE), state, out_1, len(state) // 3, LAST=last)
    return out_1.item()


NOTHING_KNOWN = torch.full((5,), UNSET, dtype=torch.int32)
SHARES, VALUES = bits(0.5, 3.0, -2.0, 0.5, 0.25), bits(1.0, -3.0, 2.0, 5.0, -1.0)


@pytest.mark.parametrize(("last", "share", "value"), [(0, 0.5, 1.0), (3, -1.0, -2.0)])
def test_a_tile_looks_back_over_all_tiles_and_tells_how_it_ends(
    last: int, share: float, value: float
) -> None:
    state = state_of(SHARES, VALUES, NOTHING_KNOWN)
    # 1; -3 + 3 * 1 = 0; 2 - 2 * 0 = 2; 5 + 0.5 * 2 = 6; -1 + 0.25 * 6 = 0.5
    assert look_back(state, last) == 0.5
    told = [*SHARES.tolist(), *bits(share), *VALUES.tolist(), *bits(value), *NOTHING_KNOWN.tolist()]
    assert state.tolist() == [*told, *bits(value + share * 0.5)]


def test_a_tile_looks_no_further_than_where_the_last_a_is_known() -> None:
    unheard, known = NOTHING_KNOWN.clone(), NOTHING_KNOWN.clone()
    known[2] = bits(10.0)
    shares, values = torch.cat([unheard[:3], SHARES[3:]]), torch.cat([unheard[:3], VALUES[3:]])
    known[0] = bits(99.0)
    shares[1], values[1] = SHARES[1], VALUES[1]
    # 5 + 0.5 * 10 = 10; -1 + 0.25 * 10 = 1.5
    assert look_back(state_of(shares, values, known)) == 1.5


def test_beyond_the_first_tile_a_is_nothing_at_all() -> None:
    ones, zeros = bits(1.0, 1.0, 1.0, 1.0, 1.0), bits(0.0, 0.0, 0.0, 0.0, 0.0)
    assert look_back(state_of(ones, zeros, NOTHING_KNOWN)) == 0.0


def test_a_share_of_zero_ends_the_look_back() -> None:
    shares = SHARES.clone()
    shares[3] = 0
    # 5; -1 + 0.25 * 5 = 0.25. Beyond that nobody has told anything, and nobody waits.
    shares[:2], values = UNSET, VALUES.clone()
    values[:2] = UNSET
    assert look_back(state_of(shares, values, NOTHING_KNOWN)) == 0.25


@pytest.mark.skipif(not INTERPRETED, reason="the host cannot write into a running kernel")
@pytest.mark.parametrize(("word", "number"), [(3, 0.5), (9, 5.0), (15, 10.0)])
def test_a_tile_waits_until_share_and_value_or_the_last_a_are_known(
    word: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(SHARES, VALUES, NOTHING_KNOWN)
    state[[3, 9] if word == 15 else [word]] = UNSET
    load, reads = InterpreterBuilder.create_masked_load, []

    def create_masked_load(*arguments: Any) -> Any:
        reads.append(len(reads))
        if len(reads) == 30:  # ten times three words are read
            state[word] = bits(number)[0]
        return load(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    assert look_back(state) == (1.5 if word == 15 else 0.5)
    assert 30 <= len(reads) < 60


def test_a_nan_whose_bits_mean_unset_is_told_as_another_nan() -> None:
    for number, expected in ((UNSET, -2), (int(bits(1.5)), int(bits(1.5)))):
        word = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        tell[(1,)](word, torch.tensor([number], dtype=torch.int32, device=DEVICE).view(torch.float32))
        assert word.item() == expected
    assert torch.tensor([-2], dtype=torch.int32).view(torch.float32).isnan()
