"""Training over recorded experts: the same numbers however segments share, are split or dealt to ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.config import method_sections as words
from millrace.config.mesh_section import MeshConfig
from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.data.shared_prefix import common_beginnings
from millrace.distributed import expert
from millrace.inference.engine import PagedEngine
from millrace.models.load import Model, load_model, named_weights, save_model
from millrace.models.logprobs import chosen_logprobs
from millrace.models.router_replay import Routing
from millrace.models.routing import BIAS, Routers, balance_loss, expert_load
from millrace.run.build_algorithm import build_loss
from millrace.training.optimizer import adamw
from millrace.training.parallel_model import ParallelModel, mesh_of, spread_over
from millrace.training.policy import PolicyObjective, PolicyTrainer, Predicted
from millrace.training.scorer import ModelScorer
from millrace.transport.fingerprint import fingerprint
from millrace.transport.weight_update import check_fingerprint
from millrace.types import Outcome, SamplingParams, Trajectory, Turn
from tests.close import close_fp32, close_fp64
from tests.data.pieces import random_tree
from tests.inference.fresh import decode
from tests.models.mixtures import MIXTURES, NUM_CHOICES, NUM_EXPERTS, mixture
from tests.models.tiny import VOCABULARY
from tests.ranks import run_ranks
from tests.training.pieces import plain_logits

CLIP = PolicyObjective(build_loss(words.PpoClipLoss(clip_low=0.2, clip_high=0.2)))
COEFFICIENT = 0.05
BIAS_STEP = 0.01
# As one row, as few, and almost one for each segment.
SPLITS = (10_000, 150, 60)
LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2},
    {"dp_shard": 2, "activation_checkpointing": "full"},
    {"dp_replicate": 2},
    {"dp_shard": 2, "ep": 2},
]


def segments(batch: Batch) -> list[Batch]:
    return [batch.select([b]) for b in range(batch.num_segments)]


def batch_with_routes(seed: int, architecture: str) -> Batch:
    """Segments that begin alike, with the routes of other weights; one of them leaves its group's.

    Last tokens have none, as those that a sampler drew.
    """
    batch, other = random_tree(seed, vocab_size=VOCABULARY), mixture(architecture, seed=1)
    routes = []
    for one in segments(batch):
        with torch.no_grad(), Routers(other).record() as record:
            chosen_logprobs(other, one, temperature=1.0)
        routes.append(record.expert_TLK.short())
        routes[-1][-1] = -1
    shared = common_beginnings(batch.token_T, batch.length_B)
    assert shared is not None
    apart = int(shared.first_B.argmax())
    routes[apart][1] = (routes[apart][1] + 1) % NUM_EXPERTS
    return replace(batch, expert_TLK=torch.cat(routes))


def routing_of(model: Model, **how: Any) -> Routing:
    return Routing(Routers(model), **{"replay": True, **how})


def trainer(model: Model, routing: Routing | None, *, max_tokens: int = 10_000, **more: Any) -> PolicyTrainer:
    optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.0)
    for group in optimizer.param_groups:
        # With the usual eps, a gradient of nothing but rounding would move a weight as far as any other.
        group["eps"] = 1e-4
    options = {"learning_rate": lambda step: 1e-3, "max_grad_norm": 1e9, "temperature": 1.0} | more
    return PolicyTrainer(model, CLIP, optimizer, max_tokens=max_tokens, routing=routing, **options)


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model: Model, batch: Batch, *, coefficient: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients, each segment computed alone by transformers' own modules."""
    model = copy.deepcopy(model)
    routers = Routers(model)
    assert batch.expert_TLK is not None
    logits, mass_LE = [], torch.zeros(routers.num_layers, NUM_EXPERTS)
    for one in segments(batch):
        assert one.expert_TLK is not None
        with routers.replay(one.expert_TLK), routers.record() as record:
            logits.append(plain_logits(model, one, 1.0))
        mass_LE = mass_LE + record.mass_LE((one.expert_TLK >= 0).all(2))
    logprob_NV = torch.cat(logits).log_softmax(1)
    target_N = batch.token_T[batch.action_mask_T]
    logprob_N = logprob_NV.gather(1, target_N[:, None])[:, 0]
    entropy_N = -(logprob_NV.exp() * logprob_NV).sum(1)
    loss_N, _ = CLIP(Predicted(logprob_N, entropy_N, 0), batch)
    load_LE = expert_load(batch.expert_TLK, NUM_EXPERTS)
    balance = balance_loss(mass_LE, load_LE, num_choices=NUM_CHOICES, coefficient=coefficient)
    ((loss_N * batch.weight_T[batch.action_mask_T]).sum() + balance).backward()
    return logprob_N.detach(), gradients(model)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("coefficient", [0.0, COEFFICIENT])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_replayed_step_is_that_of_the_plain_modules_however_it_is_split(
    architecture: str, coefficient: float
) -> None:
    batch = batch_with_routes(2, architecture)
    expected_N, expected = plain(mixture(architecture), batch, coefficient=coefficient)
    for max_tokens in SPLITS:
        model = mixture(architecture)
        one = trainer(model, routing_of(model, coefficient=coefficient), max_tokens=max_tokens)
        close_fp32(one.forward_backward(batch), expected_N, rtol=1e-4, atol=1e-5)
        found = gradients(model)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            close_fp32(gradient, expected[name], rtol=1e-3, atol=2e-5)
    # The balance is part of what was compared, and sends the routers elsewhere than the policy alone.
    without = plain(mixture(architecture), batch, coefficient=0.0)[1]
    gate = next(name for name in expected if name.endswith("gate.weight"))
    assert torch.equal(expected[gate], without[gate]) == (coefficient == 0)


