"""Break the arithmetic on purpose, one place at a time, and demand a red test each time.

A mutant is one file of the package with one sign, comparison, mask, number or min/max changed. It is
written into a temporary copy, never into the working tree, and the tests of that file run against it. A
mutant that passes them survived: a test is missing, or the change alters nothing. The latter are listed
with the reason in tests/mutants_allowed.txt, in the form that survivors are printed in:

    millrace/kernels/scan.py scan_chunk | size = 64 -> size = 65 | the chunk size only sets the speed

Python and pytest start once; each mutant then runs in a forked child.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TARGETS = (
    "millrace/algorithms/*.py",
    "millrace/kernels/*.py",
    "millrace/data/dealing.py",
    "millrace/data/packing.py",
    "millrace/inference/scheduler.py",
    "millrace/orchestration/flow.py",
    "millrace/orchestration/line.py",
)
ALLOWED = "tests/mutants_allowed.txt"
NOT_RUN = (3, 4, 5)  # pytest's words for an internal error, a wrong command line, and no tests
PRELOADED = ("numpy", "torch", "torch.testing", "hypothesis", "pytest")

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {ast.Add: ast.Sub, ast.BitAnd: ast.BitOr}
COMPARISONS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
}
NAMES = {"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "clamp_min": "clamp_max"}
OPERATORS |= {other: one for one, other in OPERATORS.items()}
COMPARISONS |= {other: one for one, other in COMPARISONS.items()}
NAMES |= {other: one for one, other in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file: where, what, and its whole new text."""

    file: str
    line: int
    function: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """How tests/mutants_allowed.txt names it; holds no line number, which every edit would move."""
        return f"{self.file} {self.function} | {self.before} -> {self.after}"


def mutants(root: Path, file: str) -> list[Mutant]:
    """Every mutant of one file, in the order of its text."""
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    before = ast.unparse(tree)
    found = []
    for line, function, node, field, value in _edits(tree, "module"):
        kept = getattr(node, field)
        setattr(node, field, value)
        after = ast.unparse(tree)
        setattr(node, field, kept)
        pairs = zip(before.splitlines(), after.splitlines(), strict=True)
        old, new = next((old.strip(), new.strip()) for old, new in pairs if old != new)
        found.append(Mutant(file, line, function, old, new, after))
    return found


def _edits(node: ast.AST, function: str) -> Iterator[tuple[int, str, ast.AST, str, Any]]:
    """Every way to break a node or something below it: line, function, and which attribute becomes what.

    Annotations, decorators and error messages are left alone.
    """
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = node.name if function == "module" else f"{function}.{node.name}"
    for owner, field, value in _own_edits(node):
        yield getattr(node, "lineno", 0), function, owner, field, value
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _edits(child, function)


