"""Batches for the trainer: staleness policy, rollout manager and backend of a recipe; save and resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol

from safetensors.numpy import load_file, save_file

from millrace.config.rollout_section import RolloutConfig
from millrace.data.mixture import PromptFeed
from millrace.data.streamed_prompts import by_id
from millrace.errors import CheckpointError
from millrace.eventlog.log import EventLog, resumed_state
from millrace.observability.files import Shape, read_json
from millrace.observability.metrics import Spans
from millrace.observability.watchdog import Watchdog
from millrace.protocols import RankGroup
from millrace.rollout.backend import EngineBackend, ScaleRequests
from millrace.rollout.background import BackgroundRollouts
from millrace.rollout.episodes import EpisodeRules, EpisodeView
from millrace.rollout.group_filter import GroupFilter
from millrace.rollout.manager import RolloutBatch, RolloutManager, Stalled
from millrace.rollout.recorder import RecordingBackend
from millrace.rollout.sampled_batch import SampledBatch, completion_seed, greedy, group_rewards, sampling
from millrace.rollout.selection_bias import BiasMeter
from millrace.rollout.serialization import pack_batch, to_bytes
from millrace.rollout.staleness import EventCallback, StalenessController, StalenessPolicy, discard_event
from millrace.types import Group, Prompt, SamplingParams, Trajectory


@contextmanager
def resume_errors(checkpoint: Path) -> Iterator[None]:
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


def check_resumed(controller: StalenessController, logged_state: Mapping[str, Any] | None) -> None:
    """Verify that the checkpoint lost no prompt and that none is trained on twice.

    Args:
        controller: restored from the checkpoint.
        logged_state: computed from the log by `log.resumed_state`; None on a rank without the log.

    Raises:
        AssertionError: the restored state is inconsistent, or differs from that of the log.
    """
    if logged_state is not None:
        _compare(controller.state(), logged_state)
    controller.check()


def _compare(state: Mapping[str, Any], logged_state: Mapping[str, Any]) -> None:
    """Compare the restored state with that of the log; raise AssertionError at the first difference."""
    for name in ("num_taken", "num_started", "repeats"):
        if state[name] != logged_state[name]:
            raise AssertionError(
                f"{name} is {state[name]} in the checkpoint and {logged_state[name]} in the log"
            )
    groups = {group[0]: [*group[:3], group[3] and list(group[3])] for group in state["queue"]["groups"]}
    logged = {group[0]: group for group in logged_state["groups"]}
    for number in sorted(groups.keys() | logged.keys()):
        if groups.get(number) != logged.get(number):
            raise AssertionError(
                f"group {number} (prompt, step when it started, steps of its oldest tokens) is "
                f"{_group_text(groups.get(number))} in the checkpoint and "
                f"{_group_text(logged.get(number))} in the log"
            )


def _group_text(group: list[Any] | None) -> str:
    return "not queued" if group is None else str(group[1:])


# Longest wait of a checkpoint for the partial output of engines, which may be in a long prefill or a load.
PARTIAL_OUTPUT_S = 10.0
FIELDS_FILE, ARRAYS_FILE = "rollouts.json", "rollouts.safetensors"


def staleness_policy(rollout: RolloutConfig) -> StalenessPolicy:
    """Return the staleness policy of the recipe."""
    return StalenessPolicy(
        groups_per_step=rollout.prompts_per_step,
        staleness=rollout.max_staleness,
        order=rollout.batch_order,
        stale=rollout.stale_policy,
        dynamic_sampling_rounds=rollout.dynamic_sampling_rounds,
        oversample_groups=rollout.oversample_groups,
    )


class _Method(Protocol):
    @property
    def greedy_baseline(self) -> bool: ...


class _Environments(Protocol):
    @property
    def rules(self) -> EpisodeRules: ...


class RolloutComponents(Protocol):
    """The components of a run that rollouts need; see `run.run.components.Components`."""

    @property
    def backend(self) -> EngineBackend | None:
        """Backend of engines in worker processes; None if the engine is in this process."""
        ...

    @property
    def num_engines(self) -> int:
        """Number of engines in worker processes."""
        ...

    @property
    def train_prompts(self) -> Sequence[Prompt]:
        """Problems to train on."""
        ...

    @property
    def environments(self) -> _Environments | None:
        """The environments of episodes with several turns, or None."""
        ...

    @property
    def group_filter(self) -> GroupFilter:
        """Which scored groups have nothing to learn from."""
        ...

    @property
    def view_episode(self) -> EpisodeView | None:
        """What a reward that sees episodes gets of one; None without such a reward."""
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
    rollout: RolloutConfig,
    components: RolloutComponents,
    stream: PromptFeed,
    backend: EngineBackend,
    *,
    seed: int,
    num_batches: int,
    limit_s: float,
    log_event: EventCallback = discard_event,
) -> RolloutManager:
    """Build the recipe's rollout manager; its `begin` starts it.

    Args:
        rollout: how completions are sampled.
        components: of the run.
        stream: yields prompts.
        backend: backend for generation and scoring.
        seed: of the run.
        num_batches: of the whole run.
        limit_s: timeout of a request and of a weight update.
        log_event: receives every decision.
    """
    return RolloutManager(
        StalenessController(staleness_policy(rollout), num_batches=num_batches, log_event=log_event),
        backend,
        stream,
        prompts=by_id(components.train_prompts),
        episode_rules=None if components.environments is None else components.environments.rules,
        view_episode=components.view_episode,
        group_filter=components.group_filter,
        params=_params(rollout, seed, components.stop_token_ids),
        num_samples=rollout.samples_per_prompt,
        num_baselines=int(components.method.greedy_baseline),
        request_s=limit_s,
        load_s=limit_s,
        log_event=log_event,
    )


def as_sampled(batch: RolloutBatch) -> SampledBatch:
    """Return the batch for training: without withheld trajectories, with the greedy answers' rewards."""
    taken = batch.taken
    groups = []
    for number, group in zip(taken.numbers, batch.groups, strict=True):
        out = set(taken.withheld.get(number, ()))
        kept = tuple(t for place, t in enumerate(group.trajectories) if place not in out)
        groups.append(Group(group.prompt, kept))
    answers = [Group(g.prompt, row) for g, row in zip(groups, batch.baselines, strict=True)]
    num_greedy_tokens = sum(t.num_actions for answer in answers for t in answer.trajectories)
    baselines = None
    if num_greedy_tokens:
        rewards = [group_rewards(answer) for answer in answers]
        baselines = [reward[0] if reward else math.nan for reward in rewards]
    return SampledBatch(groups, taken.left_out, baselines, num_greedy_tokens, taken.num_rounds)


