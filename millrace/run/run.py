"""The controller of one run: the operations that the training loops call to record, evaluate, save and stop.

`loop.py` decides the order of these operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from millrace.config.evaluation_section import HELD_OUT
from millrace.distributed.ranks import Ranks
from millrace.environments.running_episodes import EnvironmentReply
from millrace.environments.synchronous import MakeHost
from millrace.eventlog.log import EventLog
from millrace.models.saving import save_config
from millrace.observability.console import Console
from millrace.observability.measure import measure_words
from millrace.observability.metrics import Spans
from millrace.observability.peak_memory import PeakMemory
from millrace.observability.report import write_report
from millrace.observability.sinks import JsonlSink, Sink
from millrace.observability.tables import write_table
from millrace.observability.watchdog import Watchdog
from millrace.planner.model_shape import ModelShape
from millrace.protocols import EpisodeReward
from millrace.rollout.backend import EngineBackend
from millrace.rollout.batch_source import BatchSource
from millrace.run.answer_table import answered_set
from millrace.run.build_models import CRITIC
from millrace.run.callbacks import Callbacks, RunView
from millrace.run.checkpointing import POLICY, Saver, restore_optimizer, snapshot
from millrace.run.colocation import Colocation
from millrace.run.components import Components
from millrace.run.evaluation import Evaluation, evaluate
from millrace.run.evaluation_sets import EvaluationSet, set_metrics
from millrace.run.folder import RunFolder
from millrace.run.health.health_checks import RunStopped, check_collapse, check_evaluation
from millrace.run.health.memory_peaks import owners
from millrace.run.live_report import LiveReport
from millrace.run.progress import Progress, RunReport, run_report
from millrace.run.recorded_evaluation import write_recorded
from millrace.run.recorded_scores import RecordedScores
from millrace.run.signals import Deadline, Interrupted, Interrupts
from millrace.run.train_step import TrainStep
from millrace.training.checkpoint import flush, verify_checkpoint, write_state
from millrace.training.offload import Owner
from millrace.training.policy import PolicyTrainer
from millrace.types import Outcome, SamplingParams


class Repetition(Protocol):
    """A segment of an earlier run that this run replays; see `replay.replay_backend.RepeatedSegment`."""

    @property
    def threads(self) -> Sequence[int]:
        """Number of threads that each rank computed with.

        Raises:
            ReplayError: the event log does not contain it.
        """
        ...

    def over(self, stage: str, step: int) -> bool:
        """Whether the recorded process exited after this step."""
        ...

    def replies(self, make_live: MakeHost, decode: Callable[[tuple[int, ...]], str]) -> MakeHost:
        """Return what makes a host of environments that gives the recorded replies.

        Args:
            make_live: makes a host that runs environments.
            decode: returns tokens as text.
        """
        ...

    def evaluation_replies(
        self, name: str, make_live: MakeHost, decode: Callable[[tuple[int, ...]], str]
    ) -> MakeHost | None:
        """Return the same for the evaluation before the checkpoint `name`; None if it is not recorded."""
        ...

    def scores(self) -> Mapping[str, Sequence[Outcome]]:
        """Return the recorded outcomes of each call of the reward; empty if they are computed again."""
        ...

    def evaluation_scores(self, name: str) -> Sequence[Outcome] | None:
        """Return the recorded outcomes of an evaluation; None if they are computed again."""
        ...

    def notices(self) -> list[str]:
        """Return what is to be shown at once, and forget it."""
        ...

    def logged(
        self,
        backend: EngineBackend,
        path: Path,
        clock: Callable[[], float],
        *,
        limit_s: float,
        make_environments: MakeHost | None,
    ) -> tuple[EngineBackend, EventLog]:
        """Wrap a runtime and open an event log, both of which follow the recorded segment.

        Args:
            backend: generates and scores.
            path: of the event log.
            clock: seconds of the run's clock.
            limit_s: longest time without any progress.
            make_environments: of `replies`; None without environments.
        """
        ...

    def comparison(self, folder: RunFolder) -> Sink:
        """Return a sink that compares each record of this run with that of the earlier one.

        Args:
            folder: of this run.
        """
        ...


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Values of a recipe that the controller needs.

    Attributes:
        steps: batches of reinforcement; 0 is SFT alone.
        sft_steps: most optimizer steps of SFT; 0 without SFT.
        greedy: sampling parameters of evaluations.
        measure: metric that selects the best checkpoint.
        failed_rewards: fraction of an evaluation's rewards that may fail.
        keep_checkpoints: number of newest checkpoints kept, besides the best one.
        colocated: whether trainer and engine take turns in device memory.
        reference_offload: whether the reference is in device memory only while it scores.
        phase_s: longest time of a phase.
        walltime_s: longest time of this process; None is unlimited.
    """

    steps: int
    sft_steps: int
    greedy: SamplingParams
    measure: str
    failed_rewards: float
    keep_checkpoints: int
    colocated: bool
    reference_offload: bool
    phase_s: float
    walltime_s: float | None


