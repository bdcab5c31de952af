"""From scored groups to advantages; a reward that failed is nobody's zero."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from millrace.algorithms import advantages
from millrace.data.packing import pack
from millrace.training import estimate
from millrace.training.estimate import Scored, per_trajectory, usable
from millrace.types import Group, Outcome, Trajectory, Turn
from tests.close import close_fp32
from tests.training.pieces import completion, prompt, trajectory

# Rewards of two groups, three samples and two; segment 1 and 3 speak twice, segment 4 does not say a word.
REWARDS = [1.0, -0.5, 0.25, 2.0, 0.0]
GROUPS = [0, 0, 0, 1, 1]
ANSWERS = [[3], [1, 2], [1], [1, 1], [0]]


def groups(*rewards: list[float | None]) -> list[Group]:
    """Groups with these rewards; None is a reward that failed."""
    outcomes = [
        [Outcome.failure("it broke") if value is None else Outcome("score", value) for value in values]
        for values in rewards
    ]
    return [
        Group(prompt(), tuple(trajectory((1, 2), (3,)).scored(outcome) for outcome in row))
        for row in outcomes
    ]


def test_a_failed_reward_takes_no_part():
    kept, group_N = usable(groups([1.0, None, 0.0], [None, 4.0, 2.0]))
    assert [t.outcome.value for t in kept] == [1.0, 0.0, 4.0, 2.0]
    assert group_N.tolist() == [0, 0, 1, 1]
    kept, group_N = usable(groups([None, None], [1.0, 0.0]))
    assert group_N.tolist() == [1, 1]


def test_an_unscored_trajectory_takes_no_part_and_an_invalid_answer_does():
    bare = trajectory((1, 2), (3,))
    invalid = bare.scored(Outcome("invalid", -1.0, "no number"))
    kept, group_N = usable([Group(prompt(), (bare, invalid))])
    assert (kept, group_N.tolist()) == ([invalid], [0])


def test_no_usable_trajectory_gives_an_empty_index():
    kept, group_N = usable(groups([None, None]))
    assert kept == []
    assert (group_N.shape, group_N.dtype) == ((0,), torch.int64)


def scored(**more) -> Scored:
    """Turns of one to three tokens after 3 to 8 others; every column holds a number for each token."""
    made: list[Trajectory] = []
    for n, turns in enumerate(ANSWERS):
        parts = [Turn((5,) * (3 + n + k), completion(*range(6, 6 + size))) for k, size in enumerate(turns)]
        made.append(Trajectory(tuple(parts)).scored(Outcome("score", REWARDS[n])))
    batch = pack(made)
    generator = torch.Generator().manual_seed(7)
    mask_T = batch.action_mask_T

    def noise() -> Tensor:
        return torch.randn(batch.num_tokens, generator=generator)

    batch.sampler_logprob_T = (-1.0 - noise().abs()) * mask_T
    batch.proximal_logprob_T = (batch.sampler_logprob_T + 0.3 * noise()) * mask_T
    batch.value_T = noise() * mask_T
    batch.reward_T = (batch.reward_T + 0.1 * noise()) * mask_T
    given = {
        "component_KN": torch.tensor([REWARDS, [0.0, 3.0, 1.0, 5.0, 7.0]], dtype=torch.float64),
        "baseline_N": torch.tensor([0.5, 0.5, 0.5, -1.0, -1.0], dtype=torch.float64),
        "final_value_N": torch.tensor([0.7, 0.0, -0.4, 1.3, 9.0]),
        "square_T": noise().abs() * mask_T,
        "teacher_logprob_T": (-2.0 - noise().abs()) * mask_T,
    } | more
    reward_N = torch.tensor(REWARDS, dtype=torch.float64)
    return Scored(batch, reward_N, torch.tensor(GROUPS), 2, **given)


def rows(one: Scored, column_T: Tensor) -> list[list[float]]:
    """The chosen tokens' numbers of each segment."""
    batch = one.batch
    return [
        column_T[(batch.segment_T == b) & batch.action_mask_T].tolist() for b in range(batch.num_segments)
    ]


