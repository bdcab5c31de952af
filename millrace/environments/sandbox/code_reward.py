"""The reward of kind code: tests of a program that the policy wrote, run in a sandbox of their own."""

from __future__ import annotations

import ast
import json
import queue
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.environments.sandbox.execution import Execution, RunLimits, Sandbox, SandboxError
from millrace.observability.plain import plain_text
from millrace.rewards.reward_errors import RewardError
from millrace.types import Outcome, Prompt

_HARNESS = Path(__file__).with_name("assert_harness.py")
_FENCE = "```"
_SHOWN = 200


class TestsError(ValueError):
    """A row's tests cannot be read; the message continues a sentence that names the prompt."""

    __test__ = False


class TestUnsupported(ValueError):
    """A test cannot be run; that is no fault of the program."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """One test.

    Attributes:
        text: standard input of the program; or the test's own Python code, which passes if it raises nothing.
        output: expected standard output; None for Python code.
    """

    __test__ = False
    text: str
    output: str | None


class CodeReward:
    """Score a program by its tests: all or nothing, or the fraction that it passes.

    The program is the last fenced block of a completion, or all of it. Each test is a run of its own, in an
    emptied sandbox. Expected outputs and test code never reach the program's process.

    An outcome is a score whatever the program does: a wrong output, a crash and a limit are failed tests. It
    is `invalid` if the completion has no program, and `failed` if the row's tests cannot be read or run, or
    the sandbox fails twice.
    """

    def __init__(
        self,
        open_one: Callable[[], Sandbox],
        *,
        column: str,
        limits: RunLimits,
        fraction: bool,
        answer_s: float,
        num_workers: int,
        with_code: bool = True,
    ) -> None:
        """Open the first sandbox.

        Args:
            open_one: opens a sandbox, at most `num_workers` times.
            column: of the row, with the tests.
            limits: of each test.
            fraction: whether the score is the fraction of passed tests, instead of 1 only for all of them.
            answer_s: seconds that all tests of an answer may take together; those beyond count as not passed.
            num_workers: number of answers that are tested at the same time.
            with_code: whether tests can be Python code, which needs a process for the program.

        Raises:
            SandboxError: there is no sandbox of this kind here.
        """
        self._open, self._column, self._with_code, self._limits = open_one, column, with_code, limits
        self._fraction, self._answer_s, self._num_workers = fraction, answer_s, num_workers
        self._harness = _HARNESS.read_text(encoding="utf-8")
        self._closing = False
        self._sandboxes = [open_one()]
        self._free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        self._free.put(self._sandboxes[0])
        self._threads = ThreadPoolExecutor(num_workers, "millrace-code")

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """Return one outcome for each completion, in order.

        Raises:
            RewardError: `close` was called meanwhile.
            SandboxError: no further sandbox can be opened.
        """
        while len(self._sandboxes) < min(self._num_workers, len(completions)):
            self._sandboxes.append(self._open())
            self._free.put(self._sandboxes[-1])
        return list(self._threads.map(self._score_one, prompts, completions))

    def close(self) -> None:
        """End every sandbox. A concurrent call of `score` raises."""
        self._closing = True
        with ExitStack() as stack:
            stack.callback(self._threads.shutdown, cancel_futures=True)
            for sandbox in self._sandboxes:
                stack.callback(sandbox.close)

    def _score_one(self, prompt: Prompt, completion: str) -> Outcome:
        program = program_of(completion)
        if not program.strip():
            return Outcome("invalid", 0.0, "the completion has no program")
        try:
            tests = read_tests(prompt.row, self._column, with_code=self._with_code)
        except TestsError as error:
            return Outcome.failure(f"the tests of prompt {prompt.id} {error}")
        sandbox = self._free.get()
        try:
            return self._score_program(sandbox, program, tests)
        except TestUnsupported as error:
            return Outcome.failure(f"prompt {prompt.id}, {error}")
        except SandboxError as error:
            if self._closing:
                raise RewardError("reward code was closed while it scored") from None
            return Outcome.failure(f"the sandbox failed: {plain_text(str(error))}")
        finally:
            self._free.put(sandbox)

    def _score_program(self, sandbox: Sandbox, program: str, tests: Sequence[ProgramTest]) -> Outcome:
        num_passed, failure, left_s = 0, "", self._answer_s
        for number, test in enumerate(tests, 1):
            problem = f"not run, since the tests before took {self._answer_s:g} s"
            if left_s > 0:
                wall_s = min(self._limits.wall_s, left_s)
                execution, problem = self._run(sandbox, program, test, number, wall_s)
                left_s -= execution.seconds
            num_passed += not problem
            if problem:
                failure = failure or f"test {number} of {len(tests)}: {plain_text(problem)}"
                if not self._fraction or left_s <= 0:
                    break
        value = num_passed / len(tests) if self._fraction else float(num_passed == len(tests))
        return Outcome("score", value, extras={"failure": failure})

    def _run(
        self, sandbox: Sandbox, program: str, test: ProgramTest, number: int, wall_s: float
    ) -> tuple[Execution, str]:
        """Run one test; return how it went, and why it is not passed, if so."""
        nonce = secrets.token_hex(16)
        limits = replace(self._limits, wall_s=wall_s)
        if test.output is not None:
            execution = _run_empty(sandbox, program, test.text, limits)
            return execution, _output_problem(execution, test.output)
        request = json.dumps({"program": program, "test": test.text, "nonce": nonce})
        execution = _run_empty(sandbox, self._harness, request, limits)
        if execution.ended != "exit":
            return execution, execution.note
        found, _, rest = execution.stdout.rstrip("\n").rpartition("\n")[2].partition(" ")
        verdict, _, reason = rest.partition(" ")
        if found != nonce:
            return execution, f"exit code {execution.exit_code} without a result"
        if verdict == "unsupported":
            raise TestUnsupported(f"test {number} cannot be run: {plain_text(json.loads(reason))}")
        return execution, "" if verdict == "passed" else json.loads(reason)


def _run_empty(sandbox: Sandbox, program: str, stdin: str, limits: RunLimits) -> Execution:
    """Run a program in the emptied sandbox; once more if the sandbox fails, which `clear` starts anew."""
    try:
        sandbox.clear()
        return sandbox.run(program, stdin, limits)
    except SandboxError:
        sandbox.clear()
        return sandbox.run(program, stdin, limits)


def _output_problem(execution: Execution, expected: str) -> str:
    """Return why an output is not the expected one, if it is not; white space at the ends does not count."""
    if execution.ended != "exit":
        return execution.note
    if execution.exit_code != 0:
        last = execution.stderr.strip().rpartition("\n")[2][:_SHOWN]
        return f"exit code {execution.exit_code}: {last}" if last else f"exit code {execution.exit_code}"
    if _lines(execution.stdout) != _lines(expected):
        return f"printed {execution.stdout[:_SHOWN]!r}"
    return ""


def _lines(text: str) -> list[str]:
    """The lines without white space at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def program_of(completion: str) -> str:
    """Return the program of a completion: its last fenced block, also an unclosed one, else all of it."""
    found = completion
    block: list[str] | None = None
    for line in completion.splitlines():
        if not line.lstrip().startswith(_FENCE):
            if block is not None:
                block.append(line)
        elif block is None:
            block = []
        else:
            found, block = "\n".join(block), None
    return found if block is None else "\n".join(block)


