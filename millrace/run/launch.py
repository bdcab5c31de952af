"""Prepare a run for the training loop and finish it: ranks, run folder, components, metric sinks, errors."""

from __future__ import annotations

import errno
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.config.inputs import ModelConfig
from millrace.config.recipe import settings, to_yaml
from millrace.config.settings import RunConfig
from millrace.data.plugin import PluginError
from millrace.data.prompts import with_templates
from millrace.distributed.ranks import Ranks, joined
from millrace.engines.subprocesses import EngineFailed
from millrace.errors import CheckpointError
from millrace.inference.engine import RequestFailed
from millrace.kernels.device_record import unchecked_note
from millrace.observability.console import Console
from millrace.observability.files import FileError, check_saved_model, notice, read_text, shown
from millrace.observability.plain import plain_text
from millrace.observability.sink_mlflow import MlflowSink
from millrace.observability.sink_tensorboard import TensorBoardSink
from millrace.observability.sink_wandb import WandbSink
from millrace.observability.sinks import JsonlSink, Sink, TrackedRun
from millrace.observability.watchdog import Watchdog
from millrace.rollout.engine_pool import GenerationFailed
from millrace.rollout.manager import Stalled
from millrace.rollout.sampled_batch import greedy
from millrace.run.build import build, choose_device
from millrace.run.callbacks import Callbacks
from millrace.run.checkpointing import Saver
from millrace.run.components import Components
from millrace.run.folder import RunFolder, RunFolderError
from millrace.run.health.health_checks import RunStopped
from millrace.run.health.out_of_memory import advice, explained
from millrace.run.progress import Progress, RunReport
from millrace.run.run import Controller, ControllerSettings, Repetition
from millrace.run.signals import Interrupted, Interrupts
from millrace.run.sink_plugin import SinkPlugin
from millrace.run.status import read_summary
from millrace.training.checkpoint import newest_checkpoint, read_state
from millrace.training.parallel_model import layout_of

# Disk errors on an open file carry no file name.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@dataclass(frozen=True, slots=True, eq=False)
class _Start:
    """What a process starts from."""

    config: RunConfig
    recipe: str
    checkpoint: Path | None
    refused: list[str]
    progress: Progress
    ranks: Ranks
    repeats: Repetition | None
    fresh: bool


@dataclass(slots=True, eq=False)
class StartedRun:
    """A prepared run.

    Attributes:
        config: of the run.
        controller: at the progress of the checkpoint, or at the beginning.
        checkpoint: the newest checkpoint; None at the beginning.
        report: set at the end; its `status` is finished or interrupted.
    """

    config: RunConfig
    controller: Controller
    checkpoint: Path | None
    report: RunReport | None = None


@contextmanager
def new_run(
    config: RunConfig, *, recipe: str, quiet: bool, repeats: Repetition | None, ranks: Ranks | None
) -> Iterator[StartedRun]:
    """Prepare a run in a new folder, and finish it after the block; see `loop.train`."""
    started_s = time.monotonic()
    with _met(config, ranks) as ranks:
        config = _as_then(config, repeats, ranks)
        # Every error of a recipe is found before a folder is made for it.
        if ranks.first:
            _check_taken(config.model)
        with explained(_memory_advice(config)):
            components = build(config, None, ranks)
        make = partial(RunFolder.create, config.output, config.name, recipe)
        with closing(components), _folder(ranks, make) as folder, _removed_if_empty(folder, ranks):
            # A prompt without a row (generate, serve) uses the template of the rows.
            data = with_templates(config.data, components.train_prompts)
            config = config.model_copy(update={"data": data})
            (folder.path / "origin.txt").write_text(recipe, encoding="utf-8")
            # Last, because it makes the folder resumable.
            folder.write_text(folder.recipe, to_yaml(config))
            start = _Start(config, recipe, None, [], Progress(), ranks, repeats, fresh=True)
            with _started(start, components, folder, quiet=quiet, started_s=started_s) as started:
                yield started


