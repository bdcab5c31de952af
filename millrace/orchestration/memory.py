"""How much memory an engine's cache may take."""

from __future__ import annotations

import os

import torch

from millrace.config.engine import EngineConfig
from millrace.models.attention import CacheShape
from millrace.models.load import Model

# Of the memory that is free when the engine is built; the trainer's gradients and activations need the rest.
SHARE = 0.25


def cache_tokens(config: EngineConfig, model: Model, longest: int) -> int:
    """Tokens whose keys and values are kept.

    Args:
        config: the recipe's engine; its `cache_tokens` is taken as it is.
        model: whose keys and values they are.
        longest: tokens of the longest sequence.
    """
    if config.cache_tokens is not None:
        return config.cache_tokens
    shape = CacheShape.of(model.config)
    token_bytes = 2 * shape.num_layers * shape.num_heads * shape.width * model.dtype.itemsize
    # A sequence's last block may be almost empty.
    wanted = config.max_requests * (longest + config.block_size)
    return max(longest + config.block_size, min(wanted, int(SHARE * free_bytes(model.device)) // token_bytes))


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # Not every system says what is free; a quarter of what there is, is a careful guess.
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    share = 1.0 if pages == "SC_AVPHYS_PAGES" else 0.25
    return int(share * os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))
