"""Episodes that are being played, and the groups they make. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from millrace.types import Completion, Group, Outcome, Prompt, Trajectory, Turn


class Episode(Protocol):
    """A `protocols.Environment`."""

    def observe(self) -> tuple[int, ...]:
        """The tokens that open the episode."""
        ...

    def step(self, completion: Completion) -> tuple[int, ...] | None:
        """The tokens that follow this completion, or None when the episode is over."""
        ...


@dataclass(slots=True)
class Sample:
    """One episode of a group.

    Attributes:
        number: of the group.
        place: in the group.
        episode: answers.
        observation: what it said last.
        context: every token given and drawn so far: nothing is decoded and encoded again.
        turns: that are over.
        birth: publishes before the weights that drew the oldest token.
        engine: drew the turn before, or draws this one.
        draw: id of what it draws now; empty between turns.
        asked_s: since when.
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
    asked_s: float = 0.0

    @property
    def said(self) -> str:
        """The answer that is judged: that of the last turn."""
        return self.turns[-1].completion.text

    def play(self, completion: Completion) -> bool:
        """End a turn; whether the episode is over."""
        self.turns.append(Turn(self.observation, completion))
        observation = self.episode.step(completion)
        if observation is not None:
            self.observation = observation
            self.context += completion.token_ids + observation
        return observation is None


@dataclass(slots=True)
class Playing:
    """A group that is being drawn or judged, and how many of its episodes are not over."""

    prompt: Prompt
    samples: list[Sample]
    num_open: int

    @classmethod
    def begin(
        cls, number: int, prompt: Prompt, environment: Callable[[Prompt], Episode], num_samples: int
    ) -> Playing:
        """Fresh episodes of a prompt."""
        samples = []
        for place in range(num_samples):
            episode = environment(prompt)
            observation = episode.observe()
            samples.append(Sample(number, place, episode, observation, observation))
        return cls(prompt, samples, num_samples)

    def unscored(self, num_samples: int) -> Group:
        """What is drawn of the first samples, without those that have no whole turn."""
        played = [sample for sample in self.samples[:num_samples] if sample.turns]
        return Group(self.prompt, tuple(Trajectory(tuple(sample.turns)) for sample in played))

    def scored(self, outcomes: Mapping[str, Outcome]) -> Group:
        """The group, with the outcome of each answer."""
        trajectories = (Trajectory(tuple(sample.turns), outcomes[sample.said]) for sample in self.samples)
        return Group(self.prompt, tuple(trajectories))
