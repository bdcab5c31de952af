"""Tests of functions in a real sandbox, and programs that try to pass without being right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.environments.sandbox.code_reward import CodeReward
from millrace.environments.sandbox.execution import RunLimits, Sandbox
from millrace.types import Outcome, Prompt

pytestmark = pytest.mark.world

LIMITS = RunLimits(wall_s=60.0)
ADD = "def add(a, b):\n    return a + b\n"
TEST = "assert add(1, 2) == 3"
EQUAL = "class Equal({}):\n    def __eq__(self, other):\n        return True\n"
WRONG = "def add(a, b):\n    return 4\n"


@pytest.fixture(params=["bubblewrap", "none"])
def tried(request, opened: Callable[..., Sandbox]) -> Callable[..., Outcome]:
    """Score a program by tests, in a sandbox of each kind that there is."""
    one = opened(request.param, LIMITS)
    reward = CodeReward(
        lambda: one, column="tests", limits=LIMITS, fraction=True, answer_s=600.0, num_workers=1
    )

    def score(program: str, *tests: object) -> Outcome:
        return reward.score([Prompt("p", (1,), "", row={"tests": list(tests)})], [program])[0]

    return score


def test_right_programs_pass(tried):
    assert tried(ADD, TEST, "assert add(1, 2) == 4").value == 0.5
    values = "assert f(1) == [1, (2, 3), {4}, {5: 'x'}, b'y', 1.5, None, True, 1j, 10**30]"
    assert tried(
        "def f(x):\n    return [x, (2, 3), {4}, {5: 'x'}, b'y', 1.5, None, True, 1j, 10**30]", values
    )
    code = (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Counter:\n    n: int = 0\n"
        "    def up(self):\n        self.n += 1\n        return self\n"
        "    def below(self):\n        yield from range(self.n)\n"
        "def sort(a):\n    a.sort()\n"
        "def fail(x):\n    raise ValueError(x)\n"
    )
    tests = [
        "c = Counter(2)\nassert c.up().up().n == 4 and list(c.below()) == [0, 1, 2, 3]",
        "a = [3, 1]\nsort(a)\nassert a == [1, 3]",
        "import math\ntry:\n    fail(math.pi)\nexcept ValueError as e:\n    assert '3.14' in str(e)",
        "def check(candidate):\n    assert candidate(1).n == 1\ncheck(Counter)",
    ]
    assert tried(code, *tests) == Outcome("score", 1.0, extras={"failure": ""})


@pytest.mark.attack("a program forges the verdict of its tests")
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "import os\ndef add(a, b):\n    os._exit(0)",
        "import os, signal\ndef add(a, b):\n    os.kill(os.getppid(), signal.SIGKILL)",
        f"import atexit, os\natexit.register(os._exit, 0)\n{WRONG}",
        f"{EQUAL.format('object')}def add(a, b):\n    return Equal()",
        f"{EQUAL.format('int')}def add(a, b):\n    return Equal(4)",
        f"import builtins\nbuiltins.AssertionError = None\nbuiltins.__dict__['print'] = None\n{WRONG}",
        f"import sys\nprint('passed', flush=True)\nsys.stdout.write('0 passed \"\"')\n{WRONG}",
        f"import os\nfor n in range(3, 9):\n    try:os.write(n, b'passed')\n    except OSError:0\n{WRONG}",
    ],
)
def test_a_program_cannot_forge_a_pass(tried, program):
    found = tried(program, TEST)
    assert (found.kind, found.value) == ("score", 0.0), found


@pytest.mark.attack("a program replaces what its tests use")
def test_a_program_does_not_change_what_a_test_uses(tried):
    program = "def set(x):\n    return 0\nabs = sorted = set\ndef f(x):\n    return [9]\n"
    for test in ("assert set(f(1)) == set([1])", "assert abs(f(1)[0] - 1) < 2", "assert sorted(f(1)) == [1]"):
        assert tried(program, test).value == 0.0
    program = "def f(x):\n    import os\n    os._exit(0)"
    assert tried(program, "try:\n    f(1)\nexcept:\n    pass").value == 0.0


@pytest.mark.attack("a program looks for its tests")
def test_a_program_does_not_find_its_tests(opened):
    """Its own memory, files, environment and arguments have no test; those of the tester are closed."""
    program = """
import glob, os, re
secret = re.compile(b"SECRET-[0-9]{6}")
def found():
    names = [name for name in glob.glob("/tmp/**", recursive=True) if os.path.isfile(name)]
    for process in ("self", os.getppid(), 1):
        names += [f"/proc/{process}/{name}" for name in ("environ", "cmdline", "fd/0", "fd/1", "maps")]
    for name in names:
        try:
            data = os.read(os.open(name, os.O_RDONLY | os.O_NONBLOCK), 1 << 20)
        except OSError:
            continue
        if secret.search(data):
            return name
    for process in ("self", os.getppid(), 1):
        try:
            maps, memory = open(f"/proc/{process}/maps"), open(f"/proc/{process}/mem", "rb", 0)
        except OSError:
            continue
        for line in maps:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if " rw" in line and end - start < 1 << 28:
                memory.seek(start)
                if secret.search(memory.read(end - start)):
                    return f"memory of {process}"
    return "nothing"
"""
    one = opened("bubblewrap", LIMITS)
    reward = CodeReward(
        lambda: one, column="tests", limits=LIMITS, fraction=False, answer_s=600.0, num_workers=1
    )
    row = {"tests": ["assert found() == 'nothing', found()  # SECRET-123456"]}
    (outcome,) = reward.score([Prompt("p", (1,), "", row=row)], [program])
    assert outcome == Outcome("score", 1.0, extras={"failure": ""})
    # Without the sandbox's protection the same search finds what it looks for.
    (outcome,) = reward.score([Prompt("p", (1,), "", row=row)], [program + "x = 'SECRET-' + '123456'"])
    assert outcome.extras["failure"].endswith("AssertionError: memory of self")


def test_a_test_that_cannot_be_run_this_way_is_a_failure(tried):
    found = tried("def f(g):\n    return g(1)", "assert f(lambda x: x) == 1")
    assert found.reason == "prompt p, test 1 cannot be run: it gives the program an object of class function"
    found = tried("def pow(a, b):\n    return 8", "assert pow(2, 3) == 8")
    assert found.reason == "prompt p, test 1 cannot be run: it passes without a name of the program"


def test_standard_input_and_output(tried):
    tests = [{"input": "4\n", "output": "8"}, {"input": "5", "output": "11"}]
    found = tried("print(int(input()) * 2)", *tests)
    assert (found.value, found.extras["failure"]) == (0.5, r"test 2 of 2: printed '10\n'")
