"""The gate: every stage runs to its end, the report names what failed, a test that fails once is counted."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.house.scripts import load_script
from tests.house.source import ROOT, write
from tests.selection import (
    PARTS,
    SCANNING,
    demanded_marks,
    hidden_marks,
    in_eighth,
    mark_cases,
    scope_of,
    spread_cases,
)

gate = load_script("gate")
retry = load_script("retry")
MAKEFILE = """
good:
\t@echo all is well $(ARGS)
bad:
\t@echo first; echo the cause; exit 3
endless:
\t@sleep 600
"""


def stages(digest: str):
    return [stage for group in gate.groups(digest) for stage in group]


def test_every_stage_is_a_make_target():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    names = [stage.name for stage in stages("0123456789abcdef" * 4)]
    assert set(names) <= set(targets)
    assert names[:3] == ["setup", "lint", "type"]


def test_another_tree_tests_another_eighth():
    ours, theirs = stages("01" * 32), stages("02" * 32)
    differing = {one.name for one, other in zip(ours, theirs, strict=True) if one != other}
    assert differing == {"long", "chaos", "kills", "soak", "mutants", "bench"}


def test_each_test_is_in_the_eighth_of_some_salt_and_about_one_in_eight_of_each():
    names = [f"tests/a.py::test_{number}" for number in range(800)]
    counts = [sum(in_eighth(str(salt), name) for name in names) for salt in range(5)]
    assert all(700 / PARTS < count < 900 / PARTS * 1.5 for count in counts), counts
    assert all(any(in_eighth(str(salt), name) for salt in range(100)) for name in names)


def test_the_report_says_what_failed_and_how_to_repeat_it():
    groups = gate.groups("00" * 32)[:3]
    (setup,), (lint,), (types, warm) = groups
    outcomes = [gate.Outcome(stage, 1.5, 2.5, "", "") for stage in (setup, lint)]
    outcomes.append(gate.Outcome(types, 70.0, 90.0, "exit code 1", "the cause\n"))
    text = gate.report(outcomes, groups, 73.2)
    assert "--- end of make type: exit code 1\nthe cause\n" in text
    assert re.search(r"^lint +2 +2  passed$", text, re.MULTILINE)
    assert re.search(r"^type +70 +90  exit code 1$", text, re.MULTILINE)
    assert re.search(r"^warm +not run, since setup failed$", text, re.MULTILINE)
    assert re.search(r"^gate +73 +95  failed; repeat with: make type$", text, re.MULTILINE)


@pytest.mark.world
def test_every_stage_is_run_to_its_end_unless_setup_fails(tmp_path, monkeypatch, capsys):
    write(tmp_path, {"Makefile": MAKEFILE + "setup:\n\t@exit 1\n"})
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    good, bad, setup = (gate.Stage(name, 60) for name in ("good", "bad", "setup"))
    outcomes = gate.run_groups([[bad], [good, bad]])
    assert [outcome.problem for outcome in outcomes] == ["exit code 2", "", "exit code 2"]
    assert "good| all is well" in capsys.readouterr().out
    assert [outcome.stage for outcome in gate.run_groups([[setup], [good]])] == [setup]


@pytest.mark.world
@pytest.mark.parametrize(
    ("name", "limit_s", "problem", "tail"),
    [
        ("good", 60, "", "all is well --seed 1\n"),
        ("bad", 60, "exit code 2", "the cause\n"),
        ("endless", 0.5, "still running after 0.5 s", ""),
    ],
)
def test_a_stage_ends_with_its_output_and_what_went_wrong(
    name, limit_s, problem, tail, tmp_path, monkeypatch
):
    write(tmp_path, {"Makefile": MAKEFILE})
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    outcome = gate.run(gate.Stage(name, limit_s, "--seed 1"))
    assert outcome.problem == problem
    assert tail in outcome.tail


@pytest.mark.world
def test_the_hash_of_a_tree_changes_with_names_and_contents_and_not_with_what_git_ignores(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write(tmp_path, {"a.py": "x = 1\n", ".gitignore": "runs/\n"})
    first = gate.tree_hash(tmp_path)
    write(tmp_path, {"runs/metrics.jsonl": "{}"})
    assert gate.tree_hash(tmp_path) == first
    write(tmp_path, {"a.py": "x = 2\n"})
    second = gate.tree_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, gate.tree_hash(tmp_path)}) == 3


TESTS = """
import pathlib
def test_that_passes(): pass
def test_that_fails_once():
    mark = pathlib.Path("been-here")
    been = mark.exists()
    mark.touch()
    assert been
