"""The reward of kind code over a sandbox of the test: what is run, and what its results count."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.environments.sandbox.code_reward import CodeReward, TestsError, program_of, read_tests
from millrace.environments.sandbox.execution import Execution, RunLimits, SandboxError
from millrace.types import Outcome, Prompt

LIMITS = RunLimits(wall_s=10.0)


class Scripted:
    """A sandbox whose programs print what they read, doubled; some words do something else."""

    def __init__(self, *, breaks: int = 0) -> None:
        self.breaks, self.runs, self.cleared, self.closed = breaks, [], 0, False

    def run(self, program, stdin="", limits=None):
        assert self.cleared > len(self.runs), "the folder was not emptied before"
        if self.breaks:
            self.breaks -= 1
            raise SandboxError("it has ended")
        self.runs.append((program, stdin, limits.wall_s))
        match stdin:
            case "slow":
                return Execution("", "", -9, "timeout", 10.0, "stopped after 10 s")
            case "crash":
                return Execution("crashcrash", "Traceback\nValueError: no\n", 1, "exit", 1.0, "")
            case "noisy":
                return Execution("noisynoisy  \n\n", "", 0, "exit", 1.0, "")
        return Execution(stdin * 2, "", 0, "exit", 1.0, "")

    def clear(self):
        self.cleared += 1

    def close(self):
        self.closed = True


def reward(sandbox: Any = None, **given: Any) -> CodeReward:
    options = {"column": "tests", "limits": LIMITS, "fraction": False, "answer_s": 25.0, "num_workers": 1}
    return CodeReward(lambda: sandbox or Scripted(), **options | given)


def outcome(one: CodeReward, tests: Any, completion: str = "the program") -> Outcome:
    (found,) = one.score([Prompt("train:0", (1,), "", row={"tests": tests})], [completion])
    return found


def doubled(*inputs: str) -> list[dict[str, str]]:
    return [{"input": text, "output": text * 2} for text in inputs]


def test_all_tests_or_the_fraction_of_them():
    tests = [*doubled("a", "noisy"), {"input": "b", "output": "c"}, *doubled("d")]
    found = outcome(reward(), tests)
    assert (found.kind, found.value, found.extras) == ("score", 0.0, {"failure": "test 3 of 4: printed 'bb'"})
    sandbox = Scripted()
    assert outcome(reward(sandbox, fraction=True), tests).value == 0.75
    assert [stdin for _, stdin, _ in sandbox.runs] == ["a", "noisy", "b", "d"]
    assert outcome(reward(), json.dumps(doubled("a"))) == Outcome("score", 1.0, extras={"failure": ""})


@pytest.mark.parametrize(
    ("word", "failure"), [("slow", "stopped after 10 s"), ("crash", "exit code 1: ValueError: no")]
)
def test_the_programs_fault_is_a_score_of_zero(word, failure):
    found = outcome(reward(), doubled(word))
    assert (found.kind, found.value) == ("score", 0.0)
    assert found.extras == {"failure": f"test 1 of 1: {failure}"}


def test_an_answer_has_one_time_for_all_its_tests():
    sandbox = Scripted()
    found = outcome(reward(sandbox, fraction=True), doubled("a", "slow", "slow", "slow", "b"))
    assert found.value == 0.2 and [wall_s for *_, wall_s in sandbox.runs] == [10.0, 10.0, 10.0, 4.0]


def test_a_sandbox_that_fails_is_tried_once_more_and_is_no_zero():
    assert outcome(reward(Scripted(breaks=1)), doubled("a")).value == 1.0
    found = outcome(reward(Scripted(breaks=2)), doubled("a"))
    assert (found.kind, found.reason) == ("failed", "the sandbox failed: it has ended")


def test_answers_are_tested_at_the_same_time_in_sandboxes_of_their_own():
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted())
        return made[-1]

    one = CodeReward(make, column="t", limits=LIMITS, fraction=False, answer_s=9.0, num_workers=3)
    prompt = Prompt("train:0", (1,), "", row={"t": doubled("a")})
    assert [found.value for found in one.score([prompt] * 8, ["x"] * 8)] == [1.0] * 8
    one.close()
    assert len(made) == 3 and all(sandbox.closed for sandbox in made)


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "are no list, or an empty one, in column tests"),
        ([], "are no list, or an empty one, in column tests"),
        ("assert f(1)", "are no JSON list in column tests"),
        (["assert ("], "cannot be run: test 1 is no Python code: '(' was never closed"),
        ([{"input": "a"}], "cannot be run: test 1 is neither {input, output}, both texts, nor Python code"),
        ([{"output": 3}], "cannot be run: test 1 is neither {input, output}, both texts, nor Python code"),
    ],
)
def test_tests_that_cannot_be_read_are_a_failure(tests, reason):
    found = outcome(reward(), tests)
    assert found.kind == "failed" and found.reason.startswith(f"the tests of prompt train:0 {reason}")
    with pytest.raises(TestsError, match="are missing: its row has no column t; set tests in the reward"):
        read_tests({}, "t")


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("Look:\n```python\nprint(1)\n```\nor\n```\nprint(2)\n\nx\n```\nthat is it", "print(2)\n\nx"),
        ("```py\nprint(1)\n```\n```\nprint(2)", "print(2)"),
        ("text ``` inside\nprint(1)", "text ``` inside\nprint(1)"),
    ],
)
def test_the_program_is_the_last_fenced_block(completion, program):
    assert program_of(completion) == program


def test_a_completion_without_a_program_is_invalid():
    for completion in ("", " \n", "```\n```"):
        assert outcome(reward(), doubled("a"), completion).kind == "invalid"


def test_where_code_cannot_be_tested_it_is_refused_and_is_no_zero():
    assert outcome(reward(with_code=False), doubled("a")).value == 1.0
    found = outcome(reward(with_code=False), ["assert f(1)"])
    assert found.kind == "failed" and "are Python code, which sandbox wasm does not run" in found.reason
