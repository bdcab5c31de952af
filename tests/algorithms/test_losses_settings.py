"""Settings out of range and tensors of different shapes, refused in one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import (
    cispo,
    clip_cov_selection,
    clipped,
    covariance,
    dppo_kl,
    dppo_kl_clipped,
    dppo_tv,
    dppo_tv_clipped,
    dro,
    kl_cov,
    kl_cov_selection,
    log_ratio,
    ppo_clip,
    reinforce,
    sapo,
    value_clipped,
    value_loss,
)
from tests.close import close_fp32

ONE = torch.ones(1)
TRUE = ONE > 0
CLIP_COV: dict[str, Any] = {"generator": torch.Generator()}
REFUSED: list[tuple[Callable[..., Tensor], dict[str, Any], str]] = [
    (ppo_clip, {"low": 1.0, "high": 0.2}, "low is 1.0; it must be at least 0 and below 1"),
    (ppo_clip, {"low": -0.1, "high": 0.2}, "low is -0.1; it must be at least 0 and below 1"),
    (ppo_clip, {"low": math.nan, "high": 0.2}, "low is nan; it must be at least 0 and below 1"),
    (ppo_clip, {"low": 0.2, "high": 0.0}, "high is 0.0; it must be above 0"),
    (ppo_clip, {"low": 0.2, "high": 0.2, "dual": 1.0}, "dual is 1.0; it must be above 1"),
    (clipped, {"low": 1.5, "high": 0.2}, "low is 1.5; it must be at least 0 and below 1"),
    (clipped, {"low": 0.5, "high": -1.0}, "high is -1.0; it must be above 0"),
    (cispo, {"low": 1.01, "high": 0.2}, "low is 1.01; it must be between 0 and 1"),
    (cispo, {"low": -0.01, "high": 0.2}, "low is -0.01; it must be between 0 and 1"),
    (cispo, {"low": 0.2, "high": 0.0}, "high is 0.0; it must be above 0"),
    (sapo, {"positive": 0.0, "negative": 1.0}, "positive is 0.0; it must be above 0"),
    (sapo, {"positive": 1.0, "negative": 0.0}, "negative is 0.0; it must be above 0"),
    (dppo_tv, {"low": -0.1, "high": 0.2, "cap": 3.0}, "low is -0.1; it must be at least 0"),
    (dppo_tv, {"low": 0.1, "high": 0.0, "cap": 3.0}, "high is 0.0; it must be above 0"),
    (dppo_kl, {"low": 0.1, "high": 0.2, "cap": 0.0}, "cap is 0.0; it must be above 0"),
    (dro, {"beta": 0.0}, "beta is 0.0; it must be above 0"),
]


@pytest.mark.parametrize(("function", "settings", "sentence"), REFUSED)
def test_a_setting_out_of_range_is_refused(
    function: Callable[..., Tensor], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        function(ONE, ONE, ONE, **settings)


REFUSED_ELSEWHERE: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: kl_cov(ONE, ONE, ONE, TRUE, coefficient=-0.1), "coefficient is -0.1; it must be at least 0"),
    (lambda: value_loss(ONE, ONE, ONE, clip=0.0), "clip is 0.0; it must be above 0"),
    (lambda: value_clipped(ONE, ONE, ONE, clip=-1.0), "clip is -1.0; it must be above 0"),
    (
        lambda: value_loss(ONE, ONE, ONE, clip=None, coefficient=0.0),
        "coefficient is 0.0; it must be above 0",
    ),
    (lambda: kl_cov_selection(ONE, fraction=0.0), "fraction is 0.0; it must be above 0 and at most 1"),
    (lambda: kl_cov_selection(ONE, fraction=1.5), "fraction is 1.5; it must be above 0 and at most 1"),
    (
        lambda: clip_cov_selection(ONE, TRUE, fraction=0.5, low=2.0, high=2.0, **CLIP_COV),
        "low is 2.0; it must be below high, which is 2.0",
    ),
    (
        lambda: clip_cov_selection(ONE, TRUE, fraction=0.0, low=1.0, high=2.0, **CLIP_COV),
        "fraction is 0.0; it must be above 0 and at most 1",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED_ELSEWHERE)
def test_other_settings_out_of_range_are_refused(call: Callable[[], Tensor], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()


def test_settings_at_the_edge_are_taken() -> None:
    low_T = torch.tensor([math.log(0.5)])
    zero, two = torch.zeros(1), torch.tensor([2.0])
    close_fp32(ppo_clip(low_T, zero, -two, low=0.0, high=0.1), [2.0])
    close_fp32(clipped(low_T, zero, -two, low=0.0, high=0.1), [True])
    close_fp32(cispo(low_T, zero, two, low=0.0, high=0.1), [2 * math.log(2)])
    close_fp32(cispo(low_T, zero, two, low=1.0, high=0.1), [math.log(2)])
    close_fp32(dppo_tv(low_T, zero, -two, low=0.0, high=0.1, cap=0.4), [0.0])
    close_fp32(dppo_tv(low_T, zero, two, low=0.0, high=0.1, cap=0.4), [0.8 * math.log(2)])


SHAPES: list[tuple[Callable[..., Tensor], list[str], dict[str, Any]]] = [
    (log_ratio, ["policy_logprob_T", "sampler_logprob_T"], {}),
    (reinforce, ["policy_logprob_T", "advantage_T"], {}),
    *(
        (function, ["policy_logprob_T", "sampler_logprob_T", "advantage_T"], settings)
        for function, settings in [
            (ppo_clip, {"low": 0.2, "high": 0.2}),
            (clipped, {"low": 0.2, "high": 0.2}),
            (cispo, {"low": 0.2, "high": 0.2}),
            (sapo, {"positive": 1.0, "negative": 1.0}),
            (dppo_tv, {"low": 0.2, "high": 0.2, "cap": 2.0}),
            (dppo_kl, {"low": 0.2, "high": 0.2, "cap": 2.0}),
            (dppo_tv_clipped, {"low": 0.2, "high": 0.2}),
            (dppo_kl_clipped, {"low": 0.2, "high": 0.2}),
            (dro, {"beta": 1.0}),
        ]
    ),
    (covariance, ["policy_logprob_T", "advantage_T"], {}),
    (
        clip_cov_selection,
        ["covariance_T", "clipped_T"],
        {"fraction": 0.5, "low": 1.0, "high": 2.0, **CLIP_COV},
    ),
    (
        kl_cov,
        ["policy_logprob_T", "sampler_logprob_T", "advantage_T", "selected_T"],
        {"coefficient": 1.0},
    ),
    (value_loss, ["value_T", "old_value_T", "return_T"], {"clip": 0.5}),
    (value_loss, ["value_T", "old_value_T", "return_T"], {"clip": None}),
    (value_clipped, ["value_T", "old_value_T", "return_T"], {"clip": 0.5}),
]


@pytest.mark.parametrize(("function", "names", "settings"), SHAPES)
def test_tensors_of_different_shapes_are_refused_by_name(
    function: Callable[..., Tensor], names: list[str], settings: dict[str, Any]
) -> None:
    for place in range(1, len(names)):
        tensors = [torch.ones(1 if i == place else 3) for i in range(len(names))]
        with pytest.raises(ValueError, match=rf"^{names[place]} has shape \(1,\), but {names[0]} \(3,\)$"):
            function(*tensors, **settings)
