"""Protocols of the components: engine, trainer, scorer, environment, reward, transport. No torch.

Concrete classes are named in one file only, `run/build.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from millrace.types import Action, Completion, Episode, Outcome, Prompt, Reply, SamplingParams, Task

if TYPE_CHECKING:
    from torch import Tensor

    from millrace.data.batch import Batch

NamedTensors: TypeAlias = "Iterable[tuple[str, Tensor]]"


class Engine(Protocol):
    """The sampler: prompt tokens in, completion tokens out."""

    @property
    def version(self) -> int:
        """Policy version of the current weights."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Sample one completion for each prompt, in order.

        ValueError if a prompt is empty or, with its `max_tokens`, longer than the model allows.
        """


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one optimizer step, skipped if the gradient was not finite.

    A skipped step changes no weight and not the version. `grad_norm` is that before clipping, over all
    weights. `metrics` has the loss, and means weighted by the token weights (entropy, clip_fraction, ...).
    """

    skipped: bool
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]


class Trainer(Protocol):
    """The policy being trained: accumulates gradients and updates the weights."""

    version: int

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradient of `(loss_T * weight_T).sum()` over one packed batch.

        Returns the log-probability of each chosen token before the update, in packed order, [N].
        """

    def optim_step(self) -> StepReport:
        """Update the weights with the accumulated gradient and clear it."""

    def named_tensors(self) -> NamedTensors:
        """Yield every weight under its Hugging Face name, tied weights once."""

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1."""


class Scorer(Protocol):
    """Log-probabilities of given tokens under frozen weights (a reference policy)."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probability of each chosen token, [T]; 0 where the action mask is not set."""


class Environment(Protocol):
    """One episode, used once. The methods may be `async def`.

    An environment may have a method `close()`, which is called at the end of the episode. It is pure if its
    class has `pure = True`: its replies depend on the task and the actions alone. A pure one can run in the
    trainer's process, and is repeated from its actions where its worker was lost or the run resumed.
    """

    def begin(self, task: Task) -> Reply | Awaitable[Reply]:
        """Return the first reply, whose text is the prompt."""

    def step(self, action: Action) -> Reply | Awaitable[Reply]:
        """Return the reply to a completion."""


@runtime_checkable
class SavableEnvironment(Environment, Protocol):
    """An environment whose episode a new one can continue."""

    def save(self) -> Any:
        """Return a JSON value after a reply, or None where the episode cannot be saved."""

    def load(self, task: Task, saved: Any) -> Awaitable[None] | None:
        """Continue from there, in place of `begin`."""


class Reward(Protocol):
    """Scores completions. Malformed text never raises: the outcome is then invalid or failed."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """Return one outcome for each completion, in order."""

    def close(self) -> None:
        """Release the reward's resources (worker processes).

        A concurrent call of `score` in another thread ends soon.
        """


class EpisodeReward(Protocol):
    """A reward that may look at whole episodes; every `Reward` of a run is a part of one."""

    @property
    def sees_episodes(self) -> bool:
        """Whether `score` needs the episodes."""

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """Return one outcome for each completion, the last one of its episode, in order."""

    def close(self) -> None:
        """Release the reward's resources (worker processes)."""


class WeightTransport(Protocol):
    """Updates the sampler's weights from tensors of the trainer."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last weight update, for the record of a batch; may be empty."""

    def update_weights(self, tensors: NamedTensors, policy_version: int) -> None:
        """Update the sampler with every tensor; return once it samples with them, under `policy_version`.

        WeightSyncError if the sampler's weights differ from those sent.
        """


class RankGroup(Protocol):
    """The ranks of a run, seen from one of them; methods are collective calls, made by all ranks in step."""

    @property
    def rank(self) -> int:
        """Index of this process, counted from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""

    def all_gather(self, mine: bytes) -> list[bytes]:
        """All-gather bytes: return every rank's `mine`, by rank, on every rank."""

    def broadcast(self, data: bytes = b"") -> bytes:
        """Broadcast bytes from rank 0; the other ranks pass nothing."""

    def broadcast_text(self, text: str) -> str:
        """Broadcast the text of rank 0."""

    def threads(self) -> list[int]:
        """Return the number of torch threads of each rank, by rank, on every rank."""
