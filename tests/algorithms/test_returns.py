from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.returns import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    n_step_returns,
    td_lambda_returns,
    v_trace,
)
from tests.close import close_fp32, close_fp64

SEEDS = pytest.mark.parametrize("seed", range(20))


@dataclass
class Row:
    """A random row of five segments, some of them empty, and the same as lists for the loops."""

    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.length_B = torch.randint(0, 7, (5,), generator=generator)
        self.num_tokens = int(self.length_B.sum())
        self.reward_T, self.value_T, self.log_ratio_T = (
            torch.randn(3, self.num_tokens, generator=generator, dtype=torch.float64) * 0.7
        )
        self.bootstrap_B = torch.randn(5, generator=generator, dtype=torch.float64)
        self.gamma, self.lam = torch.rand(2, generator=generator, dtype=torch.float64).tolist()

    def segments(self, *rows_T: Tensor) -> list[Any]:
        lengths = self.length_B.tolist()
        parts = [[part.tolist() for part in row_T.split(lengths)] for row_T in rows_T]
        return list(zip(*parts, strict=True))


def n_step_loop(rewards: list[float], values: list[float], last: float, gamma: float, n: int) -> list[float]:
    """From the definition: n rewards, then the value of the state that follows them."""
    found, after = [], [*values, last]
    for start in range(len(rewards)):
        stop = min(start + n, len(rewards))
        discounted = [gamma ** (t - start) * rewards[t] for t in range(start, stop)]
        found.append(sum(discounted) + gamma ** (stop - start) * after[stop])
    return found


def td_lambda_loop(
    rewards: list[float], values: list[float], last: float, gamma: float, lam: float
) -> list[float]:
    """From the definition: a weighted mean of all n-step returns."""
    count = len(rewards)
    by_n = [n_step_loop(rewards, values, last, gamma, n) for n in range(1, count + 1)]
    return [
        sum((1 - lam) * lam ** (n - 1) * by_n[n - 1][t] for n in range(1, count - t))
        + lam ** (count - t - 1) * by_n[count - t - 1][t]
        for t in range(count)
    ]


def v_trace_loop(
    rewards: list[float], values: list[float], ratios: list[float], *, last: float, **s: float
) -> tuple[list[float], list[float]]:
    """From the definition: v_t = V_t + sum over k of gamma^k (c_t ... c_{t+k-1}) rho delta."""
    count, after = len(rewards), [*values, last]
    rho = [min(s["max_rho"], ratio) for ratio in ratios]
    c = [s["lam"] * min(s["max_c"], ratio) for ratio in ratios]
    deltas = [rho[t] * (rewards[t] + s["gamma"] * after[t + 1] - values[t]) for t in range(count)]
    targets = [
        values[t] + sum(s["gamma"] ** (k - t) * math.prod(c[t:k]) * deltas[k] for k in range(t, count))
        for t in range(count)
    ]
    mixed = [*((1 - s["lam"]) * v + s["lam"] * g for v, g in zip(values, targets, strict=True)), last]
    return [rho[t] * (rewards[t] + s["gamma"] * mixed[t + 1] - values[t]) for t in range(count)], targets


@pytest.mark.slow_beyond(8)
@SEEDS
@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut off"])
def test_returns_equal_their_definitions(seed: int, cut: bool) -> None:
    row = Row(seed)
    bootstrap_B = row.bootstrap_B if cut else None
    lasts = row.bootstrap_B.tolist() if cut else [0.0] * 5
    segments = list(zip(row.segments(row.reward_T, row.value_T), lasts, strict=True))

    num_steps = seed % 4 + 1
    found_T = n_step_returns(
        row.reward_T,
        row.value_T,
        row.length_B,
        gamma=row.gamma,
        num_steps=num_steps,
        bootstrap_B=bootstrap_B,
    )
    close_fp64(found_T, [x for (r, v), b in segments for x in n_step_loop(r, v, b, row.gamma, num_steps)])

    found_T = discounted_returns(row.reward_T, row.length_B, gamma=row.gamma, bootstrap_B=bootstrap_B)
    close_fp64(found_T, [x for (r, v), b in segments for x in n_step_loop(r, v, b, row.gamma, 99)])

    expected = [x for (r, v), b in segments for x in td_lambda_loop(r, v, b, row.gamma, row.lam)]
    settings = {"gamma": row.gamma, "lam": row.lam, "bootstrap_B": bootstrap_B}
    close_fp64(td_lambda_returns(row.reward_T, row.value_T, row.length_B, **settings), expected)
    advantage_T, return_T = gae(row.reward_T, row.value_T, row.length_B, **settings)
    close_fp64(return_T, expected)
    close_fp64(advantage_T, torch.tensor(expected, dtype=torch.float64) - row.value_T)


