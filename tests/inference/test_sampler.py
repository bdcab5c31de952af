from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.inference.sampler import SampledTokens, SamplingTable, check_vocabulary, uniform
from millrace.types import SamplingParams
from tests.close import close_fp32, close_fp64

CPU = torch.device("cpu")
SHARES = [0.4, 0.3, 0.15, 0.1, 0.05]
# Exceeded once in a thousand samplings, by number of outcomes less one.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}


def no_history(n: int) -> tuple[np.ndarray, np.ndarray]:
    raise AssertionError(f"the history of entry {n} was asked for without need")


def drawn_by(
    params: Sequence[SamplingParams], logit_NV: Tensor, position: int = 0, history: Any = None
) -> SampledTokens:
    """One token for each of the parameters."""
    table = SamplingTable(len(params), logit_NV.shape[1], CPU)
    table.put(range(len(params)), params)
    rows, positions = np.arange(len(params)), np.full(len(params), position)
    return table.sample(logit_NV, rows, positions, history or no_history)


def sample_many(shares: list[float], num: int = 20_000, **params: Any) -> tuple[Tensor, Tensor]:
    """One token for each seed from 0 to num - 1."""
    seeds = [SamplingParams(seed=seed, **params) for seed in range(num)]
    drawn = drawn_by(seeds, torch.tensor(shares).log().expand(num, -1))
    assert drawn.finite_N.all()
    return torch.from_numpy(drawn.token_N), torch.from_numpy(drawn.logprob_N)


def chi_square(counts: list[int], shares: list[float]) -> float:
    expected = [share * sum(counts) / sum(shares) for share in shares]
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, SHARES),
        ({"top_k": 3}, SHARES[:3]),
        ({"top_p": 0.8}, SHARES[:3]),
        ({"top_p": 0.69}, SHARES[:2]),
        ({"min_p": 0.3}, SHARES[:3]),
        ({"min_p": 0.7, "top_p": 0.58}, SHARES[:2]),
        ({"top_k": 2, "top_p": 0.9}, SHARES[:2]),
        ({"temperature": 0.5}, [share**2 for share in SHARES]),
        ({"temperature": 2.0, "top_k": 4}, [share**0.5 for share in SHARES[:4]]),
        ({"allowed_token_ids": (0, 2, 1)}, SHARES[:3]),
        ({"forbidden_token_ids": (4, 3)}, SHARES[:3]),
        ({"logit_bias": ((1, math.log(2)), (4, -50.0))}, [0.4, 0.6, 0.15, 0.1]),
        ({"min_tokens": 1, "stop_token_ids": (4,)}, SHARES[:4]),
    ],
    ids=str,
)
def test_tokens_are_as_frequent_as_the_distribution_says(params: dict[str, Any], kept: list[float]) -> None:
    counts = torch.bincount(sample_many(SHARES, **params)[0], minlength=5).tolist()
    assert sum(counts) == 20_000 and sum(counts[len(kept) :]) == 0
    assert chi_square(counts[: len(kept)], kept) < CHI_SQUARE[len(kept) - 1]


def test_tokens_of_one_seed_at_many_positions_follow_the_distribution() -> None:
    table = SamplingTable(3, 5, CPU)
    table.put([1], [SamplingParams(seed=11)])
    logit_NV = torch.tensor(SHARES).log().expand(20_000, -1)
    drawn = table.sample(logit_NV, np.ones(20_000, dtype=np.int64), np.arange(20_000), no_history)
    assert chi_square(np.bincount(drawn.token_N, minlength=5).tolist(), SHARES) < CHI_SQUARE[4]


def test_temperature_0_takes_the_likeliest_token_whatever_truncates() -> None:
    for params in ({}, {"top_k": 2, "top_p": 0.5, "min_p": 0.9}):
        seeds = [SamplingParams(seed=seed, temperature=0.0, **params) for seed in range(50)]
        drawn = drawn_by(seeds, torch.tensor([0.2, 0.7, 0.1]).log().expand(50, -1))
        assert set(drawn.token_N.tolist()) == {1} and drawn.support is None
        close_fp32(drawn.logprob_N, [math.log(0.7)] * 50)
        assert drawn.within_N.tolist() == drawn.logprob_N.tolist()


