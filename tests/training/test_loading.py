"""What ranks read of a folder, or take of each other, is the one-process model, and never whole on a rank."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from millrace.config.mesh import MeshConfig
from millrace.models.adapter_folder import adapter_pairs
from millrace.models.adapters import add_adapter, base_tensors, freeze, merged, trained_weights
from millrace.models.fsdp import local
from millrace.models.heads import SCALAR, empty_scalar_model, save_scalar_model, scalar_model, scalar_weights
from millrace.models.load import Model, ModelError, fresh_config, fresh_model, load_model, save_model
from millrace.training.loading import loaded, taken
from millrace.training.spread import Spread, mesh_of, spread_over
from tests.models.tiny import SIZES, VOCABULARY, tiny_model
from tests.ranks import run_ranks

CPU = torch.device("cpu")
FLOAT = {"dtype": torch.float32, "device": CPU}
# Layouts of two ranks by name.
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": {"dp_shard": 2},
    "replicate": {"dp_replicate": 2},
    "context": {"cp": 2},
    "tensor": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "stages": {"pp": 2},
    "offload": {"dp_shard": 2, "offload": True},
}
PATTERN = "model.layers.0.*"


def save_deep(folder: Path) -> None:
    """A model of many layers, each a small share of it."""
    shape = SIZES | {"num_hidden_layers": 24, "head_dim": 16, "hidden_size": 64, "intermediate_size": 128}
    config = fresh_config("qwen3", shape, vocab_size=VOCABULARY, eos_token_id=0)
    save_model(fresh_model(config, seed=3, dtype=torch.float32), folder)


def peak_bytes(make: Callable[[], Any], folder: Path) -> tuple[Any, Tensor]:
    """What is made, and the most that was allocated meanwhile, by torch's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        made = make()
    events = [event for event in told.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    # The folder's file is counted when it is mapped, which takes no memory.
    file = (folder / "model.safetensors").stat().st_size
    return made, torch.tensor(max(itertools.accumulate(size for size in sizes if abs(size) != file)))


def held_bytes(model: torch.nn.Module) -> int:
    return sum(local(parameter).nbytes for parameter in model.parameters())


def weights(name: str, spread: Spread) -> dict[str, Tensor]:
    return {f"{name}|{weight}": tensor.clone() for weight, tensor in spread.named_tensors()}


def settle(model: Model) -> None:
    """An adapter whose pairs have numbers before the model has."""
    add_adapter(model, rank=3, alpha=6.0, seed=1)
    for weight in trained_weights(model):
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(weight)))


def read_on_two(rank: int, folder: str) -> dict[str, Tensor]:
    root, found = Path(folder), {}
    for name, mesh in LAYOUTS.items():
        options = MeshConfig(**mesh)
        spread = loaded(root / "tiny", mesh_of(options, CPU), options, **FLOAT)
        found |= weights(name, spread)
    options = MeshConfig(dp_shard=2)
    mesh = mesh_of(options, CPU)
    mixture = MeshConfig(dp_shard=2, ep=2)
    found |= weights("experts", loaded(root / "mixture", mesh_of(mixture, CPU), mixture, **FLOAT))
    critic = loaded(root / "critic", mesh, options, kind=SCALAR, **FLOAT)
    found |= weights("critic", critic)
    adapted = loaded(root / "tiny", mesh, options, prepare=settle, **FLOAT)
    found |= weights("adapter", adapted)
    found |= {f"base|{name}": tensor.clone() for name, tensor in base_tensors(adapted.model)}
    found |= {f"pairs|{name}": tensor for name, tensor in adapter_pairs(adapted.model).items()}
    still = loaded(root / "tiny", mesh, options, prepare=lambda model: freeze(model, [PATTERN]), **FLOAT)
    learns = [name for name, weight in still.model.named_parameters() if weight.requires_grad]
    found["learns"] = torch.tensor(list(json.dumps(learns).encode()))
    empty = empty_scalar_model(adapted.model)
    found |= weights(
        "fresh critic", taken(empty, scalar_weights(empty, adapted.named_tensors()), mesh, options, CPU)
    )
    return found | of_deep(root / "deep", mesh, options)


def of_deep(folder: Path, mesh: Any, options: MeshConfig) -> dict[str, Tensor]:
    """Bytes that a rank holds, and that it had at most on the way."""

    def load_whole() -> Spread:
        return spread_over(load_model(folder, dtype=torch.float32), mesh, options)

    deep, peak = peak_bytes(lambda: loaded(folder, mesh, options, **FLOAT), folder)
    empty = empty_scalar_model(deep.model)
    named = scalar_weights(empty, deep.named_tensors())
    return {
        "held": torch.tensor(held_bytes(deep.model)),
        "peak": peak,
        "peak of the critic": peak_bytes(lambda: taken(empty, named, mesh, options, CPU), folder)[1],
        "peak of the whole": peak_bytes(load_whole, folder)[1],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_model(tiny_model("qwen3", seed=5), root / "tiny")
    save_model(tiny_model("qwen3_moe", seed=5), root / "mixture")
    made = scalar_model(tiny_model("qwen3", seed=6))
    torch.nn.init.normal_(made.score.weight, generator=torch.Generator().manual_seed(4))
    save_scalar_model(made, root / "critic")
    save_deep(root / "deep")
    return root


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Tensor]]:
    return run_ranks(2, read_on_two, str(folder))


