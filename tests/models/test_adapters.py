"""Adapters: what they compute, what learns, and what peft makes of them.

N = output width, D = input width, R = rank, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from millrace.models.adapters import (
    Adapted,
    adapted_layers,
    add_adapter,
    freeze,
    merged,
    merged_tensors,
    trained_weights,
    without_adapter,
)
from millrace.models.fused import Linear, set_deterministic
from millrace.models.load import Model, ModelError
from millrace.models.logprobs import chosen_logprobs, hidden_states, output_head, packed_context
from tests.close import close_bf16, close_fp32, close_fp64
from tests.models.tiny import random_batch, tiny_model

TOKENS = [3, 17, 39, 4, 0, 22, 8]


def logits(model: Model, tokens: list[int] | None = None) -> Tensor:
    token_T = torch.tensor(tokens or TOKENS)
    context = packed_context(model, torch.tensor([len(token_T)]))
    with torch.no_grad():
        hidden_TD = hidden_states(model, token_T, torch.arange(len(token_T)), context)
        return output_head(model).logits(hidden_TD)


def shake(model: Model, seed: int, *, spread: float = 0.2) -> Model:
    """Give the pairs numbers, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in trained_weights(model):
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return model


def adapted_model(architecture: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **more):
    model = tiny_model(architecture, seed=seed, dtype=dtype)
    add_adapter(model, **({"rank": 3, "alpha": 5.0, "seed": seed} | more))
    return shake(model, seed)


@pytest.mark.slow_beyond(14)
@pytest.mark.parametrize("seed", range(20))
def test_an_adapted_layer_is_the_dense_product_and_so_is_its_gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    width, height, rank = (int(n) for n in torch.randint(2, 9, (3,), generator=generator))
    layer = torch.nn.Linear(width, height, bias=seed % 2 == 0, dtype=torch.float64)
    Linear.adopt(layer)
    alpha, stabilised = 0.5 + seed, seed % 3 == 0
    layer = Adapted.widen(layer, rank, alpha=alpha, rank_stabilised=stabilised)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    x_TD = torch.randn(5, width, generator=generator, dtype=torch.float64, requires_grad=True)
    scale = alpha / (rank**0.5 if stabilised else rank)
    a_RD, b_NR = layer.lora_A.weight, layer.lora_B.weight
    plain_TN = x_TD @ (layer.weight + scale * b_NR @ a_RD).T + (0 if layer.bias is None else layer.bias)
    ours_TN = layer(x_TD)
    close_fp64(ours_TN, plain_TN)
    assert [layer.weight.requires_grad, layer.bias is not None and layer.bias.requires_grad] == [False] * 2
    slope_TN = torch.randn(5, height, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(ours_TN, (x_TD, a_RD, b_NR), slope_TN)
    plain = torch.autograd.grad(plain_TN, (x_TD, a_RD, b_NR), slope_TN)
    for one, other in zip(ours, plain, strict=True):
        close_fp64(one, other)
    layer.tile = 4
    tiled = torch.autograd.grad(layer(x_TD), (x_TD, a_RD, b_NR), slope_TN)
    for one, other in zip(tiled, plain, strict=True):
        close_fp64(one, other)


def test_a_fresh_adapter_changes_nothing_and_is_drawn_as_peft_draws_it():
    model = tiny_model("llama")
    before, state = logits(model), torch.random.get_rng_state()
    add_adapter(model, rank=40, alpha=8.0, seed=7)
    assert torch.equal(logits(model), before)
    assert torch.equal(torch.random.get_rng_state(), state)
    layers = adapted_layers(model)
    assert len(layers) == 2 * 7
    assert "lm_head" not in layers
    for layer in layers.values():
        a_RD = layer.lora_A.weight.detach()
        bound = 1 / math.sqrt(layer.in_features)
        assert 0.97 * bound < float(a_RD.abs().max()) <= bound
        close_fp32(a_RD.std(), bound / math.sqrt(3), rtol=0.06)
        assert not layer.lora_B.weight.any()
    again, other = (tiny_model("llama") for _ in range(2))
    add_adapter(again, rank=40, alpha=8.0, seed=7)
    add_adapter(other, rank=40, alpha=8.0, seed=8)
    drawn = [[layer.lora_A.weight for layer in adapted_layers(m).values()] for m in (model, again, other)]
    assert all(torch.equal(one, two) for one, two in zip(drawn[0], drawn[1], strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(drawn[0], drawn[2], strict=True))


def test_only_the_pairs_learn():
    model = adapted_model("gpt_neox")
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(learning) == 2 * 2 * 4
    assert {name.partition(".lora_")[2] for name in learning} == {"A.weight", "B.weight"}
    logprob_N, _ = chosen_logprobs(model, random_batch(0), temperature=1.0)
    logprob_N.sum().backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert moved == set(learning)
    assert all(bool(weight.grad.any()) for weight in trained_weights(model))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "gemma2", "qwen3_moe", "gpt_neox"])
def test_the_merged_copy_has_the_bases_names_and_says_the_same(architecture):
    base = tiny_model(architecture)
    model = adapted_model(architecture)
    plain = merged(model)
    assert list(plain.state_dict()) == list(base.state_dict())
    assert adapted_layers(plain) == {}
    close_fp32(logits(plain), logits(model), atol=2e-5)
    assert float((logits(base) - logits(model)).abs().max()) > 0.1
    with without_adapter(model):
        assert torch.equal(logits(model), logits(base))
    sent = dict(merged_tensors(model))
    held = dict(plain.named_parameters())
    assert list(sent) == list(held)
    assert [name for name in sent if not torch.equal(sent[name], held[name])] == []
    assert not any(tensor.requires_grad for tensor in sent.values())
    assert all(torch.is_grad_enabled() for _ in merged_tensors(model))


