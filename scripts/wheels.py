"""Check that pip installs everything without a compiler, and write what it takes to scripts/wheels.txt.

    python scripts/wheels.py    # some minutes, needs the package index

pip resolves the requirements of pyproject.toml with the pins of constraints.txt for each version of Python,
from wheels alone. PURE has what exists as source only and contains nothing to compile; pip makes a wheel
of it with setuptools. The tests compare wheels.txt with constraints.txt, so a changed pin needs this again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ROOT / "scripts" / "wheels.txt"
PYTHONS = ("3.11", "3.12", "3.13")
# With what each requires: pip does not look into a source where it takes wheels alone.
PURE = {"cellpylib": ("numpy", "matplotlib"), "zss": ("six",)}
# Looked up without what they require. reasoning-gym requires pycosat, which must be compiled; its other
# requirements are ours. A torch with CUDA brings a triton of its own version, which setup.sh keeps. Nothing
# requires uv, which installs the others.
ALONE = ("reasoning-gym", "triton", "uv")
HEAD = "# Written by `make wheels`: pins of constraints.txt and the Pythons for which each has a wheel.\n"


def requirements(project: dict[str, object], extra: str = "dev") -> list[str]:
    """All that pip installs for the project with an extra, extras of its own resolved; no sources."""
    name, optional = project["name"], project["optional-dependencies"]
    assert isinstance(optional, dict) and isinstance(project["dependencies"], list)
    found, waiting = list(project["dependencies"]), [extra]
    while waiting:
        for line in optional[waiting.pop()]:
            requirement = Requirement(line)
            if requirement.name == name:
                waiting += requirement.extras
            else:
                found += PURE.get(requirement.name, (line,))
    return found


def pins(text: str) -> dict[str, str]:
    """Version by normalized name, of the lines of constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): version for name, version in pairs}


def resolved(python: str, wanted: Sequence[str], pinned: dict[str, str]) -> dict[str, str]:
    """Version by normalized name of all that pip would install for a Python, from wheels alone.

    Raises:
        SystemExit: something has no wheel, or the pins contradict each other; pip's message says what.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["--dry-run", "-qq", "--ignore-installed", "--only-binary=:all:", "--report", str(report)]
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()))
        words += ["--python-version", python, "--target", folder, "--constraint", str(constraints), *wanted]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *words], cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(f"for Python {python} pip cannot install everything from wheels")
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in installs}


def lines(pinned: dict[str, str], wheels: dict[str, dict[str, str]]) -> list[str]:
    """One for each pin: the Pythons with a wheel of it, or `source`.

    Raises:
        SystemExit: a pin has neither.
    """
    found = []
    for name, version in sorted(pinned.items()):
        pythons = [python for python in PYTHONS if wheels[python].get(name, "").split("+")[0] == version]
        if not pythons and name not in PURE:
            raise SystemExit(f"{name}=={version} of constraints.txt is not among what pip installs")
        found.append(f"{name}=={version} {' '.join(pythons) or 'source'}")
    return found


def main() -> None:
    """Resolve for every Python, and write."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    free = {name: version for name, version in pinned.items() if name not in ALONE}
    alone = [f"{name}=={pinned[name]}" for name in ALONE]
    wheels = {}
    for python in PYTHONS:
        wheels[python] = resolved(python, requirements(project), free)
        wheels[python] |= resolved(python, ["--no-deps", *alone], {})
        print(f"Python {python}: {len(wheels[python])} wheels", flush=True)
    WRITTEN.write_text(HEAD + "".join(f"{line}\n" for line in lines(pinned, wheels)), encoding="utf-8")


if __name__ == "__main__":
    main()
