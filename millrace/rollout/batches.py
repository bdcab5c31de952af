"""Batches for the trainer: staleness policy, rollout manager and backend of a recipe; save and resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol

from safetensors.numpy import load_file, save_file

from millrace.config.settings import RunConfig, num_processes
from millrace.data.prompts import PromptStream
from millrace.errors import CheckpointError
from millrace.eventlog.log import EventLog, flow_after
from millrace.observability.files import Shape, read_json
from millrace.observability.metrics import Spans
from millrace.observability.watchdog import Watchdog
from millrace.protocols import Environment, RankGroup
from millrace.rollout.backend import EngineBackend, ScaleRequests
from millrace.rollout.background import BackgroundRollouts
from millrace.rollout.manager import RolloutBatch, RolloutManager, Stalled
from millrace.rollout.remote import pack_batch
from millrace.rollout.sampled_batch import SampledBatch, completion_seed, greedy, group_rewards, sampling
from millrace.rollout.selection_bias import BiasMeter
from millrace.rollout.staleness import EventCallback, StalenessController, StalenessPolicy, unheard
from millrace.types import Group, Prompt, SamplingParams, Trajectory


@contextmanager
def going_on(checkpoint: Path) -> Iterator[None]:
    """Convert errors of resuming from a checkpoint into one sentence.

    Raises:
        CheckpointError: the block raised ValueError (event log) or AssertionError (staleness controller).
    """
    try:
        yield
    except (ValueError, AssertionError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} and the run's event log do not go together: {error}. Move the "
            "checkpoint elsewhere to resume from the one before it, or start a new run"
        ) from error


def check_resumed(flow: StalenessController, left: Mapping[str, Any] | None) -> None:
    """Verify that the checkpoint lost no prompt and that none is trained on twice.

    Args:
        flow: restored from the checkpoint.
        left: the state that `log.flow_after` computed from the log; None on a rank without the log.

    Raises:
        AssertionError: the restored state is inconsistent, or differs from that of the log.
    """
    if left is not None:
        _compare(flow.state(), left)
    flow.check()


def _compare(state: Mapping[str, Any], left: Mapping[str, Any]) -> None:
    """Compare the restored state with that of the log; raise AssertionError at the first difference."""
    for name in ("num_taken", "num_started", "repeats"):
        if state[name] != left[name]:
            raise AssertionError(f"{name} is {state[name]} in the checkpoint and {left[name]} in the log")
    groups = {group[0]: [*group[:3], group[3] and list(group[3])] for group in state["line"]["groups"]}
    logged = {group[0]: group for group in left["groups"]}
    for number in sorted(groups.keys() | logged.keys()):
        if groups.get(number) != logged.get(number):
            raise AssertionError(
                f"group {number} (prompt, publishes when it started, births) is "
                f"{_told(groups.get(number))} in the checkpoint and {_told(logged.get(number))} in the log"
            )


def _told(group: list[Any] | None) -> str:
    return "not open" if group is None else str(group[1:])


# Longest wait of a checkpoint for the partial output of engines, which may be in a long prefill or a load.
HAND_OVER_S = 10.0
WORDS, NUMBERS = "rollouts.json", "rollouts.safetensors"


def flow_rules(config: RunConfig) -> StalenessPolicy:
    """Return the staleness policy of the recipe."""
    rollout = config.rollout
    return StalenessPolicy(
        groups_per_step=rollout.prompts_per_step,
        staleness=rollout.max_staleness,
        order=rollout.batch_order,
        stale=rollout.stale_policy,
        refill_rounds=rollout.dynamic_sampling_rounds,
        spare_groups=rollout.oversample_groups,
    )


class _Method(Protocol):
    @property
    def greedy_baseline(self) -> bool: ...


class RolloutComponents(Protocol):
    """The components of a run that rollouts need; see `run.run.components.Components`."""

    @property
    def runtime(self) -> EngineBackend | None:
        """Backend of engines in worker processes; None if the engine is in this process."""
        ...

    @property
    def train_prompts(self) -> list[Prompt]:
        """Problems to train on."""
        ...

    @property
    def environment(self) -> Callable[[Prompt], Environment]:
        """Creates an episode of a prompt."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        ...

    @property
    def method(self) -> _Method:
        """The algorithm of the recipe."""
        ...