def test_that_fails(): assert {twice}
"""


@pytest.mark.world
@pytest.mark.parametrize(("twice", "code"), [pytest.param(True, 0, marks=pytest.mark.slow), (False, 1)])
def test_a_test_that_fails_once_is_repeated_and_counted(twice, code, tmp_path, monkeypatch, capfd):
    write(tmp_path, {"test_a.py": TESTS.format(twice=twice), "pyproject.toml": "[tool.pytest.ini_options]\n"})
    monkeypatch.setattr(retry, "ROOT", tmp_path)
    monkeypatch.setattr(retry, "FLAKY", tmp_path / "runs" / "flaky.json")
    for times in (1, 2):
        (tmp_path / "been-here").unlink(missing_ok=True)
        assert retry.main(["-q", "-p", "no:xdist"]) == code
        told = json.loads((tmp_path / "runs" / "flaky.json").read_text())
        assert told == {"test_a.py::test_that_fails_once": times}
    out = capfd.readouterr().out
    assert f"repeating alone {2 - twice} that failed" in out
    assert "failed once and passed alone, counted in runs/flaky.json; to be mended next:" in out


@pytest.mark.world
def test_a_file_that_cannot_be_imported_rejects_at_once(tmp_path, monkeypatch, capfd):
    write(tmp_path, {"test_a.py": "import gone\n", "test_b.py": "def test_that_passes(): pass\n"})
    write(tmp_path, {"pyproject.toml": "[tool.pytest.ini_options]\n"})
    monkeypatch.setattr(retry, "ROOT", tmp_path)
    assert retry.main(["-q", "-p", "no:xdist", "--continue-on-collection-errors"]) == 1
    assert "repeating alone" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("expression", "demanded"),
    [
        ("", [set()]),
        ("world and not slow", [{"world"}]),
        ("slow", [{"slow"}]),
        ("world and attack", [{"world", "attack"}]),
        ("not world and not slow", [set()]),
        ("world or slow", [{"world"}, {"slow"}]),
        ("world and attack or not slow", [{"world", "attack"}, set()]),
        ("not (world or slow)", [set()]),
    ],
)
def test_only_files_that_name_a_demanded_mark_are_read(expression, demanded):
    assert demanded_marks(expression) == demanded


def test_a_mark_that_its_file_does_not_name_is_found(tmp_path):
    write(
        tmp_path, {"test_a.py": "@pytest.mark.world\ndef test(): ...\n", "test_b.py": "@far\ndef test(): ..."}
    )
    items = [
        SimpleNamespace(path=tmp_path / name, nodeid=name, get_closest_marker={"world": 1}.get)
        for name in ("test_a.py", "test_b.py")
    ]
    assert hidden_marks(items) == ["test_b.py (world)"]


@pytest.mark.parametrize(("keep", "kept"), [(1, [0]), (3, [0, 4, 7]), (5, [0, 2, 4, 6, 8]), (10, range(10))])
def test_cases_beyond_those_that_run_by_default_are_slow(keep, kept):
    slow = []
    marked = {"slow_beyond": SimpleNamespace(args=(keep,))}
    items = [
        SimpleNamespace(
            nodeid=f"test_a.py::test[{case}]",
            callspec=SimpleNamespace(indices={"case": case}),
            get_closest_marker=marked.get,
            add_marker=lambda name, case=case: slow.append((case, name)),
        )
        for case in range(10)
    ]
    mark_cases(items)
    assert slow == [(case, "slow") for case in range(10) if case not in kept]


@pytest.mark.parametrize(
    ("sizes", "num"), [((2, 4), 4), ((4, 2), 4), ((2, 2, 5), 5), ((3, 20), 20), ((20, 3), 20)]
)
def test_every_value_of_a_parameter_is_in_a_case_that_runs_by_default(sizes, num):
    cases = [dict(enumerate(case)) for case in itertools.product(*map(range, sizes))]
    chosen = spread_cases(cases, num)
    assert len(chosen) == num
    for name, size in enumerate(sizes):
        times = Counter(cases[place][name] for place in chosen)
        assert len(times) == size
        assert max(times.values()) - min(times.values()) <= 1


def test_tests_are_repeated_without_the_arguments_for_workers():
    arguments = [
        "-n",
        "logical",
        "--maxprocesses",
        "8",
        "--dist",
        "loadfile",
        "-m",
        "world and not slow",
        "-q",
    ]
    assert retry.alone(arguments) == ["-m", "world and not slow", "-q"]
    assert retry.alone(["-n2", "--dist=load", "tests/a.py"]) == ["tests/a.py"]


def test_the_files_that_parse_all_sources_are_one_scope():
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__)]
    scanning = [path for path in files if re.search(r"\n@scan\n", path.read_text(encoding="utf-8"))]
    assert [path.relative_to(ROOT).as_posix() for path in scanning] == list(SCANNING)
    assert {scope_of(f"{name}::test_a[1]") for name in SCANNING} == {"sources"}
    assert scope_of("tests/house/test_gate.py::test_a[b::c]") == "tests/house/test_gate.py"


GUARDED = """
import multiprocessing, os, socket, subprocess, sys, time
import pytest
def work(): pass
def bind():
    with socket.socket() as one: one.bind(("127.0.0.1", 0))
def actions():
    return {
        "popen": lambda: subprocess.run([sys.executable, "-c", ""]),
        "fork": lambda: os.fork() or os._exit(0),
        "system": lambda: os.system("true"),
        "spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}),
        "exec": lambda: os.execv(sys.executable, [sys.executable, "-c", ""]),
        "process": lambda: multiprocessing.get_context("forkserver").Process(target=work).start(),
        "bind": bind,
        "sleep": lambda: time.sleep(0),
    }
NAMES = ["popen", "fork", "system", "spawn", "exec", "process", "bind", "sleep"]
@pytest.mark.parametrize("name", NAMES)
def test_refused(name): actions()[name]()
@pytest.mark.parametrize("name", NAMES)
def test_caught(name):
    try: actions()[name]()
    except Exception: pass
def test_harmless(): assert time.monotonic() > 0
@pytest.mark.world
def test_allowed():
    actions()["popen"]()
    actions()["bind"]()
    actions()["sleep"]()
"""


@pytest.mark.world
def test_what_is_not_marked_world_is_refused_processes_ports_and_sleep(tmp_path):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    write(tmp_path, {"test_a.py": GUARDED, "conftest.py": "from tests.conftest import *\n"})
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_a.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "16 failed, 2 passed" in done.stdout, done.stdout
    assert "test_caught[sleep] sleeps; mark it world, or let it do without" in done.stdout
