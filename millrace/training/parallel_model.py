"""A model for its trainer: on this rank alone, or parallel over the ranks of a mesh.

A trainer defines what it computes from the model's final hidden states (`TokenReadout`) and the loss of these
numbers; this module shards segments, tokens, layers, matrices and experts over the ranks. Every rank passes
the whole batch and gets all results. Losses are sums over tokens with weights fixed for the whole optimizer
step, so reductions over ranks are plain sums.

T = packed tokens of the whole batch, N = tokens of a micro-batch that are read, M = those of them that this
rank computes, K = numbers of each, D = model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from millrace.config.mesh_section import MeshConfig
from millrace.data.batch import Batch, micro_batches
from millrace.distributed import expert, tensor
from millrace.distributed.context import Kind, shard_row
from millrace.distributed.fsdp import Root, Sharding, grad_norms, shard, spare_activations
from millrace.distributed.mesh import Mesh, make_mesh
from millrace.distributed.pipeline import Pipeline
from millrace.models.adapters import merged_tensors
from millrace.models.facts import experts_of
from millrace.models.load import Model
from millrace.models.logprobs import deterministic, states
from millrace.models.router_replay import Routed, Routing, recorded
from millrace.planner.layout import Layout

# Mesh axes along which ranks have different segments, or none.
APART = ("dp_replicate", "dp_shard", "pp")

Which = Tensor | slice
# A micro-batch and the K numbers [N] of its tokens -> its part of the loss.
Loss = Callable[[Batch, tuple[Tensor, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class TokenReadout:
    """Numbers computed from a model's final hidden states at some tokens.

    Attributes:
        places: returns the tokens of a micro-batch to compute at, [N], ascending.
        numbers: from the model, the micro-batch, which M of the N are asked for and their states [M, D], to
            `count` = K tensors [M].
        routing: what the model's routers do with the batch's record of experts; None leaves them alone.
    """

    places: Callable[[Batch], Tensor]
    numbers: Callable[[Model, Batch, Which, Tensor], tuple[Tensor, ...]]
    count: int
    routing: Routing | None = None

    def routed(self, micro: Batch) -> Routed | None:
        """The routers during one micro-batch, or None; ValueError if the batch has no record of experts."""
        return None if self.routing is None else Routed(self.routing, recorded(micro.expert_TLK))


def predicting(batch: Batch) -> Tensor:
    """The positions that predict the chosen tokens: each the one before, [N]."""
    # The first token of a segment is never chosen, so none is predicted from the segment before.
    return batch.action_mask_T.nonzero()[:, 0] - 1


def at_chosen(batch: Batch, number_T: Tensor) -> Tensor:
    """Move numbers from the predicting positions to the chosen tokens; 0 elsewhere, [T]."""
    return torch.where(batch.action_mask_T, number_T.roll(1), 0.0)


def mesh_of(options: MeshConfig, device: torch.device) -> Mesh | None:
    """Build the device mesh of the recipe; None for one rank. A collective call."""
    if options.num_ranks == 1:
        return None
    return make_mesh(layout_of(options), device.type)


def layout_of(options: MeshConfig) -> Layout:
    """The recipe's layout of ranks; PlanError if its numbers do not go together."""
    return Layout.of(options.model_dump())


def spread_over(model: Model, mesh: Mesh | None, options: MeshConfig) -> ParallelModel:
    """Shard a model, the same on every rank, over the ranks of a mesh, and remove the other ranks' shards.

    Layers recompute and offload activations as the options say, on one rank too.

    Raises:
        ValueError: the layout does not divide the model, or its architecture cannot be sharded so.
    """
    if mesh is None:
        spare_activations(model, options.activation_checkpointing, offload=options.activation_offload)
        return ParallelModel(model)
    mesh.check(model.config)
    even_tokens = _even_tokens(model)
    compute = getattr(torch, options.compute_dtype) if options.compute_dtype else None
    sharding = Sharding(
        precision=compute,
        reshard_after_forward=options.reshard_after_forward,
        offload=options.offload,
        checkpointing=options.activation_checkpointing,
        activation_offload=options.activation_offload,
    )

    def dealt(part: Model) -> Root:
        if mesh.experts is not None and experts_of(part):
            expert.apply(part, mesh.experts)
        tensor.apply(part, mesh, sequence=options.sequence_parallel)
        return shard(part, mesh, sharding)

    if mesh.size("pp") == 1:
        return ParallelModel(model, dealt(model), mesh, kind=options.cp_kind, even_tokens=even_tokens)
    pipeline = Pipeline(model, mesh, num_chunks=options.pp_chunks, dtype=compute, wrap=dealt)
    return ParallelModel(model, pipeline, mesh, even_tokens=even_tokens)


