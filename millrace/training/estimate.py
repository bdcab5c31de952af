"""From scored groups to advantages: what each token the policy chose is worth.

T = packed tokens, N = trajectories (a segment for each branch), K = rewards that are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from millrace.algorithms import advantages, credit, masked, returns
from millrace.algorithms.credit import Comparison, Turns
from millrace.algorithms.masked import Chosen
from millrace.data.batch import Batch
from millrace.kernels.dispatch import Scan
from millrace.types import Group, Trajectory


def usable(groups: Sequence[Group]) -> tuple[list[Trajectory], Tensor]:
    """Trajectories whose reward did not fail, in order, and the group of each, [N]."""
    kept = [
        (trajectory, index)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.outcome is not None and trajectory.outcome.kind != "failed"
    ]
    return [trajectory for trajectory, _ in kept], torch.tensor(
        [index for _, index in kept], dtype=torch.long
    )


def turns_of(trajectories: Sequence[Trajectory]) -> Turns:
    """The turns of trajectories, one after another; equal names of states have equal numbers."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    number = {name: i for i, name in enumerate(dict.fromkeys(turn.state for turn in turns if turn.state))}
    return Turns(
        torch.tensor([turn.reward for turn in turns], dtype=torch.float64),
        torch.tensor([number.get(turn.state, -1) for turn in turns]),
        torch.tensor([len(turn.completion.token_ids) for turn in turns]),
        torch.tensor([len(trajectory.turns) for trajectory in trajectories]),
        torch.tensor(
            [gain for trajectory in trajectories for gain in _gains(trajectory)], dtype=torch.float64
        ),
    )


def _gains(trajectory: Trajectory) -> Iterator[float]:
    """The change of progress by each turn; where it is not known, it counts for the next turn that has it."""
    known = 0.0
    for turn in trajectory.turns:
        yield 0.0 if turn.progress is None else turn.progress - known
        known = known if turn.progress is None else turn.progress


@dataclass(frozen=True, eq=False)
class Scored:
    """What an estimator may look at.

    Attributes:
        batch: the packed trajectories; their `reward_T` holds penalties too, `value_T` the critic's values.
        reward_N: returns of episodes, penalties included, in float64 so that 0.1 is 0.1 in every group.
        component_KN: the rewards that were added up, float64.
        baseline_N: reward of the greedy answer to each trajectory's prompt.
        final_value_N: the critic's value after the last token of a trajectory that ran out of tokens, else 0.
        square_T: sum over the vocabulary of the squared probabilities a token was chosen from.
        turns: their rewards hold those penalties that belong to tokens.
    """

    batch: Batch
    reward_N: Tensor
    group_N: Tensor
    num_groups: int
    component_KN: Tensor | None = None
    baseline_N: Tensor | None = None
    final_value_N: Tensor | None = None
    square_T: Tensor | None = None
    teacher_logprob_T: Tensor | None = None
    turns: Turns | None = None

    @cached_property
    def chosen(self) -> Chosen:
        """Where the policy's own tokens are, for each trajectory."""
        return self.batch.chosen

    @property
    def rewards(self) -> Tensor:
        """Rewards of the policy's own tokens."""
        return self.chosen.take(self.batch.reward_T)

    @property
    def values(self) -> Tensor:
        """The critic's values of the policy's own tokens."""
        return self.chosen.take(_there(self.batch.value_T, "values of a critic"))


# Advantage of each chosen token and, where there is a critic, its target.
Estimate = tuple[Tensor, Tensor | None]
Estimator = Callable[[Scored], Estimate]


def estimate_advantages(scored: Scored, *, kind: str, scan: Scan, **settings: Any) -> Estimate:
    """Estimate the advantages that a recipe names, with the settings of its section.

    Raises:
        ValueError: there is no such kind, or the batch lacks what it needs.
    """
    match kind:
        case "group":
            return group(scored, **settings)
        case "leave_one_out":
            return leave_one_out(scored, **settings)
        case "gpg":
            return per_trajectory(scored, advantages.gpg)
        case "pass_at_k":
            return per_trajectory(scored, partial(advantages.pass_at_k, **settings))
        case "length_weighted":
            return length_weighted(scored)
        case "group_decoupled":
            return group_decoupled(scored, **settings)
        case "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline(scored)
        case "reinforce_plus_plus":
            return reinforce_plus_plus(scored, scan=scan, **settings)
        case "greedy_baseline":
            return greedy_baseline(scored, scan=scan)
        case "token_baseline":
            return token_baseline(scored, scan=scan, **settings)
        case "returns":
            return discounted(scored, scan=scan, **settings)
        case "teacher":
            return teacher(scored, scan=scan, **settings)
        case "gae":
            return generalised(scored, scan=scan, **settings)
        case "n_step":
            return n_step(scored, scan=scan, **settings)
        case "v_trace":
            return v_trace(scored, scan=scan, **settings)
    raise ValueError(f"there is no advantage {kind!r}")