def rollouts_of(
    config: RunConfig,
    parts: RolloutComponents,
    stream: PromptStream,
    runtime: EngineBackend,
    *,
    num_batches: int,
    patient: bool = False,
    note: EventCallback = unheard,
) -> RolloutManager:
    """Build the recipe's rollout manager; its `begin` starts it.

    Args:
        config: of the run.
        parts: of the run.
        stream: yields prompts.
        runtime: backend for generation and scoring.
        num_batches: of the whole run.
        patient: disable the timeouts of engines.
        note: receives every decision.
    """
    limit_s = math.inf if patient else config.timeouts.phase_s
    return RolloutManager(
        StalenessController(flow_rules(config), num_batches=num_batches, note=note),
        runtime,
        stream,
        prompts={prompt.id: prompt for prompt in parts.train_prompts},
        environment=parts.environment,
        params=_params(config, parts.stop_token_ids),
        num_samples=config.rollout.samples_per_prompt,
        num_baselines=int(parts.method.greedy_baseline),
        draw_s=limit_s,
        load_s=limit_s,
        note=note,
    )


def as_sampled(rolled: RolloutBatch) -> SampledBatch:
    """Return the batch for training: without withheld trajectories, with the greedy answers' rewards."""
    taken = rolled.taken
    groups = []
    for number, group in zip(taken.numbers, rolled.groups, strict=True):
        out = set(taken.withheld.get(number, ()))
        kept = tuple(t for place, t in enumerate(group.trajectories) if place not in out)
        groups.append(Group(group.prompt, kept))
    answers = [Group(g.prompt, row) for g, row in zip(groups, rolled.baselines, strict=True)]
    num_greedy_tokens = sum(t.num_actions for answer in answers for t in answer.trajectories)
    baselines = None
    if num_greedy_tokens:
        rewards = [group_rewards(answer) for answer in answers]
        baselines = [reward[0] if reward else math.nan for reward in rewards]
    return SampledBatch(groups, taken.left_out, baselines, num_greedy_tokens, taken.num_rounds)


class _Words(Shape):
    """The schema of `rollouts.json` in a checkpoint; failed rewards are NaN."""

    rollouts: dict[str, Any]
    bias: Any
    log_bytes: int


