"""Losses and advantages of a user's own: what they change, and results that cannot be used."""

from __future__ import annotations

import math

import pytest
import torch

from millrace.algorithms.losses import LossTerms
from millrace.config.recipe import ConfigError
from millrace.data.plugin import PluginError
from millrace.training.tensor_plugins import AdvantagePlugin, CorrectionPlugin, LossPlugin
from tests.close import close_fp32
from tests.run.pieces import (
    before_update,
    group_of,
    make_train_step,
    per_segment,
    recipe,
    run,
    scored,
    weight_bits,
)

HERE = "tests.plugin_functions"


def terms(**changes) -> LossTerms:
    given = {
        "policy_N": torch.tensor([-1.0, -2.0, -0.5], requires_grad=True),
        "start_N": torch.tensor([-1.5, -2.0, -1.0]),
        "advantage_N": torch.tensor([1.0, -1.0, 2.0]),
        "segment_N": torch.tensor([0, 0, 1]),
        "num_segments": 2,
        "selected_N": None,
    }
    return LossTerms(**given | changes)


def with_loss(name: str, **options):
    return recipe(policy={"loss": {"kind": "function", "function": f"{HERE}:{name}", "options": options}})


def with_advantage(name: str):
    return recipe(advantage={"kind": "function", "function": f"{HERE}:{name}"})


def test_a_loss_is_that_of_the_function_and_its_options():
    given = terms()
    loss_T, outside = LossPlugin(f"{HERE}:smooth", {"slope": 2.0})(given)
    close_fp32(loss_T.detach(), [-math.tanh(1.0) / 2, 0.0, -math.tanh(1.0)])
    assert outside is None
    loss_T.sum().backward()
    close_fp32(given.policy_N.grad, [-1 / math.cosh(1.0) ** 2, 1.0, -2 / math.cosh(1.0) ** 2])
    assert LossPlugin(f"{HERE}:by_segment", {})(given)[0].tolist() == [0.0, 0.0, 0.5]


def test_a_function_of_the_library_is_a_plug_in():
    given = terms()
    loss_T, _ = LossPlugin("millrace.algorithms.losses:reinforce", {})(given)
    assert loss_T.tolist() == [1.0, -2.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "raised ZeroDivisionError: by hand"),
        ("number", "returned a float; return a tensor of shape [3], one for each token"),
        ("mean_loss", "returned a tensor of shape []; return one of shape [3], one for each token"),
        ("whole_numbers", "returned a tensor of torch.int64; return floating-point numbers (.float())"),
        ("without_gradient", "returned a loss without a gradient; compute it from policy_logprob_T"),
        ("not_a_number", "returned nan at place 1 of 3, from finite inputs; bound what it divides by"),
    ],
)
def test_a_result_that_is_no_loss_is_refused(name, message):
    with pytest.raises(PluginError) as caught:
        LossPlugin(f"{HERE}:{name}", {})(terms())
    assert str(caught.value).startswith(f"policy.loss.function {HERE}:{name} {message}")


def test_a_number_that_is_not_finite_before_the_loss_is_not_its_fault():
    loss_T, _ = LossPlugin(f"{HERE}:smooth", {})(terms(advantage_N=torch.tensor([1.0, math.nan, 1.0])))
    assert loss_T.isnan().tolist() == [False, True, False]


def test_a_loss_moves_the_policy_by_its_own_gradient():
    moved = []
    for config in (recipe(), with_loss("smooth"), with_loss("smooth", slope=3.0)):
        one = make_train_step(config)
        run(one, scored([1.0, 0.0], [4.0, 0.0]))
        moved.append(weight_bits(one.trainer))
    # The sampler's log-probabilities differ from the policy's here, so the losses do.
    assert not torch.equal(moved[0], moved[1]) and not torch.equal(moved[1], moved[2])


