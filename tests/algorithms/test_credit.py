"""Credit over turns, by hand and against plain loops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from millrace.algorithms import advantages, credit, returns
from millrace.algorithms.credit import Turns
from millrace.algorithms.masked import segment_sum
from tests.close import close_fp64

# Two episodes of one group, of three turns and of two, and one that is alone in its group.
REWARDS = [[0.5, 0.25, 1.0], [0.125, 2.0], [4.0, 1.0]]
OUTCOMES = [1.0, 0.0, 3.0]
GROUPS = torch.tensor([0, 0, 1])
STATES = [[0, 1, 2], [0, 2], [0, 2]]


def turns(rewards: list[list[float]] = REWARDS, states: list[list[int]] = STATES) -> Turns:
    reward_U = torch.tensor([one for row in rewards for one in row], dtype=torch.float64)
    state_U = torch.tensor([one for row in states for one in row])
    count_N = torch.tensor([len(row) for row in rewards])
    return Turns(reward_U, state_U, torch.ones_like(state_U), count_N, 4 * reward_U)


def return_N(rewards: list[list[float]] = REWARDS) -> Tensor:
    sums = [sum(row) + outcome for row, outcome in zip(rewards, OUTCOMES, strict=True)]
    return torch.tensor(sums, dtype=torch.float64)


RULES = {
    "return_to_go": partial(credit.return_to_go, centre=advantages.group_centred, epsilon=None, discount=0.5),
    "turn_index": partial(credit.turn_index, compare=advantages.group_centred, discount=0.5),
    "anchor": partial(credit.anchor, compare=advantages.group_centred, discount=0.5, weight=2.0),
    "progress": partial(credit.progress, compare=advantages.group_centred, discount=0.5, weight=2.0),
}


def test_turns_know_their_episode_and_their_place() -> None:
    found = replace(turns(), length_U=torch.tensor([2, 0, 1, 1, 1, 1, 2]))
    assert found.episode_U.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert found.index_U.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert found.is_last_U.tolist() == [False, False, True, False, True, False, True]
    assert found.turn_T.tolist() == [0, 0, 2, 3, 4, 5, 6, 6]


def test_the_return_to_go_discounts_rewards_but_not_the_outcome() -> None:
    found_U = credit.returns_to_go(turns(), return_N(), discount=0.5)
    first = [0.5 + 0.125 + 0.25 + 1, 0.25 + 0.5 + 1, 1.0 + 1]
    close_fp64(found_U, [*first, 0.125 + 1.0, 2.0, 4.5 + 3, 1.0 + 3])


def test_the_baseline_of_the_return_to_go_is_of_whole_episodes() -> None:
    mean = (2.75 + 2.125) / 2
    to_go_U = credit.returns_to_go(turns(), return_N(), discount=0.5)
    found_U = RULES["return_to_go"](turns(), return_N(), GROUPS, 2)
    close_fp64(found_U, [*(to_go_U[:5] - mean).tolist(), 0.0, 0.0])
    divided_U = credit.return_to_go(
        turns(), return_N(), GROUPS, 2, centre=advantages.group_centred, epsilon=0.5, discount=0.5
    )
    spread = (found_U[:5].square().sum() / 4).sqrt()
    close_fp64(divided_U, found_U / (spread + 0.5))


def test_turn_rewards_that_differ_where_returns_do_not_are_not_blown_up() -> None:
    """The returns have no deviation, but those to go have."""
    rewards = [[1.0, 0.0], [0.0, 1.0]]
    equal_N = torch.tensor([1.0, 1.0], dtype=torch.float64)
    found_U = credit.return_to_go(
        turns(rewards, [[0, 1], [0, 1]]),
        *(equal_N, torch.tensor([0, 0]), 1),
        centre=advantages.group_centred,
        epsilon=1e-6,
        discount=1.0,
    )
    # Three zeros and the -1 of the second turn of the first episode: root of 1 / 3.
    close_fp64(found_U, [0.0, -(3**0.5), 0.0, 0.0], rtol=1e-5)


def test_rewards_are_compared_with_those_of_their_turn_index() -> None:
    """Only the first episode has a second turn before its last: compared with itself, it is 0."""
    final = (1.0 + 1.0 - 2.0 - 0.0) / 2
    inner = (0.5 - 0.125) / 2
    expected = [final + inner, final, final, -final - inner, -final, 0.0, 0.0]
    close_fp64(RULES["turn_index"](turns(), return_N(), GROUPS, 2), expected)
    longer = [[0.5, 0.25, 1.0], [0.125, 0.75, 2.0], [4.0, 1.0]]
    found_U = RULES["turn_index"](turns(longer, [[0, 1, 2], [0, 1, 2], [0, 2]]), return_N(longer), GROUPS, 2)
    close_fp64(found_U[:2], [final + inner - 0.5 * 0.25, final - 0.25])


def test_the_bias_by_turn_index_is_what_is_earned_before_the_last_turns() -> None:
    close_fp64(credit.turn_index_bias(turns()), -(0.5 + 0.25 + 0.125 + 4.0) / 3)
    assert credit.turn_index_bias(turns([[1.0], [2.0]], [[0], [0]])) == 0


def test_turns_in_equal_states_of_a_group_are_compared() -> None:
    """State 2 is the last of both; the third episode's is another group's."""
    episode = (2.75 - 2.125) / 2
    among = (2.0 - 2.0) / 2
    found_U = RULES["anchor"](turns(), return_N(), GROUPS, 2)
    close_fp64(found_U, [episode, episode, episode + 2 * among, -episode, -episode - 2 * among, 0.0, 0.0])
    better = [[0.5, 0.25, 3.0], *REWARDS[1:]]
    episode, among = (4.75 - 2.125) / 2, (4.0 - 2.0) / 2
    found_U = RULES["anchor"](turns(better), return_N(better), GROUPS, 2)
    close_fp64(found_U[:5], [episode, episode, episode + 2 * among, -episode, -episode - 2 * among])


def test_states_without_a_name_are_not_compared() -> None:
    nameless = turns(states=[[0, 1, -1], [0, -1], [0, -1]])
    episode = (2.75 - 2.125) / 2
    found_U = RULES["anchor"](nameless, return_N(), GROUPS, 2)
    close_fp64(found_U, [episode] * 3 + [-episode] * 2 + [0.0, 0.0])


def test_a_change_of_progress_is_shared_with_earlier_turns() -> None:
    gains = turns().gain_U.tolist()
    assert gains[:3] == [2.0, 1.0, 4.0]
    episode = (2.75 - 2.125) / 2
    rule = partial(credit.progress, compare=advantages.group_centred, weight=1.0)
    alone_U = rule(turns(), return_N(), GROUPS, 2, discount=0.0)
    close_fp64(alone_U[:3], [episode + gain - 7 / 3 for gain in gains[:3]])
    shared = [2 + 1 / 2 + 4 / 3, 1 / 2 + 4 / 3, 4 / 3]
    shared_U = rule(turns(), return_N(), GROUPS, 2, discount=1.0)
    close_fp64(shared_U[:3], [episode + one - 7 / 3 for one in shared])
    # Credit moves within an episode: the mean over its turns stays.
    close_fp64(shared_U[:3].mean(), episode)


def one_turn_each(seed: int, size: int = 12) -> tuple[Turns, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reward_N = torch.randn(size, generator=generator, dtype=torch.float64)
    return_N = reward_N + torch.randn(size, generator=generator, dtype=torch.float64)
    # Three groups, one of equal returns; a state has one name.
    group_N = torch.randint(0, 3, (size,), generator=generator)
    return_N = torch.where(group_N == 2, 0.1, return_N)
    length_N = torch.randint(1, 6, (size,), generator=generator)
    count_N = torch.ones(size, dtype=torch.long)
    none = torch.zeros(size, dtype=torch.long)
    return Turns(reward_N, none, length_N, count_N, reward_N), return_N, group_N


COMPARISONS = {
    "centred": (advantages.group_centred, advantages.group_centred, None),
    "normalised": (advantages.group_centred, advantages.group_normalised, 1e-6),
    "others": (advantages.leave_one_out, advantages.leave_one_out, None),
}


@pytest.mark.slow_beyond(36)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("kind", RULES)
def test_with_one_turn_each_every_rule_is_the_episodes_bit_for_bit(seed: int, name: str, kind: str) -> None:
    one, returns_N, group_N = one_turn_each(seed)
    centre, compare, epsilon = COMPARISONS[name]
    options = {"centre": centre, "compare": compare, "epsilon": epsilon, "discount": 0.7, "state_weight": 2.0}
    found_U = credit.turn_advantages(kind, one, returns_N, group_N, 3, **options)
    assert torch.equal(found_U, compare(returns_N, group_N, 3))
    assert found_U.any()


def packed(seed: int, *, most_turns: int) -> tuple[Tensor, Tensor, Turns, Tensor]:
    """Rewards and values of the tokens of eight episodes, and the value after each."""
    generator = torch.Generator().manual_seed(seed)
    count_N = torch.randint(1, most_turns + 1, (8,), generator=generator)
    total = int(count_N.sum())
    length_U = torch.randint(0, 4, (total,), generator=generator)
    num_tokens = int(length_U.sum())
    reward_T, value_T = torch.randn(2, num_tokens, generator=generator)
    made = Turns(torch.zeros(total), torch.zeros(total), length_U, count_N, torch.zeros(total))
    return reward_T, value_T, made, torch.randn(8, generator=generator)


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("scan", ["loop", "numba"])
def test_with_one_turn_each_gae_over_turns_is_gae_with_lambda_1_bit_for_bit(seed: int, scan) -> None:
    reward_T, value_T, made, bootstrap_N = packed(seed, most_turns=1)
    for given in (None, bootstrap_N):
        found = credit.gae_turn(reward_T, value_T, made, gamma=0.5, lam=0.3, bootstrap_N=given, scan=scan)
        expected = returns.gae(
            reward_T, value_T, made.length_U, gamma=1.0, lam=1.0, bootstrap_B=given, scan=scan
        )
        assert all(map(torch.equal, found, expected))


def gae_loop(reward_T: Tensor, value_T: Tensor, made: Turns, bootstrap_N: Tensor) -> list[float]:
    """Token by token from the end; gamma 0.9 and lambda 0.6 between turns only."""
    advantage: list[float] = [0.0] * len(reward_T)
    episode_T = made.episode_U[made.turn_T].tolist()
    for t in reversed(range(len(reward_T))):
        is_last = t + 1 == len(reward_T) or episode_T[t + 1] != episode_T[t]
        if is_last:
            value, later, gamma, lam = float(bootstrap_N[episode_T[t]]), 0.0, 1.0, 1.0
        else:
            between = made.turn_T[t + 1] != made.turn_T[t]
            value, later = float(value_T[t + 1]), advantage[t + 1]
            gamma, lam = (0.9, 0.6) if between else (1.0, 1.0)
        advantage[t] = float(reward_T[t]) + gamma * value - float(value_T[t]) + gamma * lam * later
    return advantage


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(10))
def test_gae_over_turns_equals_the_loop(seed: int) -> None:
    reward_T, value_T, made, bootstrap_N = packed(seed, most_turns=4)
    reward_T, value_T, bootstrap_N = reward_T.double(), value_T.double(), bootstrap_N.double()
    found_T, target_T = credit.gae_turn(reward_T, value_T, made, gamma=0.9, lam=0.6, bootstrap_N=bootstrap_N)
    close_fp64(found_T, gae_loop(reward_T, value_T, made, bootstrap_N))
    close_fp64(target_T, found_T + value_T)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(10))
def test_rules_equal_plain_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count_N = torch.randint(1, 5, (9,), generator=generator)
    total = int(count_N.sum())
    reward_U = torch.randn(total, generator=generator, dtype=torch.float64)
    state_U = torch.randint(-1, 3, (total,), generator=generator)
    gain_U = torch.randn(total, generator=generator, dtype=torch.float64)
    made = Turns(reward_U, state_U, torch.ones(total), count_N, gain_U)
    outcome_N = torch.randn(9, generator=generator, dtype=torch.float64)
    total_N = outcome_N + segment_sum(reward_U, made.episode_U, 9)
    group_N = torch.randint(0, 3, (9,), generator=generator)
    rewards = [row.tolist() for row in reward_U.split(count_N.tolist())]
    states = [row.tolist() for row in made.state_U.split(count_N.tolist())]
    gains = [row.tolist() for row in gain_U.split(count_N.tolist())]
    group, outcome, whole = group_N.tolist(), outcome_N.tolist(), total_N.tolist()

    def centred(value: float, peers: list[float]) -> float:
        return value - sum(peers) / len(peers)

    to_go = [
        [sum(0.5 ** (j - k) * r for j, r in enumerate(row) if j >= k) + o for k in range(len(row))]
        for row, o in zip(rewards, outcome, strict=True)
    ]
    expected: dict[str, list[float]] = {name: [] for name in RULES}
    for n, row in enumerate(rewards):
        mates = [m for m in range(9) if group[m] == group[n]]
        returns_of = [whole[m] for m in mates]
        finals = [rewards[m][-1] + outcome[m] for m in mates]
        for k in range(len(row)):
            alone = len(mates) == 1
            expected["return_to_go"].append(0.0 if alone else centred(to_go[n][k], returns_of))
            later = sum(
                0.5 ** (j - k) * centred(row[j], [rewards[m][j] for m in mates if len(rewards[m]) > j + 1])
                for j in range(k, len(row) - 1)
            )
            expected["turn_index"].append(centred(row[-1] + outcome[n], finals) + later)
            equals = [to_go[m][j] for m in mates for j, s in enumerate(states[m]) if s == states[n][k]]
            compared = centred(to_go[n][k], equals) if k and states[n][k] >= 0 else 0.0
            expected["anchor"].append(centred(whole[n], returns_of) + 2 * compared)
            moved = [
                sum(
                    gain * 0.5 ** (j - i) / sum(0.5**back for back in range(j + 1))
                    for j, gain in enumerate(gains[n])
                    if j >= i
                )
                for i in range(len(row))
            ]
            expected["progress"].append(centred(whole[n], returns_of) + 2 * centred(moved[k], moved))
    for name, rule in RULES.items():
        close_fp64(rule(made, total_N, group_N, 3), expected[name])


def test_turns_that_do_not_add_up_and_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="^the number of turns is 7; it must be 6, by count_N"):
        replace(turns(), count_N=torch.tensor([3, 2, 1]))
    with pytest.raises(ValueError, match="^count_N is .*; it must be at least 1 everywhere"):
        replace(turns(), count_N=torch.tensor([3, 4, 0]))
    with pytest.raises(ValueError, match=r"^reward_U\[1\] is nan"):
        replace(turns(), reward_U=torch.tensor([0.0, float("nan")] + [0.0] * 5))
    with pytest.raises(ValueError, match=r"^count_N has shape \(3,\), but return_N \(2,\)"):
        credit.returns_to_go(turns(), torch.zeros(2), discount=1.0)
    options = {"centre": None, "compare": None, "epsilon": None, "discount": 1.0, "state_weight": 1.0}
    with pytest.raises(ValueError, match="^there is no credit 'best'"):
        credit.turn_advantages("best", turns(), return_N(), GROUPS, 2, **options)
    with pytest.raises(ValueError, match="^reward_T is 5 long; it must be as long as the turns"):
        credit.gae_turn(torch.zeros(5), torch.zeros(5), turns(), gamma=1.0, lam=1.0)