class ParallelModel:
    """A parallel model: this rank's slice of a batch, its forward, and the reductions over ranks.

    Without a `runner` the model is whole on each rank. Segments are divided among the data ranks of the mesh,
    as `Batch.deal` does it with `even_tokens`, the same on every rank.
    """

    def __init__(
        self,
        model: Model,
        runner: Root | Pipeline | None = None,
        mesh: Mesh | None = None,
        *,
        kind: Kind = "ulysses",
        even_tokens: float = math.inf,
    ) -> None:
        self.model = model
        self._mesh = mesh or Mesh(Layout(), model.device.type, None)
        self.runner = runner or Root(model)
        self._kind = kind
        self._even_tokens = even_tokens

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one."""
        return self._mesh.layout.num_ranks == 1

    def learn(self, batch: Batch, max_tokens: int, reading: TokenReadout, loss: Loss) -> Tensor:
        """Add the gradient of a loss and return the numbers behind it; a collective call.

        Every rank passes the whole batch, on any device. The loss is a sum over tokens, so that the gradient
        does not depend on how the batch is split into forwards of `max_tokens`.

        Returns:
            The numbers where they were read, 0 elsewhere, [K, T], the same on every rank; in float32, of a
                wider model in its own dtype.

        Raises:
            ValueError: one segment alone is longer than `max_tokens`, or experts are to be replayed or
                balanced on ranks that share out layers, tokens or matrices.
        """
        return self._passed(batch, max_tokens, reading, loss)

    @torch.no_grad()
    def read(self, batch: Batch, max_tokens: int, reading: TokenReadout) -> Tensor:
        """Return the numbers only, without gradient; otherwise as `learn`."""
        return self._passed(batch, max_tokens, reading, None)

    def micro_batches(self, batch: Batch, max_tokens: int) -> Iterator[tuple[Batch, Tensor]]:
        """Yield this rank's micro-batches and the places of their tokens in the batch.

        Every rank yields equally many, since a forward is a collective call. A rank with too few adds dummy
        sequences with weight 0 and no places.

        Raises:
            ValueError: one segment alone is longer than `max_tokens`.
        """
        if self._mesh.num_data_ranks == 1:
            start = 0
            for micro in batch.split(max_tokens):
                yield micro, torch.arange(start, start + micro.num_tokens)
                start += micro.num_tokens
            return
        # As `models.logprobs.states` does it, which neither stages of a pipeline nor shares of a row use.
        sharing = self._mesh.size("pp") == self._mesh.size("cp") == 1 and not deterministic(self.model)
        deal = partial(batch.deal, even_tokens=self._even_tokens, sharing=sharing)
        dealt = [
            [segments[span] for span in micro_batches(lengths, max_tokens)]
            for segments in deal(self._mesh.num_data_ranks)
            for lengths in [batch.length_B[torch.tensor(segments, dtype=torch.long)].tolist()]
        ]
        mine = dealt[self._mesh.data_rank]
        for segments in mine:
            yield batch.select(segments), batch.places(segments)
        for _ in range(max(map(len, dealt)) - len(mine)):
            # A short dummy, whose results are dropped and whose gradient is 0.
            filler = batch.select([int(batch.length_B.argmin())])
            filler.weight_T = torch.zeros_like(filler.weight_T)
            if filler.expert_TLK is not None:
                filler.expert_TLK = torch.full_like(filler.expert_TLK, -1)
            yield filler, filler.segment_T[:0]

    def grad_norms(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[float]:
        """Return the gradient norm of each group of weights over all ranks; a collective call."""
        copies = self.runner.tied if isinstance(self.runner, Pipeline) else {}
        named = self.model.named_parameters()
        return grad_norms(groups, self._mesh, elsewhere=[p for name, p in named if name in copies])

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by Hugging Face name, an adapter merged, tied ones once; a collective call."""
        held = merged_tensors(self.model)
        return self.runner.everywhere(held) if isinstance(self.runner, Pipeline) else held

    def _passed(self, batch: Batch, max_tokens: int, reading: TokenReadout, loss: Loss | None) -> Tensor:
        divided = [name for name in ("tp", "pp", "cp") if self._mesh.size(name) > 1]
        if reading.routing is not None and divided:
            raise ValueError(f"experts cannot be replayed or balanced with mesh.{divided[0]} above 1")
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        number_KT = torch.zeros(reading.count, batch.num_tokens, dtype=dtype)
        micros = self.micro_batches(batch, max_tokens)
        run = self._in_stages if isinstance(self.runner, Pipeline) else self._one_by_one
        for place_T, at_N, numbers in run(micros, reading, loss):
            # The results of dummy sequences are dropped.
            if len(place_T):
                number_KT[:, place_T[at_N.cpu()]] = torch.stack(tuple(numbers)).to(number_KT)
        if self._mesh.num_data_ranks > 1 or self._mesh.size("pp") > 1:
            number_KT = self._mesh.sum_over(number_KT, *APART)
        return number_KT.to(batch.token_T.device)

    def _one_by_one(
        self, micros: Iterator[tuple[Batch, Tensor]], reading: TokenReadout, loss: Loss | None
    ) -> Iterator[tuple[Tensor, Tensor, Sequence[Tensor]]]:
        run: Any = self.runner
        for micro, place_T in micros:
            here = micro.to(self._mesh.device)
            at_N, routed = reading.places(here), reading.routed(here)
            if loss is None:
                yield place_T, at_N, run(partial(self._numbers, here, at_N, reading, routed))
                continue
            part, *numbers = run(partial(self._loss, here, at_N, reading, routed, loss))
            with nullcontext() if routed is None else routed.backward():
                part.backward()
            yield place_T, at_N, numbers

    def _in_stages(
        self, micros: Iterator[tuple[Batch, Tensor]], reading: TokenReadout, loss: Loss | None
    ) -> Iterator[tuple[Tensor, Tensor, Sequence[Tensor]]]:
        pipeline: Any = self.runner
        pairs = list(micros)
        here = [micro.to(self._mesh.device) for micro, _ in pairs]

        def numbers_of(micro: Batch, hidden_TD: Tensor) -> tuple[Tensor, ...]:
            return reading.numbers(self.model, micro, slice(None), hidden_TD[reading.places(micro)])

        def loss_of(micro: Batch, hidden_TD: Tensor) -> tuple[Tensor, list[Tensor]]:
            assert loss is not None
            numbers = numbers_of(micro, hidden_TD)
            return loss(micro, numbers), [number_N.detach() for number_N in numbers]

        if loss is None:
            results = pipeline.forward(here, numbers_of)
        else:
            results = pipeline.forward_backward(here, loss_of)
        # No results on other stages than the last.
        for (_, place_T), micro, numbers in zip(pairs, here, results, strict=False):
            yield place_T, reading.places(micro), numbers

    def _loss(
        self,
        here: Batch,
        at_N: Tensor,
        reading: TokenReadout,
        routed: Routed | None,
        loss: Loss,
        model: Model,
    ) -> tuple[Tensor, ...]:
        numbers = self._numbers(here, at_N, reading, routed, model)
        part = loss(here, numbers)
        if routed is not None:
            part = part + routed.balance()
        return part, *(number_N.detach() for number_N in numbers)

    def _numbers(
        self, here: Batch, at_N: Tensor, reading: TokenReadout, routed: Routed | None, model: Model
    ) -> tuple[Tensor, ...]:
        if self._mesh.size("cp") == 1:
            return reading.numbers(model, here, slice(None), states(model, here, at_N, routed=routed))
        sharded = shard_row(model, here, self._mesh, at_N, kind=self._kind)
        numbers = reading.numbers(model, here, sharded.read_M, sharded.hidden(model))
        return tuple(sharded.gather(number_M) for number_M in numbers)


def _even_tokens(model: Model) -> float:
    """Length of a segment whose attention takes as many operations as everything else.

    A token costs 2 per weight, and in each layer 4 per width of all heads for each token it sees, which are
    half the segment.
    """
    text = model.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    even: float = num_weights / (text.num_hidden_layers * text.num_attention_heads * width)
    return even
