"""Break the arithmetic on purpose, one place at a time, and demand a red test each time.

A mutant is one file of the package with one sign, comparison, mask, number or min/max changed. It is
written into a temporary copy, never into the working tree, and the tests of that file run against it. A
mutant that passes them survived: a test is missing, or the change alters nothing. The latter are listed
with the reason in tests/mutants_allowed.txt, in the form that survivors are printed in:

    millrace/kernels/scan.py scan_chunk | size = 64 -> size = 65 | the chunk size only sets the speed

Python and pytest start once; each mutant then runs in a forked child. One whose tests take several times
as long as unchanged is ended and not judged.

    python scripts/mutants.py losses                      # every mutant of the files whose path holds this
    python scripts/mutants.py --changed --most 40         # at most 40, of the functions in the diff
    python scripts/mutants.py --changed --most 40 --drawn 10 --seed 7 --budget-s 120
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import io
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

TARGETS = (
    "millrace/algorithms/*.py",
    "millrace/kernels/*.py",
    "millrace/data/balancing.py",
    "millrace/data/packing.py",
    "millrace/inference/kv_blocks.py",
    "millrace/inference/scheduler.py",
    "millrace/rollout/staleness.py",
)
# One compiles the kernels; the other chooses sizes on which a device is compared with torch, and its tests
# plant faults in the kernels.
NOT_ARITHMETIC = ("millrace/kernels/warm.py", "millrace/kernels/device_checks.py")
ALLOWED = "tests/mutants_allowed.txt"
# Without a branch of its own, a change is what was committed within so many seconds before the last commit.
CHANGE_S = 4 * 3600
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
UNCHANGED_S = 300.0  # for a file's tests without a change
NOT_RUN = (3, 4, 5)  # pytest's words for an internal error, a wrong command line, and no tests
PRELOADED = ("numpy", "torch", "torch.testing", "hypothesis", "pytest")
# Preloaded where the package imports them: five seconds of each child otherwise.
PRELOADED_IF_USED = ("transformers.modeling_utils", "numba")
# Compiled kernels run as Python: compiling takes longer than the tests, and machine code of the unchanged
# file would hide the change. Read when numba and triton are imported.
INTERPRETED = {"NUMBA_DISABLE_JIT": "1", "TRITON_INTERPRET": "1"}

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
    for line, function, node, name, value in _edits(tree, "module"):
        kept = getattr(node, name)
        setattr(node, name, value)
        after = ast.unparse(tree)
        setattr(node, name, kept)
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
    for owner, attribute, value in _own_edits(node):
        yield getattr(node, "lineno", 0), function, owner, attribute, value
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
    """The test files that speak for a file: its own, its state machine's, and of a kernel the twins."""
    package, module = Path(file).parts[-2], Path(file).stem
    own = [root / "tests" / package / f"test_{module}.py", root / "tests" / "machines" / f"test_{module}.py"]
    own += sorted((root / "tests" / package).glob(f"test_{module}_*.py"))
    if package == "kernels":
        own += [
            path
            for path in sorted((root / "tests" / "twins").glob("test_*.py"))
            if re.search(rf"\b{package}\b.*\b{module}\b", path.read_text(encoding="utf-8"))
        ]
    return [path.relative_to(root).as_posix() for path in own if path.exists()]


def change_base(root: Path) -> str | None:
    """The commit that a change began from: where its branch left main, or the last one that is older.

    None where git knows no commit.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head, left = git("rev-parse", "--verify", "HEAD"), git("merge-base", "HEAD", "origin/main")
    if left and left != head:
        return left
    committed_s = git("log", "-1", "--format=%ct")
    older = head and git("rev-list", "-1", f"--before={int(committed_s) - CHANGE_S}", "HEAD")
    return older or head or None


def changed_functions(root: Path, file: str, base: str) -> set[str]:
    """The functions of a file, as mutants name them, that differ from a commit.

    A changed statement outside of functions counts for "module". What only moved, from whichever file of the
    package, has not changed; neither has a function with other comments or another docstring.
    """
    known = _meanings_at(root, base)
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    return {name for name, meaning in _meanings(tree) if meaning not in known}


@cache
def _meanings_at(root: Path, commit: str) -> frozenset[str]:
    """What every function, class and statement outside of them of the package means at a commit."""
    done = subprocess.run(
        ["git", "archive", commit, "--", "millrace"], cwd=root, capture_output=True, check=True
    )
    found: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                found |= {meaning for _, meaning in _meanings(ast.parse(file.read().decode("utf-8")))}
    return frozenset(found)


def _meanings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and meaning of every function and class, each without those inside it, and of other statements."""
    for name, node in [*_definitions(tree, ""), ("module", tree)]:
        statements = node.body[ast.get_docstring(node) is not None :]
        inner = [ast.dump(child) for child in statements if not isinstance(child, Definition)]
        if isinstance(node, ast.Module):
            yield from ((name, statement) for statement in inner)
        else:
            shell = {key: value for key, value in ast.iter_fields(node) if key != "body"}
            yield name, "\n".join([ast.dump(type(node)(**shell, body=[])), *inner])


