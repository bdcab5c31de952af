"""The trainer's weights as a server reads them: shared memory, a copy of it, or a safetensors folder."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch

from millrace.engines.http_client import ServerError
from millrace.inference.server.placed_weights import read_placed
from millrace.transport.shared_memory import Place, WeightManifest
from millrace.transport.weight_update import WeightSyncError

_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNMENT = 64


@asynccontextmanager
async def raw_file(weights: int, manifest: WeightManifest, folder: str) -> AsyncIterator[str]:
    """Yield the path of the weights in the manifest's own layout.

    Args:
        weights: descriptor of the trainer's shared memory.
        manifest: what it holds.
        folder: for a copy, which is removed afterwards; empty for the shared memory itself.

    Raises:
        ServerError: the folder cannot be written.
    """
    if not folder:
        yield _link(weights)
        return
    path = Path(folder) / f"millrace-{secrets.token_hex(8)}-{manifest['version']}.weights"

    def copy() -> None:
        with open(path, "wb") as file:
            _send(weights, 0, file.fileno(), manifest["bytes"])

    try:
        await _in_thread(copy, folder)
        yield str(path)
    finally:
        with suppress(OSError):
            path.unlink()


@asynccontextmanager
async def safetensors_folder(weights: int, manifest: WeightManifest, folder: str) -> AsyncIterator[str]:
    """Yield a folder with one safetensors file, whose weights were verified with the trainer's checksums.

    Without a shared folder the file is a link to memory of this process, so that nothing reaches a disk.

    Args:
        weights: descriptor of the trainer's shared memory.
        manifest: what it holds.
        folder: in which the safetensors folder is made, and removed afterwards; empty for memory.

    Raises:
        ServerError: the folder cannot be written, or the weights are not those that the trainer wrote.
    """
    where = Path(folder or tempfile.gettempdir()) / f"millrace-{secrets.token_hex(8)}"
    path, memory = where / "model.safetensors", os.memfd_create("millrace-weights-safetensors")

    def copy() -> None:
        where.mkdir(mode=0o777 if folder else 0o700)
        if folder:
            with open(path, "xb", buffering=0) as file:
                places = _write_safetensors(weights, manifest, file.fileno())
            read_placed(str(path), places, manifest["fingerprint"], None)
        else:
            places = _write_safetensors(weights, manifest, memory)
            read_placed(_link(memory), places, manifest["fingerprint"], None)
            path.symlink_to(_link(memory))

    try:
        await _in_thread(copy, folder)
        yield str(where)
    finally:
        os.close(memory)
        shutil.rmtree(where, ignore_errors=True)


def _link(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


async def _in_thread(copy: Callable[[], None], folder: str) -> None:
    try:
        await asyncio.to_thread(copy)
    except OSError as error:
        raise ServerError(f"{'engine.weights_folder' if folder else 'shared memory'}: {error}") from None
    except WeightSyncError as error:
        raise ServerError(str(error)) from None


def _write_safetensors(weights: int, manifest: WeightManifest, into: int) -> dict[str, Place]:
    """Write the weights, and return where each of them is in the file.

    The library of the format would hold all bytes once more, since it does not write to a descriptor. The
    format has no gaps; sorted by the size of their numbers, all weights are aligned.
    """
    sizes = {name: _itemsize(place[0]) for name, place in manifest["tensors"].items()}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, ends = 0, {}
    for name in names:
        dtype, shape, _ = manifest["tensors"][name]
        end = at + sizes[name] * torch.Size(shape).numel()
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        ends[name] = (at, end)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    os.write(into, struct.pack("<Q", len(text)) + text)
    begin = 8 + len(text)
    places: dict[str, Place] = {}
    for name in names:
        dtype, shape, there = manifest["tensors"][name]
        first, end = ends[name]
        _send(weights, there, into, end - first)
        places[name] = (dtype, shape, begin + first)
    return places


def _itemsize(dtype: str) -> int:
    if dtype not in _DTYPES:
        raise ServerError(f"weights of dtype {dtype} cannot be written as safetensors")
    number: torch.dtype = getattr(torch, dtype)
    return number.itemsize


def _send(source: int, begin: int, into: int, count: int) -> None:
    """Append `count` bytes of a file, from `begin`, to another one."""
    end = begin + count
    while begin < end:
        sent = os.sendfile(into, source, begin, end - begin)
        if not sent:
            raise OSError(f"the weights end at byte {begin} instead of {end}")
        begin += sent
