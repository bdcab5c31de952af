"""Runs snippets in pydantic-monty, an interpreter of a part of Python that has no files and no network."""

from __future__ import annotations

import time
from collections.abc import Sequence

from millrace.environments.sandbox.execution import Ended, Execution, RunLimits, SandboxError, limit_note

# The interpreter looks at its clock between instructions; a worker that is this much late is killed.
_GRACE_S = 1.0
# Host calls of one run, such as the look-up of an unknown name.
_MAX_SUSPENSIONS = 100
_MAX_RECURSION = 500


class _OutputFull(Exception):
    """Raised to the interpreter by the function that collects output."""


class MontySandbox:
    """A worker process of pydantic-monty. Each run has an interpreter of its own, and no files.

    `time.sleep` returns at once and `random` begins with the same seed in every run. Of the limits, time and
    memory are the interpreter's own count; processes and files there are none.
    """

    def __init__(self, limits: RunLimits) -> None:
        try:
            import pydantic_monty
        except ImportError:
            raise SandboxError(
                "sandbox monty needs pydantic-monty; run: pip install 'millrace-rl[sandbox]'"
            ) from None
        self._monty = pydantic_monty
        self._limits = limits
        self._pool = pydantic_monty.Monty(
            min_processes=1,
            max_processes=1,
            feed_duration_limit_grace=_GRACE_S,
            turn_duration_limit_grace=_GRACE_S,
        ).__enter__()
        self._closed = False

    def run(
        self, program: str | Sequence[str], stdin: str = "", limits: RunLimits | None = None
    ) -> Execution:
        """Run a snippet; command lines and standard input are refused."""
        if not isinstance(program, str):
            raise SandboxError("sandbox monty runs Python code only; take bubblewrap for a command line")
        if stdin:
            raise SandboxError(
                "sandbox monty has no standard input; take bubblewrap, or write it into the code"
            )
        if self._closed:
            raise SandboxError("the sandbox was closed; open another")
        limits = limits or self._limits
        output = _Output(limits.output_bytes)
        begun_s = time.monotonic()
        ended, exit_code = self._feed(program, limits, output)
        seconds = time.monotonic() - begun_s
        stdout, stderr = (output.text(name) for name in ("stdout", "stderr"))
        return Execution(stdout, stderr, exit_code, ended, seconds, limit_note(ended, limits))

    def _feed(self, code: str, limits: RunLimits, output: _Output) -> tuple[Ended, int]:
        run_s = min(limits.wall_s, limits.cpu_s)
        late: Ended = "timeout" if limits.wall_s <= limits.cpu_s else "cpu"
        session = self._pool.checkout(
            limits={
                "max_feed_duration_secs": run_s,
                "max_turn_duration_secs": run_s,
                "max_memory": limits.memory_bytes,
                "max_recursion_depth": _MAX_RECURSION,
                "max_suspensions": _MAX_SUSPENSIONS,
                "max_total_sleep_secs": 0.0,
            },
            os_policy={"sleep": "zero", "random_start": {"seed": 0}},
        )
        try:
            with session as interpreter:
                try:
                    # Else the value of a last expression is converted to an object of this process.
                    interpreter.feed_run(f"{code}\nNone", print_callback=output.add)
                except self._monty.MontySyntaxError:
                    interpreter.feed_run(code, print_callback=output.add)  # for the error of its own text
        except self._monty.MontyCrashedError as error:
            output.add("stderr", str(error))
            return (late, -9) if error.timed_out else ("exit", 1)
        except self._monty.MontyError as error:
            if output.full:
                return "output", 1
            inner = error.exception()
            output.add_last("stderr", f"{error.display()}\n")
            if isinstance(inner, TimeoutError) and "time limit exceeded" in str(inner):
                return late, 1
            return ("memory" if isinstance(inner, MemoryError) else "exit"), 1
        return ("output" if output.full else "exit"), 0

    def write(self, path: str, data: bytes) -> None:
        """Refuse: there are no files."""
        raise SandboxError(f"sandbox monty has no files, so {path} cannot be written; take bubblewrap")

    def read(self, path: str) -> bytes:
        """Refuse: there are no files."""
        raise SandboxError(f"sandbox monty has no files, so {path} cannot be read; take bubblewrap")

    def clear(self) -> None:
        """Return at once: nothing is left of a run."""

    def close(self) -> None:
        """End the worker process."""
        if not self._closed:
            self._closed = True
            self._pool.__exit__(None, None, None)


class _Output:
    """Collects printed text up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self.full = False

    def add(self, stream: str, text: str) -> None:
        """Add text.

        Raises:
            _OutputFull: there is more than fits.
        """
        self.add_last(stream, text)
        if self.full:
            raise _OutputFull

    def add_last(self, stream: str, text: str) -> None:
        """Add text as far as it fits."""
        data = text.encode("utf-8", "replace")
        self.full |= len(data) > self._room
        self._parts[stream].append(data[: self._room])
        self._room -= len(self._parts[stream][-1])

    def text(self, stream: str) -> str:
        """Return what was printed to a stream."""
        return b"".join(self._parts[stream]).decode("utf-8", "replace")