def _own_edits(node: ast.AST) -> Iterator[tuple[ast.AST, str, Any]]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield node, "op", OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if type(operator) in COMPARISONS:
                flipped = COMPARISONS[type(operator)]()
                yield node, "ops", [*node.ops[:index], flipped, *node.ops[index + 1 :]]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
        # Twice is never: the operator cancels itself.
        yield node, "operand", ast.UnaryOp(op=node.op, operand=node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield node, "value", node.value + 1
    elif isinstance(node, ast.Call):
        yield from _call_edits(node)


def _call_edits(node: ast.Call) -> Iterator[tuple[ast.AST, str, Any]]:
    name = node.func
    if isinstance(name, ast.Name) and name.id in NAMES:
        yield name, "id", NAMES[name.id]
    if isinstance(name, ast.Attribute) and name.attr in NAMES:
        yield name, "attr", NAMES[name.attr]
    if isinstance(name, ast.Attribute) and name.attr in ("clamp", "clamp_"):
        bounds = [keyword for keyword in node.keywords if keyword.arg in ("min", "max")]
        if len(bounds) == 1:
            yield bounds[0], "arg", NAMES[str(bounds[0].arg)]


def tests_of(root: Path, file: str) -> list[str]:
    """The test files that speak for a file: its own, its state machine's, and the twins that name it."""
    package, module = Path(file).parts[-2], Path(file).stem
    own = [root / "tests" / package / f"test_{module}.py", root / "tests" / "machines" / f"test_{module}.py"]
    own += sorted((root / "tests" / package).glob(f"test_{module}_*.py"))
    own += [
        path
        for path in sorted((root / "tests" / "twins").glob("test_*.py"))
        if re.search(rf"\b{package}\b.*\b{module}\b", path.read_text(encoding="utf-8"))
    ]
    return [path.relative_to(root).as_posix() for path in own if path.exists()]


def targets(root: Path, pattern: str) -> list[str]:
    """The files to break."""
    paths = sorted(path for target in TARGETS for path in root.glob(target))
    files = [path.relative_to(root).as_posix() for path in paths]
    return [file for file in files if fnmatch(file, f"*{pattern}*")]


def allowed(path: Path) -> set[str]:
    """The mutants that may survive.

    Raises:
        SystemExit: a line gives no reason.
    """
    keys = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        if line.strip() and not line.startswith("#"):
            key, _, reason = line.rpartition(" | ")
            if key.count(" | ") < 1 or not reason.strip():
                raise SystemExit(f"{path} line {number}: write FILE FUNCTION | BEFORE -> AFTER | REASON")
            keys.add(key.strip())
    return keys


class Workshop:
    """Temporary copies of the package and its tests, each with at most one child at work in it."""

    def __init__(self, root: Path, folder: Path, num_workers: int) -> None:
        """Copy what the tests need, once for each worker."""
        self.benches = [folder / str(number) for number in range(num_workers)]
        left_out = shutil.ignore_patterns("__pycache__", "house", "end_to_end")
        for bench in self.benches:
            for name in ("millrace", "tests"):
                shutil.copytree(root / name, bench / name, ignore=left_out)
            shutil.copy(root / "pyproject.toml", bench)
        self._root = root
        self._running: dict[Path, tuple[int, float, Callable[[int | None], None]]] = {}

    def start(
        self, file: str, source: str, tests: list[str], limit_s: float, then: Callable[[int | None], None]
    ) -> None:
        """Run tests against a changed file as soon as a copy is free.

        `then` is told pytest's exit status (0: all passed), or None where they took longer than `limit_s`.
        """
        while len(self._running) == len(self.benches):
            self._collect()
        bench = next(bench for bench in self.benches if bench not in self._running)
        (bench / file).write_text(source, encoding="utf-8")
        child = os.fork()
        if child == 0:
            _run_tests(bench, tests)

        def done(status: int | None) -> None:
            shutil.copy(self._root / file, bench / file)
            then(status)

        self._running[bench] = (child, time.monotonic() + limit_s, done)

    def finish(self) -> None:
        """Wait for everything that was started."""
        while self._running:
            self._collect()

    def stop(self) -> None:
        """End what still runs."""
        for child, _, _ in self._running.values():
            _kill(child)

    def _collect(self) -> None:
        for bench, (child, deadline, done) in list(self._running.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                _kill(child)
                os.waitpid(child, 0)
                code = None
            else:
                continue
            del self._running[bench]
            done(code)
        time.sleep(0.005)


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # not yet the leader of its group


def _run_tests(bench: Path, tests: list[str]) -> None:
    """In the child: run the tests of this copy and leave with pytest's status."""
    status = 3
    try:
        os.setsid()
        os.chdir(bench)
        silence = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        # Compiled kernels run as Python: compiling takes longer than the tests, and machine code of the
        # unchanged file would hide the change.
        sys.dont_write_bytecode = True
        os.environ.update(NUMBA_DISABLE_JIT="1", TRITON_INTERPRET="1")
        sys.path.insert(0, str(bench))
        import pytest

        options = ["-xq", "-pno:cacheprovider", f"--rootdir={bench}", "-m", "not slow and not gpu"]
        # hypothesis is already imported, so nobody can rewrite its assertions; nobody needs to.
        options += ["--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = int(pytest.main([*options, *tests]))
        imported = Path(importlib.import_module("millrace").__path__[0]).resolve()
        if imported != (bench / "millrace").resolve():
            print(f"the tests import {imported}, not the copy that is broken")
            status = 3
    except BaseException:
        # Nothing may return from here into the parent's code; what went wrong stands in output.txt.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _baselines(root: Path, shop: Workshop, files: list[str]) -> dict[str, tuple[list[str], float]]:
    """For each file its tests and how long they take unchanged, in seconds.

    Raises:
        SystemExit: the tests fail without any change.
    """
    found = {}
    for file in files:
        tests = tests_of(root, file)
        statuses: list[int | None] = []
        start = time.monotonic()
        shop.start(file, (root / file).read_text(encoding="utf-8"), tests, 300, statuses.append)
        shop.finish()
        if statuses != [0]:
            output = "\n".join(
                bench.joinpath("output.txt").read_text(encoding="utf-8", errors="replace")[-3000:]
                for bench in shop.benches
                if bench.joinpath("output.txt").exists()
            )
            raise SystemExit(f"{output}\n{' '.join(tests)} fail before anything is changed; mend them first")
        found[file] = (tests, time.monotonic() - start)
    return found


def drawn(mutants: list[Mutant], most: int, seed: int) -> list[Mutant]:
    """So many of them, in order; one that comes or goes changes the draw by one."""

    def lot(mutant: Mutant) -> bytes:
        return hashlib.blake2b(f"{seed} {mutant.key}".encode()).digest()

    chosen = {mutant.key for mutant in sorted(mutants, key=lot)[:most]}
    return [mutant for mutant in mutants if mutant.key in chosen]


def hunt(root: Path, chosen: list[Mutant], num_workers: int) -> list[Mutant]:
    """Run every mutant and give back those that survived.

    Raises:
        SystemExit: a file has no tests, or they fail without any change.
    """
    files = sorted({mutant.file for mutant in chosen})
    for file in files:
        if not tests_of(root, file):
            package, module = Path(file).parts[-2], Path(file).stem
            raise SystemExit(f"{file} has no tests; write tests/{package}/test_{module}.py")
    for name in PRELOADED:
        importlib.import_module(name)  # once here, not in each child
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shop = Workshop(root, Path(folder), num_workers)
        try:
            baselines = _baselines(root, shop, files)
            for file in files:
                tests, unchanged_s = baselines[file]
                own = [mutant for mutant in chosen if mutant.file == file]
                print(f"{file}: {len(own)} mutants, {unchanged_s:.1f} s each: {' '.join(tests)}", flush=True)
                for mutant in own:
                    shop.start(file, mutant.source, tests, 10 + 5 * unchanged_s, _noting(mutant, survivors))
            shop.finish()
        finally:
            shop.stop()
    return survivors


def _noting(mutant: Mutant, survivors: list[Mutant]) -> Callable[[int | None], None]:
    def note(status: int | None) -> None:
        if status in NOT_RUN:
            raise SystemExit(f"pytest could not run (status {status}) with {mutant.key}; try --workers 1")
        if status == 0:
            print(f"survived at line {mutant.line}: {mutant.key}", flush=True)
            survivors.append(mutant)

    return note


def main() -> int:
    """Read the command line, run, print; 0 when no mutant survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "pattern", nargs="?", default="", help="only files whose path holds this, such as losses"
    )
    parser.add_argument("--most", type=int, help="at most so many mutants, drawn by --seed; all without it")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of --most")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    words = parser.parse_args()
    root = words.root.resolve()
    # Before torch is imported: one thread a worker, and none across a fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    files = targets(root, words.pattern)
    if not files:
        raise SystemExit(f"no file to break matches {words.pattern!r}; there are {', '.join(TARGETS)}")
    every = [mutant for file in files for mutant in mutants(root, file)]
    may_survive = allowed(root / ALLOWED)
    chosen = [mutant for mutant in every if mutant.key not in may_survive]
    num_allowed = len(every) - len(chosen)
    if words.most is not None and words.most < len(chosen):
        chosen = drawn(chosen, words.most, words.seed)
    start = time.monotonic()
    survivors = hunt(root, chosen, words.workers)
    stale = [] if words.pattern else sorted(may_survive - {mutant.key for mutant in every})
    for key in stale:
        print(f"{ALLOWED} lists what no longer exists; remove: {key}")
    print(
        f"{len(chosen)} mutants: {len(chosen) - len(survivors)} caught, {len(survivors)} survived "
        f"({num_allowed} more are allowed to), {time.monotonic() - start:.0f} s"
    )
    if survivors:
        print(f"write a test that fails for each, or list it in {ALLOWED} with the reason it changes nothing")
    return 1 if survivors or stale else 0


if __name__ == "__main__":
    sys.exit(main())
