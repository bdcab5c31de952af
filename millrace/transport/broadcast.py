"""Weights by `torch.distributed`: one rank broadcasts to the others of a group, in buckets of fixed size.

Every message is a note (JSON, its length first) or a bucket of bytes whose content the note before it
lists, so the receivers need to know nothing beforehand and hold one bucket beside the weights. With gloo
the bucket lies in the host's memory, with NCCL on `device`. The group's timeout is the deadline of every
wait; it must be longer than what lies between two versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.transport.fingerprint import raw_bytes
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import Note, Parcel

SENDER = 0
# An answer is one sentence and a number.
ANSWER_BYTES = 4096
CPU = torch.device("cpu")


class BroadcastSender:
    """The trainer's end: the first rank of the group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device = CPU,
        bucket_bytes: int = 1 << 26,
    ) -> None:
        """The sender of a group.

        Args:
            group: the trainer and its samplers; None for all ranks.
            device: where the group's backend takes tensors from.
            bucket_bytes: sent at once.
        """
        self.device = device
        self._line = _Line(group, device)
        self._bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)

    def put(
        self, opening: Note, named_tensors: Iterable[tuple[str, Tensor]], closing: Callable[[], Note]
    ) -> int:
        """Broadcast notes and buckets; see `sync.Outgoing`."""
        self._line.note(opening)
        # Of each piece: name, dtype, shape, and how many of the tensor's bytes are in the bucket.
        pieces: list[tuple[str, str, list[int], int]] = []
        used, num_bytes = 0, 0
        for name, tensor in named_tensors:
            flat = raw_bytes(tensor)
            num_bytes += len(flat)
            told = name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            while True:
                part = flat[: len(self._bucket) - used]
                self._bucket[used : used + len(part)] = part
                pieces.append((*told, len(part)))
                used, flat = used + len(part), flat[len(part) :]
                if used == len(self._bucket):
                    self._flush(pieces, used)
                    pieces, used = [], 0
                if not len(flat):
                    break
        if pieces:
            self._flush(pieces, used)
        self._line.note({"pieces": [], "closing": closing()})
        return num_bytes

    def answers(self) -> list[Note]:
        """What the other ranks answered, in order; see `sync.Outgoing`."""
        return self._line.exchange(None)[1:]

    def _flush(self, pieces: list[tuple[str, str, list[int], int]], used: int) -> None:
        self._line.note({"pieces": pieces})
        self._line.say(self._bucket[:used])


class BroadcastReceiver:
    """A sampler's end: any other rank of the group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, device: torch.device = CPU) -> None:
        """A receiver of a group; see `BroadcastSender`."""
        self._device = device
        self._line = _Line(group, device)
        self._closing: Note = {}

    def take(self) -> Parcel:
        """Wait for the opening; see `sync.Incoming`."""
        return Parcel(self._line.note(None), self._arriving(), lambda: self._closing)

    def answer(self, note: Note) -> None:
        """Answer together with all other receivers; see `sync.Incoming`."""
        self._line.exchange(note)

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        flat, filled = torch.empty(0, dtype=torch.uint8, device=self._device), 0
        while (note := self._line.note(None))["pieces"]:
            pieces = note["pieces"]
            bucket = torch.empty(sum(piece[-1] for piece in pieces), dtype=torch.uint8, device=self._device)
            self._line.say(bucket)
            start = 0
            for name, word, shape, length in pieces:
                dtype = getattr(torch, word)
                if filled == 0:
                    flat = torch.empty(shape, dtype=dtype, device=self._device).reshape(-1).view(torch.uint8)
                flat[filled : filled + length] = bucket[start : start + length]
                start, filled = start + length, filled + length
                if filled == len(flat):
                    yield name, flat.view(dtype).reshape(shape)
                    filled = 0
        self._closing = note["closing"]


class _Line:
    """Notes and bytes from the sender to all, and one answer from each."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device

    def note(self, note: Note | None) -> Note:
        """Say a note, or with None hear one."""
        text = b"" if note is None else json.dumps(note).encode()
        length = torch.tensor([len(text)], device=self._device)
        self.say(length)
        data = _bytes(text) if note is not None else torch.empty(int(length), dtype=torch.uint8)
        data = data.to(self._device)
        self.say(data)
        heard: Note = json.loads(data.cpu().numpy().tobytes())
        return heard

    def say(self, data: Tensor) -> None:
        """Broadcast in place."""
        with _told("weights were broadcast"):
            dist.broadcast(data, group=self._group, group_src=SENDER)

    def exchange(self, answer: Note | None) -> list[Note]:
        """Everybody's answer, by rank."""
        text = json.dumps(answer)
        if len(text) > ANSWER_BYTES and answer is not None:
            text = json.dumps({**answer, "error": answer["error"][: ANSWER_BYTES // 12] + " ..."})
        mine = _bytes(text.encode().ljust(ANSWER_BYTES)).to(self._device)
        each = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        with _told("the samplers' answers were awaited"):
            dist.all_gather(each, mine, group=self._group)
        return [json.loads(data.cpu().numpy().tobytes()) for data in each]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Failures of the group, which are RuntimeErrors of many kinds, as one that says what was going on."""
    try:
        yield
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        raise WeightSyncError(f"a process was lost or came too late while {what}: {told}") from error
