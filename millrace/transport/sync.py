"""The receiving half of weights between processes: loaded, proved, and answered for.

A carrier (`memory.MappedWeights`) brings tensors and what the sender says of them. The receiver lets its
sampler load what comes, compares the fingerprints of what the sampler then holds with the sender's, has it
judge the canary, and answers. A version is proved once that answer holds no error, and the sampler serves
nothing before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.local import LogprobsOf, WeightSyncError, ask, prove

# What can be written as JSON.
Note = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a carrier brings.

    Attributes:
        version: of the weights.
        named_tensors: they lie in the carrier's memory until the answer: who keeps one copies it.
        closing: what the sender said of them: `fingerprint` and `canary`.
    """

    version: int
    named_tensors: Iterator[tuple[str, Tensor]]
    closing: Note


class Incoming(Protocol):
    """A receiver's end of a carrier."""

    def take(self) -> Parcel:
        """The next parcel."""
        ...

    def answer(self, note: Note) -> None:
        """Answer the parcel that was taken; its tensors may be overwritten from then on."""
        ...


class WeightReceiver:
    """A sampler's half.

    Attributes:
        version: the last that was proved; None before the first.
    """

    def __init__(
        self,
        carrier: Incoming,
        load: Callable[[Iterable[tuple[str, Tensor]], int], None],
        held: Callable[[], dict[str, str]],
        logprobs_of: LogprobsOf | None = None,
    ) -> None:
        """A receiver for one sampler.

        Args:
            carrier: brings the tensors.
            load: the sampler's `load_weights`.
            held: the sampler's `fingerprint`.
            logprobs_of: the sampler's, for a canary; None for one that can judge none.
        """
        self._carrier, self._load, self._held, self._logprobs_of = carrier, load, held, logprobs_of
        self.version: int | None = None

    def receive(self) -> int:
        """Load the next version, in place of whatever the sampler held, and answer.

        Returns:
            The version; it is proved.

        Raises:
            WeightSyncError: what came is not what was sent; the sampler must not serve until a later call has
                returned.
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

    def _accept(self, parcel: Parcel) -> float:
        """Load and prove; the seconds that the proof took."""
        if self.version is not None and parcel.version < self.version:
            raise WeightSyncError(f"version {parcel.version} was sent after version {self.version}")
        self._load(parcel.named_tensors, parcel.version)
        start = time.perf_counter()
        prove(parcel.closing["fingerprint"], self._held(), parcel.version)
        if parcel.closing["canary"] is not None and self._logprobs_of is not None:
            ask(Canary.of(parcel.closing["canary"]), self._logprobs_of, parcel.version)
        return time.perf_counter() - start