def flat(per_segment: list[list[float]]) -> list[float]:
    return [number for row in per_segment for number in row]


def whitened(numbers: list[float]) -> Tensor:
    x_N = torch.tensor(numbers, dtype=torch.float64)
    return (x_N - x_N.mean()) / x_N.std()


def returns(rewards: list[float], gamma: float, last: float = 0.0) -> list[float]:
    found: list[float] = []
    for reward in reversed(rewards):
        last = reward + gamma * last
        found.append(last)
    return found[::-1]


def errors(rewards: list[float], values: list[float], gamma: float, final: float) -> list[float]:
    return [r + gamma * n - v for r, v, n in zip(rewards, values, [*values[1:], final], strict=False)]


LENGTHS = [sum(turns) for turns in ANSWERS]


def spread(per_trajectory_N: Tensor) -> list[float]:
    return flat([[float(a)] * n for a, n in zip(per_trajectory_N, LENGTHS, strict=True)])


def test_one_advantage_for_all_tokens_of_a_trajectory():
    one = scored()
    advantage_N, return_N = per_trajectory(one, advantages.group_centred)
    assert (return_N, advantage_N.dtype) == (None, torch.float32)
    close_fp32(advantage_N, spread(advantages.group_centred(one.reward_N, one.group_N, 2)))
    assert len(set(advantage_N.tolist())) == 4


def test_the_mean_weighted_by_length_counts_chosen_tokens():
    advantage_N, return_N = estimate.length_weighted(scored())
    mean = (3 * 1.0 + 3 * -0.5 + 1 * 0.25) / 7
    # The silent one of the second group weighs nothing, so the other is its own mean.
    expected = [1 - mean] * 3 + [-0.5 - mean] * 3 + [0.25 - mean] + [0.0] * 2
    close_fp32(advantage_N, expected)
    assert return_N is None


def test_rewards_apart_are_whitened_over_all_tokens():
    one = scored()
    advantage_N, _ = estimate.group_decoupled(one, weights=[1.0, -0.5])
    first_N, second_N = (advantages.group_normalised(row_N, one.group_N, 2) for row_N in one.component_KN)
    close_fp32(advantage_N, whitened(spread(first_N - 0.5 * second_N)), rtol=1e-4)


def test_reinforce_plus_plus_whitens_discounted_returns_over_all_tokens():
    one = scored()
    advantage_N, _ = estimate.reinforce_plus_plus(one, gamma=0.9, scan="auto")
    expected = flat([returns(row, 0.9) for row in rows(one, one.batch.reward_T)])
    close_fp32(advantage_N, whitened(expected), rtol=1e-4)


def test_reinforce_plus_plus_baseline_whitens_centred_rewards_over_all_tokens():
    one = scored()
    advantage_N, _ = estimate.reinforce_plus_plus_baseline(one)
    centred_N = advantages.group_centred(one.reward_N, one.group_N, 2)
    close_fp32(advantage_N, whitened(spread(centred_N)), rtol=1e-4)


def test_the_greedy_answers_reward_is_taken_off_the_return():
    one = scored()
    advantage_N, _ = estimate.greedy_baseline(one, scan="auto")
    per_segment = [returns(row, 1.0) for row in rows(one, one.batch.reward_T)]
    baselines = [0.5, 0.5, 0.5, -1.0, -1.0]
    close_fp32(
        advantage_N, flat([[r - b for r in row] for row, b in zip(per_segment, baselines, strict=True)])
    )


def test_the_discounted_return_has_no_baseline():
    one = scored()
    advantage_N, return_N = estimate.discounted(one, gamma=0.8, scan="auto")
    close_fp32(advantage_N, flat([returns(row, 0.8) for row in rows(one, one.batch.reward_T)]))
    assert return_N is None


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_distillation_credits_what_the_teacher_finds_likelier(gamma):
    one = scored()
    advantage_N, return_N = estimate.teacher(one, gamma=gamma, scan="auto")
    gain_T = one.teacher_logprob_T - one.batch.sampler_logprob_T
    close_fp32(advantage_N, flat([returns(row, gamma) for row in rows(one, gain_T)]))
    assert return_N is None


