"""The models beside a policy are dealt to ranks, say what they say whole, and go on from what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from millrace.config.recipe import load_recipe
from millrace.config.settings import RunConfig
from millrace.data.batch import Batch
from millrace.distributed.collectives import local
from millrace.distributed.ranks import Ranks
from millrace.models.heads import load_scalar_model, scalar_model
from millrace.models.load import load_model, save_model
from millrace.models.saving import save_config
from millrace.run.build import build
from millrace.run.build_models import CRITIC
from millrace.run.checkpointing import POLICY, Saver, restore_optimizer, snapshot
from millrace.run.components import Components
from millrace.training.checkpoint import write_state
from millrace.training.scorer import ModelScorer
from tests.close import close_fp32
from tests.end_to_end.tiny import TREE, tiny_recipe, write_sums
from tests.ranks import run_ranks
from tests.training.pieces import full_batch, random_batch

pytestmark = pytest.mark.world


def recipe(folder: Path, name: str, **more: Any) -> RunConfig:
    """Reinforcement of a small model on the folder's sums."""
    tree = {key: value for key, value in TREE.items() if key != "sft"}
    tree |= {"data": TREE["data"] | {"train": str(folder / "sums.jsonl")}} | more
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_recipe(path, {"name": "run", "output": str(folder / "runs")})


def gentle(trainer: Any) -> Any:
    for group in trainer.optimizer.param_groups:
        # With the usual eps, a gradient of nothing but rounding would move a weight as far as any other.
        group["eps"] = 1e-4
    return trainer


def held_to_it(rank: int, folder: str, size: int) -> dict[str, Tensor]:
    """Bytes of a reference on this rank, what it says, and the weights that are held to it after a step."""
    root = Path(folder)
    # Not the weights of the reference: those of another seed.
    policy = {"optimizer": {"learning_rate": 0.01}, "kl": {"coefficient": 0.5, "estimator": "full"}}
    config = recipe(root / str(rank), f"{size}", policy=policy, mesh={"dp_shard": size}, seed=5)
    parts = build(config, None, Ranks(rank, size))
    assert parts.reference is not None
    reference = parts.reference(root / "base")
    trainer = gentle(parts.reinforcer(0, parts.control, reference))
    batch = random_batch(3)
    told = {"says": reference.logprobs(batch), "policy": trainer.scorer.logprobs(batch)}
    trainer.forward_backward(batch)
    report = trainer.optim_step()
    told["divergence"] = torch.tensor(report.metrics["kl_reference"])
    told |= {f"weight/{name}": tensor.clone() for name, tensor in trainer.named_tensors()}
    held = sum(local(weight).nbytes for weight in reference.model.parameters())
    return told | {"held": torch.tensor(held)}


def step(trainers: list[Any], seed: int) -> None:
    for trainer in trainers:
        trainer.forward_backward(batch_of(seed))
        assert not trainer.optim_step().skipped


def batch_of(seed: int) -> Batch:
    """With all that a policy and a critic look at."""
    batch = full_batch(seed)
    batch.value_T = torch.zeros(batch.num_tokens)
    batch.return_T = batch.advantage_T.clone()
    return batch


def from_folders(rank: int, folder: str, size: int) -> dict[str, Tensor]:
    """What critic and reference say that the recipe names: a reward model, and a policy of another seed."""
    root = Path(folder)
    batch, found = batch_of(3), {}
    for name in ("judge", "base"):
        config = recipe(
            root / str(rank),
            f"{name}-{size}",
            advantage={"kind": "gae"},
            critic={"path": str(root / name)},
            policy={"kl": {"coefficient": 0.1, "path": str(root / "base")}},
            mesh={"dp_shard": size},
            seed=5,
        )
        parts = build(config, None, Ranks(rank, size))
        assert parts.critic is not None and parts.reference is not None
        critic = parts.critic()
        found[f"{name}/values"] = critic.values(batch)[0]
        found |= {f"{name}/{weight}": tensor.clone() for weight, tensor in critic.named_tensors()}
        # The weights that reinforcement starts from are not looked at.
        found[f"{name}/says"] = parts.reference(root / "gone").logprobs(batch)
    return found


