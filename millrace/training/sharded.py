"""Tensors that ranks hold in parts, as files, and back into any other layout.

torch.distributed.checkpoint plans: which part of a tensor is here, and which stored parts make up the part
that is wanted here. Files are safetensors with the place of each part in their header, as its
`HuggingFaceStorageReader` expects them, so that nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from millrace.errors import CheckpointError
from millrace.models.saving import host_copy


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank holds of a tensor.

    Attributes:
        name: of the whole tensor.
        offsets: where the part begins in it, along each dimension.
        tensor: the part, a copy in the host's memory.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def place(self) -> str:
        """The same for the same part on every rank that holds it."""
        return " ".join([self.name, *map(str, self.offsets)])


def own_parts(tensors: Mapping[str, Tensor]) -> list[Part]:
    """Copies of what this rank holds of tensors, whole ones or DTensors; what follows may change those."""
    made = []
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=True).items:
        assert item.tensor_data is not None
        tensor = tensors[item.index.fqn]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        made.append(Part(item.index.fqn, tuple(item.tensor_data.chunk.offsets), host_copy(local)))
    return made


def deal(held: Sequence[Mapping[str, int]]) -> list[set[str]]:
    """Who writes what: of the ranks that hold something, the one that has the fewest bytes so far.

    Args:
        held: what each rank holds, with its bytes.

    Returns:
        For each rank what it writes; together everything, once.
    """
    holders: dict[str, list[int]] = {}
    for rank, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(rank)
    num_bytes = [0] * len(held)
    dealt: list[set[str]] = [set() for _ in held]
    for place in sorted(holders):
        writer = min(holders[place], key=num_bytes.__getitem__)
        num_bytes[writer] += held[writer][place]
        dealt[writer].add(place)
    return dealt


def write_parts(parts: Sequence[Part], folder: Path, *, rank: int) -> list[Path]:
    """One rank's file in a folder, which is made; none where it has no parts."""
    if not parts:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:05d}.safetensors"
    # Each part's place; the size of the whole follows from where the last part ends.
    places = {part.name: {SAVED_OFFSETS_KEY: part.offsets} for part in parts}
    tensors = {part.name: part.tensor for part in parts}
    # One entry: safetensors writes several in no order, and equal checkpoints have equal bytes.
    save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(places)})
    return [path]


def read_parts(folder: Path, into: Mapping[str, Tensor], names: Collection[str]) -> None:
    """Fill tensors, whole ones or DTensors of any layout, with what ranks wrote by `write_parts`.

    Every rank reads for itself what it needs.

    Args:
        folder: of a verified checkpoint.
        into: what this rank holds.
        names: of all that the ranks hold together, which is what the folder must hold.

    Raises:
        CheckpointError: it holds others, or others' shapes.
    """
    reader = HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata()
    sizes = {
        name: tuple(each.size)
        for name, each in stored.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    for name in sorted(sizes.keys() ^ set(names)):
        why = "which the model does not have" if name in sizes else "which the model has, is missing"
        raise CheckpointError(f"{folder} is of another model: {name}, {why}")
    for name, tensor in into.items():
        if sizes[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder} is of another model: {name} is {sizes[name]}, and the model makes it "
                f"{tuple(tensor.shape)}"
            )
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(into), stored, is_coordinator=True)
    reader.set_up_storage_reader(stored, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
