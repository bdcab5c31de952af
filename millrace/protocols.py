"""The seams: what a sampler, a trainer, a scorer, an environment, a reward and a transport must do. No torch.

Concrete classes are named in one file only, `run/build.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from millrace.types import Completion, Outcome, Prompt, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from millrace.data.batch import Batch

NamedTensors: TypeAlias = "Iterable[tuple[str, Tensor]]"


class Engine(Protocol):
    """The sampler: tokens in, tokens out."""

    @property
    def version(self) -> int:
        """Of the weights that draw from now on."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Draw one completion for each prompt, in order.

        Raises:
            ValueError: a prompt is empty or, with its `max_tokens`, longer than the model allows.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        skipped: the gradient was not finite, so no weight moved and the version did not change.
        gradient_norm: before clipping, over all weights.
        learning_rate: the one used.
        metrics: the loss, and means over the tokens' shares (entropy, clip_share, ...).
    """

    skipped: bool
    gradient_norm: float
    learning_rate: float
    metrics: dict[str, float]


class Trainer(Protocol):
    """The policy being trained: accumulate gradients, step, publish."""

    version: int

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradient of `(loss_T * weight_T).sum()` over one packed batch.

        Returns:
            log-probability of each chosen token before the update, in packed order, [N].
        """
        ...

    def optim_step(self) -> StepReport:
        """Move the weights by the accumulated gradient and clear it."""
        ...

    def named_tensors(self) -> NamedTensors:
        """Every weight under its Hugging Face name, tied weights once."""
        ...

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, untempered."""
        ...


class Scorer(Protocol):
    """Frozen weights that judge tokens somebody else drew (a reference policy)."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of each chosen token, [T]; 0 where the action mask is not set."""
        ...


class Environment(Protocol):
    """One episode, used once: it speaks first and answers each completion until it is over."""

    def observe(self) -> tuple[int, ...]:
        """The tokens that open the episode."""
        ...

    def step(self, completion: Completion) -> tuple[int, ...] | None:
        """The tokens that follow this completion, or None when the episode is over."""
        ...


class Reward(Protocol):
    """Judges completions. Never raises for what the policy wrote: it returns an invalid or failed outcome."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """One outcome for each completion, in order."""
        ...

    def close(self) -> None:
        """Give back what the reward holds (worker processes)."""
        ...


class WeightTransport(Protocol):
    """Carries named weights from the trainer to the sampler."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last hand-over, for the record of a batch; empty where there is nothing to tell."""
        ...

    def send(self, named_tensors: NamedTensors, version: int) -> None:
        """Deliver every tensor as `version`; return once the receiver holds them.

        Raises:
            WeightSyncError: the receiver does not hold what was sent.
        """
        ...


class RankGroup(Protocol):
    """The ranks of a run, as one of them sees them; each method is called by all of them in step."""

    @property
    def rank(self) -> int:
        """Of this process, counted from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        ...

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank gave, by rank, on every rank."""
        ...

    def hand_out(self, data: bytes = b"") -> bytes:
        """What rank 0 gives, on every rank; the others give nothing."""
        ...

    def share(self, text: str) -> str:
        """The text of rank 0, on every rank."""
        ...

    def threads(self) -> list[int]:
        """Threads that torch computes with, by rank, on every rank."""
        ...