@pytest.mark.slow_beyond(6)
@SEEDS
@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut off"])
def test_v_trace_equals_its_definition(seed: int, cut: bool) -> None:
    row = Row(seed)
    settings = {"gamma": row.gamma, "lam": row.lam, "max_rho": 1.3, "max_c": 0.9}
    lasts = row.bootstrap_B.tolist() if cut else [0.0] * 5
    rows = row.segments(row.reward_T, row.value_T, row.log_ratio_T.exp())
    expected = [v_trace_loop(*lists, last=b, **settings) for lists, b in zip(rows, lasts, strict=True)]
    advantage_T, return_T = v_trace(
        row.reward_T,
        row.value_T,
        row.log_ratio_T,
        row.length_B,
        bootstrap_B=row.bootstrap_B if cut else None,
        **settings,
    )
    close_fp64(advantage_T, [x for advantages, _ in expected for x in advantages])
    close_fp64(return_T, [x for _, targets in expected for x in targets])


@pytest.mark.slow_beyond(3)
@SEEDS
def test_v_trace_of_the_own_tokens_is_gae(seed: int) -> None:
    row = Row(seed)
    settings = {"gamma": row.gamma, "lam": row.lam, "bootstrap_B": row.bootstrap_B}
    same_T = torch.zeros(row.num_tokens, dtype=torch.float64)
    found = v_trace(
        row.reward_T, row.value_T, same_T, row.length_B, max_rho=math.inf, max_c=math.inf, **settings
    )
    expected = gae(row.reward_T, row.value_T, row.length_B, **settings)
    close_fp64(torch.stack(found), torch.stack(expected))


def test_v_trace_by_hand_with_its_bounds_at_1() -> None:
    # Ratios 2 and 0.5; v_2 = 3 + 0.5 (4 - 3) = 3.5; v_1 = 1 + (2 + 0.5 * 3 - 1) + 0.5 (3.5 - 3) = 3.75.
    advantage_T, return_T = v_trace(
        torch.tensor([2.0, 4.0]),
        torch.tensor([1.0, 3.0]),
        torch.tensor([2.0, 0.5]).log(),
        torch.tensor([2]),
        gamma=0.5,
    )
    close_fp32(return_T, [3.75, 3.5])
    close_fp32(advantage_T, [2 + 0.5 * 3.5 - 1, 0.5])


@pytest.mark.slow_beyond(3)
@SEEDS
def test_the_ends_of_lambda_are_one_step_and_monte_carlo(seed: int) -> None:
    row = Row(seed)
    same = {"gamma": row.gamma, "bootstrap_B": row.bootstrap_B}
    one_T = td_lambda_returns(row.reward_T, row.value_T, row.length_B, lam=0.0, **same)
    close_fp64(one_T, n_step_returns(row.reward_T, row.value_T, row.length_B, num_steps=1, **same))
    all_T = td_lambda_returns(row.reward_T, row.value_T, row.length_B, lam=1.0, **same)
    close_fp64(all_T, discounted_returns(row.reward_T, row.length_B, **same))
    close_fp64(all_T, n_step_returns(row.reward_T, row.value_T, row.length_B, num_steps=50, **same))


def test_each_segment_may_have_its_own_lambda() -> None:
    row = Row(3)
    lam_B = torch.tensor([0.0, 0.3, 0.5, 0.8, 1.0], dtype=torch.float64)
    advantage_T, _ = gae(row.reward_T, row.value_T, row.length_B, gamma=0.9, lam=lam_B)
    parts = []
    for reward_T, value_T, lam in zip(
        row.reward_T.split(row.length_B.tolist()),
        row.value_T.split(row.length_B.tolist()),
        lam_B,
        strict=True,
    ):
        parts.append(gae(reward_T, value_T, torch.tensor([len(reward_T)]), gamma=0.9, lam=float(lam))[0])
    close_fp64(advantage_T, torch.cat(parts))


def test_long_answers_get_a_lambda_near_1() -> None:
    # alpha l = 0.5, 1, 2, 50
    lam_B = length_adaptive_lambda(torch.tensor([0, 10, 20, 40, 1000]))
    assert lam_B.dtype == torch.float64
    close_fp64(lam_B, [0, 0, 0, 0.5, 0.98])
    close_fp64(length_adaptive_lambda(torch.tensor([4]), alpha=0.5), [0.5])


