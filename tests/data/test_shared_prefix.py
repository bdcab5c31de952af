"""What segments share: every token is found where the same tokens lead to it, and no earlier."""

from __future__ import annotations

import pytest
import torch

from millrace.data.batch import Batch
from millrace.data.shared_prefix import common_beginnings, leading_to
from tests.data.pieces import random_tree


def shared(*rows: list[int]) -> tuple[list[int], list[int], list[int]] | None:
    found = common_beginnings(
        torch.tensor([token for row in rows for token in row]), torch.tensor([len(row) for row in rows])
    )
    return None if found is None else (found.kept_S.tolist(), found.place_T.tolist(), found.first_B.tolist())


def pasts(batch: Batch) -> list[tuple[int, ...]]:
    """Each token with those before it in its segment."""
    rows = [row_T.tolist() for row_T in batch.token_T.split(batch.length_B.tolist())]
    return [tuple(row[: t + 1]) for row in rows for t in range(len(row))]


def test_samples_of_one_prompt_find_it_in_one_of_them() -> None:
    # Sorted: [5, 6, 1], [5, 6, 1, 2], [5, 6, 3]; the prompt is computed in the first of these.
    found = shared([5, 6, 3], [5, 6, 1], [5, 6, 1, 2])
    assert found == ([2, 3, 4, 5, 9], [1, 2, 0, 1, 2, 3, 1, 2, 3, 4], [2, 0, 3])


def test_of_twins_one_is_computed_and_of_prompts_within_prompts_the_rest() -> None:
    assert shared([7, 8], [7, 8]) == ([0, 1], [0, 1, 0, 1], [0, 2])
    assert shared([1, 2, 3, 4], [1, 2], [1, 2, 3, 9]) == (
        [2, 3, 4, 5, 9],
        [2, 3, 0, 1, 2, 3, 2, 3, 0, 4],
        [2, 0, 3],
    )


def test_tokens_that_go_to_other_experts_are_not_the_same() -> None:
    token_T, length_B = torch.tensor([5, 6, 7, 5, 6, 7]), torch.tensor([3, 3])
    expert_TLK = torch.tensor([[0, 1], [2, 3], [1, 0], [0, 1], [2, 4], [1, 0]], dtype=torch.int16)[:, None]
    found = common_beginnings(token_T, length_B, expert_TLK)
    assert found is not None
    assert (found.kept_S.tolist(), found.first_B.tolist()) == ([0, 1, 2, 4, 5], [0, 1])
    expert_TLK[4] = expert_TLK[1]
    whole = common_beginnings(token_T, length_B, expert_TLK)
    assert whole is not None and whole.kept_S.tolist() == [0, 1, 2]


def test_tokens_after_others_are_not_shared_nor_is_a_small_part_of_a_segment() -> None:
    assert shared([1, 2, 3], [2, 2, 3]) is None
    assert shared([4]) is None
    # 2 of 14 tokens are less than 15 %, 2 of 13 are more; of two segments the first in order computes.
    longer = [0, 1, *range(3, 15)]
    assert shared([0, 1, 2], longer) is None
    assert shared([0, 1, 2], longer[:-1]) == (
        [*range(3), *range(5, 16)],
        [*range(3), 0, 1, *range(3, 14)],
        [0, 2],
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_found_after_the_same_tokens(seed: int) -> None:
    batch = random_tree(seed, vocab_size=3, num_segments=15, longest=30)
    found = common_beginnings(batch.token_T, batch.length_B)
    assert found is not None
    past = pasts(batch)
    assert [past[t] for t in found.kept_S[found.place_T].tolist()] == past
    assert found.place_T[found.kept_S].tolist() == list(range(len(found.kept_S)))
    own_T = batch.position_T >= found.first_B[batch.segment_T]
    assert own_T.nonzero()[:, 0].tolist() == found.kept_S.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_with_no_beginning_too_small_nothing_is_computed_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.data.shared_prefix.LEAST_SHARE", 0.0)
    batch = random_tree(seed, vocab_size=3, num_segments=15, longest=30)
    found = common_beginnings(batch.token_T, batch.length_B)
    assert found is not None and len(found.kept_S) == len(set(pasts(batch)))


@pytest.mark.parametrize("seed", range(10))
def test_all_that_leads_to_what_is_read_is_kept_and_nothing_behind_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(1, 9, (6,), generator=generator)
    segment_T = torch.arange(6).repeat_interleave(length_B)
    at_N = torch.randint(int(length_B.sum()), (4,), generator=generator)
    found = leading_to(at_N, length_B)
    assert found is not None
    assert torch.equal(found.kept_S[found.at_N], at_N)
    assert torch.equal(torch.bincount(segment_T[found.kept_S], minlength=6), found.length_B)
    for t in range(int(length_B.sum())):
        behind = [n for n in at_N.tolist() if n >= t and segment_T[n] == segment_T[t]]
        first = t == 0 or segment_T[t] != segment_T[t - 1]
        assert (t in found.kept_S.tolist()) == bool(behind or first)


def test_a_row_stays_whole_where_little_is_left_out_or_nothing_is_read() -> None:
    length_B = torch.tensor([60, 40])
    assert leading_to(torch.tensor([58, 99]), length_B) is None
    some = leading_to(torch.tensor([58, 98]), length_B)
    assert some is not None and some.length_B.tolist() == [59, 39] and some.at_N.tolist() == [58, 97]
    assert leading_to(torch.tensor([], dtype=torch.int64), length_B) is None
