"""Everything that pip installs is a wheel or pure Python, so no machine needs a compiler."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from millrace.data.tasks import PYCOSAT, REASONING_GYM
from tests.house.scripts import load_script
from tests.house.source import ROOT

wheels = load_script("wheels")
PINNED = wheels.pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = TOML["project"]
PER_PYTHON = {python: {"numpy": "2.4", "torch": "2.13.0+cpu"} for python in wheels.PYTHONS}


def names(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_every_pin_was_found_as_a_wheel_or_is_pure():
    """One that fails here was changed after `make wheels`, which refuses what must be compiled."""
    head, *lines = wheels.WRITTEN.read_text(encoding="utf-8").splitlines()
    assert f"{head}\n" == wheels.HEAD
    found = {pin: pythons for pin, _, pythons in (line.partition(" ") for line in lines)}
    assert sorted(found) == sorted(f"{name}=={version}" for name, version in PINNED.items())
    assert {pin.split("==")[0] for pin, pythons in found.items() if pythons == "source"} == set(wheels.PURE)
    assert {pythons for pythons in found.values() if pythons != "source"} == {"3.11 3.12 3.13"}


def test_every_requirement_is_pinned():
    assert names(wheels.requirements(PROJECT)) - set(PINNED) == set()
    assert "pycosat" not in PINNED


def test_what_reasoning_gym_requires_is_ours_except_what_must_be_compiled():
    required = [line for line in metadata.requires("reasoning-gym") or [] if "extra ==" not in line]
    ours = names(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["tasks"])
    assert names(required) - ours == {"pycosat"}


@pytest.mark.parametrize("name", list(wheels.PURE))
def test_what_pip_builds_itself_is_pure(name):
    assert "Root-Is-Purelib: true" in (metadata.distribution(name).read_text("WHEEL") or "")
    assert names(metadata.requires(name) or []) == set(wheels.PURE[name])


def test_the_package_itself_has_nothing_to_compile():
    assert not (ROOT / "setup.py").exists()
    assert set(TOML["tool"]["setuptools"]) == {"packages", "package-data"}
    assert TOML["build-system"]["requires"] == ["setuptools>=77"]


def test_requirements_resolve_extras_of_the_project_and_look_into_sources():
    project = {
        "name": "mill",
        "dependencies": ["torch>=2"],
        "optional-dependencies": {"dev": ["mill[tasks]", "pytest"], "tasks": ["zss", "bfi"], "wandb": ["w"]},
    }
    assert wheels.requirements(project) == ["torch>=2", "pytest", "six", "bfi"]


def test_a_pin_without_a_wheel_is_refused():
    pinned = {"numpy": "2.4", "torch": "2.13.0", "zss": "1.2"}
    assert wheels.lines(pinned, PER_PYTHON) == [
        "numpy==2.4 3.11 3.12 3.13",
        "torch==2.13.0 3.11 3.12 3.13",
        "zss==1.2 source",
    ]
    with pytest.raises(SystemExit, match="pycosat==0.6.6 of constraints.txt is not among what pip installs"):
        wheels.lines(pinned | {"pycosat": "0.6.6"}, PER_PYTHON)


def test_the_package_is_called_millrace_rl_where_pip_is_asked():
    """The name millrace on the package index is not ours."""
    asked = re.compile(
        r"""(version|metadata|requires|distribution)\("millrace"\)|pip install '?"?millrace\b(?!-)"""
    )
    files = [
        path
        for folder in ("millrace", "scripts", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.*")
    ]
    files += [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".md", ".sh")}
    assert len(texts) > 100
    assert [str(path) for path, text in texts.items() if asked.search(text)] == []
    assert asked.search('metadata.version("millrace")') and asked.search("pip install 'millrace[ray]'")


def test_the_readme_names_the_versions_that_an_error_names():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"pip install --no-deps reasoning-gym=={REASONING_GYM} " in text
    assert f"pip install pycosat=={PYCOSAT}`" in text
    assert PINNED["reasoning-gym"] == REASONING_GYM