def per_trajectory(scored: Scored, function: Comparison) -> Estimate:
    """Advantages from rewards and groups alone: every token of a trajectory gets its advantage."""
    return _spread(scored, function(scored.reward_N, scored.group_N, scored.num_groups)), None


def group(
    scored: Scored,
    *,
    baseline: Literal["mean", "others"],
    divide_by_std: bool,
    epsilon: float,
    lone_reward: bool,
    whiten: bool,
    credit: str,
    turn_discount: float,
    state_weight: float,
) -> Estimate:
    """GRPO: reward minus the mean of the group, or of its other samples."""
    function: Comparison
    if baseline == "others" and divide_by_std:
        function = partial(advantages.leave_one_out_normalised, epsilon=epsilon)
    elif baseline == "others":
        function = advantages.leave_one_out
    elif divide_by_std:
        function = partial(advantages.group_normalised, epsilon=epsilon, lone_reward=lone_reward)
    else:
        function = advantages.group_centred
    advantage_T = _credited(
        scored,
        credit,
        centre=advantages.leave_one_out if baseline == "others" else advantages.group_centred,
        compare=function,
        epsilon=epsilon if divide_by_std else None,
        discount=turn_discount,
        state_weight=state_weight,
    )
    return masked.whiten(advantage_T) if whiten else advantage_T, None


def leave_one_out(scored: Scored, *, credit: str, turn_discount: float, state_weight: float) -> Estimate:
    """RLOO: reward minus the mean of the group's other samples."""
    centre = advantages.leave_one_out
    return _credited(
        scored,
        credit,
        centre=centre,
        compare=centre,
        epsilon=None,
        discount=turn_discount,
        state_weight=state_weight,
    ), None


def length_weighted(scored: Scored) -> Estimate:
    """OPO: the group's mean weighted by length is taken off."""
    advantage_N = advantages.length_weighted_centred(
        scored.reward_N, scored.chosen.length_B, scored.group_N, scored.num_groups
    )
    return _spread(scored, advantage_N), None


def group_decoupled(scored: Scored, *, weights: Sequence[float]) -> Estimate:
    """GDPO: each reward normalised in its group, summed by weight and whitened over the tokens."""
    if scored.turns is not None and scored.turns.reward_U.any():
        raise ValueError(
            "advantage kind group_decoupled compares the named rewards of an outcome, and the environment "
            "gave a reward for a turn, which is none of them; choose kind group"
        )
    advantage_N = advantages.group_decoupled(
        _there(scored.component_KN, "several rewards"),
        scored.group_N,
        scored.num_groups,
        weight_K=torch.tensor(weights, dtype=torch.float64),
    )
    return masked.whiten(_spread(scored, advantage_N)), None


def reinforce_plus_plus(scored: Scored, *, gamma: float, scan: Scan) -> Estimate:
    """Discounted returns, whitened over the tokens."""
    return advantages.reinforce_plus_plus(
        scored.rewards, scored.chosen.length_B, gamma=gamma, scan=scan
    ), None


def reinforce_plus_plus_baseline(scored: Scored) -> Estimate:
    """Reward minus the mean of the group, whitened over the tokens."""
    return advantages.reinforce_plus_plus_baseline(
        scored.reward_N, scored.group_N, scored.num_groups, scored.chosen.length_B
    ), None


def greedy_baseline(scored: Scored, *, scan: Scan) -> Estimate:
    """ReMax: the return minus the reward of the greedy answer."""
    return_T = returns.discounted_returns(scored.rewards, scored.chosen.length_B, gamma=1.0, scan=scan)
    baseline_N = _there(scored.baseline_N, "rewards of greedy answers")
    return advantages.baseline_centred(return_T, baseline_N, scored.chosen.segment_N), None


def token_baseline(scored: Scored, *, align: Literal["position", "action"], scan: Scan) -> Estimate:
    """The return minus the baseline of least variance at each position of the group.

    Positions count the policy's own tokens with `align` action, otherwise all tokens since its first.
    """
    here = scored.chosen
    position_N = here.position_N
    if align == "position":
        place_N = here.take(scored.batch.position_T)
        position_N = place_N - place_N[position_N == 0].repeat_interleave(here.length_B[here.length_B > 0])
    return_T = returns.discounted_returns(scored.rewards, here.length_B, gamma=1.0, scan=scan)
    return advantages.optimal_token_baseline(
        return_T,
        here.take(scored.batch.sampler_logprob_T),
        here.take(_there(scored.square_T, "squared probabilities")),
        position_N,
        here.segment_N,
        scored.group_N,
    ), None


