"""Our products against float64, and bit for bit against themselves whatever surrounds a row."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product as pairs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels import product_cpu as cpu
from millrace.kernels.compiled import compiled, memory
from millrace.kernels.product_cpu import ADD, GATE, WRITE, PackedWeight, kinds, pack, place_of, product
from millrace.kernels.product_tile import PANEL_BYTES
from tests.close import close_bf16, close_fp32, close_fp64

AS_PYTHON = os.environ.get("NUMBA_DISABLE_JIT") == "1"
compiled_only = pytest.mark.skipif(AS_PYTHON, reason="runs as Python, so there is nothing compiled to test")
# What a compiled product of infinities does silently.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# Around tiles of 8, 4 and 2 rows, and around the 64 rows that are computed before they are used.
ROWS = [0, 1, 2, 3, 5, 7, 8, 9, 31, 63, 64, 65, 130, 300]
# Inputs that leave steps over, outputs below a panel, of whole panels, and with some more.
SIZES = [(1, 1), (7, 5), (34, 70), (40, 64), (63, 129)]


def close(actual: Tensor, expected: Tensor) -> None:
    """As close as one rounding to the dtype, and sums in it or in float32, let it be."""
    assert actual.shape == expected.shape
    if actual.dtype == torch.float64:
        close_fp64(actual, expected, atol=1e-11)
    elif actual.dtype == torch.float32:
        close_fp32(actual, expected, rtol=5e-6, atol=2e-5)
    else:
        close_bf16(actual, expected, rtol=2**-8, atol=2e-5)


def even(width: int, dtype: torch.dtype) -> int:
    return width + width % 2 if dtype == torch.bfloat16 else width


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The equation, in float64."""
    y = x.double() @ weight_ND.double().T
    return y if bias_N is None else y + bias_N.double()


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_that_of_float64(biased: bool, dtype: torch.dtype) -> None:
    for seed, (num_rows, (width, out)) in enumerate(pairs(ROWS, SIZES)):
        x, weight_ND = (
            drawn(seed + 1000 * n, size, even(width, dtype), dtype=dtype)
            for n, size in enumerate((num_rows, out))
        )
        bias_N = drawn(seed + 2000, out, dtype=dtype) if biased else None
        y = product(x, pack(weight_ND), bias_N)
        assert y.dtype == dtype
        close(y, exact(x, weight_ND, bias_N))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_have_any_shape_and_lie_anywhere(dtype: torch.dtype) -> None:
    weight_ND, bias_N = drawn(0, 9, 6, dtype=dtype), drawn(1, 9, dtype=dtype)
    x = drawn(2, 2, 3, 5, 12, dtype=dtype)
    for one in (
        x[..., 3:9],
        x[..., ::2],
        x[0, 0, 0, 1:7],
        x.transpose(1, 3)[..., 2:8, :, 1:2].squeeze(-1).mT,
    ):
        close(product(one, pack(weight_ND), bias_N), exact(one, weight_ND, bias_N))
    # Neither a weight nor a bias needs to lie in order.
    wide_ND, wide_N = drawn(3, 18, 12, dtype=dtype), drawn(4, 18, dtype=dtype)
    one = x[..., :6]
    close(product(one, pack(wide_ND[::2, 1::2]), wide_N[::2]), exact(one, wide_ND[::2, 1::2], wide_N[::2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_is_a_copy(dtype: torch.dtype) -> None:
    x, weight_ND = drawn(0, 3, 8, dtype=dtype), drawn(1, 5, 8, dtype=dtype).requires_grad_()
    packed, expected = pack(weight_ND), exact(x, weight_ND.detach().clone())
    with torch.no_grad():
        weight_ND.zero_()
    y = product(x.requires_grad_(), packed)
    assert not y.requires_grad
    close(y, expected.detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_weights_are_packed_as_one_below_the_other(dtype: torch.dtype) -> None:
    weights = [drawn(n, size, 10, dtype=dtype) for n, size in enumerate((33, 5, 70))]
    x, bias_N = drawn(9, 4, 10, dtype=dtype), drawn(8, 108, dtype=dtype)
    packed = pack(*weights)
    assert (packed.num_inputs, packed.num_outputs, packed.gated) == (10, 108, False)
    y = product(x, packed, bias_N)
    close(y, exact(x, torch.cat(weights), bias_N))
    assert torch.equal(y[:, 33:38], product(x, pack(weights[1]), bias_N[33:38]))
    assert torch.equal(product(x, pack(*weights[:2]), bias_N[:38]), y[:, :38])


def test_a_packed_weight_fills_panels_and_begins_where_a_line_does() -> None:
    for dtype, num_outputs in pairs(DTYPES, (1, 129)):
        packed = pack(drawn(0, num_outputs, 6, dtype=dtype))
        num_panels, num_steps, _ = packed.panel_PSC.shape
        columns = packed.panel_PSC.numel() // num_panels // 6
        # A panel is as wide as the registers that sum: of float64 for float64, of float32 for the others.
        assert columns * max(4, dtype.itemsize) == PANEL_BYTES
        assert num_panels == -(-num_outputs // columns)
        assert num_steps == (3 if dtype == torch.bfloat16 and cpu.PAIRS else 6)
        assert packed.panel_PSC.dtype == dtype and packed.panel_PSC.data_ptr() % 64 == 0
        # What is missing to a whole panel is 0: 6 numbers of each output are not.
        assert int(packed.panel_PSC.count_nonzero()) == 6 * num_outputs


@compiled()
def multiplied(lies: Any, place: Any, sizes: Any, kinds: Any, then: Any) -> None:
    (num_rows, num_inputs, num_outputs), (kept, read, zero), (purpose, threads) = sizes, kinds, then
    x_MD = memory(lies[0], (num_rows, num_inputs), read)
    y_MN = memory(lies[1], (num_rows, num_outputs), kept)
    cpu.share_product(x_MD, cpu.weight_at(place, kept), y_MN, purpose, zero, threads)


def done(
    x: Tensor, packed: PackedWeight, y_MN: Tensor, bias_N: Tensor | None, purpose: int, threads: int = 1
) -> Tensor:
    """A product into a copy of y."""
    y_MN, kind = y_MN.clone(), kinds(x.dtype)
    x = x.float() if kind[1].itemsize > kind[0].itemsize else x
    sizes = len(x), packed.num_inputs, packed.num_outputs
    multiplied((x.data_ptr(), y_MN.data_ptr()), place_of(packed, bias_N), sizes, kind, (purpose, threads))
    return y_MN


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_written_added_or_gates_another(biased: bool, dtype: torch.dtype) -> None:
    for seed, (num_rows, (width, out)) in enumerate(pairs((1, 2, 9, 64, 67), SIZES)):
        x, *weights = (
            drawn(seed + 1000 * n, size, even(width, dtype), dtype=dtype)
            for n, size in enumerate((num_rows, out, out))
        )
        x = x / 8
        bias_N = drawn(seed + 3000, 2 * out, dtype=dtype) if biased else None
        halves = (None, None) if bias_N is None else bias_N.split(out)
        y_MN = drawn(seed + 4000, num_rows, out, dtype=dtype)
        first_MN, second_MN = (exact(x, *pair) for pair in zip(weights, halves, strict=True))
        close(done(x, pack(weights[0]), y_MN, halves[0], WRITE), first_MN)
        close(done(x, pack(weights[0]), y_MN, halves[0], ADD), y_MN.double() + first_MN)
        pair = pack(*weights, gated=True)
        assert (pair.num_inputs, pair.num_outputs, pair.gated) == (x.shape[1], out, True)
        close(done(x, pair, y_MN, bias_N, GATE), first_MN * first_MN.sigmoid() * second_MN)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_far_from_0_is_open_or_shut(dtype: torch.dtype) -> None:
    gates = torch.tensor([-1000.0, -90.0, -0.0, 0.0, 1000.0, float("nan"), float("inf"), -float("inf")])
    gate_ND = torch.stack([gates, torch.zeros(8)], 1).to(dtype)
    up_ND = torch.tensor([[3.0, 0.0]] * 8, dtype=dtype)
    x = torch.ones(1, 2, dtype=dtype)
    found = done(x, pack(gate_ND, up_ND, gated=True), x.new_empty(1, 8), None, GATE)[0]
    assert found[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    # -90 / (1 + e^90), times 3.
    close_fp64(float(found[1]), -270 / (1 + float(np.exp(90.0))), rtol=0.01, atol=0)
    assert float(found[4]) == 3000.0 if dtype != torch.bfloat16 else float(found[4]) == 3008.0
    assert bool(found[5].isnan()) and float(found[6]) == float("inf") and bool(found[7].isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    x, weight_ND, bias_N = (
        drawn(0, 70, 14, dtype=dtype),
        drawn(1, 40, 14, dtype=dtype),
        drawn(2, 40, dtype=dtype),
    )
    gated, y_MN = pack(weight_ND, weight_ND, gated=True), drawn(3, 70, 40, dtype=dtype)
    both_N = torch.cat([bias_N, bias_N])
    expected = product(x, pack(weight_ND), bias_N), done(x, gated, y_MN, both_N, GATE)
    for place, odd in ((0, float("nan")), (9, float("nan")), (63, float("inf")), (69, float("nan"))):
        spoilt = x.clone()
        spoilt[place] = odd
        ours = product(spoilt, pack(weight_ND), bias_N), done(spoilt, gated, y_MN, both_N, GATE)
        others = torch.arange(70) != place
        for one, other in zip(ours, expected, strict=True):
            assert torch.equal(one[others], other[others])
            assert not bool(one[place].isfinite().any())


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_of_the_columns_are_disjoint_and_together_the_whole(num_parts: int) -> None:
    x, weight_ND, bias_N = (
        drawn(n, *size, dtype=torch.float32) for n, size in enumerate([(70, 6), (258, 6), (258,)])
    )
    gated = pack(weight_ND[:129], weight_ND[129:], gated=True)
    for packed, out, purpose in ((pack(weight_ND), 258, WRITE), (gated, 129, GATE)):
        weight, then = (packed.panel_PSC.numpy(), bias_N.numpy()), (purpose, np.float32(0))
        together, times = np.zeros((70, out), np.float32), np.zeros((70, out), int)
        for part in range(num_parts):
            y_MN = np.full((70, out), 99, np.float32)
            cpu.multiply(x.numpy(), weight, y_MN, then, num_parts, part)
            together[y_MN != 99] = y_MN[y_MN != 99]
            times += y_MN != 99
        assert (times == 1).all()
        assert torch.equal(torch.from_numpy(together), done(x, packed, x.new_empty(70, out), bias_N, purpose))


@pytest.mark.slow_beyond(1)
@compiled_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_the_batch_and_the_threads(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Large enough that one row alone is one part, and several are more parts than threads."""
    weight_ND, bias_N = drawn(0, 300, 512, dtype=dtype), drawn(1, 300, dtype=dtype)
    packed, x = pack(weight_ND), drawn(2, 515, 512, dtype=dtype) / 16
    pair, y_MN = pack(weight_ND[:150], weight_ND[150:], gated=True), drawn(3, 515, 150, dtype=dtype)
    assert packed.panel_PSC.numel() // cpu.PART_PRODUCT == 1
    monkeypatch.setattr(cpu, "num_threads", lambda: 1)
    whole, gated = product(x, packed, bias_N), done(x, pair, y_MN, bias_N, GATE)
    close(whole, exact(x, weight_ND, bias_N))
    for threads, num_rows in pairs((1, 2, 4), (1, 2, 3, 5, 8, 9, 31, 64, 65, 130, 515)):
        monkeypatch.setattr(cpu, "num_threads", lambda threads=threads: threads)
        for first in {0, 7, 515 - num_rows}:
            rows = slice(first, first + num_rows)
            assert torch.equal(product(x[rows], packed, bias_N), whole[rows][:num_rows])
        rows = slice(515 - num_rows, 515)
        assert torch.equal(done(x[rows], pair, y_MN[rows], bias_N, GATE, threads), gated[rows])
        # Packed by several threads it is the same weight.
        assert num_rows > 1 or torch.equal(pack(weight_ND).panel_PSC, packed.panel_PSC)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 5)}, r"x has shape \(3, 5\), dtypes are .*; the weight has 4 inputs"),
        ({"x": torch.zeros(2, 4).double()}, r"dtypes are \[torch.float32, torch.float64\]"),
        ({"bias_N": torch.zeros(6).bfloat16()}, r"\[torch.float32, torch.float32, torch.bfloat16\]"),
        ({"bias_N": torch.zeros(5)}, r"bias_N has shape \(5,\); the weight has 6 outputs"),
        ({"packed": pack(torch.zeros(3, 4), torch.zeros(3, 4), gated=True)}, "must not be a gated pair"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(2, 4), "packed": pack(torch.ones(6, 4)), **changes}
    with pytest.raises(ValueError, match=message):
        product(**given)


def test_pairs_of_bfloat16_need_an_even_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PAIRS", True)
    with pytest.raises(ValueError) as error:
        pack(torch.zeros(3, 7, dtype=torch.bfloat16))
    assert str(error.value) == "a bfloat16 weight has 7 inputs; here it must be an even number"


def test_our_products_are_for_x86_with_fused_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (*DTYPES, torch.float16)
    for features, expected in (
        ({"fma", "avx2"}, [True, True, True, False]),
        ({"fma", "avx"}, [False] * 4),
        ({"avx2"}, [False] * 4),
    ):
        monkeypatch.setattr(cpu, "FEATURES", features)
        assert [cpu.usable(dtype) for dtype in known] == expected


# Of processors older than this one: 256 bits, and 512 without pairs.
OLDER = {
    "narrow": "+sse4.2,+avx,+avx2,+fma,+bmi2",
    "wide": "+sse4.2,+avx,+avx2,+fma,+bmi2,+avx512f,+avx512bw,+avx512dq,+avx512vl",
}
ELSEWHERE = """
import sys
import torch
from millrace.kernels import product_cpu as cpu
from millrace.kernels.product_tile import WIDE
given = torch.load(sys.argv[1])
odd = cpu.pack(torch.ones(3, 7, dtype=torch.bfloat16))
found = {"WIDE": WIDE, "PAIRS": cpu.PAIRS, "odd": cpu.product(torch.ones(1, 7).bfloat16(), odd)}
for dtype, x, weight, bias in given:
    packed = cpu.pack(weight)
    found[dtype] = cpu.product(x, packed, bias)
    found[dtype, "alone"] = torch.cat([cpu.product(x[i : i + 1], packed, bias) for i in range(len(x))])
torch.save(found, sys.argv[2])
"""


@compiled_only
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processor", OLDER)
def test_older_processors_give_the_same_bits_and_bfloat16_to_within_a_rounding(
    processor: str, tmp_path: Path
) -> None:
    wanted = {name.removeprefix("+") for name in OLDER[processor].split(",")}
    if not wanted <= cpu.FEATURES:
        pytest.skip(f"this processor has no {', '.join(sorted(wanted - cpu.FEATURES))}")
    given = [
        (dtype, *(drawn(n, *size, dtype=dtype) for n, size in enumerate([(75, 62), (71, 62), (71,)])))
        for dtype in (DTYPES if processor == "narrow" else [torch.bfloat16])
    ]
    torch.save(given, tmp_path / "given")
    settings = {"CPU_NAME": "generic", "CPU_FEATURES": OLDER[processor], "CACHE_DIR": str(tmp_path / "code")}
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "given"), str(tmp_path / "found")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **{f"NUMBA_{key}": settings[key] for key in settings}},
    )
    assert run.returncode == 0, run.stderr
    found = torch.load(tmp_path / "found")
    assert (found["WIDE"], found["PAIRS"]) == (processor == "wide", False)
    assert found["odd"].tolist() == [[7.0] * 3]
    for dtype, x, weight_ND, bias_N in given:
        close(found[dtype], exact(x, weight_ND, bias_N))
        assert torch.equal(found[dtype, "alone"], found[dtype])
        if dtype != torch.bfloat16:
            assert torch.equal(found[dtype], product(x, pack(weight_ND), bias_N))
