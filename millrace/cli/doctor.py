"""`millrace doctor`: can this machine train, and with what."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.observability.plain import plain_text

GIB = 1024**3
LEAST_DISK_BYTES = LEAST_MEMORY_BYTES = GIB
OUTPUT = "runs"
DISTRIBUTION = "millrace-rl"  # on the package index; the import and the command are millrace

# The quickstart recipe in small: one step of SFT, which always has a gradient, and one batch.
SELF_CHECK: dict[str, Any] = {
    "steps": 1,
    "loggers": [],
    "data.task_size": 64,
    "data.eval_size": 4,
    "model.shape.hidden_size": 16,
    "model.shape.intermediate_size": 32,
    "model.shape.head_dim": 8,
    "sft.steps": 1,
    "sft.stop_accuracy": None,
    "sft.sequences_per_step": 4,
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 2,
    "policy.optimizer.warmup_steps": 0,
}


def doctor(
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="compare the GPU kernels with torch, and use here those that are right"),
    ] = False,
    report: Annotated[Path, typer.Option(metavar="FILE", help="where --gpu writes what it found")] = Path(
        "millrace-gpu-report.json"
    ),
    numerics: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE", help="check instead that a recipe's numbers do not depend on the layout"
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[sandbox [wasm] | KEY=VALUE...]",
            help="sandbox: try to escape from bubblewrap, or from wasm; KEY=VALUE: settings of that recipe",
        ),
    ] = None,
) -> None:
    """Look at versions, processor, memory, GPU and disk, train a tiny model, and say what is wrong."""
    if gpu:
        if numerics is not None or overrides:
            raise typer.BadParameter("--gpu checks the kernels of a device; give it without other words")
        from millrace.cli.doctor_gpu import check_gpu

        check_gpu(report, gpu_name())
        return
    if numerics is not None:
        check_recipe(numerics, overrides or [])
        return
    if overrides and overrides[0] == "sandbox":
        check_sandbox(overrides[1:] or ["bubblewrap"])
        return
    if overrides:
        raise typer.BadParameter("settings belong to a recipe; name it with --numerics RECIPE")
    problems: list[str] = []
    _heading("versions")
    for name, value in versions(problems):
        _fact(name, value)
    _heading("machine")
    for name, value in machine(problems):
        _fact(name, value)
    _heading("self-check: a tiny model is sampled, trained, saved and loaded")
    _fact("result", self_check(problems))
    _heading("problems")
    for problem in problems or ["none"]:
        typer.echo(f"  {problem}")
    if problems:
        raise typer.Exit(1)


def check_recipe(recipe: str, overrides: list[str]) -> None:
    """Print how far a recipe's numbers move when only the layout changes; exit 1 beyond rounding."""
    from millrace.config.recipe import load_recipe, parse_overrides
    from millrace.run.numerics import check_numerics

    checks = check_numerics(load_recipe(recipe, parse_overrides(overrides)))
    width = max(len(check.name) for check in checks)
    _heading(f"numerics of {recipe}: what must not change a number, and by how much it does")
    for check in checks:
        found = f"{check.difference:7.1e} {check.unit:17} allowed {check.allowed:.0e}"
        typer.echo(f"  {check.name:{width}}  {found}  {'ok' if check.passed else 'WRONG'}")
    num_wrong = sum(not check.passed for check in checks)
    _heading("problems")
    told = f"{num_wrong} of {len(checks)} numbers moved by more than rounding" if num_wrong else "none"
    typer.echo(f"  {told}")
    if num_wrong:
        raise typer.Exit(1)


def check_sandbox(kinds: list[str]) -> None:
    """Print what became of each attempt to escape from a sandbox; exit 1 if one was not refused."""
    from millrace.environments.sandbox.escape_probe import PROBED, try_escapes
    from millrace.environments.sandbox.open_sandbox import open_sandbox

    kind = next((kind for kind in PROBED if kinds == [kind]), None)
    if kind is None:
        raise typer.BadParameter(f"name one kind of sandbox: {' or '.join(PROBED)}")
    _heading(f"sandbox {kind}: attempts to escape")
    num_escaped = 0
    for found in try_escapes(lambda limits: open_sandbox(kind, limits)):
        num_escaped += not found.refused
        result = "refused" if found.refused else "ESCAPED"
        typer.echo(f"  {found.name:40} {result:8} {plain_text(found.detail, 200)}")
    _heading("problems")
    typer.echo(
        f"  {num_escaped} attempts were not refused; do not run model output here"
        if num_escaped
        else "  none"
    )
    if num_escaped:
        raise typer.Exit(1)


