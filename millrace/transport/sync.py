"""Weights between processes: a sender, a receiver, and a proof at the end of every hand-over.

A carrier moves tensors and does not know what they are (`folder`, `broadcast`). On top of it the sender
says what it sends, takes a fingerprint of each weight as it passes, and waits for the answer of every
receiver. The receiver lets its sampler load what comes, compares the fingerprints of what the sampler then
holds with the sender's, and answers. A version is proved once that answer holds no error, and the sampler
serves nothing before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.transport.canary import Canary
from millrace.transport.delta import Delta
from millrace.transport.fingerprint import digest
from millrace.transport.local import LogprobsOf, WeightSyncError, ask, prove

# What can be written as JSON.
Note = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a carrier brings.

    Attributes:
        opening: what the sender said before the tensors.
        named_tensors: they lie in the carrier's memory until the answer: who keeps one copies it.
        closing: what the sender said after them; called once they have all been taken.
    """

    opening: Note
    named_tensors: Iterator[tuple[str, Tensor]]
    closing: Callable[[], Note]


class Refused(WeightSyncError):
    """A receiver does not hold what was sent."""


class Outgoing(Protocol):
    """The sender's end of a carrier."""

    device: torch.device

    def put(
        self, opening: Note, named_tensors: Iterable[tuple[str, Tensor]], closing: Callable[[], Note]
    ) -> int:
        """Send a parcel.

        Args:
            opening: said before the tensors.
            named_tensors: any number, taken one by one.
            closing: asked for when the tensors have been taken.

        Returns:
            bytes of the tensors.
        """
        ...

    def answers(self) -> list[Note]:
        """What each receiver answered to the last parcel.

        Raises:
            WeightSyncError: one of them did not, in time.
        """
        ...


class Incoming(Protocol):
    """A receiver's end of a carrier."""

    def take(self) -> Parcel:
        """Wait for the next parcel.

        Raises:
            WeightSyncError: none came in time.
        """
        ...

    def answer(self, note: Note) -> None:
        """Answer the parcel that was taken; its tensors may be overwritten from then on."""
        ...


