"""What ranks read of a folder, or take of each other, is the one-process model, and never whole on a rank."""

from __future__ import annotations

import gc
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

from millrace.config.mesh_section import MeshConfig
from millrace.distributed.collectives import local
from millrace.models.adapter_folder import adapter_pairs
from millrace.models.adapters import add_adapter, base_tensors, freeze, merged, trained_weights
from millrace.models.heads import SCALAR, empty_scalar_model, scalar_model, scalar_weights
from millrace.models.load import Model, ModelError, fresh_config, fresh_model, load_model, save_model
from millrace.training.loading import loaded, taken
from millrace.training.optimizer import adamw
from millrace.training.parallel_model import ParallelModel, mesh_of, spread_over
from millrace.training.policy import PolicyTrainer, imitation
from tests.close import close_fp32
from tests.models.deep import deep_model, weighted_batch
from tests.models.families import bold_family
from tests.models.tiny import SIZES, VOCABULARY, tiny_model
from tests.ranks import cases_of, run_ranks

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.together]

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
    "stages offload": {"pp": 2, "offload": True},
}
# Of four, by the model that they are tried with.
DEEP_LAYOUTS: dict[str, dict[str, Any]] = {
    "tied": {"pp": 2, "dp_shard": 2},
    "interleaved tied": {"pp": 2, "dp_shard": 2, "pp_chunks": 2, "reshard_after_forward": False},
    "sliced tied": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "mixture": {"pp": 2, "dp_shard": 2, "ep": 2},
}
PATTERN = "model.layers.0.*"


# Layers that ask a cache for positions, and such that pass no context on.
FURTHER = ("llama4_text", "stablelm")


def save_deep(folder: Path) -> None:
    """A model of many layers, each a small share of it."""
    shape = SIZES | {"num_hidden_layers": 48, "head_dim": 16, "hidden_size": 64, "intermediate_size": 128}
    config = fresh_config("qwen3", shape, vocab_size=VOCABULARY, eos_token_id=0)
    save_model(fresh_model(config, seed=3, dtype=torch.float32), folder)


def peak_bytes(make: Callable[[], Any], folder: Path) -> tuple[Any, Tensor]:
    """What is made, and the most that was allocated meanwhile, by torch's own account."""
    # Whatever was garbage before would count as freed meanwhile.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        made = make()
    events = [event for event in told.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    # The folder's file is counted when it is mapped, which takes no memory.
    file = (folder / "model.safetensors").stat().st_size
    return made, torch.tensor(max(itertools.accumulate(size for size in sizes if abs(size) != file)))


def held_bytes(model: torch.nn.Module) -> int:
    return sum(local(parameter).nbytes for parameter in model.parameters())


def weights(name: str, spread: ParallelModel) -> dict[str, Tensor]:
    return {f"{name}|{weight}": tensor.clone() for weight, tensor in spread.named_tensors()}


def settle(model: Model) -> None:
    """An adapter whose pairs have numbers before the model has."""
    add_adapter(model, rank=3, alpha=6.0, seed=1)
    for weight in trained_weights(model):
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(weight)))


def learned(name: str, spread: ParallelModel) -> dict[str, Tensor]:
    """Log-probabilities, and weights after a step."""
    trainer = PolicyTrainer(
        spread.model,
        imitation,
        adamw(trained_weights(spread.model), betas=(0.9, 0.99), weight_decay=0.1),
        learning_rate=lambda step: 1e-2,
        temperature=1.0,
        max_tokens=40,
        max_grad_norm=1.0,
        spread=spread,
    )
    logprob_N = trainer.forward_backward(weighted_batch(3))
    assert not trainer.optim_step().skipped
    return {f"{name}|logprob": logprob_N} | weights(name, spread)


