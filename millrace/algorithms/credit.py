"""Credit over turns: one advantage for each turn of an episode, where `advantages` gives one for all.

N = trajectories (episodes), G = groups (one prompt each), U = turns of all trajectories, one trajectory after
another, T = chosen tokens. r_k is the environment's reward for turn k; R = sum of r_k + outcome is the return
of the episode. An advantage of a turn holds for all of its tokens, but for `gae_turn`. Where every episode
has one turn, every rule gives the numbers of `advantages`, bit for bit.

Every function raises ValueError as those of `advantages` do, and if the turns do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms import advantages, returns
from millrace.algorithms.checks import check_finite, check_positive, check_shapes, require
from millrace.algorithms.masked import segment_sum
from millrace.kernels.dispatch import Scan

# Rewards [N], the group of each and the number of groups -> advantages [N].
Comparison = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of N trajectories, one after another.

    Attributes:
        reward_U: the environment's reward of each turn, penalties included, the outcome not; float64.
        state_U: a number for each name of a state, -1 where the environment gave none.
        length_U: chosen tokens of each turn.
        count_N: turns of each trajectory, at least 1.
        gain_U: change of progress by each turn, float64.
    """

    reward_U: Tensor
    state_U: Tensor
    length_U: Tensor
    count_N: Tensor
    gain_U: Tensor

    def __post_init__(self) -> None:
        check_shapes(reward_U=self.reward_U, state_U=self.state_U, length_U=self.length_U, gain_U=self.gain_U)
        check_finite(reward_U=self.reward_U, gain_U=self.gain_U)
        require(bool((self.count_N > 0).all()), "count_N", self.count_N.tolist(), "at least 1 everywhere")
        total = int(self.count_N.sum())
        require(
            total == len(self.reward_U), "the number of turns", len(self.reward_U), f"{total}, by count_N"
        )

    @property
    def episode_U(self) -> Tensor:
        """The trajectory of each turn."""
        return torch.arange(len(self.count_N)).repeat_interleave(self.count_N)

    @property
    def index_U(self) -> Tensor:
        """Index of each turn in its trajectory, from 0."""
        return torch.arange(len(self.reward_U)) - self.first_N[self.episode_U]

    @property
    def first_N(self) -> Tensor:
        """The first turn of each trajectory."""
        return self.count_N.cumsum(0) - self.count_N

    @property
    def is_last_U(self) -> Tensor:
        """Whether a turn is the last of its trajectory, bool."""
        return self.index_U == self.count_N[self.episode_U] - 1

    @property
    def turn_T(self) -> Tensor:
        """The turn of each chosen token."""
        return torch.arange(len(self.length_U)).repeat_interleave(self.length_U)


def turn_advantages(
    kind: str,
    turns: Turns,
    return_N: Tensor,
    group_N: Tensor,
    num_groups: int,
    *,
    centre: Comparison,
    compare: Comparison,
    epsilon: float | None,
    discount: float,
    state_weight: float,
) -> Tensor:
    """Compute the advantage of each turn, [U], by the rule that a recipe names.

    Args:
        kind: `return_to_go`, `turn_index`, `anchor` or `progress`.
        turns: of the trajectories.
        return_N: return of each trajectory.
        group_N: group of each trajectory.
        num_groups: G.
        centre: reward minus baseline.
        compare: the same, divided if the recipe divides.
        epsilon: added to the standard deviation where `compare` divides by it, else None.
        discount: per turn.
        state_weight: of the comparison of `anchor`, and of the changes of `progress`.

    Raises:
        ValueError: there is no such rule.
    """
    match kind:
        case "return_to_go":
            return return_to_go(
                turns, return_N, group_N, num_groups, centre=centre, epsilon=epsilon, discount=discount
            )
        case "turn_index":
            return turn_index(turns, return_N, group_N, num_groups, compare=compare, discount=discount)
        case "anchor":
            return anchor(
                turns, return_N, group_N, num_groups, compare=compare, discount=discount, weight=state_weight
            )
        case "progress":
            return progress(
                turns, return_N, group_N, num_groups, compare=compare, discount=discount, weight=state_weight
            )
    raise ValueError(f"there is no credit {kind!r}")


def returns_to_go(turns: Turns, return_N: Tensor, *, discount: float) -> Tensor:
    """G_k = sum_{j >= k} discount^(j - k) r_j + outcome, [U]; the outcome is not discounted."""
    check_shapes(return_N=return_N, count_N=turns.count_N)
    return return_N[turns.episode_U] - _left_out(turns, discount)


