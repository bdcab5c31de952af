"""Groups that dynamic sampling replaces: by equal numbers, or by a user's function."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.config.recipe import ConfigError
from millrace.data.plugin import PluginError
from millrace.errors import SetupError
from millrace.run.build_algorithm import build_group_filter
from millrace.types import Group, Outcome
from tests.rollout.manual import Manual, rollouts_over
from tests.run.pieces import group_of, recipe

HERE = "tests.plugin_functions"


def group(*answers, numbers=()) -> Group:
    """Answers (tokens, reward), with a number `right` beside their scores."""
    made = group_of(*answers)
    if not numbers:
        return made
    scored = [
        t.scored(replace(t.outcome, parts={"exact": number}, extras={"math/right": number, "math/why": "x"}))
        for t, number in zip(made.trajectories, numbers, strict=True)
    ]
    return Group(made.prompt, tuple(scored))


ALIKE = group(((1, 2), 1.0), ((3, 4), 1.0))
LONGER = group(((1, 2), 1.0), ((3, 4, 5), 1.0))
RIGHT = group(((1, 2), 0.3), ((3, 4), 0.4), numbers=(1.0, 1.0))
MIXED = group(((1, 2), 0.3), ((3, 4), 0.3), numbers=(1.0, 0.0))


@pytest.mark.parametrize(
    ("rule", "left_out"),
    [
        ("reward", [True, True, False, True]),
        ("length", [True, False, True, True]),
        (f"{HERE}:short", [False, True, False, False]),
    ],
)
def test_a_rule_leaves_out_groups(rule, left_out):
    found = build_group_filter(rule)
    assert [found(each) for each in (ALIKE, LONGER, RIGHT, MIXED)] == left_out


@pytest.mark.parametrize("rule", ["exact", "right", "math/right"])
def test_a_rule_is_the_name_of_a_reward_or_of_a_number_beside_it(rule):
    found = build_group_filter(rule)
    assert [found(each) for each in (RIGHT, MIXED)] == [True, False]


def test_answers_whose_reward_failed_do_not_count():
    failed = MIXED.trajectories[1].scored(Outcome.failure("it hung"))
    assert build_group_filter("right")(Group(MIXED.prompt, (MIXED.trajectories[0], failed)))
    assert build_group_filter("right")(Group(MIXED.prompt, (failed, failed)))


def test_a_number_that_no_answer_has_is_named_with_those_there_are():
    with pytest.raises(PluginError) as caught:
        build_group_filter("wrong")(MIXED)
    assert str(caught.value) == (
        "rollout.group_filter is wrong, and no answer to prompt train:0 has such a number; there are: exact, "
        "length, math/right, reward"
    )


def test_a_function_that_cannot_be_used_is_named():
    with pytest.raises(SetupError, match="rollout.group_filter gone:f: there is no module gone"):
        build_group_filter("gone:f")
    with pytest.raises(
        PluginError, match=r":maybe returned a int for prompt train:0; return True to keep the group"
    ):
        build_group_filter(f"{HERE}:maybe")(ALIKE)
    with pytest.raises(PluginError, match=r":raising raised ZeroDivisionError"):
        build_group_filter("tests.rollout.test_group_filter:raising")(ALIKE)


def raising(rewards):
    raise ZeroDivisionError


def test_the_manager_asks_it_of_each_group():
    asked = []

    def leaves_out(group: Group) -> bool:
        asked.append((group.prompt.id, len(group.trajectories)))
        return False

    rollouts, *_ = rollouts_over(Manual(), group_filter=leaves_out)
    assert asked == [] and rollouts is not None


def test_without_replacement_a_filter_is_refused():
    message = "rollout.group_filter has no effect with rollout.dynamic_sampling_rounds 0"
    with pytest.raises(ConfigError, match=message):
        recipe(rollout={"group_filter": "length"})
    kept = recipe(rollout={"group_filter": "length", "dynamic_sampling_rounds": 1}).rollout
    assert kept.group_filter == "length"
