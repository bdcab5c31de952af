from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.data.batch import Batch
from millrace.distributed import expert
from millrace.distributed.fsdp import PRODUCTS, Root, Sharding, decoder_layers, grad_norms, shard
from millrace.distributed.mesh import Mesh, make_mesh
from millrace.models.load import Model
from millrace.models.logprobs import chosen_logprobs
from millrace.models.saving import full_tensors, whole
from millrace.planner.layout import Layout
from millrace.training.optimizer import optimizer_step
from millrace.training.parallel_model import ParallelModel
from tests.close import close_bf16, close_fp32, comparable_adamw
from tests.models.tiny import random_batch, tiny_model
from tests.ranks import run_ranks

ALONE = Mesh(Layout(), "cpu", None)
PLAIN = Sharding(precision=None, reshard_after_forward=True, offload=False, checkpointing="none")
# Below the first norm of every case, so that the clipping shows in the weights.
MAX_NORM = 0.5
STEPS = 3
# Adam moves a weight by about this much at a step whatever its gradient: one of nearly 0, all rounding, too.
LEARNING_RATE = 0.0002


def _batch(seed: int, *, num_segments: int | None = None) -> Batch:
    """Random segments whose tokens weigh differently, some nothing."""
    batch = random_batch(seed)
    if num_segments is not None:
        batch = batch.select(list(range(num_segments)))
    generator = torch.Generator().manual_seed(seed)
    advantage_T = torch.randn(batch.num_tokens, generator=generator) * batch.action_mask_T
    weight_T = torch.rand(batch.num_tokens, generator=generator) * batch.action_mask_T / 20
    return replace(batch, advantage_T=advantage_T, weight_T=weight_T)


def _loss(model: Model, micro: Batch) -> Tensor:
    """Of the log-probabilities and the entropies, as a policy's is."""
    logprob_N, entropy_N = chosen_logprobs(model, micro, temperature=0.7)
    advantage_N, weight_N = micro.advantage_T[micro.action_mask_T], micro.weight_T[micro.action_mask_T]
    return ((0.1 * entropy_N - advantage_N * logprob_N) * weight_N).sum()


def _train(root: Root, mesh: Mesh, *, max_tokens: int, num_segments: int | None = None) -> dict[str, Tensor]:
    """Loss and gradients of the first step, norms of all, and the weights after three."""
    optimizer = comparable_adamw(root.model, betas=(0.9, 0.95), weight_decay=0.01)
    spread = ParallelModel(root.model, root, mesh)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        loss = torch.zeros(())
        for micro, _ in spread.micro_batches(_batch(step, num_segments=num_segments), max_tokens):
            # Ranks along cp have their share of each loss; here an equal one.
            (part,) = root(lambda model, micro=micro: (_loss(model, micro) / mesh.size("cp"),))
            part.backward()
            loss += part.detach()
        if step == 0:
            found["loss"] = mesh.sum_over(loss, "dp_replicate", "dp_shard", "cp")
            found |= {f"gradient/{name}": whole(p.grad).clone() for name, p in root.model.named_parameters()}
        report = optimizer_step(
            optimizer,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_NORM,
            metrics={},
            norms=spread.grad_norms,
        )
        assert not report.skipped
        for name, norm in (report.metrics | {"grad_norm": report.grad_norm}).items():
            found[f"{name}/{step}"] = torch.tensor(norm)
    return found | {f"weight/{name}": tensor.clone() for name, tensor in full_tensors(root.model)}


def _alone(architecture: str, *, num_segments: int | None = None) -> dict[str, Tensor]:
    """What one process without any of this makes of it."""
    model = tiny_model(architecture)
    optimizer = comparable_adamw(model, betas=(0.9, 0.95), weight_decay=0.01)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    weights = list(model.parameters())
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        loss = _loss(model, _batch(step, num_segments=num_segments))
        loss.backward()
        if step == 0:
            found["loss"] = loss.detach()
            for name, parameter in model.named_parameters():
                found[f"gradient/{name}"] = parameter.grad.clone()
        found |= _norms_by_kind(f"grad_norm_{{}}/{step}", [p.grad for p in weights])
        found[f"grad_norm/{step}"] = nn.utils.clip_grad_norm_(weights, MAX_NORM)
        before = [p.detach().clone() for p in weights]
        optimizer.step()
        moved = [p.detach() - old for p, old in zip(weights, before, strict=True)]
        found |= _norms_by_kind(f"update_norm_{{}}/{step}", moved)
        optimizer.zero_grad()
    return found | {f"weight/{name}": tensor.detach() for name, tensor in model.named_parameters()}


