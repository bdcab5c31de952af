"""What ranks wrote in parts comes back bit for bit in every other layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from millrace.distributed.ranks import Ranks
from millrace.errors import CheckpointError
from millrace.training.sharded import deal, own_parts, read_parts, write_parts
from tests.ranks import run_ranks

# Rows that two ranks share evenly, unevenly, and of which the second gets none.
ROWS = (1, 2, 3, 8)


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {f"exp_avg/w{rows}": torch.randn(rows, 3, generator=generator) for rows in ROWS}
    return made | {
        "exp_avg/half": torch.randn(5, generator=generator).bfloat16(),
        "step/w1": torch.tensor(7.0),
    }


def laid_out(tensors: dict[str, Tensor], way: str) -> dict[str, Tensor]:
    """Over two ranks by rows or by columns, or all on both; counts of steps belong to no part."""
    mesh = init_device_mesh("cpu", (2,))
    placed = {"rows": Shard(0), "columns": Shard(1), "both": Replicate()}[way]
    return {
        name: distribute_tensor(
            tensor, mesh, [Shard(0) if way == "columns" and tensor.ndim == 1 else placed], src_data_rank=None
        )
        if tensor.ndim
        else tensor
        for name, tensor in tensors.items()
    }


WAYS = ("rows", "columns", "both")


def write(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    parts = own_parts(tensors)
    held = {part.place: part.tensor.nbytes for part in parts}
    told = [json.loads(each) for each in ranks.all_gather(json.dumps(held).encode())]
    mine = deal(told)[ranks.rank]
    write_parts([part for part in parts if part.place in mine], folder, rank=ranks.rank)


def through_two_ranks(rank: int, folder: str) -> None:
    """Write every way; read what one rank and what two wrote, every way."""
    ranks = Ranks(rank, 2)
    for way in WAYS:
        write(laid_out(whole_tensors(), way), Path(folder) / way, ranks)
    dist.barrier()
    for way in WAYS:
        for source in (*WAYS, "alone"):
            zeros = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
            into = laid_out(zeros, way)
            read_parts(Path(folder) / source, into, into)
            expected = laid_out(whole_tensors(), way)
            for name, tensor in expected.items():
                found = into[name].to_local() if tensor.ndim else into[name]
                assert torch.equal(found, tensor.to_local() if tensor.ndim else tensor), (way, source, name)


@pytest.mark.world
def test_every_layout_reads_what_every_layout_wrote(tmp_path):
    write(whole_tensors(), tmp_path / "alone", Ranks())
    run_ranks(2, through_two_ranks, str(tmp_path))
    for source in (*WAYS, "alone"):
        into = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
        read_parts(tmp_path / source, into, into)
        assert all(torch.equal(into[name], tensor) for name, tensor in whole_tensors().items()), source
    # Of what both hold each writes about half, and nothing is written twice.
    stored: list[dict[str, int]] = []
    for rank in range(2):
        with safe_open(tmp_path / "both" / f"rank-{rank:05d}.safetensors", framework="pt") as file:
            stored.append({name: file.get_tensor(name).nbytes for name in file.keys()})  # noqa: SIM118
    assert stored[0].keys() | stored[1].keys() == whole_tensors().keys()
    assert not stored[0].keys() & stored[1].keys()
    assert abs(sum(stored[0].values()) - sum(stored[1].values())) <= max(ROWS) * 3 * 4


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_dealt_once_to_one_who_holds_it_and_evenly(seed):
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 6)
    sizes = {f"t{n}": rng.randint(1, 9) for n in range(rng.randint(0, 40))}
    held: list[dict[str, int]] = [{} for _ in range(num_ranks)]
    everywhere = {}
    for name, size in sizes.items():
        holders = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
        for rank in holders:
            held[rank][name] = size
        if len(holders) == num_ranks:
            everywhere[name] = size
    dealt = deal(held)
    assert sum(map(len, dealt)) == len(sizes)
    assert set().union(*dealt) == sizes.keys()
    assert all(names <= held[rank].keys() for rank, names in enumerate(dealt))
    loads = [sum(everywhere[name] for name in names) for names in deal([everywhere] * num_ranks)]
    assert max(loads) - min(loads) <= 9


def test_what_was_taken_stays_as_it_was():
    tensors = whole_tensors()
    parts = own_parts(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    expected = whole_tensors()
    assert {part.name for part in parts} == expected.keys()
    assert all(torch.equal(part.tensor, expected[part.name]) for part in parts)


def test_without_tensors_there_is_no_file(tmp_path):
    assert write_parts(own_parts({}), tmp_path / "none", rank=0) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda t: t.pop("exp_avg/w8"), "exp_avg/w8, which the model does not have"),
        (
            lambda t: t.update({"exp_avg/more": torch.ones(2)}),
            "exp_avg/more, which the model has, is missing",
        ),
        (
            lambda t: t.update({"exp_avg/w8": torch.ones(8, 4)}),
            "exp_avg/w8 is (8, 3), and the model makes it (8, 4)",
        ),
    ],
    ids=["too much", "missing", "shape"],
)
def test_the_state_of_another_model_is_refused(spoil, why, tmp_path):
    folder = tmp_path / "model"
    write(whole_tensors(), folder, Ranks())
    into = whole_tensors()
    spoil(into)
    with pytest.raises(CheckpointError) as caught:
        read_parts(folder, into, into)
    assert str(caught.value) == f"{folder} is of another model: {why}"
