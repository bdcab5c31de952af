"""The engine's side of a weight update: update the engine, and verify that it samples with the weights.

`LocalTransport` does so in the trainer's process. For an engine in another process, a transport
(`shared_memory.MappedWeights`) delivers each `WeightUpdate` to a `WeightReceiver`, which updates the engine
and replies. An engine must not generate before a weight update is verified.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.fingerprint import fingerprint

# An engine's `update_weights(tensors, policy_version)`.
EngineUpdate = Callable[[Iterable[tuple[str, Tensor]], int], None]
# An engine's log-probability of each of these tokens but the first.
LogprobsOf = Callable[[Sequence[int]], Sequence[float]]


class WeightSyncError(RuntimeError):
    """The sampler does not hold, or does not compute with, the weights that were sent."""


class LocalTransport:
    """Updates an engine in the same process, and verifies its weights and its log-probabilities.

    `update_weights` and `fingerprint` are the engine's. `canary` returns the trainer's canary under the sent
    weights.

    Where ranks share an engine, `take` yields this rank's shards of the sent weights, which are loaded and
    verified, and `agree` is a collective call: given why this rank's shards failed, or an empty text, it
    returns one reason on all ranks, or an empty text.
    """

    def __init__(
        self,
        update_weights: EngineUpdate,
        fingerprint: Callable[[], dict[str, str]],
        logprobs_of: LogprobsOf,
        canary: Callable[[], Canary],
        *,
        take: Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]] = iter,
        agree: Callable[[str], str] = str,
    ) -> None:
        self._update_engine, self._fingerprint = update_weights, fingerprint
        self._logprobs_of, self._canary = logprobs_of, canary
        self._take, self._agree = take, agree
        self.metrics: dict[str, float] = {}

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Update and verify the engine, with one retry; see `protocols.WeightTransport`."""
        # Iterated once: it may all-gather, and other ranks do not take part in a retry.
        sent, canary = list(self._take(tensors)), self._canary()
        try:
            self._try_update(sent, canary, policy_version)
        except WeightSyncError:
            try:
                self._try_update(sent, canary, policy_version)
            except WeightSyncError as error:
                raise WeightSyncError(f"{error}; it was tried twice") from error

    def _try_update(self, sent: list[tuple[str, Tensor]], canary: Canary, policy_version: int) -> None:
        failed: WeightSyncError | None = None
        try:
            self._load(sent, policy_version)
        except WeightSyncError as error:
            failed = error
        problem = self._agree("" if failed is None else str(failed))
        if problem:
            raise WeightSyncError(problem) from (failed and failed.__cause__)
        check_canary(canary, self._logprobs_of, policy_version)

    def _load(self, sent: list[tuple[str, Tensor]], policy_version: int) -> None:
        try:
            self._update_engine(sent, policy_version)
        except ValueError as error:
            raise WeightSyncError(f"the sampler refused version {policy_version}: {error}") from error
        check_fingerprint(fingerprint(sent), self._fingerprint(), policy_version)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One weight update as it reaches an engine's process.

    Attributes:
        policy_version: of the weights.
        tensors: every weight by name. They may be views of the transport's memory, valid until the reply;
            copy what is to be kept.
        fingerprint: the trainer's checksum of each weight.
        canary: the trainer's canary; None for no check.
    """

    policy_version: int
    tensors: Iterator[tuple[str, Tensor]]
    fingerprint: Mapping[str, str]
    canary: Canary | None


class Incoming(Protocol):
    """The end of a transport in the engine's process."""

    def take(self) -> WeightUpdate:
        """Return the next weight update."""
        ...

    def answer(self, error: str, verify_s: float, /) -> None:
        """Reply to the weight update that was taken; its tensors may be overwritten from then on.

        Args:
            error: why it was refused; empty if it is verified.
            verify_s: seconds that verification took.
        """
        ...


class WeightReceiver:
    """Updates and verifies one engine, with its `update_weights` and `fingerprint`.

    `version` is the last verified one. Without `logprobs_of` the canary is skipped.
    """

    def __init__(
        self,
        transport: Incoming,
        update_weights: EngineUpdate,
        fingerprint: Callable[[], dict[str, str]],
        logprobs_of: LogprobsOf | None = None,
    ) -> None:
        self._transport, self._update_engine = transport, update_weights
        self._fingerprint, self._logprobs_of = fingerprint, logprobs_of
        self.version: int | None = None

    def update_weights(self) -> int:
        """Take the next weight update, update and verify the engine, reply, and return the policy version.

        Raises:
            WeightSyncError: the update was refused or failed verification. The engine must not generate until
                a later call returns.
        """
        update = self._transport.take()
        try:
            verify_s = self._accept(update)
        except (ValueError, WeightSyncError) as error:
            self._transport.answer(str(error), 0.0)
            raise WeightSyncError(f"version {update.policy_version} was refused: {error}") from error
        self.version = update.policy_version
        self._transport.answer("", verify_s)
        return self.version

    def _accept(self, update: WeightUpdate) -> float:
        version = update.policy_version
        if self.version is not None and version < self.version:
            raise WeightSyncError(f"version {version} was sent after version {self.version}")
        self._update_engine(update.tensors, version)
        start = time.perf_counter()
        check_fingerprint(update.fingerprint, self._fingerprint(), version)
        if update.canary is not None and self._logprobs_of is not None:
            check_canary(update.canary, self._logprobs_of, version)
        return time.perf_counter() - start


def check_fingerprint(sent: Mapping[str, str], held: Mapping[str, str], version: int) -> None:
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


def check_canary(canary: Canary, logprobs_of: LogprobsOf, version: int) -> None:
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
