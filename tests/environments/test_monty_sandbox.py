"""Snippets in monty: output, limits, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from millrace.environments.sandbox.execution import RunLimits, Sandbox, SandboxError
from millrace.environments.sandbox.open_sandbox import open_sandbox


@pytest.fixture
def monty(opened: Callable[..., Sandbox]) -> Sandbox:
    pytest.importorskip("pydantic_monty", reason="needs pydantic-monty: pip install 'millrace-rl[sandbox]'")
    return opened("monty", RunLimits(wall_s=2.0, cpu_s=100.0, memory_bytes=32 << 20, output_bytes=5000))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(
        SandboxError, match=r"^sandbox monty needs pydantic-monty; run: pip install 'millrace"
    ):
        open_sandbox("monty")


@pytest.mark.world
def test_a_snippet_prints(monty):
    done = monty.run("import sys\nprint(47 * 36)\nprint('wrong', file=sys.stderr)\n123 # a value")
    assert (done.stdout, done.stderr, done.exit_code, done.ended) == ("1692\n", "wrong\n", 0, "exit")
    failed = monty.run("x = 1\nx / 0")
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n") and failed.exit_code == 1
    assert "unexpected EOF" in monty.run("print(1").stderr
    assert "NameError" in monty.run("print(x)").stderr


@pytest.mark.world
@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "timeout"),
        ("7 ** (2 * 10**7)", "timeout"),  # one instruction: the worker is killed
        ("x = [0] * 10**8", "memory"),
        ("print('x' * 6000)", "output"),
        ("def f(n): return f(n + 1)\nf(0)", "exit"),
        ("raise MemoryError", "memory"),
    ],
)
def test_limits(monty, code, ended):
    done = monty.run(code)
    assert done.ended == ended and bool(done.note) == (ended != "exit")
    assert len(done.stdout) == (5000 if ended == "output" else 0)
    assert monty.run("print('goes on')").stdout == "goes on\n"


@pytest.mark.world
@pytest.mark.attack("a program escapes from its sandbox, or takes all there is")
@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd')",
        "import pathlib; pathlib.Path('/etc/passwd').read_text()",
        "import os; os.listdir('/')",
        "import os; os.getenv('PATH')",
        "import os; os.environ",
        "import socket",
        "import subprocess",
        "import ctypes",
        "__import__('os')",
        "().__class__.__base__.__subclasses__()",
    ],
)
def test_there_is_no_host(monty, code):
    done = monty.run(f"print('begun')\n{code}\nprint('ESCAPED')")
    assert (done.stdout, done.exit_code) == ("begun\n", 1)


@pytest.mark.world
def test_what_it_does_not_have_it_refuses(monty):
    for call, message in (
        (lambda: monty.run(["ls"]), "Python code only"),
        (lambda: monty.run("print()", "text"), "no standard input"),
        (lambda: monty.write("file", b""), "no files, so file cannot be written"),
        (lambda: monty.read("file"), "no files, so file cannot be read"),
    ):
        with pytest.raises(SandboxError, match=message):
            call()
    monty.clear()
    monty.close()
    with pytest.raises(SandboxError, match="was closed"):
        monty.run("print()")


@pytest.mark.world
def test_a_snippet_is_repeatable_and_does_not_sleep(monty):
    code = "import random, time\ntime.sleep(1000)\nprint(random.random())"
    assert monty.run(code).stdout == monty.run(code).stdout != ""
