from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import ppo_clip
from millrace.algorithms.weights import sequence_mean, token_mean
from millrace.data.batch import Batch
from millrace.data.packing import once_each, pack, pack_demonstrations, with_gradient, without_duplicates
from millrace.types import Completion, Outcome, Trajectory, Turn
from tests.close import close_fp32, close_fp64
from tests.data.pieces import weighed

Weights = Callable[[Tensor, Tensor], Tensor]
OPTIONAL = (
    *("reference_logprob_T", "proximal_logprob_T", "value_T", "return_T", "correction_T", "selected_T"),
    "expert_TLK",
)
OF_BRANCHES = ("turn_T", "episode_T")


def completion(tokens: Sequence[int], version: int) -> Completion:
    logprobs = np.array([-token / 8 for token in tokens], dtype=np.float32)
    return Completion(tuple(tokens), logprobs, np.full(len(tokens), version, np.int32), "stop", "")


def trajectory(*turns: tuple[Sequence[int], Sequence[int], int], reward: float | None = 0.0) -> Trajectory:
    """Turns as (observation, drawn tokens, version)."""
    outcome = None if reward is None else Outcome("score", reward)
    made = tuple(Turn(tuple(given), completion(drawn, version)) for given, drawn, version in turns)
    return Trajectory(made, outcome)


def test_turns_are_laid_end_to_end_with_what_the_engine_said() -> None:
    two_turns = trajectory(([1, 2], [3], 4), ([5], [6, 7], 9), reward=0.5)
    batch = pack([two_turns, trajectory(([8], [10], 2), reward=-1.0)])
    assert batch.token_T.tolist() == [1, 2, 3, 5, 6, 7, 8, 10]
    assert batch.position_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.segment_T.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert batch.action_mask_T.tolist() == [False, False, True, False, True, True, False, True]
    assert batch.sampler_logprob_T.tolist() == [0, 0, -0.375, 0, -0.75, -0.875, 0, -1.25]
    assert batch.version_T.tolist() == [-1, -1, 4, -1, 9, 9, -1, 2]
    assert batch.reward_T.tolist() == [0, 0, 0, 0, 0, 0.5, 0, -1.0]
    # Not known before they are estimated.
    assert batch.advantage_T.tolist() == batch.weight_T.tolist() == [0] * 8
    assert [getattr(batch, name) for name in (*OPTIONAL, *OF_BRANCHES)] == [None] * 9


def branched(made: Trajectory, *after: int | None) -> Trajectory:
    turns = [replace(turn, after=parent) for turn, parent in zip(made.turns, after, strict=True)]
    return replace(made, turns=tuple(turns))


def test_each_branch_is_a_segment_and_a_shared_turn_is_chosen_once() -> None:
    # Two turns behind the first one, and one of another root between them.
    made = trajectory(([1, 2], [3], 4), ([5], [6], 9), ([7], [8], 9), ([4], [9], 9), reward=0.5)
    batch = pack([branched(made, -1, 0, -1, 0), trajectory(([8], [10], 2), reward=-1.0)])
    assert batch.token_T.tolist() == [1, 2, 3, 5, 6, 7, 8, 1, 2, 3, 4, 9, 8, 10]
    assert batch.segment_T.tolist() == [0] * 5 + [1] * 2 + [2] * 5 + [3] * 2
    assert batch.position_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 0, 1]
    assert batch.action_mask_T.nonzero()[:, 0].tolist() == [2, 4, 6, 11, 13]
    assert batch.sampler_logprob_T.nonzero()[:, 0].tolist() == [2, 4, 6, 11, 13]
    assert batch.version_T.tolist() == [-1, -1, 4, -1, 9, -1, 9, -1, -1, -1, -1, 9, -1, 2]
    assert batch.reward_T.tolist() == [0.0] * 11 + [0.5, 0.0, -1.0]
    assert batch.turn_T is not None and batch.episode_T is not None
    assert batch.turn_T.tolist() == [0, 0, 0, 1, 1, 2, 2, 0, 0, 0, 3, 3, 4, 4]
    assert batch.episode_T.tolist() == batch.unit_T.tolist() == [0] * 12 + [1] * 2
    assert batch.chosen.length_B.tolist() == [4, 1]
    # The weight of an episode is 1/2, whatever its branches.
    assert sequence_mean(batch.action_mask_T, batch.unit_T)[batch.action_mask_T].tolist() == [0.125] * 4 + [
        0.5
    ]