class Controller:
    """One run in progress."""

    def __init__(
        self,
        settings: ControllerSettings,
        components: Components,
        folder: RunFolder,
        *,
        ranks: Ranks,
        saver: Saver,
        recipe: str,
        console: Console,
        interrupts: Interrupts,
        metrics: JsonlSink,
        loggers: list[Sink],
        progress: Progress,
        started_s: float,
        repeats: Repetition | None = None,
    ) -> None:
        """Create the controller of a run at `progress`; see `launch` for how its components are built.

        Args:
            settings: of the run.
            components: the components of the run.
            folder: the run folder.
            ranks: all ranks of the run; rank 0 owns the run folder.
            saver: writes checkpoints in the background.
            recipe: name of the recipe.
            console: shows progress in the terminal.
            interrupts: whether the user asked to stop.
            metrics: the run's metrics file; always present.
            loggers: further metric sinks.
            progress: stage, step and counters so far.
            started_s: `time.monotonic()` when this process started to work.
            repeats: on rank 0 of a replay, the segment that it follows.
        """
        self.components = components
        self.folder, self.ranks, self.console = folder, ranks, console
        self.progress, self._began = progress, (progress.stage, progress.step)
        self.memory = PeakMemory(cuda=(cuda := components.device.startswith("cuda")))
        self.spans = Spans(memory=self.memory)
        sleeper = components.sleeper if settings.colocated else None
        self.turns = Colocation(sleeper, cuda=cuda, folder=folder.checkpoints.parent)
        self.watchdog = Watchdog(
            folder.status,
            limit_s=settings.phase_s,
            phase=lambda: self.spans.open,
            facts=self._stands,
            stalled=self._stalled,
        )
        self.callbacks = Callbacks(())
        self.trainer: PolicyTrainer | None = None
        self.train_step: TrainStep | None = None
        self._settings, self._saver, self._recipe, self._interrupts = settings, saver, recipe, interrupts
        self._metrics, self._loggers = metrics, loggers
        self._started_s = started_s - progress.wall_s
        self._deadline = Deadline(settings.walltime_s, started_s)
        self.repeats = repeats
        self._demonstrations = 0, 0
        self.live = LiveReport(self._report_now)
        self._saved, self._late = "", False
        self.synced_version: int | None = None

    @property
    def wall_s(self) -> float:
        """Seconds of work, summed over all processes of the run."""
        return time.monotonic() - self._started_s

    @property
    def at_start(self) -> bool:
        """Whether leaving now loses nothing: this process, or reinforcement, has not done a step yet."""
        progress, (stage, step) = self.progress, self._began
        later = self._settings.sft_steps > 0 and progress.stage != stage
        first = progress.checkpoint_name == self._saved == "step-000000"
        return first or not (later or progress.step != step)

    def adopt(self, trainer: PolicyTrainer, checkpoint: Path | None) -> PolicyTrainer:
        """Make `trainer` the current one; on resume, restore its optimizer state from the checkpoint."""
        if checkpoint is not None:
            restore_optimizer(trainer, checkpoint, POLICY, self.ranks)
        trainer.num_attempts = self.progress.attempts
        self.trainer = trainer
        self.components.policy_weights.activate(trainer)
        self.turns.own(self.owners())
        return trainer

    def owners(self) -> list[Owner]:
        """Every object of the trainer side that holds weights."""
        return owners(self.trainer, self.train_step, self.components.teacher)

    def build_train_step(self, checkpoint: Path | None) -> TrainStep:
        """Build what turns groups into weights: the policy and, as the recipe asks, critic and scorers.

        Args:
            checkpoint: whose optimizer states are restored; None for fresh ones.

        Raises:
            CheckpointError: the reference policy is damaged.
        """
        components, progress = self.components, self.progress
        # The models below are built from the policy's current weights.
        self.turns.meet()
        control, reference = components.control, None
        if control is not None and progress.kl_coefficient is not None:
            control.coefficient = progress.kl_coefficient
        if components.reference is not None:
            # Its write may still be in progress.
            self._saver.settle()
            start = self.folder.checkpoints / "step-000000"
            if self.ranks.first:
                verify_checkpoint(start)
            self.ranks.barrier()
            reference = components.reference(start / POLICY)
            if self._settings.reference_offload:
                reference.move_out(self.turns.offload([("the reference", reference.model, None)]))
        trainer = self.adopt(components.reinforcer(progress.version, control, reference), checkpoint)
        critic = None
        if components.critic is not None:
            critic = components.critic()
            critic.num_attempts = progress.critic_attempts
            if checkpoint is not None:
                restore_optimizer(critic, checkpoint, CRITIC, self.ranks)
        # The FLOP count assumes that all weights are trained; frozen ones cost less.
        shape = ModelShape.known(trainer.model.config.to_dict()) if components.trains_all else None
        self.train_step = TrainStep(
            trainer,
            components.method,
            critic,
            reference,
            components.teacher,
            control,
            shape=shape,
            stage=self.spans.part,
            after_advantages=lambda batch: self.callbacks.after_advantages(self.view, batch),
            before_optimizer_step=lambda batch: self.callbacks.before_optimizer_step(
                self.view, trainer.model, batch
            ),
        )
        self.turns.own(self.owners())
        return self.train_step

    def update_weights(self) -> None:
        """Update the sampler's weights from the trainer and verify them."""
        assert self.trainer is not None
        with self.spans("weight_sync"):
            self.turns.meet()
            self.components.transport.update_weights(self.trainer.named_tensors(), self.trainer.version)
        self.synced_version = self.trainer.version
        self.callbacks.after_weight_update(self.view, self.synced_version)

    def record(self, stage: str, numbers: dict[str, Any]) -> None:
        """Write one record to every sink and show it."""
        record = {"stage": stage, "step": self.progress.step, **numbers, "time/wall_s": self.wall_s}
        for sink in (self._metrics, *self._loggers):
            sink.write(record)
        self.console.update(record)
        self.callbacks.after_record(self.view, record)

    @property
    def view(self) -> RunView:
        """What callbacks get to know of the run."""
        stage = "sft" if self.progress.stage == "sft" else "reinforcement"
        steps = self._settings.sft_steps if stage == "sft" else self._settings.steps
        return RunView(self.folder.path, stage, self.progress.step, steps)

    def warn(self, text: str | None) -> None:
        """Print a warning and keep it for the summary, once however often the run is resumed."""
        if text:
            if text not in self.progress.warnings:
                self.progress.warnings.append(text)
            self.console.say(text, "yellow")

    def evaluate(self, *, last: bool = True) -> Evaluation:
        """Score greedy completions of the held-out prompts under the sampler's current weights.

        Further sets are evaluated too, those that are due; with `last`, all are. Answers go to tables.
        """
        components, params, measure = self.components, self._settings.greedy, self._settings.measure
        with self.spans("evaluate"):
            self.turns.sample()
            with self.recorded(self.progress.checkpoint_name):
                result = evaluate(
                    components.engine,
                    components.reward,
                    components.eval_prompts,
                    params,
                    full_marks=components.full_marks,
                    environments=components.environments,
                    view_episode=components.view_episode,
                )
            # Before it is recorded: answers without a score must not look like answers that earn 0.
            check_evaluation(result, limit=self._settings.failed_rewards)
            self._keep_table(HELD_OUT, result.rows)
            of_sets: dict[str, float] = {}
            for one in components.evaluation_sets:
                if one.is_due(self.progress.step, last=last):
                    of_sets |= self._evaluate_set(one)
        during = "sft" if self.progress.stage == "sft" else "reinforcement"
        times = {f"time/{name}_s": seconds for name, seconds in self.spans.take().items()}
        result = replace(result, sets=of_sets)
        self.progress.eval_last = self.measured(result)
        self.record("evaluation", {"during": during, "measure": measure, **result.metrics, **times})
        if result.failed:
            self.warn(
                f"the rewards of {result.failed:.1%} of the held-out answers failed, so "
                f"{measure_words(measure)} is that of the others; look at the reward"
            )
        self.warn(check_collapse(self.progress, measure, self.progress.eval_last))
        return result

    def _evaluate_set(self, one: EvaluationSet) -> dict[str, float]:
        """Answer the questions of a set, keep the answers, and return the metrics."""
        components, results = self.components, []
        for place, (num_samples, params) in enumerate(one.passes(self._settings.greedy)):
            name = f"{self.progress.checkpoint_name}.{one.name}{'.greedy' * place}"
            with self.recorded(name, one.reward):
                results.append(
                    evaluate(
                        components.engine,
                        one.reward,
                        one.prompts,
                        params,
                        full_marks=one.full_marks,
                        num_samples=num_samples,
                        environments=components.environments,
                        view_episode=one.view_episode,
                    )
                )
        for result in results:
            check_evaluation(
                result, limit=self._settings.failed_rewards, of=f"the answers of evaluation set {one.name}"
            )
        answered = answered_set(one.plan, one.prompts, results, one.columns, seed=one.seed)
        self._keep_table(one.name, answered.rows)
        return set_metrics(one.name, answered, one.ks)

    def _keep_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write the answers of the current step to a table; a later evaluation of this step replaces it."""
        write_table(self.folder.evaluations / name / f"{self.progress.checkpoint_name}.parquet", rows)

    @contextmanager
    def recorded(self, name: str, reward: EpisodeReward | None = None) -> Iterator[None]:
        """Record what the block gets that a replay cannot compute; in a replay, give it what is recorded.

        That are the replies of environments in workers, and the outcomes of one call of the reward (None is
        that of the run) if it asks a judge.
        """
        environments, repeats = self.components.environments, self.repeats
        reward = reward or self.components.reward
        replies = None if environments is None else environments.evaluation_replies
        scores = reward if isinstance(reward, RecordedScores) else None
        if environments is not None and replies is not None:
            given = None
            if repeats is not None:
                given = repeats.evaluation_replies(name, environments.host, environments.decode)
            replies.begin(given)
        if scores is not None and repeats is not None:
            scores.give(repeats.evaluation_scores(name))
        received: list[EnvironmentReply] = []
        try:
            yield
        finally:
            if replies is not None:
                received = replies.end()
        if replies is not None or scores is not None:
            write_recorded(self.folder, name, received, None if scores is None else scores.last)

    def measured(self, result: Evaluation) -> float:
        """The metric that `evaluation.measure` names; RunStopped if no question of its set has it."""
        measure = self._settings.measure
        if measure not in result.metrics:
            raise RunStopped(
                f"evaluation.measure {measure} has no value at {self.progress.checkpoint_name}, because too "
                "many rewards of its answers failed; look at the reward, or set another measure"
            )
        return result.metrics[measure]

    def note_demonstrations(self, num_scored: int, num_right: int) -> None:
        """Keep for the summary how many demonstrations were scored, and how many have full marks."""
        self._demonstrations = num_scored, num_right

    def keep_answers(self, name: str, result: Evaluation) -> None:
        """Write an evaluation's completions to a table (`before`, `after`)."""
        with self.spans("save"):
            write_table(self.folder.evaluations / f"{name}.parquet", result.rows)

    def note_best(self, result: Evaluation) -> bool:
        """Whether this evaluation is the best so far; if so, the next checkpoint is marked as the best.

        Ties are broken by the mean reward, then in favour of the earlier evaluation.
        """
        progress, value = self.progress, self.measured(result)
        if progress.eval_best is not None:
            least = -math.inf if progress.eval_best_reward is None else progress.eval_best_reward
            if (value, result.reward) <= (progress.eval_best, least):
                return False
        progress.eval_best, progress.eval_best_reward = value, result.reward
        progress.best_checkpoint = progress.checkpoint_name
        return True

    def checkpoint(self, source: BatchSource | None = None) -> None:
        """Save what a resumed run needs, then remove the oldest checkpoints; training continues meanwhile.

        Args:
            source: of batches; saves its in-flight groups too.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
        """
        began_s = time.monotonic()
        progress, trainer = self.progress, self.trainer
        assert trainer is not None
        progress.order += 1
        progress.version, progress.attempts = trainer.version, trainer.num_attempts
        critic = self.train_step.critic if self.train_step else None
        if self.train_step is not None and self.train_step.control is not None:
            progress.kl_coefficient = self.train_step.control.coefficient
        if critic is not None:
            progress.critic_attempts = critic.num_attempts
        progress.wall_s = self.wall_s
        progress.metrics_bytes = self._metrics.position
        saved = replace(progress)

        def begin(aside: Path) -> None:
            # Called on rank 0 only.
            if source is not None:
                source.save(aside)
                flush(self.folder.events)
            flush(self.folder.metrics)
            self.components.save_model(aside / POLICY, weights=False)
            if critic is not None:
                save_config(critic.model, aside / CRITIC)
            write_state(aside, progress.to_json())
            self.callbacks.before_checkpoint(self.view, aside)

        def done() -> None:
            self.tidy(saved)
            progress.save_s = max(progress.save_s, time.monotonic() - began_s)

        with self.spans("save"):
            self.turns.meet()
            # Host memory need only hold one snapshot at a time.
            self._saver.settle()
            snapshots = {POLICY: snapshot(trainer, self.ranks)}
            if critic is not None:
                snapshots[CRITIC] = snapshot(critic, self.ranks)
            folder = self.folder.checkpoints / progress.checkpoint_name
            self._saver.save(folder, snapshots, begin=begin, done=done)
        self._saved = progress.checkpoint_name

    def tidy(self, saved: Progress) -> None:
        """Record the best checkpoint and remove old ones; a killed process may not have done so.

        Args:
            saved: the progress in the newest complete checkpoint.
        """
        if saved.best_checkpoint:
            best = {
                "checkpoint": saved.best_checkpoint,
                "measure": self._settings.measure,
                "value": saved.eval_best,
            }
            self.folder.write_json(self.folder.best, best)
        # The reference policy is the first checkpoint.
        also = {saved.best_checkpoint} | ({"step-000000"} if self.components.reference is not None else set())
        self.folder.forget(saved.checkpoint_name, keep=self._settings.keep_checkpoints, also=also)

    def leave_if_asked(self, source: BatchSource | None = None) -> None:
        """Save a checkpoint if none was just saved, and leave on Ctrl-C or when the run is out of time.

        Args:
            source: of batches, if there is one.

        Raises:
            Interrupted: the run leaves here.
            CheckpointError: a pending checkpoint could not be written.
        """
        if self.ranks.any_rank(self._saver.failed):
            self._saver.settle()
        for text in () if self.repeats is None else self.repeats.notices():
            self.console.say(text, "yellow")
        over = self.repeats is not None and self.repeats.over(self.progress.stage, self.progress.step)
        if self.repeats is not None and self._interrupts.asked:
            raise KeyboardInterrupt
        self._late = not self._interrupts.asked and self._out_of_time()
        if self._late:
            self.console.say("timeouts.walltime_s is nearly over; saving, then leaving", "bold")
        stopped = bool(self.callbacks.stopped_by) and not self._is_complete()
        if stopped:
            self.console.say(f"{self.callbacks.stopped_by} asked to stop; saving, then leaving", "bold")
        # Ctrl-C reaches the ranks at different times; they must leave after the same step.
        if self.ranks.any_rank(self._interrupts.asked or over or stopped or self._late):
            if self._saved != self.progress.checkpoint_name:
                self.checkpoint(source)
            self._saver.settle()
            raise Interrupted

    def report(self) -> None:
        """Write the report of a run in progress, if it is due; called after each step."""
        if self.ranks.first:
            self.live.update()

    def _report_now(self) -> None:
        with self.spans("report"):
            # No process may be left to correct this report, so it states only what holds either way.
            summary = asdict(self._summary("interrupted")) | {"status": "not finished"}
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            note = f"As of {at}. `millrace status {self.folder.path}` shows whether the run goes on."
            write_report(self.folder.path, summary | {"wall_s": self.wall_s}, note=note)

    def finish(self, status: Literal["finished", "interrupted", "failed"]) -> RunReport:
        """Write the summary and the report."""
        self.progress.wall_s = self.wall_s
        report = self._summary(status)
        summary = asdict(report)
        try:
            write_report(self.folder.path, summary)
        finally:
            # Last, because a run whose summary says that it is finished is not resumed.
            self.folder.write_json(self.folder.summary, summary)
        return report

    def _summary(self, status: Literal["finished", "interrupted", "failed"]) -> RunReport:
        return run_report(
            self.progress,
            self.components,
            run=self.folder.path,
            recipe=self._recipe,
            measure=self._settings.measure,
            status=status,
            demonstrations=self._demonstrations,
            out_of_time=self._late,
        )

    def _stands(self) -> dict[str, Any]:
        settings, stage = self._settings, self.progress.stage
        steps = settings.sft_steps if settings.sft_steps and stage == "sft" else settings.steps
        best = {"value": self.progress.eval_best, "checkpoint": self.progress.best_checkpoint}
        measured = {"measure": settings.measure, "value": self.progress.eval_last, "best": best}
        return {"stage": stage, "step": self.progress.step, "steps": steps, "measured": measured}

    def _out_of_time(self) -> bool:
        """Whether the deadline is near on rank 0; a replay, and a run that is complete, ignore it."""
        near = self._deadline.near(self.progress.save_s)
        return near and not self._is_complete() and self.ranks.first and self.repeats is None

    def _is_complete(self) -> bool:
        stands = self._stands()
        last = stands["stage"] == "reinforcement" or not self._settings.steps
        return last and bool(stands["step"] == stands["steps"])

    def _stalled(self, text: str) -> None:
        """Save the summary from the watchdog while the run's own thread hangs."""
        self.progress.warnings.append(text)
        self.finish("failed")
