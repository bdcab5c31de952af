"""The reference policy: frozen weights that give log-probabilities."""

from __future__ import annotations

from torch import Tensor

from millrace.data.batch import Batch
from millrace.models.load import Model
from millrace.models.logprobs import packed_logprobs


class ReferenceScorer:
    """Log-probabilities of chosen tokens under frozen weights."""

    def __init__(self, model: Model, *, temperature: float, max_tokens: int) -> None:
        """A scorer over `model`, which it owns and freezes.

        Args:
            model: a model from `models.load`.
            temperature: the sampler's.
            max_tokens: tokens of one forward.
        """
        self._model = model.requires_grad_(False)
        self._temperature = temperature
        self._max_tokens = max_tokens

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of each chosen token, [T]; 0 elsewhere."""
        here = batch.to(next(self._model.parameters()).device)
        logprob_T = packed_logprobs(
            self._model, here, temperature=self._temperature, max_tokens=self._max_tokens
        )
        return logprob_T.to(batch.token_T.device)
