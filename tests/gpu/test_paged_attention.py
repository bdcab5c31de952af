"""The kernels over the pool as they run for real: rounding of tensor cores, many programs, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millrace.kernels import dispatch
from millrace.kernels.paged_attention import paged_attention_plain, store_kv_plain
from millrace.kernels.paged_attention_triton import paged_decode, paged_prefill
from tests.close import close_bf16, close_fp32
from tests.kernels.paged_devices import moved
from tests.kernels.paged_pools import Case, random_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]
LENGTHS = [1, 2000, 63, 257, 256, 1025, 700]


def whole(dtype: torch.dtype, group: int = 4, width: int = 128) -> Case:
    return random_case(1, LENGTHS, heads=(2 * group, 2), width=width, block_size=16, dtype=dtype)


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"softcap": 3.0, "window": 70}], ids=str)
@pytest.mark.parametrize(("group", "width"), [(1, 64), (3, 80), (4, 128), (8, 256), (16, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gpu_gives_what_float64_gives(
    dtype: torch.dtype, group: int, width: int, options: dict[str, Any]
) -> None:
    case = whole(dtype, group, width)
    counts = [1, 900, 1, 257, 3, 80, 1]
    last = case.chunk([length - 1 for length in LENGTHS], [1] * len(LENGTHS))
    chunk = case.chunk([length - n for length, n in zip(LENGTHS, counts, strict=True)], counts)
    for part in (last, chunk):
        there = moved(part, "cuda").arguments()
        ours_THK = dispatch.paged_attention(*there, scale=0.2, **options)
        query_THK, key, value, rows = there
        exact = query_THK.double(), key.double(), value.double(), rows
        expected_THK = paged_attention_plain(*exact, scale=0.2, **options)
        if dtype == torch.float32:
            close_fp32(ours_THK, expected_THK, rtol=1e-4, atol=1e-5)
        else:
            close_bf16(ours_THK, expected_THK, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_and_chunks_change_no_bit(dtype: torch.dtype) -> None:
    case = whole(dtype)
    last = moved(case.chunk([length - 1 for length in LENGTHS], [1] * len(LENGTHS)), "cuda")
    together_BHK = paged_decode(*last.arguments(), scale=0.2)
    whole_THK = paged_prefill(*moved(case, "cuda").arguments(), scale=0.2)
    begin = 0
    for b, length in enumerate(LENGTHS):
        alone = moved(case.chunk([length - 1], [1], which=[b]), "cuda")
        assert torch.equal(paged_decode(*alone.arguments(), scale=0.2)[0], together_BHK[b])
        tail = moved(case.chunk([length // 3], [length - length // 3], which=[b]), "cuda")
        tail_THK = paged_prefill(*tail.arguments(), scale=0.2)
        assert torch.equal(tail_THK, whole_THK[begin + length // 3 : begin + length])
        begin += length


def test_tokens_are_stored_and_decoded_in_a_graph() -> None:
    case = whole(torch.bfloat16)
    last = moved(case.chunk([length - 1 for length in LENGTHS], [1] * len(LENGTHS)), "cuda")
    query_BHK, key, value, rows = last.arguments()
    token_BJK = torch.randn(len(LENGTHS), 2, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        dispatch.store_kv(token_BJK, -token_BJK, key, value, rows.slot_T)
        return dispatch.paged_attention(query_BHK, key, value, rows, scale=0.2)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_BHK = step()
    token_BJK.mul_(0.5)
    query_BHK.mul_(-1)
    graph.replay()
    plain = key.clone(), value.clone()
    store_kv_plain(token_BJK, -token_BJK, *plain, rows.slot_T)
    assert torch.equal(key.nan_to_num(9.0), plain[0].nan_to_num(9.0))
    assert torch.equal(value.nan_to_num(9.0), plain[1].nan_to_num(9.0))
    close_bf16(out_BHK, paged_attention_plain(query_BHK, *plain, rows, scale=0.2), atol=1e-2)