class BatchSource:
    """Batches for the trainer, from worker processes in the background or from an engine in this process.

    Use it as a context manager; sampling runs only inside.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: RolloutComponents,
        stream: PromptStream,
        *,
        runtime: EngineBackend,
        log: EventLog,
        ranks: RankGroup,
        spans: Spans,
        watchdog: Watchdog,
        asked: ScaleRequests | None = None,
    ) -> None:
        """Create the source; `begin` starts it.

        Args:
            config: of the run.
            parts: of the run.
            stream: yields prompts.
            runtime: backend for generation and scoring.
            log: receives every decision.
            ranks: of the run. If every rank has an engine, every rank has a `BatchSource` and rank 0 keeps
                the log; otherwise the other ranks have a `RemoteBatchSource`.
            spans: of the trainer's thread.
            watchdog: is notified of the waits of that thread.
            asked: scale requests; None if the run accepts none, as in a replay.
        """
        self._config, self._runtime, self._log, self._ranks = config, runtime, log, ranks
        self._spans, self._watchdog, self._asked = spans, watchdog, asked
        self._ahead = config.rollout.max_staleness > 0
        # Under the other policies only trajectories without a reward are left out.
        self._selects = (
            config.rollout.stale_policy in ("drop", "withhold") or config.rollout.oversample_groups > 0
        )
        self._apart = parts.runtime is not None
        self._rollouts = rollouts_of(
            config, parts, stream, runtime, num_batches=config.steps, patient=log.replays, note=log.add
        )
        self._verbs: RolloutManager | BackgroundRollouts = self._rollouts
        self._bias, self._refused = BiasMeter(), ""
        self._held = ExitStack()

    def begin(self, checkpoint: Path | None, version: int) -> None:
        """Send the weights to the engines and start the first groups, or resume those of a checkpoint.

        Args:
            checkpoint: to resume from; None, or a checkpoint without rollouts, starts anew.
            version: of the weights.

        Raises:
            ValueError: the checkpoint was made with another staleness policy or other prompts.
            CheckpointError: the checkpoint and the event log disagree about the groups.
        """
        if checkpoint is None or not (checkpoint / WORDS).is_file():
            self._log.rewind(0)
            self._log.add("begin", rules=asdict(flow_rules(self._config)), num_batches=self._config.steps)
        else:
            words, left = read_json(checkpoint / WORDS, _Words, finite=False), None
            with going_on(checkpoint):
                self._log.rewind(words.log_bytes if self._ranks.first else 0)
                if self._ranks.first:
                    left = flow_after(self._log.events())
            self._bias.load_state(words.bias)
            self._rollouts.load_state(words.rollouts, load_file(checkpoint / NUMBERS))
            with going_on(checkpoint):
                check_resumed(self._rollouts.flow, left)
        # The thread counts affect the last bits of results; engines have as many threads as rank 0.
        self._log.add("threads", ranks=self._ranks.threads())
        self._rollouts.begin(version)
        # Worker processes crash and join also while the trainer trains, evaluates or saves.
        if self._apart:
            asked = tuple if self._asked is None else self._asked.look
            pump = self._verbs = self._held.enter_context(
                BackgroundRollouts(self._rollouts, self._runtime, asked)
            )
            self._watchdog.more = lambda: {"engines": self._status(pump)}
            self._held.callback(self._unheard)

    def __enter__(self) -> BatchSource:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop sampling and close the log."""
        self._held.close()
        if error is None:
            self._rollouts.records()
        self._log.close()

    def next_batch(self) -> tuple[SampledBatch, dict[str, float]]:
        """Wait for the next batch; return it with its metrics.

        Raises:
            Stalled: the wait timed out; the message names what was pending.
        """
        with self._waiting("sample", "its next batch"):
            self._reach("take")
            rolled = self._verbs.next_batch(self._config.timeouts.phase_s)
        sampled = as_sampled(rolled)
        told = self._record(rolled, sampled.baselines)
        if self._apart and self._ranks.size > 1:
            self._ranks.hand_out(pack_batch(sampled, told))
        return sampled, told

    def published(self, version: int) -> None:
        """Start a weight update of every engine; at staleness 0, wait until all have verified it.

        With staleness above 0, first wait for the update before: only one is in flight at a time.

        Raises:
            Stalled: an update was not in force in time.
            WeightSyncError: an engine in this process failed to load the weights.
        """
        limit_s = self._config.timeouts.phase_s
        with self._waiting("weight_sync", f"version {version} to be in force"):
            if self._ahead:
                self._verbs.wait_until_published(limit_s)
            self._reach("send")
            self._verbs.published(version)
            if not self._ahead:
                self._verbs.wait_until_published(limit_s)

    def _reach(self, kind: str) -> None:
        """In a replay, first handle the events that the recorded run handled before this action."""
        limit_s = self._config.timeouts.phase_s
        self._verbs.until(lambda: self._log.reached(kind) or None, f"its turn to {kind}", limit_s)

    @contextmanager
    def _waiting(self, span: str, reason: str) -> Iterator[None]:
        """Register a wait of the trainer's thread, unless the engine runs in that thread."""
        if not self._apart:
            yield
            return
        limit_s, on = self._config.timeouts.phase_s, self._verbs.blockers
        with self._spans(span), self._watchdog.waiting("trainer", reason, deadline_s=limit_s, on=on):
            yield

    def save(self, folder: Path) -> None:
        """Write the rollout state into a new checkpoint, whose weights were trained on every batch taken."""
        if self._apart:
            self._hand_over()
        self._reach("save")
        # No decision may fall between the saved state and the saved position in the log.
        with self._verbs.paused() if isinstance(self._verbs, BackgroundRollouts) else nullcontext():
            self._rollouts.records()
            words, columns = self._verbs.state()
            self._log.add("save", name=folder.name)
            told = {"rollouts": words, "bias": self._bias.state(), "log_bytes": self._log.position}
            self._rollouts.release()
        (folder / WORDS).write_text(json.dumps(told), encoding="utf-8")
        save_file(dict(columns), folder / NUMBERS)

    def _hand_over(self) -> None:
        """Collect the partial output of in-flight requests. Late output is not part of the checkpoint.

        In a replay, the same engines are late as in the run. At the end of the log all are: they repeat what
        they did in the run, which continued, and accept no other command.
        """
        self._reach("hold")
        if self._log.ended:
            return
        self._verbs.hold()
        if self._log.replays:
            return
        what, on = "engines to hand over what they drew", self._verbs.blockers
        watched = self._watchdog.waiting("trainer", what, deadline_s=HAND_OVER_S, on=on)
        with suppress(Stalled), watched:
            self._verbs.until(lambda: self._rollouts.handed_over or None, what, HAND_OVER_S)

    def warnings(self) -> list[str]:
        """Return warnings about selection bias and about engines that could not be started."""
        found, refused = [self._bias.warning()], self._verbs.engines().reason
        if refused and refused != self._refused:
            found.append(f"fewer engines were started than were asked for: {refused}")
        self._refused = refused
        return [text for text in found if text]

    def _status(self, pump: BackgroundRollouts) -> dict[str, Any]:
        """Return the engines' part of `status.json`."""
        found, heard = pump.engines(), "" if self._asked is None else self._asked.heard
        return asdict(replace(found, wanted=found.wanted or num_processes(self._config), asked=heard))

    def _unheard(self) -> None:
        """Stop reporting status and accepting scale requests."""
        self._watchdog.more = dict
        if self._asked is not None:
            self._asked.close()

    def _record(self, rolled: RolloutBatch, baselines: list[float] | None) -> dict[str, float]:
        taken, found = rolled.taken, {}
        if self._ahead:
            found = {
                "staleness/mean": fmean(taken.staleness),
                "staleness/max": max(taken.staleness),
                "staleness/dropped_groups": len(taken.dropped),
            }
        for index, (number, group) in enumerate(zip(taken.numbers, rolled.groups, strict=True)):
            out = taken.withheld.get(number, ())
            facts = [_facts(trajectory) for trajectory in group.trajectories]
            # The same rule as in `training.estimate.usable` and `train_step.train_on`.
            lacks = baselines is not None and math.isnan(baselines[index])
            used = [not (place in out or math.isnan(r) or lacks) for place, (_, r) in enumerate(facts)]
            self._bias.add([length for length, _ in facts], [reward for _, reward in facts], used)
        longest = max(float(t.num_actions) for group in rolled.groups for t in group.trajectories)
        for dropped in rolled.dropped:
            facts = [_facts(trajectory) for trajectory in dropped.trajectories]
            # Trajectories still in generation: at least as long as those generated meanwhile.
            facts += [(longest, math.nan)] * (self._config.rollout.samples_per_prompt - len(facts))
            lengths, rewards = [length for length, _ in facts], [reward for _, reward in facts]
            self._bias.add(lengths, rewards, [False] * len(facts))
        return found | self._bias.record() if self._selects or self._bias.drops else found


def _facts(trajectory: Trajectory) -> tuple[float, float]:
    """Return the number of generated tokens and the reward, NaN without one."""
    outcome = trajectory.outcome
    failed = outcome is None or outcome.kind == "failed"
    return float(trajectory.num_actions), math.nan if failed or outcome is None else outcome.value


def _params(config: RunConfig, stop_token_ids: tuple[int, ...]) -> Callable[[int, int, int], SamplingParams]:
    """Map (group, sample, turn) to sampling parameters; samples beyond those of a group are greedy."""
    drawn, likeliest = sampling(config.rollout, stop_token_ids), greedy(config.rollout, stop_token_ids)

    def params(number: int, place: int, turn: int) -> SamplingParams:
        if place >= config.rollout.samples_per_prompt:
            return likeliest
        return replace(drawn, seed=completion_seed(config.seed, number, place, turn))

    return params
