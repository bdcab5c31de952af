"""What a model says of tokens already drawn: a reference, a teacher, the policy before its update."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from millrace.data.batch import Batch
from millrace.kernels.token_logprob import Head
from millrace.models.load import Model
from millrace.models.logprobs import chosen_hidden, output_head, packed_logprobs, packed_squares
from millrace.training.spread import Spread


class ModelScorer:
    """Log-probabilities of chosen tokens under a model's present weights, without gradient.

    Over the batch's supports where it has them, so that ratios and divergences compare like with like.
    """

    def __init__(
        self, model: Model, *, temperature: float, max_tokens: int, spread: Spread | None = None
    ) -> None:
        """A scorer over `model`.

        Args:
            model: a model from `models.load`; freeze it where it is a reference.
            temperature: the sampler's.
            max_tokens: tokens of one forward.
            spread: how the model lies on several ranks; None for this rank alone.
        """
        self._model = model
        self._spread = spread or Spread(model)
        self._temperature = temperature
        self._max_tokens = max_tokens

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of each chosen token, [T]; 0 elsewhere."""
        return self._packed(packed_logprobs, batch)

    def squares(self, batch: Batch) -> Tensor:
        """Sum of pi^2 over what each chosen token was drawn among, [T]; 0 elsewhere."""
        return self._packed(packed_squares, batch)

    def hidden(self, batch: Batch) -> tuple[Tensor, Head]:
        """The final hidden states that the chosen tokens are predicted from, [N, D], and the output head."""
        return chosen_hidden(self._model, batch)[0], output_head(self._model)

    def _packed(self, score: Callable[..., Tensor], batch: Batch) -> Tensor:
        options = {"temperature": self._temperature, "max_tokens": self._max_tokens}
        return self._spread.collect(
            batch, self._max_tokens, lambda model, here: score(model, here, **options)
        )
