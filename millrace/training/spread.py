"""A model as its trainer sees it: on this rank alone, or spread over the ranks of a mesh.

Every rank holds the whole batch and takes its own segments of it. Losses are sums over tokens, whose weights
are fixed for the whole optimizer step, so whatever ranks add up is a plain sum.

T = packed tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from millrace.config.mesh import MeshConfig
from millrace.data.batch import Batch, micro_batches
from millrace.models.fsdp import Root, Sharding, clip, full_tensors, shard
from millrace.models.load import Model
from millrace.models.mesh import Layout, Mesh, make_mesh

DATA = ("dp_replicate", "dp_shard")


def mesh_of(options: MeshConfig, device: torch.device) -> Mesh | None:
    """The ranks of a run as the recipe lays them out; None for one. All ranks call it in step."""
    if options.num_ranks == 1:
        return None
    return make_mesh(Layout(dp_replicate=options.dp_replicate, dp_shard=options.dp_shard), device.type)


def spread_over(model: Model, mesh: Mesh | None, options: MeshConfig) -> Spread:
    """A model to be trained, its weights dealt to the ranks of a mesh."""
    if mesh is None:
        return Spread(model)
    mesh.layout.check(model.config)
    sharding = Sharding(
        precision=getattr(torch, options.compute) if options.compute else None,
        reshard_after_forward=options.reshard_after_forward,
        offload=options.offload,
        checkpointing=options.checkpointing,
    )
    return Spread(model, shard(model, mesh, sharding), mesh)


class Spread:
    """Which part of a batch is this rank's, and what ranks add up."""

    def __init__(self, model: Model, root: Root | None = None, mesh: Mesh | None = None) -> None:
        """A model on this rank alone, or sharded by `models.fsdp.shard`.

        Args:
            model: from `models.load`.
            root: what runs it; None for a model that is whole on each rank.
            mesh: over whose data ranks segments are dealt.
        """
        self.model = model
        self._mesh = mesh or Mesh(Layout(), model.device.type, None)
        self._root = root or Root(model)
        self._even_tokens = _even_tokens(model)

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one."""
        return self._mesh.num_data_ranks == 1

    def micro_batches(self, batch: Batch, max_tokens: int) -> Iterator[tuple[Batch, Tensor]]:
        """This rank's micro-batches, and where their tokens stand in the batch.

        Every rank gets as many: a forward is something all of them do together. One that has none left gets
        a sequence that counts for nothing, whose tokens stand nowhere.

        Raises:
            ValueError: one segment alone is longer than `max_tokens`.
        """
        if self.alone:
            start = 0
            for micro in batch.split(max_tokens):
                yield micro, torch.arange(start, start + micro.num_tokens)
                start += micro.num_tokens
            return
        dealt = [
            [segments[span] for span in micro_batches(lengths, max_tokens)]
            for segments in batch.deal(self._mesh.num_data_ranks, even_tokens=self._even_tokens)
            for lengths in [batch.length_B[torch.tensor(segments, dtype=torch.long)].tolist()]
        ]
        mine = dealt[self._mesh.data_rank]
        for segments in mine:
            yield batch.select(segments), batch.places(segments)
        for _ in range(max(map(len, dealt)) - len(mine)):
            # Something short, of which nothing is kept and through which a gradient of 0 flows.
            filler = batch.select([int(batch.length_B.argmin())])
            yield replace(filler, weight_T=torch.zeros_like(filler.weight_T)), filler.segment_T[:0]

    def run(self, compute: Callable[[Model], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `compute` gives for the model, with all weights at hand; all ranks call it in step."""
        outputs: tuple[Tensor, ...] = self._root(compute)
        return outputs

    def total(self, part: Tensor) -> Tensor:
        """The sum of every data rank's part, on the device of this rank's part."""
        return part if self.alone else self._mesh.sum_over(part, *DATA).to(part.device)

    def collect(self, batch: Batch, max_tokens: int, number: Callable[[Model, Batch], Tensor]) -> Tensor:
        """One number for each token of a batch, without gradient, [T] in float32, the same on every rank.

        Args:
            batch: the whole batch, wherever it lies.
            max_tokens: tokens of one forward.
            number: of each token of a micro-batch on the model's device, [tokens].
        """
        whole_T = torch.zeros(batch.num_tokens)
        with torch.no_grad():
            for micro, place_T in self.micro_batches(batch, max_tokens):
                here = micro.to(self.model.device)
                (number_T,) = self.run(lambda model, here=here: (number(model, here),))  # type: ignore[misc]
                whole_T[place_T] = number_T[: len(place_T)].float().cpu()
        return self.total(whole_T).to(batch.token_T.device)

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to this norm over all weights of all ranks; gives the norm before."""
        return clip(self.model.parameters(), max_norm, self._mesh)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, under its Hugging Face name, tied weights once; all ranks ask in step."""
        return full_tensors(self._root, self._mesh)


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
