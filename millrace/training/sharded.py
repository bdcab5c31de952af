"""Sharded tensors as files, loadable into any other layout.

torch.distributed.checkpoint plans which part of a tensor this rank has, and which stored parts to read. Files
are safetensors with the offsets of each part in their header, as its `HuggingFaceStorageReader` expects them,
so nothing is ever unpickled.
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

from millrace.distributed.collectives import local
from millrace.errors import CheckpointError
from millrace.models.saving import host_copy


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A rank's part of a tensor, copied to host memory; `offsets` are its place along each dimension."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def place(self) -> str:
        """Identifies the part; equal on every rank that has a copy."""
        return " ".join([self.name, *map(str, self.offsets)])


def own_parts(tensors: Mapping[str, Tensor]) -> list[TensorShard]:
    """Copy this rank's parts of tensors, whole ones or DTensors; later changes do not affect them."""
    made = []
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=True).items:
        assert item.tensor_data is not None
        tensor = tensors[item.index.fqn]
        offsets = tuple(item.tensor_data.chunk.offsets)
        made.append(TensorShard(item.index.fqn, offsets, host_copy(local(tensor))))
    return made


def deal(held: Sequence[Mapping[str, int]]) -> list[set[str]]:
    """Assign each part to a writer: of the ranks that hold it, the one with the fewest bytes so far.

    By rank, `held` has the bytes of each part, the result the parts to write; every part occurs once.
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


def write_parts(parts: Sequence[TensorShard], folder: Path, *, rank: int) -> list[Path]:
    """Write one rank's parts to a file in a folder, which is created; no file where there are no parts."""
    if not parts:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:05d}.safetensors"
    # Offsets only; the whole size follows from the end of the last part.
    places = {part.name: {SAVED_OFFSETS_KEY: part.offsets} for part in parts}
    tensors = {part.name: part.tensor for part in parts}
    # One entry: safetensors writes several in no order, and equal checkpoints have equal bytes.
    save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(places)})
    return [path]


def read_parts(folder: Path, into: Mapping[str, Tensor], names: Collection[str]) -> None:
    """Fill tensors, whole ones or DTensors of any layout, from the files of `write_parts`.

    Every rank reads only what it needs of a verified checkpoint. `names` are of the tensors on all ranks
    together, which the folder must match.

    Raises:
        CheckpointError: the names or the shapes differ.
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
