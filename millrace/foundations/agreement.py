"""The values of one policy by every method, to compare them: exact solvers, linear programs, and samples.

S = states, A = actions. The MDPs have no horizon. Functions raise ValueError as `solve.evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.foundations import linear_programs
from millrace.foundations.mdp import Floats, Mdp, markov_reward_process, uniform
from millrace.foundations.monte_carlo import every_visit, first_visit
from millrace.foundations.occupancy import occupancy
from millrace.foundations.solve import (
    evaluate,
    evaluate_iteratively,
    policy_iteration,
    return_variance,
    value_iteration,
)
from millrace.foundations.temporal_difference import td_lambda, td_zero
from millrace.foundations.walks import Walk


@dataclass(frozen=True, eq=False, slots=True)
class MethodValues:
    """What one method found: v, and J = sum_s start(s) v(s), NaN where a start state has no value.

    `value_S` is None if the method gives the return alone, and NaN in a state that it never visited.
    `error_S` are standard errors of value_S, where they are known.
    """

    name: str
    expected_return: float
    value_S: Floats | None = None
    error_S: Floats | None = None


def decreasing(count: int) -> float:
    """The step size n^-0.7 at the n-th update: its sum has no bound, the sum of its squares has one."""
    return float(count**-0.7)


def policy_named(mdp: Mdp, name: str) -> Floats:
    """The policy "uniform" or "optimal" of an MDP, [S, A]; ValueError for another name."""
    if name not in ("uniform", "optimal"):
        raise ValueError(f"the policy is {name!r}; it is uniform or optimal")
    return uniform(mdp) if name == "uniform" else policy_iteration(mdp).policy_SA


def exact_methods(mdp: Mdp, policy_SA: Floats, *, optimal: bool) -> list[MethodValues]:
    """The values of a policy by the methods that know the MDP; the first, a linear solve, is exact.

    If the policy is optimal, the methods that look for the best policy are among them, and the linear
    programs are those of the MDP; otherwise those of the policy's Markov reward process.
    """
    found = [
        ("linear solve", evaluate(mdp, policy_SA)),
        ("iterative policy evaluation", evaluate_iteratively(mdp, policy_SA)),
    ]
    if optimal:
        found += [
            ("value iteration", value_iteration(mdp).value_S),
            ("policy iteration", policy_iteration(mdp).value_S),
        ]
    program = mdp if optimal else markov_reward_process(mdp, policy_SA)
    found.append(("linear program, primal", linear_programs.primal(program)))
    returns_found = [
        ("linear program, dual", float((linear_programs.dual(program) * program.reward_SA).sum())),
        ("occupancy measure", float((occupancy(mdp, policy_SA) * mdp.reward_SA).sum())),
    ]
    return [
        *(MethodValues(name, float(mdp.start_S @ value_S), value_S) for name, value_S in found),
        *(MethodValues(name, gain) for name, gain in returns_found),
    ]


def sampled_methods(
    mdp: Mdp, policy_SA: Floats, episodes: Sequence[Walk], *, lam: float
) -> list[MethodValues]:
    """The values of a policy by the methods that see only episodes of it, each until its end.

    Standard errors are those of the exact variance of the return. Visits of one episode depend on each other,
    so only first visits have one. ValueError if an episode was truncated, or lam is outside [0, 1].
    """
    size, discount = mdp.num_states, mdp.discount
    first = first_visit(episodes, size, discount=discount)
    every = every_visit(episodes, size, discount=discount)
    # Rounding can put the variance of a constant return below 0.
    variance_S = np.maximum(return_variance(mdp, policy_SA), 0)
    error_S = np.sqrt(
        np.divide(variance_S, first.count_S, out=np.full(size, np.nan), where=first.count_S > 0)
    )
    zero_S = td_zero(episodes, size, discount=discount, step=decreasing)
    lambda_S = td_lambda(episodes, size, lam=lam, discount=discount, step=decreasing)
    found: list[tuple[str, Floats, Floats | None]] = [
        ("Monte Carlo, first visit", first.value_S, error_S),
        ("Monte Carlo, every visit", every.value_S, None),
        ("TD(0)", zero_S, None),
        (f"TD({lam:g})" if lam else "TD(lambda), lambda 0", lambda_S, None),
    ]
    results = []
    for name, value_S, errors_S in found:
        known_S = np.where(mdp.terminal_S, 0.0, np.where(every.count_S > 0, value_S, np.nan))
        results.append(MethodValues(name, float(mdp.start_S @ known_S), known_S, errors_S))
    return results


def largest_deviation(value_S: Floats, exact_S: Floats) -> float:
    """max_s |v(s) - v_exact(s)| over the states that have a value; NaN if none has."""
    distance_S = np.abs(value_S - exact_S)
    known_S = distance_S[np.isfinite(distance_S)]
    return float(known_S.max()) if len(known_S) else float("nan")


def largest_standard_score(found: MethodValues, exact_S: Floats) -> float | None:
    """max_s |v(s) - v_exact(s)| / its standard error; None where no state has one above 0."""
    if found.value_S is None or found.error_S is None:
        return None
    # Below this the return is a constant, and what is left is rounding.
    scored_S = (found.error_S > 1e-9) & np.isfinite(found.value_S)
    if not scored_S.any():
        return None
    return float((np.abs(found.value_S - exact_S)[scored_S] / found.error_S[scored_S]).max())
