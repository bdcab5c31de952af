"""CUDA graphs of decode steps: one launch for a forward of hundreds of kernels.

A graph reads and writes fixed memory. So a step is copied into static buffers and padded with unused rows to
one of a few sizes; each size is captured once.

T = B = rows of a decode step, one token each, C = blocks of the longest row, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.kernels.paged_attention import PagedRows

# Steps are padded to powers of two up to this size, and to multiples of it above.
LARGEST_POWER = 64


@dataclass(frozen=True, slots=True)
class Inputs:
    """Model inputs of one step: `last_B` is the index into T of each row's last token; tokens are int64."""

    token_T: Tensor
    position_T: Tensor
    rows: PagedRows
    last_B: Tensor


Forward = Callable[[Inputs], Tensor]
# Captures a call; returns a function that replays it, and the tensor that holds the result after each replay.
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def record_cuda(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture a call as a CUDA graph; the call must not synchronise with the device."""
    # A warm-up call compiles kernels and allocates workspaces before the capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, out


class DecodeGraphs:
    """Captured forwards of decode steps, in which every row computes one token.

    A graph is captured at the first step of its size. `forward` computes final hidden states [T, D] of a step
    and reads its inputs in place; the attention of every graph is sized for `max_length` tokens.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_rows: int,
        max_length: int,
        block_size: int,
        device: torch.device,
        record: Record = record_cuda,
    ) -> None:
        self._forward = forward
        self._record = record
        self._max_length = max_length
        size = bucket(max_rows)

        def numbers(value: int, *more: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((size, *more), value, dtype=dtype, device=device)

        rows = PagedRows(
            block_BC=numbers(0, -(-max_length // block_size), dtype=torch.int32),
            start_B=numbers(0),
            first_B=torch.arange(size, device=device),
            count_B=numbers(1),
            slot_T=numbers(-1),
            max_count=1,
            max_length=max_length,
        )
        self._buffers = Inputs(numbers(0), numbers(0), rows, torch.arange(size, device=device))
        self._replays: dict[int, tuple[Callable[[], None], Tensor]] = {}

    def fits(self, inputs: Inputs) -> bool:
        """Return whether a step can be replayed as a graph."""
        rows = inputs.rows
        return (
            rows.max_count == 1
            and rows.max_length <= self._max_length
            and len(inputs.token_T) <= len(self._buffers.token_T)
        )

    def __call__(self, inputs: Inputs) -> Tensor:
        """Compute final hidden states of a step that fits, [T, D]; the next call overwrites them."""
        num = len(inputs.token_T)
        size = bucket(num)
        buffers = self._slice(size)
        columns = inputs.rows.block_BC.shape[1]
        buffers.rows.block_BC[:num, :columns].copy_(inputs.rows.block_BC)
        pairs = (
            (buffers.token_T, inputs.token_T, 0),
            (buffers.position_T, inputs.position_T, 0),
            (buffers.rows.start_B, inputs.rows.start_B, 0),
            # Padding rows store no keys and values, and attend to one slot of some block.
            (buffers.rows.slot_T, inputs.rows.slot_T, -1),
        )
        for buffer, given, rest in pairs:
            buffer[:num].copy_(given)
            buffer[num:].fill_(rest)
        if size not in self._replays:
            self._replays[size] = self._record(lambda: self._forward(buffers))
        replay, hidden_TD = self._replays[size]
        replay()
        return hidden_TD[:num]

    def _slice(self, size: int) -> Inputs:
        all_, rows = self._buffers, self._buffers.rows
        part = PagedRows(
            block_BC=rows.block_BC[:size],
            start_B=rows.start_B[:size],
            first_B=rows.first_B[:size],
            count_B=rows.count_B[:size],
            slot_T=rows.slot_T[:size],
            max_count=1,
            max_length=self._max_length,
        )
        return Inputs(all_.token_T[:size], all_.position_T[:size], part, all_.last_B[:size])


def bucket(num_rows: int) -> int:
    """Return the padded size of a step of `num_rows` rows."""
    if num_rows <= LARGEST_POWER:
        return 1 << (num_rows - 1).bit_length()
    return -(-num_rows // LARGEST_POWER) * LARGEST_POWER
