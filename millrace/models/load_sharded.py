"""Models from a Hugging Face folder of which each rank reads only its own part.

The model begins without memory (on the meta device), is shared out, and every rank then reads from the files
the rows that it keeps. No rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from millrace.models import attention
from millrace.models.fsdp import Root, Sharding, shard
from millrace.models.fused import fuse
from millrace.models.load import Model, ModelError, check_folder, checked_logits, sentences
from millrace.models.mesh import Mesh

# Where a part begins and ends along each dimension of a whole weight.
Part = tuple[slice, ...]


def load_sharded(
    folder: str | Path,
    mesh: Mesh,
    sharding: Sharding,
    *,
    dtype: torch.dtype,
    prepare: Callable[[Model], None] | None = None,
) -> Root:
    """A model from a folder, shared out as `models.fsdp.shard` does it; all ranks call it in step.

    Args:
        folder: a Hugging Face folder (safetensors) that every rank can read.
        mesh: the layout; it is checked against the model.
        sharding: how memory is saved.
        dtype: of the weights.
        prepare: changes the model in place before it is shared out, while it has no memory (tensor parallel:
            DTensors over `tp`; fewer layers or experts). The caller then answers for the architecture,
            which is otherwise tried as `load_model` does it.

    Raises:
        ModelError: a file is missing or damaged, weights do not fit the config or are stored in a form that
            cannot be read in parts, or the architecture cannot run packed.
        ValueError: the layout does not divide the model.
    """
    path = check_folder(folder)
    with sentences(path):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    mesh.check(config)
    model = _without_memory(config, path, dtype)
    if prepare is not None:
        prepare(model)
    root = shard(model, mesh, sharding)
    _give_memory(
        root, parameters=torch.device("cpu") if sharding.offload else mesh.device, others=mesh.device
    )
    with ExitStack() as stack:
        files = _Files(path, root.model, stack)
        for name, tensor in _stored(root.model).items():
            files.read(name, tensor)
    if prepare is None:
        with torch.no_grad():
            root(_check_packed)
    return root


def _check_packed(model: Model) -> tuple[Tensor, ...]:
    checked_logits(model)
    return ()


def _without_memory(config: PretrainedConfig, path: Path, dtype: torch.dtype) -> Model:
    """The model with our modules, its parameters on the meta device and its buffers as they must be."""
    attention.register()
    with sentences(path), torch.device("meta"):
        model: Model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.NAME, dtype=dtype
        )
    # Dropout off for good: the sampler and the trainer must be one function.
    model.eval()
    generation = path / "generation_config.json"
    if generation.is_file():
        with sentences(path):
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    # A norm is tried with weights before it is replaced by ours; it is small.
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.to_empty(device="cpu")
    fuse(model)
    for norm in norms:
        norm.to("meta")
    _compute_buffers(model)
    return model


def _compute_buffers(model: Model) -> None:
    """Numbers that no file holds (rotary frequencies, scales), by transformers' own initialisation."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            module._buffers[name] = torch.full_like(buffer, float("nan"), device="cpu")
        if buffers:
            # Its parameters have no memory yet, so nothing is drawn.
            model._init_weights(module)
    for name, buffer in model.named_non_persistent_buffers():
        if buffer.isnan().any():
            raise ModelError(
                f"a {model.config.model_type} cannot be loaded in parts, since transformers does not say how "
                f"its {name} is computed; load it whole"
            )


def _stored(model: Model) -> dict[str, Tensor]:
    """What files hold of a model: its parameters, tied ones once, and the buffers that are no constants."""
    constants = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in constants}
    return dict(model.named_parameters()) | buffers


def _give_memory(root: Root, *, parameters: torch.device, others: torch.device) -> None:
    """Memory for the parameters that this rank keeps, not yet written; buffers keep their numbers."""
    buffers = [
        (module, name, buffer)
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    root.to_empty(device=parameters)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(others)
    if not isinstance(root, FSDPModule):
        # Parameters were made anew then, each module its own.
        root.model.tie_weights()


class _Files:
    """The tensors of a folder under the names of a model's parameters."""

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
        self._same = {id(parameter): name for name, parameter in known.items() if name in self._sources}

    @torch.no_grad()
    def read(self, name: str, parameter: Tensor) -> None:
        """Write into a parameter or buffer, a DTensor or plain, what this rank keeps of it."""
        # Of tied weights a file may hold either.
        name = name if name in self._sources else self._same.get(id(parameter), name)
        if name not in self._sources:
            raise ModelError(f"model folder {self._path} lacks weights, one of them being {name}")
        local: Tensor = parameter
        begins = [0] * parameter.ndim
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            mesh, placements = parameter.device_mesh, parameter.placements
            begins = list(compute_local_shape_and_global_offset(parameter.shape, mesh, placements)[1])
        stored = self._shape(name)
        if stored != tuple(parameter.shape):
            raise ModelError(
                f"model folder {self._path}: weight {name} is {stored} but config.json makes it "
                f"{tuple(parameter.shape)}"
            )
        if not local.numel():
            return
        place = tuple(slice(begin, begin + size) for begin, size in zip(begins, local.shape, strict=True))
        with sentences(self._path):
            local.copy_(self._slice(name, place))

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
