"""A batch whose segments begin alike gives the numbers and gradients that it gives token for token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import ppo_clip
from millrace.algorithms.weights import token_mean
from millrace.config.mesh_section import MeshConfig
from millrace.data.batch import Batch
from millrace.data.packing import pack_demonstrations
from millrace.data.shared_prefix import common_beginnings
from millrace.distributed.mesh import Mesh
from millrace.models.fused import set_deterministic
from millrace.models.heads import scalar_model
from millrace.models.logprobs import chosen_logprobs
from millrace.planner.layout import Layout
from millrace.training.parallel_model import ParallelModel, spread_over
from millrace.training.policy import PolicyObjective, PolicyTrainer
from millrace.training.value import ValueTrainer
from tests.close import close_fp32, comparable_adamw
from tests.data.pieces import random_tree, truncated
from tests.models.tiny import VOCABULARY, tiny_model

OPTIONS = {"learning_rate": lambda step: 0.0, "max_grad_norm": 1e9}
FOUR = ["qwen3", "llama", "gemma2", "qwen3_moe"]


def gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def policy_numbers(architecture: str, batch: Batch, max_tokens: int) -> tuple[Tensor, ...]:
    """Log-probabilities, the gradient, and the loss and entropy of one step."""
    model = tiny_model(architecture)

    def loss(terms):
        return ppo_clip(terms.policy_N, terms.start_N, terms.advantage_N, low=0.2, high=0.2), None

    optimizer = comparable_adamw(model, betas=(0.9, 0.999), weight_decay=0.0)
    one = PolicyTrainer(
        model, PolicyObjective(loss), optimizer, temperature=0.8, max_tokens=max_tokens, **OPTIONS
    )
    logprob_N = one.forward_backward(batch)
    slope, metrics = gradient(model), one.discard()
    return logprob_N, slope, torch.tensor([metrics["loss"], metrics["entropy"]])


def critic_numbers(architecture: str, batch: Batch, max_tokens: int) -> tuple[Tensor, ...]:
    """Values, those of the last states, and the gradient."""
    model = scalar_model(tiny_model(architecture))
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    optimizer = comparable_adamw(model, betas=(0.9, 0.999), weight_decay=0.0)
    one = ValueTrainer(model, optimizer, clip=None, coefficient=1.0, max_tokens=max_tokens, **OPTIONS)
    value_T, final_B = one.values(batch)
    batch.value_T, batch.return_T = value_T, batch.advantage_T
    one.forward_backward(batch)
    return value_T, final_B, gradient(model)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("numbers", [policy_numbers, critic_numbers])
@pytest.mark.parametrize("architecture", FOUR)
def test_what_segments_share_is_computed_once_and_changes_no_number(
    architecture: str, numbers: Callable[..., tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*row: Tensor):
        calls.append(common_beginnings(*row))
        return calls[-1]

    for seed in range(3):
        batch = random_tree(seed, vocab_size=VOCABULARY)
        if seed:
            batch = truncated(batch, VOCABULARY, seed)
        with monkeypatch.context() as patch:
            patch.setattr("millrace.models.logprobs.common_beginnings", lambda *row: None)
            expected = numbers(architecture, batch, 10_000)
        with monkeypatch.context() as patch:
            patch.setattr("millrace.models.logprobs.common_beginnings", counted)
            for max_tokens in (10_000, 150):
                found = numbers(architecture, batch, max_tokens)
                for ours, theirs in zip(found, expected, strict=True):
                    close_fp32(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(calls) > 12 and sum(call is not None for call in calls) > 6


@pytest.mark.parametrize(
    ("layout", "exact", "together"),
    [
        (Layout(dp_shard=2), False, True),
        (Layout(dp_replicate=2, tp=2), False, True),
        (Layout(dp_shard=2, cp=2), False, False),
        (Layout(dp_shard=2, pp=2), False, False),
        (Layout(dp_shard=2), True, False),
    ],
)
def test_samples_of_a_prompt_stay_on_a_rank_where_they_share_it(layout: Layout, exact: bool, together: bool):
    """Four samples of each of two prompts, equally long; without sharing, ranks get them in turns."""
    batch = pack_demonstrations([([1 + b // 4] * 6, [8 + b, 9]) for b in range(8)], token_mean)
    model = tiny_model("qwen3")
    if exact:
        set_deterministic(model)
    # The first rank's share; nothing is computed, so nobody is asked.
    spread = ParallelModel(model, mesh=Mesh(layout, "cpu", None))
    (micro,) = (micro for micro, _ in spread.micro_batches(batch, 1000))
    drawn = micro.token_T[micro.position_T == 6].tolist()
    assert drawn == ([8, 9, 10, 11] if together else [8, 10, 12, 14])


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_one_rank_recomputes_or_moves_what_layers_keep_and_has_the_same_gradient(
    checkpointing: str, offload: bool
) -> None:
    batch = truncated(random_tree(0, vocab_size=VOCABULARY), VOCABULARY, 0)
    models = [tiny_model("qwen3"), tiny_model("qwen3")]
    options = MeshConfig(activation_checkpointing=checkpointing, activation_offload=offload)
    assert spread_over(models[1], None, options).alone
    for number, model in enumerate(models):
        kept = []
        down = model.model.layers[1].mlp.down_proj
        hook = down.register_forward_pre_hook(lambda module, given, kept=kept: kept.append(given[0]))
        loss = chosen_logprobs(model, batch, temperature=1.0)[0].sum()
        hook.remove()
        # Overwritten, so that a backward which reads it here gives no number.
        if number:
            assert len(kept) == 1
            kept[0].data.fill_(torch.nan)
        loss.backward()
    slopes = [gradient(model) for model in models]
    if checkpointing == "none" and not offload:
        assert not torch.isfinite(slopes[1]).all()
    else:
        assert torch.equal(*slopes)