def test_without_an_adapter_the_weights_themselves_are_sent_and_copied():
    model = tiny_model("qwen3")
    sent = dict(merged_tensors(model))
    assert [tensor.data_ptr() for tensor in sent.values()] == [p.data_ptr() for p in model.parameters()]
    copied = merged(model)
    assert torch.equal(logits(copied), logits(model))
    assert copied.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()


def test_in_bfloat16_the_pair_stays_float32_and_the_merged_weight_is_rounded_once():
    model = adapted_model(dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    assert {weight.dtype for weight in trained_weights(model)} == {torch.float32}
    assert model.dtype == layer.weight.dtype == torch.bfloat16
    change_ND = (layer.lora_B.weight.double() @ layer.lora_A.weight.double()) * 5 / 3
    close_bf16(layer.merged_weight(), layer.weight.double() + change_ND, rtol=2.0**-8, atol=1e-6)
    assert layer.merged_weight().dtype == torch.bfloat16
    x_TD = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected_TN = x_TD.double() @ (layer.weight.double() + change_ND).T
    with torch.no_grad():
        ours_TN = layer(x_TD)
    assert ours_TN.dtype == torch.bfloat16
    close_bf16(ours_TN, expected_TN, atol=2e-2)


def test_the_base_comes_back_with_the_pair_however_the_block_ends():
    model = adapted_model()
    with_pair = logits(model)
    with pytest.raises(KeyError), without_adapter(model):
        without = logits(model)
        with without_adapter(model):
            assert torch.equal(logits(model), without)
        assert torch.equal(logits(model), without)
        raise KeyError
    assert torch.equal(logits(model), with_pair)
    assert not torch.equal(without, with_pair)


def test_a_deterministic_model_has_the_merged_ones_bits():
    batch = random_batch(3)
    model = tiny_model("qwen3")
    set_deterministic(model)
    add_adapter(model, rank=3, alpha=5.0, seed=0)
    plain = merged(shake(model, 1))
    logprob_N, _ = chosen_logprobs(model, batch, temperature=0.7)
    merged_N, _ = chosen_logprobs(plain, batch, temperature=0.7)
    assert torch.equal(logprob_N.detach(), merged_N.detach())
    alone_N, _ = chosen_logprobs(model, batch.select([2]), temperature=0.7)
    here_N = batch.segment_T[batch.action_mask_T] == 2
    assert torch.equal(alone_N.detach(), logprob_N.detach()[here_N])
    other = shake(adapted_model(), 1)
    other_N, _ = chosen_logprobs(other, batch, temperature=0.7)
    close_fp32(logprob_N, other_N, atol=1e-4)
    ours, theirs = (
        torch.autograd.grad(one_N.sum(), list(trained_weights(m)))
        for m, one_N in ((model, logprob_N), (other, other_N))
    )
    for one, two in zip(ours, theirs, strict=True):
        close_fp32(one, two, rtol=1e-3, atol=1e-3 * float(two.detach().abs().max()))


HAS = "this model has: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rank": 0}, "rank is 0; an adapter's rank must be at least 1"),
        ({"alpha": 0.0}, "alpha is 0.0; an adapter's alpha must be a number above 0"),
        ({"alpha": math.nan}, "alpha is nan; an adapter's alpha must be a number above 0"),
        ({"targets": ()}, "adapter targets are empty; name layers or write all-linear"),
        (
            {"targets": ("q_proj", "proj")},
            "adapter target 'proj' is no layer; " + HAS,
        ),
        (
            {"targets": ("lm_head",)},
            "adapter target 'lm_head' means lm_head, which an adapter cannot stand beside; " + HAS,
        ),
        (
            {"targets": ("embed_tokens",)},
            "adapter target 'embed_tokens' means model.embed_tokens, which an adapter cannot stand beside; "
            + HAS,
        ),
    ],
)
def test_an_adapter_that_cannot_be_made_is_refused_in_a_sentence_and_changes_nothing(more, message):
    model = tiny_model("qwen3")
    with pytest.raises(ModelError) as caught:
        add_adapter(model, **({"rank": 2, "alpha": 1.0, "seed": 0} | more))
    assert str(caught.value) == message
    assert adapted_layers(model) == {}
    assert all(weight.requires_grad for weight in model.parameters())


def test_frozen_weights_are_named_with_wildcards():
    model = tiny_model("qwen3")
    freeze(model, ["model.embed_tokens.*", "model.layers.0.*"])
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert len(frozen) == 1 + 11
    assert {name.removeprefix("model.").partition(".")[0] for name in frozen} == {"embed_tokens", "layers"}
    assert len(trained_weights(model)) == 11 + 2
    assert {id(weight) for weight in trained_weights(model)}.isdisjoint(
        id(weight) for weight in model.model.layers[0].parameters()
    )


def test_a_tied_weight_is_frozen_by_either_name():
    model = tiny_model("gemma2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    freeze(model, ["lm_head.weight"])
    assert not model.model.embed_tokens.weight.requires_grad


def test_a_pattern_that_matches_nothing_or_everything_is_refused():
    model = tiny_model("qwen3")
    with pytest.raises(ModelError) as caught:
        freeze(model, ["model.embed_tokens"])
    assert str(caught.value) == (
        "model.frozen 'model.embed_tokens' matches no weight; names are whole, such as "
        "model.embed_tokens.weight"
    )
    with pytest.raises(ModelError) as caught:
        freeze(model, ["model.*", "lm_head.*"])
    assert str(caught.value) == (
        "model.frozen ['model.*', 'lm_head.*'] leaves no weight to learn; remove a pattern"
    )
