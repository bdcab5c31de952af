"""Weights through a folder: safetensors files, and a manifest that is written last.

In `/dev/shm` the folder is shared memory: the files are mapped by both sides, what the trainer writes is
what the sampler reads, and with `reuse` the next version is written over pages that are there already. On a
disk that several machines share it is how weights reach a sampler elsewhere; there every version has files
of its own.

    FOLDER/lock                       held by the one trainer that sends here
    FOLDER/manifest.json              {attempt, opening, files: {name: {bytes, start, tensors}}, closing}
    FOLDER/ATTEMPT/00000.safetensors  ...
    FOLDER/ATTEMPT.0.answer           of sampler 0

There is one version in it at a time. It goes when every sampler has answered; what a killed trainer left
goes when the next one opens the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from millrace.transport.fingerprint import raw_bytes
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import Note, Parcel

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMED = {name: dtype for dtype, name in DTYPES.items()}
MANIFEST = "manifest.json"
# Attempts, and answers to them.
OURS = re.compile(r"[0-9a-f]{32}(\.\d+\.answer(\.part)?)?")
LOOK_EVERY_S = 0.002


class FolderSender:
    """The trainer's end; a context manager that leaves nothing behind."""

    device = torch.device("cpu")

    def __init__(
        self,
        folder: Path,
        *,
        deadline_s: float,
        num_samplers: int = 1,
        reuse: bool = False,
        file_bytes: int = 1 << 30,
    ) -> None:
        """Take the folder, and clear what another trainer left in it.

        Args:
            folder: made if it is not there, readable by its owner alone.
            deadline_s: how long samplers may take to load and prove a version.
            num_samplers: how many answers to wait for.
            reuse: write the next version over the files of the last, once all samplers have answered; only
                where both sides run on one machine.
            file_bytes: a file ends once it holds so many; so many wait in memory before it is written.

        Raises:
            WeightSyncError: another trainer that still lives sends through it.
        """
        self._folder, self._deadline_s, self._num_samplers = folder, deadline_s, num_samplers
        self._reuse, self._file_bytes = reuse, file_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise WeightSyncError(f"another trainer sends weights through {folder}") from error
        # Whether the last attempt's files may be written over.
        self._attempt, self._spare = "", False
        self._maps = Maps()
        self._clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove what is in the folder; a sampler that still reads keeps its pages until it is done."""
        self._clear()
        (self._folder / "lock").unlink()
        if not any(self._folder.iterdir()):
            self._folder.rmdir()
        self._lock.close()

    def put(
        self, opening: Note, named_tensors: Iterable[tuple[str, Tensor]], closing: Callable[[], Note]
    ) -> int:
        """Write files, then the manifest; see `sync.Outgoing`."""
        place = self._fresh_place()
        self._maps.turn()
        files: dict[str, Note] = {}
        waiting: dict[str, Tensor] = {}
        num_bytes, waiting_bytes = 0, 0
        for name, tensor in named_tensors:
            waiting[name] = tensor
            waiting_bytes += tensor.nbytes
            num_bytes += tensor.nbytes
            if waiting_bytes >= self._file_bytes:
                self._write(place, waiting, files)
                waiting, waiting_bytes = {}, 0
        self._write(place, waiting, files)
        for path in place.iterdir():
            if path.name not in files:
                path.unlink()
        note = {"attempt": place.name, "opening": opening, "files": files, "closing": closing()}
        _write_whole(self._folder / MANIFEST, note)
        return num_bytes

    def answers(self) -> list[Note]:
        """What each sampler wrote, in order; see `sync.Outgoing`."""
        ends = time.monotonic() + self._deadline_s
        answers = []
        for sampler in range(self._num_samplers):
            path = self._folder / _answer_name(self._attempt, sampler)
            note = _await(path, ends)
            if note is None:
                raise WeightSyncError(
                    f"sampler {sampler} of {self._num_samplers} has not answered within "
                    f"{self._deadline_s:g} s (it writes {path} once it has loaded the weights)"
                )
            answers.append(note)
        self._spare = self._reuse
        self._clear(keep=self._attempt if self._reuse else "")
        return answers

    def _fresh_place(self) -> Path:
        """A folder for the next attempt, with the last one's files in it where those may be written over."""
        place = self._folder / uuid.uuid4().hex
        if self._spare:
            (self._folder / self._attempt).rename(place)
        # A sampler that has not answered may still read: it keeps its pages, and the names go.
        self._attempt, self._spare = place.name, False
        self._clear(keep=place.name)
        place.mkdir(exist_ok=True)
        return place

    def _clear(self, keep: str = "") -> None:
        """Remove what a sender or its samplers wrote here, and nothing else that somebody keeps here."""
        (self._folder / MANIFEST).unlink(missing_ok=True)
        for path in self._folder.iterdir():
            if OURS.fullmatch(path.name) and path.name != keep:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _write(self, place: Path, tensors: dict[str, Tensor], files: dict[str, Note]) -> None:
        """One more file in the format of safetensors: length of the header, header, tensors."""
        # The widest first, so that each begins at a multiple of its width.
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        header: Note = {}
        end = 0
        for name, tensor in ordered:
            if tensor.dtype not in DTYPES:
                raise WeightSyncError(f"weight {name} is {tensor.dtype}, which safetensors files do not hold")
            offsets = [end, end := end + tensor.nbytes]
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        start, path = 8 + len(text), place / f"{len(files):05d}.safetensors"
        files[path.name] = {"bytes": start + end, "start": start, "tensors": header}
        memory = self._maps.of(path, start + end, create=True)
        memory[:start] = torch.frombuffer(
            bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8
        )
        for name, tensor in ordered:
            first, last = header[name]["data_offsets"]
            memory[start + first : start + last] = raw_bytes(tensor)


