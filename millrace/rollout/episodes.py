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
        drawn: what is there of the turn that it draws, if an engine gave that away before its end.
        over: whether the episode is.
        asked_s: since when it draws.
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
        """The answer that is judged: that of the last turn."""
        return self.turns[-1].completion.text

    def play(self, completion: Completion) -> bool:
        """End a turn; whether the episode is over."""
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
        """Every turn, the one that is not over among them."""
        unfinished = () if self.drawn is None else (Turn(self.observation, self.drawn),)
        return Trajectory((*self.turns, *unfinished))

    def take_up(self, before: Trajectory) -> bool:
        """Go on from `so_far` in a fresh episode; whether that said the same again."""
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
    """What there is of a group that is not finished: all that is drawn, and `Sample.birth` of each sample."""

    group: Group
    births: list[int | None]


@dataclass(slots=True)
class Playing:
    """A group that is being drawn or judged."""

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
        """Episodes of a prompt: fresh ones, or from where `so_far` was.

        An episode that says something else than it did then begins anew.
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
        """Episodes that are not over."""
        return sum(not sample.over for sample in self.samples)

    @property
    def so_far(self) -> Begun:
        """What a checkpoint keeps, for `begin`."""
        drawn = Group(self.prompt, tuple(sample.so_far for sample in self.samples))
        return Begun(drawn, [sample.birth for sample in self.samples])

    def unscored(self, num_samples: int) -> Group:
        """What is drawn of the first samples, without those that have no whole turn."""
        played = [sample for sample in self.samples[:num_samples] if sample.turns]
        return Group(self.prompt, tuple(Trajectory(tuple(sample.turns)) for sample in played))

    def scored(self, outcomes: Mapping[str, Outcome]) -> Group:
        """The group, with the outcome of each answer."""
        trajectories = (Trajectory(tuple(sample.turns), outcomes[sample.said]) for sample in self.samples)
        return Group(self.prompt, tuple(trajectories))
