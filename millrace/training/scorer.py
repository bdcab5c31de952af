"""Log-probabilities of sampled tokens under a reference, a teacher, or the policy before its update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from millrace.data.batch import Batch
from millrace.kernels.token_logprob import Head, token_logprob, token_squares
from millrace.models.load import Model
from millrace.models.logprobs import chosen_hidden, output_head
from millrace.models.router_replay import Routing
from millrace.training.offload import Offload
from millrace.training.parallel_model import ParallelModel, TokenReadout, Which, at_chosen, predicting


class ModelScorer:
    """Log-probabilities of chosen tokens under a model's current weights, without gradient.

    Where the batch has supports, the softmax is over them, so that ratios and divergences use the same
    candidates. The temperature is the sampler's. A reference must be frozen. With `routing`, the model's
    routers use a batch's record of experts.
    """

    def __init__(
        self,
        model: Model,
        *,
        temperature: float,
        max_tokens: int,
        spread: ParallelModel | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.model = model
        self._spread = spread or ParallelModel(model)
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._routing = routing
        self._offload: Offload | None = None

    def move_out(self, offload: Offload) -> None:
        """Keep the weights out of the device's memory from now on but in `logprobs` and `squares`.

        Raises:
            OSError: there is no room for them.
        """
        self._offload = offload
        offload.sleep()

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of each chosen token, [T]; 0 elsewhere."""
        return self._read(batch, self._logprob)

    def squares(self, batch: Batch) -> Tensor:
        """Sum of pi^2 over the candidates of each chosen token, [T]; 0 elsewhere."""
        return self._read(batch, self._squares)

    @torch.no_grad()
    def hidden(self, micro: Batch) -> tuple[Tensor, Head]:
        """Return the final hidden states that predict the chosen tokens, [N, D], and the output head.

        No gradient flows to either. With sharded weights this is a collective call; each rank passes its own
        tokens, on its device.
        """
        runner: Any = self._spread.runner

        def compute(model: Model) -> tuple[Any, ...]:
            head = output_head(model)
            if isinstance(runner, FSDPModule):
                # Weights gathered for this forward are freed after it, but the divergence's backward reads
                # them.
                bias_V = None if head.bias_V is None else head.bias_V.clone()
                head = replace(head, weight_VD=head.weight_VD.clone(), bias_V=bias_V)
            return chosen_hidden(model, micro)[0], head

        hidden_ND, head = runner(compute)
        return hidden_ND, head

    def _read(self, batch: Batch, numbers: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        reading = TokenReadout(predicting, numbers, 1, self._routing)
        if self._offload is not None:
            self._offload.wake()
        (number_T,) = self._spread.read(batch, self._max_tokens, reading)
        if self._offload is not None:
            self._offload.sleep()
        return at_chosen(batch, number_T).float()

    def _logprob(self, model: Model, micro: Batch, which: Which, hidden_MD: Tensor) -> tuple[Tensor, ...]:
        target_M = micro.token_T[micro.action_mask_T][which]
        options = self._options(micro, which)
        return token_logprob(hidden_MD, output_head(model), target_M, **options)[:1]

    def _squares(self, model: Model, micro: Batch, which: Which, hidden_MD: Tensor) -> tuple[Tensor, ...]:
        return (token_squares(hidden_MD, output_head(model), **self._options(micro, which)),)

    def _options(self, micro: Batch, which: Which) -> dict[str, Any]:
        support = micro.chosen_support
        return {
            "temperature": self._temperature,
            "support": None if support is None else support[which],
        }
