"""Opens the sandbox that a recipe names."""

from __future__ import annotations

from typing import Literal

from millrace.environments.sandbox.execution import RunLimits, Sandbox
from millrace.environments.sandbox.monty_sandbox import MontySandbox
from millrace.environments.sandbox.server_sandbox import ServerSandbox, bubblewrap_program, plain_program
from millrace.environments.sandbox.wasm_sandbox import WasmSandbox

SandboxKind = Literal["bubblewrap", "monty", "wasm", "none"]


def open_sandbox(kind: SandboxKind = "bubblewrap", limits: RunLimits | None = None) -> Sandbox:
    """Open a sandbox for one trust domain, such as the tools of one episode; close it in the end.

    `none` isolates nothing: it only limits, and a program can read, write and connect as this process.

    Raises:
        SandboxError: this kind cannot be had here; the message names what to install. No other kind takes
            its place.
    """
    limits = limits or RunLimits()
    if kind == "bubblewrap":
        return ServerSandbox(bubblewrap_program, limits)
    if kind == "none":
        return ServerSandbox(plain_program, limits)
    if kind == "wasm":
        return WasmSandbox(limits)
    return MontySandbox(limits)
