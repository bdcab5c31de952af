"""Pipeline stages: their modules, their computation and the schedule.

Stage s is on rank s modulo the number of ranks; each of several stages on a rank is a chunk. A rank starts
with warmup forwards, alternates forward and backward (1F1B), and ends with backwards. In the interleaved
schedule, a round has as many micro-batches as there are ranks. All of them pass one chunk before the next
chunk starts. The last round may be smaller.

Each rank's steps are a subsequence of one serial order of all steps. A transfer has one position in it for
both sides, after everything that it depends on. So there is no deadlock, even if a device serializes all
transfers (NCCL).

T = packed tokens, D = model width.

Sources: Narayanan et al. 2019, "PipeDream" (1F1B); Narayanan et al. 2021, "Efficient large-scale language
model training on GPU clusters using Megatron-LM" (interleaved).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.data.batch import Batch
from millrace.models.attention import Context
from millrace.models.facts import backbone
from millrace.models.logprobs import packed_context

Act = Literal[
    "forward", "backward", "send hidden states", "receive hidden states", "send gradient", "receive gradient"
]


@dataclass(frozen=True, slots=True)
class StageStep:
    """One step of a rank: compute, or transfer hidden states or a gradient to or from a neighbour stage."""

    act: Act
    stage: int
    micro: int

    @property
    def other(self) -> int:
        """The peer stage of a transfer."""
        return self.stage + (1 if self.act in ("send hidden states", "receive gradient") else -1)


def deal_layers(num_layers: int, num_stages: int, *, head_cost: float) -> tuple[range, ...]:
    """Partition layers into contiguous stages so that the cost of the most expensive stage is minimal.

    Layers have equal cost; the head, on the last stage, costs `head_cost` layers. Among equal choices, later
    stages get more layers, because they keep the activations of fewer micro-batches. More stages than layers
    are a ValueError.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"a pipeline of {num_stages} stages needs as many layers, but the model has {num_layers}; "
            f"choose fewer ranks (mesh.pp) or chunks"
        )
    others = num_stages - 1

    def longest(num_last: int) -> float:
        return max(-(-(num_layers - num_last) // others), num_last + head_cost)

    num_last = min(range(num_layers - others, 0, -1), key=longest)
    each, more = divmod(num_layers - num_last, others)
    sizes = [each + (stage >= others - more) for stage in range(others)] + [num_last]
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


@lru_cache(maxsize=64)
def schedule(
    num_ranks: int, num_chunks: int, num_micros: int, *, backward: bool = True
) -> tuple[tuple[StageStep, ...], ...]:
    """Compute the schedule: the steps of each rank (at least 2), in order.

    If all forwards and backwards take one time unit and the last round is complete, the total time is
    2 (micro-batches * chunks + ranks - 1) units. Rank r holds the activations of at most ranks - r
    micro-batches at a time. Interleaved, these are 2 (ranks - r) - 1 + ranks (chunks - 1), each of one stage.
    """
    last = num_ranks * num_chunks - 1
    left = [_computed(rank, num_ranks, num_chunks, num_micros, backward) for rank in range(num_ranks)]
    steps: list[list[StageStep]] = [[] for _ in left]
    done: dict[StageStep | None, int] = {None: -1}
    tick = 0
    while any(left):
        for rank, queue in enumerate(left):
            # A result of another rank is available from the next tick on.
            if not queue or done.get(_needed(queue[0], last), tick) >= tick:
                continue
            step = queue.pop(0)
            done[step] = tick
            steps[rank].append(step)
            stage, micro = step.stage, step.micro
            if step.act == "forward" and stage < last:
                steps[rank].append(StageStep("send hidden states", stage, micro))
                steps[(rank + 1) % num_ranks].append(StageStep("receive hidden states", stage + 1, micro))
            elif step.act == "backward" and stage > 0:
                steps[rank].append(StageStep("send gradient", stage, micro))
                steps[(rank - 1) % num_ranks].append(StageStep("receive gradient", stage - 1, micro))
        tick += 1
    return tuple(tuple(mine) for mine in steps)


def _needed(step: StageStep, last: int) -> StageStep | None:
    if step.act == "forward":
        return StageStep("forward", step.stage - 1, step.micro) if step.stage else None
    if step.stage == last:
        return StageStep("forward", last, step.micro)
    return StageStep("backward", step.stage + 1, step.micro)


def _computed(rank: int, num_ranks: int, num_chunks: int, num_micros: int, backward: bool) -> list[StageStep]:
    # Filtered from the order of complete rounds: with fewer forwards in the last round, a forward could be
    # scheduled before a backward that it depends on.
    order = [
        (chunk, micro)
        for first in range(0, num_micros, num_ranks)
        for chunk in range(num_chunks)
        for micro in range(first, first + num_ranks)
    ]
    forwards = [StageStep("forward", chunk * num_ranks + rank, micro) for chunk, micro in order]
    backwards = [
        StageStep("backward", (num_chunks - 1 - chunk) * num_ranks + rank, micro) for chunk, micro in order
    ]
    ahead = num_ranks - rank - 1
    if num_chunks > 1:
        ahead = 2 * ahead + (num_chunks - 1) * num_ranks
    steps = forwards[:ahead]
    for forward_step, backward_step in zip(forwards[ahead:], backwards, strict=False):
        steps += [forward_step, backward_step]
    steps += backwards[len(forwards[ahead:]) :]
    return [step for step in steps if step.micro < num_micros and (backward or step.act == "forward")]


@dataclass(frozen=True, slots=True)
class MicroBatchRow:
    """Model inputs of a micro-batch."""

    token_T: Tensor
    position_T: Tensor
    context: Context


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """An indivisible module of a model: a layer, the embedding, the final norm or the head."""

    name: str
    module: nn.Module
    stage: int


def whole_row(model: PreTrainedModel, micro: Batch) -> MicroBatchRow:
    """Build the inputs of a micro-batch, on its device."""
    return MicroBatchRow(micro.token_T, micro.position_T, packed_context(model, micro.length_B))


def pieces(model: PreTrainedModel, num_stages: int) -> list[ModelPiece]:
    """Assign the modules with weights to stages; all other modules are on every stage.

    The cost of the head is its number of weights relative to the active weights of a layer.

    Raises:
        ValueError: the model has no list of layers, weights outside of all modules found, weights that are
            tied between stages other than the first and the last, or more stages than layers.
    """
    kind = type(model).__name__
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise ValueError(
            f"{kind} keeps its layers in no list, so it cannot be cut into stages; set mesh.pp to 1"
        )
    dealt = deal_layers(num_layers, num_stages, head_cost=_head_cost(model, lists[0]))
    stage_of = [stage for stage, layers in enumerate(dealt) for _ in layers]
    found = list(_pieces("", model, lists[0], stage_of))
    stages: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in model.parameters()}
    for piece in found:
        for parameter in piece.module.parameters():
            stages[parameter].add(piece.stage)
    for name, parameter in model.named_parameters():
        at = sorted(stages[parameter])
        if len(at) != 1 and at != [0, num_stages - 1]:
            raise ValueError(
                f"weight {name} of {kind} belongs to {f'stages {at}' if at else 'no stage'}, so the model "
                f"cannot be cut into {num_stages}; set mesh.pp to 1"
            )
    return found


def stage_model(model: PreTrainedModel, found: list[ModelPiece], stage: int) -> PreTrainedModel:
    """Build the model of one stage, to call with `stage_states`; it shares modules with the given model."""
    others = {
        piece.module: _Earlier() if piece.stage < stage else _Later()
        for piece in found
        if piece.stage != stage
    }
    made: PreTrainedModel = replaced(model, others)
    return made


def stage_states(model: PreTrainedModel, row: MicroBatchRow, received_1TD: Tensor | None) -> Tensor:
    """Compute the hidden states after a stage's layers, [1, T, D]; the final ones on the last stage.

    `received_1TD` is the output of the previous stage, None on the first.
    """
    given: dict[str, Any] = {"input_ids": row.token_T[None]}
    if received_1TD is not None:
        # The model may transform embeddings before its first layer. That result is discarded: the last
        # skipped layer before the stage returns the received hidden states unchanged.
        given = {"inputs_embeds": received_1TD, "handed": _Handed(received_1TD)}
    output = backbone(model)(
        **given, position_ids=row.position_T[None], use_cache=False, context=row.context, return_dict=True
    )
    # Not a view, because FSDP warns of views as outputs of a forward.
    hidden_1TD: Tensor = output.last_hidden_state
    return hidden_1TD


def replaced(module: Any, others: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a shallow copy of a module with submodules replaced; the module itself if none occurs in it."""
    if module in others:
        return others[module]
    if others.keys().isdisjoint(module.modules()):
        return module
    made = copy.copy(module)
    made._modules = {name: child and replaced(child, others) for name, child in module._modules.items()}
    return made


@dataclass(frozen=True, slots=True)
class _Handed:
    """Hidden states of the previous stage; wrapped, because FSDP would treat a bare tensor as an input."""

    hidden_1TD: Tensor


class _Earlier(nn.Module):
    """Module of an earlier stage: a layer returns the received hidden states, an embedding unused zeros."""

    def forward(self, x: Tensor, *args: Any, handed: _Handed | None = None, **kwargs: Any) -> Tensor:
        return torch.zeros_like(x[..., None]) if handed is None else handed.hidden_1TD


class _Later(nn.Module):
    """Layer or norm of a later stage: the identity."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class Absent(nn.Module):
    """Placeholder for a module of another rank, which must not be called."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise a RuntimeError."""
        raise RuntimeError(
            "this part of the model is on another rank of the pipeline; call Pipeline.forward or "
            "Pipeline.forward_backward"
        )


def _pieces(
    prefix: str, parent: nn.Module, layers: nn.ModuleList, stage_of: list[int]
) -> Iterator[ModelPiece]:
    for name, child in parent.named_children():
        if child is layers:
            for index, layer in enumerate(layers):
                yield ModelPiece(f"{prefix}{name}.{index}", layer, stage_of[index])
        elif any(module is layers for module in child.modules()):
            yield from _pieces(f"{prefix}{name}.", child, layers, stage_of)
        elif next(child.parameters(), None) is not None:
            yield ModelPiece(f"{prefix}{name}", child, 0 if isinstance(child, nn.Embedding) else stage_of[-1])


def _head_cost(model: PreTrainedModel, layers: nn.ModuleList) -> float:
    """Return the number of weights of the head relative to the active weights of an average layer."""
    used = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    weights = 0.0
    for parameter in layers.parameters():
        # Experts are stacked: [experts, out, in].
        fraction = min(1.0, used / len(parameter)) if parameter.ndim == 3 else 1.0
        weights += parameter.numel() * fraction
    head: Any = model.get_output_embeddings()
    # The head of a critic is negligible.
    return 0.0 if head is None else float(head.weight.numel() * len(layers) / weights)
