"""GRPO on millrace's public classes, without a recipe: sample, score, estimate, update, send the weights.

    python examples/grpo_loop/loop.py            # 60 steps, seconds on a CPU
    python examples/grpo_loop/loop.py --quick    # 8 steps

A two-layer Qwen3 with random weights learns to answer with small token ids. `millrace train` makes the same
calls, with everything around them that a real run needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from millrace.algorithms.advantages import group_normalised
from millrace.algorithms.losses import ppo_clip
from millrace.algorithms.weights import token_mean
from millrace.data.packing import pack
from millrace.inference.engine import PagedEngine
from millrace.models.load import fresh_config, fresh_model
from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyObjective, PolicyTrainer
from millrace.types import Outcome, SamplingParams, Trajectory, Turn

VOCABULARY, PROMPTS, SAMPLES, MAX_TOKENS = 32, 8, 8, 12
SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
# Rewards [N], group of each trajectory [N], number of groups -> advantages [N].
Advantage = Callable[[Tensor, Tensor, int], Tensor]
# Log-probabilities of policy and sampler [T], advantages [T] -> loss of each token [T].
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
clipped: Loss = partial(ppo_clip, low=0.2, high=0.2)


def train(
    num_steps: int,
    *,
    advantage: Advantage = group_normalised,
    loss: Loss = clipped,
    seed: int = 0,
) -> list[float]:
    """Train with an advantage and a loss, and return the mean reward of each step."""
    config = fresh_config("qwen3", SHAPE, vocab_size=VOCABULARY, eos_token_id=0)
    policy, sampler = (fresh_model(config, seed=seed, dtype=torch.float32) for _ in range(2))
    engine = PagedEngine(sampler.requires_grad_(False), decode=str, max_cache_tokens=4096)
    trainer = PolicyTrainer(
        policy,
        PolicyObjective(lambda t: (loss(t.policy_N, t.start_N, t.advantage_N), None)),
        adamw(policy, betas=(0.9, 0.95), weight_decay=0.0),
        learning_rate=lambda step: 3e-3,
        temperature=1.0,
        max_tokens=4096,
        max_grad_norm=1.0,
    )
    group_N = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    rewards = []
    for step in range(num_steps):
        # 1. Sample a group of completions for each prompt; every token has its log-probability and version.
        prompts = [(1 + prompt, 2, 3) for prompt in range(PROMPTS) for _ in range(SAMPLES)]
        seeds = range(step * len(prompts), (step + 1) * len(prompts))
        params = [SamplingParams(max_tokens=MAX_TOKENS, seed=number) for number in seeds]
        completions = engine.generate(prompts, params)
        # 2. Score: the fraction of token ids in the lower half of the vocabulary.
        small = [[token < VOCABULARY // 2 for token in one.token_ids] for one in completions]
        reward_N = torch.tensor([sum(each) / len(each) for each in small])
        # 3. Pack all trajectories into one row of tokens, and give each token its advantage and its weight.
        batch = pack(
            [
                Trajectory((Turn(prompt, completion),), Outcome("score", float(reward)))
                for prompt, completion, reward in zip(prompts, completions, reward_N, strict=True)
            ]
        )
        batch.advantage_T = advantage(reward_N, group_N, PROMPTS)[batch.segment_T] * batch.action_mask_T
        batch.weight_T = token_mean(batch.action_mask_T, batch.segment_T)
        # 4. Update the policy, then the sampler's weights.
        trainer.forward_backward(batch)
        trainer.optim_step()
        engine.update_weights(trainer.named_tensors(), trainer.version)
        rewards.append(float(reward_N.mean()))
    return rewards


def main() -> None:
    """Train, and print the mean reward."""
    parser = argparse.ArgumentParser(description="Train a tiny model by GRPO, without a recipe.")
    parser.add_argument("--quick", action="store_true", help="8 steps instead of 60")
    rewards = train(8 if parser.parse_args().quick else 60)
    for step, reward in enumerate(rewards):
        if step % 10 == 0 or step == len(rewards) - 1:
            print(f"step {step:3d}  mean reward {reward:.3f}")


if __name__ == "__main__":
    main()
