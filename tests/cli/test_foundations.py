"""`millrace foundations` solves one small MDP in every way; its numbers are those of closed forms."""

from __future__ import annotations

import re

import pytest

from tests.close import close_fp64

EXACT = ["linear solve", "iterative policy evaluation", "linear program, primal"]
OF_RETURNS = ["linear program, dual", "occupancy measure"]
SEARCHES = ["value iteration", "policy iteration"]
SAMPLED = ["Monte Carlo, first visit", "Monte Carlo, every visit", "TD(0)", "TD(0.8)"]
FEW = ("--episodes", "300")


def methods(out: str) -> dict[str, list[str]]:
    """The numbers of each method: return, deviation, worst state, standard errors."""
    head = r"^([A-Za-z][\w(),. ]*?)  +(-|-?\d\S*) +(\S+) +(\S+) +(\S+)$"
    return {row[1]: list(row.groups()[1:]) for row in re.finditer(head, out, re.M)}


def states(out: str) -> dict[int, list[str]]:
    """The numbers of each state, the exact value first and the occupancy last."""
    lines = out.partition("\nstate ")[2].splitlines()[1:]
    return {int(words[0]): words[1:] for words in map(str.split, lines) if words[0].isdigit()}


def test_a_walk_of_five_states_has_sixths_as_values(lab):
    result = lab("foundations", "chain", "--discount", "1", *FEW)
    assert result.code == 0
    assert result.out.startswith(
        "chain: 5 states and 2 terminal, 2 actions, discount 1; policy: uniform\n300 episodes of seed 0, "
    )
    found = methods(result.out)
    assert set(found) - {"method"} == {*EXACT, *OF_RETURNS, *SAMPLED}
    for name in (*EXACT, *OF_RETURNS):
        close_fp64(float(found[name][0]), 0.5)
        assert float(found[name][1]) < 1e-8
    for name in SAMPLED:
        assert 0 < float(found[name][1]) < 0.1
    assert 0 < float(found["Monte Carlo, first visit"][3]) < 4
    table = states(result.out)
    assert list(table) == [1, 2, 3, 4, 5]
    for state, words in table.items():
        exact, program, carlo, error = map(float, words[:4])
        close_fp64([exact, program], [state / 6, state / 6], atol=5e-5)
        assert abs(carlo - exact) < 4 * error
    # sum_s occupancy is the number of steps: k (6 - k) from state k, 7 on average.
    close_fp64(sum(float(words[-1]) for words in table.values()), 7.0, atol=3e-4)


def test_the_gridworld_has_the_values_of_the_book(lab):
    result = lab("foundations", "--discount", "1", "--episodes", "20")
    book = [-14, -20, -22, -14, -18, -20, -20, -20, -20, -18, -14, -22, -20, -14]
    close_fp64([float(words[0]) for words in states(result.out).values()], book)
    close_fp64(float(methods(result.out)["linear program, dual"][0]), sum(book) / 14, atol=5e-7)


def test_the_best_policy_of_a_chain_goes_right(lab):
    result = lab("foundations", "chain", "--policy", "optimal", "--size", "3", "--discount", "0.5", *FEW)
    found = methods(result.out)
    assert {*SEARCHES} < set(found)
    # Nothing is random on the way, so Monte Carlo is exact, and has no standard error to be measured in.
    for name in (*EXACT, *SEARCHES, *OF_RETURNS, *SAMPLED[:2]):
        close_fp64(float(found[name][0]), (1 + 0.5 + 0.25) / 3, atol=5e-7)
    assert found["Monte Carlo, first visit"][3] == "-"
    close_fp64([float(words[0]) for words in states(result.out).values()], [0.25, 0.5, 1])
    # rho(1) = 1/3, rho(2) = 1/3 + 1/2 rho(1), rho(3) = 1/3 + 1/2 rho(2).
    close_fp64([float(words[-1]) for words in states(result.out).values()], [1 / 3, 1 / 2, 7 / 12], atol=5e-5)


