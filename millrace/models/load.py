"""Models from a Hugging Face folder or fresh from a config, with our attention; saving to a folder."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from millrace.models import attention
from millrace.models.facts import backbone, record_facts
from millrace.models.fused import fuse
from millrace.models.layer_check import compare_layers
from millrace.models.load_check import check_files, check_total
from millrace.models.logprobs import output_head
from millrace.models.own_attention import adopt
from millrace.models.trial import FAULTS, TrialReadout, find_problem
from millrace.models.twin import first_line
from millrace.observability.files import RESTORE, FileError, shown

# Its progress bars would overwrite the console of the run.
transformers_logging.disable_progress_bar()
# Its warnings about weights that do not fit are errors here, of one sentence.
transformers_logging.set_verbosity_error()

# The one name by which other packages call a transformers model, and its weights by name.
Model = PreTrainedModel
Weights = dict[str, Tensor]


class ModelError(ValueError):
    """A model that cannot be built or loaded; the message names what to change."""


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The kind of model that a folder is loaded as.

    `folder` returns the folder if it holds one, and raises a `ModelError` otherwise. `tried` gives the model
    our modules, and raises one where its packed forward differs from its plain one in `reading`;
    `whole=False` means that parts of it are on other ranks.
    """

    auto: Any
    folder: Callable[[str | Path], Path]
    tried: Callable[..., PreTrainedModel]
    reading: TrialReadout


def fresh_config(
    architecture: str, shape: dict[str, Any], *, vocab_size: int, eos_token_id: int
) -> PretrainedConfig:
    """Build a transformers config for a fresh model.

    Raises:
        ModelError: unknown architecture, unknown or impossible shape field.
    """
    try:
        known = AutoConfig.for_model(architecture).to_dict()
    except (ValueError, KeyError):
        raise ModelError(
            f"model.architecture {architecture!r} is not one transformers knows, such as qwen3"
        ) from None
    for key in shape:
        if key in ("vocab_size", "eos_token_id"):
            raise ModelError(f"model.shape.{key} comes from the tokenizer; remove it")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ModelError(f"model.shape.{key} is not a field of {architecture}{hint}")
    # No padding token: transformers would freeze the embedding of whichever token it names.
    tokens = {"eos_token_id": eos_token_id, "bos_token_id": None, "pad_token_id": None}
    try:
        return AutoConfig.for_model(architecture, **shape, vocab_size=vocab_size, **tokens)
    except Exception as error:  # transformers validates with several exception types of its own
        raise ModelError(f"model.shape does not fit {architecture}: {first_line(error)}") from None


