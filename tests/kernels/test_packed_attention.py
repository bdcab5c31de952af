from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels.packed_attention import (
    Places,
    Segments,
    _similar,
    packed_attention,
)
from tests.close import close_fp32, close_fp64
from tests.kernels.slow_twins import packed_attention_loop
from tests.twins.dense_cache import cached_attention

HEADS = [(4, 2), (2, 2), (3, 1), (4, 1), (2, 1)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 7},
    {"softcap": 2.0},
    {"window": 5, "softcap": 1.0},
    {"chunk": 6},
    {"chunk": 6, "window": 4},
]


Row = tuple[Tensor, Tensor, Tensor]


def random_row(seed: int) -> tuple[Row, Tensor]:
    """Queries, keys, values and lengths of a few segments, one of them long in every fourth seed."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(1, 40, (5,), generator=generator)
    if seed % 4 == 0:
        length_B[seed % 5] = 300 if seed == 0 else 129 + seed
    heads, key_heads = HEADS[seed % len(HEADS)]
    num_tokens = int(length_B.sum())

    def normal(num_heads: int, width: int = 4) -> Tensor:
        return torch.randn(
            num_tokens, num_heads, width, generator=generator, dtype=torch.float64, requires_grad=True
        )

    return (normal(heads), normal(key_heads), normal(key_heads, 4 - seed % 2)), length_B


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(7))
def test_packed_attention_equals_the_loop_in_values_and_gradients(seed: int) -> None:
    inputs, length_B = random_row(seed)
    options = OPTIONS[seed % len(OPTIONS)]
    actual = packed_attention(*inputs, Segments.of(length_B), scale=0.7, **options)
    expected = packed_attention_loop(*inputs, length_B, scale=0.7, **options)
    close_fp64(actual, expected)
    slope = torch.randn(actual.shape, generator=torch.Generator().manual_seed(seed), dtype=actual.dtype)
    pairs = zip(
        torch.autograd.grad(actual, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True
    )
    for ours, theirs in pairs:
        close_fp64(ours, theirs)


@pytest.mark.slow_beyond(5)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_attention_in_float32_equals_the_loop_in_float64(options: dict[str, Any]) -> None:
    inputs, length_B = random_row(1)
    query_THK, key_TJK, value_TJK = (x.float() for x in inputs)
    expected = packed_attention_loop(*inputs, length_B, scale=0.5, **options)
    actual = packed_attention(query_THK, key_TJK, value_TJK, Segments.of(length_B), scale=0.5, **options)
    assert actual.dtype == torch.float32
    close_fp32(actual, expected)


def random_tree(seed: int) -> tuple[Row, tuple[Tensor, Tensor, Tensor]]:
    """A row whose segments share tokens; the slots of their tokens, their lengths and first own positions."""
    rng = np.random.default_rng(seed)
    segments: list[list[int]] = []
    lengths, first, num_tokens = [], [], 0
    for _ in range(9):
        other = segments[rng.integers(len(segments))] if segments else []
        shared = int(rng.integers(len(other) + 1)) if rng.random() < 0.7 else 0
        own = int(rng.integers(0 if shared else 1, 100 if seed % 5 == 0 else 30))
        segments.append([*other[:shared], *range(num_tokens, num_tokens + own)])
        lengths.append(shared + own)
        first.append(shared)
        num_tokens += own
    heads, key_heads = HEADS[seed % len(HEADS)]
    generator = torch.Generator().manual_seed(seed)
    row = [
        torch.randn(num_tokens, n, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (heads, key_heads, key_heads)
    ]
    slot_W = torch.tensor([slot for segment in segments for slot in segment])
    return (row[0], row[1], row[2]), (slot_W, torch.tensor(lengths), torch.tensor(first))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(8))
def test_shared_tokens_give_what_each_segment_with_its_own_copies_gives(seed: int) -> None:
    inputs, (slot_W, length_A, first_A) = random_tree(seed)
    num_tokens, num_copies = len(inputs[0]), len(slot_W)
    assert num_tokens < num_copies and int((first_A > 0).sum()) > 1
    options = OPTIONS[seed % len(OPTIONS)]
    segments = Segments.sharing(slot_W, length_A, first_A, num_tokens)
    actual = packed_attention(*inputs, segments, scale=0.7, **options)
    copies = packed_attention_loop(*(x[slot_W] for x in inputs), length_A, scale=0.7, **options)
    place_T = torch.zeros(num_tokens, dtype=torch.long).scatter(0, slot_W, torch.arange(num_copies))
    expected = copies[place_T]
    close_fp64(actual, expected)
    slope = torch.randn(actual.shape, generator=torch.Generator().manual_seed(seed), dtype=actual.dtype)
    pairs = zip(
        torch.autograd.grad(actual, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True
    )
    for ours, theirs in pairs:
        close_fp64(ours, theirs)


def test_segments_that_share_lie_in_rectangles_of_what_is_asked() -> None:
    def sharing(*spans: tuple[int, int]) -> list[tuple[int, int, int]]:
        """Shapes of buckets of segments that all begin as the first one, of 200 tokens, does."""
        slots = [torch.arange(200)]
        for first, length in spans:
            slots.append(torch.cat([torch.arange(first), 200 + torch.arange(length - first)]))
        length_A = torch.tensor([200, *(length for _, length in spans)])
        first_A = torch.tensor([0, *(first for first, _ in spans)])
        segments = Segments.sharing(torch.cat(slots), length_A, first_A, 400)
        assert segments.buckets[0].shape == (1, 200, 200) and segments.buckets[0].query is None
        assert all(bucket.query is not None for bucket in segments.buckets[1:])
        return [bucket.shape for bucket in segments.buckets[1:]]

    assert sharing((100, 110), (100, 120)) == [(2, 20, 120)]
    # 3 rows of 100 * 200 scores are less than 3 times 100 * 200 + 2 * 101, 4 rows more than with 3 * 101.
    few = [(100, 101)] * 2
    assert sharing((100, 200), *few) == [(3, 100, 200)]
    assert sharing((100, 200), *few, (100, 101)) == [(3, 100, 200), (1, 1, 101)]
    assert sharing((150, 160), (10, 200)) == [(2, 190, 200)]
    assert sharing((150, 151), (20, 70), (20, 70)) == [(1, 1, 151), (2, 50, 70)]
    # Short ones join whatever they waste.
    assert sharing((60, 61), (3, 20)) == [(2, 58, 61)]
    assert sharing((20, 30), (3, 32)) == [(2, 29, 32)]
    # Nothing is asked of a segment without a token of its own.
    assert sharing((200, 200), (7, 7)) == []


def test_slopes_of_a_token_add_up_over_its_places() -> None:
    x_T1 = torch.tensor([[1.0], [2.0], [4.0]], requires_grad=True)
    places = Places.of(torch.tensor([2, 0, 2, 3, 2]), 3)
    spread_N1 = places.spread(x_T1)
    assert spread_N1.flatten().tolist() == [4.0, 1.0, 4.0, 0.0, 4.0]
    (slope_T1,) = torch.autograd.grad(
        spread_N1, x_T1, torch.tensor([[1.0], [10.0], [100.0], [7.0], [1000.0]])
    )
    assert slope_T1.flatten().tolist() == [10.0, 0.0, 1101.0]


@pytest.mark.parametrize(
    ("spans", "sizes"),
    [
        # Two of 63 x 65 places are exactly three times the 39 x 65 and 13 x 15 wanted.
        ([(26, 65), (2, 15)], [2]),
        ([(27, 65), (2, 15)], [1, 1]),
        # What a rectangle wastes is counted from its own first segment on.
        ([(190, 200)] * 10 + [(10, 200), (10, 100)], [10, 2]),
        ([(190, 200)] * 10 + [(150, 200), (140, 150), (20, 100)], [10, 2, 1]),
    ],
)
def test_a_rectangle_of_segments_that_share_is_closed_before_it_wastes_too_much(spans, sizes) -> None:
    assert [span.stop - span.start for span in _similar(spans)] == sizes


def test_two_tokens_by_hand() -> None:
    key_TJK, value_TJK = torch.tensor([[[0.0]], [[1.0]]]), torch.tensor([[[2.0]], [[10.0]]])
    query_THK = torch.full((2, 1, 1), float(torch.tensor(3.0).log()))
    whole = packed_attention(query_THK, key_TJK, value_TJK, Segments.of(torch.tensor([2])), scale=1.0)
    close_fp32(whole.flatten(), [2.0, (1 * 2.0 + 3 * 10.0) / 4])
    apart = packed_attention(query_THK, key_TJK, value_TJK, Segments.of(torch.tensor([1, 1])), scale=1.0)
    close_fp32(apart.flatten(), [2.0, 10.0])
    scaled = packed_attention(query_THK, key_TJK, value_TJK, Segments.of(torch.tensor([2])), scale=2.0)
    close_fp32(scaled.flatten(), [2.0, (1 * 2.0 + 9 * 10.0) / 10])


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_a_window_counts_the_token_itself(window: int) -> None:
    query_THK, value_TJK = torch.zeros(4, 1, 1), torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)
    segments = Segments.of(torch.tensor([4]))
    out = packed_attention(query_THK, query_THK, value_TJK, segments, scale=1.0, window=window)
    seen = [value_TJK.flatten()[max(0, t - window + 1) : t + 1] for t in range(4)]
    close_fp32(out.flatten(), [float(values.mean()) for values in seen])


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_changing_one_segment_changes_no_other_bit(options: dict[str, Any]) -> None:
    length_B = torch.tensor([30, 25, 170, 3, 28])
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(256, heads, 8, generator=generator) for heads in (4, 2, 2)]
    slope = torch.randn(256, 4, 8, generator=generator)
    for changed in range(5):
        start = int(length_B[:changed].sum())
        inside_T = torch.zeros(256, dtype=torch.bool)
        inside_T[start : start + int(length_B[changed])] = True
        others = [torch.where(inside_T[:, None, None], x * -3 + 100, x) for x in inputs]
        found = []
        for row in (inputs, others):
            query_THK, key_TJK, value_TJK = (x.clone().requires_grad_() for x in row)
            out = packed_attention(query_THK, key_TJK, value_TJK, Segments.of(length_B), scale=0.5, **options)
            found.append([out, *torch.autograd.grad(out, [query_THK, key_TJK, value_TJK], slope)])
        for before, after in zip(*found, strict=True):
            assert torch.equal(before[~inside_T], after[~inside_T])
        assert not torch.equal(found[0][0][inside_T], found[1][0][inside_T])


def rectangles(length: list[int]) -> list[tuple[int, int]]:
    shapes = [bucket.shape for bucket in Segments.of(torch.tensor(length)).buckets]
    assert all(queries == keys for _, queries, keys in shapes)
    return [(size, keys) for size, _, keys in shapes]


def test_segments_of_similar_length_share_a_rectangle() -> None:
    assert rectangles([100, 200, 50, 99, 70]) == [(2, 200), (3, 99)]
    assert rectangles([200, 100]) == [(2, 200)]  # half as long still joins
    assert rectangles([65, 1]) == [(1, 65), (1, 1)]
    assert rectangles([64, 1]) == [(2, 64)]  # short ones join whatever they waste
    assert rectangles([3]) == [(1, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_every_token_stands_in_one_place_and_padding_wastes_at_most_half(seed: int) -> None:
    length_B = torch.randint(65, 400, (12,), generator=torch.Generator().manual_seed(seed))
    segments = Segments.of(length_B)
    assert segments.num_tokens == int(length_B.sum())
    slots = [bucket.key.slot_N for bucket in segments.buckets]
    tokens = torch.cat([slot_N[slot_N < segments.num_tokens] for slot_N in slots])
    assert sorted(tokens.tolist()) == list(range(segments.num_tokens))
    assert sum(b.shape[0] * b.shape[1] for b in segments.buckets) <= 2 * segments.num_tokens
    for bucket in segments.buckets:
        slot_N, place_T = bucket.key.slot_N, bucket.key.place_T
        inside = (place_T < len(slot_N)).nonzero()[:, 0]
        assert torch.equal(slot_N[place_T[inside]], inside)
        assert int((slot_N < segments.num_tokens).sum()) == len(inside)
        assert bucket.key.again is None and bucket.query is None


@pytest.mark.parametrize("length", [[3, 0, 2], []])
def test_an_empty_segment_is_an_error(length: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^segment lengths \[.*\] must all be at least 1$"):
        Segments.of(torch.tensor(length, dtype=torch.long))


def test_segments_move_to_another_device_whole() -> None:
    moved = Segments.of(torch.tensor([2, 200])).to(torch.device("meta"))
    assert moved.num_tokens == 202
    assert [bucket.shape for bucket in moved.buckets] == [(1, 200, 200), (1, 2, 2)]
    slot_W = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1, 4])
    shared = Segments.sharing(slot_W, torch.tensor([3, 3, 3]), torch.tensor([0, 2, 2]), 5)
    both = shared.to(torch.device("meta"))
    assert [bucket.query is not None for bucket in both.buckets] == [True]
    for bucket in (*moved.buckets, *both.buckets):
        tables = [bucket.length_B, bucket.first_B]
        for places in filter(None, (bucket.key, bucket.query)):
            tables += [places.slot_N, places.place_T, *(places.again or ())]
        assert all(table.is_meta for table in tables)
    again = both.buckets[0].key.again
    assert again is not None and [table.ndim for table in again] == [1, 2]


@pytest.mark.slow_beyond(13)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("slots", [12, 40])  # below and above SHORT_LENGTH
def test_cached_attention_equals_the_loop(
    slots: int, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    position_B = torch.tensor([0, 11, 4, 8])
    # What lies beyond a row's position is huge, so that reading it would show.
    key_BJCK, value_BJCK = torch.full((2, 4, heads[1], slots, 4), 1e3, dtype=torch.float64)
    query_BHK = torch.randn(4, heads[0], 4, generator=generator, dtype=torch.float64)
    expected = []
    for b, position in enumerate(position_B.tolist()):
        shape = (2, position + 1, heads[1], 4)
        key_TJK, value_TJK = torch.randn(shape, generator=generator, dtype=torch.float64)
        key_BJCK[b, :, : position + 1] = key_TJK.transpose(0, 1)
        value_BJCK[b, :, : position + 1] = value_TJK.transpose(0, 1)
        query_THK = torch.zeros(position + 1, heads[0], 4, dtype=torch.float64)
        query_THK[-1] = query_BHK[b]
        length_B = torch.tensor([position + 1])
        whole = packed_attention_loop(query_THK, key_TJK, value_TJK, length_B, scale=0.6, **options)
        expected.append(whole[-1])
    actual = cached_attention(query_BHK, key_BJCK, value_BJCK, position_B, scale=0.6, **options)
    close_fp64(actual, torch.stack(expected))