def test_chosen_tokens_are_in_the_order_of_turns_also_where_branches_take_turns() -> None:
    made = trajectory(([1], [2, 3], 4), ([4], [5], 4), ([1], [6], 4), ([1], [7, 8], 4))
    batch = pack([branched(made, -1, -1, 0, 1)])
    assert batch.token_T.tolist() == [1, 2, 3, 1, 6, 4, 5, 1, 7, 8]
    assert batch.chosen.take(batch.token_T).tolist() == [2, 3, 5, 6, 7, 8]
    assert batch.chosen.put(torch.arange(1.0, 7)).tolist() == [0, 1, 2, 0, 4, 0, 3, 0, 5, 6]


def test_a_conversation_that_only_grows_has_no_branches() -> None:
    made = trajectory(([1], [2], 4), ([4], [5], 4))
    batch = pack([branched(made, -1, 0)])
    assert (batch.turn_T, batch.episode_T, batch.num_segments) == (None, None, 1)


def test_equal_branches_of_different_episodes_are_merged() -> None:
    made = trajectory(([1], [2], 4), ([1], [2], 4), ([3], [2], 4))
    batch = pack([branched(made, -1, -1, -1)] * 2)
    batch.weight_T = batch.action_mask_T / 6
    merged = without_duplicates(batch)
    assert merged.token_T.tolist() == [1, 2, 3, 2]
    close_fp32(merged.weight_T, torch.tensor([0, 4 / 6, 0, 2 / 6]))


def test_each_turns_reward_is_on_its_last_token_and_the_outcome_is_added_at_the_end() -> None:
    made = trajectory(([1, 2], [3, 4], 4), ([5], [6], 9), ([5, 5], [6, 7], 9), reward=0.5)
    rewarded = replace(
        made,
        turns=tuple(replace(t, reward=r) for t, r in zip(made.turns, (0.25, 0.0, 2.0), strict=True)),
    )
    batch = pack([rewarded, trajectory(([8], [10], 2), reward=-1.0)])
    assert batch.reward_T.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0, 2.5, 0, -1.0]
    # A turn without a word changes nothing, unless it is to be rewarded.
    silent = replace(rewarded, turns=(*rewarded.turns[:2], Turn((5,), completion([], 9)), rewarded.turns[2]))
    assert pack([silent]).reward_T.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0, 0, 2.5]
    paid = replace(silent, turns=tuple(replace(turn, reward=1.0) for turn in silent.turns))
    with pytest.raises(ValueError, match="^a turn without a sampled token has a reward"):
        pack([paid])


def test_a_batch_has_the_types_the_container_promises() -> None:
    batch = pack([trajectory(([1], [2], 0))])
    assert {batch.token_T.dtype, batch.position_T.dtype, batch.segment_T.dtype, batch.version_T.dtype} == {
        torch.int64
    }
    floats = (batch.sampler_logprob_T, batch.reward_T, batch.advantage_T, batch.weight_T)
    assert {column_T.dtype for column_T in floats} == {torch.float32}
    assert batch.action_mask_T.dtype == torch.bool


def failed() -> Trajectory:
    return trajectory(([1], [2], 0)).scored(Outcome.failure("the judge hung"))


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "there are no trajectories to pack"),
        ([trajectory(([1], [2], 0), reward=None)], "a trajectory without a score cannot be trained on"),
        ([trajectory(([1], [2], 0)), failed()], "a trajectory without a score cannot be trained on"),
        (
            [trajectory(([], [2], 0))],
            "a trajectory begins with a token of the policy; its first observation is empty",
        ),
    ],
)
def test_what_cannot_be_packed_is_an_error(trajectories: list[Trajectory], message: str) -> None:
    with pytest.raises(ValueError) as error:
        pack(trajectories)
    assert str(error.value) == message


