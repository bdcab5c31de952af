"""Draws the pictures of docs/foundations.md, docs/pictures/foundations_*.svg.

    python scripts/foundations_pictures.py

Every number is exact or of a fixed seed. S = states, E = episodes, R = repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from millrace.foundations.example_mdps import chain, gridworld, random_mdp
from millrace.foundations.mdp import Floats, Mdp, deterministic, uniform
from millrace.foundations.monte_carlo import constant, first_visit, importance_sampling, incremental
from millrace.foundations.occupancy import occupancy
from millrace.foundations.softmax_policy import policy_gradient, softmax
from millrace.foundations.solve import (
    action_values,
    bellman_expectation,
    bellman_optimality,
    evaluate,
    expected_return,
    greedy,
    policy_iteration,
    return_variance,
)
from millrace.foundations.temporal_difference import n_step_td, td_lambda, td_zero
from millrace.foundations.walks import Walk, sample_episodes
from millrace.observability.charts import Series, curve_svg

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
# Errors below this are rounding, and differ between machines.
ROUNDING = 1e-9
REPETITIONS = 30
# The largest value that the plane of two states shows.
PLANE = 6.0
NUM_EPISODES = [2, 5, 10, 20, 35, 50, 75, 100]
draw = partial(curve_svg, width=720, height=300, standalone=True)


def start_in_the_middle(mdp: Mdp) -> Mdp:
    """The same chain, but every episode begins in its middle state."""
    start_S = np.eye(mdp.num_states)[mdp.num_states // 2]
    return Mdp(mdp.transition_SAS, mdp.reward_SA, mdp.discount, start_S)


def returns_picture() -> str:
    """What the middle of a chain is worth, by the discount."""
    gammas = [place / 40 for place in range(4, 41)]
    found: dict[str, list[tuple[float, float]]] = {"uniform policy": [], "best policy": []}
    for gamma in gammas:
        mdp = start_in_the_middle(chain(5, discount=gamma))
        best_SA = policy_iteration(mdp).policy_SA
        found["uniform policy"].append((gamma, expected_return(mdp, uniform(mdp))))
        found["best policy"].append((gamma, expected_return(mdp, best_SA)))
    return draw(
        [Series(name, points, colour) for colour, (name, points) in enumerate(found.items(), 1)],
        title="Chain of five: the return from the middle state",
        x_label="discount",
        y_label="expected return",
    )


def logarithms(errors: Sequence[float]) -> list[tuple[float, float]]:
    """Number of sweeps and log10 of the error, down to rounding."""
    return [(float(k), float(np.log10(error))) for k, error in enumerate(errors) if error > ROUNDING]


def errors_of(sweep: Callable[[Floats], Floats], goal_S: Floats, most: int) -> list[float]:
    """The largest error of a state before the first sweep, and after each one."""
    value_S, errors = np.zeros(goal_S.shape), []
    for _ in range(most):
        errors.append(float(np.abs(value_S - goal_S).max()))
        value_S = sweep(value_S)
    return errors


def bellman_picture() -> str:
    """The contraction of the Bellman expectation operator."""
    series = []
    for colour, gamma in enumerate((0.5, 0.9, 0.99), 1):
        mdp = gridworld(4, discount=gamma)
        policy_SA = uniform(mdp)
        errors = errors_of(partial(bellman_expectation, mdp, policy_SA), evaluate(mdp, policy_SA), 60)
        series.append(Series(f"gamma {gamma:g}", logarithms(errors), colour))
        bound = [errors[0] * gamma**k for k in range(60)]
        series.append(Series(f"bound, gamma {gamma:g}", logarithms(bound), colour, faint=True))
    return draw(
        series,
        title="Gridworld: error of iterated Bellman expectation, and gamma^k (pale)",
        x_label="sweeps k",
        y_label="log10 of the largest error",
    )


def improvement_picture() -> str:
    """Value iteration in both orders against policy iteration."""
    mdp = random_mdp(30, 3, discount=0.95, seed=0)
    best_S = policy_iteration(mdp).value_S

    def in_place(value_S: Floats) -> Floats:
        value_S = value_S.copy()
        for s in range(mdp.num_states):
            value_S[s] = action_values(mdp, value_S)[s].max()
        return value_S

    def improve(value_S: Floats) -> Floats:
        return evaluate(mdp, greedy(action_values(mdp, value_S)))

    sweeps: dict[str, Callable[[Floats], Floats]] = {
        "value iteration": partial(bellman_optimality, mdp),
        "in place": in_place,
        "policy iteration": improve,
    }
    return draw(
        [
            Series(name, logarithms(errors_of(sweep, best_S, 60)), colour, marked=sweep is improve)
            for colour, (name, sweep) in enumerate(sweeps.items(), 1)
        ],
        title="Random MDP of 30 states: distance to the best values",
        x_label="sweeps, or policies evaluated",
        y_label="log10 of the largest error",
    )


def repeated(mdp: Mdp, policy_SA: Floats, most: int) -> list[list[Walk]]:
    """Episodes of each repetition."""
    return [sample_episodes(mdp, policy_SA, most, seed=seed) for seed in range(REPETITIONS)]


def root_mean_square(
    estimate: Callable[[Sequence[Walk]], Floats], walks_R: list[list[Walk]], goal: Floats
) -> list[tuple[float, float]]:
    """Number of episodes and the error, its square averaged over repetitions and states."""
    points = []
    for num in NUM_EPISODES:
        squares = [np.square(estimate(walks[:num]) - goal).mean() for walks in walks_R]
        points.append((float(num), float(np.sqrt(np.mean(squares)))))
    return points


def monte_carlo_picture() -> str:
    """The error of the first-visit mean, as measured and as its variance says."""
    mdp = start_in_the_middle(chain(5, discount=0.9))
    policy_SA = uniform(mdp)
    value, variance = (float(of(mdp, policy_SA)[3]) for of in (evaluate, return_variance))
    measured = root_mean_square(
        lambda walks: first_visit(walks, 7, discount=0.9).value_S[3:4],
        repeated(mdp, policy_SA, NUM_EPISODES[-1]),
        np.array([value]),
    )
    return draw(
        [
            Series("sqrt(variance / n)", [(num, float(np.sqrt(variance / num))) for num in NUM_EPISODES], 2),
            Series("measured", measured, 1, marked=True),
        ],
        title="Chain of five: error of Monte Carlo in the middle state",
        x_label="episodes n",
        y_label=f"root mean square error, {REPETITIONS} repetitions",
        y_range=(0.0, 0.35),
    )


def temporal_difference_picture() -> str:
    """TD(0), n steps, TD(lambda) and Monte Carlo at constant steps, from values of 1/2."""
    mdp = start_in_the_middle(chain(5, discount=1.0))
    exact_S = np.arange(1, 6) / 6
    initial_S = np.array([0, *[0.5] * 5, 0])
    methods: dict[str, Callable[..., Floats]] = {
        "Monte Carlo": partial(incremental, step=constant(0.02)),
        "TD(0)": partial(td_zero, step=constant(0.1)),
        "4 steps": partial(n_step_td, num_steps=4, step=constant(0.05)),
        "TD(0.8)": partial(td_lambda, lam=0.8, step=constant(0.05)),
    }
    walks_R = repeated(mdp, uniform(mdp), NUM_EPISODES[-1])
    series = []
    for colour, (name, method) in enumerate(methods.items(), 1):

        def estimate(walks: Sequence[Walk], method: Callable[..., Floats] = method) -> Floats:
            return method(walks, 7, discount=1.0, initial_S=initial_S)[1:6]

        points = root_mean_square(estimate, walks_R, exact_S)
        series.append(Series(name, points, colour, marked=True))
    return draw(
        series,
        title="Chain of five: error of temporal differences and Monte Carlo",
        x_label="episodes",
        y_label="root mean square error",
        y_range=(0.0, 0.3),
    )


def off_policy_picture() -> str:
    """Ordinary against weighted importance sampling."""
    mdp = start_in_the_middle(chain(5, discount=0.9))
    behaviour_SA = uniform(mdp)
    target_SA = np.tile([0.3, 0.7], (7, 1))
    walks_R = repeated(mdp, behaviour_SA, NUM_EPISODES[-1])
    series = []
    for colour, (name, weighted) in enumerate([("ordinary", False), ("weighted", True)], 1):

        def estimate(walks: Sequence[Walk], weighted: bool = weighted) -> Floats:
            found = importance_sampling(walks, target_SA, behaviour_SA, discount=0.9, weighted=weighted)
            return found.value_S[3:4]

        points = root_mean_square(estimate, walks_R, evaluate(mdp, target_SA)[3:4])
        series.append(Series(name, points, colour, marked=True))
    return draw(
        series,
        title="Chain of five: error of importance sampling in the middle state",
        x_label="episodes of the uniform policy",
        y_label="root mean square error",
    )


def occupancy_picture() -> str:
    """Where two policies are on a chain of nine."""
    mdp = start_in_the_middle(chain(9, discount=0.9))
    series = []
    for colour, (name, policy_SA) in enumerate(
        [("uniform policy", uniform(mdp)), ("best policy", policy_iteration(mdp).policy_SA)], 1
    ):
        visits_S = occupancy(mdp, policy_SA).sum(axis=1)
        points = [(float(state), float(visits_S[state])) for state in range(1, 10)]
        series.append(Series(name, points, colour, marked=True))
    return draw(
        series,
        title="Chain of nine, start in the middle: discounted visits",
        x_label="state",
        y_label="occupancy, summed over actions",
    )


def two_states() -> Mdp:
    """Two states and two actions, so that values are points of a plane."""
    transition_SAS = np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.1, 0.9]]])
    return Mdp(transition_SAS, np.array([[1.0, 0.3], [0.0, 0.8]]), 0.8, np.array([0.5, 0.5]))


def program_picture() -> str:
    """The constraints of the primal linear program, the values of all policies, and the optimum."""
    mdp = two_states()
    series = []
    for state, action in product(range(2), range(2)):
        # v(s) = r + gamma sum_t p(t) v(t) is a line; only what is inside the frame is shown.
        row_S = mdp.discount * mdp.transition_SAS[state, action] - np.eye(2)[state]
        slope, at_0 = -row_S[0] / row_S[1], -mdp.reward_SA[state, action] / row_S[1]
        low, high = sorted((value - at_0) / slope for value in (0.0, PLANE))
        ends = [max(0.0, low), min(PLANE, high)]
        points = [(float(v0), float(at_0 + slope * v0)) for v0 in ends]
        series.append(Series(f"state {state}, action {action}", points, 7, faint=True))
    choices = [deterministic([first, second], 2) for first, second in product(range(2), range(2))]
    best_S = policy_iteration(mdp).value_S
    for policy_SA in choices:
        value_S = evaluate(mdp, policy_SA)
        if np.abs(value_S - best_S).max() > ROUNDING:
            series.append(Series("a policy", [(float(value_S[0]), float(value_S[1]))], 7, faint=True))
    series.append(Series("optimum v(1)", [(float(best_S[0]), float(best_S[1]))], 2, marked=True))
    return draw(
        series,
        title="Two states: constraints of the primal program, policies (pale), optimum",
        x_label="v(0)",
        y_label="v(1)",
        y_range=(0.0, PLANE),
        height=340,
    )


def gradient_picture() -> str:
    """The return on the way up the exact gradient."""
    mdp = chain(5, discount=0.9)
    series = []
    for colour, step in enumerate((1.0, 5.0, 25.0), 1):
        logit_SA, points = np.zeros(mdp.reward_SA.shape), []
        for update in range(61):
            points.append((float(update), expected_return(mdp, softmax(logit_SA))))
            logit_SA = logit_SA + step * policy_gradient(mdp, logit_SA)
        series.append(Series(f"step size {step:g}", points, colour))
    best = expected_return(mdp, policy_iteration(mdp).policy_SA)
    series.append(Series("best", [(0.0, best), (60.0, best)], 7))
    return draw(
        series,
        title="Chain of five: exact policy gradient ascent from the uniform policy",
        x_label="updates",
        y_label="expected return",
    )


PICTURES: dict[str, Callable[[], str]] = {
    "returns": returns_picture,
    "bellman": bellman_picture,
    "improvement": improvement_picture,
    "monte_carlo": monte_carlo_picture,
    "temporal_difference": temporal_difference_picture,
    "off_policy": off_policy_picture,
    "occupancy": occupancy_picture,
    "linear_program": program_picture,
    "gradient": gradient_picture,
}


def path_of(name: str) -> Path:
    """The file of a picture."""
    return FOLDER / f"foundations_{name}.svg"


def main() -> None:
    """Write every picture."""
    for name, picture in PICTURES.items():
        path_of(name).write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
