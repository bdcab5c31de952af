"""Weights within one process: the sampler copies them in place, and the copy is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from millrace.transport.fingerprint import fingerprint


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


class LocalTransport:
    """Hands tensors to a sampler in the same process and compares checksums of both sides."""

    def __init__(
        self,
        load: Callable[[Iterable[tuple[str, Tensor]], int], None],
        held: Callable[[], dict[str, str]],
    ) -> None:
        """A transport to one sampler.

        Args:
            load: the sampler's `load_weights`.
            held: the sampler's `fingerprint`.
        """
        self._load = load
        self._held = held

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Deliver every tensor as `version`; see `protocols.WeightTransport`."""
        sent = list(named_tensors)
        try:
            self._load(sent, version)
        except ValueError as error:
            raise WeightSyncError(f"the sampler refused version {version}: {error}") from error
        prove(fingerprint(sent), self._held(), version)
