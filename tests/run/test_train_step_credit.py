"""Credit over turns in a training step: rewards of turns, penalties, the bias meter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millrace.algorithms.advantages import group_centred, group_normalised
from millrace.algorithms.credit import turn_advantages
from millrace.training.estimate import turns_of
from millrace.types import Group, Outcome, Prompt, Trajectory, Turn
from tests.close import close_fp32, close_fp64
from tests.run.pieces import CENTRED, before_update, make_train_step, per_segment, recipe, run, scored
from tests.training.pieces import completion

OTHERS = {"kind": "leave_one_out"}


def episode(*turns: tuple[tuple[int, ...], float, str], outcome: float) -> Trajectory:
    made = [
        Turn((5, 6), completion(*answer, logprobs=[-2.0] * len(answer)), reward, state)
        for answer, reward, state in turns
    ]
    return Trajectory(tuple(made), Outcome("score", outcome))


# Two episodes of two turns and of one; the first turn of the first has two tokens.
FIRST = episode(((7, 8), 0.25, "start"), ((9,), 0.5, "end"), outcome=1.0)
SECOND = episode(((10,), 0.125, "start"), outcome=0.0)
GROUP = Group(Prompt("train:0", (5, 6), "text"), (FIRST, SECOND))


def advantages(group: Group, advantage: dict, **sections) -> list[list[float]]:
    return per_segment(
        before_update(make_train_step(recipe(advantage=advantage, **sections)), group), "advantage_T"
    )


def test_turns_of_trajectories():
    turns = turns_of([FIRST, SECOND])
    assert turns.reward_U.tolist() == [0.25, 0.5, 0.125]
    assert turns.state_U.tolist() == [0, 1, 0]
    assert (turns.length_U.tolist(), turns.count_N.tolist()) == ([2, 1, 1], [2, 1])
    nameless = replace(SECOND, turns=tuple(replace(turn, state="") for turn in SECOND.turns))
    assert turns_of([nameless, FIRST]).state_U.tolist() == [-1, 0, 1]
    assert not turns.gain_U.any()


def test_progress_that_is_not_known_counts_for_the_next_turn_that_has_it():
    made = [replace(FIRST.turns[0], progress=value) for value in (None, 0.75, None, 0.5, 0.5)]
    assert turns_of([replace(FIRST, turns=tuple(made)), SECOND]).gain_U.tolist() == [0, 0.75, 0, -0.25, 0, 0]


def test_progress_moves_credit_within_an_episode():
    first = replace(FIRST, turns=(FIRST.turns[0], replace(FIRST.turns[1], progress=1.0)))
    gap = 1.75 - 0.125
    setting = OTHERS | {"credit": "progress", "state_weight": 0.5, "turn_discount": 0.0}
    found = advantages(Group(GROUP.prompt, (first, SECOND)), setting)
    assert found == [[gap - 0.25, gap - 0.25, gap + 0.25], [-gap]]


def test_every_token_of_a_turn_has_the_turns_advantage():
    gap = 1.75 - 0.125
    assert advantages(GROUP, OTHERS) == [[gap, gap, gap], [-gap]]
    assert advantages(GROUP, OTHERS | {"credit": "return_to_go"}) == [[gap, gap, gap - 0.25], [-gap]]
    discounted = advantages(GROUP, OTHERS | {"credit": "return_to_go", "turn_discount": 0.5})
    assert discounted == [[gap - 0.25, gap - 0.25, gap - 0.25], [-gap]]
    final = 1.5 - 0.125
    # The second episode has no turn before its last one, so the 0.25 is compared with nothing.
    assert advantages(GROUP, OTHERS | {"credit": "turn_index"}) == [[final] * 3, [-final]]


def test_equal_states_are_compared_by_their_names():
    both = Group(GROUP.prompt, (FIRST, episode(((11,), 0.0, "start"), ((12,), 0.25, "end"), outcome=0.0)))
    gap, among = 1.75 - 0.25, 1.5 - 0.25
    setting = OTHERS | {"credit": "anchor", "state_weight": 0.5}
    assert advantages(both, setting) == [[gap, gap, gap + among / 2], [-gap, -gap - among / 2]]


def test_group_passes_its_baseline_and_its_deviation_on():
    for setting in ({"credit": "return_to_go"}, CENTRED | {"credit": "anchor"}, {"credit": "turn_index"}):
        divided = "divide_by_std" not in setting
        from_tensors = expected(setting["credit"], divided=divided)
        close_fp32(torch.tensor(sum(advantages(GROUP, setting), [])), from_tensors)


def expected(kind: str, *, divided: bool) -> torch.Tensor:
    turns = turns_of([FIRST, SECOND])
    advantage_U = turn_advantages(
        kind,
        turns,
        *(torch.tensor([1.75, 0.125], dtype=torch.float64), torch.tensor([0, 0]), 1),
        centre=group_centred,
        compare=group_normalised if divided else group_centred,
        epsilon=1e-6 if divided else None,
        discount=1.0,
        state_weight=1.0,
    )
    return advantage_U[turns.turn_T]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    "setting",
    [
        *({"credit": credit} for credit in ("return_to_go", "turn_index", "anchor", "progress")),
        *(OTHERS | {"credit": credit} for credit in ("return_to_go", "turn_index", "anchor", "progress")),
        {"credit": "anchor", "whiten": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("penalty", [False, True])
def test_episodes_of_one_turn_are_trained_on_as_ever_bit_for_bit(setting, penalty):
    policy = {"kl": {"coefficient": 0.2, "estimator": "k1", "place": "reward"}} if penalty else {}
    plain = {name: value for name, value in setting.items() if name != "credit"}
    groups = scored([1.0, 0.1, 0.7], [4.0, 1.0, 4.0], [2.0, 2.0, 2.0])
    of_state = [
        Group(
            group.prompt,
            tuple(replace(t, turns=(replace(t.turns[0], state="start"),)) for t in group.trajectories),
        )
        for group in groups
    ]
    found, today = (
        before_update(make_train_step(recipe(advantage=one, policy=policy)), *which)
        for one, which in ((setting, of_state), (plain, groups))
    )
    assert torch.equal(found.advantage_T, today.advantage_T)
    assert torch.equal(found.reward_T, today.reward_T)
    assert found.advantage_T.any()


def test_a_critic_over_turns_of_one_turn_is_gae_with_lambda_1_bit_for_bit():
    groups = scored([1.0, 0.0], [4.0, 1.0], [2.0, 5.0])
    found, today = (
        before_update(make_train_step(recipe(advantage={"kind": "gae"} | setting, critic={})), *groups)
        for setting in ({"credit": "gae_turn", "lam": 0.3, "turn_discount": 0.5}, {"lam": 1.0})
    )
    assert torch.equal(found.advantage_T, today.advantage_T)
    assert torch.equal(found.return_T, today.return_T)


def test_a_critic_over_turns_goes_on_with_the_value_of_the_next_turn():
    setting = {"kind": "gae", "credit": "gae_turn", "lam": 0.0, "turn_discount": 0.5, "whiten": False}
    batch = before_update(make_train_step(recipe(advantage=setting, critic={})), GROUP)
    (one, two, three), (alone,) = per_segment(batch, "value_T")
    close_fp32(
        per_segment(batch, "advantage_T")[0],
        [0.25 + 0.5 * three - one, 0.25 + 0.5 * three - two, 1.5 - three],
    )
    close_fp32(per_segment(batch, "advantage_T")[1], [0.125 - alone])


def test_the_divergence_is_taken_off_the_turn_it_belongs_to():
    policy = {"kl": {"coefficient": 0.2, "estimator": "k1", "place": "reward"}}
    setting = OTHERS | {"credit": "return_to_go"}
    batch = before_update(make_train_step(recipe(advantage=setting, policy=policy)), GROUP)
    (one, two, three), (alone,) = per_segment(batch, "reward_T")
    first, _, second = per_segment(batch, "advantage_T")[0]
    close_fp32([first, second], [one + two + three - alone, three - alone])


def test_an_over_long_answer_keeps_the_reward_of_its_last_turn():
    long = episode(((7,), 0.25, ""), ((9,) * 6, 0.5, ""), outcome=1.0)
    config = recipe(advantage=CENTRED, rollout={"max_tokens": 6, "overlong_fraction": 0.6})
    batch = before_update(make_train_step(config), Group(GROUP.prompt, (long, SECOND)))
    assert per_segment(batch, "reward_T") == [[0.25, *[0.0] * 5, 0.5], [0.125]]
    assert per_segment(batch, "advantage_T")[0][0] == (0.75 - 0.125) / 2


def test_the_record_has_returns_and_the_bias_by_turn_index():
    result = run(make_train_step(recipe(advantage=OTHERS | {"credit": "turn_index"})), [GROUP])
    close_fp64(result.record["credit/turn_index_bias"], -0.25 / 2)
    close_fp64(result.record["reward/mean"], (1.75 + 0.125) / 2)
    assert [row["reward"] for row in result.rows] == [1.75, 0.125]
    unbiased = run(make_train_step(recipe(advantage=OTHERS | {"credit": "return_to_go"})), [GROUP])
    assert "credit/turn_index_bias" not in unbiased.record


def test_named_rewards_cannot_be_compared_where_turns_have_their_own():
    rewards = [{"kind": "exact", "weight": 0.5}, {"kind": "gsm8k", "weight": 2.0}]
    one = make_train_step(recipe(advantage={"kind": "group_decoupled"}, rewards=rewards))
    parts = Outcome("score", 1.0, parts={"exact": 1.0, "gsm8k": 0.0})
    made = Group(GROUP.prompt, (FIRST.scored(parts), SECOND.scored(parts)))
    with pytest.raises(ValueError, match="gave a reward for a turn"):
        before_update(one, made)