def test_an_answer_that_could_not_be_read_is_packed() -> None:
    invalid = trajectory(([1], [2], 0)).scored(Outcome("invalid", -0.5, "no number"))
    assert pack([invalid]).reward_T.tolist() == [0, -0.5]


def test_the_outcome_after_an_empty_last_turn_is_at_the_last_token() -> None:
    turns = ([1], [2], 0), ([3], [4], 0), ([5], [], 0)
    assert pack([trajectory(*turns, reward=2.0)]).reward_T.tolist() == [0, 0, 0, 0, 2.0]


def test_a_demonstrated_episode_has_replies_that_are_not_chosen() -> None:
    batch = pack_demonstrations([([1], [2, 3], [4], [5])], token_mean)
    assert batch.token_T.tolist() == [1, 2, 3, 4, 5]
    assert batch.action_mask_T.tolist() == [False, True, True, False, True]
    for spans in (([1], [2], [3], []), ([1], [2], [3])):
        with pytest.raises(ValueError, match="neither of them empty"):
            pack_demonstrations([spans], token_mean)


def test_demonstrations_are_packed_with_every_completion_token_chosen() -> None:
    batch = pack_demonstrations([([1, 2], [3, 4]), ([5], [6])], token_mean)
    assert batch.token_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.position_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.segment_T.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.action_mask_T.tolist() == [False, False, True, True, False, True]
    close_fp32(batch.weight_T, [0, 0, 1 / 3, 1 / 3, 0, 1 / 3])
    assert batch.version_T.tolist() == [-1] * 6
    for column_T in (batch.sampler_logprob_T, batch.reward_T, batch.advantage_T):
        assert column_T.tolist() == [0.0] * 6


@pytest.mark.parametrize("pairs", [[], [([], [1])], [([1], [2]), ([3], [])]])
def test_an_empty_demonstration_is_an_error(pairs: list[tuple[list[int], list[int]]]) -> None:
    with pytest.raises(ValueError) as error:
        pack_demonstrations(pairs, token_mean)
    assert str(error.value) == (
        "supervised training needs pairs of a prompt and a completion, neither of them empty"
    )


def test_the_shares_of_demonstrations_are_those_of_the_given_function() -> None:
    batch = pack_demonstrations([([1], [2, 3, 4]), ([1], [2])], sequence_mean)
    close_fp32(batch.weight_T, [0, 1 / 6, 1 / 6, 1 / 6, 0, 1 / 2])


def gradient(batch: Batch) -> Tensor:
    logit_V = torch.linspace(-1, 1, 20, dtype=torch.float64).requires_grad_()
    logprob_T = logit_V.log_softmax(-1)[batch.token_T]
    loss_T = ppo_clip(logprob_T, batch.sampler_logprob_T, batch.advantage_T, low=0.9, high=9.0)
    (loss_T * batch.weight_T).sum().backward()
    assert logit_V.grad is not None
    return logit_V.grad


@pytest.mark.parametrize("token_weights", [token_mean, sequence_mean])
def test_segments_without_advantage_add_nothing(token_weights: Weights) -> None:
    scored = [trajectory((range(1, n + 2), range(n, 2 * n + 1), 0)) for n in (1, 5, 2, 7, 3)]
    batch = weighed(scored, [0.0, 1.5, 0.0, -0.5, 0.0], token_weights)
    moving = with_gradient(batch)
    assert moving is not None and moving.num_segments == 2
    assert moving.token_T.tolist() == batch.select([1, 3]).token_T.tolist()
    assert gradient(moving).abs().max() > 0.002
    close_fp64(gradient(moving), gradient(batch))


def test_a_batch_that_moves_everywhere_stays_as_it_is_and_one_that_moves_nowhere_is_none() -> None:
    scored = [trajectory(([1], [2], 0)), trajectory(([1], [3], 0))]
    whole = weighed(scored, [1.0, -1.0])
    assert with_gradient(whole) is whole
    assert with_gradient(weighed(scored, [0.0, 0.0])) is None