def return_to_go(
    turns: Turns,
    return_N: Tensor,
    group_N: Tensor,
    num_groups: int,
    *,
    centre: Comparison,
    epsilon: float | None,
    discount: float,
) -> Tensor:
    """A_k = G_k - b, [U]: the return to go minus a baseline of returns of whole episodes of the group.

    `centre` is `group_centred` or `leave_one_out`: R - b for each episode. b is no function of what the
    episode did before it stopped, so with the baseline of the others and discount 1 the policy gradient is
    unbiased; with the mean of all it is, as for `group_centred`, (n - 1) / n of it. With `epsilon` divided by
    the root mean square (with Bessel's correction, over the turns of the group) of A plus epsilon. A
    trajectory alone in its group has advantage 0.
    Source: Williams 1992, REINFORCE, with the causality of rewards.
    """
    episode_U = turns.episode_U
    group_U = group_N[episode_U]
    check_shapes(return_N=return_N, count_N=turns.count_N)
    centred_U = centre(return_N, group_N, num_groups)[episode_U] - _left_out(turns, discount)
    centred_U = torch.where(torch.bincount(group_N)[group_U] > 1, centred_U, 0.0)
    if epsilon is None:
        return centred_U
    check_positive(epsilon=epsilon)
    return centred_U / (advantages.group_std(centred_U, group_U, num_groups) + epsilon)[group_U]


def turn_index(
    turns: Turns,
    return_N: Tensor,
    group_N: Tensor,
    num_groups: int,
    *,
    compare: Comparison,
    discount: float,
) -> Tensor:
    """A_k = compare(F) + sum_{k <= j < last} discount^(j - k) compare_j(r_j), [U]: rewards by turn index.

    F = r_last + outcome is compared in the group, the reward of an earlier turn with those of the same index
    in the group. So an episode that goes on has a baseline with more terms than one that stops: biased where
    the policy decides when to stop, see `turn_index_bias`.
    Source: Zeng et al. 2025, "Reinforcing multi-turn reasoning in LLM agents via turn-level credit
    assignment" (MT-GRPO); the bias: verl, issue 7244.
    """
    check_shapes(return_N=return_N, count_N=turns.count_N)
    episode_U, inner_U = turns.episode_U, ~turns.is_last_U
    inner_reward_U = torch.where(inner_U, turns.reward_U, 0.0)
    final_N = return_N - segment_sum(inner_reward_U, episode_U, len(return_N))
    _, place_U = torch.stack([group_N[episode_U], turns.index_U]).unique(dim=1, return_inverse=True)
    compared_U = _compared(turns.reward_U, place_U, inner_U, compare)
    later_U = returns.discounted_returns(compared_U, turns.count_N, gamma=discount)
    return compare(final_N, group_N, num_groups)[episode_U] + later_U


def turn_index_bias(turns: Turns) -> float:
    """Minus the mean of what an episode earns before its last turn: the bias of `turn_index`.

    Its gradient is that of another reward: less by the mean reward of the turn index for each further turn
    (undiscounted, undivided). So it is 0 where only last turns have rewards.
    """
    return -float(turns.reward_U[~turns.is_last_U].sum()) / len(turns.count_N)


def anchor(
    turns: Turns,
    return_N: Tensor,
    group_N: Tensor,
    num_groups: int,
    *,
    compare: Comparison,
    discount: float,
    weight: float,
) -> Tensor:
    """A_k = compare(R) + weight compare_s(G_k), [U]: the episode, and the turns of its group in equal states.

    G_k is the return to go; compare_s is over all turns of the group with the state of turn k. Turns whose
    state has no name have the first term alone, and so has the first turn of an episode: all episodes of a
    group begin in the state of the prompt, which the first term compares already (GiGPO counts it twice).
    A state that the policy reaches often weighs more, so the expected gradient in each state is a multiple of
    the policy gradient, a different one for each state.
    Source: Feng et al. 2025, "Group-in-group policy optimization" (GiGPO).
    """
    to_go_U = returns_to_go(turns, return_N, discount=discount)
    episode_U, named_U = turns.episode_U, turns.state_U >= 0
    _, place_U = torch.stack([group_N[episode_U], turns.state_U]).unique(dim=1, return_inverse=True)
    among_equals_U = _compared(to_go_U, place_U, named_U, compare)
    among_equals_U = torch.where(turns.index_U > 0, among_equals_U, 0.0)
    return compare(return_N, group_N, num_groups)[episode_U] + weight * among_equals_U


