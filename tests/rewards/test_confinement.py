"""A built-in reward that starts a program, opens a socket, writes a file or takes all memory is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from millrace.rewards import confinement
from millrace.rewards.confinement import REFUSED
from millrace.rewards.isolated import IsolatedReward
from tests.rewards.helpers import prompts, score

TRIED = """
    import ast, json, os, pathlib, shutil, socket, subprocess, sys, tempfile
    import sympy
    from millrace.rewards import confinement
    from millrace.processes.worker import limit_resources
    from millrace.rewards.expressions import disarm_sympy

    def allocate():
        return len(bytearray(3 << 30))

    disarm_sympy()
    limit_resources(2 << 30, 0)
    confinement.refuse_effects()
    found = {}
    for name, action in {
        "system": lambda: os.system("touch canary"),
        "popen": lambda: os.popen("touch canary"),
        "run": lambda: subprocess.run(["touch", "canary"]),
        "fork": os.fork,
        "exec": lambda: os.execv("/bin/touch", ["touch", "canary"]),
        "spawn": lambda: os.posix_spawn("/bin/touch", ["touch", "canary"], {}),
        "socket": socket.socket,
        "resolve": lambda: socket.getaddrinfo("localhost", 1),
        "write": lambda: open("canary", "w"),
        "append": lambda: os.open("canary", os.O_APPEND | os.O_CREAT | os.O_WRONLY),
        "touch": lambda: pathlib.Path("canary").touch(),
        "remove": lambda: os.remove("kept"),
        "rename": lambda: os.rename("kept", "canary"),
        "tree": lambda: shutil.rmtree("."),
        "link": lambda: os.symlink("kept", "canary"),
        "temporary": tempfile.TemporaryFile,
        "kill": lambda: os.kill(os.getppid(), 0),
        "eval": lambda: eval("1 + 1"),
        "exec of text": lambda: exec("x = 1"),
        "library": lambda: __import__("ctypes").CDLL(None),
        "allocate": allocate,
        "read": lambda: open("kept").read(),
        "roots": lambda: len(sympy.Poly(sympy.sympify("x**5 - x + 1")).nroots()),
        "solve": lambda: str(sympy.solve("x**3 - 8")[0]),
        "import": lambda: __import__("colorsys").__name__,
        "literal": lambda: ast.literal_eval("[1]"),
        "sympify": lambda: str(sympy.sympify("x + 1")),
        "algebra": lambda: str(sympy.simplify(sympy.sin(1) ** 2 + sympy.cos(1) ** 2)),
    }.items():
        try:
            found[name] = ["done", action()]
        except BaseException as error:
            found[name] = [type(error).__name__, str(error)]
    print(json.dumps(found))
"""


@pytest.mark.attack("a built-in reward starts programs, writes, connects, takes 3 GB")
@pytest.mark.world
def test_what_has_effects_is_refused_and_what_computes_is_not(tmp_path):
    (tmp_path / "kept").write_text("text")
    command = [sys.executable, "-c", textwrap.dedent(TRIED)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert found.pop("allocate")[0] == "MemoryError"
    allowed = {
        name: found.pop(name)
        for name in ("read", "roots", "solve", "import", "literal", "sympify", "algebra")
    }
    assert allowed == {
        "read": ["done", "text"],
        "roots": ["done", 5],
        "solve": ["done", "2"],
        "import": ["done", "colorsys"],
        "literal": ["done", [1]],
        "sympify": ["done", "x + 1"],
        "algebra": ["done", "1"],
    }
    assert {name: kind for name, (kind, _) in found.items() if kind != "PermissionError"} == {
        "temporary": "FileNotFoundError"
    }
    assert found["eval"][1] == "a built-in reward may not evaluate text"
    assert found["write"][1] == "a built-in reward may not write files"
    assert found["system"][1] == "a built-in reward may not use os.system"


@pytest.mark.parametrize("event", [*sorted(REFUSED), "socket.connect", "socket.__new__"])
def test_each_event_is_refused(event):
    with pytest.raises(PermissionError, match=f"a built-in reward may not use {event}"):
        confinement._refuse(event, ())


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("open", ("name", "r", 0)),
        ("open", (3, "rb", None)),
        ("compile", (b"x = 1", "/site-packages/module.py")),
        ("compile", ("[1]", "<unknown>")),
        ("import", ("json", None, None, None, None)),
        ("object.__getattr__", (1, "a")),
    ],
)
def test_what_computing_needs_is_allowed(event, arguments):
    assert confinement._refuse(event, arguments) is None


@pytest.mark.attack("a completion is code")
@pytest.mark.world
def test_a_completion_that_is_code_is_an_ordinary_wrong_answer(tmp_path, monkeypatch):
    """In the worker itself, as a run asks it."""
    monkeypatch.chdir(tmp_path)
    reward = IsolatedReward({"kind": "task", "name": "n_queens", "options": {}}, timeout_s=60)
    row = {"answer": "", "metadata": {"valid_answers": ["Q _\n_ Q"]}}
    code = "[__import__('os').system('touch canary')]"
    forged = "__import__('os').write(1, b'[\"score\",1.0,\"\"]\\n')"
    try:
        outcomes = reward.score(prompts(4, row), [code, forged, "[['Q', '_'], ['_', 'Q']]", "Q _\n_ Q"])
    finally:
        reward.close()
    assert [(outcome.kind, outcome.value) for outcome in outcomes] == [
        ("score", 0.0),
        ("score", 0.0),
        ("score", 0.5),
        ("score", 1.0),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world
def test_a_users_own_function_may_do_what_it_wants(make):
    assert score(make(), "value 2")[0].value == 2.0
