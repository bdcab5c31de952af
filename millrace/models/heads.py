"""Models that give one number for each position: critics and reward models.

They are transformers' own sequence-classification modules with one label, so that their folders load
everywhere; the head is `score.weight`. T = packed tokens, B = segments, N = rows, D = model width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.initialization import no_init_weights

from millrace.kernels.packed_attention import Segments
from millrace.models import attention
from millrace.models.attention import Packed
from millrace.models.facts import record_facts
from millrace.models.fused import fuse
from millrace.models.load import (
    Model,
    ModelError,
    ModelKind,
    check_folder,
    checked,
    empty_of,
    load_kind,
    load_model,
    read_config,
    sentences,
    states_of,
)
from millrace.models.logprobs import hidden_states

_KIND = "ForSequenceClassification"


def scalar_model(model: Model) -> Model:
    """Copy the backbone of a causal language model, under a head of zeros: every score is 0 at first.

    A ModelError if transformers has no sequence classification for this architecture.
    """
    config = _scalar_config(model)
    with no_init_weights():
        made: Model = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention.NAME, dtype=model.dtype
        )
    made.base_model.load_state_dict(model.base_model.state_dict())
    nn.init.zeros_(_head(made).weight)
    made.eval()
    record_facts(made)
    fuse(made)
    return made.to(model.device)


def empty_scalar_model(model: Model) -> Model:
    """Like `scalar_model`, with its errors, without memory for the weights; it may be sharded over ranks."""
    made = empty_of(_scalar_config(model), dtype=model.dtype, kind=SCALAR)
    _head(made)
    return made


def scalar_weights(model: Model, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Convert a language model's weights to those of `scalar_model`, by name.

    The model is from `empty_scalar_model`, before it is sharded; only its head is read, immediately.
    """
    backbone, head = f"{model.base_model_prefix}.", _head(model).weight
    zeros = torch.zeros(head.shape, dtype=head.dtype)
    kept = ((name, weight) for name, weight in named if name.startswith(backbone))
    return chain(kept, [("score.weight", zeros)])


def _scalar_config(model: Model) -> Any:
    if type(model.config) not in AutoModelForSequenceClassification._model_mapping:
        raise ModelError(
            f"model type {model.config.model_type} has no sequence classification in transformers, so "
            "neither a critic nor a reward model can be made of it"
        )
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    return config


def load_scalar_model(folder: str | Path, *, dtype: torch.dtype) -> Model:
    """Load a reward model or a critic from a Hugging Face folder (safetensors).

    Raises:
        ModelError: a file is missing or damaged, the folder holds another kind of model or one with several
            labels, weights do not fit the config, or the architecture cannot run packed.
    """
    return load_kind(SCALAR, folder, dtype=dtype)


def _check_folder(folder: str | Path) -> Path:
    path = check_folder(folder)
    config = _config(path)
    if not _is_scalar(config):
        raise ModelError(
            f"model folder {path} is no reward model (it holds a {_architecture(config)}); train one from it "
            "with: millrace reward-model"
        )
    if config.num_labels != 1:
        raise ModelError(f"model folder {path} gives {config.num_labels} labels; a reward model gives 1")
    return path


def _checked(model: Model, *, whole: bool = True) -> Model:
    _head(model)
    return checked(model, SCALAR.reading, whole=whole)


# States are compared and not scores, since a head near zero would hide any difference.
SCALAR = ModelKind(
    AutoModelForSequenceClassification, _check_folder, _checked, states_of(AutoModelForSequenceClassification)
)


def load_or_make_scalar_model(folder: str | Path, *, dtype: torch.dtype) -> Model:
    """Call `load_scalar_model`, or `scalar_model` of the folder's causal language model; errors as both."""
    if is_scalar(folder):
        return load_scalar_model(folder, dtype=dtype)
    return scalar_model(load_model(folder, dtype=dtype))


def is_scalar(folder: str | Path) -> bool:
    """Return whether a folder holds a sequence classification model; ModelError if it holds no model."""
    return _is_scalar(_config(check_folder(folder)))


def packed_scores(model: Model, token_T: Tensor, position_T: Tensor, length_B: Tensor) -> Tensor:
    """Return the score at every position of a packed row, [T], in float32 (float64 stays float64).

    Positions count from 0 in each segment; an empty one is a ValueError. A gradient flows to the whole model
    where autograd is on.
    """
    segments = Segments.of(length_B.cpu()).to(token_T.device)
    return scores(model, hidden_states(model, token_T, position_T, Packed(segments)))


def scores(model: Model, hidden_ND: Tensor) -> Tensor:
    """Return the scores of final hidden states, [N], in float32 (float64 stays float64)."""
    # A product in bfloat16 would round the score to three digits.
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    score_N: Tensor = hidden_ND.to(wide) @ _head(model).weight[0].to(wide)
    return score_N


def row_scores(model: Model, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the score of each row at its last token, [N]; ValueError without rows, or for an empty one."""
    length_N = torch.tensor([len(row) for row in rows], dtype=torch.long)
    token_T = torch.tensor(list(chain.from_iterable(rows)), device=model.device)
    position_T = torch.cat([torch.arange(len(row), device=model.device) for row in rows])
    return packed_scores(model, token_T, position_T, length_N)[length_N.cumsum(0) - 1]


def max_positions(model: Model) -> int | None:
    """Return the maximum sequence length of the model in tokens; None for no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _head(model: Model) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{type(model).__name__} has no linear head `score`; a decoder's is needed")
    return head


def _config(path: Path) -> Any:
    with sentences(path):
        return read_config(path)


def _architecture(config: Any) -> str:
    return (config.architectures or ["model of unknown kind"])[0]


def _is_scalar(config: Any) -> bool:
    return _architecture(config).endswith(_KIND)
