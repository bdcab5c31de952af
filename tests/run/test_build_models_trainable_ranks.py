"""An adapter that two ranks train, publish, save and take up again is the one that one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from millrace.config.recipe import load_recipe
from millrace.config.settings import RunConfig
from millrace.distributed.ranks import Ranks
from millrace.models.adapter_folder import WEIGHTS, load_adapter
from millrace.models.adapters import base_tensors, merged
from millrace.models.load import ModelError, load_model
from millrace.run.build import build
from millrace.run.build_models import ADAPTER
from millrace.run.checkpointing import POLICY, Saver, restore_optimizer, snapshot
from millrace.run.components import Components
from millrace.training.checkpoint import write_state
from millrace.training.policy import PolicyTrainer
from tests.close import close_fp32
from tests.end_to_end.tiny import TREE, tiny_recipe, write_sums
from tests.ranks import run_ranks
from tests.training.pieces import random_batch

pytestmark = pytest.mark.world

STEPS = 3
CHECKPOINT = "step-000003"


def recipe(folder: Path, num_ranks: int) -> RunConfig:
    """Reinforcement of the folder's model through an adapter, held to the model itself."""
    model = {"path": str(folder / "base"), "adapter": {"rank": 3, "alpha": 6.0}}
    tree = {key: value for key, value in TREE.items() if key not in ("tokenizer", "sft")}
    policy = {"optimizer": {"learning_rate": 0.01}, "kl": {"coefficient": 0.1}}
    data = TREE["data"] | {"train": str(folder / "sums.jsonl")}
    tree |= {"model": model, "data": data, "policy": policy, "mesh": {"dp_shard": num_ranks}}
    path = folder / f"{num_ranks}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_recipe(path, {"name": "run", "output": str(folder / "runs")})


def trainer_of(parts: Components) -> PolicyTrainer:
    trainer = parts.reinforcer(0, parts.control, None)
    for group in trainer.optimizer.param_groups:
        # With the usual eps, a gradient of nothing but rounding would move a weight as far as any other.
        group["eps"] = 1e-4
    return trainer


def step(trainer: PolicyTrainer, seed: int) -> None:
    batch = random_batch(seed)
    batch.reference_logprob_T = batch.sampler_logprob_T
    trainer.forward_backward(batch)
    assert not trainer.optim_step().skipped


def save(folder: Path, parts: Components, trainer: PolicyTrainer, ranks: Ranks) -> None:
    def begin(aside: Path) -> None:
        parts.save_model(aside / POLICY, weights=False)
        write_state(aside, {"order": 1})

    saver = Saver(ranks)
    saver.save(folder, {POLICY: snapshot(trainer, ranks)}, begin=begin, done=lambda: None)
    saver.settle()


def learned(rank: int, folder: str, size: int) -> dict[str, Tensor]:
    """Weights after some steps, what the base says, and weights after one more, also when taken up again."""
    root, ranks = Path(folder), Ranks(rank, size)
    config = recipe(root, size) if size == 1 else load_recipe(root / f"{size}.yaml")
    parts = build(config, None, ranks)
    trainer = trainer_of(parts)
    parts.policy_weights.activate(trainer)
    assert parts.reference is not None
    reference = parts.reference(root)
    for seed in range(STEPS):
        step(trainer, seed)
    batch = random_batch(9)
    told = {"base": reference.logprobs(batch), "policy": trainer.scorer.logprobs(batch)}
    told |= {f"weight/{name}": tensor.clone() for name, tensor in trainer.named_tensors()}
    # The sampler proves that it holds them.
    parts.transport.update_weights(trainer.named_tensors(), STEPS)
    checkpoint = root / str(size) / CHECKPOINT
    save(checkpoint, parts, trainer, ranks)
    parts = build(config, checkpoint, ranks)
    again = trainer_of(parts)
    restore_optimizer(again, checkpoint, POLICY, ranks)
    for number, one in enumerate((trainer, again)):
        step(one, STEPS)
        told |= {f"after {number}/{name}": tensor.clone() for name, tensor in one.named_tensors()}
    return told


def refused(rank: int, folder: str) -> None:
    """A checkpoint of another base, on every rank."""
    with pytest.raises(ModelError, match="was trained beside other weights than model.path"):
        build(load_recipe(Path(folder) / "2.yaml"), Path(folder) / "2" / CHECKPOINT, Ranks(rank, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    build(tiny_recipe(root), None).save_model(root / "base")
    write_sums(root)
    recipe(root, 2)
    return root


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Tensor]]:
    """What one process learns, and each of two ranks."""
    return [learned(0, str(folder), 1), *run_ranks(2, learned, str(folder), 2)]


def part(found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.partition("/")[2]: value for key, value in found.items() if key.startswith(f"{name}/")}


@pytest.mark.slow
def test_two_ranks_learn_the_adapter_that_one_process_learns(told, folder):
    alone, *ranks = told
    start = dict(base_tensors(load_model(folder / "base", dtype=torch.float32)))
    moved = [name for name, weight in part(alone, "weight").items() if not torch.equal(weight, start[name])]
    assert len(moved) == 14
    for found in ranks:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            close_fp32(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_base_is_asked_with_the_adapter_off(told):
    for found in told:
        assert float((found["base"] - found["policy"]).abs().max()) > 0.01


@pytest.mark.slow
def test_whoever_takes_it_up_goes_on_to_the_same_bits(told):
    for found in told:
        one, two = part(found, "after 0"), part(found, "after 1")
        assert [name for name in one if not torch.equal(one[name], two[name])] == []
        assert any(not torch.equal(one[name], part(found, "weight")[name]) for name in one)


def test_what_ranks_save_is_a_folder_of_peft_beside_an_ordinary_model(told, folder):
    model = folder / "2" / CHECKPOINT / POLICY
    names = {path.name for path in (model / ADAPTER).iterdir()}
    assert names == {"adapter_config.json", WEIGHTS, "base.sha256"}
    base = load_model(folder / "base", dtype=torch.float32)
    load_adapter(base, model / ADAPTER)
    made, held = dict(merged(base).named_parameters()), dict[str, Any]()
    for path in model.glob("*.safetensors"):
        held |= load_file(path)
    assert held.keys() == made.keys()
    assert [name for name in held if not torch.equal(held[name], made[name])] == []
    assert [name for name in held if not torch.equal(held[name], part(told[1], "weight")[name])] == []


@pytest.mark.slow
def test_every_rank_refuses_a_checkpoint_beside_another_base(told, folder):
    base = load_model(folder / "base", dtype=torch.float32)
    with torch.no_grad():
        base.model.norm.weight[3] += 1e-3
    base.save_pretrained(folder / "base")
    assert run_ranks(2, refused, str(folder)) == [{}, {}]
