"""How strongly the policy is held to the reference: a coefficient, fixed or steered to a target."""

from __future__ import annotations

from millrace.algorithms.kl import adaptive_coefficient


class KlControl:
    """The coefficient of a KL penalty, shared by all its users; without a target it is constant.

    Over `horizon` sequences, a deviation of 20 % from the target would move it by as much.
    """

    def __init__(self, coefficient: float, *, target: float | None = None, horizon: int = 10_000) -> None:
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
