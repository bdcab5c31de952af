"""Weights of every awkward kind, and samplers to load them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from millrace.inference.weight_loading import load_in_place
from millrace.transport.fingerprint import fingerprint
from millrace.transport.shared_memory import MappedWeights, SharedWeights, WeightManifest, pieces
from millrace.transport.weight_update import WeightReceiver

Named = Sequence[tuple[str, Tensor]]


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


class Elsewhere:
    """A sampler with memory of its own, to which pieces are carried."""

    def __init__(self, shared: SharedWeights, named: Named) -> None:
        self.shared, self.memory = shared, os.memfd_create("elsewhere")
        self.sampler, self.num_bytes = Sampler(named), 0
        self.incoming = MappedWeights(self.memory, lambda error, verify_s: None)
        self.receiver = WeightReceiver(self.incoming, self.sampler.load, self.sampler.held)

    def receive(self, manifest: WeightManifest, *, patched: bool) -> None:
        patch = manifest["changes"]["packed"] if patched else {}
        self.incoming.expect(json.loads(json.dumps({**manifest, "patch": patch})))
        self.num_bytes = 0
        for begin, end in pieces(self.incoming.manifest, 1000):
            assert 0 < end - begin <= 1000
            os.pwrite(self.memory, os.pread(self.shared.handle, end - begin, begin), begin)
            self.num_bytes += end - begin
        self.receiver.update_weights()
