"""Running episodes and their groups. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.environments.running_episodes import EnvironmentReply
from millrace.rollout.sampled_batch import completion_seed
from millrace.types import Action, Completion, Group, Outcome, Prompt, Task, Trajectory, Turn

# A turn of which nothing is generated yet.
_NOTHING = Completion((), np.empty(0, np.float32), np.empty(0, np.int32), "abort", "")


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How episodes with an environment go on and end.

    Attributes:
        seed: of the tasks.
        max_turns: completions after which an episode ends.
        max_tokens: tokens that an episode may have, the prompt included.
        ends_at_length: whether a completion that ran out of tokens ends the episode.
        attempts: how often a sample is played at most, if its environment fails.
        invalid_score: score of an episode that ends without its environment: by a limit.
        scored: whether the recipe has rewards that score the last completion, besides the environment.
    """

    seed: int
    max_turns: int
    max_tokens: int
    ends_at_length: bool = True
    attempts: int = 2
    invalid_score: float = 0.0
    scored: bool = False

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
        context: every observed and generated token so far: nothing is decoded and re-encoded.
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
    """

    number: int
    place: int
    observation: tuple[int, ...] | None = None
    context: tuple[int, ...] = ()
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

    @property
    def answer(self) -> str:
        """The text that is scored: the completion of the last turn."""
        return self.turns[-1].completion.text if self.turns else ""

    @property
    def episode(self) -> str:
        """The id of this attempt for environments."""
        return f"{self.number}.{self.place}.{self.attempt}"

    @property
    def actions(self) -> tuple[Action, ...]:
        """The finished turns, for the environment."""
        completions = [turn.completion for turn in self.turns]
        return tuple(Action(one.text, one.token_ids, one.finish_reason) for one in completions)

    def observe(self, token_ids: tuple[int, ...], state: str = "") -> None:
        """Continue with these tokens of the environment."""
        self.observation, self.context, self.state = token_ids, self.context + token_ids, state

    def finish_turn(self, completion: Completion) -> None:
        """Finish a turn."""
        assert self.observation is not None
        self.turns.append(Turn(self.observation, completion, 0.0, self.state))
        self.partial_output, self.observation = None, None
        self.context += completion.token_ids

    def replied(self, reply: EnvironmentReply, rules: EpisodeRules) -> None:
        """Handle the reply of the environment to the newest action, or to the begin of the episode."""
        self.step_id = ""
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=reply.reward)
        if reply.done:
            self.finish("done", reply.score, rules)
        elif len(self.turns) >= rules.max_turns:
            self.finish("max_turns", rules.invalid_score, rules)
        elif len(self.context) + len(reply.token_ids) >= rules.max_tokens:
            self.finish("context", rules.invalid_score, rules)
        else:
            self.observe(reply.token_ids, reply.state)

    def finish(self, end: str, score: float, rules: EpisodeRules) -> None:
        """End the episode; a reward scores it further if the recipe has one and the policy ended it well."""
        self.done, self.end, self.score = True, end, score
        if end != "done":
            self.outcome = Outcome("invalid", score, f"the episode ended by {end}")
        elif not rules.scored:
            self.outcome = Outcome("score", score)

    def fail(self, reason: str) -> None:
        """End the episode without an outcome: its environment failed."""
        self.step_id, self.done, self.end = "", True, "failed"
        self.outcome = Outcome.failure(f"the environment {reason}")

    def restart(self) -> None:
        """Begin the next attempt."""
        self.observation, self.context, self.turns, self.partial_output = None, (), [], None
        self.oldest_step, self.step_id, self.state, self.attempt = None, "", "", self.attempt + 1

    @property
    def so_far(self) -> Trajectory:
        """Every turn, including the unfinished one."""
        turns = list(self.turns)
        if self.observation is not None:
            turns.append(Turn(self.observation, self.partial_output or _NOTHING, 0.0, self.state))
        return Trajectory(tuple(turns), self.outcome, self.end)

    @property
    def progress(self) -> SampleProgress:
        """What a checkpoint needs besides `so_far`."""
        return SampleProgress(self.oldest_step, self.attempt, self.done, self.score)

    def restore(self, trajectory: Trajectory, progress: SampleProgress) -> None:
        """Continue from a saved state, which has the environment's replies."""
        for turn in trajectory.turns:
            self.observe(turn.observation, turn.state)
            if turn.completion.finish_reason == "abort":
                self.partial_output = turn.completion if turn.completion.token_ids else None
            else:
                self.finish_turn(turn.completion)
                self.turns[-1] = turn
        self.oldest_step, self.attempt = progress.oldest_step, progress.attempt
        self.done, self.score = progress.done, progress.score
        self.end, self.outcome = trajectory.end, trajectory.outcome


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """The fields of a `Sample` that its trajectory has not."""

    oldest_step: int | None
    attempt: int
    done: bool
    score: float


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

    def scored(self, outcomes: Mapping[str, Outcome]) -> Group:
        """Return the group with the outcome of each sample; that of its answer unless the sample has one."""

        def outcome(sample: Sample) -> Outcome:
            if sample.outcome is not None:
                return sample.outcome
            found = outcomes[sample.answer]
            return replace(found, value=found.value + sample.score) if sample.score else found

        trajectories = (Trajectory(tuple(s.turns), outcome(s), s.end) for s in self.samples)
        return Group(self.prompt, tuple(trajectories))
