from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from millrace.algorithms.weights import token_mean
from millrace.data.batch import Batch
from millrace.data.packing import pack_demonstrations

LENGTHS = [3, 5, 2, 4, 1]


def batch_of(lengths: list[int]) -> Batch:
    """Every field holds numbers of its own, so that a field left behind would show."""
    num_tokens = sum(lengths)
    row_T = torch.arange(num_tokens)
    return Batch(
        token_T=row_T + 1000,
        position_T=torch.cat([torch.arange(length) for length in lengths]),
        segment_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        action_mask_T=row_T % 2 == 1,
        sampler_logprob_T=-row_T.float(),
        version_T=row_T + 2000,
        reward_T=row_T.float() * 3,
        advantage_T=row_T.float() * 5,
        weight_T=row_T.float() * 7,
        reference_logprob_T=row_T.float() * 11,
        proximal_logprob_T=row_T.float() * 13,
        value_T=None,
        return_T=row_T.float() * 17,
        correction_T=row_T.float() * 19,
        selected_T=row_T % 3 == 1,
    )


def columns(batch: Batch) -> dict[str, list[float] | None]:
    """Every field except the segment, as lists."""
    found: dict[str, list[float] | None] = {}
    for field in fields(batch):
        value: Tensor | None = getattr(batch, field.name)
        if field.name != "segment_T":
            found[field.name] = None if value is None else value.tolist()
    return found


def rows_of(batch: Batch, rows: list[int]) -> dict[str, list[float] | None]:
    return {
        name: None if values is None else [values[row] for row in rows]
        for name, values in columns(batch).items()
    }


def test_sizes() -> None:
    batch = batch_of(LENGTHS)
    assert (batch.num_tokens, batch.num_segments, batch.length_B.tolist()) == (15, 5, LENGTHS)
    empty = Batch(*(torch.zeros(0, dtype=torch.long) for _ in range(9)))
    assert (empty.num_tokens, empty.num_segments, empty.length_B.tolist()) == (0, 0, [])


def test_select_takes_whole_segments_in_the_order_given() -> None:
    batch = batch_of(LENGTHS)
    chosen = batch.select([3, 0])
    assert columns(chosen) == rows_of(batch, [10, 11, 12, 13, 0, 1, 2])
    assert chosen.segment_T.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert chosen.position_T.tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("segments", [[], [5], [-1], [-1, 2], [0, 7]])
def test_select_of_what_is_not_there_is_an_error(segments: list[int]) -> None:
    with pytest.raises(ValueError) as error:
        batch_of(LENGTHS).select(segments)
    assert str(error.value) == f"segments {segments} were asked of a batch of 5"


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (5, [[0], [1], [2], [3, 4]]),
        (6, [[0], [1], [2, 3], [4]]),
        (8, [[0, 1], [2, 3, 4]]),
        (10, [[0, 1, 2], [3, 4]]),
        (14, [[0, 1, 2, 3], [4]]),
    ],
)
def test_split_fills_micro_batches_in_order(size: int, parts: list[list[int]]) -> None:
    batch = batch_of(LENGTHS)
    micros = list(batch.split(size))
    assert [columns(micro) for micro in micros] == [columns(batch.select(part)) for part in parts]
    assert [micro.segment_T.tolist() for micro in micros] == [
        batch.select(part).segment_T.tolist() for part in parts
    ]


def test_what_fits_is_not_split() -> None:
    batch = batch_of(LENGTHS)
    assert [micro is batch for micro in batch.split(15)] == [True]


def test_a_segment_longer_than_a_micro_batch_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ValueError) as error:
        list(batch_of(LENGTHS).split(4))
    assert str(error.value) == (
        "a sequence has 5 tokens but a micro-batch holds 4; raise policy.tokens_per_micro_batch to at least 5"
    )


def test_shard_deals_the_longest_first_to_the_emptiest() -> None:
    batch = batch_of(LENGTHS)
    # 5 to rank 0; 4 to rank 1; 3 to rank 1 (4 < 5); 2 to rank 0 (5 < 7); 1 to rank 0 (a tie: the first).
    assert columns(batch.shard(0, 2)) == columns(batch.select([1, 2, 4]))
    assert columns(batch.shard(1, 2)) == columns(batch.select([0, 3]))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_segment_is_dealt_once(world: int) -> None:
    batch = batch_of(LENGTHS)
    tokens = [token for rank in range(world) for token in batch.shard(rank, world).token_T.tolist()]
    assert sorted(tokens) == batch.token_T.tolist()


def test_shares_of_many_ranks_are_even() -> None:
    lengths = torch.randint(1, 100, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = batch_of(lengths)
    sizes = [batch.shard(rank, 4).num_tokens for rank in range(4)]
    assert sum(sizes) == sum(lengths) and max(sizes) - min(sizes) <= 10


def test_more_ranks_than_segments_is_an_error() -> None:
    with pytest.raises(ValueError) as error:
        batch_of(LENGTHS).shard(0, 6)
    assert str(error.value) == "5 sequences cannot be dealt to 6 ranks; sample more per step"


def test_to_moves_every_field() -> None:
    moved = batch_of(LENGTHS).to("meta")
    assert moved.value_T is None
    for field in fields(moved):
        value = getattr(moved, field.name)
        assert value is None or (value.is_meta and value.shape == (15,)), field.name


def test_work_is_dealt_by_what_attention_costs() -> None:
    # By tokens 8 balances 3 + 3 + 2; with the square counted it outweighs all three.
    batch = batch_of([8, 3, 3, 2])
    assert batch.deal(2) == [[0], [1, 2, 3]]
    assert batch.deal(2, even_tokens=1.0) == [[0], [1, 2, 3]]
    long = batch_of([8, 5, 5, 5])
    assert long.deal(2) == [[0, 3], [1, 2]]
    # 8 + 64 = 72 and 5 + 25 = 30.
    assert long.deal(2, even_tokens=1.0) == [[0], [1, 2, 3]]
    # 8 + 8 = 16 and 5 + 3.125 = 8.125.
    assert long.deal(2, even_tokens=8.0) == [[0, 3], [1, 2]]
    assert long.deal(6) == [[0], [1], [2], [3], [], []]


def test_a_prompt_costs_once_on_each_rank_where_it_is_most_of_its_samples() -> None:
    """Four samples of one prompt, four of another; without sharing they are dealt in turns."""
    pairs = [([prompt] * 6, [8, 9, prompt]) for prompt in (1, 1, 1, 2, 2, 2, 2, 1)]
    batch = pack_demonstrations(pairs, token_mean)
    assert batch.deal(2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert batch.deal(2, sharing=True) == [[0, 1, 2, 7], [3, 4, 5, 6]]
    # A prompt of a tenth of its samples is computed for each of them.
    longer = pack_demonstrations([(prompt, answer * 18) for prompt, answer in pairs], token_mean)
    assert longer.deal(2, sharing=True) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_segment_without_a_chosen_token_is_a_prompt_of_its_own() -> None:
    batch = pack_demonstrations([([1] * 6, [2, 3])] * 4, token_mean)
    batch.action_mask_T[8:16] = False
    # 8 of the second; 8, and 2 for each more, of the others, which together are more than the even 10.
    assert batch.deal(2, sharing=True) == [[0, 2, 3], [1]]


def test_places_say_where_the_tokens_of_segments_stand() -> None:
    batch = batch_of([3, 1, 2])
    assert batch.places([2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert torch.equal(batch.token_T[batch.places([1, 2])], batch.select([1, 2]).token_T)
