"""Running episodes and their groups. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment
from millrace.rollout.sampled_batch import completion_seed
from millrace.types import (
    ROOT,
    Action,
    Completion,
    Episode,
    EpisodeTurn,
    Group,
    Outcome,
    Prompt,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
    parents,
    path_to,
)

# A turn of which nothing is generated yet.
_NOTHING = Completion((), np.empty(0, np.float32), np.empty(0, np.int32), "abort", "")


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How episodes with an environment go on and end.

    Attributes:
        seed: of the tasks.
        max_turns: completions after which an episode ends.
        max_tokens: tokens that an episode may have, the prompt included; of several branches, each.
        ends_at_length: whether a completion that ran out of tokens ends the episode.
        attempts: how often a sample is played at most, if its environment fails.
        invalid_score: score of an episode that ends without its environment: by a limit.
        scored: whether the recipe has rewards that score the last completion, besides the environment.
        shows_tokens: whether the environment gets the log-probabilities of the newest completion.
    """

    seed: int
    max_turns: int
    max_tokens: int
    ends_at_length: bool
    attempts: int
    invalid_score: float
    scored: bool
    shows_tokens: bool = False

    def limited(self, params: SamplingParams, context: Sequence[int]) -> SamplingParams:
        """Return the parameters with what an episode of this context has room for."""
        left = self.max_tokens - len(context)
        return params if left >= params.max_tokens else replace(params, max_tokens=left)

    def task(self, prompt: Prompt, number: int, place: int) -> Task:
        """Return what the environment of a sample is given; samples of a group have the same seed."""
        seed = completion_seed(self.seed, number)
        return Task(prompt.text, prompt.answer, prompt.row, seed, place, self.max_turns)