@pytest.mark.parametrize("align", ["position", "action"])
def test_tokens_share_a_baseline_by_place_or_by_count(align):
    """Places count from the first chosen token: the second turn of segment 1 has five others before it."""
    one = scored()
    advantage_N, _ = estimate.token_baseline(one, align=align, scan="auto")
    places = [[0, 1, 2], [0, 6, 7], [0], [0, 8], []]
    if align == "action":
        places = [list(range(length)) for length in LENGTHS]
    energies = []
    for logprobs, squares in zip(
        rows(one, one.batch.sampler_logprob_T), rows(one, one.square_T), strict=True
    ):
        total, row = 0.0, []
        for logprob, square in zip(logprobs, squares, strict=True):
            total += 1 - 2 * float(torch.tensor(logprob).exp()) + square
            row.append(total)
        energies.append(row)
    gains = [returns(row, 1.0) for row in rows(one, one.batch.reward_T)]
    expected = []
    for n, (row, there) in enumerate(zip(gains, places, strict=True)):
        for gain, place in zip(row, there, strict=True):
            peers = [
                (energies[m][places[m].index(place)], gains[m][places[m].index(place)])
                for m in range(5)
                if GROUPS[m] == GROUPS[n] and place in places[m]
            ]
            total = sum(energy for energy, _ in peers)
            mean = sum(energy * other for energy, other in peers) / total
            expected.append(gain - mean if len(peers) > 1 else gain)
    close_fp32(advantage_N, expected, rtol=1e-4)


GAE = partial(
    estimate.generalised,
    gamma=0.9,
    lam=0.7,
    length_adaptive=None,
    critic_lam=None,
    whiten=False,
    credit="episode",
    turn_discount=1.0,
    scan="auto",
)


def by_hand(one: Scored, lams: list[float], finals: list[float]) -> tuple[list[float], list[float]]:
    """Advantages and returns of GAE with gamma 0.9 and a lambda for each segment."""
    advantage, total = [], []
    reward_rows, value_rows = rows(one, one.batch.reward_T), rows(one, one.batch.value_T)
    for rewards, values, lam, final in zip(reward_rows, value_rows, lams, finals, strict=True):
        row = returns(errors(rewards, values, 0.9, final), 0.9 * lam)
        advantage += row
        total += [a + v for a, v in zip(row, values, strict=True)]
    return advantage, total


@pytest.mark.parametrize("finals", [None, [0.7, 0.0, -0.4, 1.3, 9.0]])
def test_generalised_advantages_go_on_with_the_final_value_where_there_is_one(finals):
    one = replace(scored(), final_value_N=None if finals is None else torch.tensor(finals))
    advantage_N, return_N = GAE(one)
    advantage, total = by_hand(one, [0.7] * 5, finals or [0.0] * 5)
    close_fp32(advantage_N, advantage)
    close_fp32(return_N, total)
    close_fp32(GAE(one, whiten=True)[0], whitened(advantage), rtol=1e-4)
    close_fp32(GAE(one, whiten=True)[1], total)


def test_the_critic_may_have_a_lambda_of_its_own():
    one = scored()
    finals = one.final_value_N.tolist()
    advantage_N, return_N = GAE(one, critic_lam=1.0)
    close_fp32(advantage_N, by_hand(one, [0.7] * 5, finals)[0])
    close_fp32(return_N, by_hand(one, [1.0] * 5, finals)[1])


def test_lambda_may_grow_with_the_length_of_the_answer():
    one = scored()
    advantage_N, return_N = GAE(one, length_adaptive=0.5)
    lams = [max(0.0, 1 - 1 / (0.5 * length)) if length else 0.0 for length in LENGTHS]
    assert lams[:3] == [1 - 1 / 1.5, 1 - 1 / 1.5, 0.0]
    advantage, total = by_hand(one, lams, one.final_value_N.tolist())
    close_fp32(advantage_N, advantage)
    close_fp32(return_N, total)


