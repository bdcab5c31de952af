"""The policy trainer with an adapter: the pairs learn, the base stays, and what is sent is both."""

from __future__ import annotations

import copy

import torch

from millrace.config.method_sections import PpoClipLoss
from millrace.models.adapters import adapted_layers, add_adapter, freeze, merged, trained_weights
from millrace.models.logprobs import output_head
from millrace.run.build_algorithm import build_loss
from millrace.training.kl_control import KlControl
from millrace.training.optimizer import adamw, optimizer_tensors, start_optimizer
from millrace.training.policy import BaseScorer, KlPenalty, PolicyObjective, PolicyTrainer
from millrace.training.scorer import ModelScorer
from tests.close import close_fp32
from tests.training.pieces import random_batch, tiny_model

CLIP = PolicyObjective(build_loss(PpoClipLoss(clip_low=0.2, clip_high=0.2)))


def trainer(model, objective=CLIP, **more) -> PolicyTrainer:
    optimizer = adamw(trained_weights(model), betas=(0.9, 0.999), weight_decay=0.1)
    options = {"learning_rate": lambda step: 0.02, "temperature": 0.8, "max_tokens": 30} | more
    return PolicyTrainer(model, objective, optimizer, max_grad_norm=1.0, **options)


def adapted(seed: int = 0):
    model = tiny_model(seed)
    add_adapter(model, rank=4, alpha=8.0, seed=seed)
    return model


def steps(one: PolicyTrainer, seeds: range) -> None:
    for seed in seeds:
        one.forward_backward(random_batch(seed))
        assert not one.optim_step().skipped


def test_the_pairs_move_by_their_own_gradient_and_no_weight_of_the_base_does():
    one = trainer(adapted())
    before = {name: weight.clone() for name, weight in tiny_model(0).named_parameters()}
    one.forward_backward(random_batch(0))
    by_hand = [weight.grad.clone() for weight in trained_weights(one.model)]
    norm = torch.cat([gradient.flatten() for gradient in by_hand]).norm()
    report = one.optim_step()
    close_fp32(report.grad_norm, norm)
    assert report.grad_norm > 0.01
    steps(one, range(1, 4))
    after = dict(one.model.named_parameters())
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    assert all(weight.grad is None for weight in one.model.parameters())
    assert all(bool(layer.lora_B.weight.any()) for layer in adapted_layers(one.model).values())
    state = optimizer_tensors(one.optimizer, one.model)
    assert len(state) == 3 * len(trained_weights(one.model)) == 3 * 2 * 14
    assert all(".lora_" in name for name in state)


def test_what_is_sent_is_the_merged_model_under_the_bases_names():
    one = trainer(adapted())
    steps(one, range(3))
    sent = dict(one.named_tensors())
    held = dict(merged(one.model).named_parameters())
    assert list(sent) == [name for name, _ in tiny_model(0).named_parameters()]
    assert all(torch.equal(sent[name], held[name]) for name in held)
    assert not torch.equal(
        sent["model.layers.1.mlp.up_proj.weight"], one.model.model.layers[1].mlp.up_proj.weight
    )


def test_a_trainer_taken_up_again_goes_on_to_the_same_bits():
    one = trainer(adapted())
    steps(one, range(2))
    again = trainer(copy.deepcopy(one.model))
    state = optimizer_tensors(one.optimizer, one.model)
    for name, tensor in start_optimizer(again.optimizer, again.model).items():
        tensor.copy_(state[name])
    steps(one, range(2, 5))
    steps(again, range(2, 5))
    for ours, theirs in zip(again.model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_base_is_asked_without_a_copy_and_the_policy_stays_as_it_is():
    model = adapted()
    one = trainer(model)
    steps(one, range(3))
    batch = random_batch(7)
    frozen = ModelScorer(tiny_model(0), temperature=0.8, max_tokens=30)
    base = BaseScorer(model, temperature=0.8, max_tokens=30)
    policy_T = one.scorer.logprobs(batch)
    assert torch.equal(base.logprobs(batch), frozen.logprobs(batch))
    assert torch.equal(base.squares(batch), frozen.squares(batch))
    hidden_ND, head = base.hidden(batch)
    assert torch.equal(hidden_ND, frozen.hidden(batch)[0])
    assert not hidden_ND.requires_grad
    assert head.weight_VD.data_ptr() == output_head(model).weight_VD.data_ptr()
    assert torch.equal(one.scorer.logprobs(batch), policy_T)
    assert float((policy_T - base.logprobs(batch)).abs().max()) > 0.01


def test_a_full_penalty_towards_the_base_has_the_gradient_of_one_towards_a_copy():
    found = []
    for shared in (True, False):
        model = adapted()
        steps(trainer(model), range(2))
        options = {"temperature": 0.8, "max_tokens": 1000}
        reference = BaseScorer(model, **options) if shared else ModelScorer(tiny_model(0), **options)
        penalised = PolicyObjective(build_loss(PpoClipLoss()), penalty=KlPenalty(KlControl(0.3), None))
        one = trainer(model, penalised, reference=reference)
        one.forward_backward(random_batch(5))
        found.append(torch.cat([weight.grad.flatten() for weight in trained_weights(model)]))
        assert one.discard()["kl_reference"] > 1e-4
    close_fp32(found[0], found[1])
    assert float(found[0].norm()) > 0.01


def test_frozen_weights_keep_their_bits_and_the_rest_moves():
    model = tiny_model(1)
    freeze(model, ["model.embed_tokens.*", "model.layers.0.*"])
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    one = trainer(model)
    steps(one, range(2))
    for name, weight in model.named_parameters():
        stays = name.startswith(("model.embed_tokens.", "model.layers.0."))
        assert torch.equal(weight, before[name]) == stays, name
    assert not any("layers.0" in name for name in optimizer_tensors(one.optimizer, model))
