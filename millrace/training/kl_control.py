"""How strongly the policy is held to the reference: a coefficient, fixed or steered to a target."""

from __future__ import annotations

from millrace.algorithms.kl import adaptive_coefficient


class KlControl:
    """The coefficient of a KL penalty, shared by all its users."""

    def __init__(self, coefficient: float, *, target: float | None = None, horizon: int = 10_000) -> None:
        """A coefficient at its start.

        Args:
            coefficient: factor of the divergence.
            target: divergence to steer to; None keeps the coefficient.
            horizon: sequences over which a deviation of 20 % would move the coefficient by as much.
        """
        self.coefficient = coefficient
        self._target = target
        self._horizon = horizon

    def update(self, divergence: float, num_sequences: int) -> None:
        """Steer by the divergence that a batch of sequences had."""
        if self._target is not None:
            self.coefficient = adaptive_coefficient(
                self.coefficient,
                divergence,
                target=self._target,
                horizon=self._horizon,
                num_sequences=num_sequences,
            )