def learned_both_ways(name: str, folder: Path, mesh: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that are read, and what is learned with them and with those of a model that was whole."""
    options = MeshConfig(**mesh)
    ranks = mesh_of(options, CPU)
    spread = loaded(folder, ranks, options, **FLOAT)
    found = weights(f"{name} read", spread) | learned(f"{name} in parts", spread)
    whole = spread_over(load_model(folder, dtype=torch.float32), ranks, options)
    return found | learned(f"{name} whole", whole)


def deep_on_four(rank: int, folder: str, names: list[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in names:
        found |= learned_both_ways(name, Path(folder) / name.split()[-1], DEEP_LAYOUTS[name])
    return found


def layouts_on_two(rank: int, folder: str, names: list[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in names:
        options = MeshConfig(**LAYOUTS[name])
        found |= weights(name, loaded(Path(folder), mesh_of(options, CPU), options, **FLOAT))
    return found


def read_on_two(rank: int, folder: str) -> dict[str, Tensor]:
    root, options = Path(folder), MeshConfig(dp_shard=2)
    mesh = mesh_of(options, CPU)
    mixture = MeshConfig(dp_shard=2, ep=2)
    found = weights("experts", loaded(root / "mixture", mesh_of(mixture, CPU), mixture, **FLOAT))
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
    found |= learned_both_ways("tied", root / "tied", {"pp": 2})
    stages = MeshConfig(pp=2)
    cut = mesh_of(stages, CPU)
    found |= weights("critic of stages", loaded(root / "critic", cut, stages, kind=SCALAR, **FLOAT))
    policy = loaded(root / "tied", cut, stages, **FLOAT)
    empty = empty_scalar_model(policy.model)
    fresh = taken(empty, scalar_weights(empty, policy.named_tensors()), cut, stages, CPU)
    found |= weights("fresh critic of stages", fresh)
    again = MeshConfig(dp_shard=2, activation_checkpointing="full")
    for family in FURTHER:
        found |= learned(family, loaded(root / family, mesh_of(again, CPU), again, **FLOAT))
    for name, ranks, how in (("half", mesh, options), ("stage", cut, stages)):
        found |= {f"{name} {what}": size for what, size in of_deep(root / "deep", ranks, how).items()}
    return found


def of_deep(folder: Path, mesh: Any, options: MeshConfig) -> dict[str, Tensor]:
    """Bytes that a rank holds, and that it had at most on the way."""

    def load_whole() -> ParallelModel:
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
    save_model(made, root / "critic")
    save_deep(root / "deep")
    save_model(deep_model("gemma2", seed=5), root / "tied")
    for family in FURTHER:
        save_model(bold_family(family), root / family)
    return root


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Tensor]]:
    return run_ranks(4, deep_on_four, str(folder), cases_of(request, "name"))


@pytest.fixture(scope="module")
def in_layouts(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Tensor]]:
    return run_ranks(2, layouts_on_two, str(folder / "tiny"), cases_of(request, "name"))


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Tensor]]:
    return run_ranks(2, read_on_two, str(folder))


def check_equal(found: dict[str, Tensor], name: str, expected: dict[str, Tensor]) -> None:
    ours = {key.partition("|")[2]: value for key, value in found.items() if key.startswith(f"{name}|")}
    assert ours.keys() == expected.keys()
    assert [key for key in ours if not torch.equal(ours[key], expected[key])] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_each_layout_ranks_hold_together_what_one_process_loads(name, folder, in_layouts):
    expected = dict(load_model(folder / "tiny", dtype=torch.float32).named_parameters())
    for found in in_layouts:
        check_equal(found, name, expected)


@pytest.mark.parametrize("family", FURTHER)
def test_models_that_need_a_cache_learn_in_parts_and_by_computing_layers_again(family, folder, two):
    whole = learned(family, ParallelModel(load_model(folder / family, dtype=torch.float32)))
    for found in two:
        for name, tensor in whole.items():
            close_fp32(found[name], tensor, rtol=1e-4, atol=1e-4)


def test_mixtures_and_critics_are_read_alike(folder, two):
    mixture = load_model(folder / "mixture", dtype=torch.float32)
    critic = loaded(folder / "critic", None, MeshConfig(), kind=SCALAR, **FLOAT).model
    for found in two:
        check_equal(found, "experts", dict(mixture.named_parameters()))
        check_equal(found, "critic", dict(critic.named_parameters()))
        check_equal(found, "critic of stages", dict(critic.named_parameters()))
        assert float(found["critic|score.weight"].abs().min()) > 0


def test_a_fresh_critic_of_stages_takes_what_the_policy_s_stages_hold(folder, two):
    expected = scalar_model(load_model(folder / "tied", dtype=torch.float32))
    for found in two:
        check_equal(found, "fresh critic of stages", dict(expected.named_parameters()))


def check_learned_alike(found: dict[str, Tensor], name: str, start: Model) -> None:
    """What ranks read is the whole model, and they learn from it what they learn from one they held."""
    check_equal(found, f"{name} read", dict(start.named_parameters()))
    prefix = f"{name} whole|"
    after = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    check_equal(found, f"{name} in parts", after)
    moved = [key for key, value in start.named_parameters() if not torch.equal(after[key], value)]
    assert len(moved) == len(list(start.parameters()))


def test_stages_with_a_tied_head_learn_as_those_of_a_whole_model(folder, two):
    start = load_model(folder / "tied", dtype=torch.float32)
    assert start.lm_head.weight is start.model.embed_tokens.weight
    for found in two:
        check_learned_alike(found, "tied", start)


@pytest.mark.parametrize("name", DEEP_LAYOUTS)
def test_stages_whose_weights_are_dealt_too_learn_as_those_of_a_whole_model(name, folder, four):
    start = load_model(folder / name.split()[-1], dtype=torch.float32)
    for found in four:
        check_learned_alike(found, name, start)


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
        assert int(found["half held"]) == whole // 2
        # A rank has 24 layers, and the embedding or the head and the last norm.
        assert int(found["stage held"]) <= whole // 2 + 64 * 4
        # Besides its half, FSDP gathers some layers of 48 for the trial. How many are held at once depends on
        # when the threads of the collectives release them: 0.53 to 0.70 where ranks are stopped at random.
        for name in ("half", "stage"):
            assert int(found[f"{name} peak"]) < 0.8 * whole
            assert int(found[f"{name} peak of the critic"]) < 0.8 * whole
            assert int(found[f"{name} peak of the whole"]) > whole


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
    return f"{folder}/model.safetensors is damaged: its tensors have "


def broken(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    problem = "its packed log-probabilities differ from its own by nan"
    return f"model type qwen3 cannot be trained by millrace: {problem}"


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
    told = []
    for options in (MeshConfig(dp_shard=2), MeshConfig(pp=2)):
        mesh = mesh_of(options, CPU)
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
    for told, sentence in zip(one, expected * 2, strict=True):
        assert told.startswith(sentence)
        assert "\n" not in told
