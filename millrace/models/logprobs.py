"""From a model and a packed batch to log-probabilities.

T = packed tokens, N = chosen tokens, D = model width.
"""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.data.batch import Batch
from millrace.data.shared_prefix import common_beginnings, leading_to
from millrace.kernels.packed_attention import Places, Segments
from millrace.kernels.token_logprob import Head, token_logprob
from millrace.models.attention import INVARIANT_BLOCK, Context, Packed, contiguous_rows
from millrace.models.facts import backbone, experts_of, in_context
from millrace.models.fused import Linear
from millrace.models.router_replay import Routed


def output_head(model: PreTrainedModel) -> Head:
    """Return the model's output embedding and its changes to the logits; this rank's rows under `tp`.

    Raises:
        ValueError: the model has no linear output embedding; or its weight is sharded over data ranks, and
            this is not within the forward that gathers it (`distributed.fsdp.Root`).
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear output embedding; a causal language model is needed"
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    weight_VD = linear.weight
    if isinstance(weight_VD, DTensor):
        raise ValueError(
            f"the output head of this {type(model).__name__} is dealt to data ranks; compute within the "
            "forward of its Root, which gathers it"
        )
    group, first_row = _slice(linear)
    ours = linear if isinstance(linear, Linear) else None
    return Head(
        weight_VD,
        linear.bias,
        float(scale),
        softcap,
        tile=None if ours is None else ours.tile,
        packed=None if ours is None else ours.packed_weight(),
        group=group,
        first_row=first_row,
    )


def _slice(linear: nn.Linear) -> tuple[ProcessGroup | None, int]:
    """Return the ranks that shard a head's rows and the first row; (None, 0) if unsharded."""
    # A module reads its own rows; the parameter itself has the sharding.
    weight = linear._parameters["weight"]
    if not isinstance(weight, DTensor):
        return None, 0
    group = weight.device_mesh.get_group("tp")
    return group, group.rank() * (len(weight) // group.size())


def hidden_states(model: PreTrainedModel, token_T: Tensor, position_T: Tensor, context: Context) -> Tensor:
    """Compute final hidden states of a packed row, [T, D]."""
    output = backbone(model)(
        input_ids=token_T[None],
        position_ids=position_T[None],
        use_cache=False,
        return_dict=True,
        **in_context(model, position_T, context),
    )
    # Indexing would fill a tensor with zeros in the backward.
    hidden_TD: Tensor = output.last_hidden_state.squeeze(0)
    return hidden_TD


def deterministic(model: nn.Module) -> bool:
    """Whether `fused.set_deterministic` was called on a model, or on a whole one of which this is a part."""
    # All linear layers have the tile or none has, and a stage of a pipeline may lack the head.
    return next((module.tile is not None for module in model.modules() if isinstance(module, Linear)), False)


def packed_context(model: PreTrainedModel, length_B: Tensor) -> Packed:
    """Build the context of a packed row; a deterministic model attends as the paged engine does."""
    device, length_B = length_B.device, length_B.cpu()
    segments = Segments.of(length_B).to(device)
    if not deterministic(model):
        return Packed(segments)
    return Packed(segments, paged=contiguous_rows(length_B, block_size=INVARIANT_BLOCK, device=device))


def states(model: PreTrainedModel, batch: Batch, at_N: Tensor, *, routed: Routed | None = None) -> Tensor:
    """Compute final hidden states of some tokens of a packed row, [N, D], in the order of `at_N`.

    Tokens after them are not computed, except by a mixture of experts, where routers are recorded over the
    whole row. A shared prefix of segments is computed once, except by a deterministic model, which must have
    the engine's bits. Without `routed` the routers are unchanged.
    """
    device, token_T, position_T, length_B = at_N.device, batch.token_T, batch.position_T, batch.length_B.cpu()
    leading = None if experts_of(model) else leading_to(at_N.cpu(), length_B)
    if leading is not None:
        kept_S, length_B, at_N = leading.kept_S.to(device), leading.length_B, leading.at_N.to(device)
        token_T, position_T = token_T[kept_S], position_T[kept_S]
    apart = None if routed is None else routed.apart_TLK
    shared = None if deterministic(model) else common_beginnings(token_T, length_B, apart)
    routers = nullcontext() if routed is None else routed.forward(shared)
    if shared is None:
        context = packed_context(model, length_B.to(device))
        with routers:
            return hidden_states(model, token_T, position_T, context)[at_N]
    num_kept = len(shared.kept_S)
    segments = Segments.sharing(shared.place_T, length_B, shared.first_B, num_kept)
    context = Packed(segments.to(device))
    kept_S = shared.kept_S.to(device)
    with routers:
        hidden_SD = hidden_states(model, token_T[kept_S], position_T[kept_S], context)
    return Places.of(shared.place_T[at_N.cpu()], num_kept).to(device).spread(hidden_SD)


def chosen_hidden(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden states [N, D] that chosen tokens were predicted from, and these tokens [N], in order.

    A token is predicted from the hidden state before it, so the first token of a segment cannot be chosen.
    A batch without chosen tokens gives N = 0, through which a gradient of 0 flows.
    """
    index_N = batch.action_mask_T.nonzero()[:, 0]
    return states(model, batch, index_N - 1), batch.token_T[index_N]


def chosen_logprobs(model: PreTrainedModel, batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each chosen token and the entropy at it, in packed order, both [N].

    Both are over the batch's supports where it has them. A ValueError if the temperature is not above 0, or a
    support lacks its token.
    """
    hidden_ND, target_N = chosen_hidden(model, batch)
    support = batch.chosen_support
    return token_logprob(hidden_ND, output_head(model), target_N, temperature=temperature, support=support)
