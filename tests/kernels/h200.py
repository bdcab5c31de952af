"""Runs programs that compile kernels for an H200; in this process, they were made for the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import triton

known_compiler = pytest.mark.skipif(
    not triton.__version__.startswith(("3.6.", "3.9.")), reason="the compiler's interface changes by version"
)
# The beginning of a program that has a GPU to compile for.
ACTIVE = """
import warnings
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

warnings.simplefilter("ignore")


class H200:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(H200())
"""


def printed(program: str) -> str:
    """What a program prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
