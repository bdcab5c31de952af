"""Host-side values that travel between the parts of millrace. No torch.

After this file and `protocols.py` you know the system: a `Prompt` is sampled into a `Group` of
`Trajectory`s, each a list of `Turn`s, each holding the `Completion` that the engine drew; a reward turns
a completion into an `Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is drawn.

    The token at position `t` depends on the distribution, `seed` and `t` alone, never on its batch.

    Attributes:
        max_tokens: at most so many tokens are drawn.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only; 0 is off.
        top_p: draw among the smallest set of tokens that holds this probability mass; 1 is off.
        stop_token_ids: drawing one of these ends the completion (the token is kept).
        stop: text that ends the completion (its tokens are kept, its text is not).
        seed: of this one completion.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values no distribution has."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every completion at once")


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the engine drew for one request: tokens, and for each its log-probability and weight version.

    Attributes:
        token_ids: every token drawn, the one that ended it included.
        logprobs: float32 [len(token_ids)], of the distribution divided by the temperature (before top-k and
            top-p), which is what the trainer recomputes.
        versions: int32 [len(token_ids)], the weight version that drew each token.
        finish_reason: `stop` (stop token or string) or `length`.
        text: the decoded tokens without special tokens, cut at the stop string.
    """

    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length"]
    text: str

    def __post_init__(self) -> None:
        """Refuse a completion whose arrays do not fit its tokens."""
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"completion has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probabilities and "
                f"{len(self.versions)} versions; the three must agree"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One problem: the tokens the policy sees and what a reward needs to judge its answer.

    Attributes:
        id: stable within the data set, such as `train:17`.
        token_ids: the rendered prompt, tokenised once.
        text: the rendered prompt.
        answer: the reference answer, empty if there is none.
        row: the source row, for rewards that want more than the answer.
        demonstration: a completion to imitate (supervised training), if the data has one.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    demonstration: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reward says of one answer. A failure of the reward is never a score of zero.

    Attributes:
        kind: `score` (judged), `invalid` (no answer could be read from the completion; `value` is what the
            recipe gives for that), or `failed` (the reward itself raised, hung or returned no number).
        value: the reward; NaN where `kind` is `failed`.
        reason: why the answer is invalid or the reward failed.
        parts: the value of each named component where several were combined.
    """

    kind: Literal["score", "invalid", "failed"]
    value: float
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def failure(cls, reason: str) -> Outcome:
        """An outcome that says the reward itself failed."""
        return cls("failed", float("nan"), reason)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the environment gave (`observation`, tokens) and what the policy said to it."""

    observation: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode: turns in order, and the outcome once it has been scored."""

    turns: tuple[Turn, ...]
    outcome: Outcome | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole episode, observations included."""
        return sum(len(turn.observation) + len(turn.completion.token_ids) for turn in self.turns)

    @property
    def num_actions(self) -> int:
        """Tokens the policy chose."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def text(self) -> str:
        """What the policy said in its last turn."""
        return self.turns[-1].completion.text

    def scored(self, outcome: Outcome) -> Trajectory:
        """This trajectory with its outcome."""
        return replace(self, outcome=outcome)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
