"""The hunt for mutants, on a toy."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.house.scripts import load_script
from tests.house.source import ROOT, write

TOY = """
def clip(x: int | None, low, high=9) -> int | None:
    if x is None:
        raise ValueError(f"{1 + 1}")
    return min(max(x, low), high)
"""
TESTS = """
from millrace.algorithms.toy import clip
def test_clip():
    assert [clip(x, 2, 5) for x in (1, 3, 7)] == [2, 3, 5]
"""
PYPROJECT = '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["slow", "gpu"]\n'
PYPROJECT += 'filterwarnings = ["error"]\n'


@pytest.fixture
def toy(tmp_path):
    files = {
        "millrace/__init__.py": "",
        "millrace/algorithms/__init__.py": "",
        "millrace/algorithms/toy.py": TOY,
        "tests/algorithms/test_toy.py": TESTS,
        "pyproject.toml": PYPROJECT,
    }
    return write(tmp_path / "a checkout", files)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("mutants")


def hunt(toy, *words):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "mutants.py"),
        "--root",
        str(toy),
        "--workers",
        "1",
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def changes(script, tmp_path, text):
    write(tmp_path, {"a.py": text})
    return [f"{mutant.before} -> {mutant.after}" for mutant in script.mutants(tmp_path, "a.py")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a + b", "x = a - b"),
        ("x -= a", "x += a"),
        ("x = -a", "x = --a"),
        ("x = a < b", "x = a <= b"),
        ("x = a >= b", "x = a > b"),
        ("x = a == b", "x = a != b"),
        ("x = not a", "x = not not a"),
        ("x = ~a", "x = ~~a"),
        ("x = a & b", "x = a | b"),
        ("x = 0", "x = 1"),
        ("x = 0.5", "x = 1.5"),
        ("x = min(a)", "x = max(a)"),
        ("x = torch.maximum(a, b)", "x = torch.minimum(a, b)"),
        ("x = a.amax()", "x = a.amin()"),
        ("x = a.clamp(min=b)", "x = a.clamp(max=b)"),
    ],
)
def test_each_kind_of_change_is_made(script, tmp_path, before, after):
    assert changes(script, tmp_path, before) == [f"{before} -> {after}"]


def test_annotations_decorators_messages_and_flags_are_left_alone(script, tmp_path):
    text = "@cache(size=1)\ndef f(x: A | B) -> A | B:\n    y: A | B = True\n    raise ValueError(1 + 1)\n"
    assert changes(script, tmp_path, text) == []


def test_a_mutant_names_its_place(script, toy):
    first = script.mutants(toy, "millrace/algorithms/toy.py")[0]
    assert (first.line, first.function) == (2, "clip")
    assert first.key == (
        "millrace/algorithms/toy.py clip | def clip(x: int | None, low, high=9) -> int | None: -> "
        "def clip(x: int | None, low, high=10) -> int | None:"
    )


def test_the_twins_that_name_a_kernel_speak_for_it(script, toy):
    names = {
        "test_a.py": "from millrace.kernels import toy",
        "test_b.py": "from millrace.algorithms import toy",
    }
    write(toy / "tests" / "twins", names)
    assert script.tests_of(toy, "millrace/kernels/toy.py") == ["tests/twins/test_a.py"]
    assert script.tests_of(toy, "millrace/algorithms/toy.py") == ["tests/algorithms/test_toy.py"]


@pytest.mark.slow
def test_a_survivor_fails_the_hunt_and_a_listed_one_does_not(toy):
    done = hunt(toy)
    assert done.returncode == 1, done.stderr
    survivor = next(line for line in done.stdout.splitlines() if line.startswith("survived"))
    place, _, key = survivor.partition(": ")
    assert place == "survived at line 2"
    assert key.startswith("millrace/algorithms/toy.py clip | def clip(")
    assert "4 mutants: 3 caught, 1 survived (0 more are allowed to)" in done.stdout
    assert (toy / "millrace/algorithms/toy.py").read_text() == TOY

    (toy / "tests/mutants_allowed.txt").write_text(
        f"# why\n{key} | the tests always give high\nx f | gone -> y | z\n"
    )
    done = hunt(toy, "toy", "--most", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 mutants: 1 caught, 0 survived (1 more are allowed to)" in done.stdout
    done = hunt(toy, "--most", "1")
    assert "lists what no longer exists; remove: x f | gone -> y" in done.stdout
    assert "1 mutants: 1 caught" in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
def test_compiled_kernels_are_broken_too_and_run_as_python(toy):
    files = {
        "millrace/kernels/__init__.py": "",
        "millrace/kernels/on_cpu.py": "from numba import njit\n"
        "@njit(cache=True)\ndef double(x):\n    return 2 * x\n",
        "tests/kernels/test_on_cpu.py": "from millrace.kernels.on_cpu import double\n"
        "def test_double():\n    assert double(3) == 6\n    assert not hasattr(double, 'signatures')\n",
        "millrace/kernels/on_gpu.py": "import triton\nimport triton.language as tl\n"
        "@triton.jit\ndef double(x):\n    tl.store(x, 2 * tl.load(x))\n",
        "tests/kernels/test_on_gpu.py": "import torch\nfrom millrace.kernels.on_gpu import double\n"
        "def test_double():\n    x = torch.tensor([3.0])\n    double[(1,)](x)\n    assert x.item() == 6\n",
    }
    done = hunt(write(toy, files), "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "millrace/kernels/on_cpu.py: 1 mutants" in done.stdout
    assert "millrace/kernels/on_gpu.py: 1 mutants" in done.stdout
    assert "2 mutants: 2 caught, 0 survived" in done.stdout


@pytest.mark.slow
def test_a_mutant_that_never_ends_is_caught(toy):
    loop = "def clip(x, low, high):\n    while x < low:\n        x += 1\n    return min(x, high)\n"
    (toy / "millrace/algorithms/toy.py").write_text(loop)
    write(toy, {"tests/algorithms/test_toy.py": TESTS + "    assert clip(2, 2, 5) == 2\n"})
    code = """
