"""Weight updates within one process: the sampler copies the weights in place and verifies the copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.fingerprint import fingerprint

# A sampler's log-probability of each of these tokens but the first.
LogprobsOf = Callable[[Sequence[int]], Sequence[float]]


class WeightSyncError(RuntimeError):
    """The sampler does not hold, or does not compute with, the weights that were sent."""


def prove(sent: Mapping[str, str], held: Mapping[str, str], version: int) -> None:
    """Compare the fingerprints of trainer and sampler: names, dtypes, shapes and bits of all weights.

    Raises:
        WeightSyncError: they differ; the message names the first weight.
    """
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise WeightSyncError(
            f"after version {version} was sent, {len(wrong)} of {len(sent)} weights differ between "
            f"trainer and sampler, the first being {wrong[0]}"
        )


def ask(canary: Canary, logprobs_of: LogprobsOf, version: int) -> None:
    """Compare the log-probabilities of trainer and sampler on the canary.

    If the trainer's are not finite, the weights have diverged. Then nothing is compared, and generation fails
    with the layer's name.

    Raises:
        WeightSyncError: the mean difference exceeds what rounding explains.
    """
    if not all(map(math.isfinite, canary.logprobs)):
        return
    far = canary.distance(logprobs_of(canary.token_ids))
    # Written so that NaN fails too.
    if not far <= canary.most:
        raise WeightSyncError(
            f"the sampler holds version {version} and computes something else: its log-probabilities of "
            f"{len(canary.logprobs)} tokens are {far:.2g} from the trainer's in the mean, of which rounding "
            f"explains {canary.most:.2g}; where they compute that differently on purpose, raise limits.canary"
        )


class LocalTransport:
    """Updates a sampler in the same process, and verifies its weights and its log-probabilities.

    `load` and `held` are the sampler's `load_weights` and `fingerprint`. `canary` returns the trainer's
    canary under the sent weights.
    """

    def __init__(
        self,
        load: Callable[[Iterable[tuple[str, Tensor]], int], None],
        held: Callable[[], dict[str, str]],
        logprobs_of: LogprobsOf,
        canary: Callable[[], Canary],
    ) -> None:
        self._load = load
        self._held = held
        self._logprobs_of, self._canary = logprobs_of, canary
        self.metrics: dict[str, float] = {}

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Update the sampler to `version`, with one retry; see `protocols.WeightTransport`."""
        # Iterated once: it may all-gather, and other ranks do not take part in a retry.
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
