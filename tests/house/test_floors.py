"""Which package may import which. Imports inside functions count like any other.

Those under TYPE_CHECKING count too, but for torch: they are never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, Source, dotted, python_files, scan, walk, write

FLOORS = [
    ["types", "version", "errors"],
    ["keeper", "config", "kernels", "foundations", "planner", "observability"],
    ["algorithms", "processes", "evaluation", "migrate"],
    ["data"],
    ["protocols"],
    ["transport", "rewards", "models"],
    ["distributed"],
    ["eventlog", "inference", "training", "environments"],
    ["rollout"],
    ["simulation", "engines"],
    ["run"],
    ["viewer", "launchers", "replay"],
    ["cli"],
    ["__main__"],
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# A library, and the only files that may import it. `*` crosses folders.
FENCES = {
    "ray": ["engines/ray*", "launchers/ray_ranks.py"],
    "triton": ["kernels/*"],
    "numba": ["kernels/*"],
    "transformers": ["models/*", "distributed/*", "data/*"],
    "vllm": ["engines/vllm*"],
    "sglang": ["engines/sglang*"],
    "fastapi": ["inference/server/*", "viewer/*"],
    "uvicorn": ["inference/server/*", "viewer/*"],
    "bitsandbytes": ["training/eight_bit.py"],
    "mcp": ["environments/mcp_tools.py"],
    "httpx2": ["environments/mcp_tools.py"],
    "gymnasium": ["environments/gymnasium_environment.py"],
    "textarena": ["environments/textarena_environment.py"],
    "skyrl_gym": ["environments/skyrl_environment.py"],
    "omegaconf": ["environments/skyrl_environment.py"],
    "websockets": ["environments/openenv_*"],
    "verifiers": ["environments/verifiers_program.py"],
    "nltk": ["environments/textarena_environment.py"],
    "pydantic_monty": ["environments/sandbox/monty_sandbox.py"],
    "wasmtime": ["environments/sandbox/wasm_interpreter.py"],
    "psutil": ["distributed/network.py"],
    "wandb": ["observability/sink_wandb.py"],
    "mlflow": ["observability/sink_mlflow.py"],
}
BY_NAME = ("import_module", "__import__")
WITHOUT_TORCH = [
    "types.py",
    "errors.py",
    "protocols.py",
    "config/*",
    "planner/*",
    "foundations/*",
    "evaluation/*",
    "eventlog/*",
    "rollout/*",
    "simulation/*",
    "inference/request.py",
    "inference/block_manager.py",
    "inference/engine_sizes.py",
    "inference/kv_blocks.py",
    "inference/prefix_cache.py",
    "inference/invariants.py",
    "inference/scheduler.py",
    "engines/handle.py",
    "engines/wire.py",
]


def module_of(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(
    path: Path, package: Path, modules: set[str], *, running: bool = False
) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports; a name counts as a module where it is one.

    Args:
        path: of the file.
        package: that it belongs to.
        modules: of the package.
        running: leave out what is for type checkers and never imported.
    """
    module = module_of(path, package)
    here = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for line, for_types, level, base, names in _imported(path):
        if running and for_types:
            continue
        above = here[: len(here) - level + 1] if level else []
        base = ".".join([*above, *([base] if base else [])])
        if not names:
            yield line, base
        for name in names:
            whole = f"{base}.{name}"
            yield line, whole if whole in modules or base == package.name else base