def versions(problems: list[str]) -> Iterator[tuple[str, str]]:
    """Name and version of everything millrace needs; versions outside their range become problems."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    python = platform.python_version()
    yield "python", python
    try:
        about = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        problems.append("millrace is not installed, so runs cannot record its version; run: pip install -e .")
        return
    if python not in SpecifierSet(about["Requires-Python"]):
        problems.append(f"python is {python}, but millrace needs {about['Requires-Python']}; install another")
    yield "millrace", about["Version"]
    for requirement in map(Requirement, metadata.requires(DISTRIBUTION) or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f'pip install "{requirement}"'
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed; run: {wanted}")
            yield requirement.name, "missing"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.name} is {version}, but millrace needs {requirement.specifier}; run: {wanted}"
            )
        yield requirement.name, f"{version:14} needs {requirement.specifier or 'any'}"


def machine(problems: list[str]) -> Iterator[tuple[str, str]]:
    """What this process may use; too little of it becomes a problem."""
    cores = len(os.sched_getaffinity(0))
    yield "CPU cores", f"{cores} of {os.cpu_count()} may be used"
    yield "threads", f"{cores}, unless the recipe sets threads"
    free, total = memory_bytes()
    yield "memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < LEAST_MEMORY_BYTES:
        problems.append(f"only {free / GIB:.1f} GiB of memory are free; end other programs")
    yield "GPU", gpu_name()
    yield "bubblewrap", bubblewrap()
    place = next(
        path for path in (Path(OUTPUT).absolute(), *Path(OUTPUT).absolute().parents) if path.is_dir()
    )
    free = shutil.disk_usage(place).free
    yield "disk", f"{free / GIB:.1f} GiB free for {OUTPUT} (in {place})"
    if free < LEAST_DISK_BYTES:
        problems.append(f"only {free / GIB:.1f} GiB of disk are free in {place}; make room, or set output")
    if not os.access(place, os.W_OK):
        problems.append(f"{place} cannot be written; start elsewhere, or set output")


def memory_bytes() -> tuple[int, int]:
    """Free and total memory of this machine, or of the control group this process is limited to."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        total = min(total, int(text))
        free = min(free, total - int(used.read_text(encoding="ascii")))
    return free, total


def gpu_name() -> str:
    """The GPU that `device: auto` takes, or why it takes none."""
    import torch

    if torch.cuda.is_available():
        count, memory = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
        more = f"; the first of {count} is used" if count > 1 else ""
        return f"{torch.cuda.get_device_name(0)}, {memory / GIB:.0f} GiB{more}"
    driver = Path("/proc/driver/nvidia/version").is_file()
    if torch.version.cuda is None:
        there = "there is an NVIDIA driver, but " if driver else ""
        return f"none: {there}this torch is built without CUDA; the CPU is used"
    why = "the driver finds no device" if driver else "there is no NVIDIA driver"
    return f"none: this torch is built for CUDA {torch.version.cuda}, but {why}; the CPU is used"


def bubblewrap() -> str:
    """What holds rewards and the programs that they start."""
    from millrace.processes.bubblewrap import find_bubblewrap

    path = find_bubblewrap()
    if path is not None:
        return f"{path}: rewards run without network, processes and files of others"
    why = "does not work here" if shutil.which("bwrap") else "is not installed"
    return f"{why}, so that programs a reward function starts are not confined"


def self_check(problems: list[str]) -> str:
    """Train a tiny model in a temporary folder and load what was saved; what happened, in a sentence."""
    start_s = time.monotonic()
    try:
        from millrace.config.recipe import load_recipe
        from millrace.run.loop import train
        from millrace.run.offline import answer

        with tempfile.TemporaryDirectory(prefix="millrace-doctor-") as folder:
            report = train(load_recipe("quickstart", SELF_CHECK | {"output": folder}), quiet=True)
            ((completion,),) = answer(report.run, ["What is 12 + 34?"], checkpoint="last")
    except Exception as error:  # whatever it is, it is what the user came to learn
        problems.append(f"the self-check failed: {type(error).__name__}: {error}")
        return "failed"
    if report.skipped_steps or not (report.tokens_trained and report.tokens_sampled and completion.token_ids):
        problems.append(
            "the self-check trained nothing: no finite gradient or no tokens; report this as a bug"
        )
        return "failed"
    return f"passed in {time.monotonic() - start_s:.1f} s on {report.device}"


def _heading(text: str) -> None:
    typer.secho(text, bold=True)


def _fact(name: str, value: str) -> None:
    typer.echo(f"  {name:17} {value}")