def _norms_by_kind(name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    kinds = {"matrices": [x for x in tensors if x.ndim > 1], "vectors": [x for x in tensors if x.ndim == 1]}
    return {name.format(kind): torch.cat([x.flatten() for x in some]).norm() for kind, some in kinds.items()}


def _norms_of_a_mix(mesh: Mesh) -> dict[str, Tensor]:
    """Of weights sharded by 3 rows and by 1, plain, whole on each rank, and counted on another stage."""
    generator = torch.Generator().manual_seed(11)
    tensors = [torch.randn(rows, 2, generator=generator) for rows in (3, 1, 4, 5, 6)]
    assert mesh.weights is not None
    over, kinds = mesh.weights, [Shard(0), Shard(0), None, Replicate(), None]
    held = [
        x if kind is None else distribute_tensor(x, over, [kind])
        for x, kind in zip(tensors, kinds, strict=True)
    ]
    three, one, plain, copied, tied = weights = [nn.Parameter(torch.zeros_like(x)) for x in held]
    for weight, gradient in zip(weights, held, strict=True):
        weight.grad = gradient
    found = grad_norms([[three, copied], [tied, one, plain], [tied]], mesh, elsewhere=[tied])
    expected = [torch.cat([tensors[i].flatten() for i in row]).norm() for row in ((0, 3), (1, 2))]
    return {"norms": torch.tensor(found), "expected": torch.stack([*expected, torch.zeros(())])}


def _held(root: Root) -> Tensor:
    """Numbers that this rank keeps of the weights."""
    return torch.tensor(sum(parameter.to_local().numel() for parameter in root.model.parameters()))


def _in_bfloat16(mesh: Mesh) -> dict[str, Tensor]:
    root = shard(tiny_model("llama"), mesh, replace(PLAIN, precision=torch.bfloat16))
    found = {"held": _held(root)}
    kinds = {parameter.dtype for parameter in root.model.parameters()}
    # Scored without gradient first: each rank's own parts must be back in place for the optimizer.
    with torch.no_grad():
        (found["scored"],) = root(lambda model: (_loss(model, _batch(0)),))
    kinds |= {parameter.to_local().dtype for parameter in root.model.parameters()}
    assert kinds == {torch.float32}
    return found | _train(root, mesh, max_tokens=64)


# Each case: architecture, how it is sharded, and how it is fed.
TWO = {
    "untied": ("llama", PLAIN, {"max_tokens": 64}),
    "tied, computed again": (
        "gemma2",
        replace(PLAIN, checkpointing="full", reshard_after_forward=False),
        {"max_tokens": 64},
    ),
    "offloaded, selective": (
        "qwen3",
        replace(PLAIN, checkpointing="selective", offload=True),
        {"max_tokens": 64},
    ),
    "experts": ("qwen3_moe", PLAIN, {"max_tokens": 30}),
    "a rank without segments": ("llama", PLAIN, {"max_tokens": 64, "num_segments": 1}),
    "uneven micro-batches": ("llama", PLAIN, {"max_tokens": 30, "num_segments": 3}),
}
FOUR = {
    "four": ("llama", replace(PLAIN, checkpointing="selective"), {"max_tokens": 30}),
    "replicated": ("gemma2", replace(PLAIN, checkpointing="full"), {"max_tokens": 30}),
    "over cp": ("qwen3", PLAIN, {"max_tokens": 30}),
    "dealt experts": ("qwen3_moe", PLAIN, {"max_tokens": 64}),
}


def _all(found: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{case}|{name}": tensor for case, part in found.items() for name, tensor in part.items()}


def _of(rank: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    return {name.split("|")[1]: tensor for name, tensor in rank.items() if name.startswith(f"{case}|")}


def _on_two(rank: int) -> dict[str, Tensor]:
    mesh = make_mesh(Layout(dp_shard=2), "cpu")
    found = {
        case: _train(shard(tiny_model(architecture), mesh, sharding), mesh, **options)
        for case, (architecture, sharding, options) in TWO.items()
    }
    return _all(found | {"mix": _norms_of_a_mix(mesh), "bfloat16": _in_bfloat16(mesh)})


def _on_four(rank: int) -> dict[str, Tensor]:
    found = {}
    meshes = {
        "four": make_mesh(Layout(dp_shard=4), "cpu"),
        "replicated": make_mesh(Layout(dp_replicate=2, dp_shard=2), "cpu"),
        "over cp": make_mesh(Layout(dp_shard=2, cp=2), "cpu"),
        "dealt experts": make_mesh(Layout(dp_shard=4, ep=2), "cpu"),
    }
    for case, (architecture, sharding, options) in FOUR.items():
        mesh = meshes[case]
        model = tiny_model(architecture)
        if mesh.experts is not None:
            expert.apply(model, mesh.experts)
        root = shard(model, mesh, sharding)
        held = {"held": _held(root)}
        found[case] = held | _train(root, mesh, **options)
    return _all(found)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Tensor]]:
    return run_ranks(2, _on_two)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Tensor]]:
    return run_ranks(4, _on_four)


