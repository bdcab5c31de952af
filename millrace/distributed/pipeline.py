"""Pipeline parallelism: a transformers decoder cut into stages of layers, one or more on each rank.

Stage 0 has the embedding, the last stage the final norm and the head. Micro-batches differ in length. torch's
`PipelineStage` fixes shapes at the first one and would need padding. Here every rank holds the whole batch
and knows all shapes, so point-to-point sends and receives in the order of `pipeline_stages.schedule` suffice.

T = packed tokens of a micro-batch, D = model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.data.batch import Batch
from millrace.distributed.collectives import local
from millrace.distributed.fsdp import Root
from millrace.distributed.mesh import Mesh
from millrace.distributed.pipeline_stages import (
    Absent,
    ModelPiece,
    StageStep,
    pieces,
    schedule,
    stage_model,
    stage_states,
    whole_row,
)
from millrace.distributed.pipeline_trial import Runner, check_stages
from millrace.models.load import ModelKind, named_weights

R = TypeVar("R")
# Maximum number of in-flight sends; older ones are waited for, to free their memory.
SENDS = 2


class Pipeline:
    """This rank's stages of a model, and forward and backward of micro-batches through all stages.

    Attributes:
        model: the given model without the modules of other ranks. It owns this rank's weights under their
            Hugging Face names and cannot be called.
        holders: pipeline rank of each weight of the complete model, in the model's order, tied weights once.
        tied: names of tied copies on the last rank, mapped to the names in `holders` of the originals on rank
            0. Both copies get the same gradient, so they stay equal. A norm or a checkpoint must count one of
            them.
    """

    model: PreTrainedModel
    holders: dict[str, int]
    tied: dict[str, str]

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        *,
        num_chunks: int = 1,
        dtype: torch.dtype | None = None,
        wrap: Callable[[PreTrainedModel], Runner] = Root,
    ) -> None:
        """Cut a model into stages; all ranks of the pipeline call it with the same complete model.

        The modules of other ranks are removed from it. With one chunk (stage per rank) the schedule is 1F1B,
        with more it is interleaved: less idle time, more communication. Hidden states have `dtype`, or that
        of the weights. `wrap` wraps the model of each stage (FSDP). It then calls `check`, except on the meta
        device: there, call it after the weights are loaded.

        Raises:
            ValueError: pp is 1, cp is above 1, num_chunks is below 1, there are more stages than layers, or
                the architecture cannot be cut.
            ModelError: see `check`.
        """
        group = mesh.group("pp")
        if group is None:
            raise ValueError("mesh.pp is 1; a pipeline needs at least 2 ranks, and one rank needs none")
        if mesh.size("cp") > 1:
            # Each rank along cp would compute all tokens, so gradients would count cp times.
            raise ValueError(
                f"mesh.pp is {mesh.size('pp')} and mesh.cp is {mesh.size('cp')}; the stages of a pipeline "
                "compute whole rows, so set one of them to 1"
            )
        if num_chunks < 1:
            raise ValueError(f"num_chunks is {num_chunks}; each rank of a pipeline holds at least 1")
        self.model = model
        self.num_chunks = num_chunks
        self.rank, self.num_ranks = mesh.rank("pp"), mesh.size("pp")
        self.num_stages = self.num_ranks * num_chunks
        self.group, self.device = group, mesh.device
        self.dtype = dtype or next(model.parameters()).dtype
        self.width = int(model.config.get_text_config().hidden_size)
        found = pieces(model, self.num_stages)
        self.holders, self.tied = self._weights(found)
        self._shapes = {name: (weight.shape, weight.dtype) for name, weight in named_weights(model)}
        self._stage_of = {piece.name: piece.stage for piece in found}
        empty = next(model.parameters()).is_meta
        stages = {
            stage: stage_model(model, found, stage)
            for stage in range(self.rank, self.num_stages, self.num_ranks)
        }
        for piece in found:
            if piece.stage not in stages:
                parent, _, leaf = piece.name.rpartition(".")
                model.get_submodule(parent).add_module(leaf, Absent())
        self.runners = {stage: wrap(stages[stage]) for stage in stages}
        if not empty:
            self.check()

    def check(self, kind: ModelKind | None = None) -> None:
        """Refuse an architecture if its stages in sequence do not compute the complete model.

        All ranks of the pipeline call it in step. With `kind` it runs the self-check of an ordinary load too.

        Raises:
            ModelError: the outputs differ on a short row, or the self-check fails; the same on every rank.
        """
        check_stages(self.model, self._stage_of, self.runners, self.group, self.device, kind=kind)

    def forward_backward(
        self, micros: Sequence[Batch], loss_of: Callable[[Batch, Tensor], tuple[Tensor, R]]
    ) -> list[R]:
        """Accumulate the gradients of all micro-batches; all ranks call it in step with the same ones.

        On the last stage, `loss_of` gets a micro-batch and its final hidden states, [T, D], and returns its
        part of the loss and another result. After an error on one rank, the others fail when its process ends
        or the group's timeout expires. The pipeline cannot be used afterwards.

        Returns:
            The other results of `loss_of` by micro-batch; empty except on the last rank.

        Raises:
            ValueError: there is no micro-batch, or hidden states do not have the expected dtype.
            RuntimeError: communication with another stage failed; the message names the stage.
        """
        results: list[R] = []
        tied = self._tied_weight()
        before = None if tied is None else tied.grad
        if tied is not None:
            tied.grad = None

        def end(micro: Batch, hidden_TD: Tensor) -> Tensor:
            loss, result = loss_of(micro, hidden_TD)
            results.append(result)
            return loss

        self._run(micros, end, backward=True)
        if tied is not None:
            self._sum_tied(tied, before)
        return results

    @torch.no_grad()
    def forward(self, micros: Sequence[Batch], number_of: Callable[[Batch, Tensor], R]) -> list[R]:
        """Return a result from each micro-batch and its final hidden states, [T, D], without gradient.

        The list is empty except on the last rank. Errors are those of `forward_backward`.
        """
        results: list[R] = []

        def end(micro: Batch, hidden_TD: Tensor) -> Tensor:
            results.append(number_of(micro, hidden_TD))
            return hidden_TD

        self._run(micros, end, backward=False)
        return results

    def everywhere(self, local: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Broadcast every weight of the complete model to every rank, one at a time, in the model's order.

        All ranks of the pipeline iterate in step. `local` has this rank's weights, or their gradients,
        unsharded and in the order of `load.named_weights(model)`, with the dtype of the given model.

        Raises:
            ValueError: a weight is missing, or differs from the given model in shape or dtype.
        """
        mine = ((name, tensor) for name, tensor in local if name not in self.tied)
        for name, rank in self.holders.items():
            shape, dtype = self._shapes[name]
            if rank == self.rank:
                given, tensor = next(mine, ("nothing", torch.empty(0)))
                if given != name or tensor.shape != shape or tensor.dtype != dtype:
                    raise ValueError(
                        f"weight {name}, {tuple(shape)} {dtype}, was to be sent from pipeline rank {rank}; "
                        f"it was given {given}, {tuple(tensor.shape)} {tensor.dtype}"
                    )
                tensor = tensor.detach().to(self.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(tensor, group_src=rank, group=self.group)
            yield name, tensor

    def _run(
        self, micros: Sequence[Batch], end: Callable[[Batch, Tensor], Tensor], *, backward: bool
    ) -> None:
        if not micros:
            raise ValueError("a pipeline was given no micro-batch; give every rank at least one")
        steps = schedule(self.num_ranks, self.num_chunks, len(micros), backward=backward)[self.rank]
        passage = _Passage(self, micros, end)
        for step in steps:
            try:
                passage.take(step)
            except Exception as error:
                error.add_note(
                    f"in the pipeline: {step.act} of micro-batch {step.micro} on stage {step.stage}"
                )
                raise
        passage.wait()

    def _weights(self, found: list[ModelPiece]) -> tuple[dict[str, int], dict[str, str]]:
        stage_of = {
            f"{piece.name}.{name}": piece.stage
            for piece in found
            for name, _ in (
                *piece.module.named_parameters(remove_duplicate=False),
                *piece.module.named_buffers(),
            )
        }
        first = {weight: name for name, weight in self.model.named_parameters()}
        holders = {name: stage_of[name] % self.num_ranks for name, _ in named_weights(self.model)}
        named = self.model.named_parameters(remove_duplicate=False)
        tied = {name: first[weight] for name, weight in named if stage_of[name] != stage_of[first[weight]]}
        return holders, tied

    def _tied_weight(self) -> nn.Parameter | None:
        """Return the weight that rank 0 and the last rank share; None on other ranks or if frozen."""
        if self.rank not in (0, self.num_ranks - 1):
            return None
        names = self.tied.values() if self.rank == 0 else self.tied
        weights = [parameter for name, parameter in self.model.named_parameters() if name in names]
        return weights[0] if weights and weights[0].requires_grad else None

    def _sum_tied(self, weight: nn.Parameter, before: Tensor | None) -> None:
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        ours = local(gradient)
        sent = ours.to(self.device).contiguous()
        theirs = torch.empty(ours.shape, dtype=ours.dtype, device=self.device)
        first = self.rank == 0
        other = self.num_ranks - 1 if first else 0
        # Both sides start the two transfers in the same order.
        transfers = [
            dist.isend(sent, group=self.group, group_dst=other)
            if sending
            else dist.irecv(theirs, group=self.group, group_src=other)
            for sending in (first, not first)
        ]
        for transfer in transfers:
            _wait(transfer, f"tied gradients were not exchanged with pipeline rank {other}")
        ours.add_(theirs.to(ours.device))
        weight.grad = gradient if before is None else gradient.add_(before)


class _Passage:
    def __init__(
        self, pipeline: Pipeline, micros: Sequence[Batch], end: Callable[[Batch, Tensor], Tensor]
    ) -> None:
        self._pipeline = pipeline
        self._micros = micros
        self._rows = [whole_row(pipeline.model, micro) for micro in micros]
        self._end = end
        # By stage and micro-batch: tensors in transfer, stage inputs, stage outputs, input gradients;
        # in-flight sends.
        self._arriving: dict[StageStep, tuple[dist.Work | None, Tensor]] = {}
        self._begun: dict[tuple[int, int], Tensor] = {}
        self._made: dict[tuple[int, int], Tensor] = {}
        self._gradient: dict[tuple[int, int], Tensor] = {}
        self._sends: deque[tuple[dist.Work | None, Tensor, str]] = deque()

    def take(self, step: StageStep) -> None:
        at = step.stage, step.micro
        if step.act == "forward":
            self._forward(*at)
        elif step.act == "backward":
            self._backward(*at)
        elif step.act == "send hidden states":
            made = self._made[at] if torch.is_grad_enabled() else self._made.pop(at)
            self._send(step, made.detach())
        elif step.act == "send gradient":
            self._send(step, self._gradient.pop(at))
        else:
            self._receive(step)

    def wait(self, sends: int = 0) -> None:
        while len(self._sends) > sends:
            work, _, problem = self._sends.popleft()
            _wait(work, problem)

    def _forward(self, stage: int, micro: int) -> None:
        row = self._rows[micro]
        received_1TD = self._arrived(StageStep("receive hidden states", stage, micro)) if stage else None
        if received_1TD is not None and torch.is_grad_enabled():
            self._begun[stage, micro] = received_1TD.requires_grad_()

        def compute(model: PreTrainedModel) -> tuple[Tensor, ...]:
            hidden_1TD = stage_states(model, row, received_1TD)
            if stage < self._pipeline.num_stages - 1:
                return (hidden_1TD,)
            return (self._end(self._micros[micro], hidden_1TD[0]),)

        (made,) = self._pipeline.runners[stage](compute)
        if torch.is_grad_enabled() or stage < self._pipeline.num_stages - 1:
            self._made[stage, micro] = made

    def _backward(self, stage: int, micro: int) -> None:
        made = self._made.pop((stage, micro))
        if stage == self._pipeline.num_stages - 1:
            made.backward()
        else:
            gradient_1TD = self._arrived(StageStep("receive gradient", stage, micro))
            # The output of a stage with only frozen weights may not require a gradient.
            if made.requires_grad:
                made.backward(gradient_1TD)
        if stage:
            begun_1TD = self._begun.pop((stage, micro))
            self._gradient[stage, micro] = (
                torch.zeros_like(begun_1TD) if begun_1TD.grad is None else begun_1TD.grad
            )

    def _send(self, step: StageStep, tensor_1TD: Tensor) -> None:
        if tensor_1TD.dtype != self._pipeline.dtype:
            raise ValueError(
                f"hidden states are {tensor_1TD.dtype}, but the pipeline was made for "
                f"{self._pipeline.dtype}; give Pipeline(dtype=...) what the stages compute in"
            )
        tensor_1TD = tensor_1TD.contiguous()
        to = step.other % self._pipeline.num_ranks
        work = dist.isend(tensor_1TD, group=self._pipeline.group, group_dst=to)
        what = step.act.removeprefix("send ")
        problem = (
            f"stage {step.stage} could not hand {what} of micro-batch {step.micro} to stage {step.other}"
        )
        self._sends.append((work, tensor_1TD, problem))
        self.wait(SENDS)

    def _receive(self, step: StageStep) -> None:
        row = self._rows[step.micro]
        shape = 1, len(row.token_T), self._pipeline.width
        tensor_1TD = torch.empty(shape, dtype=self._pipeline.dtype, device=row.token_T.device)
        source = step.other % self._pipeline.num_ranks
        work = dist.irecv(tensor_1TD, group=self._pipeline.group, group_src=source)
        self._arriving[step] = work, tensor_1TD

    def _arrived(self, step: StageStep) -> Tensor:
        work, tensor_1TD = self._arriving.pop(step)
        what = step.act.removeprefix("receive ")
        _wait(work, f"stage {step.stage} got no {what} of micro-batch {step.micro} from stage {step.other}")
        return tensor_1TD


def _wait(work: dist.Work | None, problem: str) -> None:
    assert work is not None  # this rank is in the group
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"in the pipeline {problem}; that rank failed, ended, or exceeded the process group's "
            f"timeout: {error}"
        ) from error
