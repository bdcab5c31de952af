"""The rollout manager: turns prompts into scored groups, on any engine backend. No torch.

`StalenessController` controls which groups may start and which are trained on. `EnginePool` manages the
engines, `Dispatcher` the in-flight requests, and an `EngineBackend` generates and scores. This file connects
them and runs the episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import numpy as np

from millrace.data.mixture import PromptFeed
from millrace.environments.running_episodes import CloseEpisode, EnvironmentReply
from millrace.observability.watchdog import Wait
from millrace.rollout.backend import (
    EngineBackend,
    EngineJoined,
    EngineLost,
    Event,
    GenerateResult,
    RestartTurns,
    ScaleRequest,
    Score,
    ScoreResult,
    WeightsLoaded,
)
from millrace.rollout.dispatcher import Dispatcher
from millrace.rollout.engine_pool import EnginePool, Engines
from millrace.rollout.episodes import (
    EpisodeRules,
    EpisodeView,
    RunningGroup,
    Sample,
    SampleProgress,
    UnfinishedGroup,
)
from millrace.rollout.group_filter import GroupFilter
from millrace.rollout.sampled_batch import group_rewards, is_equal
from millrace.rollout.serialization import pack_groups, unpack_groups
from millrace.rollout.staleness import EventCallback, StalenessController, TakenBatch, discard_event
from millrace.types import Episode, Group, Outcome, Prompt, SamplingParams, Trajectory

Found = TypeVar("Found")


class Stalled(RuntimeError):
    """A wait timed out; the message names what was pending."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """A batch: what `StalenessController` took, its scored groups in that order, and the baselines of each.

    `dropped` has the generated turns of the dropped groups, with scores if they were finished.
    """

    taken: TakenBatch
    groups: list[Group]
    baselines: list[tuple[Trajectory, ...]]
    dropped: list[Group]


class RolloutManager:
    """Start groups, run them to completion and return batches; `BackgroundRollouts` adds a thread."""

    def __init__(
        self,
        staleness: StalenessController,
        backend: EngineBackend,
        stream: PromptFeed,
        *,
        prompts: Mapping[str, Prompt],
        params: Callable[[int, int, int], SamplingParams],
        num_samples: int,
        num_baselines: int = 0,
        episode_rules: EpisodeRules | None = None,
        view_episode: EpisodeView | None = None,
        group_filter: GroupFilter = is_equal,
        request_s: float = math.inf,
        load_s: float = math.inf,
        log_event: EventCallback = discard_event,
    ) -> None:
        """Create the manager; `begin` starts it.

        Args:
            staleness: staleness controller.
            backend: backend for generation and scoring.
            stream: yields new prompts.
            prompts: every prompt by its id, for restarts.
            params: (group number, sample, turn) to sampling parameters, including the seed.
            num_samples: trajectories of a group.
            num_baselines: extra samples of a group, which are scored but not trained on.
            episode_rules: how episodes with an environment go on; None for one completion of each prompt.
            view_episode: returns what a reward that sees episodes gets of one; None scores answers, equal
                ones of a group once.
            group_filter: which groups dynamic sampling replaces, after whose scores it is asked.
            request_s: timeout of a request; the engine counts as lost after it.
            load_s: timeout of a weight update; the engine counts as lost after it.
            log_event: receives the events `update_weights`, `engine_joined`, `engine_lost`,
                `weights_loaded`, `scale`, `dispatch`, `completed`, `partial`, `episode_failed`, `score`,
                `restored`, `ignored` and `abort_in_flight`, like `log.EventLog.add`.
        """
        self._staleness, self._backend, self._stream, self._prompts = staleness, backend, stream, prompts
        self._episode_rules, self._log_event = episode_rules, log_event
        self._num_samples, self._num_baselines = num_samples, num_baselines
        self._view_episode, self._filter = view_episode, group_filter
        self._pool = EnginePool(backend, request_s=request_s, load_s=load_s, log_event=log_event)
        self._dispatcher = Dispatcher(
            self._pool, backend, params=params, rules=episode_rules, log_event=log_event
        )
        self._running: dict[int, RunningGroup] = {}
        self._finished: dict[int, Group] = {}
        # Unfinished groups of a checkpoint, until `begin`.
        self._restored: dict[int, UnfinishedGroup] = {}
        self._unscored: list[int] = []
        # The samples that wait for their environment, by the id of its step.
        self._stepping: dict[str, Sample] = {}
        self._num_environment_steps = 0
        self._scoring: dict[str, list[tuple[int, str]]] = {}
        self._num_calls = 0

    @property
    def staleness(self) -> StalenessController:
        """The staleness controller."""
        return self._staleness

    def begin(self, version: int) -> None:
        """Send the weights to every engine, and continue the unfinished groups of `load_state`."""
        self._backend.execute(RestartTurns())
        self._pool.begin(version, self._staleness.num_updates)
        for number, prompt_id in self._staleness.unfinished.items():
            self._open(number, self._prompts[prompt_id], self._restored.pop(number))
        self._score()
        self.start()

    def start(self) -> None:
        """Start the groups that have a ticket, and submit queued samples."""
        for _ in range(self._staleness.num_free):
            repeats = self._staleness.repeats
            prompt = self._prompts[repeats[0]] if repeats else self._stream.next(1)[0]
            self._open(self._staleness.start(prompt.id), prompt)
        self._dispatcher.send()

    def advance(self, timeout_s: float) -> None:
        """Wait for events for at most `timeout_s` and handle them."""
        self._backend.wait(self.patience_s(timeout_s))
        self.handle(self._backend.poll())

    def patience_s(self, timeout_s: float) -> float:
        """Return how long to wait for events: at most until the next engine timeout."""
        return max(0.0, min(timeout_s, self._pool.due_s - self._backend.now()))

    def handle(self, events: Sequence[Event]) -> None:
        """Handle events that were polled together, and issue the commands that follow from them.

        Raises:
            GenerationFailed: an engine failed to serve a request.
        """
        continued: list[Sample] = []
        for event in events:
            match event:
                case GenerateResult():
                    self._completed(event)
                case ScoreResult():
                    self._scored(event)
                case WeightsLoaded():
                    for early in self._pool.loaded(event):
                        self._completed(early)
                case EngineLost():
                    self._dispatcher.engine_lost(event)
                case EngineJoined():
                    self._pool.join(event.engine)
                case ScaleRequest():
                    self._pool.scale(event)
                case EnvironmentReply():
                    continued += self._replied(event)
        # Samples with equal contexts are dispatched together.
        self._dispatcher.add(continued)
        if events:
            self._score()
            self._apply_updates()
        # Losses come as events, too, so that the log alone determines all decisions: it has no clock.
        self._pool.stop_overdue()

    def take(self) -> RolloutBatch | None:
        """Return the next batch, or None while it is incomplete; abort the groups that it drops."""
        taken = self._staleness.take()
        if taken is None:
            return None
        dropped = [self._drop(each.number) for each in taken.dropped]
        groups = [self._finished.pop(number) for number in taken.numbers]
        for group in groups:
            # In the order of groups: the choice of next prompts must not depend on which reward came first.
            trained = Group(group.prompt, group.trajectories[: self._num_samples])
            self._stream.learn(group.prompt, group_rewards(trained))
        self.start()
        return RolloutBatch(
            taken,
            [Group(group.prompt, group.trajectories[: self._num_samples]) for group in groups],
            [group.trajectories[self._num_samples :] for group in groups],
            dropped,
        )

    def next_batch(self, deadline_s: float, wait: Callable[[float], None] | None = None) -> RolloutBatch:
        """Handle events until a batch is complete.

        Args:
            deadline_s: timeout in seconds.
            wait: waits for progress for at most so many seconds; default `advance`, unless another
                thread handles the events.

        Raises:
            Stalled: no batch was complete in time.
        """
        return self.until(self.take, f"batch {self._staleness.num_taken}", deadline_s, wait)

    def update_weights(self, version: int) -> None:
        """Start the weight update that follows training on the oldest batch without one."""
        self._log_event("update_weights", policy_version=version)
        self._pool.update_weights(version)
        self._apply_updates()

    def wait_for_weights(self, deadline_s: float, wait: Callable[[float], None] | None = None) -> None:
        """Handle events, as in `next_batch`, until all serving engines have verified the newest weights.

        Raises:
            Stalled: an engine had not in time.
        """
        self.until(
            lambda: self._staleness.num_updates == self._pool.newest_step or None,
            f"weight update {self._pool.newest_step}",
            deadline_s,
            wait,
        )

    def blockers(self) -> list[str]:
        """Return what the next batch or weight update waits for, with its current activity."""
        found = list(self._pool.blockers())
        for number in self._staleness.waits_for():
            if number in self._running:
                group = self._running[number]
                in_flight = [
                    f"sample {s.place} on {s.engine} since {self._backend.now() - s.submitted_s:.0f} s"
                    for s in group.samples
                    if s.request_id
                ]
                in_flight += [
                    f"sample {s.place} waits for its environment since "
                    f"{self._backend.now() - s.submitted_s:.0f} s"
                    for s in group.samples
                    if s.step_id
                ]
                doing = ", ".join(in_flight) or ("an engine" if group.num_running else "its reward")
                found.append(f"group {number} ({doing})")
        return found

    def engines(self) -> Engines:
        """Return the target number of engines and the activity of each live engine."""
        return self._pool.engines()

    def pause(self) -> None:
        """Abort in-flight requests to collect their partial output for `state`; `resume` continues them."""
        self._log_event("abort_in_flight")
        self._dispatcher.pause()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight, so that all partial output has arrived."""
        return self._dispatcher.idle

    def resume(self) -> None:
        """Resume generation from the partial output."""
        self._dispatcher.resume()

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return JSON fields and arrays for a checkpoint whose weights were trained on every batch taken.

        In-flight requests are included up to the partial output that engines have returned.
        """
        unfinished = self._restored | {number: running.so_far for number, running in self._running.items()}
        groups, columns = pack_groups(
            self._finished | {number: one.group for number, one in unfinished.items()}
        )
        turns = [turn for one in unfinished.values() for t in one.group.trajectories for turn in t.turns]
        versions = np.concatenate([np.empty(0, np.int32), *(turn.completion.versions for turn in turns)])
        fields = {
            "staleness": self._staleness.state(),
            "stream": self._stream.state(),
            "num_requests": self._dispatcher.num_requests,
            "steps": self._pool.steps_of(np.unique(versions).tolist()),
            "num_environment_steps": self._num_environment_steps,
            "progress": [
                [number, [list(astuple(sample)) for sample in one.progress]]
                for number, one in unfinished.items()
            ],
            "groups": groups,
        }
        return fields, columns

    def load_state(self, fields: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
        """Restore `state`; call it before `begin`."""
        self._staleness.load_state(fields["staleness"])
        self._stream.load_state(fields["stream"])
        self._dispatcher.resume_at(fields["num_requests"])
        self._pool.load_steps(fields["steps"])
        self._num_environment_steps = fields["num_environment_steps"]
        progress = {
            number: [SampleProgress(*sample) for sample in samples] for number, samples in fields["progress"]
        }
        self._finished = unpack_groups(fields["groups"], columns, self._prompts)
        unfinished = self._staleness.unfinished
        self._restored = {
            number: UnfinishedGroup(self._finished.pop(number), progress[number]) for number in unfinished
        }

    def until(
        self,
        ready: Callable[[], Found | None],
        what: str,
        deadline_s: float,
        wait: Callable[[float], None] | None = None,
    ) -> Found:
        """Handle events, as in `next_batch`, until `ready` returns a value, and return it.

        Raises:
            Stalled: it returned None until the deadline.
        """
        began_s = self._backend.now()
        while (found := ready()) is None:
            waited_s = self._backend.now() - began_s
            if waited_s >= deadline_s:
                raise Stalled(str(Wait("trainer", what, waited_s, deadline_s, tuple(self.blockers()))))
            (wait or self.advance)(deadline_s - waited_s)
        return found

    def _open(self, number: int, prompt: Prompt, before: UnfinishedGroup | None = None) -> None:
        """Start the episodes of a group, or resume those of a checkpoint."""
        num_samples = self._num_samples + self._num_baselines
        playing = self._episode_rules is not None
        running = RunningGroup.begin(number, prompt, num_samples, before, with_environment=playing)
        self._running[number] = running
        if before is not None:
            turns = [len(sample.turns) for sample in running.samples]
            tokens = [
                len(sample.partial_output.token_ids) if sample.partial_output else 0
                for sample in running.samples
            ]
            self._log_event("restored", number=number, turns=turns, tokens=tokens)
        self._dispatcher.add(sample for sample in running.samples if not (sample.done or sample.waits))
        for sample in running.samples:
            if sample.waits:
                self._step_environment(sample)
        if not running.num_running:
            self._unscored.append(number)

    def _completed(self, event: GenerateResult) -> None:
        sample = self._dispatcher.completed(event)
        if sample is None:
            return
        self._log_completed(sample, event)
        sample.finish_turn(event.completion, self._episode_rules)
        if sample.waits:
            self._step_environment(sample)
        elif self._episode_rules is not None:
            self._backend.execute(CloseEpisode(sample.episode))
        self._check_done(sample)

    def _check_done(self, sample: Sample) -> None:
        """Score the group of a sample once all its episodes have ended."""
        if sample.done and not self._running[sample.number].num_running:
            self._unscored.append(sample.number)

    def _step_environment(self, sample: Sample) -> None:
        """Start the environment's reply to the newest turn of a sample, or to its begin."""
        rules, prompt = self._episode_rules, self._running[sample.number].prompt
        assert rules is not None
        sample.step_id = f"step-{self._num_environment_steps}"
        self._num_environment_steps += 1
        sample.submitted_s = self._backend.now()
        self._stepping[sample.step_id] = sample
        self._backend.execute(sample.next_step(sample.step_id, prompt, rules))

    def _replied(self, reply: EnvironmentReply) -> list[Sample]:
        """Handle the reply of an environment; return its sample if its next turn may be dispatched."""
        sample, rules = self._stepping.pop(reply.id, None), self._episode_rules
        if sample is None or rules is None:
            self._log_event("ignored", reason=f"{reply.id} of an environment is not in progress")
            return []
        facts = {"number": sample.number, "sample": sample.place, "attempt": sample.attempt}
        again, num_tokens = sample.may_restart(rules), sample.num_sampled
        sample.replied(reply, rules)
        if reply.failure:
            self._log_event("episode_failed", **facts, again=again, reason=reply.failure, tokens=num_tokens)
        elif sample.done and not reply.done:
            self._backend.execute(CloseEpisode(sample.episode))
        if sample.waits:
            self._step_environment(sample)
        self._check_done(sample)
        return [] if sample.done or sample.waits else [sample]

    def _log_completed(self, sample: Sample, event: GenerateResult) -> None:
        """Log which engine generated a turn, with which weights."""
        versions = event.completion.versions
        oldest, newest = self._pool.step_of(int(versions[0])), self._pool.step_of(int(versions[-1]))
        sample.oldest_step = oldest if sample.oldest_step is None else min(sample.oldest_step, oldest)
        self._log_event(
            "completed",
            number=sample.number,
            sample=sample.place,
            turn=len(sample.turns),
            engine=event.engine,
            oldest_step=oldest,
            newest_step=newest,
            began=event.began,
            ended=event.ended,
        )

    def _score(self) -> None:
        """Submit the groups with finished episodes for scoring; what has an equal `_key` is scored once."""
        if not self._unscored:
            return
        answers = {
            (number, self._key(sample)): sample
            for number in self._unscored
            for sample in self._running[number].samples
            if sample.outcome is None
        }
        numbers, self._unscored = self._unscored, []
        for number in numbers:
            if all(sample.outcome is not None for sample in self._running[number].samples):
                self._finish(number, {})
        if not answers:
            return
        call = f"call-{self._num_calls}"
        self._num_calls += 1
        self._log_event("score", call=call, numbers=list(dict.fromkeys(number for number, _ in answers)))
        self._scoring[call] = list(answers)
        prompts, samples = [self._running[n].prompt for n, _ in answers], answers.values()
        episodes: list[Episode] = []
        if self._view_episode is not None:
            episodes = list(map(self._view_episode, prompts, samples))
        self._backend.execute(Score(call, prompts, [sample.answer for sample in samples], episodes))

    def _key(self, sample: Sample) -> str:
        """What names the outcome of a sample in its group: its answer, or itself if episodes are scored."""
        return sample.answer if self._view_episode is None else sample.episode

    def _scored(self, event: ScoreResult) -> None:
        answers = self._scoring.pop(event.id, None)
        if answers is None:
            self._log_event("ignored", reason=f"{event.id} of the reward was completed before")
            return
        outcomes: dict[int, dict[str, Outcome]] = {}
        for (number, key), outcome in zip(answers, event.outcomes, strict=True):
            outcomes.setdefault(number, {})[key] = outcome
        for number, by_key in outcomes.items():
            # A group may have been dropped before its score arrived.
            if number in self._running:
                self._finish(number, by_key)

    def _finish(self, number: int, outcomes: Mapping[str, Outcome]) -> None:
        running = self._running.pop(number)
        group = self._finished[number] = running.scored(outcomes, self._key)
        trained = Group(group.prompt, group.trajectories[: self._num_samples])
        samples = running.samples[: self._num_samples]
        # An environment that failed at once leaves a sample without a token.
        start = self._staleness.start_step(number)
        oldest_steps = [start if s.oldest_step is None else s.oldest_step for s in samples]
        self._staleness.finish(number, oldest_steps, zero_std=self._filter(trained))

    def _apply_updates(self) -> None:
        """Report weight updates in force to the staleness controller, and start the groups it then admits."""
        if self._staleness.num_updates < self._pool.newest_step:
            for _ in range(self._pool.in_force - self._staleness.num_updates):
                self._staleness.weights_updated()
        self.start()

    def _drop(self, number: int) -> Group:
        """Remove a dropped group; return its generated turns."""
        if number in self._finished:
            group = self._finished.pop(number)
            return Group(group.prompt, group.trajectories[: self._num_samples])
        running = self._running.pop(number)
        self._dispatcher.abort(running)
        for sample in running.samples:
            if sample.step_id:
                del self._stepping[sample.step_id]
            if self._episode_rules is not None and not sample.done:
                self._backend.execute(CloseEpisode(sample.episode))
        return running.unscored(self._num_samples)
