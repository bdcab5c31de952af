"""What the sampler drew among some tokens, the trainer judges over the same: on policy, every ratio is 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.algorithms.weights import token_mean
from millrace.config.method_sections import PpoClipLoss
from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.run.build_algorithm import build_loss
from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyObjective, PolicyTrainer
from millrace.types import Outcome, SamplingParams, Trajectory, Turn
from tests.close import close_fp32
from tests.data.pieces import words
from tests.models.tiny import VOCABULARY, tiny_model
from tests.twins.reference import ReferenceEngine

TEMPERATURE = 0.8
TRUNCATIONS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "both": {"top_k": 5, "top_p": 0.8},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCABULARY, 3))},
}


def sampled(architecture: str, truncation: dict[str, float]) -> Batch:
    """Twelve answers, every third drawn among all tokens."""
    engine = ReferenceEngine(tiny_model(architecture), lambda tokens: "")
    numbers = np.random.default_rng(1)
    prompts = [tuple(numbers.integers(1, VOCABULARY, 1 + n % 5).tolist()) for n in range(12)]
    params = [
        SamplingParams(max_tokens=4 + n, temperature=TEMPERATURE, seed=n, **(truncation if n % 3 else {}))
        for n in range(12)
    ]
    drawn = engine.generate(prompts, params)
    batch = pack(
        [
            Trajectory((Turn(prompt, said),), Outcome("score", 1.0))
            for prompt, said in zip(prompts, drawn, strict=True)
        ]
    )
    advantage_N = torch.from_numpy(numbers.normal(size=12)).float()
    batch.advantage_T = advantage_N[batch.segment_T] * batch.action_mask_T
    batch.weight_T = token_mean(batch.action_mask_T, batch.segment_T)
    return batch


def trainer(architecture: str) -> PolicyTrainer:
    model = tiny_model(architecture)
    return PolicyTrainer(
        model,
        PolicyObjective(build_loss(PpoClipLoss(clip_low=1e-3, clip_high=1e-3))),
        adamw(model, betas=(0.9, 0.999), weight_decay=0.0),
        learning_rate=lambda step: 0.01,
        temperature=TEMPERATURE,
        max_tokens=40,
        max_grad_norm=1.0,
    )


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_on_policy_the_trainer_says_what_the_sampler_said(
    architecture: str, truncation: dict[str, float]
) -> None:
    batch, one = sampled(architecture, truncation), trainer(architecture)
    assert batch.support is not None
    sizes = [len(among) for among in words(batch.support)]
    assert max(sizes) <= truncation.get("top_k", VOCABULARY) and len(set(sizes)) > 1
    mask_T = batch.action_mask_T
    close_fp32(one.scorer.logprobs(batch), batch.sampler_logprob_T, atol=1e-5)
    logprob_N = one.forward_backward(batch)
    close_fp32((logprob_N - batch.sampler_logprob_T[mask_T]).exp(), torch.ones(len(logprob_N)), atol=1e-5)
    # Bounds of one in a thousand stop nothing, since no ratio leaves 1.
    assert one.optim_step().metrics["clip_fraction"] == 0.0
    away_T = one.scorer.logprobs(replace(batch, support=None)) - batch.sampler_logprob_T
    assert away_T[mask_T].abs().max() > 0.1


def test_without_truncation_there_is_nothing_to_carry() -> None:
    batch = sampled("llama", {})
    assert batch.support is None
    close_fp32(trainer("llama").scorer.logprobs(batch), batch.sampler_logprob_T, atol=1e-5)