def test_one_token_with_an_advantage_keeps_its_segment() -> None:
    batch = weighed([trajectory(([1], [2, 3], 0))] * 3, [0.0] * 3)
    batch.advantage_T[4] = -2.0
    moving = with_gradient(batch)
    assert moving is not None and moving.advantage_T.tolist() == [0, -2, 0]


def twins(*, versions: tuple[int, int] = (0, 0), rewards: tuple[float, float] = (1.0, 1.0)) -> Batch:
    """Segments a b a c a, where the middle a and the last can be told to differ from the first."""
    a, b, c = ([1, 2], [3, 4], 0), ([1], [5, 6, 7], 0), ([1, 2], [4, 3], 0)
    scored = [
        trajectory(a, reward=1.0),
        trajectory(b, reward=1.0),
        trajectory((a[0], a[1], versions[0]), reward=rewards[0]),
        trajectory(c, reward=1.0),
        trajectory((a[0], a[1], versions[1]), reward=rewards[1]),
    ]
    batch = weighed(scored, [1.0, 2.0, 1.0, -1.0, 1.0])
    batch.weight_T = batch.action_mask_T * torch.arange(1.0, batch.num_tokens + 1) / 100
    return batch


def test_twins_become_one_segment_with_the_sum_of_their_weights() -> None:
    batch = twins()
    found = without_duplicates(batch)
    assert found.token_T.tolist() == [1, 2, 3, 4, 1, 5, 6, 7, 1, 2, 4, 3]
    assert found.segment_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    # Tokens 2 and 3 of the first segment stand at 2, 10, 18 and at 3, 11, 19 of the whole row.
    close_fp32(found.weight_T, [0, 0, 0.33, 0.36, 0, 0.06, 0.07, 0.08, 0, 0, 0.15, 0.16])
    close_fp64(gradient(found), gradient(batch), rtol=1e-6)
    close_fp32(batch.weight_T[:4], [0, 0, 0.03, 0.04])  # what was given is left as it was


def test_segments_that_differ_in_anything_are_no_twins() -> None:
    assert without_duplicates(twins(versions=(3, 0))).num_segments == 4
    assert without_duplicates(twins(versions=(3, 3))).num_segments == 4
    assert without_duplicates(twins(rewards=(0.5, 1.0))).num_segments == 4
    alone = twins(versions=(1, 2))
    assert without_duplicates(alone) is alone
    for name in ("advantage_T", "sampler_logprob_T", "token_T", "action_mask_T"):
        batch = twins()
        column_T = getattr(batch, name)
        column_T[10] = ~column_T[10] if column_T.dtype == torch.bool else column_T[10] + 1
        assert without_duplicates(batch).num_segments == 4, name


@pytest.mark.parametrize("seed", range(5))
def test_many_twins_change_neither_loss_nor_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 4, (20,), generator=generator).tolist()
    scored = [trajectory(([1] * (kind + 1), range(2, 4 + 2 * kind), 0)) for kind in kinds]
    batch = weighed(scored, [kind - 1.5 for kind in kinds], sequence_mean)
    found = without_duplicates(batch)
    assert found.num_segments == len(set(kinds))
    close_fp64(float(found.weight_T.sum()), 1.0, rtol=1e-6)
    close_fp64(gradient(found), gradient(batch), rtol=1e-5)


def of_tokens(batch: Batch, salt: int) -> Tensor:
    """A number for each token that depends on its segment's tokens and place alone, as a model's would."""
    seen_T = torch.zeros(batch.num_tokens)
    for b in range(batch.num_segments):
        here = batch.segment_T == b
        digits_S = batch.token_T[here] * (batch.position_T[here] + 1 + salt)
        seen_T[here] = digits_S.cumsum(0).float() / 7
    return seen_T


