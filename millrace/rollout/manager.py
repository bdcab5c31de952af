"""The rollout manager: turns prompts into scored groups, on any engine backend. No torch.

`StalenessController` controls which groups may start and which are trained on. `EnginePool` manages the
engines, `Dispatcher` the in-flight requests, and an `EngineBackend` generates and scores. This file connects
them and runs the episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from millrace.data.prompts import PromptStream
from millrace.observability.watchdog import Wait
from millrace.rollout.backend import (
    EngineBackend,
    EngineJoined,
    EngineLost,
    Event,
    GenerateResult,
    ScaleRequest,
    ScoreResult,
    WeightsLoaded,
    named,
)
from millrace.rollout.dispatcher import Dispatcher
from millrace.rollout.engine_pool import EnginePool, Engines
from millrace.rollout.episodes import Begun, Episode, Playing, Sample
from millrace.rollout.sampled_batch import is_equal
from millrace.rollout.serialization import pack_groups, unpack_groups
from millrace.rollout.staleness import EventCallback, StalenessController, TakenBatch, unheard
from millrace.types import Group, Outcome, Prompt, SamplingParams, Trajectory

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
        flow: StalenessController,
        runtime: EngineBackend,
        stream: PromptStream,
        *,
        prompts: Mapping[str, Prompt],
        environment: Callable[[Prompt], Episode],
        params: Callable[[int, int, int], SamplingParams],
        num_samples: int,
        num_baselines: int = 0,
        draw_s: float = math.inf,
        load_s: float = math.inf,
        note: EventCallback = unheard,
    ) -> None:
        """Create the manager; `begin` starts it.

        Args:
            flow: staleness controller.
            runtime: backend for generation and scoring.
            stream: yields new prompts.
            prompts: every prompt by its id, for restarts.
            environment: creates a fresh episode of a prompt.
            params: (group number, sample, turn) to sampling parameters, including the seed.
            num_samples: trajectories of a group.
            num_baselines: extra samples of a group, which are scored but not trained on.
            draw_s: timeout of a request; the engine counts as lost after it.
            load_s: timeout of a weight update; the engine counts as lost after it.
            note: receives the events `heard`, `send`, `joined`, `load`, `lost`, `want`, `dispatch`, `arrive`,
                `part`, `judge`, `keep`, `hold`, `ignore` and the backend's records, like `log.EventLog.add`.
        """
        self._flow, self._runtime, self._stream, self._prompts = flow, runtime, stream, prompts
        self._environment, self._note = environment, note
        self._num_samples, self._num_baselines = num_samples, num_baselines
        self._fleet = EnginePool(runtime, draw_s=draw_s, load_s=load_s, note=note)
        self._dispatch = Dispatcher(self._fleet, runtime, params=params, note=note)
        self._running: dict[int, Playing] = {}
        self._finished: dict[int, Group] = {}
        # Unfinished groups of a checkpoint, until `begin`.
        self._begun: dict[int, Begun] = {}
        self._unjudged: list[int] = []
        self._judging: dict[str, list[tuple[int, str]]] = {}
        self._num_calls = 0

    @property
    def flow(self) -> StalenessController:
        """The staleness controller."""
        return self._flow

    def begin(self, version: int) -> None:
        """Send the weights to every engine, and continue the unfinished groups of `load_state`."""
        self._runtime.begin()
        self._fleet.begin(version, self._flow.num_published)
        for number, prompt_id in self._flow.unfinished.items():
            self._open(number, self._prompts[prompt_id], self._begun.pop(number))
        self._judge()
        self.start()

    def start(self) -> None:
        """Start the groups that have a ticket, and submit queued samples."""
        for _ in range(self._flow.num_free):
            repeats = self._flow.repeats
            prompt = self._prompts[repeats[0]] if repeats else self._stream.next(1)[0]
            self._open(self._flow.start(prompt.id), prompt)
        self._dispatch.send()

    def advance(self, timeout_s: float) -> None:
        """Wait for events for at most `timeout_s` and handle them."""
        self.handle(self._runtime.wait(self.patience_s(timeout_s)))

    def patience_s(self, timeout_s: float) -> float:
        """Return how long to wait for events: at most until the next engine timeout."""
        return max(0.0, min(timeout_s, self._fleet.due_s - self._runtime.now()))

    def handle(self, events: Sequence[Event]) -> None:
        """Handle events and issue the commands that follow from them.

        Raises:
            DrawFailed: an engine failed to serve a request.
        """
        self._hear(events)
        # Timeouts come as events too, so that the log alone determines all decisions: it has no clock.
        self._hear(self._fleet.overdue())

    def records(self) -> None:
        """Log the backend's records for a replay."""
        for kind, facts in self._runtime.records():
            self._note(kind, **facts)

    def _hear(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self.records()
        self._note("heard", events=[named(event) for event in events])
        for event in events:
            match event:
                case GenerateResult():
                    self._drawn(event)
                case ScoreResult():
                    self._judged(event)
                case WeightsLoaded():
                    for early in self._fleet.loaded(event):
                        self._drawn(early)
                case EngineLost():
                    self._dispatch.lost(event)
                case EngineJoined():
                    self._fleet.join(event.engine)
                case ScaleRequest():
                    self._fleet.want(event)
        self._judge()
        self._settle()

    def take(self) -> RolloutBatch | None:
        """Return the next batch, or None while it is incomplete; abort the groups that it drops."""
        self.records()
        taken = self._flow.take()
        if taken is None:
            return None
        dropped = [self._end(each.number) for each in taken.dropped]
        groups = [self._finished.pop(number) for number in taken.numbers]
        for group in groups:
            # In the order of groups: the choice of next prompts must not depend on which reward came first.
            scores = [t.outcome for t in group.trajectories[: self._num_samples] if t.outcome is not None]
            self._stream.learn(group.prompt, [one.value for one in scores if one.kind != "failed"])
        self.start()
        return RolloutBatch(
            taken,
            [Group(group.prompt, group.trajectories[: self._num_samples]) for group in groups],
            [group.trajectories[self._num_samples :] for group in groups],
            dropped,
        )

    def next_batch(
        self, deadline_s: float, let_happen: Callable[[float], None] | None = None
    ) -> RolloutBatch:
        """Handle events until a batch is complete.

        Args:
            deadline_s: timeout in seconds.
            let_happen: waits for progress for at most so many seconds; default `advance`, unless another
                thread handles the events.

        Raises:
            Stalled: no batch was complete in time.
        """
        return self.until(self.take, f"batch {self._flow.num_taken}", deadline_s, let_happen)

    def published(self, version: int) -> None:
        """Start the weight update that follows training on the oldest batch without one."""
        self._note("send", version=version)
        self._fleet.publish(version)
        self._settle()

    def wait_until_published(
        self, deadline_s: float, let_happen: Callable[[float], None] | None = None
    ) -> None:
        """Handle events, as in `next_batch`, until all serving engines have verified the newest weights.

        Raises:
            Stalled: an engine had not in time.
        """
        self.until(
            lambda: self._flow.num_published == self._fleet.newest or None,
            f"publish {self._fleet.newest}",
            deadline_s,
            let_happen,
        )

    def blockers(self) -> list[str]:
        """Return what the next batch or weight update waits for, with its current activity."""
        found = list(self._fleet.blockers())
        for number in self._flow.waits_for():
            if number in self._running:
                group = self._running[number]
                drawn = [
                    f"sample {s.place} on {s.engine} since {self._runtime.now() - s.asked_s:.0f} s"
                    for s in group.samples
                    if s.draw
                ]
                doing = ", ".join(drawn) or ("an engine" if group.num_open else "its reward")
                found.append(f"group {number} ({doing})")
        return found

    def engines(self) -> Engines:
        """Return the target number of engines and the activity of each live engine."""
        return self._fleet.engines()

    def hold(self) -> None:
        """Abort in-flight requests to collect their partial output for `state`; `release` resumes them."""
        self._note("hold")
        self._dispatch.hold()

    @property
    def handed_over(self) -> bool:
        """Whether no request is in flight, so that all partial output has arrived."""
        return self._dispatch.idle

    def release(self) -> None:
        """Resume generation from the partial output."""
        self._dispatch.release()

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return JSON fields and arrays for a checkpoint whose weights were trained on every batch taken.

        In-flight requests are included up to the partial output that engines have returned.
        """
        begun = self._begun | {number: playing.so_far for number, playing in self._running.items()}
        groups, columns = pack_groups(self._finished | {number: one.group for number, one in begun.items()})
        turns = [turn for one in begun.values() for t in one.group.trajectories for turn in t.turns]
        versions = np.concatenate([np.empty(0, np.int32), *(turn.completion.versions for turn in turns)])
        words = {
            "flow": self._flow.state(),
            "stream": self._stream.state(),
            "num_draws": self._dispatch.num_draws,
            "versions": self._fleet.births(np.unique(versions).tolist()),
            "births": [[number, one.births] for number, one in begun.items()],
            "groups": groups,
        }
        return words, columns

    def load_state(self, words: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
        """Restore `state`; call it before `begin`."""
        self._flow.load_state(words["flow"])
        self._stream.load_state(words["stream"])
        self._dispatch.num_draws = words["num_draws"]
        self._fleet.load_births(words["versions"])
        births = dict(words["births"])
        self._finished = unpack_groups(words["groups"], columns, self._prompts)
        unfinished = self._flow.unfinished
        self._begun = {number: Begun(self._finished.pop(number), births[number]) for number in unfinished}

    def until(
        self,
        ready: Callable[[], Found | None],
        what: str,
        deadline_s: float,
        let_happen: Callable[[float], None] | None = None,
    ) -> Found:
        """Handle events, as in `next_batch`, until `ready` returns a value, and return it.

        Raises:
            Stalled: it returned None until the deadline.
        """
        began_s = self._runtime.now()
        while (found := ready()) is None:
            waited_s = self._runtime.now() - began_s
            if waited_s >= deadline_s:
                raise Stalled(str(Wait("trainer", what, waited_s, deadline_s, tuple(self.blockers()))))
            (let_happen or self.advance)(deadline_s - waited_s)
        return found

    def _open(self, number: int, prompt: Prompt, before: Begun | None = None) -> None:
        """Start the episodes of a group, or resume those of a checkpoint."""
        num_samples = self._num_samples + self._num_baselines
        playing = Playing.begin(number, prompt, self._environment, num_samples, before)
        self._running[number] = playing
        if before is not None:
            turns = [len(sample.turns) for sample in playing.samples]
            tokens = [len(sample.drawn.token_ids) if sample.drawn else 0 for sample in playing.samples]
            self._note("keep", number=number, turns=turns, tokens=tokens)
        self._dispatch.add(sample for sample in playing.samples if not sample.over)
        if not playing.num_open:
            self._unjudged.append(number)

    def _drawn(self, event: GenerateResult) -> None:
        sample = self._dispatch.drawn(event)
        if sample is None:
            return
        self._arrived(sample, event)
        if not sample.play(event.completion):
            self._dispatch.add([sample])
            return
        if not self._running[sample.number].num_open:
            self._unjudged.append(sample.number)

    def _arrived(self, sample: Sample, event: GenerateResult) -> None:
        """Log which engine generated a turn, with which weights."""
        versions = event.completion.versions
        oldest, newest = self._fleet.birth(int(versions[0])), self._fleet.birth(int(versions[-1]))
        sample.birth = oldest if sample.birth is None else min(sample.birth, oldest)
        self._note(
            "arrive",
            number=sample.number,
            sample=sample.place,
            turn=len(sample.turns),
            engine=event.engine,
            oldest=oldest,
            newest=newest,
            began=event.began,
            ended=event.ended,
        )

    def _judge(self) -> None:
        """Submit the groups with finished episodes for scoring; duplicate answers are scored once."""
        if not self._unjudged:
            return
        said = {
            (number, sample.said): None
            for number in self._unjudged
            for sample in self._running[number].samples
        }
        self._unjudged = []
        call = f"call-{self._num_calls}"
        self._num_calls += 1
        self._note("judge", call=call, numbers=list(dict.fromkeys(number for number, _ in said)))
        self._judging[call] = list(said)
        self._runtime.judge(call, [self._running[n].prompt for n, _ in said], [text for _, text in said])

    def _judged(self, event: ScoreResult) -> None:
        said = self._judging.pop(event.id, None)
        if said is None:
            self._note("ignore", reason=f"{event.id} of the reward is answered again")
            return
        outcomes: dict[int, dict[str, Outcome]] = {}
        for (number, text), outcome in zip(said, event.outcomes, strict=True):
            outcomes.setdefault(number, {})[text] = outcome
        for number, by_text in outcomes.items():
            # A group may have been dropped before its score arrived.
            if number in self._running:
                self._finish(number, by_text)

    def _finish(self, number: int, outcomes: Mapping[str, Outcome]) -> None:
        playing = self._running.pop(number)
        group = self._finished[number] = playing.scored(outcomes)
        trained = Group(group.prompt, group.trajectories[: self._num_samples])
        births = [s.birth for s in playing.samples[: self._num_samples] if s.birth is not None]
        self._flow.finish(number, births, equal=is_equal(trained))

    def _settle(self) -> None:
        """Report weight updates in force to the staleness controller, and start the groups it then admits."""
        if self._flow.num_published < self._fleet.newest:
            for _ in range(self._fleet.in_force - self._flow.num_published):
                self._flow.published()
        self.start()

    def _end(self, number: int) -> Group:
        """Remove a dropped group; return its generated turns."""
        if number in self._finished:
            group = self._finished.pop(number)
            return Group(group.prompt, group.trajectories[: self._num_samples])
        playing = self._running.pop(number)
        self._dispatch.end(playing)
        return playing.unscored(self._num_samples)