class WeightSender:
    """The trainer's half; a `protocols.WeightTransport`.

    Attributes:
        metrics: of the last hand-over: `sync/payload_bytes`; `sync/payload_share`, of the bytes of all
            weights; `time/verify_s`, seconds of fingerprints on this side and on the slowest receiver's.
    """

    def __init__(
        self, carrier: Outgoing, *, delta: bool = False, canary: Callable[[], Canary] | None = None
    ) -> None:
        """A sender to every receiver of a carrier.

        Args:
            carrier: moves the tensors.
            delta: send only what changed since the last proved version; costs both sides a copy on the host.
            canary: the trainer's, of the weights that are sent; asked for when they have been taken.
        """
        self._canary = canary
        self._carrier = carrier
        self._delta = Delta() if delta else None
        self.metrics: dict[str, float] = {}

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Deliver every tensor as `version`, proved by every receiver; see `protocols.WeightTransport`.

        Where a receiver refuses it, a collection, such as a list, is sent to all once more, whole. An
        iterator is spent: where ranks gathered it together, all of them would have to begin again.

        Raises:
            Refused: a receiver refused it, of a collection twice.
            WeightSyncError: it could not be sent, or a receiver did not answer.
        """
        if not isinstance(named_tensors, Collection):
            self._attempt(named_tensors, version, again=False)
            return
        try:
            self._attempt(named_tensors, version, again=True)
        except Refused:
            try:
                self._attempt(named_tensors, version, again=False)
            except Refused as error:
                raise Refused(f"{error}; it was tried twice") from error

    def _attempt(self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, again: bool) -> None:
        """Send it once; `again` tells receivers to wait for another attempt if they refuse this one."""
        delta = self._delta
        opening = {
            "version": version,
            "again": again,
            "delta": delta is not None,
            "base": None if delta is None else delta.version,
        }
        with ThreadPoolExecutor(1) as pool:
            watched = Watched(named_tensors, self._carrier.device, pool)
            payload = watched.pass_on() if delta is None else delta.encode(watched.pass_on())
            num_bytes = self._carrier.put(opening, payload, lambda: self._proof(watched))
        answers = self._carrier.answers()
        refused = [(place, answer["error"]) for place, answer in enumerate(answers) if answer["error"]]
        if refused:
            place, error = refused[0]
            others = "" if len(answers) == 1 else f" ({len(refused)} of {len(answers)} samplers did)"
            raise Refused(f"sampler {place} refused version {version}{others}: {error}")
        if delta is not None:
            delta.version = version
        self.metrics = {
            "sync/payload_bytes": num_bytes,
            "sync/payload_share": num_bytes / max(watched.num_bytes, 1),
            "time/verify_s": watched.seconds + max(answer["verify_s"] for answer in answers),
        }

    def _proof(self, watched: Watched) -> Note:
        canary = None if self._canary is None else self._canary().note()
        return {"fingerprint": watched.digests(), "canary": canary}


class Watched:
    """Tensors on their way to a carrier, of which a fingerprint is taken while the carrier works."""

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        device: torch.device,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Nothing has passed yet.

        Args:
            named_tensors: the weights, each name once; none may change before `digests` has returned.
            device: where the carrier wants them.
            pool: of one thread.
        """
        self._named_tensors, self._device, self._pool = named_tensors, device, pool
        self._digests: dict[str, Future[str]] = {}
        self.num_bytes, self.seconds = 0, 0.0

    def pass_on(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor.

        Raises:
            WeightSyncError: a name was given twice.
        """
        for name, tensor in self._named_tensors:
            if name in self._digests:
                raise WeightSyncError(f"weight {name} was given twice")
            there = tensor.detach().to(self._device)
            self.num_bytes += there.nbytes
            self._digests[name] = self._pool.submit(self._digest, there)
            yield name, there

    def digests(self) -> dict[str, str]:
        """The fingerprint of each tensor that has passed."""
        return {name: taken.result() for name, taken in self._digests.items()}

    def _digest(self, tensor: Tensor) -> str:
        start = time.perf_counter()
        found = digest(tensor)
        self.seconds += time.perf_counter() - start
        return found


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
        self._delta = Delta()
        self.version: int | None = None

    def receive(self) -> int:
        """Wait for a version and load it, in place of whatever the sampler held.

        What is refused is waited for once more where the sender sends it again. It sends it to all: who had
        proved it gets the same version in the next call.

        Returns:
            The version; it is proved.

        Raises:
            WeightSyncError: nothing came in time, or what came is not what was sent; the sampler must not
                serve until a later call has returned.
        """
        parcel = self._carrier.take()
        version = parcel.opening["version"]
        try:
            verify_s = self._accept(parcel, version)
        except (ValueError, WeightSyncError) as error:
            _drain(parcel)
            self._carrier.answer({"error": str(error), "verify_s": 0.0})
            if parcel.opening["again"]:
                return self.receive()
            raise WeightSyncError(f"version {version} was refused: {error}") from error
        self.version = version
        self._carrier.answer({"error": "", "verify_s": verify_s})
        return self.version

    def _accept(self, parcel: Parcel, version: int) -> float:
        """Load and prove; the seconds that the proof took."""
        if self.version is not None and version < self.version:
            raise WeightSyncError(f"version {version} was sent after version {self.version}")
        arriving = parcel.named_tensors
        if parcel.opening["delta"]:
            arriving = self._delta.decode(arriving, parcel.opening["base"])
        self._load(arriving, version)
        _drain(parcel)
        start = time.perf_counter()
        closing = parcel.closing()
        prove(closing["fingerprint"], self._held(), version)
        if closing["canary"] is not None and self._logprobs_of is not None:
            ask(Canary.of(closing["canary"]), self._logprobs_of, version)
        if parcel.opening["delta"]:
            self._delta.version = version
        return time.perf_counter() - start


def _drain(parcel: Parcel) -> None:
    """Take what the sampler left, so that the carrier stands where the next parcel begins."""
    for _ in parcel.named_tensors:
        pass
