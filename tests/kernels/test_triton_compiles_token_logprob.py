"""What only Triton's compiler refuses in log-probabilities without logits, and whether they fit a GPU."""

from __future__ import annotations

import pytest

from tests.kernels.h200 import ACTIVE, known_compiler, printed

pytestmark = pytest.mark.world

CODE = """
from millrace.kernels import token_logprob_triton as gpu
from millrace.kernels.head import Head

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            options["FACTOR"] = gpu.DTYPES[arguments[0][0].dtype]
            made = self.kernel.warmup(*arguments, grid=grid, **options)
            found = [word for word in ("wgmma.mma", "mma.sync", "cp.async.cg") if word in made.asm["ptx"]]
            # An H200 has 227 KiB of shared memory for one program.
            print(self.kernel.__name__, *found, made.metadata.shared <= 227 * 1024)

        return launch


for name in ("_walk", "_slope"):
    setattr(gpu, name, Compiled(getattr(gpu, name)))
for dtype, everything in ((torch.bfloat16, True), (torch.float32, False)):
    hidden_ND, weight_VD = torch.zeros(300, 1024, dtype=dtype), torch.zeros(2000, 1024, dtype=dtype)
    head = Head(weight_VD, torch.zeros(2000, dtype=dtype), 0.5, 30.0)
    row_N, number_N = torch.zeros(300, dtype=torch.int64), torch.zeros(300)
    head = head if everything else Head(weight_VD)
    gpu._parts(hidden_ND, head, row_N, 0.7)
    gpu._slopes(hidden_ND, head, (row_N, *[number_N] * 4, number_N if everything else None), 0.7)
"""
# bfloat16 with everything, and plain float32.
EXPECTED = 2 * "_walk wgmma.mma cp.async.cg True\n_slope wgmma.mma cp.async.cg True\n"


@pytest.mark.slow
@known_compiler
def test_logprobs_without_logits_compile_for_an_h200_with_tensor_cores_and_wide_copies() -> None:
    assert printed(ACTIVE + CODE) == EXPECTED
