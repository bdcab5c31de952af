from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.linear_programs import dual, primal
from millrace.foundations.mdp import Mdp
from millrace.foundations.occupancy import occupancy, policy_of
from millrace.foundations.solve import evaluate, expected_return, policy_iteration
from tests.close import close_fp64
from tests.foundations.test_solve import every_kind, every_seed
from tests.foundations.worlds import corridor, random_mdp


@pytest.mark.slow_beyond(8)
@every_seed
@every_kind
def test_both_programs_find_the_optimum_of_policy_iteration(kind: dict, seed: int) -> None:
    mdp = random_mdp(seed, **kind)
    best = policy_iteration(mdp)
    close_fp64(primal(mdp), best.value_S, atol=1e-8)
    occupancy_SA = dual(mdp)
    close_fp64((occupancy_SA * mdp.reward_SA).sum(), expected_return(mdp, best.policy_SA), atol=1e-8)
    close_fp64(evaluate(mdp, policy_of(occupancy_SA)), best.value_S, atol=1e-8)
    close_fp64(occupancy_SA, occupancy(mdp, best.policy_SA), atol=1e-8)


@pytest.mark.parametrize("discount", [0.5, 1.0])
def test_the_corridor_is_walked_once(discount: float) -> None:
    mdp = corridor(3, discount=discount)
    occupancy_SA = dual(mdp)
    close_fp64(occupancy_SA, [[0, 1], [0, discount], [0, discount**2], [0, 0]])
    close_fp64(primal(mdp)[0], -(1 + discount + discount**2))


def test_values_without_bound_have_no_solution() -> None:
    # Staying in state 0 earns 1 for ever.
    transition_SAS = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    mdp = Mdp(transition_SAS, [[1, 0], [0, 0]], 1.0, [1, 0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^the primal linear program of this MDP has no solution: "):
        primal(mdp)
    with pytest.raises(ValueError, match=r"^the dual linear program of this MDP has no solution: "):
        dual(mdp)


def test_a_horizon_is_refused() -> None:
    for program in (primal, dual):
        with pytest.raises(ValueError, match=r"^the MDP has horizon 4; backward_induction"):
            program(random_mdp(0, horizon=4))
