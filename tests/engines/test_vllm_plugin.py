"""The plugin that takes weights in a vLLM server, with stand-ins for what it imports of vLLM."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

A, B = TypeVar("A"), TypeVar("B")


class Base(Generic[A, B]):
    """The part of vLLM's class that the plugin uses."""

    model: nn.Module
    model_config: Any


def copied(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    parameter.data.copy_(weight)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Base,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": None},
        "vllm.model_executor.model_loader.reload": {
            "finalize_layerwise_reload": None,
            "initialize_layerwise_reload": None,
        },
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": copied},
    }
    for name, members in names.items():
        for count in range(name.count("."), -1, -1):
            package = name.rsplit(".", count)[0]
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, "millrace.engines.vllm_plugin", raising=False)
    yield importlib.import_module("millrace.engines.vllm_plugin")
    sys.modules.pop("millrace.engines.vllm_plugin", None)


class Served(nn.Module):
    """A model as vLLM has it during an update: its head is a parameter of its own, and is not loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 2), "norm": nn.Linear(2, 1, bias=False)})
        self.lm_head = nn.Linear(2, 4, bias=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        taken = [(name, weight) for name, weight in weights if name != "lm_head.weight"]
        for name, weight in taken:
            copied(own[name], weight)
        return {name for name, _ in taken}


def written(path: Path, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    places, digests, data = {}, {}, b""
    for name, weight in weights.items():
        part = weight.numpy().tobytes()
        places[name] = ["float32", list(weight.shape), len(data)]
        digests[name] = hashlib.sha256(part).hexdigest()
        data += part
    path.write_bytes(data)
    return {"path": str(path), "tensors": places, "sha256": digests}


WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(8.0).view(4, 2),
    "model.norm.weight": torch.ones(1, 2),
}


def receiving(plugin: Any, info: dict[str, Any], *, tied: bool = True) -> Served:
    engine = plugin.MillraceWeightTransferEngine()
    engine.model = Served()
    engine.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=tied))
    engine.receive_weights(plugin.MillraceUpdateInfo(**info))
    return engine.model


def test_a_tied_head_gets_the_input_embeddings(plugin: Any, tmp_path: Path) -> None:
    model = receiving(plugin, written(tmp_path / "weights", WEIGHTS))
    for parameter in (model.lm_head.weight, model.model["embed_tokens"].weight):
        assert parameter.tolist() == WEIGHTS["model.embed_tokens.weight"].tolist()


def test_a_parameter_without_a_weight_is_an_error(plugin: Any, tmp_path: Path) -> None:
    whole = written(tmp_path / "weights", WEIGHTS)
    with pytest.raises(ValueError, match=r"1 parameters got no weight, the first being lm_head\.weight"):
        receiving(plugin, whole, tied=False)
    for name, count in (("model.norm.weight", 2), ("model.embed_tokens.weight", 2)):
        less = written(tmp_path / "less", {key: value for key, value in WEIGHTS.items() if key != name})
        with pytest.raises(ValueError, match=f"{count} parameters got no weight"):
            receiving(plugin, less)


def test_other_bits_and_places_are_errors(plugin: Any, tmp_path: Path) -> None:
    whole = written(tmp_path / "weights", WEIGHTS)
    content = bytearray((tmp_path / "weights").read_bytes())
    content[-1] ^= 1
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(ValueError, match=r"weight model\.norm\.weight did not arrive with the bits"):
        receiving(plugin, whole)
    (tmp_path / "weights").write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"model\.norm\.weight ends at byte 40, and the file has 36"):
        receiving(plugin, whole)
    with pytest.raises(ValueError, match=r"weight model\.norm\.weight has no place or no digest"):
        receiving(plugin, {**whole, "sha256": {"model.embed_tokens.weight": ""}})
