"""Host-side values that the components of millrace exchange. No torch.

With `protocols.py`, this file outlines the system: a `Prompt` is sampled into a `Group` of `Trajectory`s,
each a list of `Turn`s. Each turn holds the `Completion` that the engine generated. A reward scores a
completion as an `Outcome`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

# At lower temperatures, the scaled logits of large models lose the digits in which they differ.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one completion.

    The token at position `t` depends only on the distribution, `seed` and `t`, never on its batch. Only
    tokens in `stop_token_ids` end a completion.

    Attributes:
        max_tokens: largest number of sampled tokens.
        temperature: divides the logits; 0 takes the most likely token, whatever top-k, top-p and min-p are.
        top_k: sample from the k most likely tokens only; 0 is off.
        top_p: sample from the smallest set of tokens with this probability mass; 1 is off.
        stop_token_ids: each ends the completion when sampled (the token is kept).
        stop: text that ends the completion (its tokens are kept, its text is not).
        seed: of this completion; any integer, taken modulo 2^64.
        min_tokens: number of tokens before a stop token may be sampled.
        min_p: least probability of a token, as a fraction of the most likely token's; 0 is off.
        repetition_penalty: for every token of the prompt and the completion so far, divides a positive logit
            and multiplies a negative one; 1 is off.
        presence_penalty: subtracted from the logit of every token sampled so far; 0 is off.
        frequency_penalty: subtracted once for each time the token was sampled; 0 is off.
        allowed_token_ids: sample from these only; empty is off.
        forbidden_token_ids: never sample these.
        logit_bias: pairs of a token and a value added to its logit.
        logprobs: `processed` log-probabilities are those of the logits divided by the temperature, before all
            other parameters; `raw` ones are those of the model's logits.
        prompt_logprobs: whether the completion has the log-probabilities of its prompt too.
        prompt_top_tokens: with `prompt_logprobs`, whether it has the most likely token at each place of its
            prompt too.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.

    Source: the penalties are those of vLLM and transformers.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] = ()
    forbidden_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: Literal["processed", "raw"] = "processed"
    prompt_logprobs: bool = False
    prompt_top_tokens: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_tokens()
        if isinstance(self.stop, str):
            raise ValueError(f"stop is the string {self.stop!r}; give a tuple of strings, ({self.stop!r},)")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every completion at once")
        if self.logprobs not in ("processed", "raw"):
            raise ValueError(f"logprobs is {self.logprobs!r}; it must be 'processed' or 'raw'")
        if self.prompt_top_tokens and not self.prompt_logprobs:
            raise ValueError("prompt_top_tokens has no effect without prompt_logprobs; set both")

    def _check_numbers(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens, {self.max_tokens}"
            )
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf):
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or finite, from {MIN_TEMPERATURE}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be between 0 (off) and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is off)"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number")

    def _check_tokens(self) -> None:
        for name, tokens in self.token_ids().items():
            if tokens and min(tokens) < 0:
                raise ValueError(f"{name} holds the token {min(tokens)}; tokens are 0 or more")
        if not (self.allowed_token_ids or self.logit_bias):
            return
        biased, forbidden = {token for token, _ in self.logit_bias}, set(self.forbidden_token_ids)
        if len(biased) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice; give each token one bias")
        for token, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise ValueError(
                    f"logit_bias gives token {token} the bias {bias}; it must be finite "
                    "(forbidden_token_ids and allowed_token_ids rule tokens out)"
                )
        for name, others in (("allowed_token_ids", self.allowed_token_ids), ("logit_bias", biased)):
            if both := forbidden.intersection(others):
                raise ValueError(
                    f"token {min(both)} is in {name} and in forbidden_token_ids; take it out of one"
                )
        if (
            self.allowed_token_ids
            and self.min_tokens
            and set(self.allowed_token_ids) <= {*self.stop_token_ids}
        ):
            raise ValueError(
                f"every token of allowed_token_ids is a stop token, so min_tokens, {self.min_tokens}, "
                "leaves nothing to sample"
            )

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Return every token named here, by field."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "forbidden_token_ids": self.forbidden_token_ids,
            "logit_bias": tuple(token for token, _ in self.logit_bias),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The candidate tokens of each sampled token of a completion, where sampling was truncated.

    Attributes:
        token_ids: int32 [sum of counts], ascending within each position.
        counts: int32 [tokens of the completion], number of candidates at each position.
        logprobs: float32 [tokens of the completion], log-probability of the sampled token among the
            candidates, scaled by the temperature or raw like the completion's own.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    logprobs: np.ndarray

    def __post_init__(self) -> None:
        if len(self.token_ids) != self.counts.sum():
            raise ValueError(
                f"support has {len(self.token_ids)} tokens, but its counts add up to {int(self.counts.sum())}"
            )
        if len(self.logprobs) != len(self.counts):
            raise ValueError(
                f"support has {len(self.counts)} counts and {len(self.logprobs)} logprobs; the two must agree"
            )

    @classmethod
    def joined(cls, parts: Sequence[Support]) -> Support:
        """Return the support of the tokens of all parts, of which there is at least one."""
        columns = ([getattr(part, name) for part in parts] for name in ("token_ids", "counts", "logprobs"))
        return cls(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The most likely token at each of N places, int32 [N], and its log-probability, float32 [N]."""

    token_ids: np.ndarray
    logprobs: np.ndarray

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"there are {len(self.token_ids)} top tokens and {len(self.logprobs)} log-probabilities of "
                "them; the two must agree"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The engine's response: tokens, and for each its log-probability and policy version.

    Attributes:
        token_ids: all sampled tokens, with the stop token.
        logprobs: float32 [len(token_ids)], of the distribution scaled by the temperature (before all other
            sampling parameters), which is what the trainer recomputes; raw ones, if requested.
        versions: int32 [len(token_ids)], the policy version that sampled each token.
        finish_reason: `stop` (stop token or string), `length`, `abort` (cancelled) or `error` (failed; see
            `reason`).
        text: the decoded tokens without special tokens, cut at the stop string.
        support: the candidates of each token; None unless top-k, top-p, min-p or allowed tokens truncate.
        prompt_logprobs: float32 [tokens of the prompt - 1], log-probability of each prompt token given those
            before it (the first has none), processed or raw as `logprobs`; None unless requested.
        prompt_top: the most likely token at each of these places; None unless requested.
        experts: int16 [tokens of prompt and completion, layers with a router, experts of a token], the
            experts of each token in a mixture of experts; -1 for a token that was not computed, such as the
            last one sampled. None unless the engine records them.
        reason: of the abort or the failure.
    """

    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length", "abort", "error"]
    text: str
    support: Support | None = None
    prompt_logprobs: np.ndarray | None = None
    prompt_top: TopTokens | None = None
    experts: np.ndarray | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"completion has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probabilities and "
                f"{len(self.versions)} versions; the three must agree"
            )
        if self.support is not None and len(self.support.counts) != len(self.token_ids):
            raise ValueError(
                f"completion has {len(self.token_ids)} tokens, its support is of {len(self.support.counts)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt: its rendered text and tokens, and what a reward needs to score a completion.

    The id is stable within the data set, such as `train:17`. The answer is empty if there is none. `row` is
    the source row, for rewards that need more; `demonstration` a completion to imitate (supervised training),
    or the completions and replies of an episode in turn. `source` is the name of its entry in
    `data.sources`, empty without.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    demonstration: str | tuple[str, ...] | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of scoring one completion. A failure of the reward is never a score of zero.

    Attributes:
        kind: `score` (scored), `invalid` (no answer could be parsed from the completion; `value` is what the
            recipe sets for that), or `failed` (the reward itself raised, hung or returned no number).
        value: the reward; NaN where `kind` is `failed`.
        reason: of an invalid answer or a failure.
        parts: the value of each named component where several were combined.
        extras: what rewards returned beside their scores, by `NAME/KEY`: finite numbers, and texts.
    """

    kind: Literal["score", "invalid", "failed"]
    value: float
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, float | str] = field(default_factory=dict)

    @classmethod
    def failure(cls, reason: str) -> Outcome:
        """Return an outcome for a reward that failed."""
        return cls("failed", float("nan"), reason)


