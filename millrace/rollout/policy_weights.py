"""The weights that engines are given."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.protocols import NamedTensors, Trainer
from millrace.transport.canary import Canary


class Newest:
    """The weights of whoever trains at the moment it is asked, and what they say of a canary.

    Attributes:
        trainer: who trains; None before anybody does.
    """

    def __init__(self, token_ids: Sequence[int], most: float) -> None:
        """Nobody trains.

        Args:
            token_ids: of the canary.
            most: see `Canary`.
        """
        self.trainer: Trainer | None = None
        self._token_ids, self._most = tuple(token_ids), most

    def __call__(self) -> NamedTensors:
        """Every weight under its name."""
        return self._whoever().named_tensors()

    def canary(self) -> Canary:
        """What the weights say of the canary's tokens; all ranks ask in step."""
        return Canary(self._token_ids, tuple(self._whoever().logprobs_of(self._token_ids)), self._most)

    def _whoever(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("nobody trains yet, so there are no weights to hand over")
        return self.trainer
