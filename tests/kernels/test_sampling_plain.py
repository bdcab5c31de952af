"""Sampling by hand and by definition: the plain twins, and the door, behind which compiled kernels run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels import sampling_plain
from millrace.kernels.sampling import row_logprob, sample, truncate
from millrace.kernels.sampling_plain import TILE, numbers, row_logprob_plain, sample_plain, truncate_plain
from tests.close import close_fp32, close_fp64

CLOSE: dict[torch.dtype, Callable[..., None]] = {torch.float32: close_fp32, torch.float64: close_fp64}
DTYPES = list(CLOSE)
ALMOST_1 = 1 - 2.0**-53
Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def close_as(dtype: torch.dtype, actual: Any, expected: Any) -> None:
    """By the tolerance of a dtype."""
    CLOSE[dtype](actual, expected)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_logits(seed: int, num_rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Some of them minus infinity, one of each row certainly not."""
    generator = torch.Generator().manual_seed(seed)
    logit_NV = 3 * torch.randn(num_rows, vocabulary, generator=generator, dtype=torch.float64)
    logit_NV[torch.rand(num_rows, vocabulary, generator=generator) < 0.1] = -math.inf
    logit_NV[:, vocabulary // 2] = 0.5
    return logit_NV.to(dtype)


def random_columns(seed: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Temperatures, a quarter of them 0, and uniform numbers."""
    generator = torch.Generator().manual_seed(100 + seed)
    temperature_N = 0.1 + 2 * torch.rand(num_rows, generator=generator, dtype=torch.float64)
    temperature_N[torch.rand(num_rows, generator=generator) < 0.25] = 0
    return temperature_N, torch.rand(num_rows, generator=generator, dtype=torch.float64)


def random_limits(seed: int, num_rows: int, vocabulary: int) -> dict[str, Tensor]:
    """Top-k, top-p and min-p, each off in a third of the rows."""
    generator = torch.Generator().manual_seed(200 + seed)
    share_N3 = torch.rand(num_rows, 3, generator=generator, dtype=torch.float64)
    off_N3 = torch.rand(num_rows, 3, generator=generator) < 1 / 3
    top_k_N = (1 + share_N3[:, 0] ** 3 * (vocabulary + 2)).long()
    return {
        "top_k_N": top_k_N.masked_fill(off_N3[:, 0], 0),
        "top_p_N": (1 - 0.99 * share_N3[:, 1]).masked_fill(off_N3[:, 1], 1),
        "min_p_N": (share_N3[:, 2] ** 6).masked_fill(off_N3[:, 2], 0),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential_is_right_to_three_units_in_the_last_place(dtype: torch.dtype) -> None:
    least = float(numbers(dtype).least)
    x_N = torch.linspace(least, 0, 100_001, dtype=torch.float64).to(dtype)
    exact = np.exp(x_N.numpy().astype(np.longdouble))
    error = np.abs(sampling_plain._exp(x_N).numpy() / exact - 1)
    assert error[1:].max() < 3 * torch.finfo(dtype).eps / 2
    assert sampling_plain._exp(torch.tensor([0.0, least, -math.inf], dtype=dtype)).tolist() == [1, 0, 0]
    assert sampling_plain._exp(torch.tensor([math.nan], dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_the_exponential_is_the_written_one(dtype: torch.dtype) -> None:
    z_NV = torch.linspace(-20, 3, 5000, dtype=dtype).view(5, -1)
    mass_NV = sampling_plain._masses(z_NV, z_NV.amax(1))
    x_NV = z_NV - z_NV.amax(1, keepdim=True)
    assert torch.equal(mass_NV, sampling_plain._exp(x_NV)) and not torch.equal(mass_NV, x_NV.exp())


def test_the_constants_of_the_exponential() -> None:
    single, double = numbers(torch.float32), numbers(torch.float64)
    assert [float(single.rounder), float(double.rounder)] == [1.5 * 2**23, 1.5 * 2**52]
    assert [int(single.bias), int(single.shift)] == [127, 23]
    assert [int(double.bias), int(double.shift)] == [1023, 52]
    # Up to the power 7 and 13: the next would be below the rounding error.
    assert [round(1 / float(n.series[0])) for n in (single, double)] == [5040, 6227020800]
    assert [len(n.series) for n in (single, double)] == [8, 14]
    close_fp64([single.least, double.least], [-126 * math.log(2), -1022 * math.log(2)], rtol=1e-7)
    assert [single.zero, double.zero] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 256, 257, 900])
def test_log_probabilities_are_those_of_log_softmax(vocabulary: int, dtype: torch.dtype) -> None:
    logit_NV = random_logits(vocabulary, 30, vocabulary, dtype)
    temperature_N, uniform_N = random_columns(vocabulary, 30)
    token_N, logprob_N = sample_plain(logit_NV, temperature_N, uniform_N)
    z_NV = logit_NV.double() / torch.where(temperature_N == 0, 1, temperature_N)[:, None]
    expected_N = z_NV.log_softmax(1).gather(1, token_N[:, None])[:, 0]
    close_fp64(logprob_N, expected_N, rtol=0, atol=4e-6 if dtype == torch.float32 else 1e-13)
    assert logprob_N.dtype == dtype and token_N.dtype == torch.int64
    assert torch.equal(row_logprob_plain(logit_NV, token_N, temperature_N), logprob_N)


@pytest.mark.parametrize("sample", [sample_plain, sample])
@pytest.mark.parametrize("vocabulary", [1, 2, 5, 300, 700])
def test_the_token_is_where_the_cumulative_mass_passes_u(vocabulary: int, sample: Draw) -> None:
    logit_NV = random_logits(vocabulary, 40, vocabulary, torch.float64)
    temperature_N, uniform_N = random_columns(vocabulary, 40)
    temperature_N[temperature_N == 0] = 0.7
    cumulative_NV = (logit_NV / temperature_N[:, None]).softmax(1).cumsum(1)
    expected_N = (cumulative_NV <= uniform_N[:, None]).sum(1)
    assert sample(logit_NV, temperature_N, uniform_N)[0].tolist() == expected_N.tolist()


@pytest.mark.parametrize("sample", [sample_plain, sample])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_masses_are_passed_exactly(sample: Draw, dtype: torch.dtype) -> None:
    # The mass before token v is v, so u = v / V reaches but does not pass it.
    for vocabulary, tokens in ((4, [0, 1, 2, 3]), (1024, [0, 1, 255, 256, 257, 511, 512, 700, 1023])):
        logit_NV = torch.full((len(tokens), vocabulary), -3.0, dtype=dtype)
        uniform_N = doubles(*tokens) / vocabulary
        token_N, logprob_N = sample(logit_NV, torch.ones(len(tokens)), uniform_N)
        assert token_N.tolist() == tokens
        close_as(dtype, logprob_N, [-math.log(vocabulary)] * len(tokens))


@pytest.mark.parametrize("sample", [sample_plain, sample])
@pytest.mark.parametrize("start", [0, 250, 255, 256, 600])
def test_a_token_without_mass_is_never_drawn(start: int, sample: Draw) -> None:
    uniform_N = doubles(0, 0.4999, 0.5, ALMOST_1)
    logit_NV = torch.full((4, 1500), -math.inf)
    logit_NV[:, start + 1] = logit_NV[:, start + 3] = 2.0
    token_N, logprob_N = sample(logit_NV, torch.full((4,), 0.3), uniform_N)
    assert token_N.tolist() == [start + 1, start + 1, start + 3, start + 3]
    close_fp32(logprob_N, [-math.log(2)] * 4)


@pytest.mark.parametrize("sample", [sample_plain, sample])
def test_the_last_token_is_drawn_where_the_masses_one_by_one_do_not_reach_u(sample: Draw) -> None:
    found = 0
    for seed in range(40):
        logit_V = torch.full((290,), -math.inf)
        logit_V[2:6] = torch.rand(4, generator=torch.Generator().manual_seed(seed)) * 2
        mass_V = sampling_plain._exp(logit_V - logit_V.max())
        short = (
            mass_V.double().sum() < sampling_plain._halved(sampling_plain._tiles(mass_V[None]))[0, 0].double()
        )
        found += int(short)
        assert sample(logit_V[None], torch.ones(1), doubles(ALMOST_1))[0].tolist() == [5]
    assert 5 < found < 35


@pytest.mark.parametrize("sample", [sample_plain, sample])
def test_greedy_takes_the_lowest_of_the_likeliest_at_temperature_1(sample: Draw) -> None:
    logit_NV = torch.zeros(3, 600)
    logit_NV[0, [299, 300, 599]] = 1.0
    logit_NV[1, 599] = 1.0
    logit_NV[2] = -math.inf
    logit_NV[2, 63:65] = -4.0
    token_N, logprob_N = sample(logit_NV, torch.zeros(3), doubles(0.9, 0.0, 0.9))
    assert token_N.tolist() == [299, 599, 63]
    total = [597 / math.e + 3, 599 / math.e + 1, 2]
    close_fp32(logprob_N, [-math.log(part) for part in total])


@pytest.mark.slow_beyond(39)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # where it runs as Python
@pytest.mark.parametrize("sample", [sample_plain, sample])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocabulary", [1, 3, 300])
@pytest.mark.parametrize("bad", ["one NaN", "all NaN", "infinity", "nothing"])
def test_a_row_without_a_distribution_is_nan_and_its_neighbours_unharmed(
    bad: str, vocabulary: int, temperature: float, sample: Draw
) -> None:
    clean_NV = random_logits(1, 3, vocabulary, torch.float32)
    temperature_N, uniform_N = torch.full((3,), temperature), doubles(0.2, 0.99, 0.7)
    spoiled_NV = clean_NV.clone()
    value = {"one NaN": math.nan, "all NaN": math.nan, "infinity": math.inf, "nothing": -math.inf}[bad]
    if bad in ("one NaN", "infinity"):
        spoiled_NV[1, vocabulary // 3] = value
    else:
        spoiled_NV[1] = value
    token_N, logprob_N = sample(spoiled_NV, temperature_N, uniform_N)
    assert logprob_N.isnan().tolist() == [False, True, False] and 0 <= token_N[1] < vocabulary
    others = torch.tensor([0, 2])
    clean = sample(clean_NV[others], temperature_N[others], uniform_N[others])
    assert torch.equal(token_N[others], clean[0]) and torch.equal(logprob_N[others], clean[1])
    target_N = torch.zeros(3, dtype=torch.int64)
    assert row_logprob(spoiled_NV, target_N, temperature_N).isnan().tolist() == [False, True, False]
    assert row_logprob_plain(spoiled_NV, target_N, temperature_N).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("row_logprob", [row_logprob_plain, row_logprob])
def test_a_target_that_is_ruled_out_has_no_probability(row_logprob: Draw) -> None:
    logit_NV = torch.tensor([[0.0, -math.inf, math.log(3.0)]] * 3)
    logprob_N = row_logprob(logit_NV, torch.tensor([1, 2, 0]), doubles(0.5, 0.0, 0.5))
    close_fp32(logprob_N, [-math.inf, math.log(0.75), math.log(0.1)])


def kept_by_loops(
    logit_V: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Truncation as its docstring says it, token by token."""
    z_V = logit_V.astype(np.float64) / temperature
    share_V = np.exp(z_V - z_V.max())
    order = sorted(range(len(z_V)), key=lambda v: (-logit_V[v], v))
    order = [v for v in order if share_V[v] >= min_p and logit_V[v] > -math.inf]
    order = order[: top_k or len(order)]
    kept, held, whole = set(), 0.0, sum(share_V[v] for v in order)
    for v in order:
        if top_p == 1 or held < top_p * whole:
            kept.add(v)
        held += share_V[v]
    return kept


def kept(logit_NV: Tensor) -> list[set[int]]:
    return [set(logit_V.isfinite().nonzero()[:, 0].tolist()) for logit_V in logit_NV]


@pytest.mark.slow_beyond(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 6, 270])
@pytest.mark.parametrize("seed", range(3))
def test_truncation_equals_its_definition(seed: int, vocabulary: int, dtype: torch.dtype) -> None:
    logit_NV = random_logits(seed, 30, vocabulary, dtype)
    limits = random_limits(seed, 30, vocabulary)
    temperature_N = random_columns(seed, 30)[0].clamp(min=0.3)
    expected = [
        kept_by_loops(logit_V.numpy(), float(temperature_N[n]), int(k), float(p), float(m))
        for n, (logit_V, k, p, m) in enumerate(zip(logit_NV, *limits.values(), strict=True))
    ]
    truncated_NV = logit_NV.clone()
    truncate_plain(truncated_NV, temperature_N, *limits.values())
    assert kept(truncated_NV) == expected
    stays_NV = truncated_NV > -math.inf
    assert torch.equal(truncated_NV[stays_NV], logit_NV[stays_NV])
    assert vocabulary == 1 or len({len(tokens) for tokens in expected}) > 1


SHARES = [0.4, 0.3, 0.15, 0.1, 0.05]


BY_HAND = [
    (SHARES, (0, 1.0, 0.0), {0, 1, 2, 3, 4}),
    (SHARES, (3, 1.0, 0.0), {0, 1, 2}),
    (SHARES[::-1], (1, 1.0, 0.0), {4}),
    (SHARES, (0, 0.69, 0.0), {0, 1}),
    (SHARES, (0, 0.8, 0.0), {0, 1, 2}),
    # A power of two has an exact mass: half of the whole is reached by the first alone.
    ([0.5, 0.25, 0.25], (0, 0.5, 0.0), {0}),
    ([0.5, 0.25, 0.25], (0, 0.501, 0.0), {0, 1}),
    ([0.5, 0.25, 0.25], (0, 0.75, 0.0), {0, 1}),
    ([0.5, 0.25, 0.25], (0, 0.751, 0.0), {0, 1, 2}),
    ([0.1, 0.2, 0.7], (0, 1e-6, 0.0), {2}),
    ([0.25] * 4, (2, 1.0, 0.0), {0, 1}),
    ([0.25] * 4, (9, 1.0, 0.0), {0, 1, 2, 3}),
    ([0.25] * 4, (0, 0.5, 0.0), {0, 1}),
    # Of 0.5 and 0.25 the first holds two thirds.
    ([0.5, 0.25, 0.25], (2, 0.66, 0.0), {0}),
    ([0.5, 0.25, 0.25], (2, 0.67, 0.0), {0, 1}),
    ([0.5, 0.25, 0.25], (0, 1.0, 0.5), {0, 1, 2}),
    ([0.5, 0.25, 0.25], (0, 1.0, 0.51), {0}),
    ([0.5, 0.25, 0.25], (0, 1.0, 1.0), {0}),
    # min-p leaves 0.4 and 0.3, of which the first holds 0.57.
    (SHARES, (0, 0.56, 0.7), {0}),
    (SHARES, (0, 0.58, 0.7), {0, 1}),
    (SHARES, (4, 0.5, 0.0), {0, 1}),
    # e to the -40 and -41 stand in the same, last bucket; -inf in it too.
    ([1.0, math.exp(-41), math.exp(-40), 0.0], (2, 1.0, 0.0), {0, 2}),
    ([1.0, math.exp(-41), math.exp(-40), 0.0], (4, 1.0, 0.0), {0, 1, 2}),
]


@pytest.mark.parametrize(("shares", "limits", "expected"), BY_HAND, ids=str)
def test_truncation_by_hand(
    shares: list[float], limits: tuple[int, float, float], expected: set[int]
) -> None:
    for dtype in DTYPES:
        logit_NV = doubles(*shares).log2().mul(math.log(2)).to(dtype)[None]
        columns = torch.tensor([limits[0]]), doubles(limits[1]), doubles(limits[2])
        plain_NV = logit_NV.clone()
        truncate_plain(plain_NV, torch.ones(1), *columns)
        truncate(logit_NV, torch.ones(1), top_k_N=columns[0], top_p_N=columns[1], min_p_N=columns[2])
        assert kept(plain_NV) == [expected] and kept(logit_NV) == [expected]


def test_the_power_of_two_above_a_number() -> None:
    assert [sampling_plain._power_of_two(number) for number in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


@pytest.mark.parametrize("row_logprob", [row_logprob_plain, row_logprob])
def test_the_logarithm_is_that_of_the_c_library(row_logprob: Draw) -> None:
    counts = torch.tensor([1, 2, 3, 10, *range(100, 300)])
    logit_NV = torch.zeros(len(counts), 300, dtype=torch.float64)
    logit_NV.masked_fill_(torch.arange(300) >= counts[:, None], -math.inf)
    logprob_N = row_logprob(logit_NV, torch.zeros_like(counts), torch.ones(len(counts)))
    assert logprob_N.tolist() == [-math.log(count) for count in counts.tolist()]
    # torch rounds the logarithm of this number the other way.
    many_NV = torch.zeros(1, 9170, dtype=torch.float64)
    assert row_logprob(many_NV, torch.zeros(1).long(), torch.ones(1)).tolist() == [-math.log(9170)]


def test_a_tile_is_a_power_of_two() -> None:
    assert TILE == 256
