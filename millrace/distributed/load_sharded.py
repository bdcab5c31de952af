"""Models from a Hugging Face folder of which each rank reads only its own part.

`empty_model` makes a model without memory (on the meta device), which the caller changes as it likes.
`stored_weights` finds its weights in the folder. Then the caller shares the model out, and `read_weights`
gives every rank memory for what it keeps and reads that. No rank ever holds the whole model. `take_weights`
does the same with weights that another model holds.
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
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from millrace.distributed.fsdp import Root, local
from millrace.models.facts import record_facts
from millrace.models.load import (
    LANGUAGE,
    Model,
    ModelError,
    ModelKind,
    empty_of,
    named_weights,
    num_parameters,
    sentences,
)
from millrace.models.load_check import check_files, check_total

# Where a part begins and ends along each dimension of a whole weight.
Part = tuple[slice, ...]


def empty_model(folder: str | Path, *, dtype: torch.dtype, kind: ModelKind = LANGUAGE) -> Model:
    """The model of a folder with our modules, without memory for its weights; buffers have their numbers.

    Args:
        folder: a Hugging Face folder (safetensors).
        dtype: of the weights.
        kind: as what it is loaded.

    Raises:
        ModelError: a file is missing or damaged, or it is no such model; or transformers does not say how a
            buffer is computed.
    """
    path = kind.folder(folder)
    with sentences(path):
        stored = check_files(path)
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model = empty_of(config, dtype=dtype, kind=kind)
        check_total(path, num_parameters(model), stored)
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


@contextmanager
def stored_weights(folder: str | Path, model: Model) -> Iterator[Stored]:
    """The files of a folder, open within the block, with every weight that the model needs.

    Every rank finds the same, before anything is exchanged.

    Args:
        folder: the one that the model was made of, which every rank can read.
        model: from `empty_model`, before parts of it are given to other ranks.

    Raises:
        ModelError: a file is damaged, weights do not fit the config or are stored in a form that cannot be
            read in parts.
    """
    with ExitStack() as stack:
        stored = Stored(Path(folder), model, stack)
        stored.check(model)
        yield stored


def read_weights(
    roots: Sequence[Root], model: Model, stored: Stored, *, device: torch.device, offload: bool = False
) -> None:
    """Give a model memory for what this rank keeps of it, and read that.

    What has memory before (an adapter's pairs) keeps its numbers.

    Args:
        roots: around the model or its stages, shared out by `models.fsdp.shard`, and by `models.tensor` and
            `models.expert` before.
        model: what this rank has of it.
        stored: from `stored_weights`.
        device: that computes.
        offload: whether weights live in the host's memory.

    Raises:
        ModelError: a file is damaged.
    """
    wanted = _without_numbers(model)
    for root in roots:
        _give_memory(root, parameters=torch.device("cpu") if offload else device, others=device)
    for name, tensor in named_weights(model):
        if name in wanted:
            stored.read(name, tensor)


@torch.no_grad()
def try_model(root: Root, kind: ModelKind = LANGUAGE) -> None:
    """Try a model as an ordinary load does; all ranks call it in step.

    Raises:
        ModelError: the architecture cannot run packed.
    """

    def try_it(model: Model) -> tuple[Tensor, ...]:
        kind.tried(model, whole=False)
        return ()

    root(try_it)


@torch.no_grad()
def record_model(root: Root) -> None:
    """Record a model's facts; all ranks call it in step.

    Raises:
        ValueError: as `record_facts`.
    """

    def record(model: Model) -> tuple[Tensor, ...]:
        record_facts(model)
        return ()

    root(record)


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
    """As `read_weights`, from whole weights that pass by one at a time; all ranks go through them in step.

    Args:
        roots: as there.
        model: as there; none of its weights has a second name on another rank.
        named: every weight of the whole model once, in any order.
        wanted: the names of all these.
        device: that computes.
        offload: whether weights live in the host's memory.

    Raises:
        ValueError: a weight is unknown, or missing in the end.
    """
    for root in roots:
        _give_memory(root, parameters=torch.device("cpu") if offload else device, others=device)
    held, left = dict(named_weights(model)), set(wanted)
    for name, tensor in named:
        if name not in left:
            raise ValueError(f"weight {name} is not one of the model's, or came twice")
        left.discard(name)
        if name in held:
            local(held[name]).copy_(tensor[_place(held[name])])
    if left:
        raise ValueError(f"{len(left)} weights are missing, the first being {min(left)}")


def _without_numbers(model: Model) -> set[str]:
    """The weights that are to be read: those without memory, and buffers, which hold what a fresh one has."""
    given = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    return {name for name, _ in named_weights(model)} - given


def _give_memory(root: Root, *, parameters: torch.device, others: torch.device) -> None:
    """Memory for the parameters that this rank keeps, not yet written; what had some keeps its numbers."""
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
    root.to_empty(device=parameters)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(others)
    if not isinstance(root, FSDPModule):
        # Parameters were made anew then, each module its own.
        for (first, first_name), *others_of_it in tied.values():
            for module, name in others_of_it:
                module._parameters[name] = first._parameters[first_name]
    with torch.no_grad():
        for name, tensor in given:
            local(root.get_parameter(name)).copy_(tensor)


def _place(tensor: Tensor) -> Part:
    """What this rank keeps of a tensor, a DTensor or plain, as a part of the whole."""
    begins = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        _, begins = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    sizes = local(tensor).shape
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


class Stored:
    """The tensors of a folder under the names of a model's weights; made by `stored_weights`."""

    def __init__(self, path: Path, model: Model, stack: ExitStack) -> None:
        self._path = path
        # What each parameter is made of: of itself, or by a converter of transformers of many tensors.
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
        # Of tied weights a file may hold either.
        same = {id(tensor): name for name, tensor in known.items() if name in self._sources}
        for name, tensor in known.items():
            if name not in self._sources and id(tensor) in same:
                self._sources[name] = self._sources[same[id(tensor)]]

    def check(self, model: Model) -> None:
        """Refuse a folder that lacks one of the model's weights, or holds one that does not fit."""
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
        """Write into a parameter or buffer, a DTensor or plain, what this rank keeps of it."""
        near = local(tensor)
        if near.numel():
            with sentences(self._path):
                near.copy_(self._slice(name, _place(tensor)))

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole stored weight."""
        sources = self._sources[name]
        shapes = [tuple(file.get_slice(key).get_shape()) for file, key in _firsts(sources)]
        if name not in self._converters:
            return shapes[0]
        self._check_converter(name)
        rows, *rest = shapes[0]
        return len(next(iter(sources.values()))), sum(shape[0] for shape in shapes), *rest

    def _check_converter(self, name: str) -> None:
        """Only experts stored one by one can be read in parts: stacked, gate and up end to end."""
        kinds = [type(step) for step in self._converters[name].operations]
        dims = [getattr(step, "dim", None) for step in self._converters[name].operations]
        if kinds != [MergeModulelist, Concatenate][: len(kinds)] or dims != [0, 1][: len(dims)]:
            raise ModelError(
                f"model folder {self._path}: weight {name} is stored in a form that cannot be read in parts; "
                f"load the folder in one process and save it again"
            )

    def _slice(self, name: str, place: Part) -> Tensor:
        """One part of a stored weight; of experts stored one by one, those it holds are read."""
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


def _firsts(sources: dict[str, list[tuple[Any, str]]]) -> Iterator[tuple[Any, str]]:
    return (found[0] for found in sources.values())


def _natural(key: str) -> list[tuple[int, str]]:
    """Orders names by the numbers in them, so that expert 10 comes after expert 9."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in key.split(".")]
