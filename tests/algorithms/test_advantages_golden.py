"""Every advantage that verl computed, by name; a name without a translation is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.advantages import (
    baseline_centred,
    gpg,
    group_centred,
    group_normalised,
    leave_one_out,
    length_weighted_centred,
    optimal_token_baseline,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from millrace.algorithms.masked import Chosen, chosen, segment_sum, whiten
from millrace.algorithms.returns import discounted_returns, gae
from tests.close import close_fp64
from tests.golden.verl import CASES, Rows, rows

NAMES = [(index, name) for index, case in enumerate(CASES) for name in case["advantages"]]


class Case:
    """The inputs of a case on its chosen tokens (T) and as one number per trajectory (N)."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.rows: Rows = rows(case)
        self.group_N, self.num_groups = self.rows.group_B, self.rows.num_groups
        self.chosen: Chosen = chosen(self.rows.mask_T, self.rows.segment_T, len(self.group_N))
        self.segment_T, self.length_N = self.chosen.segment_N, self.chosen.length_B
        self.reward_T = self.take("rewards")
        self.reward_N = segment_sum(self.reward_T, self.segment_T, len(self.group_N))
        self.groups = self.reward_N, self.group_N, self.num_groups
        self.alone_N = torch.bincount(self.group_N)[self.group_N] == 1
        everything = chosen(self.rows.mask_T >= 0, self.rows.segment_T, len(self.group_N))
        self.position_T = self.chosen.take(everything.position_N)

    def take(self, name: str) -> Tensor:
        return self.chosen.take(self.rows.input(name))

    def golden(self, padded: list[list[float]]) -> Tensor:
        return self.chosen.take(self.rows.pack(padded))

    def as_verl(self, advantage_N: Tensor) -> Tensor:
        """With verl's number for a trajectory that is alone in its group: its raw reward."""
        return torch.where(self.alone_N, self.reward_N, advantage_N)

    def spread(self, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
        advantage_T = advantage_N[self.segment_T]
        return advantage_T, advantage_T

    def token_baseline(self, position_T: Tensor) -> Tensor:
        given = (self.returns(1.0), self.take("old"), self.take("sum_pi_squared"), position_T)
        return optimal_token_baseline(*given, self.segment_T, self.group_N)

    def returns(self, gamma: float) -> Tensor:
        return discounted_returns(self.reward_T, self.length_N, gamma=gamma)

    def verl_tail(self) -> tuple[Tensor, Tensor]:
        """Where verl's single-turn baseline differs: set to 0 too early, and a lone return less itself.

        The longest trajectory of a group has no baseline from the position on that is the number of tokens of
        the second longest, though with tool tokens others may reach it. Before it a position that one
        trajectory alone reaches has that one's return as its baseline.
        """
        early_T = torch.zeros_like(self.position_T, dtype=torch.bool)
        lone_T = torch.zeros_like(early_T)
        for group in range(self.num_groups):
            members = (self.group_N == group).nonzero()[:, 0]
            if len(members) == 1:
                continue
            lengths = self.length_N[members].sort(descending=True).values
            longest = members[self.length_N[members].argmax()]
            if lengths[0] > lengths[1]:
                early_T |= (self.segment_T == longest) & (self.position_T >= lengths[1])
            in_group_T = self.group_N[self.segment_T] == group
            reach_P = torch.bincount(self.position_T[in_group_T], minlength=self.rows.width)
            lone_T |= in_group_T & (reach_P[self.position_T] == 1)
        return early_T, lone_T & ~early_T


def _gae(case: Case, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    advantage_T, return_T = gae(case.reward_T, case.take("values"), case.length_N, gamma=gamma, lam=lam)
    return whiten(advantage_T), return_T


def _grpo(case: Case, norm_by_std: bool) -> tuple[Tensor, Tensor]:
    if norm_by_std:
        return case.spread(group_normalised(*case.groups, lone_reward=True))
    return case.spread(case.as_verl(group_centred(*case.groups)))


def _passk(case: Case, norm_by_std: bool) -> tuple[Tensor, Tensor]:
    return case.spread(pass_at_k(*case.groups, divide_by_std=norm_by_std))


def _reinforce(case: Case, gamma: float) -> tuple[Tensor, Tensor]:
    return reinforce_plus_plus(case.reward_T, case.length_N, gamma=gamma), case.returns(gamma)


def _reinforce_baseline(case: Case) -> tuple[Tensor, Tensor]:
    if case.alone_N.any():  # which changes the mean and variance of everybody's tokens
        advantage_T = whiten(case.as_verl(group_centred(*case.groups))[case.segment_T])
    else:
        advantage_T = reinforce_plus_plus_baseline(*case.groups, case.length_N)
    return advantage_T, advantage_T


def _opo(case: Case) -> tuple[Tensor, Tensor]:
    reward_N, group_N, num_groups = case.groups
    return case.spread(case.as_verl(length_weighted_centred(reward_N, case.length_N, group_N, num_groups)))


def _gpg(case: Case) -> tuple[Tensor, Tensor]:
    assert case.reward_N.ne(0).all()  # so verl's factor is 1, for a lone reward too
    return case.spread(case.as_verl(gpg(*case.groups)))


def _remax(case: Case) -> tuple[Tensor, Tensor]:
    return_T = case.returns(1.0)
    return baseline_centred(return_T, case.rows.input("baselines"), case.segment_T), return_T


def _token_baseline(case: Case) -> tuple[Tensor, Tensor]:
    ours_T, return_T = case.token_baseline(case.position_T), case.returns(1.0)
    early_T, lone_T = case.verl_tail()
    return torch.where(early_T, return_T, torch.where(lone_T, 0.0, ours_T)), return_T


TRANSLATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gae": _gae,
    "grpo": _grpo,
    "grpo_passk": _passk,
    "reinforce_plus_plus": _reinforce,
    "reinforce_plus_plus_baseline": _reinforce_baseline,
    "rloo": lambda case: case.spread(case.as_verl(leave_one_out(*case.groups))),
    "rloo_vectorized": lambda case: case.spread(leave_one_out(*case.groups)),
    "opo": _opo,
    "remax": _remax,
    "gpg": _gpg,
    "optimal_token_baseline": _token_baseline,
    "tir_optimal_token_baseline": lambda case: (
        case.token_baseline(case.chosen.position_N),
        case.returns(1.0),
    ),
}


def translated(name: str, case: Case) -> tuple[Tensor, Tensor]:
    """Ours for a name such as `gae gamma=0.9 lam=0.0 (whitened)`."""
    settings = {key: json.loads(value.lower()) for key, value in re.findall(r"(\w+)=(\S+)", name)}
    return TRANSLATIONS[name.split()[0]](case, **settings)


@pytest.mark.parametrize(("index", "name"), NAMES, ids=lambda value: str(value))
def test_advantages_and_returns_equal_those_of_verl(index: int, name: str) -> None:
    case, golden = Case(CASES[index]), CASES[index]["advantages"][name]
    advantage_T, return_T = translated(name, case)
    close_fp64(advantage_T, case.golden(golden["advantages"]), rtol=1e-6, atol=1e-6)
    close_fp64(return_T, case.golden(golden["returns"]), rtol=1e-6, atol=1e-6)


def test_nothing_is_left_out_of_the_comparison() -> None:
    assert {name.split()[0] for _, name in NAMES} == set(TRANSLATIONS)
    # pass@k is refused by verl in the two seeds that have a group of one.
    assert len(NAMES) == 16 * 4 - 2 * 2


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("grpo norm_by_std=True", group_normalised),
        ("grpo norm_by_std=False", group_centred),
        ("rloo", leave_one_out),
        ("rloo_vectorized", leave_one_out),
        ("gpg", gpg),
        (
            "opo",
            lambda reward_N, *groups: length_weighted_centred(reward_N, torch.ones_like(reward_N), *groups),
        ),
    ],
)
def test_a_group_of_one_has_advantage_0_where_verl_gives_the_reward(
    name: str, function: Callable[..., Tensor]
) -> None:
    alone = 0
    for case in map(Case, CASES):
        lone_T = case.alone_N[case.segment_T]
        alone += int(case.alone_N.sum())
        golden = CASES[case.rows.seed]["advantages"][name]["advantages"]
        verl_T = case.golden(golden)[lone_T]
        raw_T = case.reward_N[case.segment_T][lone_T]
        close_fp64(verl_T, 0 * raw_T if name == "rloo_vectorized" else raw_T, rtol=1e-5)
        assert function(*case.groups)[case.alone_N].eq(0).all()
    assert alone == 2


