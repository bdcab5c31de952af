"""Tiles of a product: machine code against the plain twin, and that against float64."""

from __future__ import annotations

from itertools import product as pairs
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels import product_cpu
from millrace.kernels import product_tile as tile
from millrace.kernels.compiled import compiled
from millrace.kernels.product_cpu import kinds, pack
from tests.close import close_fp32, close_fp64

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CPUINFO = Path("/proc/cpuinfo")


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.skipif(not CPUINFO.exists(), reason="there is no list of what the processor can do")
def test_wide_vectors_and_pairs_are_used_where_the_processor_has_them() -> None:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    assert ("avx512f" in flags, "avx512_bf16" in flags) == (tile.WIDE, tile.PAIRS)
    assert ("fma" in tile.FEATURES) == ("fma" in flags)
    assert not any(name.startswith(("+", "-")) for name in tile.FEATURES)


def multiply(x_RD: Any, panel_SC: Any, sum_RC: Any, soon_SC: Any) -> None:
    tile.multiply_rows(x_RD, panel_SC, sum_RC, soon_SC)


# bfloat16 in pairs too where the processor multiplies them.
WAYS = [*((dtype, False) for dtype in DTYPES), *([(torch.bfloat16, True)] if tile.PAIRS else [])]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("dtype", "in_pairs"), WAYS)
def test_the_tiles_in_machine_code_are_the_plain_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, in_pairs: bool
) -> None:
    monkeypatch.setattr(product_cpu, "PAIRS", in_pairs)
    # Also where kernels run as Python: only here is the generated code looked at.
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    in_tiles = compiled()(multiply)
    kept, read, zero = kinds(dtype)
    for num_rows, width in pairs((1, 2, 3, 5, 8, 9, 15), (2, 6, 8, 22)):
        weight_ND, x = drawn(width, 40, width, dtype=dtype), drawn(num_rows, num_rows, width, dtype=dtype)
        panel_SC = pack(weight_ND).panel_PSC[0]
        panel_SC = (panel_SC.view(torch.uint16) if dtype == torch.bfloat16 else panel_SC).numpy()
        expected = x.double() @ weight_ND.double().T
        x = x.float() if read.itemsize > kept.itemsize else x
        x_RD = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
        columns = panel_SC.size // width
        for way in (in_tiles, tile.multiply_rows):
            sum_RC = np.full((num_rows + 1, columns), 9, zero.dtype)
            way(x_RD, panel_SC, sum_RC, panel_SC)
            # The row behind the last is not touched.
            assert (sum_RC[-1] == 9).all()
            close = close_fp64 if dtype == torch.float64 else close_fp32
            some = min(columns, 40)
            close(sum_RC[:-1, :some], expected[:, :some], atol=1e-12 if dtype == torch.float64 else 6e-6)
