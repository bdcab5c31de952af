"""A checksum of each weight, to prove that a sampler holds what the trainer sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """SHA-256 over dtype, shape and bytes of each tensor, by name."""
    return {name: _digest(tensor) for name, tensor in named_tensors}


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{flat.dtype} {tuple(flat.shape)} ".encode())
    digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