def discounted(scored: Scored, *, gamma: float, scan: Scan) -> Estimate:
    """The discounted return, without a baseline."""
    return returns.discounted_returns(scored.rewards, scored.chosen.length_B, gamma=gamma, scan=scan), None


def teacher(scored: Scored, *, gamma: float, scan: Scan) -> Estimate:
    """On-policy distillation: how much likelier the teacher finds a token than the sampler did."""
    here = scored.chosen
    teacher_T = here.take(_there(scored.teacher_logprob_T, "log-probabilities of a teacher"))
    gain_T = teacher_T - here.take(scored.batch.sampler_logprob_T)
    return returns.discounted_returns(gain_T, here.length_B, gamma=gamma, scan=scan), None


def generalised(
    scored: Scored,
    *,
    gamma: float,
    lam: float,
    length_adaptive: float | None,
    critic_lam: float | None,
    whiten: bool,
    credit: str,
    turn_discount: float,
    scan: Scan,
) -> Estimate:
    """GAE over tokens, or over turns; the critic's returns may have a lambda of their own (VAPO)."""
    if credit == "gae_turn":
        return over_turns(scored, discount=turn_discount, lam=lam, whiten=whiten, scan=scan)
    length_N = scored.chosen.length_B
    own: float | Tensor = lam
    if length_adaptive is not None:
        own = returns.length_adaptive_lambda(length_N, alpha=length_adaptive)
    advantage_T, return_T = returns.gae(
        scored.rewards,
        scored.values,
        length_N,
        gamma=gamma,
        lam=own,
        bootstrap_B=scored.final_value_N,
        scan=scan,
    )
    if critic_lam is not None:
        return_T = returns.td_lambda_returns(
            scored.rewards,
            scored.values,
            length_N,
            gamma=gamma,
            lam=critic_lam,
            bootstrap_B=scored.final_value_N,
            scan=scan,
        )
    return masked.whiten(advantage_T) if whiten else advantage_T, return_T


def over_turns(scored: Scored, *, discount: float, lam: float, whiten: bool, scan: Scan) -> Estimate:
    """GAE whose steps are turns."""
    advantage_T, return_T = credit.gae_turn(
        scored.rewards,
        scored.values,
        _turns(scored),
        gamma=discount,
        lam=lam,
        bootstrap_N=scored.final_value_N,
        scan=scan,
    )
    return masked.whiten(advantage_T) if whiten else advantage_T, return_T


def n_step(scored: Scored, *, gamma: float, num_steps: int, whiten: bool, scan: Scan) -> Estimate:
    """The n-step return minus the value; the critic learns the n-step return."""
    return_T = returns.n_step_returns(
        scored.rewards,
        scored.values,
        scored.chosen.length_B,
        gamma=gamma,
        num_steps=num_steps,
        bootstrap_B=scored.final_value_N,
        scan=scan,
    )
    advantage_T = return_T - scored.values
    return masked.whiten(advantage_T) if whiten else advantage_T, return_T


def v_trace(
    scored: Scored, *, gamma: float, lam: float, max_rho: float, max_c: float, whiten: bool, scan: Scan
) -> Estimate:
    """V-trace, with the ratio of the trainer's log-probabilities before the batch over the sampler's."""
    here, batch = scored.chosen, scored.batch
    start_T = here.take(_there(batch.proximal_logprob_T, "the trainer's own log-probabilities"))
    advantage_T, return_T = returns.v_trace(
        scored.rewards,
        scored.values,
        start_T - here.take(batch.sampler_logprob_T),
        here.length_B,
        gamma=gamma,
        lam=lam,
        max_rho=max_rho,
        max_c=max_c,
        bootstrap_B=scored.final_value_N,
        scan=scan,
    )
    return masked.whiten(advantage_T) if whiten else advantage_T, return_T


def _credited(scored: Scored, kind: str, *, compare: Comparison, **settings: Any) -> Tensor:
    """The advantage of each token, by the trajectory's advantage or by those of its turns."""
    if kind == "episode":
        advantage_T, _ = per_trajectory(scored, compare)
        return advantage_T
    turns = _turns(scored)
    advantage_U = credit.turn_advantages(
        kind, turns, scored.reward_N, scored.group_N, scored.num_groups, compare=compare, **settings
    )
    return advantage_U.float()[turns.turn_T]


def _turns(scored: Scored) -> Turns:
    if scored.turns is None:
        raise ValueError(
            "credit over turns needs the turns of the trajectories, which the batch does not have"
        )
    return scored.turns


def _spread(scored: Scored, advantage_N: Tensor) -> Tensor:
    return advantage_N.float()[scored.chosen.segment_N]


def _there(column: Tensor | None, what: str) -> Tensor:
    if column is None:
        raise ValueError(f"this advantage needs {what}, which the batch does not have")
    return column