def test_an_advantage_is_one_of_each_trajectory_or_of_each_token():
    batch = before_update(
        make_train_step(with_advantage("median")), *scored([1.0, 0.0, 5.0], [2.0, 2.0, 8.0])
    )
    assert per_segment(batch, "advantage_T") == [[0.0], [-1.0], [4.0], [0.0] * 2, [0.0] * 2, [6.0] * 2]
    groups = group_of(((3, 4, 5), 2.0), ((6,), 1.0))
    batch = before_update(make_train_step(with_advantage("later")), groups)
    assert per_segment(batch, "advantage_T") == [[0.0, 2.0, 4.0], [0.0]]


@pytest.mark.slow_beyond(5)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "raised ZeroDivisionError: by hand"),
        (
            "number",
            "returned a float; return a tensor of shape [2] or [4], one for each trajectory, or one for",
        ),
        ("too_few", "returned a tensor of shape [1]; return one of shape [2] or [4]"),
        ("whole_numbers", "returned a tensor of torch.int64"),
        ("with_graph", "returned a tensor with a graph, and an advantage has no gradient; detach it"),
        ("divided", "returned inf at place 0 of 2, from finite inputs"),
    ],
)
def test_a_result_that_is_no_advantage_is_refused(name, message):
    one = make_train_step(with_advantage(name))
    with pytest.raises(PluginError) as caught:
        before_update(one, group_of(((3, 4, 5), 2.0), ((6,), 1.0)))
    assert str(caught.value).startswith(f"advantage.function {HERE}:{name} {message}")


def with_correction(name: str, proximal: str = "recompute", **options):
    correction = {"kind": "function", "function": f"{HERE}:{name}", "options": options}
    return recipe(policy={"proximal": proximal, "correction": correction})


SEGMENTS = torch.tensor([0, 0, 1])


def corrected(name: str, **options) -> torch.Tensor:
    proximal_N, sampler_N = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.5, -0.4])
    return CorrectionPlugin(f"{HERE}:{name}", options)(proximal_N, sampler_N, SEGMENTS, 2)


def test_a_correction_is_that_of_the_function_and_its_options():
    close_fp32(corrected("halved"), [math.exp(0.5), 0.5, 0.5])
    close_fp32(corrected("halved", floor=0.0), [math.exp(0.5), 0.5 * math.exp(-0.5), 0.5 * math.exp(-0.1)])
    close_fp32(corrected("by_answer"), [1.0, 1.0, 0.5])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("proximal", ["recompute", "sampler"])
def test_a_correction_changes_what_the_policy_learns(proximal):
    moved = []
    configs = [recipe(policy={"proximal": proximal}), with_correction("by_answer", proximal)]
    for config in (*configs, with_correction("halved", proximal, floor=0.0)):
        one = make_train_step(config)
        record = run(one, scored([1.0, 0.0], [4.0, 0.0])).record
        moved.append(weight_bits(one.trainer))
    assert not torch.equal(moved[0], moved[1]) and not torch.equal(moved[1], moved[2])
    assert record["policy/correction"] != 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "raised ZeroDivisionError: by hand"),
        ("number", "returned a float; return a tensor of shape [3], one for each token"),
        ("learned", "returned a tensor with a graph, and a correction has no gradient; detach it"),
        ("logarithm", "returned nan at place 0 of 3, from finite inputs; bound what it divides by"),
    ],
)
def test_a_result_that_is_no_correction_is_refused(name, message):
    with pytest.raises(PluginError) as caught:
        corrected(name)
    assert str(caught.value).startswith(f"policy.correction.function {HERE}:{name} {message}")


@pytest.mark.parametrize("section", ["policy.loss", "advantage"])
def test_a_reference_of_another_form_is_refused(section):
    tree = {"kind": "function", "function": "smooth"}
    with pytest.raises(
        ConfigError, match="'smooth' is not of the form module:function or path/to/file.py:funct"
    ):
        recipe(**({"advantage": tree} if section == "advantage" else {"policy": {"loss": tree}}))


def test_a_loss_is_loaded_with_its_reference():
    assert isinstance(make_train_step(with_advantage("median")).method.estimator, AdvantagePlugin)
    assert not make_train_step(with_loss("smooth")).method.multiple
