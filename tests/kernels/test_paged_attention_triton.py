"""The Triton kernels over the pool against the plain ones: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from millrace.kernels import paged_attention_triton as gpu
from millrace.kernels.paged_attention import PagedRows, new_pool, paged_attention_plain, store_kv_plain
from tests.close import close_bf16, close_fp32
from tests.kernels.paged_devices import moved
from tests.kernels.paged_pools import Case, random_case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
SCALE = 0.3
# Around blocks of 16, tiles and splits of 64; one key, and one key in the last split.
LENGTHS = [1, 17, 63, 64, 65, 150]


def paged(
    seed: int,
    lengths: list[int],
    counts: list[int] | None = None,
    *,
    pool_dtype: torch.dtype | None = None,
    heads: tuple[int, int] = (4, 2),
    width: int = 32,
    **sizes: Any,
) -> Case:
    """The last `counts` tokens of each row, one without, in blocks of 16."""
    case = random_case(seed, lengths, heads=heads, width=width, **{"block_size": 16} | sizes)
    counts = counts or [1] * len(lengths)
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    return moved(case.chunk(starts, counts), DEVICE, pool_dtype)


def row(case: Case, b: int) -> Case:
    """One row alone, which has one query."""
    one = {name: getattr(case.rows, name)[b : b + 1] for name in ("block_BC", "start_B", "count_B")}
    length = int(case.rows.start_B[b]) + 1
    first_B = torch.zeros_like(one["start_B"])
    rows = replace(case.rows, **one, first_B=first_B, max_count=1, max_length=length)
    return replace(case, query_THK=case.query_THK[b : b + 1], rows=rows)


def decoded(case: Case, split: int | None = 64, **options: Any) -> Tensor:
    return gpu.paged_decode(*case.arguments(), scale=SCALE, split=split, **options)


def prefilled(case: Case, **options: Any) -> Tensor:
    return gpu.paged_prefill(*case.arguments(), scale=SCALE, **options)


def close_to_plain(actual_THK: Tensor, case: Case, **options: Any) -> None:
    expected_THK = paged_attention_plain(*case.arguments(), scale=SCALE, **options)
    assert actual_THK.dtype == case.query_THK.dtype and actual_THK.is_contiguous()
    if actual_THK.dtype == torch.float32:
        close_fp32(actual_THK, expected_THK, rtol=1e-5, atol=1e-5)
    else:
        close_bf16(actual_THK, expected_THK, atol=1e-2)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, None), (3, 0.7), (64, None), (66, None), (90, 2.0)]
)
def test_windows_and_soft_caps_at_the_edges_of_blocks_tiles_and_splits(
    window: int | None, softcap: float | None
) -> None:
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    seed = window or 0
    case = paged(seed, LENGTHS, heads=(3, 1))
    close_to_plain(decoded(case, **options), case, **options)
    case = paged(seed, [1, 65, 21, 129], [1, 22, 1, 44], heads=(3, 1))
    close_to_plain(prefilled(case, **options), case, **options)


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("widths", "options"),
    [
        ((24, 16), {}),
        ((16, 40), {"window": 66}),
        ((24, 16), {"chunk": 70}),
        ((32, 32), {"chunk": 64, "window": 20}),
        ((32, 32), {"chunk": 5}),
    ],
    ids=str,
)
def test_values_of_another_width_and_chunks(widths: tuple[int, int], options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"heads": (3, 1), "width": widths[0], "value_width": widths[1]}
    case = paged(1, LENGTHS, **sizes)
    close_to_plain(decoded(case, **options), case, **options)
    close_to_plain(decoded(case, split=None, **options), case, **options)
    case = paged(2, [1, 65, 21, 129], [1, 22, 1, 44], **sizes)
    close_to_plain(prefilled(case, **options), case, **options)
    stored = [torch.zeros_like(pool) for pool in case.pool]
    gpu.store_kv(
        case.key_TJK,
        case.value_TJK,
        *stored,
        random_case(2, [1, 65, 21, 129], block_size=16).rows.slot_T.to(DEVICE),
    )
    for ours, theirs in zip(stored, case.pool, strict=True):
        assert torch.equal(ours, theirs.nan_to_num(0.0))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("group", "width", "block_size"),
    [
        (1, 32, 64),
        (2, 64, 16),
        (3, 80, 5),
        (4, 96, 16),
        (7, 128, 16),
        (8, 256, 16),
        (16, 8, 16),
        (65, 8, 16),
    ],
)
def test_group_sizes_head_widths_and_block_sizes(group: int, width: int, block_size: int) -> None:
    num_heads = 2 if group < 4 else 1
    sizes: dict[str, Any] = {
        "heads": (num_heads * group, num_heads),
        "width": width,
        "block_size": block_size,
    }
    case = paged(group, [1, 65], **sizes)
    close_to_plain(decoded(case), case)
    case = paged(group, [3, 66, 70], [3, 1, min(23, 130 // group)], **sizes)
    close_to_plain(prefilled(case), case)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_dtypes_of_queries_and_pool(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    case = paged(1, [5, 150], dtype=dtype, pool_dtype=pool_dtype)
    close_to_plain(decoded(case), case)
    case = paged(1, [5, 80], [5, 33], dtype=dtype, pool_dtype=pool_dtype)
    close_to_plain(prefilled(case), case)


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("window", [None, 70])
def test_a_row_decodes_to_the_same_bits_alone_and_in_any_batch(window: int | None) -> None:
    case = paged(2, [40, 64, 65, 600, 150], heads=(2, 1))
    together_BHK = decoded(case, window=window)
    close_to_plain(together_BHK, case, window=window)
    for b in range(5):
        assert torch.equal(decoded(row(case, b), window=window)[0], together_BHK[b])


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("window", [None, 7, 70])
def test_a_prefill_gives_the_same_bits_whole_in_chunks_and_in_any_batch(window: int | None) -> None:
    case = random_case(3, [150, 20], heads=(3, 1), width=32, block_size=16)
    whole_THK = prefilled(moved(case, DEVICE), window=window)
    begin = 0
    for chunk in (1, 21, 63, 65):
        chunk_THK = prefilled(moved(case.chunk([begin, 15], [chunk, 5]), DEVICE), window=window)
        assert torch.equal(chunk_THK[:chunk], whole_THK[begin : begin + chunk])
        assert torch.equal(chunk_THK[chunk:], whole_THK[165:])
        begin += chunk
    assert begin == 150


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_order")
def test_splits_differ_only_by_rounding() -> None:
    case = paged(4, [300, 129])
    whole_BHK = decoded(case, split=None)
    close_to_plain(whole_BHK, case)
    assert torch.equal(decoded(case, split=320), whole_BHK)
    close_fp32(decoded(case, split=128), whole_BHK, atol=1e-5)
    assert not torch.equal(decoded(case, split=128), whole_BHK)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="what is compiled stays as it is")
def test_more_rows_than_a_tile_looks_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FOUND", 4)
    case = paged(5, [3] * 9, [1, 2, 1, 1, 3, 1, 1, 2, 1], heads=(32, 1), width=16)
    close_to_plain(prefilled(case), case)


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_order")
def test_rows_of_one_query_are_decoded_and_others_are_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    one, more = paged(6, [30, 200]), paged(6, [30, 200], [1, 2])
    options: dict[str, Any] = {"scale": SCALE, "window": 100, "softcap": 1.5}
    ours_BHK = gpu.paged_attention(*one.arguments(), split=64, **options)
    assert torch.equal(ours_BHK, gpu.paged_decode(*one.arguments(), split=64, **options))
    ours_THK = gpu.paged_attention(*more.arguments(), **options)
    assert torch.equal(ours_THK, gpu.paged_prefill(*more.arguments(), **options))
    monkeypatch.setattr(gpu, "paged_decode", lambda *_, split, **__: split)
    assert gpu.paged_attention(*one.arguments(), **options) == 256


@pytest.mark.slow
def test_a_key_of_nan_is_seen_in_its_own_row_from_its_place_on_and_nowhere_else() -> None:
    case = paged(7, [90, 50], [90, 50])
    case.pool[0][case.rows.block_BC[0, 4], 1, 6] = float("nan")
    nan_TH = prefilled(case).isnan().any(-1)
    assert not nan_TH[:, :2].any() and torch.equal(nan_TH[:, 2], nan_TH[:, 3])
    assert nan_TH[:, 2].nonzero().flatten().tolist() == list(range(70, 90))
    alone = paged(7, [90, 50])
    alone.pool[0][alone.rows.block_BC[0, 4], 1, 6] = float("nan")
    assert decoded(alone).isnan().all(-1).tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.slow
def test_queries_in_any_strides() -> None:
    for kernel, case in ((decoded, paged(8, [9, 150])), (prefilled, paged(8, [9, 70], [9, 30]))):
        turned_HTK = case.query_THK.transpose(0, 1).contiguous()
        turned = replace(case, query_THK=turned_HTK.transpose(0, 1))
        assert turned.query_THK.stride() != case.query_THK.stride()
        assert torch.equal(kernel(turned), kernel(case))


@pytest.mark.parametrize("widths", [(128, 64), (64, 128)])
def test_a_tile_is_sized_for_the_wider_of_keys_and_values(widths: tuple[int, int]) -> None:
    pools = torch.zeros(1, 1, 16, widths[0]), torch.zeros(1, 1, 16, widths[1])
    # 16 KiB of rows of 128 float32.
    assert gpu._options(torch.zeros(1, 1, widths[0]), pools, scale=1.0)["TILE"] == 32


@pytest.mark.parametrize("split", [0, -64, 63, 96])
def test_a_split_that_is_no_number_of_tiles_is_refused(split: int) -> None:
    with pytest.raises(ValueError) as refused:
        decoded(paged(9, [3]), split=split)
    assert str(refused.value) == f"split is {split}; it is a positive multiple of 64, or None"


def test_float64_is_refused_by_name() -> None:
    taken = "the Triton kernels take torch.bfloat16, torch.float16, torch.float32"
    for dtype, pool_dtype, name in (
        (torch.float64, torch.float32, "query_THK"),
        (torch.float32, torch.float64, "key_PJSK"),
    ):
        case = paged(9, [3], dtype=dtype, pool_dtype=pool_dtype)
        for kernel in (decoded, prefilled):
            with pytest.raises(ValueError) as refused:
                kernel(case)
            assert str(refused.value) == f"{name} is torch.float64; {taken}"


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize(("heads", "width", "size"), [(1, 8, 16), (3, 80, 16), (2, 32, 5)])
def test_keys_and_values_are_stored_in_their_slots(
    heads: int, width: int, size: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    draw = torch.Generator().manual_seed(width)
    # As a model gives them: heads first in memory.
    key_TJK, value_TJK = torch.randn(2, heads, 7, width, generator=draw).to(DEVICE, dtypes[0]).transpose(1, 2)
    slot_T = torch.tensor([0, 4 * size - 1, -1, size, size - 1, -1, 2 * size + 3], device=DEVICE)
    pools = [new_pool(4, heads, size, width, dtype=dtypes[1], device=torch.device(DEVICE)) for _ in range(2)]
    gpu.store_kv(key_TJK, value_TJK, *pools[0], slot_T)
    store_kv_plain(key_TJK, value_TJK, *pools[1], slot_T)
    for ours, plain in zip(*pools, strict=True):
        close_bf16(ours, plain, rtol=2**-7, atol=0)
        assert int((ours != 0).sum()) == 5 * heads * width


def test_no_tokens_are_stored_nowhere_and_attend_to_nothing() -> None:
    case = paged(9, [3])
    before = case.pool[0].clone()
    gpu.store_kv(case.key_TJK[:0], case.value_TJK[:0], *case.pool, case.rows.slot_T[:0])
    assert torch.equal(case.pool[0].nan_to_num(9.0), before.nan_to_num(9.0))
    names = ("block_BC", "start_B", "first_B", "count_B")
    rows = replace(case.rows, **{name: getattr(case.rows, name)[:0] for name in names})
    none = replace(case, query_THK=case.query_THK[:0], rows=rows)
    assert decoded(none).shape == prefilled(none).shape == (0, 4, 32)


@pytest.mark.skipif(not INTERPRETED, reason="needs 8 GiB that are never touched, which only a CPU has")
def test_a_block_beyond_two_thousand_million_numbers_is_found() -> None:
    # 17 blocks 2^27 numbers apart: the last begins at 2^31.
    pools = [torch.empty(2**31 + 512, dtype=torch.float16) for _ in range(2)]
    key_PJSK, value_PJSK = (pool.as_strided((17, 1, 16, 32), (2**27, 512, 32, 1)) for pool in pools)
    token_TJK = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0)).half()
    gpu.store_kv(token_TJK, 2 * token_TJK, key_PJSK, value_PJSK, torch.tensor([0, 16 * 16]))
    assert torch.equal(pools[0][2**31 : 2**31 + 32], token_TJK[1, 0])
    place_B = torch.tensor([0])
    table_BC = torch.tensor([[16]], dtype=torch.int32)
    rows = PagedRows(table_BC, place_B, place_B, torch.tensor([1]), place_B, max_count=1, max_length=1)
    for kernel in (gpu.paged_decode, gpu.paged_prefill):
        out_THK = kernel(token_TJK[:1], key_PJSK, value_PJSK, rows, scale=1.0)
        assert torch.equal(out_THK[0], 2 * token_TJK[1])


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            self.grids.append(grid)
            self.options = options

        return launch


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """In the place of all kernels."""
    kernel = Recorder()
    for name in ("_attend", "_merge", "_store_kv"):
        monkeypatch.setattr(gpu, name, kernel)
    return kernel


@pytest.mark.parametrize(
    ("width", "dtype", "tile"),
    [
        (32, torch.bfloat16, 64),
        (96, torch.bfloat16, 64),
        (80, torch.float32, 32),
        (256, torch.float16, 32),
        (256, torch.float32, 16),
        (512, torch.float32, 16),
    ],
)
def test_a_tile_of_keys_has_16_kib_and_16_to_64_of_them(
    recorder: Recorder, width: int, dtype: torch.dtype, tile: int
) -> None:
    query_THK, (key, value) = torch.zeros(1, 6, width), torch.zeros(2, 3, 2, 8, width, dtype=dtype)
    gpu.paged_prefill(query_THK, key, value, paged(0, [1]).rows, scale=2.0)
    given = recorder.options
    assert (given["TILE"], given["WIDTH"]) == (tile, width)
    assert given["WIDTH_2"] == triton.next_power_of_2(width)
    assert (given["GROUP"], given["SIZE"], given["num_warps"]) == (3, 8, 4)


@pytest.mark.parametrize(("group", "decode", "prefill"), [(1, 16, 64), (17, 32, 64), (65, 128, 128)])
def test_queries_and_heads_fill_16_rows_of_a_decode_and_64_of_a_prefill(
    recorder: Recorder, group: int, decode: int, prefill: int
) -> None:
    case = paged(0, [1, 1], heads=(group, 1))
    decoded(case)
    assert (recorder.options["ROWS"], recorder.options["DECODE"]) == (decode, True)
    prefilled(case)
    assert (recorder.options["ROWS"], recorder.options["DECODE"]) == (prefill, False)


@pytest.mark.parametrize(
    ("longest", "window", "splits"),
    [
        (64, None, 1),
        (65, None, 2),
        (300, None, 5),
        (300, 1, 1),
        (300, 2, 2),
        (300, 65, 2),
        (300, 66, 3),
        (70, 66, 2),
    ],
)
@pytest.mark.parametrize("limit", ["window", "chunk"])
def test_a_decode_has_as_many_splits_as_a_row_may_reach_into(
    recorder: Recorder, longest: int, window: int | None, splits: int, limit: str
) -> None:
    decoded(paged(0, [5, longest, 7], heads=(6, 2)), **{limit: window})
    assert recorder.grids == [(3, 2, splits), (3, 6)][: 1 if splits == 1 else 2]
    if splits > 1:
        assert (recorder.options["PARTS"], recorder.options["num_warps"]) == (8, 1)


def test_a_prefill_has_a_tile_for_every_64_rows_and_one_more_for_each_request(recorder: Recorder) -> None:
    prefilled(paged(0, [70, 21, 40], [70, 1, 40], heads=(6, 2)))
    # 111 queries, 21 a tile
    assert recorder.grids == [(5 + 3, 2, 1)]


def test_rows_are_looked_for_in_powers_of_two() -> None:
    assert (gpu.FOUND.value, gpu.LOWEST.value) == (256, torch.finfo(torch.float32).min)


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_order")
def test_exact_rows_have_the_same_bits_one_query_at_a_time_or_many() -> None:
    lengths = [9, 70, 4]
    whole = paged(11, lengths, lengths)
    last = paged(11, lengths)
    exact = [
        gpu.paged_attention(case.query_THK, *case.pool, replace(case.rows, exact=True), scale=SCALE, split=64)
        for case in (whole, last)
    ]
    assert torch.equal(exact[1], exact[0][torch.tensor(lengths).cumsum(0) - 1])
    close_fp32(gpu.paged_attention(*last.arguments(), scale=SCALE, split=64), exact[1], atol=1e-5)
