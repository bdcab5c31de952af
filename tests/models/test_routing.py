from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from millrace.models.load import Model
from millrace.models.logprobs import chosen_logprobs
from millrace.models.routing import (
    BIAS,
    Form,
    Routers,
    balance_loss,
    expert_load,
    load_metrics,
    moved_bias,
)
from tests.close import close_fp32, close_fp64
from tests.models.mixtures import MIXTURES, NUM_CHOICES, NUM_EXPERTS, mixture
from tests.models.tiny import random_batch, tiny_model

BATCH = random_batch(3)


def logprobs(model: Model) -> Tensor:
    return chosen_logprobs(model, BATCH, temperature=1.0)[0]


def random_experts(seed: int, num_tokens: int, num_layers: int) -> Tensor:
    """Different experts for each token and layer, [T, L, K]."""
    generator = torch.Generator().manual_seed(seed)
    score_TLE = torch.rand(num_tokens, num_layers, NUM_EXPERTS, generator=generator)
    return score_TLE.topk(NUM_CHOICES, dim=2).indices.int()


def move(model: Model, *, by: float) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * by)


def gates(model: Model) -> list[nn.Module]:
    return [
        module
        for name, module in model.named_modules()
        if name.endswith(".mlp.gate") or name.endswith("block_sparse_moe.gate")
    ]