def test_verl_whitens_the_raw_reward_of_a_group_of_one() -> None:
    for case in (Case(CASES[1]), Case(CASES[3])):
        ours_T = reinforce_plus_plus_baseline(*case.groups, case.length_N)
        golden = CASES[case.rows.seed]["advantages"]["reinforce_plus_plus_baseline"]["advantages"]
        lone_T = case.alone_N[case.segment_T]
        # The mean over tokens stands where a trajectory without an advantage stands.
        centred_T = group_centred(*case.groups)[case.segment_T]
        close_fp64(
            ours_T[lone_T], (-centred_T.mean() / (centred_T.var() + 1e-8).sqrt()).expand(int(lone_T.sum()))
        )
        assert (ours_T - case.golden(golden)).abs().min() > 1e-3


def test_the_token_baseline_differs_from_verl_where_tools_wrote() -> None:
    num_early = num_lone = 0
    for case in map(Case, CASES):
        golden = CASES[case.rows.seed]["advantages"]["optimal_token_baseline"]["advantages"]
        ours_T, verl_T, return_T = (
            case.token_baseline(case.position_T),
            case.golden(golden),
            case.returns(1.0),
        )
        early_T, lone_T = case.verl_tail()
        differs_T = (ours_T - verl_T).abs() > 1e-6
        assert not (differs_T & ~early_T & ~lone_T).any()
        assert case.rows.seed % 3 == 0 or not differs_T.any()
        close_fp64(verl_T[early_T], return_T[early_T], rtol=1e-6)
        close_fp64(verl_T[lone_T], 0 * return_T[lone_T], atol=1e-6)
        close_fp64(ours_T[lone_T], return_T[lone_T])
        num_early += int((differs_T & early_T).sum())
        num_lone += int((differs_T & lone_T).sum())
    assert (num_early, num_lone) == (4, 5)