def test_float32_stays_float32_and_n_steps_do_not_lose_digits() -> None:
    # The whole return is 5000 times one reward; in float32 the difference would be wrong in the fourth digit.
    reward_T = torch.full((5_000,), 37.7)
    found_T = n_step_returns(reward_T, 0 * reward_T, torch.tensor([5_000]), gamma=1.0, num_steps=1)
    assert found_T.dtype == torch.float32
    close_fp32(found_T, reward_T)
    length_B = torch.tensor([2, 1])
    for found in (
        gae(torch.ones(3), torch.ones(3), length_B, gamma=0.9, lam=0.9)[0],
        gae(torch.ones(3), torch.ones(3), length_B, gamma=0.9, lam=torch.tensor([0.9, 0.8]))[1],
        v_trace(torch.ones(3), torch.ones(3), torch.zeros(3).double(), length_B, gamma=0.9)[0],
    ):
        assert found.dtype == torch.float32


def test_a_row_without_tokens_has_no_returns() -> None:
    none, length_B = torch.zeros(0), torch.tensor([0, 0])
    assert discounted_returns(none, length_B, gamma=0.9).tolist() == []
    assert n_step_returns(none, none, length_B, gamma=0.9, num_steps=3).tolist() == []
    assert [x.tolist() for x in gae(none, none, length_B, gamma=0.9, lam=0.5)] == [[], []]
    assert [x.tolist() for x in v_trace(none, none, none, length_B, gamma=0.9)] == [[], []]


GOOD: dict[str, Any] = {"reward_T": torch.ones(3), "length_B": torch.tensor([2, 1]), "gamma": 0.9}
VALUED = GOOD | {"value_T": torch.ones(3)}
ALL: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (discounted_returns, GOOD),
    (gae, VALUED | {"lam": 0.9}),
    (td_lambda_returns, VALUED | {"lam": 0.9}),
    (n_step_returns, VALUED | {"num_steps": 2}),
    (v_trace, VALUED | {"log_ratio_T": torch.zeros(3)}),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 1.1}, r"gamma is 1.1"),
    ({"gamma": -0.1}, r"gamma is -0.1"),
    ({"gamma": math.nan}, r"gamma is nan"),
    ({"lam": 1.1}, r"lam is 1.1"),
    ({"lam": -0.1}, r"lam is -0.1"),
    ({"length_B": torch.tensor([2, 2])}, r"length_B"),
    ({"length_B": torch.tensor([4, -1])}, r"length_B"),
    ({"bootstrap_B": torch.ones(3)}, r"bootstrap_B"),
    ({"bootstrap_B": torch.tensor([1.0, torch.inf])}, r"bootstrap_B\[1\] is inf; it must be finite"),
    ({"reward_T": torch.tensor([1.0, torch.nan, 0.0])}, r"reward_T\[1\] is nan; it must be finite"),
    ({"value_T": torch.tensor([1.0, 0.0, -torch.inf])}, r"value_T\[2\] is -inf; it must be finite"),
    ({"log_ratio_T": torch.tensor([torch.nan, 0.0, 0.0])}, r"log_ratio_T\[0\] is nan; it must be finite"),
    ({"value_T": torch.ones(2)}, r"value_T"),
    ({"log_ratio_T": torch.ones(1)}, r"log_ratio_T has shape \(1,\), but reward_T \(3,\)"),
    ({"num_steps": 0}, r"num_steps is 0; it must be above 0"),
    ({"max_c": 0.0}, r"max_c is 0.0; it must be above 0"),
    ({"max_c": 1.5}, r"max_rho is 1.0; it must be at least max_c, which is 1.5"),
    ({"scan": "fast"}, r"fast"),
]


@pytest.mark.parametrize(
    ("function", "good", "bad", "sentence"),
    [
        pytest.param(function, good, bad, sentence, id=f"{function.__name__} {sentence}")
        for function, good in ALL
        for bad, sentence in BAD
        if set(bad) <= set(signature(function).parameters)
    ],
)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], good: dict[str, Any], bad: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        function(**(good | bad))


@pytest.mark.parametrize("lam", [0, 0.5, 1])
def test_the_bounds_themselves_are_allowed(lam: float) -> None:
    found_T, _ = v_trace(**VALUED, log_ratio_T=torch.zeros(3), lam=lam, max_c=0.5, max_rho=0.5)
    close_fp32(found_T[1:], [0.5 * 0, 0.5 * 0])
    n_step_returns(**VALUED, num_steps=1)


def test_a_lambda_needs_a_length_and_an_alpha() -> None:
    with pytest.raises(ValueError, match="alpha is 0; it must be above 0"):
        length_adaptive_lambda(torch.tensor([3]), alpha=0)
    with pytest.raises(ValueError, match=r"length_B\[1\] is -2; it must be at least 0"):
        length_adaptive_lambda(torch.tensor([3, -2]))