def own_weights(model: Model, logit_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """What the papers write for each architecture, token by token."""
    rows = []
    for logit_E, expert_N in zip(logit_TE.double(), expert_TK.tolist(), strict=True):
        if model.config.model_type == "deepseek_v3":
            score = [1 / (1 + (-logit_E[e]).exp()) for e in expert_N]
            rows.append(torch.stack([2.5 * s / sum(score) for s in score]))
        else:
            score = [logit_E[e].exp() / logit_E.exp().sum() for e in expert_N]
            total = sum(score) if model.config.model_type == "mixtral" else 1.0
            rows.append(torch.stack([s / total for s in score]))
    return torch.stack(rows)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_what_was_recorded_gives_the_same_output_when_replayed(architecture: str) -> None:
    model = mixture(architecture)
    routers = Routers(model)
    with routers.record() as record:
        first_N = logprobs(model)
    expert_TLK = record.expert_TLK
    assert expert_TLK.dtype == torch.int32
    assert expert_TLK.shape == (BATCH.num_tokens, routers.num_layers, NUM_CHOICES)
    assert routers.num_layers == (1 if architecture == "deepseek_v3" else 2)
    assert (routers.num_experts, routers.num_choices) == (NUM_EXPERTS, NUM_CHOICES)
    with routers.replay(expert_TLK):
        close_fp32(logprobs(model), first_N)
    # Outside of the contexts the model is as it was.
    assert not any(gate._forward_hooks for gate in gates(model))
    assert torch.equal(logprobs(model), first_N)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_after_the_weights_moved_the_forced_experts_answer_with_present_weights(architecture: str) -> None:
    model = mixture(architecture)
    routers = Routers(model)
    with routers.record() as before:
        logprobs(model)
    move(model, by=0.1)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    with routers.record() as free:
        logprobs(model)
    assert not torch.equal(free.expert_TLK, before.expert_TLK)
    with routers.replay(before.expert_TLK), routers.record() as record:
        handles = [gate.register_forward_hook(lambda *call: seen.append(call[2])) for gate in gates(model)]
        logprobs(model)
        for handle in handles:
            handle.remove()
    assert torch.equal(record.expert_TLK, before.expert_TLK)
    assert len(seen) == routers.num_layers
    for layer, (logit_TE, weight_TK, expert_TK) in enumerate(seen):
        assert torch.equal(expert_TK, before.expert_TLK[:, layer].long())
        close_fp32(weight_TK, own_weights(model, logit_TE, expert_TK))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_routers_learn_from_forced_choices(architecture: str) -> None:
    """The gradient of a router's weight by differences, with experts it would not have chosen."""
    model = mixture(architecture)
    routers = Routers(model)
    expert_TLK = random_experts(4, BATCH.num_tokens, routers.num_layers)
    with routers.replay(expert_TLK):
        logprobs(model).sum().backward()
    weight = gates(model)[-1].weight
    assert isinstance(weight, nn.Parameter) and weight.grad is not None
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    sums = []
    for by in (0.01, -0.02):
        with torch.no_grad(), routers.replay(expert_TLK):
            weight.add_(direction * by)
            sums.append(float(logprobs(model).double().sum()))
    slope = float((weight.grad * direction).sum())
    assert abs(slope) > 0.05
    close_fp32((sums[0] - sums[1]) / 0.02, slope, rtol=0.02)


def test_a_row_of_minus_one_keeps_the_routers_own_choice() -> None:
    model = mixture("qwen3_moe")
    routers = Routers(model)
    with routers.record() as free:
        own_N = logprobs(model)
    expert_TLK = random_experts(6, BATCH.num_tokens, 2)
    expert_TLK[::2, 1] = -1
    with routers.replay(expert_TLK), routers.record() as record:
        logprobs(model)
    assert torch.equal(record.expert_TLK[1::2], expert_TLK[1::2])
    assert torch.equal(record.expert_TLK[:, 0], expert_TLK[:, 0])
    assert bool((record.expert_TLK[::2, 1] >= 0).all())
    with routers.replay(torch.full_like(expert_TLK, -1)):
        close_fp32(logprobs(model), own_N)
    assert not torch.equal(free.expert_TLK, expert_TLK)


def test_a_layer_computed_again_in_the_backward_replays_too() -> None:
    model = mixture("qwen3_moe")
    routers = Routers(model)
    expert_TLK = random_experts(7, BATCH.num_tokens, 2)
    grads = []
    for again in (False, True):
        model.zero_grad()
        if again:
            for layer in model.model.layers:
                forward = layer.forward
                layer.forward = lambda *a, forward=forward, **k: checkpoint(
                    forward, *a, use_reentrant=False, **k
                )
        with routers.replay(expert_TLK), routers.record() as record:
            logprob_N = logprobs(model)
            count_TL = torch.arange(2 * BATCH.num_tokens).view(-1, 2) % 3
            mass_LE = record.mass_LE(count_TL)
            loss = logprob_N.sum() + mass_LE.square().sum()
            loss.backward()
        assert torch.equal(record.expert_TLK, expert_TLK)
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        close_fp32(one, other)


def test_an_expert_without_any_mass_gets_the_weight_zero() -> None:
    form = Form("softmax", normalised=True, scale=1.0)
    logit_TE = torch.tensor([[0.0, -200.0, -300.0]])
    close_fp32(form.weights(logit_TE, torch.tensor([[1, 2]])), [[0.0, 0.0]])
    close_fp32(form.weights(logit_TE, torch.tensor([[0, 2]])), [[1.0, 0.0]])


@pytest.mark.parametrize("seed", range(6))
def test_the_loss_of_one_layer_is_that_of_transformers(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logit_TE = torch.randn(9, NUM_EXPERTS, generator=generator, requires_grad=True)
    expert_TK = logit_TE.topk(NUM_CHOICES).indices
    expected = load_balancing_loss_func((logit_TE,), NUM_EXPERTS, NUM_CHOICES)
    probability_TE = logit_TE.softmax(1)
    loss = balance_loss(
        probability_TE.sum(0)[None],
        expert_load(expert_TK[:, None].int(), NUM_EXPERTS),
        num_choices=NUM_CHOICES,
        coefficient=0.7,
    )
    close_fp32(loss, 0.7 * expected)
    close_fp32(torch.autograd.grad(loss, logit_TE)[0], 0.7 * torch.autograd.grad(expected, logit_TE)[0])


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_parts_of_a_row_add_up_to_the_loss_of_all_layers_of_the_whole(cut: int) -> None:
    generator = torch.Generator().manual_seed(cut)
    probability_TLE = torch.rand(11, 3, NUM_EXPERTS, generator=generator)
    expert_TLK = random_experts(cut, 11, 3)
    plain = 0.0
    for layer in range(3):
        for e in range(NUM_EXPERTS):
            share = int((expert_TLK[:, layer] == e).sum()) / 11
            plain += NUM_EXPERTS * share * float(probability_TLE[:, layer, e].sum()) / 11
    parts = [slice(0, cut), slice(cut, 11)]
    load_LE = sum(expert_load(expert_TLK[part], NUM_EXPERTS) for part in parts)
    assert isinstance(load_LE, Tensor)
    losses = [
        balance_loss(probability_TLE[part].sum(0), load_LE, num_choices=NUM_CHOICES, coefficient=1.0)
        for part in parts
    ]
    close_fp32(sum(losses), plain)


def test_equal_loads_have_a_loss_of_the_number_of_choices_and_a_row_without_tokens_none() -> None:
    even = balance_loss(torch.full((1, 3), 6 / 3), torch.tensor([[4, 4, 4]]), num_choices=2, coefficient=1.0)
    close_fp32(even, 2.0)
    # A row of one token is not yet empty: 2 of 3 experts, 3 * (0.5 + 0.2).
    single = balance_loss(
        torch.tensor([[0.5, 0.2, 0.3]]), torch.tensor([[1, 1, 0]]), num_choices=2, coefficient=1.0
    )
    close_fp32(single, 2.1)
    none = balance_loss(torch.zeros(1, 3), torch.zeros(1, 3), num_choices=2, coefficient=1.0)
    assert none.item() == 0.0
    off = balance_loss(torch.ones(1, 3), torch.tensor([[1, 1, 0]]), num_choices=2, coefficient=0.0)
    assert off.item() == 0.0


def test_a_token_without_a_record_falls_on_no_expert() -> None:
    expert_TLK = torch.tensor([[[0, 2], [1, 2]], [[-1, -1], [2, 0]]], dtype=torch.int16)
    assert expert_load(expert_TLK, 4).tolist() == [[1, 0, 1, 0], [1, 1, 2, 0]]


def test_how_evenly_experts_are_used() -> None:
    # Shares of 3/4 and 1/4, then equal ones; the entropy of the first is 0.8112781 bits of 2 at most.
    found = load_metrics(torch.tensor([[6, 2, 0, 0], [5, 5, 5, 5]]))
    assert found.keys() == {"router_max_load", "router_load_entropy"}
    close_fp64(found["router_max_load"], (3.0 + 1.0) / 2)
    close_fp64(found["router_load_entropy"], (0.8112781244591328 / 2 + 1.0) / 2)
    assert load_metrics(torch.tensor([[1, 1], [0, 0]])) == {}


def test_recorded_probabilities_are_those_of_the_scores() -> None:
    model = mixture("deepseek_v3")
    with Routers(model).record() as record:
        logprobs(model)
    with torch.no_grad():
        hidden: list[Tensor] = []
        gate = gates(model)[0]
        handle = gate.register_forward_pre_hook(lambda _, args: hidden.append(args[0].view(-1, 32)))
        logprobs(model)
        handle.remove()
    score_TE = F.linear(hidden[0], gate.weight).sigmoid()
    count_T = torch.arange(BATCH.num_tokens) % 3
    mass_LE = record.mass_LE(count_T[:, None])
    close_fp32(mass_LE[0], (score_TE / score_TE.sum(1, keepdim=True) * count_T[:, None]).sum(0))
    assert mass_LE.requires_grad


def test_biases_move_against_the_load_and_change_the_choice_alone() -> None:
    model = mixture("deepseek_v3")
    gate = gates(model)[0]
    gate.e_score_correction_bias = torch.tensor([0.5, -0.25, *[0.0] * 6]).bfloat16()
    routers = Routers(model)
    routers.prepare_biases()
    # The mean load is 5.
    load_LE = torch.tensor([[9, 5, 6, 8, 2, 4, 3, 3]])
    routers.move_biases(load_LE, step=0.001)
    expected = [0.499, -0.25, -0.001, -0.001, 0.001, 0.001, 0.001, 0.001]
    close_fp32(gate.e_score_correction_bias, expected, rtol=1e-7, atol=0)
    assert BIAS in gate._buffers and f"model.layers.1.mlp.gate.{BIAS}" in model.state_dict()
    for _ in range(400):
        routers.move_biases(load_LE, step=0.01)
    with routers.record() as record:
        logprobs(model)
    # Experts 4 to 7 are the second group.
    assert sorted(record.expert_TLK.unique().tolist()) == [4, 5, 6, 7]


def test_a_bias_at_the_mean_load_stays() -> None:
    moved = moved_bias(torch.zeros(3), torch.tensor([7, 7, 7]), step=0.5)
    assert moved.tolist() == [0.0, 0.0, 0.0]
    close_fp64(moved_bias(torch.ones(2), torch.tensor([1, 2]), step=0.5), [1.5, 0.5])


REPLAYED = [
    (torch.zeros(5, 2, 2), r"shape \(5, 2, 2\) and torch\.float32; the model needs integers \[T, 2, 2\]"),
    (torch.zeros(5, 3, 2, dtype=torch.int32), r"shape \(5, 3, 2\)"),
    (
        torch.tensor([[[0, 1], [2, 2]]]),
        r"token 0 in layer 1 to \[2, 2\]; it must be 2 different experts below 8",
    ),
    (torch.tensor([[[0, 1], [2, 3]], [[0, 8], [1, 2]]]), r"token 1 in layer 0 to \[0, 8\]"),
    (torch.tensor([[[0, -1], [2, 3]]]), r"token 0 in layer 0 to \[0, -1\]"),
    (torch.tensor([[[-2, -1], [2, 3]]]), r"token 0 in layer 0 to \[-2, -1\]"),
]


@pytest.mark.parametrize(("expert_TLK", "sentence"), REPLAYED)
def test_routing_that_cannot_be_is_refused(expert_TLK: Tensor, sentence: str) -> None:
    routers = Routers(mixture("qwen3_moe"))
    with pytest.raises(ValueError, match=sentence), routers.replay(expert_TLK):
        pass


def test_another_number_of_tokens_is_refused_where_it_shows() -> None:
    model = mixture("qwen3_moe")
    with (
        Routers(model).replay(random_experts(0, 5, 2)),
        pytest.raises(
            ValueError, match=rf"has 5 tokens, but the row that .*gate sees has {BATCH.num_tokens};"
        ),
    ):
        logprobs(model)
    assert not any(gate._forward_hooks for gate in gates(model))


def test_a_record_without_a_forward_is_refused() -> None:
    with Routers(mixture("mixtral")).record() as record:
        pass
    with pytest.raises(ValueError, match=r"no forward has passed model\.layers\.0\.mlp\.gate; run the model"):
        _ = record.expert_TLK


def test_a_dense_model_and_unknown_routers_are_refused() -> None:
    with pytest.raises(ValueError, match="a llama has no routers; only a mixture of experts has"):
        Routers(tiny_model("llama"))
    model = mixture("qwen3_moe")

    class Odd(type(gates(model)[0])):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Any:
            logit_TE, weight_TK, expert_TK = super().forward(hidden)
            return logit_TE, weight_TK.square(), expert_TK

    gates(model)[1].__class__ = Odd
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.gate is a Odd, whose weights are neither a softmax"
    ):
        Routers(model)
    Odd.forward = lambda self, hidden: hidden  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"is a Odd, which cannot be tried: too many values to unpack"):
        Routers(model)


def test_balancing_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"router model\.layers\.0\.mlp\.gate has no bias e_score_correction"
    ):
        Routers(mixture("mixtral")).prepare_biases()
    with pytest.raises(ValueError, match=r"load_LE has shape \(2, 8\); the model has 1 layers of 8 experts"):
        Routers(mixture("deepseek_v3")).move_biases(torch.zeros(2, NUM_EXPERTS), step=0.1)
    with pytest.raises(ValueError, match=r"step is 0\.0; it must be above 0"):
        moved_bias(torch.zeros(2), torch.zeros(2), step=0.0)
    mass_LE = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mass_LE has shape \(2, 3\) and load_LE \(2, 4\); they"):
        balance_loss(mass_LE, torch.zeros(2, 4), num_choices=2, coefficient=1.0)
    for choices, coefficient in ((0, 1.0), (2, -1.0)):
        with pytest.raises(
            ValueError, match=rf"num_choices is {choices} and coefficient {coefficient}; they"
        ):
            balance_loss(mass_LE, torch.zeros(2, 3), num_choices=choices, coefficient=coefficient)
