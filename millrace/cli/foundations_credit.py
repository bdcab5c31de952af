"""The table of `millrace foundations credit`: the rules of credit over turns on a game that is enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millrace.algorithms import credit
from millrace.algorithms.advantages import group_centred, leave_one_out
from millrace.algorithms.credit import Turns
from millrace.foundations.enumerate import Draws, draws, prefix_values
from millrace.foundations.mdp import Floats
from millrace.foundations.turn_game import STOP, TREE, TurnGame, example_game

GROUP_SIZE = 2


def credit_lines() -> Iterator[str]:
    """A line for each rule: its expected gradient beside the exact one."""
    game = example_game()
    exact_PV = game.gradient_PV
    groups = draws(TREE, game.policy_PV, GROUP_SIZE)
    yield (
        f"two turns of one of 4 tokens, of which the last stops after the first turn: {len(TREE.sequences)} "
        f"episodes, {len(groups.probability_D)} groups of {GROUP_SIZE}"
    )
    yield (
        f"mean reward before the last turn {game.mean_intermediate_reward:.6f}; pi(stop) "
        f"{game.policy_PV[0, STOP]:.6f}; exact gradient of its logit {exact_PV[0, STOP]:.6f}"
    )
    yield ""
    yield f"{'credit':36}{'bias':>10}{'of stop':>12}{'gradient of stop':>18}{'noise':>9}"
    for name, advantage_U in rules(game, groups):
        estimate_DPV = groups.gradients(advantage_U.numpy() / GROUP_SIZE, game.policy_PV)
        mean_PV = groups.mean(estimate_DPV)
        bias_PV = mean_PV - exact_PV
        bias = float(np.linalg.norm(bias_PV) / np.linalg.norm(exact_PV))
        noise = groups.variance(estimate_DPV) ** 0.5
        # What is rounding is shown as 0.
        numbers = [round(number, 6) + 0.0 for number in (bias, bias_PV[0, STOP], mean_PV[0, STOP])]
        yield f"{name:36}{numbers[0]:10.6f}{numbers[1]:12.6f}{numbers[2]:18.6f}{noise:9.4f}"


def rules(game: TurnGame, groups: Draws) -> Iterator[tuple[str, Tensor]]:
    """The advantage of each turn of every group, by rule."""
    reward_T = torch.from_numpy(game.reward_PV[groups.prefix_T, groups.token_T])
    turns = Turns(
        reward_T,
        torch.from_numpy(groups.prefix_T),
        torch.ones(len(groups.token_T), dtype=torch.long),
        torch.from_numpy(groups.length_B),
        gain_U=reward_T,
    )
    outcome_N = torch.from_numpy(game.outcome_N[groups.sequence_B])
    return_N = outcome_N.index_add(0, turns.episode_U, turns.reward_U)
    given = return_N, torch.from_numpy(groups.draw_B), len(groups.probability_D)
    yield "episode", leave_one_out(*given)[turns.episode_U]
    yield "episode, mean of the group", group_centred(*given)[turns.episode_U]
    to_go = partial(credit.return_to_go, turns, *given, epsilon=None)
    yield "return_to_go", to_go(centre=leave_one_out, discount=1.0)
    yield "return_to_go, mean of the group", to_go(centre=group_centred, discount=1.0)
    yield "return_to_go, turn_discount 0.5", to_go(centre=leave_one_out, discount=0.5)
    yield "turn_index", credit.turn_index(turns, *given, compare=leave_one_out, discount=1.0)
    yield "anchor", credit.anchor(turns, *given, compare=leave_one_out, discount=1.0, weight=1.0)
    progress = partial(credit.progress, turns, *given, compare=leave_one_out, weight=1.0)
    yield "progress by the rewards", progress(discount=0.0)
    yield "progress, turn_discount 1", progress(discount=1.0)
    value_P = prefix_values(TREE, game.policy_PV, game.total_PV)
    total_T = torch.from_numpy(game.total_PV[groups.prefix_T, groups.token_T])
    for what, critic_P, lam in (
        ("lam 0.5, right critic", value_P, 0.5),
        ("lam 0.5, critic of 0", 0 * value_P, 0.5),
        ("lam 1, critic of 0", 0 * value_P, 1.0),
    ):
        yield f"gae_turn, {what}", over_turns(total_T, critic_P, groups, turns, lam)


def over_turns(reward_T: Tensor, critic_P: Floats, groups: Draws, turns: Turns, lam: float) -> Tensor:
    """The advantages of a critic that knows a value for each prefix."""
    value_T = torch.from_numpy(critic_P[groups.prefix_T])
    advantage_T, _ = credit.gae_turn(reward_T, value_T, turns, gamma=1.0, lam=lam)
    return advantage_T