@dataclass(frozen=True, slots=True)
class Task:
    """What an environment is given to begin an episode.

    Attributes:
        prompt: the rendered text of the row's prompt.
        answer: of the row; empty if there is none.
        row: the source row.
        seed: the same for all samples of a group, so that they play the same task.
        sample: index in the group.
        max_turns: completions after which the episode ends.
    """

    prompt: str
    answer: str
    row: Mapping[str, Any]
    seed: int
    sample: int
    max_turns: int


@dataclass(frozen=True, slots=True)
class Action:
    """One completion of the policy, as an environment gets it.

    Attributes:
        text: without special tokens.
        token_ids: as sampled.
        finish_reason: `stop`, or `length` if it ran out of tokens.
        message: the completion as the assistant's message, read from its tokens in the format
            `environment.tool_format`: `role`, `content`, and where there are any `reasoning_content` and
            `tool_calls`, each `{"type": "function", "id", "function": {"name", "arguments"}}`, the arguments
            an object that fits the tool's schema. None without a format.
        status: `ok`, or `invalid_json`, `unclosed` or `unknown_tool` if something after the calls of the
            message cannot be used; see `data.tool_calls.Parsed`.
        error: why it cannot, for the policy to read.
        num_context_tokens: tokens of its branch before the completion.
        logprobs: log-probability of each token under the weights that sampled it; of the newest completion of
            an agent program alone.
        token_texts: each token as text, likewise.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    message: Mapping[str, Any] | None = None
    status: str = "ok"
    error: str = ""
    num_context_tokens: int = 0
    logprobs: tuple[float, ...] = ()
    token_texts: tuple[str, ...] = ()


# In the place of a completion that something follows: none, so that the policy reads it as the first.
ROOT = -1


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of an environment: what the policy reads next, or the end of the episode.

    Attributes:
        text: what follows the completion; None at the begin of an episode is the row's prompt.
        reward: for the completion that this replies to.
        state: name of the state that the policy acts in next, for advantages that compare equal states.
        progress: how near that state is to the goal, for advantages by its changes; an episode begins at 0,
            and None is not known. It is no reward.
        done: whether the episode has ended.
        score: score of the episode, added to its rewards; only with `done`.
        messages: in place of `text`, messages that follow the completion, or that open the episode: each
            `role`, `content`, and what tools need (see `data.chat.read_messages`).
        tools: at the begin of an episode and with `after`, the tools that the chat template shows and that
            calls are read by, in place of those of the row (see `data.tool_schema.read_tools`).
        invalid: why the episode is invalid, which is the policy's fault; only with `done`. The score is then
            `environment.invalid_score`.
        calls: number of tool calls of the completion that were run; None if the environment has no tools.
        invalid_calls: number of those that could not be run.
        after: index of the completion that the policy reads this behind, counted from 0 in the episode; with
            another one than the newest the episode branches, and `ROOT` begins a context anew. None is the
            newest.
        verbatim: whether `text` becomes tokens as it is, special tokens in it too, whatever the template.
        token_ids: in place of `text`, tokens that follow.
        refused: requests of a program for a further branch that were refused, see
            `environment.max_branches`.
    """

    text: str | None = None
    reward: float = 0.0
    state: str = ""
    done: bool = False
    score: float = 0.0
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    invalid: str = ""
    calls: int | None = None
    invalid_calls: int = 0
    progress: float | None = None
    after: int | None = None
    verbatim: bool = False
    token_ids: tuple[int, ...] | None = None
    refused: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn: the environment's tokens (`observation`) and the policy's completion.

    Attributes:
        reward: the environment's reward for this completion, in addition to the outcome of the episode.
        state: the environment's name for the state in which the policy acted; empty if it gives none.
        calls: number of tool calls of this completion that were run; None if the environment has no tools.
        invalid_calls: number of those that could not be run.
        progress: how near the state after this completion is to the goal; None if that is not known.
        after: index of the turn behind whose tokens the observation is read, `ROOT` for none; None is the
            turn before.
        refused: requests for a further branch that were refused after this turn.
    """

    observation: tuple[int, ...]
    completion: Completion
    reward: float = 0.0
    state: str = ""
    calls: int | None = None
    invalid_calls: int = 0
    progress: float | None = None
    after: int | None = None
    refused: int = 0


def parents(turns: Sequence[Turn]) -> list[int]:
    """Return the index of the turn that each turn follows, or `ROOT`."""
    return [at - 1 if turn.after is None else turn.after for at, turn in enumerate(turns)]


def path_to(turns: Sequence[Turn], last: int) -> list[int]:
    """Return the indices of the turns that the policy sees behind turn `last`, that turn included, in order.

    Empty for `ROOT`.
    """
    parent, path = parents(turns[: last + 1]), []
    while last != ROOT:
        path.append(last)
        last = parent[last]
    return path[::-1]


# By its environment; by its environment, for a fault of the policy; by a completion that ran out of tokens;
# by the limit of turns, or of tokens; because the environment failed.
EPISODE_ENDS = ("done", "invalid", "length", "max_turns", "context", "failed")


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode: turns in order, and the outcome once it is scored.

    Turns form a tree. Each leaf ends a branch: a sequence of exact tokens that begins at a root. A turn that
    branches share has its tokens once.

    Attributes:
        turns: empty only if the environment failed before the first completion.
        outcome: of the episode.
        end: why the episode ended, one of `EPISODE_ENDS`; empty without an environment.
    """

    turns: tuple[Turn, ...]
    outcome: Outcome | None = None
    end: str = ""

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """The turns of each branch, by index, in the order of their last turns."""
        parent = parents(self.turns)
        inner = set(parent)
        return tuple(tuple(path_to(self.turns, at)) for at in range(len(parent)) if at not in inner)

    @property
    def num_roots(self) -> int:
        """Number of turns that follow none: the first, and those that begin a context anew."""
        return parents(self.turns).count(ROOT)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the episode, observations included, each once."""
        return sum(len(turn.observation) + len(turn.completion.token_ids) for turn in self.turns)

    @property
    def num_actions(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Reward of each turn, the outcome's value added to the last; ValueError without an outcome."""
        if self.outcome is None:
            raise ValueError("a trajectory without an outcome has no rewards yet; score it first")
        if not self.turns:
            return ()
        *before, last = [turn.reward for turn in self.turns]
        # Adding 0 would turn an outcome of -0.0 into 0.0.
        return (*before, self.outcome.value + last if last else self.outcome.value)

    @property
    def episode_return(self) -> float:
        """Sum of the turn rewards and the outcome's value, undiscounted; NaN where the outcome failed."""
        if not self.turns and self.outcome is not None:
            return self.outcome.value
        *before, last = self.turn_rewards
        return sum((reward for reward in before if reward), last)

    @property
    def text(self) -> str:
        """Text of the policy's last completion; empty without one."""
        return self.turns[-1].completion.text if self.turns else ""

    @property
    def finish_reason(self) -> str:
        """Finish reason of the policy's last completion; empty without one."""
        return self.turns[-1].completion.finish_reason if self.turns else ""

    def scored(self, outcome: Outcome) -> Trajectory:
        """Return this trajectory with an outcome."""
        return replace(self, outcome=outcome)


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """One turn of an episode as text, for a reward.

    Attributes:
        observation: what the policy read: the prompt, or the environment's reply.
        completion: without special tokens.
        observation_tokens: number of tokens of the observation.
        completion_tokens: number of sampled tokens; 0 in a reference answer.
        finish_reason: `stop`, or `length` if it ran out of tokens.
        reward: of the environment for this completion.
    """

    observation: str
    completion: str
    observation_tokens: int
    completion_tokens: int
    finish_reason: str
    reward: float


@dataclass(frozen=True, slots=True)
class Episode:
    """A whole episode as text, for a reward; without an environment it has one turn.

    Attributes:
        turns: in order.
        end: why it ended, one of `EPISODE_ENDS`; empty without an environment.
        score: of the environment.
    """

    turns: tuple[EpisodeTurn, ...]
    end: str = ""
    score: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