EVERYTHING = {
    "top_k": 3,
    "logit_bias": ((1, 0.7),),
    "forbidden_token_ids": (2,),
    "min_tokens": 4,
    "stop_token_ids": (0,),
}


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, EVERYTHING], ids=str)
def test_logprobs_are_those_of_the_whole_distribution(params: dict[str, Any], temperature: float) -> None:
    tokens, logprobs = sample_many(SHARES, num=200, temperature=temperature, **params)
    shares = torch.tensor(SHARES) ** (1 / temperature)
    close_fp32(logprobs, (shares / shares.sum())[tokens].log())
    tokens, logprobs = sample_many(SHARES, num=200, temperature=temperature, logprobs="raw", **params)
    close_fp32(logprobs, torch.tensor(SHARES)[tokens].log())


@pytest.mark.parametrize("kind", ["processed", "raw"])
@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.69}, [0, 1]),
        ({"min_p": 0.2}, [0, 1, 2, 3]),
        ({"allowed_token_ids": (4, 1)}, [1, 4]),
        ({"allowed_token_ids": (4, 1), "temperature": 0.0}, [1, 4]),
        ({"allowed_token_ids": (4, 1, 0), "top_k": 2, "logit_bias": ((4, 9.0),)}, [0, 4]),
        ({"top_k": 4, "forbidden_token_ids": (1,)}, [0, 2, 3, 4]),
    ],
    ids=str,
)
def test_where_sampling_truncates_the_support_and_the_share_of_it_go_along(
    params: dict[str, Any], support: list[int], kind: Any
) -> None:
    plain, wanted = SamplingParams(), SamplingParams(**params, logprobs=kind, seed=7)
    drawn = drawn_by([plain, wanted, plain], torch.tensor(SHARES).log().expand(3, -1))
    assert drawn.support is not None and drawn.support[0] is None and drawn.support[2] is None
    ids = drawn.support[1]
    assert ids is not None and ids.tolist() == support and ids.dtype == np.int32
    mass = [0, math.log(sum(SHARES[token] for token in support)), 0]
    close_fp32(drawn.within_N, drawn.logprob_N - np.array(mass, np.float32))
    assert drawn.within_N.dtype == np.float32


def test_the_share_of_a_support_is_taken_at_the_temperature() -> None:
    params = [SamplingParams(top_k=2, temperature=0.5, logprobs=kind) for kind in ("processed", "raw")]
    params += [replace(one, logit_bias=((4, -1.0),)) for one in params]
    drawn = drawn_by(params, torch.tensor(SHARES).log().expand(4, -1))
    squares = 0.25 / sum(share**2 for share in SHARES)
    masses = np.array([math.log(squares), math.log(0.7)] * 2, np.float32)
    close_fp32(drawn.within_N, drawn.logprob_N - masses)


def test_without_truncation_there_is_no_support() -> None:
    params = [SamplingParams(), SamplingParams(forbidden_token_ids=(1,), logit_bias=((0, 1.0),))]
    drawn = drawn_by(params, torch.zeros(2, 5))
    assert drawn.support is None and drawn.within_N.tolist() == drawn.logprob_N.tolist()
    assert (drawn.token_N.dtype, drawn.logprob_N.dtype) == (np.int64, np.float32)


