"""Replay a run from its event log, bit for bit on a CPU; or replay its first batches, then branch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.config.recipe import load_recipe, to_yaml
from millrace.config.settings import RunConfig
from millrace.distributed.ranks import Ranks, joined
from millrace.errors import SetupError
from millrace.eventlog.file import check_old
from millrace.eventlog.log import check_log, read_events
from millrace.eventlog.verify import LogError
from millrace.observability.files import shown
from millrace.observability.sinks import read_records
from millrace.replay.compare import check_evaluations, check_weights
from millrace.replay.live_replies import LiveComparison
from millrace.replay.recorded_log import ReplayError, RunSegment, segments_of
from millrace.replay.replay_backend import RepeatedSegment
from millrace.run import loop
from millrace.run.build import choose_device
from millrace.run.folder import RunFolder
from millrace.run.progress import RunReport, versions
from millrace.run.status import read_summary

# The file with the origin of a branch: its run, its first batch and the changed settings.
BRANCH = "branch.json"
# Settings that a branch may change: none that affects the samples and weights it starts with.
CHANGEABLE = (
    "steps",
    "threads",
    "loggers",
    "project",
    "run_group",
    "callbacks",
    "profile_steps",
    "engine",
    "rollout.kv_on_update",
    "rollout.partial_rollout",
    "advantage",
    "policy.loss",
    "policy.proximal",
    "policy.correction",
    "policy.kl",
    "policy.entropy_coefficient",
    "policy.entropy_coefficient_final",
    "policy.loss_aggregation",
    "policy.optimizer_steps_per_batch",
    "policy.epochs_per_batch",
    "policy.shuffle_minibatches",
    "policy.truncated_answers",
    "policy.tokens_per_micro_batch",
    "policy.optimizer",
    "kernels",
    "evaluation",
    "checkpoint",
    "limits",
)
FIXED = ("advantage.kind", "policy.optimizer.kind")


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay.

    Attributes:
        run: the folder of the replay.
        num_batches: replayed batches of reinforcement learning.
        num_records: of `metrics.jsonl`.
        weights: names of the checkpoints that were compared.
        num_replies: replies of live environments that were compared; on rank 0.
        num_episodes: episodes with such a reply.
        report: of the branch that continued from there; None without one.
    """

    run: Path
    num_batches: int
    num_records: int
    weights: tuple[str, ...]
    num_replies: int
    num_episodes: int
    report: RunReport | None


def replay(
    path: str | Path,
    *,
    from_step: int | None = None,
    changes: Mapping[str, Any] | None = None,
    name: str | None = None,
    live: bool = False,
    quiet: bool = False,
) -> Replay:
    """Replay a run in a new sibling folder, and verify step by step that it is the same.

    Every rank of the replay calls it; the number of ranks is that of the run, with any launcher.

    Args:
        path: the run's folder.
        from_step: replay only so many batches, then continue as a branch.
        changes: dotted settings of the branch that differ from those of the run.
        name: of the new folder; None takes `RUN-replay-1`, `RUN-replay-2`, ...
        live: run the environments beside the replay, and compare their replies with the recorded ones.
        quiet: print nothing.

    Raises:
        RunFolderError, ConfigError: there is no such run, or a setting is invalid.
        SetupError: the run cannot be replayed here, or a branch cannot change the setting.
        ReplayError: the log is unusable, or the replay differs from the run; the message has the place. With
            `live`, also if the replay is the run, but its environments reply otherwise.
    """
    config, changed = check(path, from_step=from_step, changes=changes, live=live)
    original = RunFolder.open(path)
    device, phase_s = choose_device(config.device), config.timeouts.phase_s
    with joined(config.mesh.num_ranks, device=device, phase_s=phase_s) as ranks:
        # All ranks use what rank 0 reads: the run may still be writing.
        summary, events = json.loads(
            ranks.broadcast_text(json.dumps(_read(original) if ranks.first else None))
        )
        try:
            segments = segments_of(events, finished=summary.get("status") == "finished", until=from_step)
            _check_ranks(segments, ranks.size)
            comparison = LiveComparison() if live else None
            repeated = _repeat(
                original, config, segments, ranks=ranks, name=name, live=comparison, quiet=quiet
            )
            weights = _compare(original, repeated, comparison) if ranks.first else []
        except ReplayError as error:
            raise ReplayError(f"run {shown(original.path)}: {error}{_others(summary)}") from None
        num_batches = sum(event["kind"] == "take" for segment in segments for event in segment.events)
        num_live = (0, 0) if comparison is None else (comparison.num_replies, comparison.num_episodes)
        num_records = len(read_records(repeated.metrics))
        found = Replay(repeated.path, num_batches, num_records, tuple(weights), *num_live, None)
        if changed is None:
            return found
        if ranks.first:
            about = {"run": str(original.path), "from_step": from_step, "settings": dict(changes or {})}
            repeated.write_json(repeated.path / BRANCH, about)
            place = {"name": repeated.path.name, "output": str(repeated.path.parent)}
            repeated.write_text(repeated.recipe, to_yaml(changed.model_copy(update=place)))
        ranks.barrier()
        return replace(found, report=loop.resume(repeated.path, quiet=quiet, ranks=ranks))


