"""Expert parallelism: each rank of a group holds some of the experts; tokens are dispatched and combined.

Our experts function is registered with transformers as `millrace`, as our attention is. If a layer's expert
weights are DTensors over a mesh of several ranks, a token's hidden state is sent to the ranks of its experts,
and their outputs are sent back (two all-to-alls with uneven counts). The token's own rank computes the
weighted sum, so routers are unchanged. The backward runs the same all-to-alls in reverse. An expert's weight
thus receives the gradient of all tokens of all ranks of the group once, and needs no all-reduce over that
group. There is no hidden module state: the group is that of the weight's own mesh.

All ranks of a group must run the same number of forwards and backwards over the same layers; a rank may have
no tokens in one.

T = tokens of this rank, N = experts of a token, S = T N choices, R = rows that arrive here, E = experts,
L = experts of one rank, P = ranks of the group, D = model width, M = output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from millrace.distributed.collectives import Peers, local
from millrace.kernels.grouped import grouped_linear
from millrace.models.facts import EXPERT_WEIGHTS, experts_of

NAME = "millrace"


def register() -> None:
    """Register `experts_implementation="millrace"` with transformers; idempotent."""
    ExpertsInterface.register(NAME, experts)


def apply(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a mixture of experts over the ranks of a mesh of one dimension; compute them with our function.

    Rank p of P keeps experts p E/P to (p + 1) E/P - 1. Parameters keep their names and become DTensors,
    sharded along their first dimension; the collective `full_tensor()` returns the complete one. Everything
    else is unchanged. Call it before `fully_shard`, which may shard the experts of one rank further over a
    mesh with the same root, and before making a `Pipeline`, in which some stages may have no experts. It also
    works on the meta device.

    Raises:
        ValueError: the model has no experts or unsupported ones, or their number is not divisible by the
            ranks; the model is unchanged then.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh has dimensions {mesh.mesh_dim_names}; experts are dealt over one, such as ep")
    found = experts_of(model)
    if not found:
        raise ValueError(f"a {model.config.model_type} has no experts to deal; set mesh.ep to 1")
    for name, module in found.items():
        _check(name, module, mesh.size())
    for module in found.values():
        for key in EXPERT_WEIGHTS:
            whole = getattr(module, key)
            part = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            shared = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(module, key, nn.Parameter(shared, requires_grad=whole.requires_grad))
    register()
    model.set_experts_implementation(NAME)


def experts(module: Any, hidden_TD: Tensor, expert_TN: Tensor, weight_TN: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs of each token, [T, D]; transformers calls this.

    `module` has the layer's experts; `expert_TN` are integers in [0, E).
    """
    num_tokens, num_choices = expert_TN.shape
    chosen_S = expert_TN.reshape(-1)
    order_S = chosen_S.argsort(stable=True)
    x_SD = hidden_TD[order_S // num_choices]
    count_E = torch.bincount(chosen_S, minlength=module.num_experts)
    group = _group(module.gate_up_proj)
    if group is None:
        y_SD = _computed(module, x_SD, count_E.tolist())
    else:
        y_SD = _elsewhere(module, x_SD, count_E, group)
    y_TND = y_SD[order_S.argsort()].view(num_tokens, num_choices, hidden_TD.shape[1])
    return (y_TND * weight_TN[..., None]).sum(1).to(hidden_TD.dtype)


def _elsewhere(module: Any, x_SD: Tensor, count_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Compute the output of all ranks' experts for rows sorted by expert, [S, D]."""
    num_ranks = group.size()
    sent_PL = count_E.view(num_ranks, -1)
    arrived_PL = torch.empty_like(sent_PL)
    dist.all_to_all_single(arrived_PL, sent_PL, group=group)
    # One device-to-host copy for both counts.
    sent, arrived = torch.stack([sent_PL, arrived_PL]).cpu()
    sent_P, arrived_P = sent.sum(1).tolist(), arrived.sum(1).tolist()
    # Rows arrive sorted by source rank, then by expert; the grouped product needs them sorted by expert.
    expert_PL = torch.arange(sent_PL.shape[1], device=count_E.device).repeat(num_ranks)
    expert_R = expert_PL.repeat_interleave(arrived_PL.reshape(-1), output_size=sum(arrived_P))
    order_R = expert_R.argsort(stable=True)
    peers = Peers(group)
    x_RD = peers.exchange(x_SD, sent_P, arrived_P)
    y_RD = _computed(module, x_RD[order_R], arrived.sum(0).tolist())
    return peers.exchange(y_RD[order_R.argsort()], arrived_P, sent_P)


def _computed(module: Any, x_RD: Tensor, count_L: Sequence[int]) -> Tensor:
    up_LMD, down_LDM = (local(getattr(module, key)) for key in EXPERT_WEIGHTS)
    gated_RM = module._apply_gate(grouped_linear(x_RD, up_LMD, count_L))
    return grouped_linear(gated_RM, down_LDM, count_L)


def _group(weight: Tensor) -> dist.ProcessGroup | None:
    if not isinstance(weight, DTensor) or weight.device_mesh.size() == 1:
        return None
    return weight.device_mesh.get_group()


def _check(name: str, module: Any, num_ranks: int) -> None:
    if isinstance(module.gate_up_proj, DTensor):
        raise ValueError(f"the experts of {name} are dealt already; deal them once")
    known = getattr(module, "has_gate", False) and not (
        module.has_bias or module.is_transposed or module.has_post_expert_norm
    )
    if not known:
        raise ValueError(
            f"{name} is a {type(module).__name__}, whose experts are not a gated pair of plain matrices; "
            f"set mesh.ep to 1"
        )
    if module.num_experts % num_ranks:
        raise ValueError(
            f"{num_ranks} ranks do not divide the {module.num_experts} experts of {name}; "
            f"set mesh.ep to a number that does"
        )
