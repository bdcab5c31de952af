"""The controller of one run: what its loops call to record, evaluate, save and stop.

The order of things stands in `loop.py`; this file holds the verbs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from millrace.config.settings import RunConfig, num_processes
from millrace.data.curriculum import Curriculum
from millrace.data.prompts import PromptStream
from millrace.distributed.ranks import Ranks
from millrace.engines.in_process import InlineRuntime
from millrace.eventlog.log import EventLog
from millrace.models.saving import save_config
from millrace.observability.console import Console
from millrace.observability.measure import measure_words
from millrace.observability.memory import PeakMemory
from millrace.observability.metrics import Spans
from millrace.observability.report import write_report
from millrace.observability.sinks import JsonlSink, Sink
from millrace.observability.tables import write_table
from millrace.observability.watchdog import Watchdog
from millrace.planner.model_shape import ModelShape
from millrace.rollout.backend import Runtime
from millrace.rollout.batches import Source
from millrace.rollout.remote import Follower
from millrace.rollout.sampling import greedy
from millrace.run.build_models import CRITIC
from millrace.run.checkpointing import POLICY, Saver, restore_optimizer, snapshot
from millrace.run.colocation import Turns
from millrace.run.components import Parts
from millrace.run.evaluation import Evaluation, evaluate
from millrace.run.folder import RunFolder
from millrace.run.health.checks import check_collapse, check_evaluation
from millrace.run.health.memory import owners
from millrace.run.live_report import LiveReport
from millrace.run.progress import Progress, RunReport, run_report
from millrace.run.scaling import Asked
from millrace.run.signals import Deadline, Interrupted, Interrupts
from millrace.run.train_step import Learner
from millrace.training.checkpoint import flush, verify_checkpoint, write_state
from millrace.training.offload import Owner
from millrace.training.policy import PolicyTrainer


class Repeats(Protocol):
    """A part of an earlier run that this run repeats; see `replay.backend.Repeated`."""

    @property
    def threads(self) -> Sequence[int]:
        """Threads that each rank computed with.

        Raises:
            ReplayError: the event log does not tell.
        """
        ...

    def over(self, stage: str, step: int) -> bool:
        """Whether the process of that part left here."""
        ...

    def logged(
        self, runtime: Runtime, path: Path, clock: Callable[[], float], *, limit_s: float
    ) -> tuple[Runtime, EventLog]:
        """A runtime and the log of its run, which follow that part.

        Args:
            runtime: draws and judges.
            path: of the log.
            clock: its seconds.
            limit_s: nothing at all may be missing for longer.
        """
        ...

    def comparison(self, folder: RunFolder) -> Sink:
        """Compares each record of this run with that of the earlier one.

        Args:
            folder: of this run.
        """
        ...


class Controller:
    """One run in progress."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        folder: RunFolder,
        *,
        ranks: Ranks,
        saver: Saver,
        recipe: str,
        console: Console,
        interrupts: Interrupts,
        metrics: JsonlSink,
        trackers: list[Sink],
        progress: Progress,
        started_s: float,
    ) -> None:
        """A run at `progress`; see `launch` for how its pieces come about.

        Args:
            config: of the run.
            parts: what it is made of.
            folder: where it is kept.
            ranks: who takes part; the first one keeps the run folder.
            saver: writes checkpoints while the run goes on.
            recipe: name of the recipe.
            console: where it is shown.
            interrupts: tells when the user wants to leave.
            metrics: the run's own record, always there.
            trackers: where metrics go besides.
            progress: where it stands.
            started_s: `time.monotonic()` at the start of this process's work.
        """
        self.config = config
        self.parts = parts
        self.folder = folder
        self.ranks = ranks
        self.console = console
        self.progress, self._began = progress, (progress.stage, progress.step)
        self.memory = PeakMemory(cuda=(cuda := parts.device.startswith("cuda")))
        self.spans = Spans(memory=self.memory)
        sleeper = parts.sleeper if config.engine.take_turns else None
        self.turns = Turns(sleeper, cuda=cuda, folder=folder.checkpoints.parent)
        self.watchdog = Watchdog(
            folder.status,
            limit_s=config.limits.phase_s,
            phase=lambda: self.spans.open,
            facts=self._stands,
            stalled=self._stalled,
        )
        self.trainer: PolicyTrainer | None = None
        self.learner: Learner | None = None
        self._saver, self._recipe, self._interrupts = saver, recipe, interrupts
        self._metrics, self._trackers = metrics, trackers
        self._started_s = started_s - progress.wall_s
        self._deadline = Deadline(config.limits.run_s, started_s)
        self.repeats: Repeats | None = None  # on the first rank, of another run, where this one repeats one
        self.scored_demonstrations = (0, 0)  # how many, and how many of them earned full marks
        self.live = LiveReport(self._report_now)
        self._saved, self._late = "", False
        self._published: int | None = None

    @property
    def wall_s(self) -> float:
        """Seconds of work, over all processes of the run."""
        return time.monotonic() - self._started_s

    @property
    def at_start(self) -> bool:
        """Whether nothing would be lost now: no step was done, of this process or of reinforcement."""
        progress, (stage, step) = self.progress, self._began
        later = self.config.warmup is not None and progress.stage != stage
        first = progress.checkpoint_name == self._saved == "step-000000"
        return first or not (later or progress.step != step)

    def stream(self) -> PromptStream:
        """The prompts of the current stage, where the progress says they stand."""
        warming = self.progress.stage == "warmup"
        # The warm-up has an order of its own, so that its length does not change what reinforcement sees.
        seed = 2 * self.config.seed + (1 if warming else 0)
        prompts = self.parts.train_prompts
        if warming:
            prompts = [prompt for prompt in prompts if prompt.id in self.parts.demonstrations]
        # Also before the warm-up, which deals everything: a function that is not there is told at once.
        chosen, shuffle = self.config.data.curriculum, self.config.data.shuffle
        curriculum = None if chosen is None else Curriculum.of(chosen)
        stream = PromptStream(prompts, seed=seed, shuffle=shuffle, curriculum=None if warming else curriculum)
        if self.progress.stream:
            stream.load_state(self.progress.stream)
        return stream

    def adopt(self, trainer: PolicyTrainer, checkpoint: Path | None) -> PolicyTrainer:
        """Make `trainer` the current one; on resume, with the optimizer state of the checkpoint."""
        if checkpoint is not None:
            restore_optimizer(trainer, checkpoint, POLICY, self.ranks)
        trainer.num_attempts = self.progress.attempts
        self.trainer = self.parts.newest.trainer = trainer
        self.turns.own(self.owners())
        return trainer

    def owners(self) -> list[Owner]:
        """All on the trainer's side that hold weights."""
        return owners(self.trainer, self.learner, self.parts.teacher)

    def learn(self, checkpoint: Path | None) -> Learner:
        """Everything that turns groups into weights: the policy and, as the recipe asks, critic and scorers.

        Args:
            checkpoint: that the run goes on from, with the optimizers' states; None where it does not.

        Raises:
            CheckpointError: the reference policy is damaged.
        """
        parts, progress = self.parts, self.progress
        # Others learn from here on, and are made from what the policy is now.
        self.turns.meet()
        control, reference = parts.control, None
        if control is not None and progress.kl_coefficient is not None:
            control.coefficient = progress.kl_coefficient
        if parts.reference is not None:
            # It may still be being written.
            self._saver.settle()
            start = self.folder.checkpoints / "step-000000"
            if self.ranks.first:
                verify_checkpoint(start)
            self.ranks.wait()
            reference = parts.reference(start / POLICY)
        trainer = self.adopt(parts.reinforcer(progress.version, control, reference), checkpoint)
        critic = None
        if parts.critic is not None:
            critic = parts.critic()
            critic.num_attempts = progress.critic_attempts
            if checkpoint is not None:
                restore_optimizer(critic, checkpoint, CRITIC, self.ranks)
        # What a weight that does not learn costs is not what one costs that does.
        learns = self.config.model.adapter is None and not self.config.model.frozen
        shape = ModelShape.known(trainer.model.config.to_dict()) if learns else None
        self.learner = Learner(trainer, parts.method, critic, reference, parts.teacher, control, shape=shape)
        self.turns.own(self.owners())
        return self.learner

    def source(self) -> Source | Follower:
        """Where batches of reinforcement come from."""
        parts = self.parts
        if num_processes(self.config) and not self.ranks.first:
            ranks, spans, version = self.ranks, self.spans, self._published
            return Follower(parts.train_prompts, parts.newest, ranks=ranks, spans=spans, version=version)
        runtime = parts.runtime or InlineRuntime(
            parts.engine, parts.reward, lambda version: self.publish(), self.spans
        )
        # Before a file is opened, since it may fail.
        stream, limit_s = self.stream(), self.config.limits.phase_s
        path = self.folder.events
        if self.repeats is None:
            log = EventLog(path, lambda: self.wall_s)
        else:
            runtime, log = self.repeats.logged(runtime, path, lambda: self.wall_s, limit_s=limit_s)
        return Source(
            self.config,
            parts,
            stream,
            runtime=runtime,
            log=log,
            ranks=self.ranks,
            spans=self.spans,
            watchdog=self.watchdog,
            asked=Asked(self.folder.wanted) if parts.runtime and not log.replays else None,
        )

    def publish(self) -> None:
        """Send the trainer's weights to the sampler, proved."""
        assert self.trainer is not None
        with self.spans("sync"):
            self.turns.meet()
            self.parts.transport.send(self.trainer.named_tensors(), self.trainer.version)
        self._published = self.trainer.version

    def record(self, stage: str, numbers: dict[str, Any]) -> None:
        """Write one record to every sink and show it."""
        record = {"stage": stage, "step": self.progress.step, **numbers, "time/wall_s": self.wall_s}
        for sink in (self._metrics, *self._trackers):
            sink.write(record)
        self.console.update(record)

    def warn(self, text: str | None) -> None:
        """Say what went wrong and keep it for the summary, once however often the run is resumed."""
        if text:
            if text not in self.progress.warnings:
                self.progress.warnings.append(text)
            self.console.say(text, "yellow")

    def evaluate(self) -> Evaluation:
        """Greedy answers of the published weights to the held-out prompts."""
        parts = self.parts
        params = greedy(self.config.rollout, parts.stop_token_ids)
        with self.spans("evaluate"):
            self.turns.sample()
            result = evaluate(
                parts.engine, parts.reward, parts.eval_prompts, params, full_marks=parts.full_marks
            )
        # Before it is recorded: answers without a score must not look like answers that earn 0.
        check_evaluation(result, limit=self.config.limits.failed_rewards)
        during = "warmup" if self.progress.stage == "warmup" else "reinforcement"
        times = {f"time/{name}_s": seconds for name, seconds in self.spans.take().items()}
        measure = self.config.evaluation.measure
        self.progress.eval_last = self.measured(result)
        self.record("evaluation", {"during": during, "measure": measure, **result.metrics, **times})
        if result.failed:
            self.warn(
                f"the rewards of {result.failed:.1%} of the held-out answers failed, so "
                f"{measure_words(measure)} is that of the others; look at the reward"
            )
        self.warn(check_collapse(self.progress, measure, self.progress.eval_last))
        return result

    def measured(self, result: Evaluation) -> float:
        """What an evaluation is judged by: the metric that `evaluation.measure` names."""
        return result.metrics[self.config.evaluation.measure]

    def keep_answers(self, name: str, result: Evaluation) -> None:
        """Keep an evaluation's answers as a table (`before`, `after`)."""
        with self.spans("save"):
            write_table(self.folder.evaluations / f"{name}.parquet", result.rows)

    def note_best(self, result: Evaluation) -> bool:
        """Whether this evaluation is the best so far; if so, the checkpoint about to be taken is the best.

        Of two that measure the same, the one with the higher mean reward is better; of equals, the earlier.
        """
        progress, value = self.progress, self.measured(result)
        if progress.eval_best is not None:
            least = -math.inf if progress.eval_best_reward is None else progress.eval_best_reward
            if (value, result.reward) <= (progress.eval_best, least):
                return False
        progress.eval_best, progress.eval_best_reward = value, result.reward
        progress.best_checkpoint = progress.checkpoint_name
        return True

    def checkpoint(self, source: Source | Follower | None = None) -> None:
        """Save what a resumed run needs, then forget the oldest checkpoints; training goes on meanwhile.

        Args:
            source: of batches, which keeps what is under way.

        Raises:
            CheckpointError: the one before could not be written.
        """
        began_s = time.monotonic()
        progress, trainer = self.progress, self.trainer
        assert trainer is not None
        progress.order += 1
        progress.version, progress.attempts = trainer.version, trainer.num_attempts
        critic = self.learner.critic if self.learner else None
        if self.learner is not None and self.learner.control is not None:
            progress.kl_coefficient = self.learner.control.coefficient
        if critic is not None:
            progress.critic_attempts = critic.num_attempts
        progress.wall_s = self.wall_s
        progress.metrics_bytes = self._metrics.position
        saved = replace(progress)

        def begin(aside: Path) -> None:
            # This is done on the first rank alone.
            if isinstance(source, Source):
                source.save(aside)
                flush(self.folder.events)
            flush(self.folder.metrics)
            self.parts.save_model(aside / POLICY, weights=False)
            if critic is not None:
                save_config(critic.model, aside / CRITIC)
            write_state(aside, progress.to_json())

        def done() -> None:
            self.tidy(saved)
            progress.save_s = max(progress.save_s, time.monotonic() - began_s)

        with self.spans("save"):
            self.turns.meet()
            # One copy of everything in host memory is enough.
            self._saver.settle()
            snapshots = {POLICY: snapshot(trainer, self.ranks)}
            if critic is not None:
                snapshots[CRITIC] = snapshot(critic, self.ranks)
            folder = self.folder.checkpoints / progress.checkpoint_name
            self._saver.save(folder, snapshots, begin=begin, done=done)
        self._saved = progress.checkpoint_name

    def tidy(self, saved: Progress) -> None:
        """Say which checkpoint is the best and forget old ones; a killed process may not have come to it.

        Args:
            saved: what the newest whole checkpoint says.
        """
        if saved.best_checkpoint:
            best = {
                "checkpoint": saved.best_checkpoint,
                "measure": self.config.evaluation.measure,
                "value": saved.eval_best,
            }
            self.folder.write_json(self.folder.best, best)
        # The reference policy is the start.
        also = {saved.best_checkpoint} | ({"step-000000"} if self.parts.reference is not None else set())
        self.folder.forget(saved.checkpoint_name, keep=self.config.checkpoint.keep, also=also)

    def leave_if_asked(self, source: Source | Follower | None = None) -> None:
        """Save, unless that was just done, and leave if the user pressed Ctrl-C or the run is out of time.

        Args:
            source: of batches, if there is one.

        Raises:
            Interrupted: so it is.
            CheckpointError: what was being saved could not be written.
        """
        if self.ranks.agree(self._saver.failed):
            self._saver.settle()
        over = self.repeats is not None and self.repeats.over(self.progress.stage, self.progress.step)
        if self.repeats is not None and self._interrupts.asked:
            raise KeyboardInterrupt
        self._late = not self._interrupts.asked and self._out_of_time()
        if self._late:
            self.console.say("limits.run_s is nearly over; saving, then leaving", "bold")
        # Each hears of Ctrl-C in its own time; they leave after the same step.
        if self.ranks.agree(self._interrupts.asked or over or self._late):
            if self._saved != self.progress.checkpoint_name:
                self.checkpoint(source)
            self._saver.settle()
            raise Interrupted

    def report(self) -> None:
        """Write the report of a run that goes on, if it is due; called after each step."""
        if self.ranks.first:
            self.live.update()

    def _report_now(self) -> None:
        with self.spans("report"):
            # Nobody may be left to correct it, so it says no more than what is so however the run goes on.
            told = asdict(self._summary("interrupted")) | {"status": "not finished"}
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            note = f"As of {at}. `millrace status {self.folder.path}` says whether the run goes on."
            write_report(self.folder.path, told | {"wall_s": self.wall_s}, note=note)

    def finish(self, status: Literal["finished", "interrupted", "failed"]) -> RunReport:
        """Write the summary and the report."""
        self.progress.wall_s = self.wall_s
        report = self._summary(status)
        told = asdict(report)
        try:
            write_report(self.folder.path, told)
        finally:
            # Last, because a run whose summary says that it is finished is not resumed.
            self.folder.write_json(self.folder.summary, told)
        return report

    def _summary(self, status: Literal["finished", "interrupted", "failed"]) -> RunReport:
        return run_report(
            self.progress,
            self.parts,
            run=self.folder.path,
            recipe=self._recipe,
            measure=self.config.evaluation.measure,
            status=status,
            demonstrations=self.scored_demonstrations,
            out_of_time=self._late,
        )

    def _stands(self) -> dict[str, Any]:
        warmup = self.config.warmup
        stage = self.progress.stage
        steps = warmup.steps if warmup is not None and stage == "warmup" else self.config.steps
        best = {"value": self.progress.eval_best, "checkpoint": self.progress.best_checkpoint}
        measured = {"measure": self.config.evaluation.measure, "value": self.progress.eval_last, "best": best}
        return {"stage": stage, "step": self.progress.step, "steps": steps, "measured": measured}

    def _out_of_time(self) -> bool:
        """Whether the first rank's clock says so; a repetition takes its time, and what is done may end."""
        stands = self._stands()
        last = stands["stage"] == "reinforcement" or not self.config.steps
        ended = last and stands["step"] == stands["steps"]
        near = self._deadline.near(self.progress.save_s)
        return near and not ended and self.ranks.first and self.repeats is None

    def _stalled(self, text: str) -> None:
        """From the watchdog, while the run's own thread hangs: what a resumed run begins with is saved."""
        self.progress.warnings.append(text)
        self.finish("failed")