def _check_equals_one_process(found: dict[str, Tensor], alone: dict[str, Tensor]) -> None:
    assert set(found) - {"held"} == set(alone)
    for name, expected in alone.items():
        close_fp32(found[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow_beyond(2)
@pytest.mark.world
@pytest.mark.parametrize("case", TWO)
def test_two_ranks_train_as_one_process_does(two, case):
    architecture, _, options = TWO[case]
    alone = _alone(architecture, num_segments=options.get("num_segments"))
    for rank in two:
        _check_equals_one_process(_of(rank, case), alone)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_train_as_one_process_does(four, case):
    alone = _alone(FOUR[case][0])
    for rank in four:
        _check_equals_one_process(_of(rank, case), alone)


@pytest.mark.slow
@pytest.mark.world
def test_ranks_keep_equal_parts_of_the_weights_and_replicas_all_of_theirs(two, four):
    numel = {a: sum(p.numel() for p in tiny_model(a).parameters()) for a in ("llama", "gemma2")}
    assert [int(_of(rank, "bfloat16")["held"]) for rank in two] == [numel["llama"] // 2] * 2
    assert [int(_of(rank, "four")["held"]) for rank in four] == [numel["llama"] // 4] * 4
    assert [int(_of(rank, "replicated")["held"]) for rank in four] == [numel["gemma2"] // 2] * 4
    experts = sum(p.numel() for p in tiny_model("qwen3_moe").parameters())
    assert [int(_of(rank, "dealt experts")["held"]) for rank in four] == [experts // 4] * 4


@pytest.mark.world
def test_bfloat16_computes_over_weights_that_stay_float32(two):
    alone = _alone("llama")
    for rank in two:
        found = _of(rank, "bfloat16")
        close_bf16(found["loss"], alone["loss"], rtol=1e-2, atol=1e-2)
        assert not torch.equal(found["loss"], alone["loss"])
        close_bf16(found["grad_norm/0"], alone["grad_norm/0"], rtol=2e-2)
        # Both ranks scored all of the batch.
        close_bf16(found["scored"], alone["loss"], rtol=1e-2, atol=1e-2)
        for name in alone:
            if name.startswith("weight/"):
                assert found[name].dtype == torch.float32
                close_bf16(found[name], alone[name], rtol=1e-2, atol=5e-3)


@pytest.mark.world
def test_norms_count_each_tensor_once_however_it_is_held(two):
    for rank in two:
        found = _of(rank, "mix")
        close_fp32(found["norms"], found["expected"])


def _gradients(root: Root, seed: int) -> tuple[dict[str, Tensor], int]:
    """Of one loss, and how many products its backward took."""
    counter = _Products()
    (loss,) = root(lambda model: (_loss(model, _batch(seed)),))
    with counter:
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in root.model.named_parameters()}, counter.count


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op in PRODUCTS
        return op(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3_moe"])
def test_checkpointing_keeps_the_bits_and_selectively_repeats_no_product(architecture):
    kept = shard(tiny_model(architecture), ALONE, PLAIN)
    full = shard(tiny_model(architecture), ALONE, replace(PLAIN, checkpointing="full"))
    some = shard(tiny_model(architecture), ALONE, replace(PLAIN, checkpointing="selective"))
    for seed in range(5):
        for root in (kept, full, some):
            root.zero_grad()
        expected, num_products = _gradients(kept, seed)
        all_again, num_full = _gradients(full, seed)
        some_again, num_some = _gradients(some, seed)
        assert num_some == num_products < num_full
        for name, gradient in expected.items():
            assert torch.equal(all_again[name], gradient)
            assert torch.equal(some_again[name], gradient)


def test_a_forward_without_gradient_computes_nothing_twice():
    model = tiny_model("llama")
    calls = []
    for layer in decoder_layers(model):
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    root = shard(model, ALONE, replace(PLAIN, checkpointing="full"))
    with torch.no_grad():
        (loss,) = root(lambda model: (_loss(model, _batch(1)),))
    assert loss == _loss(tiny_model("llama"), _batch(1)).detach()
    assert calls == decoder_layers(model)


def test_a_copy_of_a_checkpointed_model_computes_with_its_own_weights():
    root = shard(tiny_model("llama"), ALONE, replace(PLAIN, checkpointing="full"))
    twin = copy.deepcopy(root)
    with torch.no_grad():
        for parameter in root.model.parameters():
            parameter.zero_()
    loss = _loss(twin.model, _batch(0))
    assert loss == _loss(tiny_model("llama"), _batch(0))


@pytest.mark.slow
def test_one_process_has_the_gradients_and_the_weights_of_the_model_itself():
    root = shard(tiny_model("gemma2"), ALONE, PLAIN)
    assert [name for name, _ in full_tensors(root.model)] == [
        name for name, _ in tiny_model("gemma2").named_parameters()
    ]
    _check_equals_one_process(_train(root, ALONE, max_tokens=30), _alone("gemma2"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_given_as_it_is(value):
    bad, good = (_with_gradient(torch.tensor(numbers)) for numbers in ([0.3, value], [3.0, -4.0]))
    not_finite, five = grad_norms([[bad], [good]], ALONE)
    assert not math.isfinite(not_finite) and math.isnan(not_finite) == math.isnan(value)
    close_fp32(five, 5.0)


def test_a_norm_of_bfloat16_is_not_rounded_to_it():
    gradient = torch.ones(4097, dtype=torch.bfloat16)
    gradient[0] = 65.0
    # Rounded it would be 91.
    close_fp32(grad_norms([[_with_gradient(gradient)]], ALONE), [math.sqrt(65**2 + 4096)])


def _with_gradient(gradient: Tensor) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    return weight


def test_master_weights_must_be_float32():
    model = tiny_model("llama", dtype=torch.bfloat16)
    sentence = "precision is torch.bfloat16, over weights that must be float32 and are not; load the model in"
    with pytest.raises(ValueError, match=f"^{sentence} float32$"):
        shard(model, ALONE, replace(PLAIN, precision=torch.bfloat16))


@pytest.mark.parametrize("asked", [{"precision": torch.bfloat16}, {"offload": True}])
def test_what_torch_shards_with_needs_a_process_group(asked):
    with pytest.raises(ValueError, match="^precision and offload need a process group, even of one rank"):
        shard(tiny_model("llama"), ALONE, replace(PLAIN, **asked))


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(ValueError, match="^Linear has no decoder layers that could be sharded one by one$"):
        decoder_layers(nn.Linear(2, 2))
