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
        birth: policy version of the oldest token; None before the first.
        engine: of the turn in flight, else of the turn before.
        draw: id of the request in flight; empty between turns.
        drawn: partial output of the current turn, if an engine aborted it.
        over: whether the episode has ended.
        asked_s: when the request in flight was submitted.
    """

    number: int
    place: int
    episode: Episode
    observation: tuple[int, ...]
    context: tuple[int, ...]
    turns: list[Turn] = field(default_factory=list)
    birth: int | None = None
    engine: str = ""
    draw: str = ""
    drawn: Completion | None = None
    over: bool = False
    asked_s: float = 0.0

    @property
    def said(self) -> str:
        """The text that is scored: the completion of the last turn."""
        return self.turns[-1].completion.text

    def play(self, completion: Completion) -> bool:
        """Finish a turn; return whether the episode is over."""
        self.turns.append(Turn(self.observation, completion))
        self.drawn = None
        observation = self.episode.step(completion)
        if observation is not None:
            self.observation = observation
            self.context += completion.token_ids + observation
        self.over = observation is None
        return self.over

    @property
    def so_far(self) -> Trajectory:
        """Every turn, including the unfinished one."""
        unfinished = () if self.drawn is None else (Turn(self.observation, self.drawn),)
        return Trajectory((*self.turns, *unfinished))

    def take_up(self, before: Trajectory) -> bool:
        """Replay `so_far` in a fresh episode; return whether its observations were the same."""
        for turn in before.turns:
            if self.over or turn.observation != self.observation:
                return False
            if turn.completion.finish_reason == "abort":
                self.drawn = turn.completion
            else:
                self.play(turn.completion)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """The state of an unfinished group: its generated turns, and `Sample.birth` of each sample."""

    group: Group
    births: list[int | None]


@dataclass(slots=True)
class Playing:
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
        before: Begun | None = None,
    ) -> Playing:
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
                if samples[place].take_up(trajectory):
                    samples[place].birth = before.births[place]
                else:
                    samples[place] = fresh(place)
        return cls(prompt, samples)

    @property
    def num_open(self) -> int:
        """Number of episodes that are not over."""
        return sum(not sample.over for sample in self.samples)

    @property
    def so_far(self) -> Begun:
        """The state for a checkpoint, as `begin` takes it."""
        drawn = Group(self.prompt, tuple(sample.so_far for sample in self.samples))
        return Begun(drawn, [sample.birth for sample in self.samples])

    def unscored(self, num_samples: int) -> Group:
        """Return the finished turns of the first samples; samples without a finished turn are left out."""
        played = [sample for sample in self.samples[:num_samples] if sample.turns]
        return Group(self.prompt, tuple(Trajectory(tuple(sample.turns)) for sample in played))

    def scored(self, outcomes: Mapping[str, Outcome]) -> Group:
        """Return the group with the outcome of each answer."""
        trajectories = (Trajectory(tuple(sample.turns), outcomes[sample.said]) for sample in self.samples)
        return Group(self.prompt, tuple(trajectories))
