"""The policy weights that engines load."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.protocols import NamedTensors, Trainer
from millrace.transport.canary import Canary


class PolicyWeights:
    """The current weights of the active trainer, and the canary computed with them."""

    def __init__(self, token_ids: Sequence[int], most: float) -> None:
        """Start without a trainer.

        Args:
            token_ids: of the canary.
            most: see `Canary`.
        """
        self._trainer: Trainer | None = None
        self._token_ids, self._most = tuple(token_ids), most

    def activate(self, trainer: Trainer) -> None:
        """Take the weights from this trainer from now on."""
        self._trainer = trainer

    def __call__(self) -> NamedTensors:
        """Return every weight with its name."""
        return self._active_trainer().named_tensors()

    def canary(self) -> Canary:
        """Compute the canary: log-probabilities of its tokens. A collective call of all ranks."""
        return Canary(self._token_ids, tuple(self._active_trainer().logprobs_of(self._token_ids)), self._most)

    def _active_trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("no trainer is active yet, so there are no weights to send")
        return self._trainer
