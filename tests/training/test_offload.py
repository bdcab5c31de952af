from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import UntypedStorage, nn
from torch.testing._internal.two_tensor import TwoTensor

from millrace.config.mesh_section import MeshConfig
from millrace.models.heads import scalar_model
from millrace.training.offload import FileShelf, HostShelf, Offload, OffloadError, Shelf, held_tensors
from millrace.training.optimizer import WeightOptimizer, adamw
from millrace.training.parallel_model import mesh_of, spread_over
from millrace.training.policy import PolicyTrainer, imitation
from tests.ranks import run_ranks
from tests.training.pieces import random_batch, tiny_model

CPU = torch.device("cpu")


class Watched:
    """A shelf that counts what it is given, and may flip a bit of what it gives back."""

    def __init__(self, *, flips: bool = False) -> None:
        self.sizes: list[list[int]] = []
        self._shelf, self._flips = HostShelf(pinned=False), flips

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        self.sizes.append([storage.nbytes() for storage in storages])
        self._shelf.put(storages)

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        self._shelf.take(storages)
        if self._flips:
            storages[-1][0] ^= 1


def policy(mesh: MeshConfig | None = None) -> PolicyTrainer:
    model = tiny_model(tied=mesh is None)
    spread = spread_over(model, mesh_of(mesh, CPU), mesh) if mesh else None
    return PolicyTrainer(
        model,
        imitation,
        adamw(model, betas=(0.9, 0.99), weight_decay=0.1),
        learning_rate=lambda number: 0.01,
        temperature=1.0,
        max_tokens=40,
        max_grad_norm=1.0,
        spread=spread,
    )


def owner(module: nn.Module, optimizer: WeightOptimizer | None = None) -> tuple:
    return ("the policy", module, optimizer)


def bits(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in held_tensors(owner(trainer.model, trainer.optimizer))]


def check_trained_alike(shelf: Shelf, mesh: MeshConfig | None = None) -> None:
    """Steps with everything away between them change no bit; with a file also between gradient and step."""
    still, moving = policy(mesh), policy(mesh)
    away = Offload([owner(moving.model, moving.optimizer)], shelf, device="cpu")
    parameters = list(moving.model.parameters())
    for seed in range(3):
        for trainer in (still, moving):
            trainer.forward_backward(random_batch(seed))
            # On a CPU numpy has seen gradients, which cannot be resized then.
            if trainer is moving and isinstance(shelf, FileShelf):
                away.sleep()
                away.wake()
            trainer.optim_step()
        away.sleep()
        away.wake()
    assert all(one is other for one, other in zip(parameters, moving.model.parameters(), strict=True))
    ours, theirs = bits(moving), bits(still)
    assert len(ours) == len(theirs) == 4 * len(parameters)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["host", "file"])
def test_training_does_not_notice_that_its_tensors_were_away(kind: str, tmp_path: Path) -> None:
    check_trained_alike(HostShelf(pinned=False) if kind == "host" else FileShelf(tmp_path))
    assert list(tmp_path.iterdir()) == []


def on_ranks(rank: int, folder: str) -> None:
    check_trained_alike(HostShelf(pinned=False), MeshConfig(dp_shard=2))
    check_trained_alike(FileShelf(Path(folder)), MeshConfig(dp_shard=2))


@pytest.mark.slow
@pytest.mark.world
def test_sharded_weights_leave_and_come_back_under_fsdp(tmp_path: Path) -> None:
    assert run_ranks(2, on_ranks, str(tmp_path)) == [{}, {}]


def test_a_gradient_leaves_too_and_what_is_held_twice_leaves_once() -> None:
    trainer, shelf = policy(), Watched()
    critic = scalar_model(trainer.model)
    critic.score.weight = nn.Parameter(trainer.model.get_input_embeddings().weight.detach()[:1])
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    owners = [owner(trainer.model, trainer.optimizer), ("the critic", critic, None)]
    away = Offload(owners, shelf, device="cpu")
    away.sleep()
    away.sleep()
    held = [parameter.untyped_storage() for parameter in trainer.model.parameters()]
    held += [parameter.grad.untyped_storage() for parameter in trainer.model.parameters()]
    assert [storage.nbytes() for storage in held] == [0] * len(held)
    away.wake()
    away.wake()
    theirs = [p.untyped_storage() for p in critic.parameters() if p is not critic.score.weight]
    # The embedding is the head, and the critic's score a row of it.
    assert shelf.sizes == [[storage.nbytes() for storage in interleaved(held) + theirs]]


