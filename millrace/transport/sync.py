"""The sampler's side of a weight update between processes: load, verify, reply.

A transport (`shared_memory.MappedWeights`) delivers the tensors and the sender's manifest. The receiver loads
them into its sampler, compares fingerprints and the log-probabilities of the canary with the sender's, and
replies. A version is verified if the reply holds no error. The sampler must not serve before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.local import LogprobsOf, WeightSyncError, ask, prove

# JSON-compatible.
Note = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One weight update; `closing` has the sender's `fingerprint` and `canary`.

    `named_tensors` are views of the transport's memory, valid until the reply; copy what is to be kept.
    """

    version: int
    named_tensors: Iterator[tuple[str, Tensor]]
    closing: Note


class Incoming(Protocol):
    """The receiver's end of a transport."""

    def take(self) -> WeightUpdate:
        """Return the next weight update."""
        ...

    def answer(self, note: Note) -> None:
        """Reply to the weight update that was taken; its tensors may be overwritten from then on."""
        ...


class WeightReceiver:
    """Loads and verifies weight updates for one sampler, with its `load_weights` and `fingerprint`.

    `version` is the last verified one. Without `logprobs_of` the canary is skipped.
    """

    def __init__(
        self,
        carrier: Incoming,
        load: Callable[[Iterable[tuple[str, Tensor]], int], None],
        held: Callable[[], dict[str, str]],
        logprobs_of: LogprobsOf | None = None,
    ) -> None:
        self._carrier, self._load, self._held, self._logprobs_of = carrier, load, held, logprobs_of
        self.version: int | None = None

    def receive(self) -> int:
        """Load and verify the next weight update, reply, and return its version.

        Raises:
            WeightSyncError: the update was refused or failed verification. The sampler must not serve until a
                later call returns.
        """
        parcel = self._carrier.take()
        try:
            verify_s = self._accept(parcel)
        except (ValueError, WeightSyncError) as error:
            self._carrier.answer({"error": str(error), "verify_s": 0.0})
            raise WeightSyncError(f"version {parcel.version} was refused: {error}") from error
        self.version = parcel.version
        self._carrier.answer({"error": "", "verify_s": verify_s})
        return self.version

    def _accept(self, parcel: WeightUpdate) -> float:
        if self.version is not None and parcel.version < self.version:
            raise WeightSyncError(f"version {parcel.version} was sent after version {self.version}")
        self._load(parcel.named_tensors, parcel.version)
        start = time.perf_counter()
        prove(parcel.closing["fingerprint"], self._held(), parcel.version)
        if parcel.closing["canary"] is not None and self._logprobs_of is not None:
            ask(Canary.of(parcel.closing["canary"]), self._logprobs_of, parcel.version)
        return time.perf_counter() - start