def fresh_model(config: PretrainedConfig, *, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with random weights; ModelError if its shape is impossible or it cannot run packed."""
    attention.register()
    adopt(config.model_type)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # float32 first: sampling in bfloat16 would give other weights than the same seed in float32.
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention.NAME, dtype=torch.float32
            )
        except Exception as error:
            raise ModelError(
                f"model.shape does not make a {config.model_type}: {first_line(error)}"
            ) from None
    # Frequencies of positions and biases of routers stay float32, as in a model that is loaded.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return checked_logits(model)


def check_folder(folder: str | Path) -> Path:
    """Return the folder; a missing folder or file is a `ModelError`."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"model folder {path} does not exist")
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {path} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelError(
            f"model folder {path} has no .safetensors file; convert its weights (pickles are not read)"
        )
    return path


def load_model(folder: str | Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load a language model from a Hugging Face folder (safetensors).

    Raises:
        ModelError: a file is missing or damaged, weights do not fit the config, or the architecture cannot
            run packed.
    """
    return load_kind(LANGUAGE, folder, dtype=dtype)


def load_kind(kind: ModelKind, folder: str | Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model of a kind with our modules; errors as `load_model`, or for another kind."""
    path = kind.folder(folder)
    attention.register()
    with sentences(path):
        stored, config = check_files(path), read_config(path)
        adopt(config.model_type)
        with torch.device("meta"):
            empty = kind.auto.from_config(config, attn_implementation=attention.NAME)
        check_total(path, num_parameters(empty), stored)
        model, info = kind.auto.from_pretrained(
            path,
            attn_implementation=attention.NAME,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed, and refused below by name
        )
    if info["mismatched_keys"]:
        name, held, wanted = sorted(info["mismatched_keys"])[0]
        raise ModelError(
            f"model folder {path}: weight {name} is {tuple(held)} but config.json makes it {tuple(wanted)}"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(f"model folder {path} lacks {len(missing)} weights, the first being {missing[0]}")
    for parameter in model.parameters():
        # In the mapped file a weight begins anywhere, and products of unaligned memory round differently: a
        # resumed run would not repeat every bit.
        parameter.data = parameter.data.clone()
    return kind.tried(model)


@contextmanager
def sentences(path: Path) -> Iterator[None]:
    """Convert transformers' errors on a bad folder to one sentence that names it."""
    try:
        yield
    except FileError as error:
        raise ModelError(str(error)) from None
    except Exception as error:  # whatever a field of the wrong type led to
        raise ModelError(
            f"model folder {shown(path)} cannot be loaded: {first_line(error)}; {RESTORE}"
        ) from None


def read_config(path: Path) -> Any:
    """Read a folder's config, without code from it; errors are those of transformers."""
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a Hugging Face folder of a model whole on this rank."""
    model.save_pretrained(folder, safe_serialization=True)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all that a folder of the model holds, by name: parameters, tied ones once, then buffers.

    Buffers that are computed from the config are none of it; the biases of a router's choice are.
    """
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def num_parameters(model: PreTrainedModel) -> int:
    """Return the number of weights, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def checked_logits(model: PreTrainedModel, *, whole: bool = True) -> PreTrainedModel:
    """Call `checked` for a causal language model."""
    return checked(model, LANGUAGE.reading, whole=whole)


def _packed_logprobs(model: PreTrainedModel, hidden_TD: Tensor) -> Tensor:
    return output_head(model).logits(hidden_TD).log_softmax(-1)


def _plain_logprobs(model: PreTrainedModel, token_1T: Tensor) -> Tensor:
    logit_1TV: Tensor = model(token_1T, use_cache=False).logits
    return logit_1TV.float().log_softmax(-1)


LANGUAGE = ModelKind(
    AutoModelForCausalLM,
    check_folder,
    checked_logits,
    TrialReadout("log-probabilities", AutoModelForCausalLM, _packed_logprobs, _plain_logprobs),
)


def states_of(auto: Any) -> TrialReadout:
    """Return the readout of final hidden states of a kind of model."""

    def packed(model: PreTrainedModel, hidden_TD: Tensor) -> Tensor:
        return hidden_TD

    def plain(model: PreTrainedModel, token_1T: Tensor) -> Tensor:
        hidden_1TD: Tensor = backbone(model)(token_1T, use_cache=False).last_hidden_state
        return hidden_1TD

    return TrialReadout("states", auto, packed, plain)


def checked(model: PreTrainedModel, reading: TrialReadout, *, whole: bool = True) -> PreTrainedModel:
    """Give a model our modules, turn off dropout, and reject it if it differs from transformers' own forward.

    The architecture is tried on a small twin (`models.trial`), this model's weights in one layer of each kind
    (`models.layer_check`). The forward may end behind these layers if the `whole` model is in this process.

    Raises:
        ModelError: they differ, or one of them cannot be made.
    """
    _check_rotary(model)
    problem = find_problem(model.config, reading.of(model))
    if not problem:
        # Dropout off for good: the sampler and the trainer must be one function.
        model.eval()
        try:
            if whole:
                _check_finite(model)
            record_facts(model)
            problem = compare_layers(model, reading, whole=whole)
        except FAULTS as error:
            problem = first_line(error)
    if problem:
        raise ModelError(f"model type {model.config.model_type} cannot be trained by millrace: {problem}")
    return model


def _check_finite(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"its weight {name} holds numbers that are not finite")


def _check_rotary(model: PreTrainedModel) -> None:
    """Reject rotary embeddings that depend on the longest sequence of the batch."""
    config = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    several = [value for value in given.values() if isinstance(value, dict)]
    for parameters in several or [given]:
        kind = parameters.get("rope_type")
        original = parameters.get("original_max_position_embeddings")
        switches = kind == "longrope" and original and original < config.max_position_embeddings
        if kind == "dynamic" or switches:
            hint = f"; set max_position_embeddings to {original} in config.json to use it" if switches else ""
            raise ModelError(
                f"model type {model.config.model_type} with rope_type {kind} cannot be used by millrace: its "
                f"positions depend on the longest sequence of a batch, so no two batches agree{hint}"
            )


def empty_of(config: PretrainedConfig, *, dtype: torch.dtype, kind: ModelKind = LANGUAGE) -> PreTrainedModel:
    """Build the model of a config; otherwise like `empty_model`."""
    attention.register()
    adopt(config.model_type)
    with torch.device("meta"):
        model: PreTrainedModel = kind.auto.from_config(
            config, attn_implementation=attention.NAME, dtype=dtype
        )
    # Dropout off for good: the sampler and the trainer must be one function.
    model.eval()
    # A norm is tried with weights before it is replaced by ours; it is small.
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.to_empty(device="cpu")
    fuse(model)
    model.to("meta")
    _compute_buffers(model)
    return model


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute numbers that no file holds (rotary frequencies, scales) as transformers initializes them."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            module._buffers[name] = torch.full_like(buffer, _unknown(buffer), device="cpu")
        if buffers:
            # Its parameters have no memory yet, so no random numbers are generated.
            model._init_weights(module)
    for name, buffer in model.named_non_persistent_buffers():
        if (buffer.isnan() | (buffer == _unknown(buffer))).any():
            raise ModelError(
                f"a {model.config.model_type} cannot be loaded in parts, since transformers does not define "
                f"how its {name} is computed; load it whole"
            )


def _unknown(buffer: Tensor) -> float:
    return torch.iinfo(buffer.dtype).min if buffer.dtype in (torch.int32, torch.int64) else float("nan")
