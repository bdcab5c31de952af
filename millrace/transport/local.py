"""Weights within one process: the sampler copies them in place, and the copy is proved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.fingerprint import fingerprint

# The log-probability of each of these tokens but the first, as a sampler computes it.
LogprobsOf = Callable[[Sequence[int]], Sequence[float]]


class WeightSyncError(RuntimeError):
    """The sampler does not hold the weights that were sent."""


def prove(sent: Mapping[str, str], held: Mapping[str, str], version: int) -> None:
    """Compare the fingerprints of both sides: count, names, dtypes, shapes and bits of all weights.

    Raises:
        WeightSyncError: they differ, with the first name that does.
    """
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise WeightSyncError(
            f"after version {version} was sent, {len(wrong)} of {len(sent)} weights differ between "
            f"trainer and sampler, the first being {wrong[0]}"
        )


def ask(canary: Canary, logprobs_of: LogprobsOf, version: int) -> None:
    """Compare what a sampler says of the canary with what the trainer does.

    Where that is no number, the weights have grown without bound; draws then fail with the layer's name.

    Raises:
        WeightSyncError: they are further apart than rounding explains.
    """
    if not all(map(math.isfinite, canary.logprobs)):
        return
    far = canary.distance(logprobs_of(canary.token_ids))
    # Not a number is too far as well.
    if not far <= canary.most:
        raise WeightSyncError(
            f"the sampler holds version {version} and computes something else: its log-probabilities of "
            f"{len(canary.logprobs)} tokens are {far:.2g} from the trainer's in the mean, of which rounding "
            f"explains {canary.most:.2g}; where they compute that differently on purpose, raise limits.canary"
        )


class LocalTransport:
    """Hands tensors to a sampler in the same process, and compares what both sides hold and compute."""

    def __init__(
        self,
        load: Callable[[Iterable[tuple[str, Tensor]], int], None],
        held: Callable[[], dict[str, str]],
        logprobs_of: LogprobsOf,
        canary: Callable[[], Canary],
    ) -> None:
        """A transport to one sampler.

        Args:
            load: the sampler's `load_weights`.
            held: the sampler's `fingerprint`.
            logprobs_of: the sampler's.
            canary: the trainer's, of the weights that are sent.
        """
        self._load = load
        self._held = held
        self._logprobs_of, self._canary = logprobs_of, canary
        self.metrics: dict[str, float] = {}

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Deliver every tensor as `version`, twice if need be; see `protocols.WeightTransport`."""
        # Taken once: where ranks gather them together, the others do not know of a second attempt.
        sent, canary = list(named_tensors), self._canary()
        try:
            self._hand_over(sent, canary, version)
        except WeightSyncError:
            try:
                self._hand_over(sent, canary, version)
            except WeightSyncError as error:
                raise WeightSyncError(f"{error}; it was tried twice") from error

    def _hand_over(self, sent: list[tuple[str, Tensor]], canary: Canary, version: int) -> None:
        try:
            self._load(sent, version)
        except ValueError as error:
            raise WeightSyncError(f"the sampler refused version {version}: {error}") from error
        prove(fingerprint(sent), self._held(), version)
        ask(canary, self._logprobs_of, version)
