from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from millrace.algorithms import kl
from millrace.algorithms.kl import Divergence, absolute, adaptive_coefficient, k1, k2, k3, straight_through
from tests.close import close_fp32, close_fp64
from tests.golden.verl import CASES, rows

# By verl's names.
ESTIMATORS: dict[str, Divergence] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
}
EVERY = [(case, key) for case in CASES for key in case["kl"]]


@pytest.mark.parametrize(("case", "key"), EVERY, ids=[f"seed {case['seed']} {key}" for case, key in EVERY])
def test_value_and_gradient_equal_those_of_verl(case: dict[str, Any], key: str) -> None:
    row, golden = rows(case), case["kl"][key]
    policy_T = row.input("new").requires_grad_()
    value_T = ESTIMATORS[key](policy_T, row.input("ref"))
    (gradient_T,) = torch.autograd.grad((value_T * row.mask_T).sum(), policy_T)
    close_fp64(value_T * row.mask_T, row.pack(golden["value"]), rtol=1e-6, atol=1e-6)
    close_fp64(gradient_T, row.pack(golden["grad_of_masked_sum"]), rtol=1e-6, atol=1e-6)


def test_the_estimators_by_hand() -> None:
    policy_T, reference_T = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    close_fp32(k1(policy_T, reference_T), [1.0, -2.0])
    close_fp32(k2(policy_T, reference_T), [0.5, 2.0])
    close_fp32(k3(policy_T, reference_T), [math.exp(-1), math.exp(2) - 3])
    close_fp32(absolute(policy_T, reference_T), [1.0, 2.0])


def test_k3_is_at_most_10_and_gives_no_gradient_there() -> None:
    policy_T = torch.tensor([-30.0, -8.0, -1.0], requires_grad=True)
    value_T = k3(policy_T, torch.tensor([-1.0, -1.0, -30.0]))
    value_T.sum().backward()
    close_fp32(value_T, [10.0, 10.0, 10.0])  # the last by e^-20 - 1 + 20 = 19
    assert policy_T.grad is not None and policy_T.grad.eq(0).all()


def test_straight_through_has_the_gradient_of_k2_even_where_k3_has_none() -> None:
    policy_T = torch.tensor([-9.0, -1.0], dtype=torch.float64, requires_grad=True)
    value_T = straight_through(k3)(policy_T, torch.tensor([-1.0, -1.5]))
    (gradient_T,) = torch.autograd.grad(value_T.sum(), policy_T)
    close_fp64(value_T, [10.0, math.exp(-0.5) - 0.5])
    close_fp64(gradient_T, [-8.0, 0.5])


def test_in_the_mean_k1_and_k3_are_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy_V, reference_V = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    share_V = policy_V.exp()
    divergence = (share_V * (policy_V - reference_V)).sum()
    close_fp64((share_V * k1(policy_V, reference_V)).sum(), divergence)
    close_fp64((share_V * k3(policy_V, reference_V)).sum(), divergence)


def test_in_the_mean_the_gradient_of_k2_is_that_of_the_divergence_and_that_of_k1_is_0() -> None:
    generator = torch.Generator().manual_seed(1)
    logit_V, reference_V = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logit_V.requires_grad_()
    policy_V, reference_V = logit_V.log_softmax(-1), reference_V.log_softmax(-1)
    share_V = policy_V.exp().detach()
    exact = (policy_V.exp() * (policy_V - reference_V)).sum()
    (exact_V,) = torch.autograd.grad(exact, logit_V, retain_graph=True)
    for estimator in (k2, straight_through(k1), straight_through(k3)):
        mean = (share_V * estimator(policy_V, reference_V)).sum()
        close_fp64(torch.autograd.grad(mean, logit_V, retain_graph=True)[0], exact_V)
    mean = (share_V * k1(policy_V, reference_V)).sum()
    close_fp64(torch.autograd.grad(mean, logit_V)[0], torch.zeros(6), atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_reference_of_another_shape_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r" has shape \(\d,\), but [a-z]+_logprob_T \(\d,\)$"):
        ESTIMATORS[name](torch.zeros(3), torch.zeros(1))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nan_stays_in_its_token(name: str) -> None:
    found_T = ESTIMATORS[name](torch.tensor([-1.0, math.nan]), torch.tensor([-2.0, -1.0]))
    assert found_T.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("divergence", "error"),
    [(0.3, 0.2), (0.06, 0.2), (0.055, 0.1), (0.05, 0.0), (0.0475, -0.05), (0.04, -0.2), (0.0, -0.2)],
)
def test_the_coefficient_is_steered_to_the_target(divergence: float, error: float) -> None:
    found = adaptive_coefficient(0.7, divergence, target=0.05, horizon=400, num_sequences=100)
    close_fp64(found, 0.7 * (1 + error / 4))


def test_after_a_whole_horizon_the_coefficient_changed_by_a_fifth() -> None:
    close_fp64(adaptive_coefficient(2.0, 9.0, target=0.5, horizon=64, num_sequences=64), 2.4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"target": 0.0}, "target is 0.0; it must be above 0"),
        ({"horizon": 31}, "horizon is 31; it must be at least the 32 sequences of a step"),
        ({"divergence": math.nan}, "divergence is nan; it must be finite"),
        ({"divergence": math.inf}, "divergence is inf; it must be finite"),
    ],
)
def test_a_steering_that_makes_no_sense_is_refused(settings: dict[str, Any], sentence: str) -> None:
    sound = {"divergence": 0.1, "target": 0.1, "horizon": 32, "num_sequences": 32}
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        adaptive_coefficient(0.1, **(sound | settings))


def test_an_estimator_has_the_name_that_a_recipe_gives_it():
    policy_T, reference_T = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.25])
    plain = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "abs": kl.absolute}
    assert {name: kl.divergence(name) for name in plain} == plain
    for name in ("k1", "k3"):
        found_T = kl.divergence(f"{name}+")(policy_T, reference_T)
        expected_T = kl.straight_through(plain[name])(policy_T, reference_T)
        assert found_T.tolist() == expected_T.tolist()
    with pytest.raises(ValueError, match=r"estimator is k4; it must be one of k1, k2, k3, abs, k1\+, k3\+"):
        kl.divergence("k4")