def _definitions(node: ast.AST, outer: str) -> Iterator[tuple[str, Definition]]:
    """Full name and node of every function and class."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, Definition):
            name = f"{outer}.{child.name}" if outer else child.name
            yield name, child
        yield from _definitions(child, name)


def targets(root: Path, pattern: str) -> list[str]:
    """The files to break."""
    paths = sorted(path for target in TARGETS for path in root.glob(target))
    files = [path.relative_to(root).as_posix() for path in paths]
    return [file for file in files if fnmatch(file, f"*{pattern}*") and file not in NOT_ARITHMETIC]


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
        bench = self.free()
        (bench / file).write_text(source, encoding="utf-8")
        child = os.fork()
        if child == 0:
            _run_tests(bench, tests)

        def done(status: int | None) -> None:
            shutil.copy(self._root / file, bench / file)
            then(status)

        self._running[bench] = (child, time.monotonic() + limit_s, done)

    def free(self) -> Path:
        """The copy that the next child works in; waits until there is one."""
        while len(self._running) == len(self.benches):
            self._collect()
        return next(bench for bench in self.benches if bench not in self._running)

    def wait(self) -> bool:
        """Wait until something ends; whether anything was running."""
        running = len(self._running)
        while running and len(self._running) == running:
            self._collect()
        return bool(running)

    def finish(self) -> None:
        """Wait for everything that was started."""
        while self.wait():
            pass

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
        sys.dont_write_bytecode = True
        os.environ.update(TESTS_EVERY_CASE="1")
        sys.path.insert(0, str(bench))
        import pytest

        options = ["-xq", "-pno:cacheprovider", f"--rootdir={bench}"]
        options += ["-m", "not slow and not world and not gpu"]
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


def drawn(mutants: list[Mutant], most: int, seed: int) -> list[Mutant]:
    """So many of them, in order; one that comes or goes changes the draw by one."""
    chosen = {mutant.key for mutant in sorted(mutants, key=lambda mutant: _lot(seed, mutant.key))[:most]}
    return [mutant for mutant in mutants if mutant.key in chosen]


def _lot(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed} {name}".encode()).digest()


@dataclass(slots=True)
class Hunt:
    """What became of the mutants: which survived, and how many were caught or ended too late."""

    survivors: list[Mutant] = field(default_factory=list)
    num_caught: int = 0
    num_late: int = 0

    def note(self, mutant: Mutant, status: int | None) -> None:
        """Count a mutant by pytest's status; None: the tests were ended.

        Raises:
            SystemExit: pytest could not run.
        """
        if status in NOT_RUN:
            raise SystemExit(f"pytest could not run (status {status}) with {mutant.key}; try --workers 1")
        if status is None:
            print(f"not judged, its tests took too long: {mutant.key}", flush=True)
            self.num_late += 1
        elif status == 0:
            print(f"survived at line {mutant.line}: {mutant.key}", flush=True)
            self.survivors.append(mutant)
        else:
            self.num_caught += 1


class _Queue:
    """What runs next: a mutant, otherwise another file's unchanged tests, after which its mutants are due."""

    def __init__(
        self, root: Path, shop: Workshop, chosen: list[Mutant], found: Hunt, *, seed: int, ends_s: float
    ) -> None:
        self._root, self._shop, self._chosen, self._found = root, shop, chosen, found
        self._ends_s = ends_s
        # Kernels last: as Python, their tests take minutes.
        files = {mutant.file for mutant in chosen}
        self._files = deque(sorted(files, key=lambda file: ("/kernels/" in file, _lot(seed, file))))
        self._mutants = deque[tuple[Mutant, float]]()

    def start_next(self) -> bool:
        """Start it in a copy that is free; whether there was anything."""
        bench = self._shop.free()
        if self._mutants:
            mutant, limit_s = self._mutants.popleft()
            tests = tests_of(self._root, mutant.file)
            self._shop.start(mutant.file, mutant.source, tests, limit_s, partial(self._found.note, mutant))
        elif self._files:
            file, start_s = self._files.popleft(), time.monotonic()
            source = (self._root / file).read_text(encoding="utf-8")
            done = partial(self._unchanged, file, bench, start_s)
            # Beyond the end none of the file's mutants would be started.
            limit_s = min(UNCHANGED_S, self._ends_s - start_s)
            self._shop.start(file, source, tests_of(self._root, file), limit_s, done)
        else:
            return False
        return True

    def _unchanged(self, file: str, bench: Path, start_s: float, status: int | None) -> None:
        """Line up a file's mutants.

        Raises:
            SystemExit: its tests fail without any change.
        """
        tests = " ".join(tests_of(self._root, file))
        if status is None and time.monotonic() >= self._ends_s:
            return
        if status != 0:
            output = (bench / "output.txt").read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SystemExit(f"{output}\n{tests} fail before anything is changed; mend them first")
        each_s, own = time.monotonic() - start_s, [one for one in self._chosen if one.file == file]
        print(f"{file}: {len(own)} mutants, {each_s:.1f} s each: {tests}", flush=True)
        self._mutants.extend((mutant, 30 + 5 * each_s) for mutant in own)


