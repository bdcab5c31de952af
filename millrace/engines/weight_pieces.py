"""Weights in pieces over the connection to a worker that does not map the shared memory."""

from __future__ import annotations

import mmap
import os

import numpy as np

from millrace.engines.wire import Channel, Frame
from millrace.transport.shared_memory import WeightManifest, pieces

PIECE_BYTES = 1 << 24


def send_pieces(
    channel: Channel, weights: int, manifest: WeightManifest, patch: dict[str, list[int]]
) -> WeightManifest:
    """Send what the memory `weights` holds as frames `weights`; return the manifest of the copy.

    `patch` has the byte ranges of deltas to the weights that the worker holds; see `WeightManifest`.
    """
    copied: WeightManifest = {**manifest, "patch": patch, "changes": None}
    memory = np.frombuffer(mmap.mmap(weights, 0, prot=mmap.PROT_READ), np.uint8)
    for begin, end in pieces(copied, PIECE_BYTES):
        channel.send("weights", {"begin": begin}, {"piece": memory[begin:end]})
    return copied


def write_piece(weights: int, frame: Frame) -> None:
    """Write a frame of `send_pieces` to the worker's own memory.

    No reader races with it: an update is sent only after the previous one was acknowledged.
    """
    piece, at = frame.arrays["piece"].data, frame.metadata["begin"]
    while piece:
        num_written = os.pwrite(weights, piece, at)
        piece, at = piece[num_written:], at + num_written