def test_n_steps_of_reward_and_then_the_value():
    one = scored()
    two = partial(estimate.n_step, one, gamma=0.9, num_steps=2, scan="auto")
    total, advantage = [], []
    reward_rows, value_rows = rows(one, one.batch.reward_T), rows(one, one.batch.value_T)
    for rewards, values, final in zip(reward_rows, value_rows, one.final_value_N.tolist(), strict=True):
        row = [*rewards, final]  # what the final value is worth counts as one more reward
        for t in range(len(rewards)):
            found = row[t] + 0.9 * row[t + 1]
            if t + 2 < len(rewards):
                found += 0.81 * values[t + 2]
            elif t + 2 == len(rewards):
                found += 0.81 * final
            total.append(found)
            advantage.append(found - values[t])
    advantage_N, return_N = two(whiten=False)
    close_fp32(return_N, total)
    close_fp32(advantage_N, advantage)
    close_fp32(two(whiten=True)[0], whitened(advantage), rtol=1e-4)


def test_v_trace_weighs_the_trainers_log_probabilities_against_the_samplers():
    one = scored()
    found = partial(estimate.v_trace, one, gamma=0.9, lam=0.8, max_rho=1.2, max_c=0.9, scan="auto")
    advantage_N, return_N = found(whiten=False)
    ratio_T = (one.batch.proximal_logprob_T - one.batch.sampler_logprob_T).exp()
    columns = [rows(one, column_T) for column_T in (one.batch.reward_T, one.batch.value_T, ratio_T)]
    advantage, target = [], []
    for rewards, values, ratios, final in zip(*columns, one.final_value_N.tolist(), strict=True):
        v_next, next_value = final, final
        row: list[tuple[float, float]] = []
        for reward, value, ratio in reversed(list(zip(rewards, values, ratios, strict=True))):
            rho, c = min(1.2, ratio), 0.8 * min(0.9, ratio)
            gain = reward + 0.9 * (0.2 * next_value + 0.8 * v_next) - value
            own = value + rho * (reward + 0.9 * next_value - value) + 0.9 * c * (v_next - next_value)
            row.append((rho * gain, own))
            v_next, next_value = own, value
        advantage += [a for a, _ in reversed(row)]
        target += [v for _, v in reversed(row)]
    close_fp32(return_N, target, rtol=1e-4)
    close_fp32(advantage_N, advantage, rtol=1e-4)
    close_fp32(found(whiten=True)[0], whitened(advantage), rtol=1e-4)


@pytest.mark.parametrize(
    ("estimator", "missing", "what"),
    [
        (partial(estimate.group_decoupled, weights=[1.0]), "component_KN", "several rewards"),
        (partial(estimate.greedy_baseline, scan="auto"), "baseline_N", "rewards of greedy answers"),
        (
            partial(estimate.token_baseline, align="action", scan="auto"),
            "square_T",
            "squared probabilities",
        ),
        (
            partial(estimate.teacher, gamma=0.0, scan="auto"),
            "teacher_logprob_T",
            "log-probabilities of a teacher",
        ),
    ],
)
def test_what_an_estimator_cannot_do_without_is_named(estimator, missing, what):
    with pytest.raises(ValueError) as caught:
        estimator(scored(**{missing: None}))
    assert str(caught.value) == f"this advantage needs {what}, which the batch does not have"


def test_a_critic_or_the_trainers_log_probabilities_that_are_missing_are_named():
    one = scored()
    with pytest.raises(ValueError, match="^this advantage needs values of a critic, which"):
        GAE(replace(one, batch=replace(one.batch, value_T=None)))
    with pytest.raises(ValueError, match="^this advantage needs the trainer's own log-probabilities, which"):
        estimate.v_trace(
            replace(one, batch=replace(one.batch, proximal_logprob_T=None)),
            gamma=1.0,
            lam=1.0,
            max_rho=1.0,
            max_c=1.0,
            whiten=False,
            scan="auto",
        )
