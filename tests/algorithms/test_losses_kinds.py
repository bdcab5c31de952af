"""From the words of a recipe to losses and selections: every number that is written reaches its function."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from millrace.algorithms import losses
from millrace.algorithms.losses import LossTerms, PolicyLoss, token_selection
from millrace.config import method_sections as words
from tests.close import close_fp32
from tests.training.pieces import full_batch


def validated(setting: dict) -> dict[str, Any]:
    """A section of the loss with its defaults."""
    return TypeAdapter(words.LossConfig).validate_python(setting).model_dump()


def policy_loss(settings: dict[str, Any]) -> PolicyLoss:
    return PolicyLoss(settings["kind"], {key: value for key, value in settings.items() if key != "kind"})


def terms(seed: int = 0) -> LossTerms:
    batch = full_batch(seed)
    mask_T, generator = batch.action_mask_T, torch.Generator().manual_seed(seed)
    start_N = batch.proximal_logprob_T[mask_T]
    return LossTerms(
        start_N + 0.4 * torch.randn(len(start_N), generator=generator),
        start_N,
        batch.advantage_T[mask_T],
        batch.segment_T[mask_T],
        batch.num_segments,
        batch.selected_T[mask_T],
    )


def by_token(function, **settings):
    return lambda t: function(t.policy_N, t.start_N, t.advantage_N, **settings)


def by_sequence(function, **settings):
    return lambda t: function(t.policy_N, t.start_N, t.advantage_N, t.segment_N, t.num_segments, **settings)


def mean_clipped(t: LossTerms) -> Tensor:
    mean_N = losses.sequence_log_ratio(t.policy_N, t.start_N, t.segment_N, t.num_segments)
    return losses.clipped(mean_N, torch.zeros_like(mean_N), t.advantage_N, low=0.1, high=0.3)


BAND = {"low": 0.1, "high": 0.3}
CLIPPED = {"clip_low": 0.1, "clip_high": 0.3}
LOSSES = [
    (
        {"kind": "ppo_clip", **CLIPPED, "dual_clip": 1.4},
        by_token(losses.ppo_clip, **BAND, dual=1.4),
        by_token(losses.clipped, **BAND),
    ),
    ({"kind": "reinforce"}, lambda t: losses.reinforce(t.policy_N, t.advantage_N), None),
    ({"kind": "gspo", **CLIPPED}, by_sequence(losses.gspo, **BAND), mean_clipped),
    (
        {"kind": "gspo", **CLIPPED, "gradient": "token"},
        by_sequence(losses.gspo_token, **BAND),
        mean_clipped,
    ),
    ({"kind": "gmpo", **CLIPPED}, by_sequence(losses.gmpo, **BAND), None),
    ({"kind": "cispo", **CLIPPED}, by_token(losses.cispo, **BAND), None),
    (
        {"kind": "sapo", "positive": 0.7, "negative": 2.0},
        by_token(losses.sapo, positive=0.7, negative=2.0),
        None,
    ),
    (
        {"kind": "dppo", "clip_low": 0.01, "clip_high": 0.03, "cap": 1.1},
        by_token(losses.dppo_tv, low=0.01, high=0.03, cap=1.1),
        by_token(losses.dppo_tv_clipped, low=0.01, high=0.03),
    ),
    (
        {"kind": "dppo", "divergence": "kl", "clip_low": 1e-3, "clip_high": 3e-3, "cap": 1.1},
        by_token(losses.dppo_kl, low=1e-3, high=3e-3, cap=1.1),
        by_token(losses.dppo_kl_clipped, low=1e-3, high=3e-3),
    ),
    ({"kind": "dro", "beta": 0.7}, by_token(losses.dro, beta=0.7), None),
    ({"kind": "topr"}, by_sequence(losses.topr), None),
    ({"kind": "clip_cov", **CLIPPED}, by_token(losses.ppo_clip, **BAND), by_token(losses.clipped, **BAND)),
    (
        {"kind": "kl_cov", "coefficient": 0.6},
        lambda t: losses.kl_cov(t.policy_N, t.start_N, t.advantage_N, t.selected_N, coefficient=0.6),
        None,
    ),
]


@pytest.mark.slow_beyond(11)
@pytest.mark.parametrize(("setting", "function", "outside"), LOSSES, ids=[str(case[0]) for case in LOSSES])
def test_a_loss_is_the_function_of_its_name_with_its_own_numbers(setting, function, outside):
    settings = validated(setting)
    for seed in range(3):
        given = terms(seed)
        given.policy_N.requires_grad_()
        loss_N, outside_N = policy_loss(settings)(given)
        expected_N = function(given)
        close_fp32(loss_N, expected_N)
        weight_N = torch.linspace(-1, 2, len(loss_N))
        slopes = [
            torch.autograd.grad((x_N * weight_N).sum(), given.policy_N)[0] for x_N in (loss_N, expected_N)
        ]
        close_fp32(*slopes)
        assert (outside_N is None) == (outside is None)
        if outside is not None:
            assert outside_N.tolist() == outside(given).tolist()
            assert 0 < int(outside_N.sum()) < len(outside_N)


def test_every_kind_of_loss_is_compared():
    plugin = {"function"}  # in tests/training/test_tensor_plugins.py
    assert {setting["kind"] for setting, _, _ in LOSSES} | plugin == kinds_of(words.LossConfig)


def test_dual_clipping_is_off_unless_it_is_asked_for():
    far = LossTerms(
        torch.tensor([1.0]),
        torch.tensor([-1.0]),
        torch.tensor([-1.0]),
        torch.tensor([0]),
        1,
        None,
    )
    assert policy_loss(validated({"kind": "ppo_clip", "dual_clip": 3.0}))(far)[0].item() == 3.0
    close_fp32(policy_loss(validated({"kind": "ppo_clip"}))(far)[0], [math.e**2])


def kinds_of(union) -> set[str]:
    return {get_args(one.model_fields["kind"].annotation)[0] for one in get_args(get_args(union)[0])}


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="there is no policy loss 'clip'"):
        PolicyLoss("clip", {})(terms())
    with pytest.raises(ValueError, match="kind is ppo_clip; it must be clip_cov or kl_cov"):
        given = terms()
        token_selection(given.policy_N, given.start_N, given.advantage_N, 0, kind="ppo_clip")


def test_tokens_are_selected_by_the_numbers_of_the_recipe():
    given = terms(1)
    columns = given.policy_N, given.start_N, given.advantage_N
    covariance_T = losses.covariance(given.policy_N, given.advantage_N)
    half = token_selection(*columns, 0, **validated({"kind": "kl_cov", "fraction": 0.5}))
    assert half.tolist() == losses.kl_cov_selection(covariance_T, fraction=0.5).tolist()
    band = {"covariance_low": -0.3, "covariance_high": 0.4}
    setting = validated({"kind": "clip_cov", **CLIPPED, "fraction": 0.2, **band})
    outside_T = losses.clipped(*columns, **BAND)
    for seed in (3, 4):
        expected = losses.clip_cov_selection(
            *(covariance_T, outside_T),
            **{"fraction": 0.2, "low": -0.3, "high": 0.4},
            generator=torch.Generator().manual_seed(seed),
        )
        found = token_selection(*columns, seed, **setting)
        assert found.tolist() == expected.tolist()
        assert 0 < int(found.sum()) < len(found)