def hunt(
    root: Path, chosen: list[Mutant], num_workers: int, seed: int = 0, budget_s: float | None = None
) -> Hunt:
    """Run every mutant.

    Args:
        root: of the checkout.
        chosen: the mutants, of any files.
        num_workers: how many run at once.
        seed: chooses the order of the files.
        budget_s: seconds after which no other mutant is started, and unchanged tests are ended.

    Raises:
        SystemExit: a file has no tests, or they fail without any change.
    """
    for file in {mutant.file for mutant in chosen}:
        if not tests_of(root, file):
            package, module = Path(file).parts[-2], Path(file).stem
            raise SystemExit(f"{file} has no tests; write tests/{package}/test_{module}.py")
    preload(root)
    found, ends_s = Hunt(), math.inf if budget_s is None else time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shop = Workshop(root, Path(folder), num_workers)
        queue = _Queue(root, shop, chosen, found, seed=seed, ends_s=ends_s)
        try:
            # What ends may line up more.
            while time.monotonic() < ends_s and (queue.start_next() or shop.wait()):
                pass
            shop.finish()
        finally:
            shop.stop()
    return found


def preload(root: Path) -> None:
    """Import once what each child would import; nothing of the package itself."""
    sources = [path.read_text(encoding="utf-8") for path in (root / "millrace").rglob("*.py")]
    used = [
        name
        for name in PRELOADED_IF_USED
        if any(re.search(rf"^\s*(import|from) {name.partition('.')[0]}\b", text, re.M) for text in sources)
    ]
    for name in (*PRELOADED, *used):
        importlib.import_module(name)


def choose(root: Path, every: list[Mutant], words: argparse.Namespace) -> list[Mutant]:
    """The mutants that the command line asks for.

    Raises:
        SystemExit: the change cannot be told, since git knows no commit.
    """
    pool = every
    if words.changed is not None:
        base = words.changed or change_base(root)
        if base is None:
            raise SystemExit("git knows no commit here; leave --changed out, or name one: --changed REVISION")
        touched = {file: changed_functions(root, file, base) for file in {mutant.file for mutant in every}}
        pool = [mutant for mutant in every if mutant.function in touched[mutant.file]]
        print(
            f"{len(pool)} of {len(every)} mutants are in functions that differ from {base[:12]}", flush=True
        )
    keys = {mutant.key for mutant in drawn(pool, words.most, words.seed)}
    others = [mutant for mutant in every if mutant.key not in keys]
    keys |= {mutant.key for mutant in drawn(others, words.drawn, words.seed)}
    return [mutant for mutant in every if mutant.key in keys]


def main() -> int:
    """Read the command line, run, print; 0 when no mutant survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "pattern", nargs="?", default="", help="only files whose path holds this, such as losses"
    )
    parser.add_argument(
        "--changed",
        nargs="?",
        const="",
        metavar="REVISION",
        help="only functions that differ from it; by default, from where the branch left origin/main, or "
        "from the last commit that is four hours older than the newest",
    )
    parser.add_argument("--most", type=int, default=sys.maxsize, help="at most so many, chosen by --seed")
    parser.add_argument("--drawn", type=int, default=0, help="so many others beside them, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, help="seconds after which no other mutant is started")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at once")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    words = parser.parse_args()
    root = words.root.resolve()
    # Before torch is imported: one thread a worker, and none across a fork.
    os.environ |= {"OMP_NUM_THREADS": "1", **INTERPRETED}
    files = targets(root, words.pattern)
    if not files:
        raise SystemExit(f"no file to break matches {words.pattern!r}; there are {', '.join(TARGETS)}")
    every = [mutant for file in files for mutant in mutants(root, file)]
    may_survive = allowed(root / ALLOWED)
    judged = [mutant for mutant in every if mutant.key not in may_survive]
    chosen = choose(root, judged, words)
    start = time.monotonic()
    found = hunt(root, chosen, words.workers, words.seed, words.budget_s)
    stale = [] if words.pattern else sorted(may_survive - {mutant.key for mutant in every})
    for key in stale:
        print(f"{ALLOWED} lists what no longer exists; remove: {key}")
    others = f", {found.num_late} not judged" * bool(found.num_late)
    num_untried = len(chosen) - found.num_caught - found.num_late - len(found.survivors)
    others += f", {num_untried} not tried for want of time" * bool(num_untried)
    print(
        f"{len(chosen)} mutants: {found.num_caught} caught, {len(found.survivors)} survived{others} "
        f"({len(every) - len(judged)} more are allowed to), {time.monotonic() - start:.0f} s"
    )
    if found.survivors:
        print(f"write a test that fails for each, or list it in {ALLOWED} with the reason it changes nothing")
    return 1 if found.survivors or stale else 0


if __name__ == "__main__":
    sys.exit(main())
