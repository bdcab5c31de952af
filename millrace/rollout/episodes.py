"""Running episodes and their groups. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from millrace.types import Completion, Group, Outcome, Prompt, Trajectory, Turn


class Episode(Protocol):
    """A `protocols.Environment`."""

    def observe(self) -> tuple[int, ...]:
        """Return the first tokens of the episode."""
        ...

    def step(self, completion: Completion) -> tuple[int, ...] | None:
        """Return the tokens that follow this completion, or None at the end of the episode."""
        ...


@dataclass(slots=True)
class Sample:
    """One episode of a group.

    Attributes:
        number: of the group.
        place: index in the group.
        episode: the environment.
        observation: its last observation.
        context: every observed and generated token so far: nothing is decoded and re-encoded.
        turns: finished turns.
        oldest_step: step of the weights that sampled the oldest token; None before the first.
        engine: of the turn in flight, else of the turn before.
        request_id: of the request in flight; empty between turns.
        partial_output: of the current turn, if an engine aborted it.
        done: whether the episode has ended.
        submitted_s: when the request in flight was submitted.
    """

    number: int
    place: int
    episode: Episode
    observation: tuple[int, ...]
    context: tuple[int, ...]
    turns: list[Turn] = field(default_factory=list)
    oldest_step: int | None = None
    engine: str = ""
    request_id: str = ""
    partial_output: Completion | None = None
    done: bool = False
    submitted_s: float = 0.0

    @property
    def answer(self) -> str:
        """The text that is scored: the completion of the last turn."""
        return self.turns[-1].completion.text

    def finish_turn(self, completion: Completion) -> bool:
        """Finish a turn; return whether the episode is done."""
        self.turns.append(Turn(self.observation, completion))
        self.partial_output = None
        observation = self.episode.step(completion)
        if observation is not None:
            self.observation = observation
            self.context += completion.token_ids + observation
        self.done = observation is None
        return self.done

    @property
    def so_far(self) -> Trajectory:
        """Every turn, including the unfinished one."""
        unfinished = () if self.partial_output is None else (Turn(self.observation, self.partial_output),)
        return Trajectory((*self.turns, *unfinished))

    def restore(self, before: Trajectory) -> bool:
        """Replay `so_far` in a fresh episode; return whether its observations were the same."""
        for turn in before.turns:
            if self.done or turn.observation != self.observation:
                return False
            if turn.completion.finish_reason == "abort":
                self.partial_output = turn.completion
            else:
                self.finish_turn(turn.completion)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class UnfinishedGroup:
    """The state of an unfinished group: its generated turns, and `Sample.oldest_step` of each."""

    group: Group
    oldest_steps: list[int | None]


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
        environment: Callable[[Prompt], Episode],
        num_samples: int,
        before: UnfinishedGroup | None = None,
    ) -> RunningGroup:
        """Start the episodes of a prompt, fresh or from the state `before`.

        An episode whose observations differ from the saved ones starts anew.
        """

        def fresh(place: int) -> Sample:
            episode = environment(prompt)
            observation = episode.observe()
            return Sample(number, place, episode, observation, observation)

        samples = [fresh(place) for place in range(num_samples)]
        if before is not None:
            for place, trajectory in enumerate(before.group.trajectories):
                if samples[place].restore(trajectory):
                    samples[place].oldest_step = before.oldest_steps[place]
                else:
                    samples[place] = fresh(place)
        return cls(prompt, samples)

    @property
    def num_running(self) -> int:
        """Number of episodes that are not done."""
        return sum(not sample.done for sample in self.samples)

    @property
    def so_far(self) -> UnfinishedGroup:
        """The state for a checkpoint, as `begin` takes it."""
        generated = Group(self.prompt, tuple(sample.so_far for sample in self.samples))
        return UnfinishedGroup(generated, [sample.oldest_step for sample in self.samples])

    def unscored(self, num_samples: int) -> Group:
        """Return the finished turns of the first samples; samples without a finished turn are left out."""
        finished = [sample for sample in self.samples[:num_samples] if sample.turns]
        return Group(self.prompt, tuple(Trajectory(tuple(sample.turns)) for sample in finished))

    def scored(self, outcomes: Mapping[str, Outcome]) -> Group:
        """Return the group with the outcome of each answer."""
        trajectories = (Trajectory(tuple(sample.turns), outcomes[sample.answer]) for sample in self.samples)
        return Group(self.prompt, tuple(trajectories))
