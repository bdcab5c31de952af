"""The stages of a pipeline: what each holds of a model, what it computes, and who does what when.

Stage s lives on rank s modulo the number of ranks; where a rank holds several stages, each is a chunk of its
own. A rank begins with some forwards, goes on with a forward and a backward in turn (1F1B), and ends with
backwards. Interleaved, as many micro-batches as there are ranks form a round, and pass a chunk before the
next is begun; the last round may be smaller.

Each rank's steps are a part of one serial order of all steps, in which a transfer stands at one place for
both sides and after all that it needs. So nothing can wait in a circle, even where a device makes all
transfers one after the other (NCCL).

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
class Step:
    """One thing a rank does: compute, or exchange hidden states or their gradient with a neighbouring stage.

    Attributes:
        act: what is done.
        stage: the rank's own stage that does it.
        micro: for which micro-batch, counted from 0.
    """

    act: Act
    stage: int
    micro: int

    @property
    def other(self) -> int:
        """The stage that is exchanged with."""
        return self.stage + (1 if self.act in ("send hidden states", "receive gradient") else -1)


def deal_layers(num_layers: int, num_stages: int, *, head_cost: float) -> tuple[range, ...]:
    """The layers of each stage, neighbours together, so that the longest stage is as short as it can be.

    Where that leaves a choice, later stages hold more: they keep the activations of fewer micro-batches.

    Args:
        num_layers: of equal cost.
        num_stages: at least 2.
        head_cost: work of the output head, which the last stage has besides, in layers.

    Raises:
        ValueError: there are more stages than layers.
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
) -> tuple[tuple[Step, ...], ...]:
    """The steps of each rank, in order.

    Were every forward and backward as long as any other, all would be done in the time of
    2 (micro-batches * chunks + ranks - 1) of them if the last round is whole. Rank r holds the activations of
    at most ranks - r micro-batches at a time, interleaved of 2 (ranks - r) - 1 + ranks (chunks - 1), each of
    one stage.

    Args:
        num_ranks: at least 2.
        num_chunks: stages of each rank.
        num_micros: micro-batches, any number.
        backward: False for forwards alone.
    """
    last = num_ranks * num_chunks - 1
    left = [_computed(rank, num_ranks, num_chunks, num_micros, backward) for rank in range(num_ranks)]
    steps: list[list[Step]] = [[] for _ in left]
    done: dict[Step | None, int] = {None: -1}
    tick = 0
    while any(left):
        for rank, queue in enumerate(left):
            # What another rank ends within a tick can be used from the next one on.
            if not queue or done.get(_needed(queue[0], last), tick) >= tick:
                continue
            step = queue.pop(0)
            done[step] = tick
            steps[rank].append(step)
            stage, micro = step.stage, step.micro
            if step.act == "forward" and stage < last:
                steps[rank].append(Step("send hidden states", stage, micro))
                steps[(rank + 1) % num_ranks].append(Step("receive hidden states", stage + 1, micro))
            elif step.act == "backward" and stage > 0:
                steps[rank].append(Step("send gradient", stage, micro))
                steps[(rank - 1) % num_ranks].append(Step("receive gradient", stage - 1, micro))
        tick += 1
    return tuple(tuple(mine) for mine in steps)


def _needed(step: Step, last: int) -> Step | None:
    """The step whose result a step begins with."""
    if step.act == "forward":
        return Step("forward", step.stage - 1, step.micro) if step.stage else None
    if step.stage == last:
        return Step("forward", last, step.micro)
    return Step("backward", step.stage + 1, step.micro)


