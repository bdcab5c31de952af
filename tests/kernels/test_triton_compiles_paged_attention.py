"""What only Triton's compiler refuses in attention over the pool, and whether it finds fast instructions."""

from __future__ import annotations

import pytest

from tests.kernels.h200 import ACTIVE, known_compiler, printed

pytestmark = pytest.mark.world

CODE = """
from millrace.kernels import paged_attention_triton as gpu
from millrace.kernels.paged_attention import PagedRows

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            if "FACTOR" in options:
                options["FACTOR"] = gpu.DTYPES[torch.bfloat16]
            ptx = self.kernel.warmup(*arguments, grid=grid, **options).asm["ptx"]
            found = [word for word in ("wgmma.mma", "mma.sync", "cp.async.cg") if word in ptx]
            print(self.kernel.__name__, *found, "ld.global.b16" in ptx)

        return launch


for name in ("_store_kv", "_attend", "_merge"):
    setattr(gpu, name, Compiled(getattr(gpu, name)))
token_THK = torch.zeros(3, 32, 128, dtype=torch.bfloat16)
pools = torch.zeros(2, 9, 8, 16, 128, dtype=torch.bfloat16)
row_B = torch.zeros(1, dtype=torch.int64)
rows = PagedRows(torch.zeros(1, 40, dtype=torch.int32), row_B, row_B, row_B, row_B, 1, 600)
gpu.store_kv(token_THK[:, :8], token_THK[:, :8], *pools, torch.zeros(3, dtype=torch.int64))
gpu.paged_decode(token_THK[:1], *pools, rows, scale=0.1)
gpu.paged_decode(token_THK[:1], *pools, rows, scale=0.1, split=None)
gpu.paged_prefill(token_THK, *pools, rows, scale=0.1, window=70, softcap=30.0)
"""
# Tensor cores, 16 bytes a copy past the first-level cache, and no number loaded on its own.
EXPECTED = """\
_store_kv False
_attend mma.sync cp.async.cg False
_merge False
_attend mma.sync cp.async.cg False
_attend wgmma.mma cp.async.cg False
"""


@pytest.mark.slow
@known_compiler
def test_attention_over_the_pool_compiles_for_an_h200_with_tensor_cores_and_wide_copies() -> None:
    assert printed(ACTIVE + CODE) == EXPECTED
