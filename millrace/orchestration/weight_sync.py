"""From the trainer's weights to a sampler that has proved it samples with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from millrace.data.packing import pack
from millrace.protocols import Engine, NamedTensors, Scorer, WeightTransport
from millrace.transport.local import WeightSyncError
from millrace.types import Outcome, SamplingParams, Trajectory, Turn

ATTEMPTS = 2


class Canary:
    """One short answer that the sampler draws and the trainer judges again.

    Fingerprints prove that the sampler holds the right bits; this shows that it computes with them: a copy of
    a weight in another layout, a recorded graph or a kept cache of the old version is found here. It cannot
    tell versions apart whose log-probabilities differ by less than `tolerance`.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        *,
        num_tokens: int,
        temperature: float,
        tolerance: float,
    ) -> None:
        """A canary for one engine.

        Args:
            engine: the sampler.
            prompt: of at least one token.
            num_tokens: of the answer.
            temperature: the sampler's and the scorer's, above 0.
            tolerance: largest difference of a log-probability; what rounding of both sides explains.
        """
        self._engine, self._prompt, self._tolerance = engine, tuple(prompt), tolerance
        self._params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=0)

    def check(self, scorer: Scorer, version: int) -> float:
        """Draw and judge; every rank of a run asks in step.

        Args:
            scorer: the trainer's, over the weights that were sent.
            version: that every token must carry.

        Returns:
            largest difference between the two log-probabilities of a token.

        Raises:
            WeightSyncError: it is above the tolerance or no number, or a token was drawn by another version.
        """
        (drawn,) = self._engine.generate([self._prompt], [self._params])
        others = sorted({int(other) for other in drawn.versions} - {version})
        if others:
            raise WeightSyncError(f"after version {version} was loaded, version {others[0]} drew the canary")
        batch = pack([Trajectory((Turn(self._prompt, drawn),), Outcome("score", 0.0))])
        ours_N = scorer.logprobs(batch)[batch.action_mask_T].cpu()
        distance = float((ours_N - torch.as_tensor(drawn.logprobs)).abs().max())
        if not distance <= self._tolerance:
            raise WeightSyncError(
                f"the sampler's log-probabilities of the canary are {distance:.3g} from the trainer's at "
                f"version {version}; rounding explains {self._tolerance:g}"
            )
        return distance


class WeightSync:
    """Transport and canary together; a hand-over that fails is tried once more.

    Attributes:
        num_retries: hand-overs that needed a second try.
    """

    def __init__(self, transport: WeightTransport, canary: Canary | None = None) -> None:
        """A way to one sampler, or to all samplers of a transport.

        Args:
            transport: carries and proves the weights.
            canary: of one of the samplers; None where none can be asked from here.
        """
        self._transport, self._canary = transport, canary
        self.num_retries = 0

    def publish(
        self, named_tensors: Callable[[], NamedTensors], version: int, scorer: Scorer
    ) -> dict[str, float]:
        """Deliver the weights as `version`; the sampler may serve once this has returned.

        Args:
            named_tensors: the trainer's, asked for again where a try failed.
            version: of the weights.
            scorer: over the same weights, for the canary.

        Returns:
            `sync/canary_distance` where there is a canary.

        Raises:
            WeightSyncError: both tries failed.
        """
        failures: list[WeightSyncError] = []
        while len(failures) < ATTEMPTS:
            try:
                self._transport.send(named_tensors(), version)
                found = (
                    {}
                    if self._canary is None
                    else {"sync/canary_distance": self._canary.check(scorer, version)}
                )
            except WeightSyncError as error:
                failures.append(error)
            else:
                self.num_retries += len(failures)
                return found
        raise WeightSyncError(
            f"version {version} could not be handed over in {ATTEMPTS} tries: {failures[-1]}"
        ) from failures[-1]