def _computed(rank: int, num_ranks: int, num_chunks: int, num_micros: int, backward: bool) -> list[Step]:
    """The forwards and backwards of one rank, in order."""
    # Taken from the order of whole rounds: with fewer forwards in the last one, a rank's turn of forward and
    # backward could begin with a forward that waits for the backward after it.
    order = [
        (chunk, micro)
        for first in range(0, num_micros, num_ranks)
        for chunk in range(num_chunks)
        for micro in range(first, first + num_ranks)
    ]
    forwards = [Step("forward", chunk * num_ranks + rank, micro) for chunk, micro in order]
    backwards = [
        Step("backward", (num_chunks - 1 - chunk) * num_ranks + rank, micro) for chunk, micro in order
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
class Row:
    """What the stages compute for a micro-batch.

    Attributes:
        token_T: its tokens.
        position_T: their positions.
        context: what attention needs.
    """

    token_T: Tensor
    position_T: Tensor
    context: Context


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model that is not cut: a layer, the embedding, the final norm, the head.

    Attributes:
        name: of its module in the whole model.
        module: the part.
        stage: which stage computes it.
    """

    name: str
    module: nn.Module
    stage: int


def whole_row(model: PreTrainedModel, micro: Batch) -> Row:
    """All of a micro-batch, on whose device the stages compute."""
    return Row(micro.token_T, micro.position_T, packed_context(model, micro.length_B))


def pieces(model: PreTrainedModel, num_stages: int) -> list[Piece]:
    """Every piece of a model that has weights, with its stage; the rest is on all stages.

    The head counts as many layers as its weights are of those that one token meets in a layer.

    Raises:
        ValueError: the model has no list of its layers, weights outside of all pieces, weights that stages
            other than the first and the last share, or more stages than layers.
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


def stage_model(model: PreTrainedModel, found: list[Piece], stage: int) -> PreTrainedModel:
    """A model that computes one stage; its pieces are those of the model given, not copies.

    Call it through `stage_states`.
    """
    others = {
        piece.module: _Earlier() if piece.stage < stage else _Later()
        for piece in found
        if piece.stage != stage
    }
    made: PreTrainedModel = replaced(model, others)
    return made


def stage_states(model: PreTrainedModel, row: Row, received_1TD: Tensor | None) -> Tensor:
    """What a stage gives: the hidden states after its layers, [1, T, D]; final ones on the last stage.

    Args:
        model: from `stage_model`.
        row: what to compute.
        received_1TD: what the stage before gave; None on the first.
    """
    given: dict[str, Any] = {"input_ids": row.token_T[None]}
    if received_1TD is not None:
        # What the model does to embeddings before its first layer is done to this input too, and thrown away:
        # the last layer before the stage gives what was handed over as it is.
        given = {"inputs_embeds": received_1TD, "handed": _Handed(received_1TD)}
    output = backbone(model)(
        **given, position_ids=row.position_T[None], use_cache=False, context=row.context, return_dict=True
    )
    # Not a view of it, which FSDP warns of where a stage's forward gives one.
    hidden_1TD: Tensor = output.last_hidden_state
    return hidden_1TD


def replaced(module: Any, others: Mapping[nn.Module, nn.Module]) -> Any:
    """The module with others in the place of some of its parts; the same module where none is in it."""
    if module in others:
        return others[module]
    if others.keys().isdisjoint(module.modules()):
        return module
    made = copy.copy(module)
    made._modules = {name: child and replaced(child, others) for name, child in module._modules.items()}
    return made


@dataclass(frozen=True, slots=True)
class _Handed:
    """Hidden states of the stage before; no bare tensor, which wrappers of layers would take for an input."""

    hidden_1TD: Tensor


class _Earlier(nn.Module):
    """A layer before the stage gives what the stage was handed; an embedding gives zeros nobody looks at."""

    def forward(self, x: Tensor, *args: Any, handed: _Handed | None = None, **kwargs: Any) -> Tensor:
        return torch.zeros_like(x[..., None]) if handed is None else handed.hidden_1TD


class _Later(nn.Module):
    """A layer or norm after the stage changes nothing."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class Absent(nn.Module):
    """Stands where nobody should compute: for a piece of another rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuses.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "this part of the model is on another rank of the pipeline; call Pipeline.forward or "
            "Pipeline.forward_backward"
        )


def _pieces(prefix: str, parent: nn.Module, layers: nn.ModuleList, stage_of: list[int]) -> Iterator[Piece]:
    for name, child in parent.named_children():
        if child is layers:
            for index, layer in enumerate(layers):
                yield Piece(f"{prefix}{name}.{index}", layer, stage_of[index])
        elif any(module is layers for module in child.modules()):
            yield from _pieces(f"{prefix}{name}.", child, layers, stage_of)
        elif next(child.parameters(), None) is not None:
            yield Piece(f"{prefix}{name}", child, 0 if isinstance(child, nn.Embedding) else stage_of[-1])


def _head_cost(model: PreTrainedModel, layers: nn.ModuleList) -> float:
    """The head's weights in layers, of whose experts only those count that one token is sent to."""
    used = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    weights = 0.0
    for parameter in layers.parameters():
        # Experts are stacked: [experts, out, in].
        share = min(1.0, used / len(parameter)) if parameter.ndim == 3 else 1.0
        weights += parameter.numel() * share
    head: Any = model.get_output_embeddings()
    # A critic has none to speak of.
    return 0.0 if head is None else float(head.weight.numel() * len(layers) / weights)
