from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from millrace.foundations import solve
from millrace.foundations.enumerate import (
    Draws,
    TokenTree,
    draws,
    exact_gradient,
    expected_return,
    prefix_values,
    token_scores,
)
from millrace.foundations.softmax_policy import policy_gradient, softmax
from millrace.foundations.solve import evaluate
from tests.close import close_fp64

TREE = TokenTree(num_tokens=3, horizon=3)
SEEDS = range(5)


def drawn(seed: int, tree: TokenTree = TREE) -> tuple[np.ndarray, np.ndarray]:
    """Logits and rewards of single tokens."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, len(tree.prefixes), tree.num_tokens))


def test_prefixes_and_sequences_by_hand() -> None:
    tree = TokenTree(num_tokens=2, horizon=3)
    assert tree.prefixes == [(), (0,), (0, 0)]
    assert tree.sequences == [(1,), (0, 1), (0, 0, 0), (0, 0, 1)]
    assert TokenTree(num_tokens=3, horizon=1).sequences == [(0,), (1,), (2,)]
    assert len(TREE.prefixes) == 1 + 2 + 4
    assert len(TREE.sequences) == 1 + 2 + 4 * 3
    prefix_T, token_T = TREE.path((1, 0, 2))
    assert [TREE.prefixes[p] for p in prefix_T] == [(), (1,), (1, 0)]
    assert token_T.tolist() == [1, 0, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_probabilities_of_all_sequences_sum_to_1(seed: int) -> None:
    policy_PV = softmax(drawn(seed)[0])
    walked = dict(TREE.walk(policy_PV))
    assert list(walked) == TREE.sequences
    close_fp64(sum(walked.values()), 1)
    close_fp64(walked[1, 0, 2], policy_PV[0, 1] * policy_PV[2, 0] * policy_PV[TREE.prefixes.index((1, 0)), 2])


@pytest.mark.parametrize("discount", [1.0, 0.6])
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_over_sequences_agree_with_the_solvers_of_mdps(seed: int, discount: float) -> None:
    logit_PV, reward_PV = drawn(seed)
    policy_PV = softmax(logit_PV)
    mdp = TREE.mdp(reward_PV, discount=discount)
    policy_SA = np.vstack([policy_PV, np.full(3, 1 / 3)])
    assert (mdp.discount, TREE.mdp(reward_PV).discount) == (discount, 1)
    assert mdp.terminal_S.tolist() == [False] * 7 + [True]
    value_P = prefix_values(TREE, policy_PV, reward_PV, discount=discount)
    close_fp64(value_P, evaluate(mdp, policy_SA)[:-1])
    whole = expected_return(TREE, policy_PV, reward_PV, discount=discount)
    close_fp64(whole, solve.expected_return(mdp, policy_SA))
    close_fp64(whole, value_P[0])
    gradient_SA = policy_gradient(mdp, np.vstack([logit_PV, np.zeros(3)]))
    close_fp64(exact_gradient(TREE, policy_PV, reward_PV, discount=discount), gradient_SA[:-1])


def test_a_reward_for_the_whole_stands_at_the_last_token() -> None:
    reward_N = np.arange(15) - 3.5
    reward_PV = TREE.at_the_end(reward_N)
    for sequence, reward in zip(TREE.sequences, reward_N, strict=True):
        prefix_T, token_T = TREE.path(sequence)
        close_fp64(reward_PV[prefix_T, token_T], [0] * (len(sequence) - 1) + [reward])
    assert np.count_nonzero(reward_PV) == 15


def test_rewards_by_hand() -> None:
    # Sequences (1,), (0, 0), (0, 1) with probabilities 1/4, 3/4 * 1/3, 3/4 * 2/3.
    tree = TokenTree(num_tokens=2, horizon=2)
    policy_PV = np.array([[0.75, 0.25], [1 / 3, 2 / 3]])
    reward_PV = tree.at_the_end([8, -4, 2])
    close_fp64(expected_return(tree, policy_PV, reward_PV), 8 / 4 - 4 / 4 + 2 / 2)
    close_fp64(expected_return(tree, policy_PV, reward_PV, discount=0.5), 8 / 4 + 0.5 * (-4 / 4 + 2 / 2))
    close_fp64(prefix_values(tree, policy_PV, reward_PV), [2, 0])
    # d/dlogit of row 0: 3/16 (q(0) - q(1)) = 3/16 (0 - 8); of row 1: 3/4 * 2/9 (-4 - 2).
    close_fp64(exact_gradient(tree, policy_PV, reward_PV), [[-1.5, 1.5], [-1, 1]])


@pytest.mark.parametrize(("size", "number"), [(1, 15), (2, 15 * 16 // 2), (3, 15 * 16 * 17 // 6)])
def test_batches_are_every_choice_of_sequences_in_any_order(size: int, number: int) -> None:
    policy_PV = softmax(drawn(0)[0])
    found = draws(TREE, policy_PV, size)
    chances = [chance for _, chance in TREE.walk(policy_PV)]
    expected: dict[tuple[int, ...], float] = {}
    for batch in product(range(15), repeat=size):
        key = tuple(sorted(batch))
        expected[key] = expected.get(key, 0.0) + math.prod(chances[n] for n in batch)
    assert len(found.probability_D) == number
    batches = [tuple(row) for row in found.sequence_B.reshape(-1, size).tolist()]
    assert batches == list(expected)
    close_fp64(found.probability_D, list(expected.values()))
    close_fp64(found.probability_D.sum(), 1)


def test_batches_are_packed_one_after_another() -> None:
    policy_PV = softmax(drawn(0)[0])
    found = draws(TREE, policy_PV, 2)
    assert found.draw_B.tolist() == [draw for draw in range(120) for _ in range(2)]
    start = 0
    for segment, (number, length) in enumerate(zip(found.sequence_B, found.length_B, strict=True)):
        sequence = TREE.sequences[number]
        tokens = slice(start, start + length)
        assert tuple(found.token_T[tokens]) == sequence
        assert found.prefix_T[tokens].tolist() == TREE.path(sequence)[0].tolist()
        assert set(found.segment_T[tokens]) == {segment}
        assert found.position_T[tokens].tolist() == list(range(length))
        start += length
    assert start == len(found.token_T)


def test_gradients_of_batches_by_hand() -> None:
    tree = TokenTree(num_tokens=2, horizon=2)
    policy_PV = np.array([[0.75, 0.25], [0.4, 0.6]])
    one = draws(tree, policy_PV, 1)  # (1,), (0, 0), (0, 1)
    found_DPV = one.gradients([1, 2, 3, 4, 5], policy_PV)
    close_fp64(
        found_DPV,
        [
            [[-0.75, 0.75], [0, 0]],
            [[2 * 0.25, -2 * 0.25], [3 * 0.6, -3 * 0.6]],
            [[4 * 0.25, -4 * 0.25], [-5 * 0.4, 5 * 0.4]],
        ],
    )
    two = draws(tree, policy_PV, 2)
    assert two.sequence_B[2:4].tolist() == [0, 1]
    pair_DPV = two.gradients(np.ones(len(two.token_T)), policy_PV)
    close_fp64(pair_DPV[1], [[-0.75 + 0.25, 0.75 - 0.25], [0.6, -0.6]])


def test_moments_of_batches_by_hand() -> None:
    none = np.zeros(0, dtype=np.int64)
    coin = Draws(none, none, none, none, none, none, probability_D=np.array([0.25, 0.75]))
    value_D = np.array([[4.0, 1.0], [0.0, 5.0]])
    close_fp64(coin.mean(value_D), [1, 4])
    close_fp64(coin.variance(value_D), 3 + 3)
    close_fp64(coin.mean(np.array([8.0, 0.0])), 2)


def test_the_mean_score_is_0() -> None:
    policy_PV = softmax(drawn(2)[0])
    every = draws(TREE, policy_PV, 1)
    gradient_DPV = every.gradients(np.ones(len(every.token_T)), policy_PV)
    close_fp64(every.mean(gradient_DPV), np.zeros((7, 3)))
    close_fp64(token_scores(policy_PV, every.prefix_T[:1], every.token_T[:1])[0], [0, 0, 1] - policy_PV[0])


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^num_tokens is 1; one token ends a sequence, so there are two$"):
        TokenTree(num_tokens=1, horizon=3)
    with pytest.raises(ValueError, match=r"^horizon is 0; a sequence has at least one token$"):
        TokenTree(num_tokens=3, horizon=0)
    with pytest.raises(ValueError, match=r"^reward_N has shape \(3,\); it must be \(15,\)$"):
        TREE.at_the_end([1, 2, 3])
    with pytest.raises(ValueError, match=r"^reward_N\[14\] is nan$"):
        TREE.at_the_end([1] * 14 + [float("nan")])
    with pytest.raises(ValueError, match=r"^policy_PV has shape \(2, 3\); it must be \(7, 3\)$"):
        draws(TREE, np.full((2, 3), 1 / 3), 1)
    with pytest.raises(ValueError, match=r"^policy_PV\[0\] sums to 3; probabilities sum to 1$"):
        draws(TREE, np.ones((7, 3)), 1)
    with pytest.raises(ValueError, match=r"^size is 0; a batch has at least one sequence$"):
        draws(TREE, np.full((7, 3), 1 / 3), 0)
    policy_PV = np.full((7, 3), 1 / 3)
    policy_PV[0] = [1, 0, 0]
    with pytest.raises(ValueError, match=r"^prefix \(1,\) is never reached, so it has no value$"):
        prefix_values(TREE, policy_PV, np.zeros((7, 3)))