class FolderReceiver:
    """A sampler's end."""

    def __init__(self, folder: Path, *, deadline_s: float, sampler: int = 0) -> None:
        """Nothing is read yet; the folder need not be there.

        Args:
            folder: of the sender.
            deadline_s: how long to wait for a version.
            sampler: which of the sender's samplers this is, from 0.
        """
        self._folder, self._deadline_s, self._sampler = folder, deadline_s, sampler
        self._attempt = ""
        self._maps = Maps()

    def take(self) -> Parcel:
        """Wait for a manifest that was not seen before; see `sync.Incoming`."""
        path = self._folder / MANIFEST
        note = _await(path, time.monotonic() + self._deadline_s, seen=self._attempt)
        if note is None:
            raise WeightSyncError(
                f"no new weights within {self._deadline_s:g} s "
                f"(the trainer writes {path} once they are there)"
            )
        self._attempt = note["attempt"]
        return Parcel(note["opening"], self._read(note["files"]), lambda: note["closing"])

    def answer(self, note: Note) -> None:
        """Write the answer for the sender to find; see `sync.Incoming`."""
        _write_whole(self._folder / _answer_name(self._attempt, self._sampler), note)

    def _read(self, files: dict[str, Note]) -> Iterator[tuple[str, Tensor]]:
        self._maps.turn()
        for file, note in files.items():
            memory = self._maps.of(self._folder / self._attempt / file, note["bytes"])[note["start"] :]
            for name, entry in note["tensors"].items():
                first, last = entry["data_offsets"]
                yield name, memory[first:last].view(NAMED[entry["dtype"]]).reshape(entry["shape"])


class Maps:
    """Files in memory, mapped once: a page that was touched once costs nothing the next time."""

    def __init__(self) -> None:
        """Nothing is mapped."""
        self._now: dict[tuple[int, int], Tensor] = {}
        self._before: dict[tuple[int, int], Tensor] = {}

    def turn(self) -> None:
        """Begin a version: what the last one did not use is given up."""
        self._before, self._now = self._now, {}

    def of(self, path: Path, num_bytes: int, *, create: bool = False) -> Tensor:
        """The bytes of a file, uint8 [num_bytes], to be read and written in place.

        Args:
            path: of the file.
            num_bytes: what it must hold.
            create: make it and give it this size first.

        Raises:
            WeightSyncError: it is not there, holds another number of bytes, or there is no room for so many.
        """
        try:
            handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError as error:
            raise WeightSyncError(f"{path} is in the manifest and not there") from error
        try:
            if create:
                give_size(handle, num_bytes, path)
            status = os.fstat(handle)
            if status.st_size != num_bytes:
                raise WeightSyncError(f"{path} holds {status.st_size} bytes; {num_bytes} were sent")
            inode = (status.st_dev, status.st_ino)
            memory = self._before.get(inode)
            if memory is None or len(memory) < num_bytes:
                memory = torch.frombuffer(mmap.mmap(handle, num_bytes), dtype=torch.uint8)
            self._now[inode] = memory
            return memory[:num_bytes]
        finally:
            os.close(handle)


def give_size(handle: int, num_bytes: int, path: Path | str) -> None:
    """Give a file its size, and take the room: a mapped page for which there is none kills the process.

    Args:
        handle: of the file.
        num_bytes: of its new size.
        path: what the error calls it.

    Raises:
        WeightSyncError: there is no room.
    """
    grows = os.fstat(handle).st_size < num_bytes
    os.ftruncate(handle, num_bytes)
    if grows:
        try:
            os.posix_fallocate(handle, 0, num_bytes)
        except OSError as error:
            raise WeightSyncError(f"no room for {num_bytes} bytes in {path}: {error.strerror}") from error


def _answer_name(attempt: str, sampler: int) -> str:
    return f"{attempt}.{sampler}.answer"


def _write_whole(path: Path, note: Note) -> None:
    """Under another name first, so that who finds the file finds all of it."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(note))
    aside.rename(path)


def _await(path: Path, ends: float, *, seen: str = "") -> Note | None:
    """The note in a file once it is there and of another attempt than `seen`; None when the time is up."""
    while True:
        if path.exists():
            # It goes where the sender begins the next version just then.
            with contextlib.suppress(FileNotFoundError):
                note: Note = json.loads(path.read_text())
                if note.get("attempt") != seen:
                    return note
        if time.monotonic() > ends:
            return None
        time.sleep(LOOK_EVERY_S)