def test_tokens_alike_are_computed_once_where_they_go_to_the_same_experts() -> None:
    batch, model = batch_with_routes(2, "qwen3_moe"), mixture("qwen3_moe")
    kept = []
    for routing in (None, routing_of(model)):
        with Routers(model).watch(lambda layer, logit_TE, _: kept.append(len(logit_TE))):
            ModelScorer(model, temperature=1.0, max_tokens=10_000, routing=routing).logprobs(batch)
    # The segment that goes elsewhere from its second token on is computed by itself.
    assert kept[0] == kept[1] < kept[2] == kept[3] < batch.num_tokens
    assert kept[2] - kept[0] < int(batch.length_B.max())


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_where_no_token_goes_elsewhere_replay_changes_no_bit(architecture: str) -> None:
    batch, model = random_tree(3, vocab_size=VOCABULARY), mixture(architecture)
    with torch.no_grad(), Routers(model).record() as record:
        chosen_logprobs(model, batch.select([0]), temperature=1.0)
    batch = replace(batch.select([0]), expert_TLK=record.expert_TLK.short())
    free, replayed = trainer(model, None), trainer(model, routing_of(model))
    logprob_N = free.forward_backward(batch)
    expected = gradients(model)
    free.discard()
    assert torch.equal(replayed.forward_backward(batch), logprob_N)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


def sampled(model: Model, seed: int) -> Batch:
    """What an engine over a model draws, with the experts its tokens went to."""
    engine = PagedEngine(model, decode, max_cache_tokens=2048, record_experts=True)
    prompts = [(1, 2, 3), (4, 5, 6, 7)] * 8
    params = [SamplingParams(max_tokens=24, seed=seed + n) for n in range(len(prompts))]
    return pack(
        [
            Trajectory((Turn(prompt, drawn),), Outcome("score", 0.0))
            for prompt, drawn in zip(prompts, engine.generate(prompts, params), strict=True)
        ]
    )


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_replay_brings_the_trainer_closer_to_a_sampler_of_another_precision(architecture: str) -> None:
    sampler = mixture(architecture).bfloat16().requires_grad_(False)
    model = copy.deepcopy(sampler).float()
    batch = sampled(sampler, 0)
    distance = {}
    for name, routing in (("free", None), ("replay", routing_of(model))):
        scorer = ModelScorer(model, temperature=1.0, max_tokens=10_000, routing=routing)
        gap_T = (scorer.logprobs(batch) - batch.sampler_logprob_T).abs()
        distance[name] = gap_T[batch.action_mask_T]
    # A token that goes elsewhere is off by far more than rounding.
    assert float(distance["replay"].max()) < 0.5 * float(distance["free"].max())
    assert float(distance["replay"].mean()) < 0.8 * float(distance["free"].mean())


def test_a_step_says_how_experts_are_loaded_and_moves_biases_against_it() -> None:
    batch, model = batch_with_routes(4, "deepseek_v3"), mixture("deepseek_v3")
    routing = routing_of(model, bias_step=BIAS_STEP)
    routing.routers.prepare_biases()
    gate = model.model.layers[1].mlp.gate
    before_E = gate.e_score_correction_bias.clone()
    assert batch.expert_TLK is not None
    count_E = torch.bincount(batch.expert_TLK[batch.expert_TLK >= 0].long(), minlength=NUM_EXPERTS)
    one = trainer(model, routing)
    # Two calls make one step.
    for part in (batch.select([0, 1, 2]), batch.select(list(range(3, batch.num_segments)))):
        one.forward_backward(part)
    report = one.optim_step()
    close_fp64(report.metrics["router_max_load"], float(count_E.max() / count_E.double().mean()))
    signs = [1.0 if count < count_E.double().mean() else -1.0 for count in count_E.tolist()]
    close_fp32(gate.e_score_correction_bias, before_E + BIAS_STEP * torch.tensor(signs))
    # A step that is skipped moves nothing, and the next one starts its count anew.
    after_E = gate.e_score_correction_bias.clone()
    one.forward_backward(replace(batch, advantage_T=batch.advantage_T * torch.nan))
    assert one.optim_step().skipped
    assert torch.equal(gate.e_score_correction_bias, after_E)
    assert "router_max_load" not in one.optim_step().metrics


