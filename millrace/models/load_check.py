"""A model folder, checked before anything of it has memory: words, headers of weights, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from millrace.observability.files import (
    RESTORE,
    FileError,
    Shape,
    StoredTensor,
    paths_within,
    read_json,
    read_tensor_header,
    shown,
)

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
# Fields of a config that count modules: each takes time to make, even one without memory.
_COUNTS = re.compile(r"^(num_.*(layers|experts)|n_layers?)$")
# How much more a model may be than its files: weights that are missing are listed later, by name.
_MOST_TIMES, _SPARE = 2, 1 << 26


class _Generation(Shape):
    eos_token_id: NonNegativeInt | list[NonNegativeInt] | None = None


class _Index(Shape):
    weight_map: dict[str, str]


def check_files(path: Path) -> dict[str, StoredTensor]:
    """Check the files of a model folder except the tokenizer's; return the stored tensors by name.

    Raises:
        FileError: a file is damaged, or the config has sizes that the weights cannot have.
    """
    config = read_json(path / CONFIG, dict[str, Any])
    if not isinstance(config.get("model_type"), str):
        raise FileError(f"{shown(path / CONFIG)} is damaged: it has no model_type; {RESTORE}")
    if (path / GENERATION).exists():
        _check_stops(path / GENERATION, config)
    if (path / INDEX).exists():
        for file in paths_within(path, sorted(set(read_json(path / INDEX, _Index).weight_map.values()))):
            if not file.is_file():
                reason = f"names {shown(file.name)}, which is missing"
                raise FileError(f"{shown(path / INDEX)} {reason}; {RESTORE}")
    stored: dict[str, StoredTensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored |= read_tensor_header(file)
    _check_counts(path / CONFIG, config, stored)
    return stored


def _check_stops(path: Path, config: Mapping[str, Any]) -> None:
    mend = "restore it from a copy, or remove it"
    stops = read_json(path, _Generation, mend=mend).eos_token_id
    text = config.get("text_config") or config
    size = text.get("vocab_size") if isinstance(text, Mapping) else None
    for token in [stops] if isinstance(stops, int) else stops or []:
        if type(size) is int and token >= size:
            raise FileError(f"{shown(path)} is damaged: eos_token_id {token} is not below {size}; {mend}")


def check_total(path: Path, num_elements: int, stored: Mapping[str, StoredTensor]) -> None:
    """Reject a config whose model is far larger than its stored weights, by a FileError."""
    there = sum(tensor.num_elements for tensor in stored.values())
    if num_elements > _MOST_TIMES * there + _SPARE:
        sizes = f"{num_elements:,} weights, and its files hold {there:,}"
        raise FileError(f"{shown(path / CONFIG)} makes a model of {sizes}; {RESTORE}")


def _check_counts(path: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    """Reject a count of modules above the number of stored tensors and all of their dimensions."""
    most = max([len(stored), *(size for tensor in stored.values() for size in tensor.shape)])
    for key, value in _counts(config):
        if type(value) is not int or not 0 <= value <= most:
            wrong = f"{key} is {shown(repr(value))}, and its weights allow at most {most}"
            raise FileError(f"{shown(path)} is damaged: {wrong}; {RESTORE}")


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", count) for inner, count in _counts(value))
        elif value is not None and _COUNTS.match(key):
            yield key, value
