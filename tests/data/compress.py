"""Compressed files for tests."""

from __future__ import annotations

import pyarrow


def zstd(data: bytes) -> bytes:
    """The bytes as one frame of Zstandard."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    written: bytes = sink.getvalue().to_pybytes()
    return written
