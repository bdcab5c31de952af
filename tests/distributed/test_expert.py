"""Experts dealt over ranks against one process. Rank p of four sees the segments of `batch.shard(p, 4)`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.data.batch import Batch
from millrace.distributed import expert
from millrace.distributed.fsdp import Sharding, shard
from millrace.distributed.mesh import make_mesh
from millrace.models.facts import EXPERT_WEIGHTS, experts_of
from millrace.models.load import Model
from millrace.models.logprobs import chosen_logprobs
from millrace.models.routing import Routers, balance_loss, expert_load
from millrace.planner.layout import Layout
from tests.close import close_fp32
from tests.models.mixtures import MIXTURES, NUM_CHOICES, NUM_EXPERTS, mixture
from tests.models.tiny import random_batch, tiny_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.together

NUM_RANKS = 4
NUM_STEPS = 3
COEFFICIENT = 0.3
Tensors = dict[str, Tensor]


def weighted_batch() -> Batch:
    """Segments of many lengths; every token has a share of the loss of its own."""
    batch = random_batch(3)
    batch.weight_T = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)) / 10
    return batch


def own_batch(rank: int) -> Batch:
    return weighted_batch().shard(rank, NUM_RANKS)


def loss_of(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and this rank's part of the loss: of the tokens, and of their balance."""
    with Routers(model).record() as record:
        logprob_N, entropy_N = chosen_logprobs(model, batch, temperature=1.0)
    load_LE = expert_load(record.expert_TLK, NUM_EXPERTS)
    if dist.is_initialized():
        dist.all_reduce(load_LE)
    mass_LE = record.mass_LE(torch.ones(batch.num_tokens, len(load_LE)))
    balance = balance_loss(mass_LE, load_LE, num_choices=NUM_CHOICES, coefficient=COEFFICIENT)
    weight_N = batch.weight_T[batch.action_mask_T]
    return logprob_N, ((logprob_N + 0.1 * entropy_N) * weight_N).sum() + balance


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sum_gradients(model: Model) -> None:
    """What the data ranks do with all gradients but those of experts."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if dist.is_initialized() and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)


def trained(model: Model, batch: Batch) -> Tensors:
    """Log-probabilities, loss and gradients of the first step, and the weights after the last."""
    out = {}
    # Adam's first steps are as long as the learning rate however small a gradient is; so is its rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, foreach=False)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        logprob_N, loss = loss_of(model, batch)
        loss.backward()
        sum_gradients(model)
        if step == 0:
            out = {"logprob": logprob_N.detach(), "loss": loss.detach()}
            out |= {
                f"grad {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
    return out | {f"weight {name}": whole(p) for name, p in model.named_parameters()}


def forced(batch: Batch, experts: list[int], num_layers: int) -> Tensor:
    return torch.tensor(experts, dtype=torch.int32).expand(batch.num_tokens, num_layers, NUM_CHOICES)


def with_forced_experts(model: Model, batch: Batch, experts: list[int]) -> Tensors:
    routers = Routers(model)
    with routers.replay(forced(batch, experts, routers.num_layers)):
        logprob_N, _ = chosen_logprobs(model, batch, temperature=1.0)
        (logprob_N * batch.weight_T[batch.action_mask_T]).sum().backward()
    sum_gradients(model)
    grads = {f"grad {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"logprob": logprob_N.detach()} | grads


def block_inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and weights of a rank; rank 1 has no tokens."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 0 if rank == 1 else 7
    hidden_TD = torch.randn(num_tokens, 32, generator=generator)
    expert_TN = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_CHOICES).indices
    return hidden_TD, expert_TN, torch.rand(num_tokens, NUM_CHOICES, generator=generator)


def block(module: Any, hidden_TD: Tensor, expert_TN: Tensor, weight_TN: Tensor) -> Tensors:
    """One layer of experts alone, with the gradients of all that it is given."""
    leaves = [hidden_TD.requires_grad_(), weight_TN.requires_grad_()]
    out_TD = module(hidden_TD, expert_TN, weight_TN)
    (out_TD.sin().sum()).backward()
    return {
        "out": out_TD.detach(),
        "hidden": leaves[0].grad,
        "weight": leaves[1].grad,
        **{key: whole(getattr(module, key).grad) for key in EXPERT_WEIGHTS},
    }


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def dealt(rank: int) -> Tensors:
    """Everything that ranks with different experts compute."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("ep",))
    batch = own_batch(rank)
    out: Tensors = {}
    for architecture in MIXTURES:
        model = mixture(architecture)
        names = [name for name, _ in model.named_parameters()]
        expert.apply(model, mesh)
        assert [name for name, _ in model.named_parameters()] == names
        module = next(iter(experts_of(model).values()))
        assert module.gate_up_proj.to_local().shape[0] == NUM_EXPERTS // NUM_RANKS
        out |= prefixed(architecture, trained(model, batch))
    model = mixture("qwen3_moe")
    expert.apply(model, mesh)
    out |= prefixed("forced", with_forced_experts(model, batch, [1, 0]))
    model.zero_grad()
    out |= prefixed("block", block(model.model.layers[0].mlp.experts, *block_inputs(rank)))
    with pytest.raises(ValueError, match=r"experts of model\.layers\.0\.mlp\.experts are dealt already"):
        expert.apply(model, mesh)
    return out | prefixed("sharded", dealt_and_sharded(rank))


