"""What tokens were drawn among stays with them, whatever is done to the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.batch import Batch
from millrace.data.packing import once_each, pack, pack_demonstrations, with_gradient, without_duplicates
from millrace.types import Completion, Outcome, Trajectory, Turn
from tests.close import close_fp32
from tests.data.pieces import drawn_among, weighed, words


def episode(*turns: tuple[Sequence[int], Completion]) -> Trajectory:
    return Trajectory(tuple(Turn(tuple(seen), said) for seen, said in turns), Outcome("score", 1.0))


def test_each_token_gets_what_it_was_drawn_among_and_its_share_of_that() -> None:
    some = drawn_among([3, 4], [[3, 9, 2], [4]], within=[-1.125, 0.0])
    every = drawn_among([8], None)
    last = drawn_among([16, 24], [[7, 16], [24, 25]], within=[-3.0, -2.0])
    batch = pack([episode(([1, 2], some), ([5], every)), episode(([6], last))])
    assert batch.support is not None and batch.chosen_support is not None
    assert words(batch.support) == [[], [], [3, 9, 2], [4], [], [], [], [7, 16], [24, 25]]
    assert words(batch.chosen_support) == [[3, 9, 2], [4], [], [7, 16], [24, 25]]
    # Over all words it would be -1 - token / 8.
    close_fp32(batch.sampler_logprob_T, [0, 0, -1.125, 0, 0, -2, 0, -3, -2])
    assert batch.support.count_N.dtype == torch.int64


def test_without_truncation_there_are_no_supports() -> None:
    batch = pack([episode(([1], drawn_among([3, 4], None)))])
    assert batch.support is None and batch.chosen_support is None
    close_fp32(batch.sampler_logprob_T, [0, -1.375, -1.5])
    assert pack_demonstrations([([1], [2])], lambda mask_T, segment_T: mask_T.float()).support is None


def test_a_token_drawn_among_none_is_an_error() -> None:
    with pytest.raises(ValueError) as error:
        pack([episode(([1], drawn_among([3, 4], [[3, 2], []])))])
    assert str(error.value) == "the support of a token is empty; it holds at least the token itself"


def among_of(token: int, kind: int) -> list[int]:
    """What a token was drawn among, told by its own id; for kind 0 all words."""
    return [token + n * kind for n in range(1 + (token + kind) % 4)] if kind else []


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Segments of one or two turns, each token with an id of its own; some completions without supports."""
    episodes, token = [], 0
    for _ in range(draw(st.integers(1, 7))):
        turns = []
        for _ in range(draw(st.integers(1, 2))):
            seen, said = draw(st.integers(1, 3)), draw(st.integers(1, 4))
            ids = range(token + seen, token + seen + said)
            kind = draw(st.integers(0, 2))
            among = [among_of(one, kind) for one in ids] if kind else None
            turns.append((range(token, token + seen), drawn_among(ids, among)))
            token += seen + said
        episodes.append(episode(*turns))
    advantages = [float(draw(st.integers(0, 1))) for _ in episodes]
    return weighed(episodes, advantages)


def check_kept(before: Batch, after: Batch) -> None:
    """Every token of `after` has what it had in `before`."""
    if before.support is None:
        assert after.support is None
        return
    assert after.support is not None and after.chosen_support is not None
    had = dict(zip(before.token_T.tolist(), words(before.support), strict=True))
    assert words(after.support) == [had[token] for token in after.token_T.tolist()]
    chosen = after.token_T[after.action_mask_T].tolist()
    assert words(after.chosen_support) == [had[token] for token in chosen]


@pytest.mark.slow
@given(batches(), st.data())
def test_every_operation_keeps_supports_with_their_tokens(batch: Batch, data: st.DataObject) -> None:
    if batch.support is not None:
        found = words(batch.support)
        assert all(
            token in among for token, among in zip(batch.token_T.tolist(), found, strict=True) if among
        )
        assert any(found) and not any(
            among for among, acts in zip(found, batch.action_mask_T.tolist(), strict=True) if not acts
        )
    order = data.draw(st.lists(st.integers(0, batch.num_segments - 1), min_size=1, max_size=9))
    check_kept(batch, batch.select(order))
    longest = int(batch.length_B.max())
    for micro in batch.split(longest + data.draw(st.integers(0, 9))):
        check_kept(batch, micro)
    world = data.draw(st.integers(1, batch.num_segments))
    for rank in range(world):
        check_kept(batch, batch.shard(rank, world))
    moving = with_gradient(batch)
    if moving is not None:
        check_kept(batch, moving)
    check_kept(batch, batch.to("cpu"))


@pytest.mark.slow
@given(batches(), st.data())
def test_twins_are_merged_with_their_supports(batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, batch.num_segments - 1), min_size=1, max_size=9))
    doubled = batch.select(order)
    for small in (without_duplicates(doubled), once_each(doubled)[0]):
        assert small.num_segments == len(set(order))
        check_kept(batch, small)
    small, place_T = once_each(doubled)
    assert torch.equal(small.token_T[place_T], doubled.token_T)
    if doubled.support is not None:
        assert small.support is not None
        assert words(small.support[place_T]) == words(doubled.support)


A: list[list[int]] = [[3, 7], [4, 9]]


@pytest.mark.slow_beyond(13)
@pytest.mark.parametrize(
    "other",
    [
        None,
        [[2, 3], [4, 9]],
        [[3, 7], [4, 8]],
        [[3, 7], [4, 9, 10]],
        [[3], [7, 4, 9]],
        [[3, 7, 4], [4, 9]],
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_segments_drawn_among_other_tokens_are_no_twins(place: int, other: list[list[int]] | None) -> None:
    def batch_of(among: list[list[int]] | None) -> Batch:
        wholes: list[list[list[int]] | None] = [A, A, A]
        wholes[place] = among
        made = weighed([episode(([1, 2], drawn_among([3, 4], one))) for one in wholes], [1.0] * 3)
        # Only the supports may tell them apart.
        made.sampler_logprob_T = torch.zeros_like(made.sampler_logprob_T)
        return made

    assert without_duplicates(batch_of(A)).num_segments == once_each(batch_of(A))[0].num_segments == 1
    batch = batch_of(other)
    merged, (small, place_T) = without_duplicates(batch), once_each(batch)
    assert merged.num_segments == small.num_segments == 2
    kept = [[[], [], *([[], []] if other is None else other)], [[], [], *A]]
    for found in (merged, small):
        assert found.support is not None
        assert words(found.support) == sum(kept if place == 0 else kept[::-1], [])
    ours = [0, 1, 2, 3] if place == 0 else [4, 5, 6, 7]
    assert place_T[4 * place : 4 * place + 4].tolist() == ours
    close_fp32(merged.weight_T.sum(), 1.0)


def test_supports_go_to_another_device_with_the_batch() -> None:
    batch = pack([episode(([1], drawn_among([3], [[3, 4]])))]).to("meta")
    assert batch.support is not None
    assert batch.support.token_M.is_meta and batch.support.count_N.is_meta


def test_a_batch_whose_last_segments_were_drawn_among_all_words_keeps_its_bounds() -> None:
    some = episode(([1], drawn_among([3], [[3, 4]])))
    every = episode(([1], drawn_among([3], None)))
    batch = weighed([some, every, every, some], [1.0] * 4)
    batch = replace(batch, sampler_logprob_T=torch.zeros(8))
    merged = without_duplicates(batch)
    assert merged.support is not None
    assert words(merged.support) == [[], [3, 4], [], []]
    close_fp32(merged.weight_T, [0, 0.5, 0, 0.5])
