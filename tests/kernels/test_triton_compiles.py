"""What only Triton's compiler refuses: the interpreter takes any Python."""

from __future__ import annotations

import pytest

from tests.kernels.h200 import known_compiler, printed

pytestmark = pytest.mark.world

CODE = """
import warnings
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from millrace.kernels import linear_scan_triton as gpu

warnings.simplefilter("ignore")


def made(kernel, element, wide, word, **constants):
    # How often the kernel tells the other tiles something.
    constants |= {"CARRY": getattr(tl, wide.replace("fp", "float")), "BLOCK": 256, "WINDOW": 32}
    signature = {"rows": ("*" + element,) * 3, "state": "*" + word, "num_tokens": "i64", "num_tiles": "i32"}
    if kernel is gpu._gae:
        signature["rows"] = ("*" + element,) * 4
        signature["segments"] = ("*i32", "*i64", "*" + wide, "*" + element, "*" + wide)
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    return compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"].count("atom.global.gpu.relaxed.exch")


print(
    made(gpu._gae, "bf16", "fp32", "i32"),
    made(gpu._linear_scan, "fp32", "fp32", "i32", REVERSE=True),
    made(gpu._linear_scan, "fp64", "fp64", "i64", REVERSE=False),
)
"""


@pytest.mark.slow
@known_compiler
def test_the_scans_compile_for_an_h200() -> None:
    # Each tile tells three words: share, value, and its last A.
    assert printed(CODE) == "3 3 3\n"