def filled(batch: Batch) -> Batch:
    """With every optional field, equal for twins."""
    columns = {name: of_tokens(batch, salt) for salt, name in enumerate(OPTIONAL)}
    columns["selected_T"] = columns["selected_T"] > 3.5
    columns["expert_TLK"] = columns["expert_TLK"].mul(7).short()[:, None, None].expand(-1, 2, 3).clone()
    return replace(batch, **columns)


@pytest.mark.parametrize("name", OPTIONAL)
def test_twins_agree_in_every_optional_field_and_keep_them(name: str) -> None:
    found = without_duplicates(filled(twins()))
    assert found.num_segments == 3
    assert getattr(found, name).tolist() == getattr(filled(found), name).tolist()
    batch = filled(twins())
    column_T = getattr(batch, name)
    assert column_T.unique().numel() > 1
    column_T[10] = ~column_T[10] if column_T.dtype == torch.bool else column_T[10] + 1
    assert without_duplicates(batch).num_segments == 4


def test_each_sequence_is_looked_at_once_whatever_else_differs() -> None:
    batch = filled(twins(versions=(3, 4), rewards=(0.5, 0.25)))
    small, place_T = once_each(batch)
    assert small.token_T.tolist() == [1, 2, 3, 4, 1, 5, 6, 7, 1, 2, 4, 3]
    assert small.action_mask_T.nonzero()[:, 0].tolist() == [2, 3, 5, 6, 7, 10, 11]
    assert place_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3]
    assert [getattr(small, name) is None for name in OPTIONAL] == [False] * 7


def test_a_sequence_that_went_to_other_experts_is_another() -> None:
    batch = filled(twins())
    assert batch.expert_TLK is not None
    assert once_each(batch)[0].num_segments == 3
    batch.expert_TLK[10, 1, 2] += 1
    assert once_each(batch)[0].num_segments == 4


def routed(made: Trajectory, num_tokens: int | None) -> Trajectory:
    """With a record of so many tokens in its last turn: token t goes to expert t; the last one to none."""
    if num_tokens is None:
        return made
    experts = np.arange(num_tokens, dtype=np.int16)[:, None, None].repeat(2, 1)
    experts[-1] = -1
    *before, last = made.turns
    return replace(made, turns=(*before, replace(last, completion=replace(last.completion, experts=experts))))


def test_the_last_turn_says_where_all_tokens_went() -> None:
    two_turns = routed(trajectory(([1, 2], [3], 4), ([5], [6, 7], 9)), 6)
    batch = pack([two_turns, routed(trajectory(([8], [10], 2)), 2)])
    assert batch.expert_TLK is not None
    assert (batch.expert_TLK.dtype, batch.expert_TLK.shape) == (torch.int16, (8, 2, 1))
    assert batch.expert_TLK[:, 1, 0].tolist() == [0, 1, 2, 3, 4, -1, 0, -1]


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        (
            (3, None),
            "of 2 trajectories only 1 record which experts their tokens went to; let every engine record",
        ),
        ((3, 2), "has 3 tokens, and its last completion records the experts of 2 tokens"),
    ],
)
def test_a_record_of_some_or_of_other_tokens_is_an_error(
    counts: tuple[int, int | None], sentence: str
) -> None:
    given = [routed(trajectory(([1], [2, 3], 0)), count) for count in counts]
    with pytest.raises(ValueError, match=sentence):
        pack(given)


def test_what_is_said_of_each_sequence_once_reaches_every_token() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randint(0, 5, (30,), generator=generator).tolist()
    batch = pack([trajectory(([1] * (kind + 1), range(2, 5 + kind), kind)) for kind in kinds])
    small, place_T = once_each(batch)
    assert small.num_segments == 5
    close_fp32(of_tokens(small, 0)[place_T], of_tokens(batch, 0))


def test_the_same_tokens_in_other_turns_are_another_sequence() -> None:
    one, other = trajectory(([1, 2], [3, 4], 0)), trajectory(([1], [2], 0), ([3], [4], 0))
    small, place_T = once_each(pack([one, other, one]))
    assert small.num_segments == 2
    assert place_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