@scan
def _imported(source: Source) -> Iterator[tuple[int, bool, int, str, list[str]]]:
    """Line of every import, whether it is for types alone, and as `from` has it: level, module and names."""
    for_types = {
        id(node)
        for block in source.tree.body
        if isinstance(block, ast.If) and dotted(block.test) == "TYPE_CHECKING"
        for node in walk(block)
    }
    for node in source.nodes(ast.Import, ast.ImportFrom, ast.Call):
        where = node.lineno, id(node) in for_types
        if isinstance(node, ast.Import):
            yield from ((*where, 0, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield *where, node.level, node.module or "", [alias.name for alias in node.names]
        elif dotted(node.func).split(".")[-1] in BY_NAME:
            yield from (
                (*where, 0, str(word.value), []) for word in node.args[:1] if isinstance(word, ast.Constant)
            )


def import_graph(package: Path, *, running: bool = False) -> dict[Path, list[tuple[int, str]]]:
    files = python_files(package)
    modules = {module_of(path, package) for path in files}
    # The folders too: one without __init__.py is a package all the same.
    modules |= {module_of(path.parent / "__init__.py", package) for path in files}
    return {path: list(imports(path, package, modules, running=running)) for path in files}


def floor_violations(package: Path) -> list[str]:
    found = []
    for path, names in import_graph(package).items():
        name = path.relative_to(package).as_posix()
        part = name.split("/")[0].removesuffix(".py")
        if part == "__init__":
            continue  # the door: it hands out names of every floor
        if part not in FLOOR_OF:
            found.append(f"{name}: {part} has no floor; give it one in tests/house/test_floors.py")
            continue
        for line, imported in names:
            if imported.split(".")[0] != package.name:
                continue
            other = (imported.split(".") + [""])[1]
            if other not in FLOOR_OF:
                found.append(f"{name}:{line} imports {imported}; name the module that defines it")
            elif other != part and FLOOR_OF[other] >= FLOOR_OF[part]:
                found.append(
                    f"{name}:{line} {part} (floor {FLOOR_OF[part]}) imports {other} (floor {FLOOR_OF[other]})"
                )
    return found


def fence_violations(package: Path) -> list[str]:
    found = []
    for path, names in import_graph(package).items():
        name = path.relative_to(package).as_posix()
        for line, imported in names:
            allowed = FENCES.get(imported.split(".")[0])
            if allowed is not None and not any(fnmatch(name, pattern) for pattern in allowed):
                found.append(f"{name}:{line} imports {imported}, which belongs to {', '.join(allowed)}")
    return found


def torch_violations(package: Path) -> list[str]:
    """Files that must not need torch and reach it, by themselves or through another of our modules."""
    graph = import_graph(package, running=True)
    path_of = {module_of(path, package): path for path in graph}

    def route_to_torch(path: Path, seen: set[Path]) -> list[str] | None:
        name = path.relative_to(package).as_posix()
        seen.add(path)
        for _, imported in graph[path]:
            if imported.split(".")[0] == "torch":
                return [name, imported]
            parts = imported.split(".")
            for length in range(2, len(parts) + 1):  # importing a.b.c runs a.b as well
                other = path_of.get(".".join(parts[:length]))
                if other is not None and other not in seen:
                    route = route_to_torch(other, seen)
                    if route:
                        return [name, *route]
        return None

    found = []
    for path in graph:
        if any(fnmatch(path.relative_to(package).as_posix(), pattern) for pattern in WITHOUT_TORCH):
            route = route_to_torch(path, set())
            if route:
                found.append(" -> ".join(route))
    return found


def cycles(package: Path) -> list[str]:
    graph = import_graph(package)
    path_of = {module_of(path, package): path for path in graph}
    edges = {
        path.relative_to(package).as_posix(): {
            path_of[name].relative_to(package).as_posix()
            for _, name in names
            if name in path_of and path_of[name] != path
        }
        for path, names in graph.items()
        if path != package / "__init__.py"
    }
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


CHECKS = [floor_violations, fence_violations, torch_violations, cycles]


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_keeps_its_floors(check):
    assert check(PACKAGE) == []


def looked_at(tmp_path, check, files):
    return check(write(tmp_path / "millrace", files))


@pytest.mark.parametrize(
    "text",
    [
        "import millrace.data.batch",
        "from millrace import data",
        "from millrace.data import batch",
        "from ..data.batch import Batch",
        "def later():\n    from millrace.data import Batch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from millrace.data.batch import Batch",
        "import importlib\nimportlib.import_module('millrace.data.batch')",
    ],
)
def test_an_import_from_a_higher_floor_is_found_however_it_is_written(tmp_path, text):
    files = {"algorithms/losses.py": text, "data/__init__.py": "", "data/batch.py": "Batch = 1"}
    (found,) = looked_at(tmp_path, floor_violations, files)
    assert found.startswith("algorithms/losses.py:")
    assert found.endswith("algorithms (floor 2) imports data (floor 3)")


def test_packages_on_one_floor_are_strangers(tmp_path):
    files = {
        "training/policy.py": "\nfrom millrace.inference.engine import Engine",
        "inference/engine.py": "",
    }
    assert looked_at(tmp_path, floor_violations, files) == [
        "training/policy.py:2 training (floor 7) imports inference (floor 7)"
    ]


def test_lower_floors_and_ones_own_package_are_free(tmp_path):
    files = {
        "__init__.py": "def __getattr__(name):\n    from millrace.run import build",
        "training/policy.py": "from millrace.data.batch import B\nfrom millrace import types",
        "training/value.py": "from millrace.training.policy import x\nfrom . import policy",
        "data/batch.py": "import torch",
        "types.py": "",
        "run/build.py": "",
    }
    assert [looked_at(tmp_path, check, files) for check in CHECKS] == [[], [], [], []]


def test_a_module_without_a_floor_and_an_import_of_the_door_are_found(tmp_path):
    files = {"helpers.py": "", "training/policy.py": "from millrace import Batch"}
    assert looked_at(tmp_path, floor_violations, files) == [
        "helpers.py: helpers has no floor; give it one in tests/house/test_floors.py",
        "training/policy.py:1 imports millrace.Batch; name the module that defines it",
    ]


def test_a_library_outside_its_fence_is_found(tmp_path):
    files = {
        "engines/ray_placement.py": "import ray",
        "launchers/ray_ranks.py": "import ray",
        "run/run.py": "def f():\n    import ray.util",
        "training/policy.py": "from transformers import AutoModel",
        "observability/console.py": "import importlib\nimportlib.import_module('wandb')",
    }
    assert looked_at(tmp_path, fence_violations, files) == [
        "observability/console.py:2 imports wandb, which belongs to observability/sink_wandb.py",
        "run/run.py:2 imports ray.util, which belongs to engines/ray*, launchers/ray_ranks.py",
        "training/policy.py:1 imports transformers, which belongs to models/*, distributed/*, data/*",
    ]


def test_torch_is_found_through_other_modules(tmp_path):
    files = {
        "types.py": "from torch import Tensor",
        "inference/scheduler.py": "from millrace.data.chat import render",
        "inference/request.py": "if TYPE_CHECKING:\n    from millrace.data.batch import Batch",
        "data/__init__.py": "from millrace.data.batch import Batch",
        "data/batch.py": "import torch",
        "data/chat.py": "",
    }
    assert looked_at(tmp_path, torch_violations, files) == [
        "inference/scheduler.py -> data/__init__.py -> data/batch.py -> torch",
        "types.py -> torch",
    ]


def test_a_circle_within_a_package_is_found(tmp_path):
    files = {
        "training/a.py": "from millrace.training.b import x",
        "training/b.py": "from millrace.training import c",
        "training/c.py": "def f():\n    from .a import y",
    }
    (found,) = looked_at(tmp_path, cycles, files)
    assert set(found.split(" <- ")) == {"training/a.py", "training/b.py", "training/c.py"}
