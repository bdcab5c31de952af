"""From a model and a packed batch to log-probabilities.

T = packed tokens, N = chosen tokens, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.data.batch import Batch
from millrace.kernels.packed_attention import Segments
from millrace.kernels.token_logprob import Head, Supports, token_logprob, token_squares
from millrace.models.attention import INVARIANT_BLOCK, Context, Packed, contiguous_rows
from millrace.models.fused import Linear


def output_head(model: PreTrainedModel) -> Head:
    """The model's output embedding and what its architecture does to the logits.

    Raises:
        ValueError: the model has no linear output embedding.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear output embedding; a causal language model is needed"
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    if isinstance(linear, Linear):
        return Head(
            linear.weight, linear.bias, float(scale), softcap, tile=linear.tile, packed=linear.packed_weight()
        )
    return Head(linear.weight, linear.bias, float(scale), softcap)


def hidden_states(model: PreTrainedModel, token_T: Tensor, position_T: Tensor, context: Context) -> Tensor:
    """Final hidden states of a packed row, [T, D]."""
    output = model.base_model(
        input_ids=token_T[None],
        position_ids=position_T[None],
        use_cache=False,
        context=context,
        return_dict=True,
    )
    hidden_TD: Tensor = output.last_hidden_state[0]
    return hidden_TD


def packed_context(model: PreTrainedModel, length_B: Tensor) -> Packed:
    """Segments of these lengths, [B] on the CPU; a deterministic model attends as the paged engine does."""
    device = next(model.parameters()).device
    segments = Segments.of(length_B).to(device)
    if output_head(model).tile is None:
        return Packed(segments)
    return Packed(segments, paged=contiguous_rows(length_B, block_size=INVARIANT_BLOCK, device=device))


def chosen_hidden(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """The hidden state each chosen token was predicted from, [N, D], and the token, [N], in packed order.

    A token is predicted from the hidden state before it, so the first token of a segment cannot be chosen.
    A batch without chosen tokens gives N = 0, through which a gradient of 0 flows.
    """
    context = packed_context(model, batch.length_B.cpu())
    hidden_TD = hidden_states(model, batch.token_T, batch.position_T, context)
    index_N = batch.action_mask_T.nonzero()[:, 0]
    return hidden_TD[index_N - 1], batch.token_T[index_N]


def chosen_logprobs(model: PreTrainedModel, batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each chosen token and the entropy it was chosen from, in packed order, both [N].

    As everywhere here, over the batch's supports where it has them.

    Raises:
        ValueError: the temperature is not above 0, or a support lacks its token.
    """
    hidden_ND, target_N = chosen_hidden(model, batch)
    support = batch.chosen_support
    return token_logprob(hidden_ND, output_head(model), target_N, temperature=temperature, support=support)


def packed_logprobs(model: PreTrainedModel, batch: Batch, *, temperature: float, max_tokens: int) -> Tensor:
    """Log-probabilities of the chosen tokens without gradient, [T], 0 elsewhere.

    Computed in micro-batches of at most `max_tokens` tokens, whole segments each.

    Raises:
        ValueError: one segment alone is longer than `max_tokens`, the temperature is not above 0, or a
            support lacks its token.
    """

    def logprob(hidden_ND: Tensor, head: Head, target_N: Tensor, support: Supports | None) -> Tensor:
        return token_logprob(hidden_ND, head, target_N, temperature=temperature, support=support)[0]

    return _packed(model, batch, max_tokens, logprob)


def packed_squares(model: PreTrainedModel, batch: Batch, *, temperature: float, max_tokens: int) -> Tensor:
    """Sum of the squared probabilities of what each chosen token was drawn among, [T], 0 elsewhere.

    Without gradient, in micro-batches and with errors as in `packed_logprobs`.
    """

    def squares(hidden_ND: Tensor, head: Head, target_N: Tensor, support: Supports | None) -> Tensor:
        return token_squares(hidden_ND, head, temperature=temperature, support=support)

    return _packed(model, batch, max_tokens, squares)


@torch.no_grad()
def _packed(
    model: PreTrainedModel,
    batch: Batch,
    max_tokens: int,
    number: Callable[[Tensor, Head, Tensor, Supports | None], Tensor],
) -> Tensor:
    """One number per chosen token from its hidden state, the head and its support, [T], 0 elsewhere."""
    parts = []
    for micro in batch.split(max_tokens):
        hidden_ND, target_N = chosen_hidden(model, micro)
        number_N = number(hidden_ND, output_head(model), target_N, micro.chosen_support)
        number_T = torch.zeros(micro.num_tokens, device=micro.token_T.device)
        parts.append(number_T.masked_scatter(micro.action_mask_T, number_N.float()))
    return torch.cat(parts)
