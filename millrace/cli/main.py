"""The command line: its commands, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import functools
import io
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from millrace.cli.config import config
from millrace.cli.data import data
from millrace.cli.doctor import doctor
from millrace.cli.engines import engines
from millrace.cli.evaluate import evaluate
from millrace.cli.foundations import foundations
from millrace.cli.generate import generate
from millrace.cli.import_config import import_config
from millrace.cli.measure import measure
from millrace.cli.plan import plan
from millrace.cli.recipes import recipes
from millrace.cli.replay import replay
from millrace.cli.resume import resume
from millrace.cli.reward_model import reward_model
from millrace.cli.serve import serve
from millrace.cli.serve_worker import serve_worker
from millrace.cli.simulate import simulate
from millrace.cli.simulate_serving import simulate_serving
from millrace.cli.status import status
from millrace.cli.trace import trace
from millrace.cli.train import train
from millrace.cli.warm import warm
from millrace.config.renamed import RenamedSettingWarning
from millrace.observability.plain import plain_text
from millrace.processes.worker import collect_rarely
from millrace.version import __version__

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
# Characters of one line of an error.
MAX_SHOWN = 5000
UTF8 = ["-X", "utf8"]

# What a user can mend, and the exit code. By full name, since to import the classes is to wait for torch.
# A bare ValueError or RuntimeError is a bug, not a message to a user, and keeps its traceback.
KNOWN = {
    "millrace.config.recipe.ConfigError": MISUSED,
    "millrace.errors.SetupError": MISUSED,
    "millrace.errors.PlanError": MISUSED,
    "millrace.environments.sandbox.execution.SandboxError": FAILED,
    "millrace.data.rows.DataError": FAILED,
    "millrace.kernels.warm.KernelsNotKeptError": FAILED,
    "millrace.models.load.ModelError": FAILED,
    "millrace.observability.files.FileError": FAILED,
    "millrace.rewards.reward_errors.RewardError": FAILED,
    "millrace.run.folder.RunFolderError": FAILED,
    "millrace.errors.CheckpointError": FAILED,
    "millrace.training.offload.OffloadError": FAILED,
    "millrace.transport.weight_update.WeightSyncError": FAILED,
    "millrace.run.completion_server.ServerFailed": FAILED,
    "millrace.run.health.health_checks.RunStopped": FAILED,
    "millrace.engines.subprocesses.EngineFailed": FAILED,
    "millrace.engines.prefill_decode_engine.WorkerFailed": FAILED,
    "millrace.inference.engine.RequestFailed": FAILED,
    "millrace.observability.sinks.TrackerError": FAILED,
    "millrace.data.plugin.PluginError": FAILED,
    "millrace.distributed.network.NetworkError": MISUSED,
    "millrace.distributed.ranks.RanksError": MISUSED,
    "millrace.engines.ray_placement.RayTrainerError": MISUSED,
    "millrace.replay.recorded_log.ReplayError": FAILED,
    "millrace.launchers.supervise.RankFailed": FAILED,
    "builtins.OSError": FAILED,
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train language models with reinforcement learning.",
    epilog="Start with: millrace train quickstart",
)


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error that has a sentence for the user; None for any other."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return next((KNOWN[name] for name in names if name in KNOWN), None)


def sentence(error: BaseException) -> str:
    """Return the message of a known error for the user."""
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}"
    return str(error)


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt in an error's context chain; cleanup after Ctrl-C may raise others."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it prints known errors as one sentence; other errors propagate."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except BrokenPipeError:
            raise  # the reader of our output has exited (`| head`); typer exits silently
        except (KeyboardInterrupt, Exception) as error:
            left = interruption(error)
            if left is not None:
                typer.echo(str(left) or "interrupted", err=True)
                raise typer.Exit(INTERRUPTED) from None
            code = exit_code(error)
            if code is None:
                raise
            for line in sentence(error).splitlines():
                typer.echo(f"error: {plain_text(line, MAX_SHOWN)}", err=True)
            raise typer.Exit(code) from None

    return run


class Command(TyperCommand):
    """A command that explains how to give a setting that was given as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise typer.Exit with a hint if an unknown option is a setting; else parse as typer does."""
        parameters = self.get_params(ctx)
        known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
        if any(each.name == "overrides" for each in parameters):
            for word in itertools.takewhile(lambda word: word != "--", args):
                option = word.partition("=")[0]
                if not option.startswith("--") or option in known:
                    continue
                told = as_setting(option, args)
                if told is not None:
                    typer.echo(f"error: {plain_text(told, MAX_SHOWN)}", err=True)
                    raise typer.Exit(MISUSED)
        return super().parse_args(ctx, args)


def as_setting(option: str, words: Sequence[str]) -> str | None:
    """How to give a setting that was given as an option, such as `--learning_rate`; None if there is none."""
    from millrace.config.explain import known_keys
    from millrace.config.other_names import hint, key_of

    name = option.lstrip("-").replace("-", "_")
    key = name if name in known_keys() else key_of(name)
    if key is None:
        settled = hint(name)
        return f"there is no option {option}; {settled}" if settled else None
    value = "VALUE"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0] == option:
            value = word.partition("=")[2] or (value if following.startswith("-") else following) or value
    return f"there is no option {option}; settings are given without dashes: {key}={value}"


for _command in (
    train,
    resume,
    replay,
    status,
    engines,
    trace,
    evaluate,
    generate,
    serve,
    serve_worker,
    reward_model,
    recipes,
    config,
    import_config,
    data,
    plan,
    simulate,
    simulate_serving,
    measure,
    foundations,
    doctor,
    warm,
):
    app.command(cls=Command)(guarded(_command))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"millrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of millrace itself; `--version` acts in its callback."""


def in_utf8(encoding: str, words: list[str]) -> list[str] | None:
    """The command to start again so that names of files are UTF-8; None where they are.

    In a locale such as C, Python reads names as ASCII, and libraries refuse to write to what comes of it.
    """
    if encoding.lower() == "utf-8" or words[1:3] == UTF8:
        return None
    return [sys.executable, *UTF8, *words[1:]]


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format the warning about a renamed setting as one line; any other as Python does."""
    if issubclass(category, RenamedSettingWarning):
        return f"warning: {plain_text(str(message), MAX_SHOWN)}\n"
    return _format_any(message, category, filename, lineno, line)


_format_any = warnings.formatwarning


@functools.cache
def all_commands() -> Any:
    """Return the commands with their parameters, which typer would read from the functions at each call."""
    return typer.main.get_command(app)


def main() -> None:
    """What `millrace` runs."""
    collect_rarely()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end a run.
            stream.reconfigure(errors="backslashreplace")
    if (again := in_utf8(sys.getfilesystemencoding(), sys.orig_argv)) is not None:
        told = f"{sys.stdout.encoding}:backslashreplace"
        os.execve(again[0], again, {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": told})
    warnings.formatwarning = format_warning
    all_commands()(prog_name="millrace")


if __name__ == "__main__":
    main()