def check_equal(found: dict[str, Tensor], name: str, expected: dict[str, Tensor]) -> None:
    ours = {key.partition("|")[2]: value for key, value in found.items() if key.startswith(f"{name}|")}
    assert ours.keys() == expected.keys()
    assert [key for key in ours if not torch.equal(ours[key], expected[key])] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_each_layout_ranks_hold_together_what_one_process_loads(name, folder, two):
    expected = dict(load_model(folder / "tiny", dtype=torch.float32).named_parameters())
    for found in two:
        check_equal(found, name, expected)


def test_mixtures_and_critics_are_read_alike(folder, two):
    mixture = load_model(folder / "mixture", dtype=torch.float32)
    critic = loaded(folder / "critic", None, MeshConfig(), kind=SCALAR, **FLOAT).model
    for found in two:
        check_equal(found, "experts", dict(mixture.named_parameters()))
        check_equal(found, "critic", dict(critic.named_parameters()))
        assert float(found["critic|score.weight"].abs().min()) > 0


def test_an_adapter_keeps_its_numbers_beside_a_base_that_is_read(folder, two):
    base = load_model(folder / "tiny", dtype=torch.float32)
    whole = load_model(folder / "tiny", dtype=torch.float32)
    settle(whole)
    expected = dict(merged(whole).named_parameters())
    for found in two:
        check_equal(found, "base", dict(base.named_parameters()))
        check_equal(found, "pairs", adapter_pairs(whole))
        check_equal(found, "adapter", expected)
        # A fresh critic begins with what the policy says, adapter included, under a head of zeros.
        check_equal(found, "fresh critic", dict(scalar_model(merged(whole)).named_parameters()))


def test_what_is_frozen_before_it_is_read_stays_frozen(folder, two):
    names = [name for name, _ in load_model(folder / "tiny", dtype=torch.float32).named_parameters()]
    for found in two:
        learns = json.loads(bytes(found["learns"].tolist()))
        assert learns == [name for name in names if not name.startswith(PATTERN[:-1])]


def test_no_rank_ever_holds_the_whole_model(folder, two):
    whole = held_bytes(load_model(folder / "deep", dtype=torch.float32))
    for found in two:
        assert int(found["held"]) == whole // 2
        # Besides its half, FSDP gathers up to three layers of 24 at a time for the trial.
        assert int(found["peak"]) < 0.7 * whole
        assert int(found["peak of the critic"]) < 0.7 * whole
        assert int(found["peak of the whole"]) > whole


def missing(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    return f"model folder {folder} lacks 2 weights, the first being model.layers.1.mlp.up_proj.weight"


def wide(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(33)}, folder / "model.safetensors")
    return f"model folder {folder}: weight model.norm.weight is (33,) but config.json makes it (32,)"


def cut(folder: Path) -> str:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return f"model folder {folder} cannot be loaded: "


def broken(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return "model type qwen3 cannot be trained by millrace: its packed logits differ from its own by nan"


def other(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    return f"model folder {folder} lacks "


def unknown(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
    return f"model folder {folder} cannot be loaded: "


WRONG = [missing, wide, cut, broken, other, unknown]


def refused_on_two(rank: int, folder: str) -> dict[str, Tensor]:
    options = MeshConfig(dp_shard=2)
    mesh, told = mesh_of(options, CPU), []
    for wrong in WRONG:
        with pytest.raises(ModelError) as caught:
            loaded(Path(folder) / wrong.__name__, mesh, options, **FLOAT)
        told.append(str(caught.value))
        # Nobody waits for anybody still.
        dist.barrier()
    return {"told": torch.tensor(list(json.dumps(told).encode()))}


def test_a_bad_folder_is_refused_by_every_rank_in_the_same_sentence(folder, tmp_path):
    expected = []
    for wrong in WRONG:
        save_model(load_model(folder / "tiny", dtype=torch.float32), tmp_path / wrong.__name__)
        expected.append(wrong(tmp_path / wrong.__name__))
    one, two = (json.loads(bytes(r["told"].tolist())) for r in run_ranks(2, refused_on_two, str(tmp_path)))
    assert one == two
    for told, sentence in zip(one, expected, strict=True):
        assert told.startswith(sentence)
        assert "\n" not in told
