from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.foundations.mdp import Mdp, by_step, deterministic, stationary, uniform
from tests.close import close_fp64
from tests.foundations.worlds import corridor, random_mdp

GOOD: dict[str, Any] = {
    "transition_SAS": [[[0.3, 0.7], [1.0, 0.0]], [[0.5, 0.5], [0.25, 0.75]]],
    "reward_SA": [[1.0, -2.0], [0.5, 3.0]],
    "discount": 0.9,
    "start_S": [0.4, 0.6],
}


def test_the_arrays_are_copied_and_cannot_be_written() -> None:
    reward_SA = np.array(GOOD["reward_SA"])
    mdp = Mdp(**{**GOOD, "reward_SA": reward_SA})
    reward_SA[:] = 7
    close_fp64(mdp.reward_SA.copy(), GOOD["reward_SA"])
    with pytest.raises(ValueError, match="read-only"):
        mdp.transition_SAS[0, 0, 0] = 1


def test_sizes_are_read_from_the_rewards() -> None:
    mdp = random_mdp(0, num_states=4, num_actions=2)
    assert (mdp.num_states, mdp.num_actions) == (4, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"transition_SAS": np.ones((2, 2))},
            "transition_SAS has shape (2, 2); it is [S, A, S] with at least one state and one action",
        ),
        ({"transition_SAS": np.ones((2, 2, 3))}, "transition_SAS has shape (2, 2, 3); it is [S, A, S]"),
        ({"transition_SAS": np.ones((2, 0, 2))}, "transition_SAS has shape (2, 0, 2); it is [S, A, S]"),
        ({"reward_SA": [1.0, 2.0]}, "reward_SA has shape (2,); it must be (2, 2)"),
        ({"reward_SA": [[1.0, np.nan], [0.0, 0.0]]}, "reward_SA[0, 1] is nan"),
        ({"reward_SA": [[1.0, 0.0], [-np.inf, 0.0]]}, "reward_SA[1, 0] is -inf"),
        ({"start_S": [1.0]}, "start_S has shape (1,); it must be (2,)"),
        ({"start_S": [0.5, 0.4]}, "start_S sums to 0.9; probabilities sum to 1"),
        ({"start_S": [1.5, -0.5]}, "start_S[1] is -0.5; a probability is not negative"),
        (
            {"transition_SAS": [[[0, 1], [1, 0]], [[1.25, -0.25], [0, 1]]]},
            "transition_SAS[1, 0, 1] is -0.25; a probability is not negative",
        ),
        (
            {"transition_SAS": [[[0.3, 0.7], [1.0, 0.0]], [[0.5, 0.5], [0.25, 0.5]]]},
            "transition_SAS[1, 1] sums to 0.75; probabilities sum to 1",
        ),
        (
            {"transition_SAS": [[[0.3, 0.7], [1.0, np.nan]], [[0.5, 0.5], [0.25, 0.75]]]},
            "transition_SAS[0, 1, 1] is nan",
        ),
        ({"discount": 1.5}, "discount is 1.5; it lies in [0, 1]"),
        ({"discount": -0.1}, "discount is -0.1; it lies in [0, 1]"),
        ({"discount": float("nan")}, "discount is nan; it lies in [0, 1]"),
        ({"horizon": 0}, "horizon is 0; an episode has at least one step"),
        ({"discount": 1.0}, "discount is 1 with neither a horizon nor a terminal state"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        Mdp(**{**GOOD, **change})
    assert str(caught.value).startswith(sentence)


def test_a_discount_of_0_is_allowed_and_one_of_1_needs_an_end_of_either_kind() -> None:
    assert Mdp(**{**GOOD, "discount": 0}).discount == 0
    assert Mdp(**{**GOOD, "discount": 1.0, "horizon": 1}).horizon == 1
    assert corridor(2, discount=1.0).discount == 1


def test_a_state_is_terminal_only_if_every_action_stays_there_for_nothing() -> None:
    stay = np.eye(3)
    transition_SAS = np.stack([np.stack([stay[s], stay[s]]) for s in range(3)])
    transition_SAS[0, 1] = [0.5, 0.5, 0.0]
    reward_SA = [[0.0, 0.0], [0.0, 0.5], [0.0, 0.0]]
    mdp = Mdp(transition_SAS, reward_SA, 0.5, [1, 0, 0])  # type: ignore[arg-type]
    assert mdp.terminal_S.tolist() == [False, False, True]


def test_policies_are_checked() -> None:
    mdp = Mdp(**GOOD)
    close_fp64(stationary(mdp, [[0.2, 0.8], [1, 0]]), [[0.2, 0.8], [1.0, 0.0]])
    with pytest.raises(ValueError, match=r"^policy_SA has shape \(2,\); it must be \(2, 2\)$"):
        stationary(mdp, [0.2, 0.8])
    with pytest.raises(ValueError, match=r"^policy_SA\[1\] sums to 1.1; probabilities sum to 1$"):
        stationary(mdp, [[0.2, 0.8], [1.0, 0.1]])
    with pytest.raises(ValueError, match=r"^the MDP has no horizon, so its steps cannot be counted$"):
        by_step(mdp, uniform(mdp))


def test_a_stationary_policy_serves_every_step_of_a_horizon() -> None:
    mdp = Mdp(**GOOD, horizon=3)
    policy_SA = np.array([[0.2, 0.8], [0.6, 0.4]])
    close_fp64(by_step(mdp, policy_SA).copy(), np.stack([policy_SA] * 3))
    policy_HSA = np.stack([policy_SA, policy_SA[::-1], policy_SA])
    close_fp64(by_step(mdp, policy_HSA), policy_HSA)
    with pytest.raises(ValueError, match=r"^policy_HSA has shape \(2, 2, 2\); it must be \(3, 2, 2\)$"):
        by_step(mdp, policy_HSA[:2])
    with pytest.raises(ValueError, match=r"^policy_HSA\[2, 0\] sums to 1.3"):
        by_step(mdp, policy_HSA + np.array([0, 0, 0.15])[:, None, None] * np.array([[1], [0]]))
    with pytest.raises(ValueError, match=r"^the MDP has horizon 3; backward_induction and evaluate_by_step"):
        stationary(mdp, policy_SA)


def test_policies_made_of_actions() -> None:
    close_fp64(deterministic([2, 0], 3), [[0.0, 0, 1], [1, 0, 0]])
    close_fp64(deterministic([[1], [0]], 2), [[[0.0, 1]], [[1, 0]]])
    close_fp64(uniform(random_mdp(1, num_states=2, num_actions=4)), np.full((2, 4), 0.25))
