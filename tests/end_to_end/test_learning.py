"""A tiny policy learns a real, if small, task from sampled rewards alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace import train
from tests.end_to_end.tiny import metrics_of, tiny_recipe

LEARNING = {
    "seed": 2,
    "steps": 120,
    "model.shape.hidden_size": 32,
    "data.demonstration_column": "shown",
    "sft.steps": 40,
    "rollout.prompts_per_step": 16,
    "rollout.samples_per_prompt": 8,
    "rollout.max_tokens": 2,
    "policy.optimizer.learning_rate": 2e-3,
    "evaluation.every": 1000,
    "checkpoint.every": 1000,
}


def write_copies(folder: Path) -> Path:
    """Say the digit again. The SFT shows every digit once, so only rewards tell which one is right."""
    rows = [
        {"question": f"{letter}{digit}=", "answer": str(digit), "shown": str(shown)}
        for letter in "abcdefghij"
        for digit in range(4)
        for shown in range(4)
    ]
    path = folder / "copies.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"policy.kl.coefficient": 0.01}, marks=pytest.mark.slow),
        pytest.param({"policy.optimizer_steps_per_batch": 2}, marks=pytest.mark.slow),
    ],
    ids=["grpo", "with kl", "two optimizer steps per batch"],
)
def test_sampled_rewards_teach_what_no_demonstration_showed(more, tmp_path):
    config = tiny_recipe(tmp_path, LEARNING | {"data.train": str(write_copies(tmp_path))} | more)
    report = train(config, quiet=True)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    rewards = [record["reward/mean"] for record in batches]
    # One of four digits is right by chance.
    assert sum(rewards[:5]) / 5 < 0.4
    assert sum(rewards[-10:]) / 10 > 0.7
    assert report.eval_before is not None and report.eval_before <= 0.375
    assert report.eval_after is not None and report.eval_after >= 0.625
    assert max(record["mismatch/max"] for record in batches if "mismatch/max" in record) < 1e-4
    if "policy.kl.coefficient" in more:
        distance = [record["policy/kl_reference"] for record in batches]
        assert distance[0] == 0.0
        assert distance[-1] > 0.1
    if "policy.optimizer_steps_per_batch" in more:
        assert batches[-1]["version"] == 40 + 2 * 120
