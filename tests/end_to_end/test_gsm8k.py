"""The GSM8K recipe on sixty problems of the same form: every path runs, in seconds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from millrace import load_recipe, train
from millrace.observability.tables import read_table
from tests.end_to_end.tiny import metrics_of

pytestmark = pytest.mark.world

DATA = Path(__file__).with_name("gsm8k_tiny.jsonl")


@pytest.mark.slow
def test_the_gsm8k_recipe_reads_warms_up_samples_and_scores(tmp_path):
    overrides = {
        "name": "gsm8k",
        "output": str(tmp_path),
        "threads": 1,
        "loggers": [],
        "steps": 2,
        "data.train": str(DATA),
        "data.eval": None,
        "data.eval_size": 10,
        "tokenizer.vocab_size": 400,
        "model.shape.hidden_size": 32,
        "model.shape.num_attention_heads": 2,
        "model.shape.num_key_value_heads": 1,
        "model.shape.head_dim": 16,
        "model.shape.intermediate_size": 64,
        "sft.steps": 25,
        "sft.sequences_per_step": 16,
        "sft.learning_rate": 1e-2,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 80,
        "evaluation.every": 25,
        "checkpoint.every": 25,
    }
    report = train(load_recipe("gsm8k_smoke", overrides), recipe="gsm8k_smoke", quiet=True)
    assert (report.status, report.steps, report.sft_steps) == ("finished", 2, 25)
    assert (report.num_train_prompts, report.eval_size, report.filtered_prompts) == (50, 10, 0)
    # The demonstrations are whole solutions; all of them must earn full marks from the recipe's own rewards.
    assert report.scored_demonstrations == 10

    records = metrics_of(report.run)
    losses = [record["loss"] for record in records if record["stage"] == "sft"]
    assert losses[0] > 0.9 * math.log(400)
    assert losses[-1] < 0.75 * losses[0]
    rows = read_table(Path(report.run) / "rollouts" / "step-000002.parquet")
    assert len(rows) == 8
    answers = {row["prompt_id"]: row["answer"] for row in rows}
    assert len(answers) == 2
    assert all(answer.replace(",", "").isdigit() for answer in answers.values())
    assert {row["outcome"] for row in rows} <= {"score", "invalid"}
    assert all(row["reason"] == "" or "####" in row["reason"] for row in rows)
    assert max(record.get("mismatch/max", 0.0) for record in records) < 1e-4