def in_stages(rank: int, folder: str) -> dict[str, Tensor]:
    """Policy, critic and reference of two stages, and weights after a step when they went on and anew."""
    root, ranks = Path(folder), Ranks(rank, 2)
    more = {"advantage": {"kind": "gae"}, "critic": {}, "policy": {"kl": {"coefficient": 0.1}}}
    model = {"path": str(root / "base")}
    without = {"tokenizer": {"path": str(root / "base")}}
    config = recipe(root / str(rank), "stages", model=model, mesh={"pp": 2}, **more, **without)
    checkpoint = root / "step-000001"
    found: dict[str, Tensor] = {}
    sides = []
    for saved in (None, checkpoint):
        parts = build(config, saved, ranks)
        assert parts.critic is not None and parts.reference is not None
        pair = [gentle(parts.reinforcer(0, parts.control, None)), gentle(parts.critic())]
        sides.append(pair)
        if saved is None:
            found["says"] = parts.reference(root / "base").logprobs(batch_of(1))
            step(pair, 1)
            save(checkpoint, parts, dict(zip((POLICY, CRITIC), pair, strict=True)), ranks)
    for name, trainer in zip((POLICY, CRITIC), sides[1], strict=True):
        restore_optimizer(trainer, checkpoint, name, ranks)
    for number, pair in enumerate(sides):
        for name, trainer in zip((POLICY, CRITIC), pair, strict=True):
            held = {f"{name}/{weight}": tensor.clone() for weight, tensor in trainer.named_tensors()}
            found |= held if number else {}
        step(pair, 2)
        for name, trainer in zip((POLICY, CRITIC), pair, strict=True):
            found |= {f"after {number}/{name}/{w}": tensor.clone() for w, tensor in trainer.named_tensors()}
    return found


def save(folder: Path, parts: Components, trainers: dict[str, Any], ranks: Ranks) -> None:
    def begin(aside: Path) -> None:
        parts.save_model(aside / POLICY, weights=False)
        save_config(trainers[CRITIC].model, aside / CRITIC)
        write_state(aside, {"order": 1})

    saver = Saver(ranks)
    snapshots = {name: snapshot(trainer, ranks) for name, trainer in trainers.items()}
    saver.save(folder, snapshots, begin=begin, done=lambda: None)
    saver.settle()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("companions")
    for name in ("base", "judge"):
        build(tiny_recipe(root), None).save_model(root / name)
    judge = scalar_model(load_model(root / "judge", dtype=torch.float32))
    torch.nn.init.normal_(judge.score.weight, generator=torch.Generator().manual_seed(2))
    save_model(judge, root / "judge")
    for rank in ("0", "1"):
        (root / rank).mkdir()
        write_sums(root / rank)
    return root


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Tensor]]:
    """Of one process, and of each of two ranks."""
    return [held_to_it(0, str(folder), 1), *run_ranks(2, held_to_it, str(folder), 2)]


@pytest.mark.slow
def test_each_of_two_ranks_holds_half_of_the_reference(told):
    whole, one, other = (int(found["held"]) for found in told)
    assert one + other == whole
    # A row of a weight is one rank's.
    assert max(one, other) < 0.51 * whole


def test_two_ranks_are_held_to_it_as_one_process_is(told):
    alone, *ranks = told
    assert float(alone["divergence"]) > 1e-3
    for found in ranks:
        assert found.keys() == alone.keys()
        for name in found.keys() - {"held"}:
            close_fp32(found[name], alone[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_read_critic_and_reference_from_folders_as_one_process_does(folder):
    alone, *ranks = [from_folders(0, str(folder), 1), *run_ranks(2, from_folders, str(folder), 2)]
    assert float(alone["judge/values"].abs().sum()) > 0.1
    assert float(alone["base/values"].abs().sum()) == 0.0
    for found in ranks:
        assert found.keys() == alone.keys()
        for name in found:
            close_fp32(found[name], alone[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_stages_go_on_from_what_they_saved_and_one_process_can_read_it(folder):
    ranks = run_ranks(2, in_stages, str(folder))
    base, batch = load_model(folder / "base", dtype=torch.float32), batch_of(1)
    says_T = ModelScorer(base, temperature=1.0, max_tokens=1000).logprobs(batch)
    saved = folder / "step-000001"
    policy = load_model(saved / POLICY, dtype=torch.float32)
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    models = {POLICY: policy, CRITIC: load_scalar_model(saved / CRITIC, dtype=torch.float32)}
    expected = {f"{name}/{w}": x for name, model in models.items() for w, x in model.named_parameters()}
    start = dict(base.named_parameters())
    assert [n for n, weight in policy.named_parameters() if torch.equal(weight, start[n])] == []
    for found in ranks:
        close_fp32(found["says"], says_T, rtol=1e-5, atol=1e-5)
        assert [name for name, weight in expected.items() if not torch.equal(found[name], weight)] == []
        for name, weight in expected.items():
            assert torch.equal(found[f"after 0/{name}"], found[f"after 1/{name}"])
            assert not torch.equal(found[f"after 0/{name}"], weight)
