"""AdamW whose two moments are 8-bit codes, by bitsandbytes.

Each 256 neighbouring numbers of a moment are x = s M[code]: s is the largest of their magnitudes, and M a
fixed table of 256 numbers from -1 to 1 (for squares, from 0), which lie closest around 0. A step widens the
codes to float32, moves the weights by AdamW's rule, and codes the new moments. Both moments together take
2 + 8/256 bytes for a number, instead of 8.

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
"""

from __future__ import annotations

import logging
from typing import Any

import torch

# As it is imported, it warns of kernels for products of 4-bit weights, which nothing here makes.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
from bitsandbytes.optim import AdamW8bit  # noqa: E402


class EightBitAdamW(AdamW8bit):
    """AdamW with 8-bit moments, with a state of tensors only, which reports its steps."""

    def start(self) -> None:
        """Make the moments, which are 0."""
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                self.init_state(group, parameter, group_index, index)

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """The state of one weight before its first step."""
        super().init_state(group, p, gindex, pindex)
        # As a tensor it is saved, and filled in place, as the rest of the state is.
        self.state[p]["step"] = torch.zeros((), dtype=torch.int64)

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Move one weight, and overwrite its gradient by what was added to it."""
        assert p.grad is not None
        before = p.detach().clone()
        super().update_step(group, p, gindex, pindex)
        torch.sub(p.detach(), before, out=p.grad)