@pytest.mark.slow
def test_the_seed_is_of_the_episodes_and_of_the_random_mdp(lab):
    first, again, other = (lab("foundations", "random", *FEW, "--seed", seed).out for seed in ("1", "1", "2"))
    assert first == again
    assert methods(first)["linear solve"] != methods(other)["linear solve"]
    one, two = (lab("foundations", "chain", *FEW, "--seed", seed).out for seed in ("1", "2"))
    assert methods(one)["linear solve"] == methods(two)["linear solve"]
    assert methods(one)["TD(0)"] != methods(two)["TD(0)"]


@pytest.mark.slow
def test_lambda_is_named_and_counts(lab):
    zero, one = (lab("foundations", "chain", *FEW, "--lambda", lam).out for lam in ("0", "1"))
    assert methods(zero)["TD(lambda), lambda 0"] == methods(zero)["TD(0)"]
    assert methods(one)["TD(1)"] != methods(one)["TD(0)"]


def test_states_that_no_episode_visits_have_a_dash(lab):
    result = lab("foundations", "chain", "--policy", "optimal", "--size", "9", "--episodes", "1")
    table = states(result.out)
    unknown = [state for state, words in table.items() if words[2:6] == ["-"] * 4]
    assert unknown == list(range(1, len(unknown) + 1)) and 0 < len(unknown) < 9
    assert result.out.endswith(f"-: no episode visited {len(unknown)} of the states; raise --episodes\n")
    assert methods(result.out)["TD(0)"][0] == "-"
    assert "\n1 episode of seed 0, " in result.out


@pytest.mark.slow
def test_a_large_grid_shows_its_first_states(lab):
    out = lab("foundations", "--size", "6", "--policy", "optimal", "--episodes", "1000").out
    assert len(states(out)) == 25
    assert out.endswith("... and 9 more states\n")


def test_credit_over_turns_is_compared_with_the_exact_gradient(lab):
    result = lab("foundations", "credit")
    assert result.code == 0
    rows = {
        line[:36].strip(): [float(word) for word in line[36:].split()] for line in result.out.splitlines()[4:]
    }
    assert len(rows) == 12
    unbiased = ["episode", "return_to_go", "gae_turn, lam 0.5, right critic", "gae_turn, lam 1, critic of 0"]
    assert [name for name, (bias, *_) in rows.items() if bias == 0] == unbiased
    head = re.search(r"last turn (\S+); pi\(stop\) (\S+); exact gradient of its logit (\S+)", result.out)
    reward, chance, slope = map(float, head.groups())
    _, shift, biased, noise = rows["turn_index"]
    close_fp64([shift, biased], [reward * chance, slope + reward * chance], atol=2e-6)
    # It has the wrong sign.
    assert slope < 0 < biased and noise > 0
    close_fp64(rows["return_to_go, mean of the group"][2], slope / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gridwrld"], "there is no MDP gridwrld; did you mean gridworld?"),
        (["maze"], "there is no MDP maze; choose gridworld, chain, random or credit"),
        (["credit", "--seed", "0"], "--seed has no effect with credit, whose game is fixed; remove it"),
        (["credit", "--lambda", "0.5"], "--lambda has no effect with credit, whose game is fixed; remove it"),
        (["chain", "--policy", "optimum"], "there is no policy optimum; did you mean optimal?"),
        (["chain", "--policy", "best"], "there is no policy best; choose uniform or optimal"),
    ],
)
def test_unknown_words_are_one_sentence(lab, words, said):
    result = lab("foundations", *words)
    assert (result.code, result.out, result.err) == (2, "", f"error: {said}\n")


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize(
    "words",
    [
        ["--discount", "0"],
        ["--discount", "1.01"],
        ["--discount", "nan"],
        ["--size", "1"],
        ["--size", "11"],
        ["--episodes", "0"],
        ["--lambda", "-0.1"],
        ["--lambda", "nan"],
        ["--seed", "-1"],
    ],
)
def test_numbers_out_of_bounds_are_refused(lab, words):
    result = lab("foundations", "chain", *words)
    assert (result.code, result.out) == (2, "")
    assert f"Invalid value for '{words[0]}'" in result.err