@pytest.mark.slow
def test_biases_are_published_and_saved_with_the_weights(tmp_path: Path) -> None:
    model = mixture("deepseek_v3").bfloat16()
    routing = routing_of(model, bias_step=BIAS_STEP)
    routing.routers.prepare_biases()
    held = copy.deepcopy(model).requires_grad_(False)
    one = trainer(model, routing)
    one.forward_backward(batch_with_routes(4, "deepseek_v3"))
    one.optim_step()
    name = f"model.layers.1.mlp.gate.{BIAS}"
    assert dict(one.named_tensors())[name].dtype == torch.float32
    assert not torch.equal(held.get_buffer(name), model.get_buffer(name))
    # The engine's half of a hand-over alone, since its cache has not the widths that this architecture needs.
    engine = PagedEngine(held, decode, max_cache_tokens=64)
    engine.update_weights(one.named_tensors(), 1)
    check_fingerprint(fingerprint(one.named_tensors()), engine.fingerprint(), 1)
    assert torch.equal(held.get_buffer(name), model.get_buffer(name))
    save_model(model, tmp_path)
    again = load_model(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(again.get_buffer(name), model.get_buffer(name))


def test_what_cannot_be_replayed_is_refused() -> None:
    batch, model = random_tree(0, vocab_size=VOCABULARY), mixture("mixtral")
    one = trainer(model, routing_of(model))
    with pytest.raises(
        ValueError, match="does not record which experts its tokens went to; let the engine rec"
    ):
        one.forward_backward(batch)
    with pytest.raises(
        ValueError, match="does not record which experts its tokens went to; let the engine rec"
    ):
        one.scorer.logprobs(batch)


def dealt(architecture: str, mesh: dict[str, Any]) -> ParallelModel:
    model = mixture(architecture)
    # The same sums, whether experts are dealt out or not.
    expert.register()
    model.set_experts_implementation(expert.NAME)
    options = MeshConfig(**mesh)
    return spread_over(model, mesh_of(options, torch.device("cpu")), options)


def learned(architecture: str, mesh: dict[str, Any]) -> dict[str, Tensor]:
    """What three optimizer steps show, and the weights after them."""
    spread = dealt(architecture, mesh)
    biased = architecture == "deepseek_v3"
    routing = routing_of(spread.model, coefficient=COEFFICIENT, bias_step=BIAS_STEP if biased else 0.0)
    if biased:
        routing.routers.prepare_biases()
    one = trainer(spread.model, routing, max_tokens=150, spread=spread)
    told = {}
    for step in range(3):
        batch = batch_with_routes(step, architecture)
        if step == 2:
            # Of one segment, so that all ranks but one have nothing of it.
            batch = batch.select([int(batch.length_B.argmax())])
        told[f"{step} logprob"] = one.forward_backward(batch)
        report = one.optim_step()
        numbers = {**report.metrics, "grad_norm": report.grad_norm}
        told |= {f"{step} {name}": torch.tensor(value) for name, value in numbers.items()}
    return told | {name: tensor.clone() for name, tensor in one.named_tensors()}


def on_ranks(rank: int) -> dict[str, Tensor]:
    told = {}
    for n, mesh in enumerate(LAYOUTS):
        for architecture in ("qwen3_moe", "deepseek_v3"):
            found = learned(architecture, mesh)
            told |= {f"{n} {architecture} {name}": tensor for name, tensor in found.items()}
    spread = dealt("qwen3_moe", {"tp": 2})
    one = trainer(spread.model, Routing(Routers(mixture("qwen3_moe")), replay=True), spread=spread)
    with pytest.raises(ValueError, match=r"cannot be replayed or balanced with mesh\.tp above 1"):
        one.forward_backward(batch_with_routes(0, "qwen3_moe"))
    return told


@pytest.mark.slow
def test_two_ranks_replay_and_balance_as_one_process_does() -> None:
    ranks = run_ranks(2, on_ranks)
    for architecture in ("qwen3_moe", "deepseek_v3"):
        expected = learned(architecture, {})
        assert (f"model.layers.1.mlp.gate.{BIAS}" in expected) == (architecture == "deepseek_v3")
        for n in range(len(LAYOUTS)):
            for told in ranks:
                for name, tensor in expected.items():
                    close_fp32(told[f"{n} {architecture} {name}"], tensor, rtol=1e-3, atol=1e-5)


def test_the_weights_of_a_folder_are_parameters_and_the_biases_of_routers() -> None:
    model = mixture("deepseek_v3")
    names = [name for name, _ in named_weights(model)]
    assert set(names) == model.state_dict().keys()
    assert names[-1] == f"model.layers.1.mlp.gate.{BIAS}"
