"""The compiled kernels of sampling: the bits of the plain twins, in any batch, on any number of threads."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from millrace.kernels import sampling, sampling_cpu, sampling_plain
from tests.kernels.test_sampling_plain import (
    ALMOST_1,
    BY_HAND,
    DTYPES,
    doubles,
    kept,
    random_columns,
    random_limits,
    random_logits,
)

compiled_only = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="runs as Python, which takes too long for so much"
)
VOCABULARIES = [1, 3, 63, 64, 65, 128, 200, 256, 257, 600, 1290]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draws_have_the_bits_of_the_plain_twin(vocabulary: int, dtype: torch.dtype) -> None:
    logit_NV = random_logits(vocabulary, 4, vocabulary, dtype)
    columns = random_columns(vocabulary, 4)
    token_N, logprob_N = sampling_cpu.sample(logit_NV, *columns)
    plain_token_N, plain_logprob_N = sampling_plain.sample_plain(logit_NV, *columns)
    assert torch.equal(token_N, plain_token_N) and torch.equal(logprob_N, plain_logprob_N)
    assert torch.equal(sampling_cpu.row_logprob(logit_NV, token_N, columns[0]), logprob_N)
    assert logprob_N.dtype == dtype


@pytest.mark.slow_beyond(7)
@compiled_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, 2, 5, 13, 29])
def test_many_draws_have_the_bits_of_the_plain_twin(seed: int, dtype: torch.dtype) -> None:
    vocabulary = 1 + seed * 97
    logit_NV = random_logits(seed, 100, vocabulary, dtype)
    columns = random_columns(seed, 100)
    token_N, logprob_N = sampling_cpu.sample(logit_NV, *columns)
    plain_token_N, plain_logprob_N = sampling_plain.sample_plain(logit_NV, *columns)
    assert torch.equal(token_N, plain_token_N) and torch.equal(logprob_N, plain_logprob_N)
    target_N = torch.randint(vocabulary, (100,), generator=torch.Generator().manual_seed(seed))
    plain_N = sampling_plain.row_logprob_plain(logit_NV, target_N, columns[0])
    assert torch.equal(sampling_cpu.row_logprob(logit_NV, target_N, columns[0]), plain_N)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 5, 256, 300])
@pytest.mark.parametrize("seed", range(2))
def test_truncation_keeps_what_the_plain_twin_keeps(seed: int, vocabulary: int, dtype: torch.dtype) -> None:
    logit_NV = random_logits(seed, 6, vocabulary, dtype)
    check_truncation(logit_NV, seed)


@pytest.mark.parametrize(("shares", "limits", "expected"), BY_HAND, ids=str)
def test_truncation_by_hand(
    shares: list[float], limits: tuple[int, float, float], expected: set[int]
) -> None:
    logit_NV = doubles(*shares).log2().mul(math.log(2))[None]
    top_k, top_p, min_p = limits
    sampling_cpu.truncate(logit_NV, torch.ones(1), torch.tensor([top_k]), doubles(top_p), doubles(min_p))
    assert kept(logit_NV) == [expected]


@pytest.mark.slow_beyond(9)
@compiled_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.01, 0.3, 1, 6])  # from one crowded bucket to many empty ones
@pytest.mark.parametrize("seed", [0, 1, 2, 5, 9])
def test_many_truncations_keep_what_the_plain_twin_keeps(seed: int, scale: float, dtype: torch.dtype) -> None:
    logit_NV = scale * random_logits(seed, 60, 5 + seed * 199, dtype)
    check_truncation(logit_NV.mul(16).round().div(16) if seed % 2 else logit_NV, seed)  # many equals


def check_truncation(logit_NV: torch.Tensor, seed: int) -> None:
    limits = random_limits(seed, *logit_NV.shape)
    temperature_N = random_columns(seed, len(logit_NV))[0].clamp(min=0.3)
    plain_NV = logit_NV.clone()
    sampling_plain.truncate_plain(plain_NV, temperature_N, *limits.values())
    sampling_cpu.truncate(logit_NV, temperature_N, *limits.values())
    assert torch.equal(logit_NV, plain_NV)


def test_edges_have_the_bits_of_the_plain_twin() -> None:
    equal_NV = torch.full((12, 1024), -3.0)
    steps_N = doubles(0, 1, 2, 3, 255, 256, 257, 511, 512, 700, 768, 1023) / 1024
    gaps_NV = torch.full((8, 600), -math.inf)
    gaps_NV[:4, [1, 3]] = gaps_NV[4:, [254, 256]] = 2.0
    halves_N = doubles(0, 0.4999, 0.5, ALMOST_1).repeat(2)
    late_NV = torch.full((30, 290), -math.inf)
    late_NV[:, 2:6] = 2 * torch.rand(30, 4, generator=torch.Generator().manual_seed(0))
    ties_NV = torch.zeros(2, 300)
    ties_NV[:, [70, 256, 299]] = 1.0
    for logit_NV, uniform_N in (
        (equal_NV, steps_N),
        (gaps_NV, halves_N),
        (late_NV, torch.full((30,), ALMOST_1, dtype=torch.float64)),
        (ties_NV, halves_N[:2]),
    ):
        for temperature in (0.0, 0.5):
            temperature_N = torch.full((len(logit_NV),), temperature)
            ours = sampling_cpu.sample(logit_NV, temperature_N, uniform_N)
            plain = sampling_plain.sample_plain(logit_NV, temperature_N, uniform_N)
            assert torch.equal(ours[0], plain[0]) and torch.equal(ours[1], plain[1])


def test_a_row_has_the_same_bits_alone_and_among_fifty() -> None:
    logit_NV = random_logits(0, 50, 130, torch.float32)
    temperature_N, uniform_N = random_columns(0, 50)
    limits = random_limits(0, 50, 130)
    token_N, logprob_N = sampling.sample(logit_NV, temperature_N, uniform_N)
    plain_token_N, plain_logprob_N = sampling_plain.sample_plain(logit_NV, temperature_N, uniform_N)
    truncated_NV = logit_NV.clone()
    sampling.truncate(truncated_NV, temperature_N + 0.1, **limits)
    for n in range(0, 50, 7):
        row = slice(n, n + 1)
        for sample, token, logprob in (
            (sampling.sample, token_N, logprob_N),
            (sampling_plain.sample_plain, plain_token_N, plain_logprob_N),
        ):
            alone = sample(logit_NV[row], temperature_N[row], uniform_N[row])
            assert int(alone[0]) == int(token[n]) and float(alone[1]) == float(logprob[n])
        alone_NV = logit_NV[row].clone()
        sampling.truncate(alone_NV, temperature_N[row] + 0.1, **{k: v[row] for k, v in limits.items()})
        assert torch.equal(alone_NV[0], truncated_NV[n])


@pytest.mark.parametrize("vocabulary", [130, 520])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, threads: int, vocabulary: int) -> None:
    logit_NV = random_logits(3, 7, vocabulary, torch.float32)
    columns = random_columns(3, 7)
    limits = random_limits(3, 7, vocabulary)
    expected = sampling_cpu.sample(logit_NV, *columns)
    whole_NV = logit_NV.clone()
    sampling_cpu.truncate(whole_NV, columns[0] + 0.5, *limits.values())
    monkeypatch.setattr(sampling_cpu.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(sampling_cpu, "PART_LOGITS", 100)
    token_N, logprob_N = sampling_cpu.sample(logit_NV, *columns)
    assert torch.equal(token_N, expected[0]) and torch.equal(logprob_N, expected[1])
    assert torch.equal(sampling_cpu.row_logprob(logit_NV, token_N, columns[0]), expected[1])
    sampling_cpu.truncate(logit_NV, columns[0] + 0.5, *limits.values())
    assert torch.equal(logit_NV, whole_NV)


@pytest.mark.parametrize(
    ("shape", "most"), [((7, 11), 3), ((2, 50), 2), ((7, 7), 1), ((10, 5), 2), ((3, 8), 0), ((0, 11), 0)]
)
def test_rows_are_shared_out_where_there_is_enough_to_do(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], most: int
) -> None:
    calls: list[tuple[Any, ...]] = []
    asked: list[int] = []
    monkeypatch.setattr(sampling_cpu, "cuts", lambda most: asked.append(most) or (5, 3))
    monkeypatch.setattr(sampling_cpu, "PART_LOGITS", 25)
    sampling_cpu._over_rows(lambda *given: calls.append(given), torch.zeros(shape), torch.ones(shape[0]))
    assert asked == [most]
    ((constants, logits, columns, *shares),) = calls
    assert shares == [5, 3]
    reals, series, integers = constants
    assert (*reals, series, *integers) == sampling_plain.numbers(torch.float32) and logits.shape == shape
    assert [column.sum() for column in columns] == [shape[0]]


def test_the_sizes_of_buckets_and_lanes() -> None:
    assert (sampling_cpu.PART_LOGITS, sampling_cpu.LANES) == (16_384, 64)
    assert (sampling_cpu.BUCKETS_PER_NAT, sampling_cpu.LAST_BUCKET) == (32, 1023)


@pytest.mark.parametrize(
    ("vocabulary", "width", "num_sums"),
    [(1, 1, 1), (2, 2, 1), (3, 4, 1), (4, 4, 1), (5, 8, 1), (200, 256, 1), (256, 256, 1), (257, 256, 2)]
    + [(512, 256, 2), (513, 256, 4), (1024, 256, 4), (1025, 256, 8)],
)
def test_tiles_and_their_sums_come_in_powers_of_two(vocabulary: int, width: int, num_sums: int) -> None:
    n = sampling_plain.numbers(torch.float64)
    tile, sums = sampling_cpu._buffers(
        ((n.zero,) * 6, n.series, (n.bias, n.shift)), torch.zeros(1, vocabulary).double().numpy()
    )
    assert [len(part) for part in tile] == [width] * 3 and sums.tolist() == [0] * num_sums
    assert [part.dtype for part in tile] == ["float64", "float64", "int64"]


def test_the_greatest_logit_is_found_wherever_it_stands() -> None:
    for vocabulary in (1, 63, 64, 65, 128, 190):
        for v in {0, 1, 62, 63, 64, 127, 128, vocabulary - 1} & set(range(vocabulary)):
            logit_V = torch.full((vocabulary,), -2.5)
            logit_V[v] = -1.5
            assert sampling_cpu._greatest(logit_V.numpy()) == -1.5
            token_N, _ = sampling_cpu.sample(logit_V[None], torch.zeros(1), doubles(0.3))
            assert token_N.tolist() == [v]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # where it runs as Python
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_token_of_a_row_without_a_distribution_is_in_the_vocabulary(temperature: float) -> None:
    for value in (math.nan, math.inf, -math.inf):
        logit_NV = torch.full((1, 1), value)
        token_N, logprob_N = sampling_cpu.sample(logit_NV, torch.full((1,), temperature), doubles(ALMOST_1))
        assert token_N.tolist() == [0] and logprob_N.isnan().all()
        sampling_cpu.truncate(logit_NV, torch.ones(1), torch.tensor([1]), doubles(0.5), doubles(0.1))


def test_tokens_are_told_apart_within_a_bucket() -> None:
    # A 32nd of a nat holds all of these; the last three are far below and share the last bucket.
    logit_V = torch.tensor([-0.02, -0.01, 0.0, -0.01, -0.025, -50.0, -49.0, -51.0])
    kept = {1: [2], 2: [1, 2], 3: [1, 2, 3], 4: [0, 1, 2, 3], 6: [0, 1, 2, 3, 4, 6], 7: [0, 1, 2, 3, 4, 5, 6]}
    for top_k, expected in kept.items():
        logit_NV = logit_V.clone()[None]
        sampling_cpu.truncate(logit_NV, torch.ones(1), torch.tensor([top_k]), doubles(1.0), doubles(0.0))
        assert logit_NV[0].isfinite().nonzero()[:, 0].tolist() == expected


@pytest.mark.world
@compiled_only
def test_threads_work_in_a_forked_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_cpu.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(sampling_cpu, "PART_LOGITS", 10)
    logit_NV, columns = random_logits(5, 9, 70, torch.float32), random_columns(5, 9)
    expected_N = sampling_cpu.sample(logit_NV, *columns)[0]
    child = os.fork()
    if child == 0:
        os._exit(int(not torch.equal(sampling_cpu.sample(logit_NV, *columns)[0], expected_N)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