def read_tests(row: Mapping[str, Any], column: str, *, with_code: bool = True) -> list[ProgramTest]:
    """Return the tests in a column of a row: a list, or its JSON text.

    An element is an object with `output`, and `input` where there is one; or a text of Python code.

    Raises:
        TestsError: there are none, or they have another form, or one is code and must not be.
    """
    if column not in row:
        raise TestsError(f"are missing: its row has no column {column}; set tests in the reward")
    found = row[column]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            raise TestsError(f"are no JSON list in column {column}") from None
    if not isinstance(found, list | tuple) or not found:
        raise TestsError(f"are no list, or an empty one, in column {column}")
    tests = [_read_test(test, number) for number, test in enumerate(found, 1)]
    if not with_code and any(test.output is None for test in tests):
        raise TestsError(
            "are Python code, which sandbox wasm does not run beside a program; take sandbox bubblewrap, or "
            "write them as {input, output}"
        )
    return tests


def _read_test(test: object, number: int) -> ProgramTest:
    if isinstance(test, Mapping):
        given, output = test.get("input", ""), test.get("output")
        if set(test) <= {"input", "output"} and isinstance(given, str) and isinstance(output, str):
            return ProgramTest(given, output)
    elif isinstance(test, str):
        try:
            ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise TestsError(f"cannot be run: test {number} is no Python code: {error}") from None
        return ProgramTest(test, None)
    raise TestsError(
        f"cannot be run: test {number} is neither {{input, output}}, both texts, nor Python code"
    )