import pathlib, sys
import mutants
root, statuses = pathlib.Path(sys.argv[1]), []
shop = mutants.Workshop(root, root / "benches", 1)
forever = (root / "millrace/algorithms/toy.py").read_text().replace("+=", "-=")
shop.start("millrace/algorithms/toy.py", forever, ["tests/algorithms/test_toy.py"], 1.5, statuses.append)
shop.finish()
print(statuses)
"""
    command = [sys.executable, "-c", code, str(toy)]
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, timeout=60)
    assert done.stdout == "[None]\n", done.stderr


@pytest.mark.slow_beyond(1)
@pytest.mark.world
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests/algorithms/test_toy.py": None}, "toy.py has no tests; write tests/algorithms/test_toy.py"),
        (
            {"tests/algorithms/test_toy.py": "def test_a(): assert 0"},
            "fail before anything is changed; mend them",
        ),
        (
            {"tests/mutants_allowed.txt": "toy.py clip | a -> b\n"},
            "line 1: write FILE FUNCTION | BEFORE -> AFTER",
        ),
    ],
)
def test_a_hunt_that_cannot_be_held_says_why(toy, change, message):
    for name, text in change.items():
        (toy / name).unlink(missing_ok=True)
        if text is not None:
            write(toy, {name: text})
    done = hunt(toy)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.world
def test_a_pattern_that_matches_nothing_says_so(toy):
    assert "no file to break matches 'tyo'; there are millrace/algorithms/*.py" in hunt(toy, "tyo").stderr


@pytest.mark.world
def test_what_only_moved_has_not_changed(script, toy):
    def git(*words: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *name, *words], cwd=toy, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    here, there = "millrace/algorithms/toy.py", "millrace/algorithms/other.py"
    (toy / here).rename(toy / there)
    git("add", ".")
    assert script.changed_functions(toy, there, "HEAD") == set()
    (toy / there).write_text(
        TOY.replace(":\n    if", ':\n    """Within bounds."""\n    # None is none.\n    if', 1)
    )
    assert script.changed_functions(toy, there, "HEAD") == set()
    (toy / there).write_text(TOY.replace("min(max(", "max(max(") + "\n\ndef g(x):\n    return x + 1\n")
    assert script.changed_functions(toy, there, "HEAD") == {"clip", "g"}
    (toy / there).write_text("LIMIT = 3\n" + TOY)
    assert script.changed_functions(toy, there, "HEAD") == {"module"}


@pytest.mark.slow
@pytest.mark.world
def test_unchanged_tests_end_with_the_time_of_their_mutants(toy):
    write(toy, {"tests/algorithms/test_toy.py": "import time\ndef test_clip(): time.sleep(90)\n"})
    done = hunt(toy, "--budget-s", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d mutants: 0 caught, 0 survived, \d not tried for want of time", done.stdout)
