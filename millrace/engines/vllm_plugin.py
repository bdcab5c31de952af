"""vLLM plugin: weights from shared memory, or a file with the same layout, into every worker of a server.

It runs in the server's environment, with the standard library, torch and vLLM alone; `vllm_command` installs
a copy beside an entry point. After an update that raised, the server must not be used: vLLM may compute with
a mixture of weights, or end at the next request.
"""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

NAME = "millrace"
HEAD = "lm_head.weight"
# Names of input embeddings in Hugging Face models.
EMBEDDINGS = (".embed_tokens.weight", ".wte.weight", ".embed_in.weight", ".word_embeddings.weight")


def register() -> None:
    """Register the backend `millrace`; the entry point that vLLM calls in each of its processes."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, MillraceWeightTransferEngine)


@dataclass
class MillraceInitInfo(WeightTransferInitInfo):
    """The connection needs none."""


@dataclass
class MillraceUpdateInfo(WeightTransferUpdateInfo):
    """All weights of one version.

    Attributes:
        path: of the file that holds them.
        tensors: dtype, shape and first byte of each weight, under its Hugging Face name.
        sha256: of the bytes of each weight.
    """

    path: str
    tensors: dict[str, list[Any]]
    sha256: dict[str, str]


class MillraceWeightTransferEngine(WeightTransferEngine[MillraceInitInfo, MillraceUpdateInfo]):
    """Loads whole weights in checkpoint format, layer by layer, and verifies each."""

    init_info_cls = MillraceInitInfo
    update_info_cls = MillraceUpdateInfo

    def init_transfer_engine(self, init_info: MillraceInitInfo) -> None:
        """Do nothing: each update names its file."""

    def start_weight_update(self) -> None:
        """Restore the layers to the format of a checkpoint."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Convert the layers back to the format that the kernels compute with."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one update; without the base's `torch.accelerator`, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MillraceUpdateInfo) -> None:
        """Map the file, verify the weights and load them.

        Raises:
            ValueError: a weight is missing, has other bits, or the file is too short.
            OSError: the file cannot be opened on this machine.
        """
        expected = dict(self.model.named_parameters())
        with open(update_info.path, "rb") as file:
            # Private: torch takes writable memory only.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        weights = dict(verified(whole, update_info))
        loaded = self.model.load_weights(list(weights.items()))
        missing = sorted(expected.keys() - loaded) if loaded is not None else []
        if missing == [HEAD] and self.model_config.hf_text_config.tie_word_embeddings:
            # vLLM skips it, and on a CPU goes on to compute logits with its repacked copy of the old one.
            missing = [] if self._load_head(expected[HEAD], weights) else missing
        if missing:
            raise ValueError(f"{len(missing)} parameters got no weight, the first being {missing[0]}")

    def _load_head(self, parameter: torch.Tensor, weights: dict[str, torch.Tensor]) -> bool:
        """Load a tied output head; return whether the input embeddings are among the weights."""
        embeddings = [weight for name, weight in weights.items() if name.endswith(EMBEDDINGS)]
        if len(embeddings) == 1:
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, embeddings[0])
        return len(embeddings) == 1

    def shutdown(self) -> None:
        """Do nothing: no file stays open."""


def verified(whole: torch.Tensor, update_info: MillraceUpdateInfo) -> list[tuple[str, torch.Tensor]]:
    """Return every weight as a view of the file's bytes, uint8 [num_bytes]; ValueError if one differs."""
    if update_info.tensors.keys() != update_info.sha256.keys():
        odd = sorted(update_info.tensors.keys() ^ update_info.sha256.keys())
        raise ValueError(f"weight {odd[0]} has no place or no digest")
    weights = []
    for name, (word, shape, begin) in update_info.tensors.items():
        dtype: torch.dtype = getattr(torch, word)
        end = begin + dtype.itemsize * torch.Size(shape).numel()
        if end > len(whole):
            raise ValueError(f"weight {name} ends at byte {end}, and the file has {len(whole)}")
        part = whole[begin:end]
        if hashlib.sha256(part.numpy().data).hexdigest() != update_info.sha256[name]:
            raise ValueError(f"weight {name} did not arrive with the bits that were sent")
        weights.append((name, part.view(dtype).reshape(shape)))
    return weights