def progress(
    turns: Turns,
    return_N: Tensor,
    group_N: Tensor,
    num_groups: int,
    *,
    compare: Comparison,
    discount: float,
    weight: float,
) -> Tensor:
    """A_k = compare(R) + weight (c_k - mean of c over the turns of the episode), [U].

    c_k = sum_{j >= k} gain_j discount^(j - k) / sum_{i <= j} discount^(j - i): a change of progress is shared
    by its turn and the earlier ones, which may have prepared it; equally with discount 1, and with 0 its own
    turn has all of it. So credit moves within an episode, whose mean stays that of `episode`. The gradient is
    that of the return and, by the weight, the one of what is moved: a bias.
    Changes and how they are shared: prime-rl, pull request 3282, where an episode begins at its first known
    progress. The rest is ours.
    """
    check_shapes(return_N=return_N, count_N=turns.count_N)
    episode_U, index_U = turns.episode_U, turns.index_U
    # Of each index that a turn may have: 1 + discount + ... + discount^index.
    weight_U = torch.cumsum(torch.full_like(turns.gain_U, discount) ** torch.arange(len(index_U)), 0)
    shared_U = turns.gain_U / weight_U[index_U]
    credit_U = returns.discounted_returns(shared_U, turns.count_N, gamma=discount)
    mean_N = segment_sum(credit_U, episode_U, len(return_N)) / turns.count_N
    moved_U = credit_U - mean_N[episode_U]
    return compare(return_N, group_N, num_groups)[episode_U] + weight * moved_U


def gae_turn(
    reward_T: Tensor,
    value_T: Tensor,
    turns: Turns,
    *,
    gamma: float,
    lam: float,
    bootstrap_N: Tensor | None = None,
    scan: Scan = "auto",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with turns as steps: (A, A + V), each [T].

    A_t = sum of the rewards from t to the end of turn k + gamma (V_{k+1} + lam A_{k+1}) - V_t, where V_{k+1}
    and A_{k+1} are those of the first token of the next turn: lam and gamma act from turn to turn and are 1
    within one. After the last turn, `bootstrap_N`, the value of the state the episode was cut off in, or 0.
    `turns` gives lengths and counts; the rewards are `reward_T`. With one turn it is `gae` with gamma = lam =
    1.
    """
    check_finite(reward_T=reward_T, value_T=value_T, bootstrap_B=bootstrap_N)
    spoken_U = turns.length_U > 0
    length_U, episode_U = turns.length_U[spoken_U], turns.episode_U[spoken_U]
    count_N = torch.bincount(episode_U, minlength=len(turns.count_N))
    require(int(length_U.sum()) == len(reward_T), "reward_T", f"{len(reward_T)} long", "as long as the turns")
    num_turns = len(length_U)
    turn_T = torch.arange(num_turns).repeat_interleave(length_U)
    value_U = value_T[length_U.cumsum(0) - length_U].double()
    final_U = value_T.new_zeros(num_turns)
    last_U = (count_N.cumsum(0) - 1)[count_N > 0]
    if bootstrap_N is not None:
        final_U[last_U] = bootstrap_N[count_N > 0].to(final_U.dtype)
    earned_U = segment_sum(reward_T.double(), turn_T, num_turns) + final_U.double()
    step_U, _ = returns.gae(earned_U, value_U, count_N, gamma=gamma, lam=lam, scan=scan)
    next_U = (gamma * (value_U + lam * step_U)).roll(-1).to(final_U.dtype)
    next_U[last_U] = final_U[last_U]
    return returns.gae(reward_T, value_T, length_U, gamma=1.0, lam=1.0, bootstrap_B=next_U, scan=scan)


def _left_out(turns: Turns, discount: float) -> Tensor:
    """R - G_k, [U]: rewards of earlier turns, and what later ones lose by the discount; exactly 0 for one."""
    whole_N = returns.discounted_returns(turns.reward_U, turns.count_N, gamma=1.0)[turns.first_N]
    to_go_U = returns.discounted_returns(turns.reward_U, turns.count_N, gamma=discount)
    return whole_N[turns.episode_U] - to_go_U


def _compared(value_U: Tensor, place_U: Tensor, chosen_U: Tensor, compare: Comparison) -> Tensor:
    """Compare the chosen turns with those of the same place, [U]; 0 for the others."""
    place, group = place_U[chosen_U].unique(return_inverse=True)
    return torch.zeros_like(value_U).masked_scatter(chosen_U, compare(value_U[chosen_U], group, len(place)))