def edited(logit_V: np.ndarray, params: SamplingParams, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The logits before the temperature, token by token as SamplingParams says it."""
    changed = logit_V.astype(np.float64)
    for token, bias in params.logit_bias:
        changed[token] += bias
    for v in range(len(changed)):
        ruled_out = v in params.forbidden_token_ids
        ruled_out |= bool(params.allowed_token_ids) and v not in params.allowed_token_ids
        ruled_out |= len(tokens) < params.min_tokens and v in params.stop_token_ids
        if v in prompt + tokens:
            positive = changed[v] > 0
            changed[v] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
        changed[v] -= params.frequency_penalty * tokens.count(v) + params.presence_penalty * (v in tokens)
        if ruled_out:
            changed[v] = -np.inf
    return changed


def random_edits(numbers: np.random.Generator) -> SamplingParams:
    """Each of the edits in about half of the cases."""
    tokens = numbers.permutation(12).tolist()

    def maybe(value: Any, off: Any) -> Any:
        return value if numbers.random() < 0.5 else off

    return SamplingParams(
        temperature=maybe(0.0, 0.6),
        max_tokens=9,
        seed=int(numbers.integers(1 << 60)),
        min_tokens=maybe(int(numbers.integers(8)), 0),
        stop_token_ids=maybe((tokens[0], tokens[1]), ()),
        allowed_token_ids=maybe(tuple(tokens[1:9]), ()),
        forbidden_token_ids=maybe(tuple(tokens[9:11]), ()),
        logit_bias=maybe(((tokens[2], 1.5), (tokens[3], -0.7)), ()),
        repetition_penalty=maybe(float(numbers.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(numbers.normal()), 0.0),
        frequency_penalty=maybe(float(numbers.normal()), 0.0),
    )


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("seed", range(5))
def test_every_edit_equals_its_definition(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    params = [random_edits(numbers) for _ in range(60)]
    logit_NV = torch.from_numpy(numbers.normal(size=(60, 12)) * 2)
    before_NV = logit_NV.clone()
    prompts = [numbers.integers(12, size=3).tolist() for _ in range(60)]
    answers = [numbers.integers(12, size=4).tolist() for _ in range(60)]
    drawn = drawn_by(params, logit_NV, 4, lambda n: (np.array(prompts[n]), np.array(answers[n])))
    for n, one in enumerate(params):
        changed_V = edited(logit_NV[n].numpy(), one, prompts[n], answers[n])
        if one.temperature == 0:
            expected = int(changed_V.argmax())
        else:
            share_V = np.exp((changed_V - changed_V.max()) / one.temperature)
            u = uniform(np.array([one.seed], dtype=np.uint64), np.array([4]))
            expected = int((share_V.cumsum() <= u * share_V.sum()).sum())
        assert drawn.token_N[n] == expected
        whole_V = (logit_NV[n] / (one.temperature or 1.0)).log_softmax(0)
        close_fp32(drawn.logprob_N[n], whole_V[expected])
        allowed = None if drawn.support is None else drawn.support[n]
        assert (allowed is None) == (not one.allowed_token_ids)
        if allowed is not None:
            assert allowed.tolist() == np.flatnonzero(changed_V > -np.inf).tolist()
            mass = whole_V[torch.from_numpy(allowed).long()].logsumexp(0)
            close_fp32(drawn.within_N[n], whole_V[expected] - mass)
    assert torch.equal(logit_NV, before_NV)


def test_stop_tokens_are_ruled_out_until_min_tokens_are_drawn() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(1, 4))
    logit_NV = torch.tensor([[0.0, 5.0, 1.0, 0.5, 4.0]])
    tokens = [int(drawn_by([params], logit_NV, position).token_N[0]) for position in range(5)]
    assert tokens == [2, 2, 2, 1, 1]


def test_the_history_is_asked_for_only_where_a_penalty_needs_it() -> None:
    asked = []

    def history(n: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(n)
        return np.array([0], dtype=np.int32), np.zeros(0, dtype=np.int32)

    params = [
        SamplingParams(min_tokens=2, stop_token_ids=(1,), top_k=2),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(logit_bias=((0, 1.0),)),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
    ]
    drawn = drawn_by(params, torch.zeros(5, 3), 0, history)
    assert asked == [1, 3, 4] and drawn.finite_N.all()


def test_requests_that_share_their_tokens_keep_penalties_and_lengths_of_their_own() -> None:
    base = SamplingParams(temperature=0.0, stop_token_ids=(2,))
    params = [
        base,
        replace(base, presence_penalty=5.0),
        replace(base, min_tokens=2),
        replace(base, min_tokens=9),
    ]
    prompt = np.zeros(0, dtype=np.int64)
    history = (prompt, np.array([2, 2]))
    drawn = drawn_by(params, torch.tensor([1.0, 0.0, 2.0]).expand(4, -1), 2, lambda n: history)
    assert drawn.token_N.tolist() == [2, 0, 2, 0]


def mixed() -> list[SamplingParams]:
    """Every kind of request."""
    return [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=2),
        SamplingParams(seed=3, temperature=0.0),
        SamplingParams(seed=4, top_p=0.5, temperature=0.3),
        SamplingParams(seed=5, min_p=0.1, logprobs="raw", temperature=1.7),
        SamplingParams(seed=6, repetition_penalty=1.3, allowed_token_ids=tuple(range(3, 30))),
        SamplingParams(seed=7, logit_bias=((3, 2.0),), top_k=5, logprobs="raw", temperature=0.4),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    params = [replace(one, seed=one.seed + 10 * i) for i in range(7) for one in mixed()] + mixed()[:1]
    logit_NV = torch.randn(50, 50, generator=torch.Generator().manual_seed(0), dtype=dtype)
    position_N = np.arange(50) % 9
    table = SamplingTable(60, 50, CPU)
    row_N = np.random.default_rng(0).permutation(60)[:50]
    table.put(row_N.tolist(), params)

    def sample(chosen: list[int]) -> SampledTokens:
        def history(n: int) -> tuple[np.ndarray, np.ndarray]:
            return np.array([1, 2, chosen[n]]), np.array([7, 7, chosen[n] // 2])

        return table.sample(logit_NV[chosen], row_N[chosen], position_N[chosen], history)

    together = sample(list(range(50)))
    for chosen in [[n] for n in range(50)] + [[2, 9, 16], [49, 0, 20, 13]]:
        apart = sample(chosen)
        for name in ("token_N", "logprob_N", "finite_N", "within_N"):
            assert getattr(apart, name).tobytes() == getattr(together, name)[chosen].tobytes()
        for m, n in enumerate(chosen):
            ids = None if apart.support is None else apart.support[m]
            assert together.support is not None and str(ids) == str(together.support[n])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_flagged_and_spoil_no_other_entry(bad: float) -> None:
    params = mixed()
    logit_NV = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))

    def history(n: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([1]), np.array([2])

    clean = drawn_by(params, logit_NV, 0, history)
    for n in range(7):
        spoiled_NV = logit_NV.clone()
        spoiled_NV[n, 40] = bad
        spoiled = drawn_by(params, spoiled_NV, 0, history)
        others = np.arange(7) != n
        assert spoiled.finite_N.tolist() == others.tolist() and 0 <= spoiled.token_N[n] < 50
        assert (spoiled.token_N[others] == clean.token_N[others]).all()
        assert (spoiled.logprob_N[others] == clean.logprob_N[others]).all()
    ruled_out = SamplingParams(allowed_token_ids=(1, 2), stop_token_ids=(1,), min_tokens=1)
    none_left_V = torch.zeros(3)
    none_left_V[2] = -math.inf
    drawn = drawn_by([ruled_out, ruled_out], torch.stack([none_left_V, torch.zeros(3)]))
    assert drawn.finite_N.tolist() == [False, True]


def test_a_row_takes_the_parameters_put_last() -> None:
    table = SamplingTable(2, 4, CPU)
    table.put(
        [0, 1], [SamplingParams(forbidden_token_ids=(3,), top_k=1, logprobs="raw", temperature=0.5)] * 2
    )
    table.put([], [])
    table.put([0], [SamplingParams(temperature=0.0)])
    drawn = table.sample(
        torch.tensor([[0.0, 1.0, 0.0, 9.0]] * 2), np.array([1, 0]), np.zeros(2, int), no_history
    )
    assert drawn.token_N.tolist() == [1, 3]
    assert drawn.support is not None and drawn.support[1] is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": (3, 10)}, "stop_token_ids"),
        ({"allowed_token_ids": (10, 2)}, "allowed_token_ids"),
        ({"forbidden_token_ids": (10,)}, "forbidden_token_ids"),
        ({"logit_bias": ((1, 0.5), (10, 1.0))}, "logit_bias"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_and_no_row_changed(
    params: dict[str, Any], field: str
) -> None:
    message = f"^{field} holds the token 10; the vocabulary has 10, from 0 to 9$"
    table = SamplingTable(2, 10, CPU)
    with pytest.raises(ValueError, match=message):
        table.put([0, 1], [SamplingParams(temperature=0.0), SamplingParams(**params)])
    drawn = table.sample(torch.arange(10.0)[None], np.array([0]), np.array([5]), no_history)
    assert drawn.token_N[0] < 9  # position 5 of seed 0 at temperature 1; greedy would take 9
    with pytest.raises(ValueError, match=message):
        check_vocabulary(SamplingParams(**params), 10)
    check_vocabulary(SamplingParams(**params), 11)


def splitmix64(state: int, num: int) -> int:
    """The last of `num` outputs of the reference generator, in plain integers."""
    mask = 2**64 - 1
    x = (state + num * 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def test_uniform_is_the_published_generator_started_from_the_mixed_seed() -> None:
    # The first outputs for seed 1234567, as published with the generator.
    assert [splitmix64(1234567, num) for num in (1, 2)] == [6457827717110365317, 3203168211198807973]
    seeds, positions = [0, 1, 1234567, 2**64 - 1], [0, 1, 5, 10**6]
    expected = [
        (splitmix64(splitmix64(seed, 1), position + 1) >> 11) / 2**53
        for seed, position in zip(seeds, positions, strict=True)
    ]
    close_fp64(uniform(np.array(seeds, dtype=np.uint64), np.array(positions)), expected, rtol=0, atol=0)


def test_seeds_of_any_size_and_sign_are_taken() -> None:
    seeds = [-1, 2**64 - 1, 2**64 + 5, 5]
    logit_V = torch.zeros(5000)
    tokens = drawn_by([SamplingParams(seed=seed) for seed in seeds], logit_V.expand(4, -1)).token_N.tolist()
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
