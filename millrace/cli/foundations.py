"""`millrace foundations`: one small MDP solved in every way, or credit over turns on a small game."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.errors import SetupError, did_you_mean

if TYPE_CHECKING:
    from millrace.foundations.agreement import MethodValues
    from millrace.foundations.mdp import Floats, Mdp

World = Annotated[
    str,
    typer.Argument(
        metavar="gridworld|chain|random|credit", help="Which MDP; credit: credit over turns, without options."
    ),
]
Size = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=10,
        help="Cells of a gridworld's side (else 4), or states of a chain or a random MDP (else 5).",
    ),
]
Discount = Annotated[float, typer.Option(min=0.1, max=1.0, help="Gamma.")]
Policy = Annotated[str, typer.Option(metavar="uniform|optimal", help="The policy whose values are sought.")]
Episodes = Annotated[int, typer.Option(min=1, max=100_000, help="How many episodes are sampled.")]
Lambda = Annotated[float, typer.Option("--lambda", min=0.0, max=1.0, help="Of TD(lambda).")]
Seed = Annotated[int, typer.Option(min=0, help="Of the episodes, and of a random MDP.")]

SIZES = {"gridworld": 4, "chain": 5, "random": 5}
POLICIES = ("uniform", "optimal")
NUM_ACTIONS = 3
MOST_STATES = 25
UNKNOWN = "-"
# Credit over turns is on one fixed game.
CREDIT = "credit"


def foundations(
    context: typer.Context,
    world: World = "gridworld",
    *,
    size: Size = None,
    discount: Discount = 0.9,
    policy: Policy = "uniform",
    episodes: Episodes = 2000,
    lam: Lambda = 0.8,
    seed: Seed = 0,
) -> None:
    """Solve a small MDP in every way, and show that the answers agree.

    Linear solve, iteration, linear programs and the occupancy measure know the MDP; Monte Carlo and temporal
    differences see episodes alone. No recipe and no model is read. docs/foundations.md explains each method.
    `credit` compares the rules of credit over turns with the exact gradient of a game of two turns.

    Exit code: 0, or 2 for a mistake in the words.
    """
    check_choice("MDP", world, (*SIZES, CREDIT))
    if world == CREDIT:
        refuse_options(context)
        from millrace.cli.foundations_credit import credit_lines

        for line in credit_lines():
            typer.echo(line)
        return
    check_choice("policy", policy, POLICIES)
    from millrace.foundations.agreement import exact_methods, policy_named, sampled_methods
    from millrace.foundations.walks import sample_episodes

    mdp = build_mdp(world, size or SIZES[world], discount, seed)
    policy_SA = policy_named(mdp, policy)
    walks = sample_episodes(mdp, policy_SA, episodes, seed=seed)
    exact = exact_methods(mdp, policy_SA, optimal=policy == "optimal")
    sampled = sampled_methods(mdp, policy_SA, walks, lam=lam)
    num_terminal = int(mdp.terminal_S.sum())
    steps = sum(one.num_steps for one in walks) / episodes
    typer.echo(
        f"{world}: {mdp.num_states - num_terminal} states and {num_terminal} terminal, {mdp.num_actions} "
        f"actions, discount {discount:g}; policy: {policy}"
    )
    counted = "1 episode" if episodes == 1 else f"{episodes:,} episodes"
    typer.echo(
        f"{counted} of seed {seed}, {steps:.1f} steps on average; "
        "each state that is not terminal starts equally often"
    )
    for line in [*method_lines([*exact, *sampled]), "", *state_lines(mdp, policy_SA, exact, sampled)]:
        typer.echo(line)


def refuse_options(context: typer.Context) -> None:
    """Refuse options beside `credit`, which has none."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name != "world" and source is not None and source.name != "DEFAULT":
            option = "lambda" if name == "lam" else name
            raise SetupError(f"--{option} has no effect with credit, whose game is fixed; remove it")


def check_choice(what: str, word: str, known: Sequence[str]) -> None:
    """Refuse a word that is none of the known ones: a SetupError that names the nearest, or all."""
    if word not in known:
        fix = did_you_mean(word, known, f"choose {', '.join(known[:-1])} or {known[-1]}")
        raise SetupError(f"there is no {what} {word}; {fix}")


def build_mdp(world: str, size: int, discount: float, seed: int) -> Mdp:
    """Build an MDP with `size` cells a side, or states that are not terminal; the seed is of a random one."""
    from millrace.foundations import example_mdps

    if world == "gridworld":
        return example_mdps.gridworld(size, discount=discount)
    if world == "chain":
        return example_mdps.chain(size, discount=discount)
    return example_mdps.random_mdp(size, NUM_ACTIONS, discount=discount, seed=seed)


def method_lines(found: Sequence[MethodValues]) -> Iterator[str]:
    """A line for each method: its return, and how far it is from the first, which is exact."""
    from millrace.foundations.agreement import largest_deviation, largest_standard_score

    exact = found[0]
    exact_S = exact.value_S
    assert exact_S is not None
    yield ""
    yield f"{'method':28}{'return J':>12}{'off by':>10}{'worst state':>13}{'in s.e.':>9}"
    for one in found:
        off = abs(one.expected_return - exact.expected_return)
        worst = None if one.value_S is None else largest_deviation(one.value_S, exact_S)
        score = largest_standard_score(one, exact_S)
        yield (
            f"{one.name:28}{number(one.expected_return, '12.6f')}{small(off, 10)}{small(worst, 13)}"
            f"{number(score, '9.1f')}"
        )


def state_lines(
    mdp: Mdp, policy_SA: Floats, exact: Sequence[MethodValues], sampled: Sequence[MethodValues]
) -> Iterator[str]:
    """A line for each state that is not terminal, with its value by some methods and its occupancy."""
    from millrace.foundations.occupancy import occupancy

    visits_S = occupancy(mdp, policy_SA).sum(axis=1)
    program = next(one for one in exact if one.name == "linear program, primal")
    carlo, _, zero, traces = sampled
    columns = [exact[0].value_S, program.value_S, carlo.value_S, carlo.error_S, zero.value_S, traces.value_S]
    heads = ["exact", "program", "Monte Carlo", "+- s.e.", "TD(0)", traces.name.split(", ")[0], "occupancy"]
    yield f"{'state':>5}" + "".join(f"{head:>12}" for head in heads)
    states = [state for state in range(mdp.num_states) if not mdp.terminal_S[state]]
    for state in states[:MOST_STATES]:
        values = [float(column_S[state]) for column_S in columns if column_S is not None]
        yield f"{state:5}" + "".join(number(value, "12.4f") for value in [*values, float(visits_S[state])])
    if len(states) > MOST_STATES:
        yield f"... and {len(states) - MOST_STATES} more states"
    assert carlo.value_S is not None
    num_unknown = sum(math.isnan(carlo.value_S[state]) for state in states)
    if num_unknown:
        yield f"{UNKNOWN}: no episode visited {num_unknown} of the states; raise --episodes"


def number(value: float | None, form: str) -> str:
    """Format a number in its column; a dash where there is none."""
    if value is None or math.isnan(value):
        return f"{UNKNOWN:>{form.partition('.')[0]}}"
    return f"{value:{form}}"


def small(value: float | None, width: int) -> str:
    """Format a deviation: 0.0123, or 3e-12 where it is rounding."""
    if value is None or math.isnan(value):
        return f"{UNKNOWN:>{width}}"
    return f"{value:{width}.4f}" if value == 0 or value >= 1e-4 else f"{value:{width}.0e}"
