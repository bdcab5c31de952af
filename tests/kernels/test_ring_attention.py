from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels.packed_attention import Segments, packed_attention
from millrace.kernels.ring_attention import KEYS, QUERIES, Softmax, Tiles, attend, attend_backward
from tests.close import close_bf16, close_fp32, close_fp64

HEADS = [(4, 2), (2, 2), (3, 1), (4, 1), (6, 2)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 7},
    {"softcap": 2.0},
    {"window": 5, "softcap": 1.3},
    {"chunk": 6},
    {"chunk": 6, "window": 4},
]
Row = tuple[Tensor, Tensor, Tensor]


def random_row(seed: int, length_B: Tensor, *, width: int = 4) -> Row:
    generator = torch.Generator().manual_seed(seed)
    heads, key_heads = HEADS[seed % len(HEADS)]

    def normal(num_heads: int, width: int = width) -> Tensor:
        shape = (int(length_B.sum()), num_heads, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return normal(heads), normal(key_heads), normal(key_heads, width + seed % 2)


def out_shape(row: Row) -> tuple[int, int, int]:
    return len(row[0]), row[0].shape[1], row[2].shape[2]


def random_deal(seed: int, num_tokens: int, num_ranks: int) -> list[Tensor]:
    """Runs of a few tokens to ranks at random; the last rank gets none in every fifth seed."""
    generator = torch.Generator().manual_seed(seed)
    several = num_ranks - (seed % 5 == 4)
    of_run = torch.randint(0, several, (num_tokens,), generator=generator)
    starts = torch.rand(num_tokens, generator=generator) < 0.2
    rank_T = of_run[starts.long().cumsum(0).clamp(max=num_tokens - 1)]
    return [(rank_T == rank).nonzero()[:, 0] for rank in range(num_ranks)]


def table(
    deal: list[Tensor],
    length_B: Tensor,
    rank: int,
    source: int,
    window: int | None = None,
    chunk: int | None = None,
) -> Tiles:
    first_T = (length_B.cumsum(0) - length_B).repeat_interleave(length_B)
    return Tiles.of(deal[rank], first_T[deal[rank]], deal[source], window=window, chunk=chunk)


def ring(
    row: Row, slope_THK: Tensor, length_B: Tensor, deal: list[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """What ranks compute one after the other, put together: the result and three gradients, scale 0.7."""
    query_THK, key_TJK, value_TJK = row
    rest = {"scale": 0.7, "softcap": options.get("softcap")}
    out_THK = query_THK.new_zeros(out_shape(row))
    gradients = [torch.zeros_like(x) for x in row]
    for rank, mine in enumerate(deal):
        queries = query_THK[mine]
        softmax = Softmax.before(queries, value_TJK)
        # Each rank begins with its own keys, then those of the rank before it.
        sources = [(rank - step) % len(deal) for step in range(len(deal))]
        limits = options.get("window"), options.get("chunk")
        tiles = [table(deal, length_B, rank, source, *limits) for source in sources]
        for source, seen in zip(sources, tiles, strict=True):
            theirs = deal[source]
            attend(softmax, queries, key_TJK[theirs], value_TJK[theirs], seen, **rest)
        out, log_total = softmax.after()
        out_THK[mine] = out.to(out_THK.dtype)
        agreement = (out * slope_THK[mine]).sum(-1, keepdim=True)
        for source, seen in zip(sources, tiles, strict=True):
            theirs = deal[source]
            parts = attend_backward(
                queries,
                key_TJK[theirs],
                value_TJK[theirs],
                seen,
                log_total_TH1=log_total,
                gradient_THK=slope_THK[mine],
                agreement_TH1=agreement,
                **rest,
            )
            for total, places, part in zip(gradients, (mine, theirs, theirs), parts, strict=True):
                total[places] += part.to(total.dtype)
    return [out_THK, *gradients]


def whole(row: Row, slope_THK: Tensor, length_B: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The same in one piece."""
    inputs = [x.clone().requires_grad_() for x in row]
    out_THK = packed_attention(*inputs, Segments.of(length_B), scale=0.7, **options)
    return [out_THK, *torch.autograd.grad(out_THK, inputs, slope_THK)]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("seed", range(25))
def test_ranks_together_equal_packed_attention_in_values_and_gradients(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(1, 50, (6,), generator=generator)
    length_B[seed % 6] = 1
    row, options = random_row(seed, length_B), OPTIONS[seed % len(OPTIONS)]
    deal = random_deal(seed, int(length_B.sum()), 2 + seed % 3)
    slope_THK = torch.randn(out_shape(row), generator=generator, dtype=torch.float64)
    ours = ring(row, slope_THK, length_B, deal, options)
    for one, other in zip(ours, whole(row, slope_THK, length_B, options), strict=True):
        close_fp64(one, other)


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("options", [{}, {"window": 300}], ids=str)
def test_segments_of_many_tiles_equal_packed_attention(options: dict[str, Any]) -> None:
    length_B = torch.tensor([3, 1500, 400, 1])
    row, num_tokens = random_row(3, length_B, width=2), int(length_B.sum())
    deal = [torch.arange(1300), torch.arange(1300, num_tokens)]
    slope_THK = torch.randn(out_shape(row), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = ring(row, slope_THK, length_B, deal, options)
    for one, other in zip(ours, whole(row, slope_THK, length_B, options), strict=True):
        close_fp64(one, other)


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, close_fp32), (torch.bfloat16, close_bf16)])
def test_narrow_numbers_are_summed_wide(dtype: torch.dtype, close: Any, options: dict[str, Any]) -> None:
    length_B = torch.tensor([40, 1, 25])
    row = tuple(x.to(dtype) for x in random_row(1, length_B))
    slope_THK = torch.randn(out_shape(row), generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = ring(row, slope_THK.float(), length_B, random_deal(1, 66, 2), options)
    wide = tuple(x.double() for x in row)
    assert ours[0].dtype == dtype
    for one, other in zip(ours, whole(wide, slope_THK.double(), length_B, options), strict=True):
        close(one, other, atol=3e-6 if dtype == torch.float32 else 0.02)


def test_scores_that_grow_from_rank_to_rank_do_not_overflow() -> None:
    """Each rank's keys score far above the last one's: sums so far shrink to nothing and back."""
    length_B = torch.tensor([6])
    query_THK = torch.ones(6, 1, 1, dtype=torch.float64)
    key_TJK = torch.tensor([-2000.0, 300.0, 2000.0, -300.0, 2000.0, 1999.0]).view(6, 1, 1).double()
    value_TJK = torch.arange(6.0).view(6, 1, 1).double()
    row, slope_THK = (query_THK, key_TJK, value_TJK), torch.ones_like(query_THK)
    deal = [torch.tensor([0, 3]), torch.tensor([1, 4]), torch.tensor([2, 5])]
    ours = ring(row, slope_THK, length_B, deal, {})
    close_fp64(ours[0].flatten()[:5], [0.0, 1.0, 2.0, 2.0, 3.0])
    for one, other in zip(ours, whole(row, slope_THK, length_B, {}), strict=True):
        close_fp64(one, other)


def test_what_is_not_a_number_stays_in_its_segment() -> None:
    length_B = torch.tensor([5, 6, 4])
    row = random_row(0, length_B)
    for x in row:
        x[5:11] = float("nan")
    deal = random_deal(0, 15, 2)
    ours = ring(row, torch.ones(out_shape(row), dtype=torch.float64), length_B, deal, {"softcap": 2.0})
    inside_T = torch.zeros(15, dtype=torch.bool)
    inside_T[5:11] = True
    for x in ours:
        assert x[inside_T].isnan().all() and x[~inside_T].isfinite().all()


def shapes(tiles: Tiles) -> list[tuple[int, int, int]]:
    return [(*tile.query_ML.shape, tile.key_MS.shape[1]) for tile in tiles.rectangles]


def test_tiles_stay_within_their_size_and_skip_what_nobody_sees() -> None:
    length_B = torch.tensor([3000])
    deal = [torch.arange(1500), torch.arange(1500, 3000)]
    assert (QUERIES, KEYS) == (256, 1024)
    own = [
        *[(1, 256, 256), (1, 256, 512), (1, 256, 768), (1, 256, 1024)],
        *[(1, 256, 1024), (1, 256, 256), (1, 220, 1024), (1, 220, 476)],
    ]
    assert shapes(table(deal, length_B, 0, 0)) == own
    assert shapes(table(deal, length_B, 1, 1)) == own
    rows = [(1, length, keys) for length in [256] * 5 + [220] for keys in (1024, 476)]
    assert shapes(table(deal, length_B, 1, 0)) == rows
    assert shapes(table(deal, length_B, 0, 1)) == []
    # The first query of rank 1 sees the 9 last keys of rank 0, the ninth sees none.
    (tile,) = table(deal, length_B, 1, 0, window=10).rectangles
    assert tile.key_MS.tolist() == [list(range(1491, 1500))]
    assert shapes(table(deal, torch.tensor([1500, 1500]), 1, 0)) == []


def test_tiles_of_several_segments_share_rectangles_up_to_the_largest_tile() -> None:
    length_B = torch.tensor([200] * 7 + [130, 3])
    everything = [torch.arange(int(length_B.sum()))]
    # 8 tiles of 128 to 255 queries and keys: 256 x 1024 holds six of 200 x 200.
    assert shapes(table(everything, length_B, 0, 0)) == [(6, 200, 200), (2, 200, 200), (1, 3, 3)]
    # Two runs of one segment are two tiles, which share no rectangle.
    parts = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]
    assert shapes(table(parts, torch.tensor([8]), 0, 0)) == [(1, 2, 2), (1, 2, 4)]


@pytest.mark.parametrize(
    ("query", "key", "name"), [([0, 2, 2], [1], "query_at_T"), ([0], [4, 3], "key_at_U")]
)
def test_tokens_out_of_packed_order_are_refused(query: list[int], key: list[int], name: str) -> None:
    query_T = torch.tensor(query)
    with pytest.raises(ValueError) as error:
        Tiles.of(query_T, torch.zeros_like(query_T), torch.tensor(key), window=None)
    assert str(error.value) == f"{name} does not ascend; give a rank's tokens in packed order"


def test_tiles_move_to_another_device_whole() -> None:
    moved = table([torch.arange(5)], torch.tensor([5]), 0, 0, window=3).to(torch.device("meta"))
    (tile,) = moved.rectangles
    assert shapes(moved) == [(1, 5, 5)]
    tables = tile.query_ML, tile.key_MS, tile.query_at_ML, tile.key_at_MS, tile.query_low_ML
    assert all(x.is_meta for x in tables)
