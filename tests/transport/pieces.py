"""Weights of every awkward kind, a sampler to load them, and carriers whose both ends run in one thread."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from millrace.inference.weights import load_in_place
from millrace.transport.fingerprint import fingerprint
from millrace.transport.folder import FolderReceiver, FolderSender
from millrace.transport.local import WeightSyncError
from millrace.transport.sync import Note, WeightReceiver, WeightSender

Named = Sequence[tuple[str, Tensor]]
MakePair = Callable[..., "Pair"]


def awkward(seed: int = 0) -> list[tuple[str, Tensor]]:
    """Widths of 1 to 8 bytes, odd shapes, no elements, no dimensions, not contiguous, one under two names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tied = normal(3, 5).bfloat16()
    return [
        ("matrix", normal(7, 3)),
        ("half", normal(5, 1, 3).bfloat16()),
        ("empty", torch.zeros(0, 4, dtype=torch.bfloat16)),
        ("scalar", normal(1)[0]),
        ("flags", normal(5) > 0),
        ("turned", normal(4, 6).double().T),
        ("bytes", torch.randint(0, 256, (11,), generator=generator, dtype=torch.uint8)),
        ("counts", torch.randint(-9, 9, (2, 3), generator=generator)),
        ("embedding", tied),
        ("head", tied),
        ("large", normal(300, 250).bfloat16()),
    ]


class Weights(nn.Module):
    """Parameters of any name."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        self.each = {name: nn.Parameter(torch.zeros_like(t), requires_grad=False) for name, t in named}

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.each.items())


class Sampler:
    """Holds weights of the same names, shapes and dtypes; they begin at zero."""

    def __init__(self, named: Named) -> None:
        self.model = Weights(named)
        self.version = -1

    def load(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        load_in_place(self.model, named)
        self.version = version

    def held(self) -> dict[str, str]:
        return fingerprint(self.model.named_parameters())

    def holds(self, named: Named) -> bool:
        own = dict(self.model.named_parameters())
        return own.keys() == dict(named).keys() and all(
            own[name].dtype == t.dtype and bits(own[name]) == bits(t) for name, t in named
        )


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class InTurn:
    """A folder whose samplers read while the sender waits for them; `harm` comes before they find it."""

    def __init__(self, carrier: FolderSender, receivers: Sequence[WeightReceiver]) -> None:
        self.device = carrier.device
        self.carrier, self.receivers = carrier, receivers
        self.harm: Callable[[], object] = lambda: None
        self.num_sent = 0
        self.again = False
        # Those that receive: one that refused what comes again goes on waiting.
        self.receiving: dict[WeightReceiver, Thread] = {}

    def put(self, opening: Note, named: Any, closing: Callable[[], Note]) -> int:
        def harmed() -> Note:
            self.harm()
            return closing()

        self.num_sent += 1
        self.again = opening["again"]
        return self.carrier.put(opening, named, harmed)

    def answers(self) -> list[Note]:
        for receiver in self.receivers:
            if receiver not in self.receiving:
                self.receiving[receiver] = Thread(target=_receive, args=[receiver], daemon=True)
                self.receiving[receiver].start()
        found = self.carrier.answers()
        for receiver, answer in zip(self.receivers, found, strict=True):
            if not (answer["error"] and self.again):
                self.receiving.pop(receiver).join()
        return found


def _receive(receiver: WeightReceiver) -> None:
    with contextlib.suppress(WeightSyncError):
        receiver.receive()


class Pair:
    """A trainer and its samplers over a folder."""

    def __init__(
        self, folder: Path, named: Named, *, num_samplers: int = 1, delta: bool = False, **options: Any
    ) -> None:
        self.folder = folder
        self.samplers = [Sampler(named) for _ in range(num_samplers)]
        self.receivers = [
            WeightReceiver(FolderReceiver(folder, deadline_s=20.0, sampler=place), sampler.load, sampler.held)
            for place, sampler in enumerate(self.samplers)
        ]
        carrier = FolderSender(folder, deadline_s=20.0, num_samplers=num_samplers, **options)
        self.carrier = InTurn(carrier, self.receivers)
        self.sender = WeightSender(self.carrier, delta=delta)

    def flip(self, name: str) -> None:
        """One bit of a tensor, in the file it lies in."""
        for path in self.folder.glob("*/*.safetensors"):
            data = bytearray(path.read_bytes())
            start = 8 + int.from_bytes(data[:8], "little")
            entry = json.loads(bytes(data[8:start])).get(name)
            if entry is not None:
                data[start + entry["data_offsets"][0]] ^= 1
                path.write_bytes(data)
                return
        raise AssertionError(f"{name} is in no file")