def check(
    path: str | Path,
    *,
    from_step: int | None = None,
    changes: Mapping[str, Any] | None = None,
    live: bool = False,
) -> tuple[RunConfig, RunConfig | None]:
    """Reject runs that cannot be replayed, before any rank is started.

    Args:
        path: the run's folder.
        from_step: see `replay`.
        changes: see `replay`.
        live: see `replay`.

    Returns:
        the settings of the replay, with its ranks as processes of this machine, and those of the branch, or
        None without one.

    Raises:
        RunFolderError, ConfigError, SetupError, ReplayError: as in `replay`.
    """
    original = RunFolder.open(path)
    config = original.config()
    changed = _branch(original, config, from_step, changes or {})
    _check_can(original, config)
    if live and config.environment is None:
        raise SetupError(f"run {shown(original.path)} has no environment that could run live; omit --live")
    here = {"mesh": config.mesh.model_copy(update={"launcher": "processes"})}
    repetition = config.model_copy(update={**here, "loggers": (), "callbacks": ()})
    return repetition, None if changed is None else changed.model_copy(update=here)


def _read(original: RunFolder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a run's summary, if there is one, and its event log.

    Raises:
        ReplayError: the log is unusable.
    """
    summary: dict[str, Any] = {}
    try:
        if original.summary.exists():
            summary = read_summary(original.summary).model_dump()
        events = read_events(original.events)
        check_log(events)
        if not any(event["kind"] == "events_received" for event in events):
            raise LogError("its event log has no events_received; it is not whole")
    except ValueError as error:
        raise ReplayError(f"run {shown(original.path)}: {error}") from error
    return summary, events


def _branch(
    original: RunFolder, config: RunConfig, from_step: int | None, changes: Mapping[str, Any]
) -> RunConfig | None:
    """Return the settings of the branch; None for a full replay."""
    changed = load_recipe(original.recipe, changes)
    for key in changes:
        if not _below(key, CHANGEABLE) or _below(key, FIXED):
            raise SetupError(
                f"{key} cannot change on the way: it says what the samples or weights are that the branch "
                "begins with; start a new run with it"
            )
    if from_step is None:
        if changes:
            raise SetupError(f"--set {next(iter(changes))} needs --from-step: a replay changes nothing")
        return None
    if (changed.policy.kl is None) != (config.policy.kl is None):
        raise SetupError("policy.kl cannot begin or end on the way: the branch has no reference of its own")
    if changed.steps < config.steps:
        raise SetupError(f"steps can only grow in a branch: groups were started for {config.steps} batches")
    if changed.steps <= from_step:
        raise SetupError(
            f"--from-step {from_step} leaves nothing to do of {changed.steps} steps; raise steps"
        )
    return changed


def _below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _check_can(original: RunFolder, config: RunConfig) -> None:
    """Reject runs that cannot be replayed.

    Raises:
        SetupError: runs of this kind cannot be replayed.
        ReplayError: the run has no event log.
    """
    if (original.path / BRANCH).is_file():
        raise SetupError(
            f"run {shown(original.path)} is a branch ({BRANCH}); replay the run that it is of, and branch "
            "that again"
        )
    if config.engine.is_served:
        raise SetupError(
            f"run {shown(original.path)} generated with engine.kind {config.engine.kind}, whose steps are "
            "not recorded; only runs with engine.kind millrace are replayed"
        )
    if config.engine.disaggregation is not None:
        raise SetupError(
            f"run {shown(original.path)} generated with engine.disaggregation, whose workers' steps are not "
            "recorded; only runs with engines of one process are replayed"
        )
    if choose_device(config.device).type != "cpu":
        raise SetupError(
            f"run {shown(original.path)} would be replayed on CUDA, where sums have no fixed order; only "
            "runs on a CPU are replayed (if it was one, hide the GPUs with CUDA_VISIBLE_DEVICES=)"
        )
    check_old(original.events)
    if not original.events.is_file() or not original.events.stat().st_size:
        raise ReplayError(f"run {shown(original.path)} has no event log: it has not come to its first batch")


def _check_ranks(segments: Sequence[RunSegment], num_ranks: int) -> None:
    """Reject segments with another number of ranks, which sum gradients in another order.

    Raises:
        ReplayError: a segment has another number of ranks, or does not record it.
    """
    for segment in segments:
        if len(segment.threads) != num_ranks:
            raise ReplayError(
                f"its event log is of {len(segment.threads)} ranks from event {segment.first} on, and the "
                f"mesh of its recipe has {num_ranks}; a run whose mesh was changed cannot be replayed"
            )


def _repeat(
    original: RunFolder,
    config: RunConfig,
    segments: list[RunSegment],
    *,
    ranks: Ranks,
    name: str | None,
    live: LiveComparison | None,
    quiet: bool,
) -> RunFolder:
    """Replay the segments one after the other, as a training run and its resumes."""
    stem = f"{original.path.name}-replay"
    config = config.model_copy(update={"name": name, "output": str(original.path.parent)})
    repeats = RepeatedSegment(original, segments[0], live)
    report = loop.train(config, recipe=stem, quiet=quiet, repeats=repeats, ranks=ranks)
    repeated = RunFolder(Path(ranks.broadcast_text(report.run)))
    for segment in segments[1:]:
        repeats = RepeatedSegment(original, segment, live)
        loop.resume(repeated.path, quiet=quiet, repeats=repeats, ranks=ranks)
    return repeated


def _compare(original: RunFolder, repeated: RunFolder, live: LiveComparison | None) -> Sequence[str]:
    """Compare evaluations, weights and live replies; return the names of the common checkpoints."""
    check_evaluations(original, repeated)
    weights = check_weights(original, repeated)
    if live is not None:
        live.check()
    return weights


def _others(summary: Mapping[str, Any]) -> str:
    """Return a hint about version differences of the packages that affect a run's numbers."""
    here = versions()
    others = {name: found for name, found in summary.get("versions", {}).items() if found != here.get(name)}
    text = ", ".join(f"{name} {found} (here {here.get(name)})" for name, found in others.items())
    return f"; it was made with {text}" if text else ""
