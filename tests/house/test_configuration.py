"""Objects receive values or a section of the configuration; few files take all of it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house.source import PACKAGE, Source, python_files, scan, write

# The files and folders that may have a parameter or a field of type RunConfig, each with the reason.
ALLOWED = {
    "config/": "defines, reads and checks it",
    "cli/": "loads a recipe for a command",
    "run/build.py": "turns a recipe into components",
    "run/build_algorithm.py": "turns a recipe into functions of the algorithm",
    "run/build_engines.py": "turns a recipe into engines in processes of their own",
    "run/build_environments.py": "turns a recipe into environments",
    "run/build_models.py": "turns a recipe into critic, reference and teacher",
    "run/build_source.py": "turns a recipe into a prompt stream and a batch source",
    "run/data_check.py": "reads a data set as a recipe would",
    "run/launch.py": "writes the recipe of a new run, reads that of a resumed one, and builds either",
    "run/loop.py": "trains a recipe",
    "run/numerics.py": "checks a recipe",
    "run/offline.py": "evaluates a model folder on the prompts and rewards of a recipe",
    "replay/replay.py": "trains a recipe again, with changed settings",
    "launchers/ray_ranks.py": "trains a recipe on ranks that Ray starts",
}


@scan
def _taken(source: Source) -> list[int]:
    """Lines of parameters and fields of type RunConfig."""
    if "RunConfig" not in source.text:
        return []
    return [
        node.lineno
        for node in source.nodes(ast.arg, ast.AnnAssign)
        if node.annotation is not None and "RunConfig" in ast.unparse(node.annotation)
    ]


def takers(folder: Path) -> list[str]:
    """The files with a parameter or a field of type RunConfig, once for each."""
    return [path.relative_to(folder).as_posix() for path in python_files(folder) for _ in _taken(path)]


def test_only_what_builds_or_judges_a_recipe_takes_all_of_it():
    wrong = sorted({name for name in takers(PACKAGE) if not name.startswith(tuple(ALLOWED))})
    assert wrong == [], "pass the values, or the section, that is needed; see ALLOWED"


def test_every_exception_is_still_one():
    found = takers(PACKAGE)
    assert [place for place in ALLOWED if not any(name.startswith(place) for name in found)] == []


def test_parameters_and_fields_are_found(tmp_path):
    files = {
        "a.py": "def one(config: RunConfig | None = None): pass\n",
        "b/c.py": "class Two:\n    config: settings.RunConfig\n",
        "d.py": "def three(path: str) -> RunConfig:\n    return RunConfig()\n",
        "e.py": "class Four:\n    def __init__(self, given: 'RunConfig', *, seed: int) -> None: pass\n",
    }
    assert takers(write(tmp_path, files)) == ["a.py", "b/c.py", "e.py"]
