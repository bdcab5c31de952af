"""The built-in tool `python`: runs code of the policy in a sandbox of its episode. No torch."""

from __future__ import annotations

import threading

from millrace.data.tool_schema import read_tools
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.environments.sandbox.execution import Execution, Sandbox, SandboxError
from millrace.environments.sandbox.open_sandbox import SandboxKind, open_sandbox
from millrace.environments.tool_functions import Tool
from millrace.errors import SetupError

PYTHON_TOOL = "python"
_DEFINITION = {
    "name": PYTHON_TOOL,
    "description": "Run a Python program and return what it prints. Only files are kept between programs.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; print the result"}},
        "required": ["code"],
    },
}


class PythonPrograms:
    """Runs the programs of one episode; its sandbox is opened by the first."""

    def __init__(self, kind: SandboxKind) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None

    def run(self, code: str) -> str:
        """Return what a program printed, and why it ended if that was not its own end.

        Raises:
            EnvironmentFailed: there is no sandbox, or it was lost.
        """
        try:
            with self._lock:
                self._sandbox = self._sandbox or open_sandbox(self._kind)
            return _shown(self._sandbox.run(code))
        except SandboxError as error:
            raise EnvironmentFailed(str(error)) from error

    def close(self) -> None:
        """Close the sandbox, if there was a program."""
        with self._lock:
            if self._sandbox is not None:
                self._sandbox.close()


def python_tool(kind: SandboxKind) -> Tool:
    """Return the tool for one episode."""
    programs = PythonPrograms(kind)
    (definition,) = read_tools([_DEFINITION], "the tool python")
    return Tool(definition, programs.run, programs.close)


def check_sandbox(kind: SandboxKind) -> None:
    """Open a sandbox once; SetupError names what to install if this kind cannot be had here."""
    try:
        open_sandbox(kind).close()
    except SandboxError as error:
        raise SetupError(f"tool python with environment.sandbox {kind}: {error}") from error


def _shown(done: Execution) -> str:
    parts = [done.stdout, done.stderr, done.note]
    if done.ended == "exit" and done.exit_code and not done.stderr:
        parts.append(f"exit code {done.exit_code}")
    return "\n".join(part.rstrip("\n") for part in parts if part)
