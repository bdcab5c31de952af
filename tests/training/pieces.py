"""Small models, trajectories and batches that tests of training share."""

from __future__ import annotations

import numpy as np
import torch

from millrace.algorithms.weights import token_mean
from millrace.data.batch import Batch
from millrace.data.packing import TokenWeights
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.training.policy import Predicted
from millrace.types import Completion, Outcome, Prompt, Trajectory, Turn
from tests.data.pieces import weighed
from tests.models.copies import made_once

VOCAB_SIZE = 23
# What an optimizer step reports of itself.
NORMS = {f"{what}_norm_{kind}" for what in ("grad", "update") for kind in ("matrices", "vectors")}
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@made_once
def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Model:
    config = fresh_config(
        "qwen3", SHAPE | {"tie_word_embeddings": tied}, vocab_size=VOCAB_SIZE, eos_token_id=0
    )
    return fresh_model(config, seed=seed, dtype=dtype)


def plain_logits(model: Model, batch: Batch, temperature: float) -> torch.Tensor:
    """What each chosen token was drawn from, [N, V], by the model's own forward of one segment at a time."""
    model.set_attn_implementation("eager")
    rows = []
    for b in range(batch.num_segments):
        here = batch.segment_T == b
        logit_SV = model(input_ids=batch.token_T[here][None], use_cache=False).logits[0]
        rows.append(logit_SV[batch.action_mask_T[here].nonzero()[:, 0] - 1] / temperature)
    return torch.cat(rows)


def prompt(*token_ids: int) -> Prompt:
    return Prompt("train:0", token_ids or (1, 2), "the prompt")


def completion(*token_ids: int, logprobs: list[float] | None = None, version: int = 0) -> Completion:
    drawn = np.array([-1.0] * len(token_ids) if logprobs is None else logprobs, dtype=np.float32)
    return Completion(token_ids, drawn, np.full(len(token_ids), version, dtype=np.int32), "stop", "text")


def trajectory(observation: tuple[int, ...], answer: tuple[int, ...], **more) -> Trajectory:
    return Trajectory((Turn(observation, completion(*answer, **more)),))


def random_batch(
    seed: int,
    num_segments: int = 7,
    *,
    token_weights: TokenWeights = token_mean,
    order: list[int] | None = None,
) -> Batch:
    """Trajectories of random lengths, log-probabilities and advantages; `order` shuffles them."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num_segments):
        given, drawn = rng.integers(1, 6), rng.integers(1, 8)
        made.append(
            trajectory(
                tuple(rng.integers(1, VOCAB_SIZE, given).tolist()),
                tuple(rng.integers(1, VOCAB_SIZE, drawn).tolist()),
                logprobs=(-3.0 + 0.5 * rng.standard_normal(drawn)).tolist(),
            ).scored(Outcome("score", 1.0))
        )
    advantages = rng.standard_normal(num_segments).tolist()
    chosen = list(range(num_segments)) if order is None else order
    return weighed([made[i] for i in chosen], [advantages[i] for i in chosen], token_weights)


def full_batch(
    seed: int, *, token_weights: TokenWeights = token_mean, order: list[int] | None = None
) -> Batch:
    """A random batch in which every field that a policy loss may look at is different for each token."""
    batch = random_batch(seed, token_weights=token_weights)
    mask_T, generator = batch.action_mask_T, torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return torch.randn(batch.num_tokens, generator=generator)

    batch.advantage_T = (batch.advantage_T + 0.3 * noise()) * mask_T
    batch.proximal_logprob_T = (batch.sampler_logprob_T + 0.3 * noise()) * mask_T
    batch.reference_logprob_T = (batch.sampler_logprob_T + 0.4 * noise()) * mask_T
    batch.correction_T = (0.5 * noise()).exp()
    batch.selected_T = (noise() > 0.5) & mask_T
    batch.version_T = torch.randint(0, 5, (batch.num_tokens,), generator=generator)
    return batch if order is None else batch.select(order)


def predicted(logprob_N: torch.Tensor, *, entropy: float = 0.0, version: int = 0) -> Predicted:
    """A forward that said this of the chosen tokens, for objectives that look at nothing else."""
    entropy_N = torch.full_like(logprob_N, entropy).detach()
    return Predicted(logprob_N, entropy_N, version)
