"""The compiled attention against the plain one, and bit for bit against itself whatever surrounds a row."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels import paged_attention_cpu as cpu
from millrace.kernels.compiled import compiled
from millrace.kernels.paged_attention import new_pool, paged_attention_plain, store_kv_plain
from tests.close import close_bf16, close_fp32, close_fp64
from tests.kernels.paged_pools import Case, random_case

AS_PYTHON = os.environ.get("NUMBA_DISABLE_JIT") == "1"
compiled_only = pytest.mark.skipif(AS_PYTHON, reason="runs as Python, so there is nothing compiled to test")
# What a compiled product of NaN does silently.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

HEADS = [(4, 2), (2, 2), (3, 1), (6, 3), (16, 1), (7, 1), (10, 2)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 7},
    {"window": 17},
    {"softcap": 2.0},
    {"window": 9, "softcap": 0.5},
]
# Of the heads of models.
WIDTHS = [32, 64, 80, 96, 128, 256]


def attended(case: Case, **options: Any) -> Tensor:
    return cpu.paged_attention(*case.arguments(), scale=0.6, **options)


def plain(case: Case, **options: Any) -> Tensor:
    return paged_attention_plain(*case.arguments(), scale=0.6, **options)


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("widths", "options"),
    [
        ((12, 8), {}),
        ((3, 9), {"window": 7}),
        ((12, 8), {"chunk": 5}),
        ((6, 6), {"chunk": 8, "window": 3}),
        ((1, 4), {"chunk": 1}),
    ],
    ids=str,
)
def test_values_of_another_width_and_chunks(
    widths: tuple[int, int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    case = random_case(5, [9, 20, 1, 33], heads=(4, 2), width=widths[0], value_width=widths[1], dtype=dtype)
    stored = new_pool(*case.pool[0].shape, widths[1], dtype=dtype, device=torch.device("cpu"))
    cpu.store_kv(case.key_TJK, case.value_TJK, *stored, case.rows.slot_T)
    actual = cpu.paged_attention(case.query_THK, *stored, case.rows, scale=0.6, **options)
    expected = plain(case, **options)
    assert actual.shape == (*case.query_THK.shape[:2], widths[1])
    close_fp32(
        actual,
        expected,
        atol=3e-6 if dtype != torch.bfloat16 else 1e-2,
        rtol=1e-5 if dtype != torch.bfloat16 else 1e-2,
    )
    part = case.chunk([8, 13], [1, 4], which=[0, 1])
    index = [8, *range(9 + 13, 9 + 17)]
    assert torch.equal(attended(part, **options), attended(case, **options)[index])


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_shares_are_exponentials_below_the_highest_and_0_outside(softcap: float) -> None:
    score_L = np.array([math.nan, 9.0, -2.0, 0.25, 3.0, -0.5, math.nan, 50.0])
    inside = [-2.0, 0.25, 3.0, -0.5]
    capped = [softcap * math.tanh(x / softcap) if softcap else x for x in inside]
    cpu._softmax(score_L, 2, 6, softcap)
    close_fp64(score_L, [0, 0, *(math.exp(x - max(capped)) for x in capped), 0, 0])


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_a_score_of_nan_spoils_its_shares_wherever_it_stands(softcap: float) -> None:
    for place in range(3):
        score_L = np.array([1.0, 2.0, 0.5, 7.0])
        score_L[place] = math.nan
        cpu._softmax(score_L, 0, 3, softcap)
        assert np.isnan(score_L[place])


@pytest.mark.slow_beyond(19)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_compiled_equals_plain(seed: int, dtype: torch.dtype) -> None:
    size, heads, options = (8, 16, 5)[seed % 3], HEADS[seed % 7], OPTIONS[seed % 6]
    lengths = [1, size - 1, size, size + 1, 33] if seed % 2 else [2 * size + 1, 3]
    case = random_case(seed, lengths, heads=heads, width=3 + 5 * (seed % 4), block_size=size, dtype=dtype)
    actual, expected = attended(case, **options), plain(case, **options)
    assert actual.dtype == dtype
    if dtype == torch.float32:
        close_fp32(actual, expected, atol=3e-6)
    else:
        {torch.float64: close_fp64, torch.bfloat16: close_bf16}[dtype](actual, expected)


@pytest.mark.slow_beyond(2)
@compiled_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_compiled_equals_plain_in_the_sizes_of_models(width: int, dtype: torch.dtype) -> None:
    # Every second one, so that dtypes and widths take turns.
    first = (WIDTHS.index(width) + dtype.itemsize // 4) % 2
    for seed in range(first, len(OPTIONS), 2):
        size, options = (8, 16, 32, 16, 16, 32)[seed], OPTIONS[seed]
        lengths = [1, 31, 32, 33, 130, 16]
        heads = HEADS[(seed + width) % 7]
        case = random_case(seed, lengths, heads=heads, width=width, block_size=size, dtype=dtype)
        actual, expected = (way(case, scale=width**-0.5, **options) for way in (scaled_cpu, scaled_plain))
        if dtype == torch.float64:
            close_fp64(actual, expected)
        elif dtype == torch.float32:
            close_fp32(actual, expected, rtol=1e-4, atol=3e-6)
        else:
            close_bf16(actual, expected)


def scaled_cpu(case: Case, **options: Any) -> Tensor:
    return cpu.paged_attention(*case.arguments(), **options)


def scaled_plain(case: Case, **options: Any) -> Tensor:
    return paged_attention_plain(*case.arguments(), **options)


def test_float32_queries_read_a_bfloat16_pool_and_the_other_way_round() -> None:
    case = random_case(5, [9, 20], dtype=torch.bfloat16)
    wide = replace(case, query_THK=case.query_THK.float() + 1e-3)
    close_fp32(attended(wide), plain(wide), atol=3e-6)
    pool = new_pool(7, 2, 8, 6, dtype=torch.float32, device=torch.device("cpu"))
    for ours, theirs in zip(pool, case.pool, strict=True):
        ours.copy_(theirs)
    narrow = replace(case, pool=pool)
    assert torch.equal(attended(narrow), attended(case))


def test_two_tokens_by_hand() -> None:
    key, value = new_pool(2, 1, 8, 1, dtype=torch.float32, device=torch.device("cpu"))
    key[1, 0, :2, 0], value[1, 0, :2, 0] = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 10.0])
    one = torch.tensor([1])
    rows = random_case(0, [1]).rows
    rows = replace(rows, block_BC=torch.tensor([[1]], dtype=torch.int32), start_B=one)
    query_THK = torch.full((1, 1, 1), math.log(3))
    out = cpu.paged_attention(query_THK, key, value, rows, scale=2.0)
    close_fp32(out.flatten(), [(1 * 2.0 + 9 * 10.0) / 10])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_chunks_neighbours_or_blocks(dtype: torch.dtype, options: dict[str, Any]) -> None:
    lengths = [35, 9, 18]
    case = random_case(2, lengths, heads=(6, 2), dtype=dtype)
    whole = attended(case, **options)
    for size, placement in ((8, 1), (16, 0), (32, 2), (3, 0)):
        settings: dict[str, Any] = {"block_size": size, "placement": placement, "dtype": dtype}
        moved = random_case(2, lengths, heads=(6, 2), **settings)
        assert torch.equal(attended(moved, **options), whole)
    for start, count, which in (([0, 4], [9, 5], [0, 1]), ([9, 17], [20, 1], [0, 2]), ([29], [6], [0])):
        part = case.chunk(start, count, which=which)
        offset = [(0, 35, 44)[b] + at for b, at in zip(which, start, strict=True)]
        index = [at + i for at, n in zip(offset, count, strict=True) for i in range(n)]
        assert torch.equal(attended(part, **options), whole[index])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_only_those_who_see_it(bad: float) -> None:
    clean, case = random_case(4, [12, 6], heads=(2, 1)), random_case(4, [12, 6], heads=(2, 1))
    slot = int(case.rows.slot_T[5])
    case.pool[0][slot // 8, 0, slot % 8, 2] = bad
    spoiled, expected = attended(case), attended(clean)
    seen_T = (torch.arange(18) >= 5) & (torch.arange(18) < 12)
    assert torch.equal(spoiled[~seen_T], expected[~seen_T])
    hurt = ~spoiled[seen_T].isfinite().all(-1)
    # An infinite score that is negative hides the token; any other leaves nothing finite.
    hidden = (case.query_THK[seen_T][..., 2] < 0) & (bad == math.inf)
    assert torch.equal(hurt, ~hidden)
    window = attended(case, window=3)[8:12]
    assert torch.equal(window, attended(clean, window=3)[8:12])


def test_a_large_score_neither_overflows_nor_hides_what_is_as_large() -> None:
    case = random_case(4, [9], heads=(1, 1), dtype=torch.float64)
    case = replace(case, query_THK=case.query_THK * 1e4)
    close_fp64(attended(case), plain(case))
    close_fp64(attended(case, softcap=3.0), plain(case, softcap=3.0))


def stored(dtype: torch.dtype, slot_T: Tensor, news: tuple[Tensor, Tensor], how: Any) -> list[Tensor]:
    pool = new_pool(3, 2, 4, 5, dtype=dtype, device=torch.device("cpu"))
    for part in pool:
        part.fill_(7)
    how(*news, *pool, slot_T)
    return [part.clone() for part in pool]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_storing_equals_the_plain_one_in_any_strides_and_dtype(dtype: torch.dtype) -> None:
    slot_T = torch.tensor([11, -1, 5, 0, 4])
    news = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    for ours, theirs in zip(
        stored(dtype, slot_T, tuple(news), cpu.store_kv),
        stored(dtype, slot_T, tuple(news), store_kv_plain),
        strict=True,
    ):
        assert torch.equal(ours, theirs) and int((ours != 7).sum()) == 40


def test_a_slot_beyond_the_pool_is_refused() -> None:
    news = torch.zeros(2, 2, 2, 5)
    with pytest.raises(ValueError, match="slot_T holds 12; the pool has 3 blocks of 4 slots"):
        stored(torch.float32, torch.tensor([3, 12]), tuple(news), cpu.store_kv)
    empty = new_pool(0, 2, 4, 5, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="slot_T holds 0; the pool has 0 blocks of 4 slots"):
        cpu.store_kv(*news, *empty, torch.tensor([-1, 0]))


def test_a_pool_that_lies_otherwise_is_refused() -> None:
    case = random_case(0, [3])
    pool = case.pool[0].contiguous(), case.pool[1]
    with pytest.raises(ValueError, match=r"keys have strides \(96, 48, 6, 1\) .* make it with new_pool"):
        attended(replace(case, pool=pool))
    pool = case.pool[0], torch.cat([case.pool[1]] * 2, -1)[..., :6]
    with pytest.raises(ValueError, match=r"its values \(192, 96, 12, 1\); make it with new_pool"):
        attended(replace(case, pool=pool))


@pytest.mark.parametrize(
    ("query", "pool"),
    [(torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float16, torch.float32)],
)
def test_dtypes_that_do_not_meet_are_refused(query: torch.dtype, pool: torch.dtype) -> None:
    case = random_case(0, [3], dtype=pool)
    with pytest.raises(ValueError, match=f"query_THK is {query} and the pool {pool}; on the CPU both are"):
        attended(replace(case, query_THK=case.query_THK.to(query)))


def changed(case: Case, **tables: list[Any]) -> Case:
    dtypes = {"block_BC": torch.int32}
    new = {name: torch.tensor(x, dtype=dtypes.get(name, torch.int64)) for name, x in tables.items()}
    return replace(case, rows=replace(case.rows, **new))


@pytest.mark.parametrize(
    "tables",
    [
        {"start_B": [0, -1]},
        {"start_B": [0, 7]},  # needs a block more
        {"first_B": [0, -1]},
        {"first_B": [0, 4]},
        {"count_B": [3, 3]},
        {"block_BC": [[0], [-1]]},
        {"block_BC": [[2], [4]]},
    ],
    ids=str,
)
def test_a_row_outside_the_pool_or_the_queries_is_refused_by_name(tables: dict[str, Any]) -> None:
    case = random_case(0, [3, 2])
    case = changed(case, block_BC=case.rows.block_BC[:, :1].tolist())
    with pytest.raises(ValueError, match=r"row 1 has .* there are 5 queries and 4 blocks of 8"):
        attended(changed(case, **tables))


def test_the_first_of_blocks_of_one_slot_is_looked_at_too() -> None:
    case = random_case(0, [3], block_size=1)
    with pytest.raises(ValueError, match="row 0 has 3 queries at 0"):
        attended(changed(case, block_BC=[[-1, *case.rows.block_BC[0, 1:].tolist()]]))


def test_blocks_before_the_window_are_not_read() -> None:
    case = random_case(0, [20], heads=(1, 1))
    last = case.chunk([18], [1])
    expected = attended(last, window=3)
    freed = last.rows.block_BC.clone()
    freed[0, :2] = -5
    gone = replace(last, rows=replace(last.rows, block_BC=freed))
    assert torch.equal(attended(gone, window=3), expected)
    with pytest.raises(ValueError, match=r"row 0 has 1 queries at 0, the first at position 18, and blocks"):
        attended(gone, window=4)


def test_nothing_to_do_gives_nothing() -> None:
    case = random_case(0, [3])
    nothing = torch.empty(0, dtype=torch.int64)
    rows = replace(
        case.rows, block_BC=case.rows.block_BC[:0], start_B=nothing, first_B=nothing, count_B=nothing
    )
    assert cpu.paged_attention(case.query_THK[:0], *case.pool, rows, scale=1.0).shape == (0, 4, 6)


def tables_of(case: Case) -> tuple[Any, ...]:
    rows = case.rows
    tables = tuple(x.numpy() for x in (rows.block_BC, rows.start_B, rows.first_B, rows.count_B))
    return tables, cpu.pool_arrays(*case.pool)


def test_work_counts_positions_and_what_an_item_costs_at_each_key_head() -> None:
    tables, pools = tables_of(random_case(0, [3, 4], heads=(6, 3)).chunk([1, 3], [2, 1]))
    assert cpu.work(tables, pools, 3, (100, cpu.NO_LIMIT)) == 3 * (2 + 3 + 4 + 3 * 16)
    assert cpu.work(tables, pools, 3, (3, cpu.NO_LIMIT)) == 3 * (2 + 3 + 3 + 3 * 16)
    # Chunks of 3: positions 1 and 2 see all, position 3 itself alone.
    assert cpu.work(tables, pools, 3, (100, 3)) == 3 * (2 + 3 + 1 + 3 * 16)


@pytest.mark.parametrize("window", [100, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 50])
def test_parts_of_the_work_are_disjoint_and_together_the_whole(window: int, num_parts: int) -> None:
    case = random_case(0, [3, 4], heads=(2, 2), width=3)
    tables, pools = tables_of(case)
    limits = window, cpu.NO_LIMIT
    total, whole = cpu.work(tables, pools, 7, limits), attended(case, window=window).numpy()
    options = limits, np.float32(0.6), 0.0
    together, times = np.zeros_like(whole), np.zeros(whole.shape, np.int64)
    for part in range(num_parts):
        out = np.full_like(whole, 99)
        cpu.attend(case.query_THK.numpy(), out, (pools, tables), options, (total, num_parts), part)
        together[out != 99] = out[out != 99]
        times += out != 99
    assert (times == 1).all()
    assert np.array_equal(together, whole)


def test_an_item_belongs_to_the_part_in_which_it_begins() -> None:
    case = random_case(0, [3, 4], heads=(2, 2), width=3)
    tables, pools = tables_of(case)
    # The first item costs 17, so of parts of 17 the second begins with the second item, and ends with it.
    options = (100, cpu.NO_LIMIT), np.float32(0.6), 0.0
    for cost, begun in ((17, [False, True]), (18, [False, False]), (16, [False, True])):
        out = np.full((7, 2, 3), 99, np.float32)
        whole = 9 * cost, 9
        cpu.attend(case.query_THK.numpy(), out, (pools, tables), options, whole, 1)
        assert (out[0] != 99).all(-1).tolist() == begun


@pytest.mark.parametrize("threads", [2, 3])
def test_no_bit_depends_on_the_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    case = random_case(7, [20, 1, 13], heads=(4, 2))
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: 1)
    alone = attended(case)
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu, "PART_WORK", 50)
    assert torch.equal(attended(case), alone)


def test_parts_are_as_many_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = random_case(7, [3], heads=(6, 2), width=5), []
    monkeypatch.setattr(cpu, "cuts", lambda most: asked.append(most) or (1, 1))
    # 2 key heads, 3 items of 1, 2 and 3 positions each: work of 108, for 3 query heads of width 5.
    for part_work, most in ((1620, 1), (1621, 0), (405, 4)):
        monkeypatch.setattr(cpu, "PART_WORK", part_work)
        attended(case)
        assert asked.pop() == most


@pytest.mark.world
@compiled_only
def test_threads_work_in_a_forked_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "PART_WORK", 50)
    case = random_case(7, [20, 1, 13], heads=(4, 2))
    expected = attended(case)
    child = os.fork()
    if child == 0:
        os._exit(int(not torch.equal(attended(case), expected)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def product_case(heads: int, rows: int, columns: int, dtype: str) -> tuple[Any, ...]:
    draw = np.random.default_rng(heads + rows + columns)
    x, matrix, y = (draw.normal(size=n) for n in ((heads, rows + 3), (rows, columns), (heads, columns + 2)))
    if dtype == "bfloat16":
        bits = torch.from_numpy(matrix).bfloat16().view(torch.uint16).numpy()
        return x.astype(np.float32)[:, 1 : rows + 1], bits, y.astype(np.float32)[:, :columns]
    return x.astype(dtype)[:, 1 : rows + 1], matrix.astype(dtype), y.astype(dtype)[:, :columns]


def add_product(x: Any, matrix: Any, y: Any) -> None:
    cpu.add_product(x, matrix, y)


def add_product_and_fetch(x: Any, matrix: Any, y: Any) -> None:
    cpu.add_product(x, matrix, y, matrix)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float64", "bfloat16"))]
)
def test_the_product_in_machine_code_is_the_product(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    # Also where kernels run as Python: only here is the generated code looked at.
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    product, fetching = compiled("contract")(add_product), compiled("contract")(add_product_and_fetch)
    for heads, rows, columns in [(7, 5, 55), (4, 1, 32), (2, 3, 16), (1, 9, 5), (3, 2, 37), (8, 4, 1)]:
        x, matrix, y = product_case(heads, rows, columns, dtype)
        wide = (
            torch.from_numpy(matrix).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(matrix)
        )
        expected = torch.from_numpy(y).double() + torch.from_numpy(x).double() @ wide.double()
        ours, twin = y.base.copy()[:, :columns], y.copy()
        product(x, matrix, ours)
        same = y.base.copy()[:, :columns]
        fetching(x, matrix, same)
        assert np.array_equal(same, ours)
        cpu.add_product(x, matrix, twin)
        for actual in (ours, twin):
            if dtype == "float64":
                close_fp64(actual, expected)
            else:
                close_fp32(actual, expected, atol=3e-6)
        # What stands to the right of the columns is not touched.
        assert np.array_equal(ours.base[:, columns:], y.base[:, columns:])
