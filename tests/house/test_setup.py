"""`make setup`, with a Python that only pretends: what it checks, what it installs, when it does nothing."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from scripts.install import uv_variables
from tests.house.source import ROOT

pytestmark = pytest.mark.world

TOOLS = ("bash", "sh", "dirname", "cat", "cksum", "tr", "sed", "rm", "touch", "cp", "mkdir", "chmod")
# Stands for Python: answers checks, makes .venv by copying itself, and writes down what pip is told.
FAKE = """#!/bin/sh
case "$*" in
    *"sys.version_info"*) exit {too_old} ;;
    *"ensurepip"*) exit {no_venv} ;;
    *'version("torch")'*) [ -f torch ] || exit 1; cat torch; exit 0 ;;
    *'version("triton")'*) [ -f triton ] || exit 1; cat triton; exit 0 ;;
    "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"--version") echo pretended ;;
    *) echo "$*" >> calls ;;
esac
"""


class House:
    """A folder with a space in its name, and a PATH on which only some programs exist."""

    def __init__(self, folder):
        self.root, self.path = folder / "a checkout", folder / "bin"
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool))
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/install.py"):
            shutil.copy(ROOT / name, self.root / name)

    def has(self, python, *, too_old=0, no_venv=0):
        (self.path / python).write_text(FAKE.format(too_old=too_old, no_venv=no_venv))
        (self.path / python).chmod(0o755)

    def setup(self):
        return subprocess.run(
            [self.path / "bash", self.root / "scripts" / "setup.sh"],
            cwd=self.path,
            env={"PATH": str(self.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def requirements(self):
        return (self.root / "constraints.txt").read_text().splitlines()

    def constraints(self):
        return (self.root / ".venv" / "constraints.txt").read_text().splitlines()

    def calls(self):
        log = self.root / "calls"
        return [call for call in log.read_text().splitlines() if "install" in call] if log.exists() else []


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def test_without_python_one_sentence_says_what_to_install(house):
    house.has("python3", too_old=1)
    done = house.setup()
    assert done.returncode == 1
    assert done.stderr == (
        "make setup: Python 3.11 or newer was not found; install it (Debian, Ubuntu: apt install python3 "
        "python3-venv), then run make setup again\n"
    )


def test_without_venv_one_sentence_names_the_package(house):
    house.has("python3", no_venv=1)
    done = house.setup()
    assert done.returncode == 1
    assert done.stderr == (
        "make setup: python3 has no venv module; install it (Debian, Ubuntu: apt install python3-venv), "
        "then run make setup again\n"
    )


def test_without_the_venv_of_one_version_the_sentence_names_its_package(house):
    house.has("python3.12", no_venv=1)
    assert "(Debian, Ubuntu: apt install python3-venv python3.12-venv)" in house.setup().stderr


def test_a_python_that_is_too_old_or_lacks_venv_is_passed_over(house):
    house.has("python3.11", no_venv=1)
    house.has("python3.12", too_old=1)
    house.has("python3")
    assert house.setup().returncode == 0


def test_torch_is_installed_first_and_a_second_run_does_nothing(house):
    house.has("python3.11")
    done = house.setup()
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = house.calls()
    assert first.split()[5:] == ["torch==2.13.0", "-c", ".venv/constraints.txt"]
    assert second.split()[5:] == [line for line in house.requirements() if line.startswith("uv==")]
    assert third.split() == ["scripts/install.py", "-e", ".[dev]", "-c", ".venv/constraints.txt"]
    assert fourth.split() == ["scripts/install.py", "--no-deps", "reasoning-gym==0.1.25"]
    again = house.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(house.calls()) == 4


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_is_installed_again(house, name):
    house.has("python3.11")
    house.setup()
    with (house.root / name).open("a") as file:
        file.write("# changed\n")
    house.setup()
    assert len(house.calls()) == 8


def test_a_torch_that_fits_stays(house):
    house.has("python3.11")
    (house.root / "torch").write_text("2.12.1\n")
    assert house.setup().returncode == 0
    _, dependencies, reasoning_gym = house.calls()
    assert "-e .[dev]" in dependencies and "--no-deps" in reasoning_gym
    assert "torch==2.12.1" in house.constraints()


def test_the_triton_that_came_with_a_torch_stays_with_it(house):
    house.has("python3.11")
    (pinned,) = (line for line in house.requirements() if line.startswith("triton=="))
    house.setup()
    assert pinned in house.constraints()
    (house.root / ".venv").rename(house.root / "old")
    (house.root / "triton").write_text("3.7.1\n")
    house.setup()
    assert "triton==3.7.1" in house.constraints() and pinned not in house.constraints()


def test_uv_installs_with_the_settings_of_pip_and_the_environment_has_precedence():
    listed = """:env:.find-links='/here /there'
:env:.timeout='180'
global.extra-index-url='\\nhttps://one/simple\\nhttps://two/simple'
global.find-links='/elsewhere'
global.index-url='https://first/simple'
install.index-url='https://second/simple'
"""
    assert uv_variables(listed) == {
        "UV_FIND_LINKS": "/here,/there",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_DEFAULT_INDEX": "https://second/simple",
    }
    assert uv_variables("") == {}


def test_make_lists_every_target():
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    listed = [line.split()[1] for line in shown.splitlines()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert listed == targets
    assert phony is not None and sorted(phony[1].split()) == sorted(targets)
    assert {"train", "test", "world", "slow"} <= set(targets)
