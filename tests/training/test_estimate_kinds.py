"""From the words of a recipe to advantages: every number that is written reaches its function."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest
import torch

from millrace.algorithms import advantages
from millrace.config import method_sections as words
from millrace.run.build_algorithm import build_estimator
from millrace.training import estimate
from millrace.training.estimate import Estimator, Scored
from tests.close import close_fp32
from tests.run.pieces import recipe
from tests.training.pieces import random_batch


def kinds_of(union) -> set[str]:
    return {get_args(one.model_fields["kind"].annotation)[0] for one in get_args(get_args(union)[0])}


def estimator(setting: dict, **sections) -> Estimator:
    """Of a recipe with this advantage, and what it needs besides."""
    more = {"critic": {}} if setting.get("kind") in words.VALUED else {}
    more |= {"policy": {"proximal": "recompute"}} if setting.get("kind") == "v_trace" else {}
    config = recipe(advantage=setting, **more | sections)
    return build_estimator(config.advantage, config.rewards, "loop")


GROUPS = [
    ({}, advantages.group_normalised),
    ({"epsilon": 0.5}, partial(advantages.group_normalised, epsilon=0.5)),
    ({"lone_reward": True}, partial(advantages.group_normalised, lone_reward=True)),
    ({"divide_by_std": False}, advantages.group_centred),
    ({"baseline": "others", "divide_by_std": False}, advantages.leave_one_out),
    ({"baseline": "others", "epsilon": 0.5}, partial(advantages.leave_one_out_normalised, epsilon=0.5)),
    ({"kind": "leave_one_out"}, advantages.leave_one_out),
    ({"kind": "gpg"}, advantages.gpg),
    ({"kind": "pass_at_k"}, advantages.pass_at_k),
    ({"kind": "pass_at_k", "divide_by_std": False}, partial(advantages.pass_at_k, divide_by_std=False)),
]


def scored() -> Scored:
    """Groups of three, three and one."""
    reward_N = torch.tensor([1.0, 0.0, 0.25, 2.0, 3.0, 0.5, 4.0], dtype=torch.float64)
    return Scored(random_batch(0), reward_N, torch.tensor([0, 0, 0, 1, 1, 1, 2]), 3)


@pytest.mark.parametrize(("setting", "function"), GROUPS, ids=[str(case[0]) for case in GROUPS])
def test_advantages_of_groups_are_the_function_of_their_name(setting, function):
    one = scored()
    found_N, return_N = estimator(setting)(one)
    expected_N = function(one.reward_N, one.group_N, 3)
    close_fp32(found_N, expected_N[one.chosen.segment_N])
    assert return_N is None


BY_TOKEN = {"credit": "episode", "turn_discount": 1.0}
SCANNED = [
    ({"kind": "reinforce_plus_plus", "gamma": 0.9}, estimate.reinforce_plus_plus, {"gamma": 0.9}),
    ({"kind": "greedy_baseline"}, estimate.greedy_baseline, {}),
    ({"kind": "token_baseline"}, estimate.token_baseline, {"align": "position"}),
    ({"kind": "token_baseline", "align": "action"}, estimate.token_baseline, {"align": "action"}),
    ({"kind": "returns", "gamma": 0.8}, estimate.discounted, {"gamma": 0.8}),
    ({"kind": "teacher", "path": "x", "gamma": 0.7}, estimate.teacher, {"gamma": 0.7}),
    (
        {"kind": "gae", "gamma": 0.9, "lam": 0.8, "critic_lam": 0.7, "whiten": False},
        estimate.generalised,
        {"gamma": 0.9, "lam": 0.8, "length_adaptive": None, "critic_lam": 0.7, "whiten": False} | BY_TOKEN,
    ),
    (
        {"kind": "gae", "length_adaptive": 0.3},
        estimate.generalised,
        {"gamma": 1.0, "lam": 1.0, "length_adaptive": 0.3, "critic_lam": None, "whiten": True} | BY_TOKEN,
    ),
    (
        {"kind": "n_step", "gamma": 0.9, "num_steps": 3, "whiten": False},
        estimate.n_step,
        {"gamma": 0.9, "num_steps": 3, "whiten": False},
    ),
    (
        {"kind": "v_trace", "gamma": 0.9, "lam": 0.8, "max_rho": 2.0, "max_c": 1.5, "whiten": False},
        estimate.v_trace,
        {"gamma": 0.9, "lam": 0.8, "max_rho": 2.0, "max_c": 1.5, "whiten": False},
    ),
]


@pytest.mark.parametrize(("setting", "function", "settings"), SCANNED, ids=[str(case[0]) for case in SCANNED])
def test_advantages_over_time_take_the_recipes_numbers_and_its_scan(monkeypatch, setting, function, settings):
    assert asked(monkeypatch, setting, function.__name__) == settings | {"scan": "loop"}


def asked(monkeypatch, setting: dict, name: str, **sections) -> dict:
    """The settings with which the estimator of this name is called, once, for the batch that is given."""
    calls, one = [], scored()
    monkeypatch.setattr(estimate, name, lambda *given, **settings: calls.append((given, settings)) or name)
    assert estimator(setting, **sections)(one) == name
    ((given, settings),) = calls
    assert given == (one,)
    return settings


def test_every_kind_of_advantage_is_compared(monkeypatch):
    others = {"length_weighted", "group_decoupled", "reinforce_plus_plus_baseline"}
    rewards = [{"kind": "exact", "weight": 0.5}, {"kind": "gsm8k", "weight": -2.0}]
    expected = {"weights": [0.5, -2.0]}
    assert asked(monkeypatch, {"kind": "group_decoupled"}, "group_decoupled", rewards=rewards) == expected
    for kind in others - {"group_decoupled"}:
        assert asked(monkeypatch, {"kind": kind}, kind) == {}
    found = {setting.get("kind", "group") for setting, _ in GROUPS} | {s["kind"] for s, _, _ in SCANNED}
    plugin = {"function"}  # in test_tensor_plugins.py
    assert found | others | plugin == kinds_of(words.AdvantageConfig)
    # Those that use a scan are those that take its setting.
    assert {s["kind"] for s, _, _ in SCANNED} == set(words.SCANNED)


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="there is no advantage 'best'"):
        estimate.estimate_advantages(scored(), kind="best", scan="auto")
