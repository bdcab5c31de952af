"""Sharded loading from a Hugging Face folder: each rank reads only its own shards.

`empty_model` builds a model on the meta device, which the caller may change. `stored_weights` opens its
weights in the folder. Then the caller shards the model, and `read_weights` allocates each rank's shards and
reads them. No rank ever holds the complete model. `take_weights` does the same with the weights of another
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from millrace.distributed.collectives import local
from millrace.distributed.fsdp import Root
from millrace.models.load import (
    LANGUAGE,
    Model,
    ModelError,
    ModelKind,
    empty_of,
    named_weights,
    num_parameters,
    read_config,
    sentences,
)
from millrace.models.load_check import check_files, check_total

# Index range of a shard along each dimension of the complete weight.
Part = tuple[slice, ...]


def empty_model(folder: str | Path, *, dtype: torch.dtype, kind: ModelKind = LANGUAGE) -> Model:
    """Build the model of a folder with our modules; weights are on the meta device, buffers are computed.

    Raises:
        ModelError: a file is missing or damaged, the folder is not of this kind, or transformers cannot
            compute a buffer.
    """
    path = kind.folder(folder)
    with sentences(path):
        stored = check_files(path)
        model = empty_of(read_config(path), dtype=dtype, kind=kind)
        check_total(path, num_parameters(model), stored)
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


@contextmanager
def stored_weights(folder: str | Path, model: Model) -> Iterator[Stored]:
    """Open the files of a folder within the block, and check that they hold every weight of the model.

    Call it before the model is sharded. Every rank gets the same result, without communication.

    Raises:
        ModelError: a file is damaged, weights do not match the config, or their format does not allow partial
            reads.
    """
    with ExitStack() as stack:
        stored = Stored(Path(folder), model, stack)
        stored.check(model)
        yield stored


def read_weights(
    roots: Sequence[Root], model: Model, stored: Stored, *, device: torch.device, offload: bool = False
) -> None:
    """Allocate this rank's shards of a model, with `offload` in host memory, and read them.

    Parameters that are allocated already (LoRA weights) keep their values. `roots` wrap the model or its
    stages; they are sharded by `fsdp.shard`, and before that by `tensor` and `expert`. A damaged file is a
    ModelError.
    """
    wanted = _without_numbers(model)
    for root in roots:
        _give_memory(root, device, offload=offload)
    for name, tensor in named_weights(model):
        if name in wanted:
            stored.read(name, tensor)


@torch.no_grad()
def take_weights(
    roots: Sequence[Root],
    model: Model,
    named: Iterable[tuple[str, Tensor]],
    wanted: Iterable[str],
    *,
    device: torch.device,
    offload: bool = False,
) -> None:
    """Like `read_weights`, from a stream of complete weights in any order, which all ranks iterate in step.

    `wanted` are the names of all weights of the complete model; an unknown, repeated or missing one is a
    ValueError. None may be tied to one on another rank.
    """
    for root in roots:
        _give_memory(root, device, offload=offload)
    held, left = dict(named_weights(model)), set(wanted)
    for name, tensor in named:
        if name not in left:
            raise ValueError(f"weight {name} is not one of the model's, or came twice")
        left.discard(name)
        if name in held:
            local(held[name]).copy_(tensor[own_part(held[name])])
    if left:
        raise ValueError(f"{len(left)} weights are missing, the first being {min(left)}")


def _without_numbers(model: Model) -> set[str]:
    given = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    return {name for name, _ in named_weights(model)} - given


def _give_memory(root: Root, device: torch.device, *, offload: bool) -> None:
    buffers = [
        (module, name, buffer)
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    given = [(name, local(p).clone()) for name, p in root.named_parameters() if not p.is_meta]
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((module, name))
    root.to_empty(device=torch.device("cpu") if offload else device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(device)
    if not isinstance(root, FSDPModule):
        # `to_empty` made a new parameter for each module, so weights must be tied again.
        for (first, first_name), *others_of_it in tied.values():
            for module, name in others_of_it:
                module._parameters[name] = first._parameters[first_name]
    with torch.no_grad():
        for name, tensor in given:
            local(root.get_parameter(name)).copy_(tensor)


def own_part(tensor: Tensor) -> Part:
    """Return the index range of this rank's shard of a DTensor; of a plain tensor, all of it."""
    begins = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        _, begins = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    sizes = local(tensor).shape
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


