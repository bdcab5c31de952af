from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millrace.kernels.packed_attention_cpu import short_attention
from tests.close import close_bf16, close_fp32, close_fp64
from tests.kernels.slow_twins import packed_attention_loop

HEADS = [(4, 2), (2, 2), (3, 1), (4, 1)]
Row = tuple[Tensor, Tensor, Tensor]


def random_row(seed: int, length_B: Tensor, dtype: torch.dtype = torch.float64) -> Row:
    """Queries, keys and values; their width fits no vector in every second seed."""
    generator = torch.Generator().manual_seed(seed)
    heads, key_heads = HEADS[seed % len(HEADS)]
    sizes = [(int(length_B.sum()), number, 8 - seed % 2) for number in (heads, key_heads, key_heads)]
    query_THK, key_TJK, value_TJK = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    )
    return query_THK, key_TJK, value_TJK


def segments(length_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Segments laid end to end; what stands behind the end of one must not be read."""
    offset_L, start_B = torch.arange(int(length_B.max())), length_B.cumsum(0) - length_B
    slot_BL = (start_B[:, None] + offset_L).where(offset_L < length_B[:, None], 1 << 40)
    return slot_BL, length_B, torch.zeros_like(length_B)


def gradients(out_THK: Tensor, inputs: Row) -> tuple[Tensor, ...]:
    # Every dtype has these numbers.
    slope = torch.randn(out_THK.shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    slope = slope.to(out_THK.dtype)
    return torch.autograd.grad(out_THK, inputs, slope)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("seed", range(8))
def test_short_segments_equal_the_loop_in_values_and_gradients(seed: int, window: int | None) -> None:
    length_B = torch.randint(1, 36, (5,), generator=torch.Generator().manual_seed(seed))
    inputs = random_row(seed, length_B)
    actual = short_attention(*inputs, segments(length_B), scale=0.7, window=window)
    expected = packed_attention_loop(*inputs, length_B, scale=0.7, window=window)
    close_fp64(actual, expected)
    for ours, theirs in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        close_fp64(ours, theirs)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, close_fp32), (torch.bfloat16, close_bf16)])
def test_narrow_numbers_equal_the_loop_in_float64(dtype, close) -> None:
    length_B = torch.tensor([16, 1, 31, 17, 4])
    inputs = random_row(0, length_B, dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    actual = short_attention(*inputs, segments(length_B), scale=0.5)
    expected = packed_attention_loop(*wide, length_B, scale=0.5)
    assert actual.dtype == dtype
    close(actual, expected)
    for ours, theirs in zip(gradients(actual, inputs), gradients(expected, wide), strict=True):
        assert ours.dtype == dtype
        close(ours, theirs)


def shared_row(seed: int, num_families: int) -> tuple[Row, Row, Tensor]:
    """Segments that share their beginnings in families; their inputs, their tables, and slots end to end."""
    generator = torch.Generator().manual_seed(seed)
    slots: list[Tensor] = []
    first, num_tokens = [], 0
    for _ in range(num_families):
        shared = int(torch.randint(1, 15, (), generator=generator))
        for member in range(3):
            own = int(torch.randint(1, 18, (), generator=generator))
            fresh = torch.arange(own + (0 if member else shared)) + num_tokens
            slots.append(torch.cat([slots[-member][:shared], fresh]) if member else fresh)
            first.append(shared if member else 0)
            num_tokens += len(fresh)
    slot_BL = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True, padding_value=1 << 40)
    length_B = torch.tensor([len(slot_M) for slot_M in slots])
    tables = slot_BL, length_B, torch.tensor(first)
    return random_row(seed, torch.tensor([num_tokens])), tables, torch.cat(slots)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_shared_tokens_are_read_by_all_and_asked_once(seed: int, window: int | None) -> None:
    inputs, tables, slot_W = shared_row(seed, 3)
    actual = short_attention(*inputs, tables, scale=0.7, window=window)
    copies = packed_attention_loop(*(x[slot_W] for x in inputs), tables[1], scale=0.7, window=window)
    place_T = torch.zeros(len(actual), dtype=torch.long).scatter(0, slot_W, torch.arange(len(slot_W)))
    expected = copies[place_T]
    close_fp64(actual, expected)
    for ours, theirs in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        close_fp64(ours, theirs)


def test_slopes_of_shared_tokens_have_the_same_bits_on_any_number_of_threads() -> None:
    wide, tables, _ = shared_row(4, 60)
    inputs = tuple(x.detach().float().requires_grad_() for x in wide)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(gradients(short_attention(*inputs, tables, scale=0.5), inputs))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_tokens_of_other_segments_get_nothing() -> None:
    length_B = torch.tensor([3, 9, 5])
    inputs = random_row(1, length_B)
    slot_BL, _, first_B = segments(length_B)
    chosen = torch.tensor([0, 2])
    actual = short_attention(*inputs, (slot_BL[chosen], length_B[chosen], first_B[chosen]), scale=0.5)
    expected = packed_attention_loop(*inputs, length_B, scale=0.5).detach()
    expected[3:12] = 0
    close_fp64(actual, expected)
    for slope in gradients(actual, inputs):
        assert not slope[3:12].any()
        assert slope[:3].any() and slope[12:].any()


def test_a_segment_has_the_same_bits_alone_and_on_any_number_of_threads() -> None:
    length_B = torch.tensor([13, 30, 7, 22] * 40)
    inputs = random_row(0, length_B, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            out_THK = short_attention(*inputs, segments(length_B), scale=0.5)
            found.append((out_THK, *gradients(out_THK, inputs)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    second = tuple(x.detach()[13:43] for x in inputs)
    alone_THK = short_attention(*second, segments(torch.tensor([30])), scale=0.5)
    assert torch.equal(alone_THK, found[0][0][13:43])


def test_large_scores_do_not_overflow_and_nan_stays_where_it_is() -> None:
    length_B = torch.tensor([4, 6])
    query_THK, key_TJK, value_TJK = (x.detach() for x in random_row(1, length_B, torch.float32))
    out_THK = short_attention(query_THK * 1e4, key_TJK, value_TJK, segments(length_B), scale=1.0)
    close_fp32(out_THK, packed_attention_loop(query_THK * 1e4, key_TJK, value_TJK, length_B, scale=1.0))
    key_TJK[5] = torch.nan
    out_THK = short_attention(query_THK, key_TJK, value_TJK, segments(length_B), scale=1.0)
    assert out_THK[:5].isfinite().all()
    assert out_THK[5:].isnan().all()