class _RolloutState(Shape):
    """The schema of `rollouts.json` in a checkpoint; failed rewards are NaN."""

    rollouts: dict[str, Any]
    bias: Any
    log_bytes: int


class LocalBatchSource:
    """A `BatchSource` of worker processes in the background, or of an engine in this process."""

    def __init__(
        self,
        rollout: RolloutConfig,
        components: RolloutComponents,
        stream: PromptFeed,
        *,
        seed: int,
        num_batches: int,
        phase_s: float,
        backend: EngineBackend,
        log: EventLog,
        ranks: RankGroup,
        spans: Spans,
        watchdog: Watchdog,
        with_scores: bool = False,
        scale_requests: ScaleRequests | None = None,
    ) -> None:
        """Create the source; `begin` starts it.

        Args:
            rollout: how completions are sampled.
            components: of the run.
            stream: yields prompts.
            seed: of the run.
            num_batches: of the whole run.
            phase_s: timeout of a wait; in a replay, engines have none.
            backend: backend for generation and scoring.
            log: receives every decision.
            ranks: of the run. If every rank has an engine, every rank has a `LocalBatchSource` and rank 0
                keeps the log; otherwise the other ranks have a `RemoteBatchSource`.
            spans: of the trainer's thread.
            watchdog: is notified of the waits of that thread.
            with_scores: see `RecordingBackend`.
            scale_requests: scale requests; None if the run accepts none, as in a replay.
        """
        self._rollout, self._num_batches, self._phase_s = rollout, num_batches, phase_s
        self._log, self._ranks = log, ranks
        requests = tuple if scale_requests is None else scale_requests.poll
        self._backend = RecordingBackend(backend, log.add, requests, with_scores=with_scores)
        self._spans, self._watchdog, self._scale_requests = spans, watchdog, scale_requests
        self._asynchronous = rollout.max_staleness > 0
        # Under the other policies only trajectories without a reward are left out.
        self._selects = rollout.stale_policy in ("drop", "withhold") or rollout.oversample_groups > 0
        self._separate_engines, self._num_engines = components.backend is not None, components.num_engines
        self._manager = rollouts_of(
            rollout,
            components,
            stream,
            self._backend,
            seed=seed,
            num_batches=num_batches,
            limit_s=math.inf if log.replays else phase_s,
            log_event=log.add,
        )
        self._rollouts: RolloutManager | BackgroundRollouts = self._manager
        self._bias, self._refused = BiasMeter(), ""
        self._exit_stack = ExitStack()

    def begin(self, checkpoint: Path | None, version: int) -> None:
        """Send the weights to the engines and start the first groups, or resume those of a checkpoint.

        Args:
            checkpoint: to resume from; None, or a checkpoint without rollouts, starts anew.
            version: of the weights.

        Raises:
            ValueError: the checkpoint was made with another staleness policy or other prompts.
            CheckpointError: the checkpoint and the event log disagree about the groups.
        """
        if checkpoint is None or not (checkpoint / FIELDS_FILE).is_file():
            self._log.rewind(0)
            self._log.add(
                "begin", rules=asdict(staleness_policy(self._rollout)), num_batches=self._num_batches
            )
        else:
            fields, logged_state = read_json(checkpoint / FIELDS_FILE, _RolloutState, finite=False), None
            with resume_errors(checkpoint):
                self._log.rewind(fields.log_bytes if self._ranks.first else 0)
                if self._ranks.first:
                    logged_state = resumed_state(self._log.events())
            self._bias.load_state(fields.bias)
            self._manager.load_state(fields.rollouts, load_file(checkpoint / ARRAYS_FILE))
            with resume_errors(checkpoint):
                check_resumed(self._manager.staleness, logged_state)
        # The thread counts affect the last bits of results; engines have as many threads as rank 0.
        self._log.add("threads", ranks=self._ranks.threads())
        self._manager.begin(version)
        # Worker processes crash and join also while the trainer trains, evaluates or saves.
        if self._separate_engines:
            background = self._rollouts = self._exit_stack.enter_context(
                BackgroundRollouts(self._manager, self._backend)
            )
            if self._scale_requests is not None:
                self._exit_stack.callback(self._scale_requests.close)
            reporting = self._watchdog.reporting(lambda: {"engines": self._status(background)})
            self._exit_stack.enter_context(reporting)

    def __enter__(self) -> LocalBatchSource:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop sampling and close the log."""
        self._exit_stack.close()
        if error is None and self._separate_engines:
            # A replay needs what engines started last, for instance for the last evaluation.
            self._backend.poll()
        self._log.close()

    def next_batch(self) -> tuple[SampledBatch, dict[str, float]]:
        """Wait for the next batch; return it with its metrics.

        Raises:
            Stalled: the wait timed out; the message names what was pending.
        """
        with self._waiting("sample", "its next batch"):
            self._wait_turn("take")
            batch = self._rollouts.next_batch(self._phase_s)
        sampled = as_sampled(batch)
        metrics = self._record(batch, sampled.baselines)
        if self._separate_engines and self._ranks.size > 1:
            self._ranks.broadcast(to_bytes(*pack_batch(sampled, metrics)))
        return sampled, metrics

    def update_weights(self, version: int) -> None:
        """Start a weight update of every engine; at staleness 0, wait until all have verified it.

        With staleness above 0, first wait for the update before: only one is in flight at a time.

        Raises:
            Stalled: an update was not in force in time.
            WeightSyncError: an engine in this process failed to load the weights.
        """
        with self._waiting("weight_sync", f"version {version} to be in force"):
            if self._asynchronous:
                self._rollouts.wait_for_weights(self._phase_s)
            self._wait_turn("update_weights")
            self._rollouts.update_weights(version)
            if not self._asynchronous:
                self._rollouts.wait_for_weights(self._phase_s)

    def _wait_turn(self, kind: str) -> None:
        """In a replay, first handle the events that the recorded run handled before this action."""
        self._rollouts.until(lambda: self._log.reached(kind) or None, f"its turn to {kind}", self._phase_s)

    @contextmanager
    def _waiting(self, span: str, reason: str) -> Iterator[None]:
        """Register a wait of the trainer's thread, unless the engine runs in that thread."""
        if not self._separate_engines:
            yield
            return
        on = self._rollouts.blockers
        with self._spans(span), self._watchdog.waiting("trainer", reason, deadline_s=self._phase_s, on=on):
            yield

    def save(self, folder: Path) -> None:
        """Write the rollout state into a new checkpoint, whose weights were trained on every batch taken."""
        if self._separate_engines:
            self._collect_partial_output()
        self._wait_turn("save")
        # No decision may fall between the saved state and the saved position in the log.
        with self._rollouts.locked() if isinstance(self._rollouts, BackgroundRollouts) else nullcontext():
            if self._separate_engines:
                # What engines have reported by now belongs to the saved part of the log.
                self._manager.handle(self._backend.poll())
            fields, columns = self._rollouts.state()
            self._log.add("save", name=folder.name)
            state = {"rollouts": fields, "bias": self._bias.state(), "log_bytes": self._log.position}
            self._manager.resume()
        (folder / FIELDS_FILE).write_text(json.dumps(state), encoding="utf-8")
        save_file(dict(columns), folder / ARRAYS_FILE)

    def _collect_partial_output(self) -> None:
        """Collect the partial output of in-flight requests. Late output is not part of the checkpoint.

        In a replay, the same engines are late as in the run. At the end of the log all are: they repeat what
        they did in the run, which continued, and accept no other command.
        """
        self._wait_turn("abort_in_flight")
        if self._log.ended:
            return
        self._rollouts.pause()
        if self._log.replays:
            return
        what, on = "engines to return their partial output", self._rollouts.blockers
        watched = self._watchdog.waiting("trainer", what, deadline_s=PARTIAL_OUTPUT_S, on=on)
        with suppress(Stalled), watched:
            self._rollouts.until(lambda: self._manager.is_idle or None, what, PARTIAL_OUTPUT_S)

    def warnings(self) -> list[str]:
        """Return warnings about selection bias and about engines that could not be started."""
        found, refused = [self._bias.warning()], self._rollouts.engines().reason
        if refused and refused != self._refused:
            found.append(f"fewer engines were started than were requested: {refused}")
        self._refused = refused
        return [text for text in found if text]

    def _status(self, background: BackgroundRollouts) -> dict[str, Any]:
        """Return the engines' part of `status.json`."""
        found = background.engines()
        return asdict(replace(found, target=found.target or self._num_engines))

    def _record(self, batch: RolloutBatch, baselines: list[float] | None) -> dict[str, float]:
        taken, found = batch.taken, {}
        if self._asynchronous:
            found = {
                "staleness/mean": fmean(taken.staleness),
                "staleness/max": max(taken.staleness),
                "staleness/dropped_groups": len(taken.dropped),
            }
        for index, (number, group) in enumerate(zip(taken.numbers, batch.groups, strict=True)):
            out = taken.withheld.get(number, ())
            values = [_length_and_reward(trajectory) for trajectory in group.trajectories]
            # The same rule as in `training.estimate.usable` and `train_step.train_on`.
            lacks = baselines is not None and math.isnan(baselines[index])
            used = [not (place in out or math.isnan(r) or lacks) for place, (_, r) in enumerate(values)]
            self._bias.add([length for length, _ in values], [reward for _, reward in values], used)
        longest = max(float(t.num_actions) for group in batch.groups for t in group.trajectories)
        for dropped in batch.dropped:
            values = [_length_and_reward(trajectory) for trajectory in dropped.trajectories]
            # Trajectories still in generation: at least as long as those generated meanwhile.
            values += [(longest, math.nan)] * (self._rollout.samples_per_prompt - len(values))
            lengths, rewards = [length for length, _ in values], [reward for _, reward in values]
            self._bias.add(lengths, rewards, [False] * len(values))
        return found | self._bias.record() if self._selects or self._bias.drops else found


def _length_and_reward(trajectory: Trajectory) -> tuple[float, float]:
    """Return the number of generated tokens and the reward, NaN without one."""
    outcome = trajectory.outcome
    failed = outcome is None or outcome.kind == "failed"
    return float(trajectory.num_actions), math.nan if failed else trajectory.episode_return


def _params(
    rollout: RolloutConfig, seed: int, stop_token_ids: tuple[int, ...]
) -> Callable[[int, int, int], SamplingParams]:
    """Map (group, sample, turn) to sampling parameters; samples beyond those of a group are greedy."""
    sampled, greedy_params = sampling(rollout, stop_token_ids), greedy(rollout, stop_token_ids)

    def params(number: int, place: int, turn: int) -> SamplingParams:
        if place >= rollout.samples_per_prompt:
            return greedy_params
        return replace(sampled, seed=completion_seed(seed, number, place, turn))

    return params