class Stored:
    """The stored tensors of a folder by a model's weight names; made by `stored_weights`."""

    def __init__(self, path: Path, model: Model, stack: ExitStack) -> None:
        self._path = path
        # Tensors of each parameter, by source pattern: one, or several for a converter of transformers.
        self._sources: dict[str, dict[str, list[tuple[Any, str]]]] = {}
        self._converters: dict[str, WeightConverter] = {}
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        with sentences(path):
            opened = [
                stack.enter_context(safe_open(file, framework="pt"))
                for file in sorted(path.glob("*.safetensors"))
            ]
        stored = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
        for key in sorted(stored, key=_natural):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            self._sources.setdefault(name, {}).setdefault(pattern or "", []).append((stored[key], key))
            if pattern is not None:
                self._converters[name] = by_pattern[pattern]
        # A file may hold any of several tied weights.
        same = {id(tensor): name for name, tensor in known.items() if name in self._sources}
        for name, tensor in known.items():
            if name not in self._sources and id(tensor) in same:
                self._sources[name] = self._sources[same[id(tensor)]]

    def check(self, model: Model) -> None:
        """Refuse a folder in which one of the model's weights is missing or has the wrong shape."""
        wanted = _without_numbers(model)
        missing = sorted(wanted - self._sources.keys())
        if missing:
            raise ModelError(
                f"model folder {self._path} lacks {len(missing)} weights, the first being {missing[0]}"
            )
        for name, tensor in named_weights(model):
            if name not in wanted:
                continue
            stored = self._shape(name)
            if stored != tuple(tensor.shape):
                raise ModelError(
                    f"model folder {self._path}: weight {name} is {stored} but config.json makes it "
                    f"{tuple(tensor.shape)}"
                )

    @torch.no_grad()
    def read(self, name: str, tensor: Tensor) -> None:
        """Read this rank's shard of a parameter or buffer, a DTensor or plain, in place."""
        near = local(tensor)
        if near.numel():
            with sentences(self._path):
                near.copy_(self._slice(name, own_part(tensor)))

    def _shape(self, name: str) -> tuple[int, ...]:
        sources = self._sources[name]
        shapes = [tuple(file.get_slice(key).get_shape()) for (file, key), *_ in sources.values()]
        if name not in self._converters:
            return shapes[0]
        self._check_converter(name)
        rows, *rest = shapes[0]
        return len(next(iter(sources.values()))), sum(shape[0] for shape in shapes), *rest

    def _check_converter(self, name: str) -> None:
        """Refuse converters other than that of per-expert tensors: stack experts, concatenate gate and up."""
        kinds = [type(step) for step in self._converters[name].operations]
        dims = [getattr(step, "dim", None) for step in self._converters[name].operations]
        if kinds != [MergeModulelist, Concatenate][: len(kinds)] or dims != [0, 1][: len(dims)]:
            raise ModelError(
                f"model folder {self._path}: weight {name} is stored in a form that cannot be read in parts; "
                f"load the folder in one process and save it again"
            )

    def _slice(self, name: str, place: Part) -> Tensor:
        """Of per-expert tensors, read only the experts in the slice."""
        sources = self._sources[name]
        if name not in self._converters:
            ((file, key),) = sources[""]
            part: Tensor = file.get_slice(key)[place]
            return part
        patterns = [p for p in self._converters[name].source_patterns if p in sources]
        experts = [
            torch.cat([sources[pattern][e][0].get_tensor(sources[pattern][e][1]) for pattern in patterns])
            for e in range(place[0].start, place[0].stop)
        ]
        return torch.stack([expert[place[1:]] for expert in experts])


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in key.split(".")]