@dataclass(slots=True)
class Sample:
    """One episode of a group.

    Attributes:
        number: of the group.
        place: index in the group.
        observation: the environment's last tokens; None while it has yet to reply.
        context: every observed and generated token of the branch so far: nothing is decoded and re-encoded.
        after: index of the turn that the observation follows; see `types.Turn`.
        turns: finished turns.
        oldest_step: step of the weights that sampled the oldest token; None before the first.
        engine: of the turn in flight, else of the turn before.
        request_id: of the request in flight; empty between turns.
        partial_output: of the current turn, if an engine aborted it.
        done: whether the episode has ended.
        submitted_s: when the request in flight, or the step of the environment, was submitted.
        attempt: number of attempts that failed.
        step_id: of the environment's step in progress; empty without one.
        state: the environment's name of the current state.
        score: of the episode by its environment.
        end: why the episode ended; see `types.Trajectory`.
        outcome: of an episode that is not scored by a reward.
        saved: of the newest reply; see `EnvironmentReply`.
    """

    number: int
    place: int
    observation: tuple[int, ...] | None = None
    context: tuple[int, ...] = ()
    after: int | None = None
    turns: list[Turn] = field(default_factory=list)
    oldest_step: int | None = None
    engine: str = ""
    request_id: str = ""
    partial_output: Completion | None = None
    done: bool = False
    submitted_s: float = 0.0
    attempt: int = 0
    step_id: str = ""
    state: str = ""
    score: float = 0.0
    end: str = ""
    outcome: Outcome | None = None
    saved: Mapping[str, Any] | None = None

    @property
    def answer(self) -> str:
        """The text that is scored: the completion of the last turn."""
        return self.turns[-1].completion.text if self.turns else ""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens of the finished turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def episode(self) -> str:
        """The id of this attempt for environments."""
        return f"{self.number}.{self.place}.{self.attempt}"

    def view(self, prompt: Prompt, decode: Callable[[tuple[int, ...]], str] | None = None) -> Episode:
        """Return the episode as text; without an environment, whose tokens `decode` decodes, of one turn."""
        turns = []
        for turn in self.turns:
            done, text = turn.completion, prompt.text if decode is None else decode(turn.observation)
            numbers = len(turn.observation), len(done.token_ids)
            turns.append(EpisodeTurn(text, done.text, *numbers, done.finish_reason, turn.reward))
        return Episode(tuple(turns), self.end, self.score)

    def next_step(self, id: str, prompt: Prompt, rules: EpisodeRules) -> StepEnvironment:
        """Return the step of the environment that follows the finished turns."""
        actions: list[Action] = []
        for turn, parent in zip(self.turns, parents(self.turns), strict=True):
            one, num_tokens = turn.completion, len(turn.observation)
            if parent != ROOT:
                num_tokens += actions[parent].num_context_tokens + len(actions[parent].token_ids)
            actions.append(Action(one.text, one.token_ids, one.finish_reason, num_context_tokens=num_tokens))
        if actions and rules.shows_tokens:
            actions[-1] = replace(actions[-1], logprobs=tuple(self.turns[-1].completion.logprobs.tolist()))
        task = rules.task(prompt, self.number, self.place)
        return StepEnvironment(id, self.episode, prompt, task, tuple(actions), self.saved)

    def observe(self, token_ids: tuple[int, ...], state: str = "", after: int | None = None) -> None:
        """Continue with these tokens of the environment, behind the turn `after`."""
        self.observation, self.context, self.state = token_ids, self._before(after) + token_ids, state
        self.after = after

    def _before(self, after: int | None) -> tuple[int, ...]:
        """Return the exact tokens up to the end of a turn; None is the newest."""
        if after is None or after == len(self.turns) - 1:
            return self.context
        turns = [self.turns[at] for at in path_to(self.turns, after)]
        return sum((turn.observation + turn.completion.token_ids for turn in turns), ())

    @property
    def waits(self) -> bool:
        """Whether its next observation is still to come."""
        return not self.done and self.observation is None

    def finish_turn(self, completion: Completion, rules: EpisodeRules | None) -> None:
        """Finish a turn; without an environment, it is the only one."""
        assert self.observation is not None
        self._append(Turn(self.observation, completion, 0.0, self.state, after=self.after))
        if rules is None:
            self.done = True
        elif completion.finish_reason == "length" and rules.ends_at_length:
            self._end("length", rules)

    def _append(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.partial_output, self.observation = None, None
        self.context += turn.completion.token_ids

    def may_restart(self, rules: EpisodeRules) -> bool:
        """Whether a failure of the environment leads to another attempt."""
        return self.attempt + 1 < rules.attempts

    def replied(self, reply: EnvironmentReply, rules: EpisodeRules) -> None:
        """Handle the environment's reply to the newest action, or to the begin of the episode.

        Afterwards the sample is done, or has an observation, or `waits` for the begin of another attempt.
        """
        self.step_id, self.saved = "", reply.saved
        num_tokens = len(self._before(reply.after)) + len(reply.token_ids)
        if reply.failure and self.may_restart(rules):
            self.observation, self.context, self.turns, self.partial_output = None, (), [], None
            self.oldest_step, self.state, self.attempt, self.after = None, "", self.attempt + 1, None
        elif reply.failure:
            self._fail(reply.failure)
        elif not self.turns and num_tokens >= rules.max_tokens:
            self._fail(f"begins with {num_tokens} tokens, and an episode may have {rules.max_tokens}")
        else:
            self._note(reply)
            if reply.invalid:
                self.done, self.end = True, "invalid"
                self.outcome = Outcome("invalid", rules.invalid_score, reply.invalid)
            elif reply.done:
                self.done, self.end, self.score = True, "done", reply.score
                # A reward of the recipe scores it further.
                self.outcome = None if rules.scored else Outcome("score", reply.score)
            elif len(self.turns) >= rules.max_turns:
                self._end("max_turns", rules)
            elif num_tokens >= rules.max_tokens:
                self._end("context", rules)
            else:
                self.observe(reply.token_ids, reply.state, reply.after)

    def _note(self, reply: EnvironmentReply) -> None:
        """Keep what a reply reports of the newest turn."""
        known = reply.reward, reply.calls, reply.progress, reply.refused
        if self.turns and known != (0.0, None, None, 0):
            self.turns[-1] = replace(
                self.turns[-1],
                reward=reply.reward,
                calls=reply.calls,
                invalid_calls=reply.invalid_calls,
                progress=reply.progress,
                refused=reply.refused,
            )

    def _end(self, limit: str, rules: EpisodeRules) -> None:
        self.done, self.end = True, limit
        self.outcome = Outcome("invalid", rules.invalid_score, f"the episode ended by {limit}")

    def _fail(self, reason: str) -> None:
        self.done, self.end = True, "failed"
        self.outcome = Outcome.failure(f"the environment {reason}")

    def finished(self, scored: Outcome | None) -> Trajectory:
        """Return the episode; `scored` is the outcome of its last completion, unless it has one."""
        outcome = self.outcome
        if outcome is None and scored is not None:
            outcome = replace(scored, value=scored.value + self.score) if self.score else scored
        return Trajectory(tuple(self.turns), outcome, self.end)

    @property
    def so_far(self) -> Trajectory:
        """Every turn, including the unfinished one."""
        turns = list(self.turns)
        if self.observation is not None:
            newest = self.partial_output or _NOTHING
            turns.append(Turn(self.observation, newest, 0.0, self.state, after=self.after))
        return Trajectory(tuple(turns), self.outcome, self.end)

    @property
    def progress(self) -> SampleProgress:
        """What a checkpoint needs besides `so_far`."""
        return SampleProgress(self.oldest_step, self.attempt, self.done, self.score, self.saved)

    def restore(self, trajectory: Trajectory, progress: SampleProgress) -> None:
        """Continue from a saved state, which has the environment's replies."""
        for turn in trajectory.turns:
            self.observe(turn.observation, turn.state, turn.after)
            if turn.completion.finish_reason == "abort":
                self.partial_output = turn.completion if turn.completion.token_ids else None
            else:
                self._append(turn)
        self.oldest_step, self.attempt = progress.oldest_step, progress.attempt
        self.done, self.score, self.saved = progress.done, progress.score, progress.saved
        self.end, self.outcome = trajectory.end, trajectory.outcome


# Returns what a reward that sees episodes gets of one that has ended.
EpisodeView = Callable[[Prompt, Sample], Episode]


def view_answer(prompt: Prompt, sample: Sample) -> Episode:
    """The `EpisodeView` without an environment: one turn."""
    return sample.view(prompt)


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """The fields of a `Sample` that its trajectory has not."""

    oldest_step: int | None
    attempt: int
    done: bool
    score: float
    saved: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class UnfinishedGroup:
    """The state of an unfinished group: its generated turns, and the progress of each sample."""

    group: Group
    progress: list[SampleProgress]


@dataclass(slots=True)
class RunningGroup:
    """A group in generation or scoring."""

    prompt: Prompt
    samples: list[Sample]

    @classmethod
    def begin(
        cls,
        number: int,
        prompt: Prompt,
        num_samples: int,
        before: UnfinishedGroup | None = None,
        *,
        with_environment: bool = False,
    ) -> RunningGroup:
        """Start the samples of a prompt, fresh or from the state `before`.

        With an environment, its first reply is still to come; otherwise the prompt is all that they observe.
        """
        samples = [Sample(number, place) for place in range(num_samples)]
        if before is not None:
            for sample, trajectory, progress in zip(
                samples, before.group.trajectories, before.progress, strict=True
            ):
                sample.restore(trajectory, progress)
        for sample in samples:
            if not with_environment and not sample.context:
                sample.observe(prompt.token_ids)
        return cls(prompt, samples)

    @property
    def num_running(self) -> int:
        """Number of episodes that are not done."""
        return sum(not sample.done for sample in self.samples)

    @property
    def so_far(self) -> UnfinishedGroup:
        """The state for a checkpoint, as `begin` takes it."""
        generated = Group(self.prompt, tuple(sample.so_far for sample in self.samples))
        return UnfinishedGroup(generated, [sample.progress for sample in self.samples])

    def unscored(self, num_samples: int) -> Group:
        """Return the finished turns of the first samples; samples without a finished turn are left out."""
        finished = [sample for sample in self.samples[:num_samples] if sample.turns]
        return Group(self.prompt, tuple(Trajectory(tuple(sample.turns)) for sample in finished))

    def scored(
        self, outcomes: Mapping[str, Outcome], key: Callable[[Sample], str] = lambda sample: sample.answer
    ) -> Group:
        """Return the group with the outcome of each sample: its own, else that under its `key`."""
        scored = [None if sample.outcome else outcomes[key(sample)] for sample in self.samples]
        finished = (sample.finished(one) for sample, one in zip(self.samples, scored, strict=True))
        return Group(self.prompt, tuple(finished))