def interleaved(storages: list[UntypedStorage]) -> list[UntypedStorage]:
    half = len(storages) // 2
    return [each for pair in zip(storages[:half], storages[half:], strict=True) for each in pair]


def test_of_a_state_that_is_made_of_tensors_each_leaves() -> None:
    linear = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(linear.parameters())
    codes, scales = torch.arange(6.0), torch.arange(6.0) + 1
    optimizer.state[linear.weight] = {"exp_avg": TwoTensor(codes, scales), "step": 3}
    named = dict(enumerate(held_tensors(owner(linear, optimizer))))
    assert [name for name, _ in named.values()] == [
        "the policy's weight weight",
        *["the policy's exp_avg weight"] * 2,
    ]
    assert (named[1][1] is codes, named[2][1] is scales) == (True, True)


def test_what_lies_on_another_device_stays() -> None:
    linear, shelf = nn.Linear(3, 2), Watched()
    Offload([owner(linear)], shelf, device="cuda").sleep()
    assert shelf.sizes == [[]]
    assert linear.weight.untyped_storage().nbytes() == 24


def resident_bytes() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.slow
def test_on_a_cpu_the_process_gives_the_memory_back_to_the_system(tmp_path: Path) -> None:
    linears = nn.ModuleList(nn.Linear(2048, 1024) for _ in range(8))
    whole = 8 * 2048 * 1024 * 4
    # numpy has seen one of them.
    assert linears[0].weight.detach().numpy().shape == (1024, 2048)
    expected = [linear.weight.detach().clone() for linear in linears]
    away = Offload([owner(linears)], FileShelf(tmp_path), device="cpu")
    before = resident_bytes()
    away.sleep()
    assert before - resident_bytes() > 0.9 * whole
    away.wake()
    assert abs(before - resident_bytes()) < 0.1 * whole
    assert all(torch.equal(one.weight, other) for one, other in zip(linears, expected, strict=True))


def test_other_bits_than_left_are_named() -> None:
    linear = nn.Linear(3, 2)
    away = Offload([owner(linear)], Watched(flips=True), device="cpu")
    away.sleep()
    with pytest.raises(OffloadError) as caught:
        away.wake()
    assert str(caught.value) == (
        "1 of 2 tensors that had left the device's memory came back with other bits, the first being the "
        "policy's weight bias; look for a fault of memory or disk, then resume the run"
    )


def test_where_the_disk_is_full_everything_stays(tmp_path: Path) -> None:
    linear, shelf = nn.Linear(64, 64), FileShelf(tmp_path)
    expected = linear.weight.detach().clone()
    away = Offload([owner(linear)], shelf, device="cpu")
    with Path("/dev/full").open("r+b", buffering=0) as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "_file", full)
        with pytest.raises(OSError, match="No space left on device"):
            away.sleep()
    assert torch.equal(linear.weight, expected)
    away.sleep()
    away.wake()
    assert torch.equal(linear.weight, expected)


@pytest.mark.parametrize(("offset", "whole_pages"), [(0, 4), (64, 3)])
def test_memory_that_the_system_keeps_is_an_error(
    offset: int, whole_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Advice that no system knows.
    monkeypatch.setattr("millrace.training.offload.mmap.MADV_DONTNEED", 12345)
    linear, pages = nn.Linear(mmap.PAGESIZE, 1, bias=False), mmap.mmap(-1, 5 * mmap.PAGESIZE)
    own = torch.frombuffer(pages, dtype=torch.float32, count=mmap.PAGESIZE, offset=offset)
    linear.weight.data = own[None]
    away = Offload([owner(linear)], FileShelf(tmp_path), device="cpu")
    message = f"^{whole_pages * mmap.PAGESIZE} bytes of memory cannot be given back: Invalid argument; "
    with pytest.raises(OffloadError, match=message):
        away.sleep()