@contextmanager
def resumed_run(
    path: str | Path, *, quiet: bool, repeats: Repetition | None, ranks: Ranks | None
) -> Iterator[StartedRun]:
    """Prepare a run from its newest complete checkpoint, and finish it after the block; see `loop.resume`."""
    started_s = time.monotonic()
    given = RunFolder.open(path)
    config = given.config()
    with (
        _met(config, ranks) as ranks,
        _folder(ranks, partial(_locked, given)) as folder,
    ):
        config = _as_then(config, repeats, ranks)
        origin = given.path / "origin.txt"
        recipe = plain_text(read_text(origin), 200) if origin.is_file() else given.path.name
        checkpoint, refused = _newest(given.checkpoints, ranks)
        progress = Progress() if checkpoint is None else _progress(checkpoint)
        with explained(_memory_advice(config)):
            components = build(config, checkpoint, ranks)
        with closing(components):
            start = _Start(config, recipe, checkpoint, refused, progress, ranks, repeats, fresh=False)
            with _started(start, components, folder, quiet=quiet, started_s=started_s) as started:
                yield started


def _explained(config: RunConfig, controller: Controller) -> AbstractContextManager[None]:
    return explained(
        _memory_advice(config),
        phase=lambda: controller.spans.failed,
        owners=controller.owners,
        engine=controller.components.sleeper,
    )


def _memory_advice(config: RunConfig) -> Callable[[str], str]:
    return partial(
        advice,
        engine=config.engine,
        mesh=config.mesh,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        max_staleness=config.rollout.max_staleness,
    )


def _check_taken(model: ModelConfig) -> None:
    """Check that the weights of an earlier run match what it saved.

    Raises:
        FileError: they do not.
    """
    adapter = model.adapter
    for path in (model.path, None if adapter is None else adapter.path):
        if path is not None:
            check_saved_model(Path(path))


def _met(config: RunConfig, ranks: Ranks | None) -> AbstractContextManager[Ranks]:
    """Connect the ranks of a run, unless they are already connected."""
    if ranks is not None:
        return nullcontext(ranks)
    device, phase_s = choose_device(config.device), config.timeouts.phase_s
    return joined(config.mesh.num_ranks, device=device, phase_s=phase_s)


def _as_then(config: RunConfig, repeats: Repetition | None, ranks: Ranks) -> RunConfig:
    """In a replay, use as many threads as this rank used in the recorded run."""
    if repeats is None:
        return config
    return config.model_copy(update={"threads": repeats.threads[ranks.rank]})


def _locked(folder: RunFolder) -> RunFolder:
    folder.lock()
    if _status(folder) == "finished":
        folder.unlock()
        report = shown(folder.path / "report.html")
        raise RunFolderError(f"run {shown(folder.path)} is finished; look at {report}")
    return folder


@contextmanager
def _folder(ranks: Ranks, make: Callable[[], RunFolder]) -> Iterator[RunFolder]:
    """Open the run folder on rank 0; other ranks get a temporary one that shares what all ranks write."""
    if ranks.first:
        with make() as folder:
            ranks.broadcast_text(str(folder.path.resolve()))
            yield folder
        return
    path = Path(ranks.broadcast_text(""))
    with tempfile.TemporaryDirectory() as notes:
        yield RunFolder(Path(notes), shared=path, rank=ranks.rank)


