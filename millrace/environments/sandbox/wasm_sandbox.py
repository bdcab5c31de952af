"""Runs Python code in CPython for WebAssembly, which needs no rights and sees nothing but its work folder."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from millrace.environments.sandbox.execution import Execution, RunLimits, SandboxError
from millrace.environments.sandbox.fork_server import pack
from millrace.environments.sandbox.server_sandbox import (
    GRACE_S,
    MAX_REPLY_BYTES,
    ServerSandbox,
    server_environment,
)
from millrace.environments.sandbox.wasm_interpreter import LEAST_MEMORY_BYTES, is_installed
from millrace.processes.child import WorkerProgram

_ENTRY = "millrace.environments.sandbox.wasm_server:serve"
# The first start on a machine compiles the interpreter, and others wait for it.
_START_S = 900.0


class WasmSandbox(ServerSandbox):
    """A sandbox whose programs run in WebAssembly. A program has no processes, no threads and no network.

    `RunLimits.cpu_s` is counted in instructions, so that a program ends at the same one everywhere.
    """

    def __init__(self, limits: RunLimits) -> None:
        """Start the server, which compiles the interpreter if that was not done on this machine.

        Raises:
            SandboxError: the packages are missing, the limits are too low for an interpreter, or its compiled
                code cannot be kept safely; the message names the fix.
        """
        _check(limits)
        super().__init__(wasm_program, limits)

    def run(
        self, program: str | Sequence[str], stdin: str = "", limits: RunLimits | None = None
    ) -> Execution:
        """Run Python code in the work folder, which later runs see; command lines are refused."""
        if not isinstance(program, str):
            raise SandboxError("sandbox wasm runs Python code only; take bubblewrap for a command line")
        if limits is not None:
            _check(limits)
        return super().run(program, stdin, limits)

    def _empty(self) -> None:
        self.request(pack({"kind": "clear"}, b""), GRACE_S)


def wasm_program(limits: RunLimits) -> WorkerProgram:
    """Return the server's program, with a temporary folder of its own.

    Raises:
        SandboxError: the packages are missing, or this is not Linux.
    """
    if not is_installed():
        raise SandboxError(
            "sandbox wasm needs wasmtime and CPython for it; run: pip install 'millrace-rl[wasm]'"
        )
    folder = tempfile.mkdtemp(prefix="millrace-sandbox-")
    return WorkerProgram(
        name="the sandbox",
        entry=_ENTRY,
        settings={"folder": folder, "cache": str(cache_folder())},
        path=sys.path,
        environment=server_environment(folder, os.environ.get("PATH", os.defpath)),
        start_s=_START_S,
        max_reply_bytes=MAX_REPLY_BYTES,
        remove=folder,
    )


def cache_folder() -> Path:
    """Return the folder of the compiled interpreter, below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "millrace" / "wasm"


def _check(limits: RunLimits) -> None:
    if limits.memory_bytes < LEAST_MEMORY_BYTES:
        raise SandboxError(
            f"sandbox wasm needs {LEAST_MEMORY_BYTES:,} bytes of memory for its interpreter, but "
            f"memory_bytes is {limits.memory_bytes:,}; raise it"
        )
