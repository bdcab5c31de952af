from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.mdp import Floats, Mdp
from millrace.foundations.softmax_policy import policy_gradient, score, softmax
from millrace.foundations.solve import expected_return, policy_iteration
from tests.close import close_fp64
from tests.foundations.test_solve import every_kind, every_seed
from tests.foundations.worlds import random_mdp


def slope(mdp: Mdp, logit_SA: Floats) -> Floats:
    """Central differences of the expected return."""
    gradient_SA = np.zeros(logit_SA.shape)
    for place in np.ndindex(*logit_SA.shape):
        move_SA = np.zeros(logit_SA.shape)
        move_SA[place] = 1e-5
        up, down = (expected_return(mdp, softmax(logit_SA + sign * move_SA)) for sign in (1, -1))
        gradient_SA[place] = (up - down) / 2e-5
    return gradient_SA


@pytest.mark.slow_beyond(13)
@every_seed
@every_kind
def test_the_gradient_is_the_slope_of_the_return(kind: dict, seed: int) -> None:
    mdp, logit_SA = random_mdp(seed, **kind), np.random.default_rng(seed).normal(size=(5, 3))
    close_fp64(policy_gradient(mdp, logit_SA), slope(mdp, logit_SA), rtol=1e-6, atol=1e-8)


@every_seed
def test_the_gradient_is_the_slope_of_the_return_up_to_a_horizon(seed: int) -> None:
    mdp = random_mdp(seed, horizon=3, discount=0.7, terminal=seed % 2 == 0)
    logit_SA = np.random.default_rng(seed).normal(size=(5, 3))
    close_fp64(policy_gradient(mdp, logit_SA), slope(mdp, logit_SA), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_climbing_the_gradient_reaches_the_optimum() -> None:
    mdp = random_mdp(2, num_states=3, num_actions=2, discount=0.6)
    logit_SA = np.zeros((3, 2))
    for _ in range(2000):
        logit_SA += 5 * policy_gradient(mdp, logit_SA)
    best = expected_return(mdp, policy_iteration(mdp).policy_SA)
    reached = expected_return(mdp, softmax(logit_SA))
    assert expected_return(mdp, softmax(np.zeros((3, 2)))) < best - 0.05
    assert best - 1e-3 < reached < best


def test_probabilities_by_hand_and_without_overflow() -> None:
    close_fp64(
        softmax(np.log([[1.0, 2.0, 5.0], [3.0, 3.0, 2.0]])), [[0.125, 0.25, 0.625], [0.375, 0.375, 0.25]]
    )
    close_fp64(softmax([1e4, 0.0, 1e4]), [0.5, 0, 0.5])
    with pytest.raises(ValueError, match=r"^logit_SA\[0, 1\] is inf$"):
        softmax([[0.0, np.inf]])


def test_the_score_is_the_slope_of_the_log_probability() -> None:
    logit_SA = np.array([[0.3, -0.2, 0.9], [1.0, 0.5, -1.0]])
    found_SAA = score(softmax(logit_SA))
    for s, a, b in np.ndindex(2, 3, 3):
        move_SA = np.zeros((2, 3))
        move_SA[s, b] = 1e-6
        up, down = (np.log(softmax(logit_SA + sign * move_SA)[s, a]) for sign in (1, -1))
        close_fp64(found_SAA[s, a, b], (up - down) / 2e-6, rtol=1e-6, atol=1e-9)


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^logit_SA has shape \(5, 2\); it must be \(5, 3\)$"):
        policy_gradient(random_mdp(0), np.zeros((5, 2)))