@contextmanager
def _removed_if_empty(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Remove a run folder without any result after an error in the block."""
    try:
        yield
    except BaseException:
        if ranks.first and not folder.has_results():
            folder.remove()
        raise


def _newest(checkpoints: Path, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """Run `newest_checkpoint` on rank 0, which reads every byte, and broadcast the result."""
    found, refused = newest_checkpoint(checkpoints) if ranks.first else (None, [])
    name, refused = json.loads(ranks.broadcast_text(json.dumps([found and found.name, refused])))
    return (checkpoints / name if name else None), refused


def _status(folder: RunFolder) -> str | None:
    """The status in a run's summary, if it has one."""
    if not folder.summary.is_file():
        return None
    try:
        return read_summary(folder.summary).status
    except FileError as error:
        notice(f"{error}; the run goes on from its newest checkpoint and writes it anew")
        return None


def _progress(checkpoint: Path) -> Progress:
    """Read the progress from a checkpoint.

    Raises:
        CheckpointError: its state is invalid.
    """
    try:
        return Progress.from_json(read_state(checkpoint))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {shown(checkpoint)} has a state that cannot be: {error}") from None


@contextmanager
def _started(
    start: _Start, components: Components, folder: RunFolder, *, quiet: bool, started_s: float
) -> Iterator[StartedRun]:
    ranks = start.ranks
    console = Console(folder.path.name, _facts(start, components), quiet=quiet or not ranks.first)
    with ExitStack() as exit_stack:
        metrics = exit_stack.enter_context(closing(JsonlSink(folder.metrics)))
        metrics.rewind(start.progress.metrics_bytes if ranks.first else 0)
        loggers = [exit_stack.enter_context(closing(sink)) for sink in _loggers(start, folder)]
        exit_stack.enter_context(console)
        _tell_devices(console, start.config, ranks)
        interrupts = exit_stack.enter_context(Interrupts(lambda text: console.say(text, "bold")))
        saver = Saver(ranks)
        controller = Controller(
            _controller_settings(start.config, components),
            components,
            folder,
            ranks=ranks,
            saver=saver,
            recipe=start.recipe,
            console=console,
            interrupts=interrupts,
            metrics=metrics,
            loggers=loggers,
            progress=start.progress,
            started_s=ranks.since(started_s),
            repeats=start.repeats if ranks.first else None,
        )
        if ranks.size == 1 and start.repeats is None:
            # Several ranks must not leave at different points of a step.
            interrupts.leave_at_once_if(lambda: controller.at_start)
        if ranks.first:
            # If another rank hangs, rank 0 waits for it and its watchdog fires.
            watchdog = exit_stack.enter_context(controller.watchdog)
            _watch(watchdog, ranks, saver, console, start.config.timeouts.phase_s)
        # Until the last write ends, no other process may lock the folder, however the run ends.
        exit_stack.callback(saver.wait)
        _keep_spans(controller, exit_stack.enter_context(closing(JsonlSink(folder.spans))))
        _prepare(controller, start)
        started = StartedRun(start.config, controller, start.checkpoint)
        exit_stack.callback(_end, started)
        try:
            with _explained(start.config, controller):
                yield started
                saver.settle()
            started.report = controller.finish("finished")
        except Interrupted:
            started.report = controller.finish("interrupted")
        except (KeyboardInterrupt, Exception) as error:
            # An interruption can surface as any exception of the interrupted code.
            if interrupts.left and not interrupts.twice:
                saver.settle()
                started.report = controller.finish("interrupted")
                return
            if interrupts.twice or isinstance(error, KeyboardInterrupt):
                raise _left_at_once(start, folder) from None
            error = _failed(controller, saver, start, error)
            raise error


def _controller_settings(config: RunConfig, components: Components) -> ControllerSettings:
    return ControllerSettings(
        steps=config.steps,
        sft_steps=config.sft.steps if config.sft else 0,
        greedy=greedy(config.rollout, components.stop_token_ids),
        measure=config.evaluation.measure,
        failed_rewards=config.limits.failed_rewards,
        keep_checkpoints=config.checkpoint.keep,
        colocated=config.engine.colocated,
        reference_offload=config.policy.kl is not None and config.policy.kl.offload,
        phase_s=config.timeouts.phase_s,
        walltime_s=config.timeouts.walltime_s,
    )


def _tell_devices(console: Console, config: RunConfig, ranks: Ranks) -> None:
    if ranks.size > 1:
        console.say(layout_of(config.mesh).table())
    if note := unchecked_note(choose_device(config.device)):
        console.say(note)


def _prepare(controller: Controller, start: _Start) -> None:
    """Make the callbacks, name what is resumed, and forget the summary of an earlier process."""
    references = start.config.callbacks if start.ranks.first else ()
    controller.callbacks = Callbacks(references, num_ranks=start.ranks.size)
    _tell_resumed(controller, start)
    # It must not remain if this process is killed.
    controller.folder.summary.unlink(missing_ok=True)


def _end(started: StartedRun) -> None:
    """Call the callbacks of the end; after a failure, a mistake of theirs must not hide it."""
    status = "failed" if started.report is None else started.report.status
    try:
        started.controller.callbacks.call("on_end", run=started.controller.view, status=status)
    except PluginError as error:
        if started.report is not None:
            raise
        started.controller.warn(str(error))


def _tell_resumed(controller: Controller, start: _Start) -> None:
    for sentence in start.refused:
        controller.warn(f"{sentence}; it is passed over")
    if start.checkpoint is not None:
        controller.console.say(f"resumed from {start.checkpoint}")


def _keep_spans(controller: Controller, kept: JsonlSink) -> None:
    """Write spans to a file as they end, beginning with the start-up time so far."""
    controller.spans.report_ends(
        lambda name, seconds: kept.write(
            {"name": name, "begin_s": controller.wall_s - seconds, "seconds": seconds}
        )
    )
    controller.spans.add("start", controller.wall_s - controller.progress.wall_s)


def _watch(watchdog: Watchdog, ranks: Ranks, saver: Saver, console: Console, phase_s: float) -> None:
    """Report waits for ranks and checkpoints to the watchdog, and its state to the console."""
    known = partial(watchdog.waiting, "trainer", deadline_s=phase_s)
    ranks.report_waits(partial(known, "the other ranks"))
    saver.report_waits(partial(known, "a checkpoint to be on disk"))
    console.show_waits(watchdog.line)


def _go_on(start: _Start, folder: RunFolder, how: str = "continue with") -> str:
    """How to continue after a run ended early."""
    # The run's own folder, on every rank.
    path = folder.checkpoints.parent
    if start.fresh and not folder.has_results():
        return f"nothing was recorded yet, so {path} was removed; start it again with: millrace train"
    return f"{how}: millrace resume {path}"


def _left_at_once(start: _Start, folder: RunFolder) -> KeyboardInterrupt:
    how = "continue from the last checkpoint with"
    return KeyboardInterrupt(f"left at once; {_go_on(start, folder, how)}")


def _failed(controller: Controller, saver: Saver, start: _Start, error: Exception) -> Exception:
    """The error to raise, after the summary recorded it."""
    error = _named(error, controller.folder, _go_on(start, controller.folder))
    controller.progress.warnings.append(str(error))
    try:
        saver.settle()
    except RuntimeError as another:
        controller.warn(str(another))
    # A summary that cannot be written must not hide why the run failed.
    with suppress(OSError):
        controller.finish("failed")
    return error


def _named(error: Exception, folder: RunFolder, go_on: str) -> Exception:
    """An error with the command to continue, where the user can fix it."""
    path = folder.checkpoints.parent
    if isinstance(error, OSError) and _is_of(path, error):
        return RunStopped(
            f"run folder {path} cannot be written: {error.strerror or error}; what was saved before is "
            f"intact, so make room and {go_on}"
        )
    if isinstance(error, OSError):
        return RunStopped(f"{type(error).__name__}: {error}; {go_on}")
    if isinstance(error, (GenerationFailed, RequestFailed)):
        grown = "where weights have grown without bound, lower policy.optimizer.learning_rate in"
        return RunStopped(f"{error}; {grown} {path / folder.recipe.name}; {go_on}")
    return (
        RunStopped(f"{error}; {go_on}") if isinstance(error, (EngineFailed, Stalled, PluginError)) else error
    )


def _is_of(path: Path, error: OSError) -> bool:
    """Whether an error concerns a file of this folder, rather than a socket, a process or another file."""
    if error.filename is None:
        return error.errno in DISK
    return Path(str(error.filename)).absolute().is_relative_to(path.absolute())


def _loggers(start: _Start, folder: RunFolder) -> list[Sink]:
    """Open the metric sinks of rank 0 that the recipe names, and in a replay the comparison."""
    if not start.ranks.first:
        return []
    purge = start.progress.step + 1 if start.checkpoint is not None else None
    made: list[Sink] = []
    config = start.config
    shown: dict[str, Any] = {key: value for key, value, _ in settings(config)}
    tracked = TrackedRun(folder.path, shown, config.project, config.run_group)
    for name in config.loggers:
        if name == "tensorboard":
            made.append(TensorBoardSink(folder.tensorboard, purge))
        elif name == "wandb":
            made.append(WandbSink(tracked))
        elif name == "mlflow":
            made.append(MlflowSink(tracked))
        else:
            made.append(SinkPlugin(name, folder.path, shown))
    if start.repeats is not None:
        made.append(start.repeats.comparison(folder))
    return made


def _facts(start: _Start, components: Components) -> list[tuple[str, str]]:
    filtered = f" ({components.num_filtered} too long)" if components.num_filtered else ""
    if components.num_long_demonstrations:
        filtered += f", {components.num_long_demonstrations} demonstrations too long to imitate"
    return [
        ("recipe", start.recipe),
        ("policy", f"{components.num_parameters / 1e6:.2f} M parameters"),
        (
            "prompts",
            f"{len(components.train_prompts)} to train on, {len(components.eval_prompts)} held out{filtered}",
        ),
        ("device", components.device),
    ]