def dealt_and_sharded(rank: int) -> Tensors:
    """Experts dealt over two ranks, and the weights of each half over the two ranks that have it, by FSDP."""
    mesh = make_mesh(Layout(dp_shard=NUM_RANKS, ep=2), "cpu")
    assert mesh.experts is not None
    model = mixture("qwen3_moe")
    routers = Routers(model)
    expert.apply(model, mesh.experts)
    sharding = Sharding(precision=None, reshard_after_forward=True, offload=False, checkpointing="full")
    root = shard(model, mesh, sharding)
    batch = own_batch(rank)
    weight_N = batch.weight_T[batch.action_mask_T]
    with routers.replay(torch.full((batch.num_tokens, 2, NUM_CHOICES), -1)):
        (loss,) = root(lambda m: ((chosen_logprobs(m, batch, temperature=1.0)[0] * weight_N).sum(),))
        loss.backward()
    grads = {f"grad {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


@pytest.fixture(scope="module")
def ranks() -> list[Tensors]:
    return run_ranks(NUM_RANKS, dealt)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("architecture", MIXTURES)
def test_ranks_compute_and_learn_what_one_process_does(ranks: list[Tensors], architecture: str) -> None:
    expected = trained(mixture(architecture), weighted_batch())
    assert any("experts" in name for name in expected)
    close_fp32(sum(out[f"{architecture}/loss"] for out in ranks), expected["loss"])
    for rank, out in enumerate(ranks):
        logprob_N, _ = chosen_logprobs(mixture(architecture), own_batch(rank), temperature=1.0)
        close_fp32(out[f"{architecture}/logprob"], logprob_N, atol=1e-5)
        for name, tensor in expected.items():
            if name.startswith(("grad", "weight")):
                close_fp32(out[f"{architecture}/{name}"], tensor, atol=1e-5)


@pytest.mark.slow
@pytest.mark.world
def test_a_rank_whose_experts_get_no_token_takes_part_all_the_same(ranks: list[Tensors]) -> None:
    expected = with_forced_experts(mixture("qwen3_moe"), weighted_batch(), [1, 0])
    for out in ranks:
        for name, tensor in expected.items():
            if name.startswith("grad"):
                close_fp32(out[f"forced/{name}"], tensor, atol=1e-5)
        grad = out["forced/grad model.layers.1.mlp.experts.down_proj"]
        assert grad[0].abs().max() > 0.01 and grad[1].abs().max() > 0.01
        assert grad[2:].abs().max() == 0.0


@pytest.mark.slow
@pytest.mark.world
def test_a_rank_without_tokens_computes_for_the_others(ranks: list[Tensors]) -> None:
    module = mixture("qwen3_moe").model.layers[0].mlp.experts
    inputs = [torch.cat(parts) for parts in zip(*map(block_inputs, range(NUM_RANKS)), strict=True)]
    expected = block(module, *inputs)
    assert [len(out["block/out"]) for out in ranks] == [7, 0, 7, 7]
    for name in ("out", "hidden", "weight"):
        close_fp32(torch.cat([out[f"block/{name}"] for out in ranks]), expected[name], atol=1e-5)
    for out in ranks:
        for key in EXPERT_WEIGHTS:
            close_fp32(out[f"block/{key}"], expected[key], atol=1e-5)


@pytest.mark.slow
@pytest.mark.world
def test_experts_dealt_and_sharded_have_the_gradients_of_one_process(ranks: list[Tensors]) -> None:
    model, batch = mixture("qwen3_moe"), weighted_batch()
    loss = (chosen_logprobs(model, batch, temperature=1.0)[0] * batch.weight_T[batch.action_mask_T]).sum()
    loss.backward()
    close_fp32(sum(out["sharded/loss"] for out in ranks), loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for out in ranks:
            close_fp32(out[f"sharded/grad {name}"], parameter.grad, atol=1e-5)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_in_one_process_our_experts_are_those_of_transformers(architecture: str) -> None:
    expert.register()
    theirs = mixture(architecture)
    ours = copy.deepcopy(theirs)
    ours.set_experts_implementation(expert.NAME)
    expected, out = (trained(model, weighted_batch()) for model in (theirs, ours))
    assert out.keys() == expected.keys()
    for name, tensor in expected.items():
        close_fp32(out[name], tensor, atol=1e-5)


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_rank_holds_all_experts_and_computes_the_same() -> None:
    model = mixture("mixtral")
    expected = chosen_logprobs(model, weighted_batch(), temperature=1.0)[0]
    expert.apply(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
    close_fp32(chosen_logprobs(model, weighted_batch(), temperature=1.0)[0], expected)


@pytest.mark.usefixtures("alone")
def test_experts_without_numbers_are_dealt_too() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", num_hidden_layers=1))
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    expert.apply(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
    module = model.model.layers[0].mlp.experts
    assert module.gate_up_proj.shape == (8, 2 * 14336, 4096)
    assert module.gate_up_proj.to_local().is_meta
    assert (module.gate_up_proj.requires_grad, module.down_proj.requires_grad) == (True, False)


@pytest.mark.usefixtures("alone")
def test_models_and_meshes_that_do_not_fit_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    with pytest.raises(ValueError, match=r"a llama has no experts to deal; set mesh\.ep to 1"):
        expert.apply(tiny_model("llama"), mesh)
    with pytest.raises(
        ValueError, match=r"mesh has dimensions \('dp_shard', 'ep'\); experts are dealt over one"
    ):
        expert.apply(mixture("mixtral"), init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "ep")))
    with torch.device("meta"):
        odd = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt_oss", num_hidden_layers=1, hidden_size=32, num_local_experts=4)
        )
    with pytest.raises(
        ValueError, match=r"mlp\.experts is a GptOssExperts, whose experts are not a gated pair"
    ):
        expert.apply(odd, mesh)


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    module = mixture("mixtral").model.layers[0].mlp.experts
    with pytest.raises(ValueError, match=r"3 ranks do not divide the 8 experts of layer; set mesh\.ep to a"):
        expert._check("layer", module, 3)
