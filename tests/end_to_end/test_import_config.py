"""verl's GRPO script on GSM8K, imported, trains: verl's rows, a chat template, verl's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from millrace import load_recipe, train
from millrace.config.recipe import parse_overrides
from millrace.data.tokenizers import train_tokenizer
from millrace.models.load import fresh_config, fresh_model, save_model
from millrace.observability.tables import read_table
from tests.data.chat_templates import TEMPLATES
from tests.end_to_end.tiny import metrics_of
from tests.migrate.pieces import imported, verl_rows, write_data
from tests.training.pieces import SHAPE

pytestmark = [pytest.mark.world, pytest.mark.slow]

# What a tiny model on one CPU has otherwise; all else is the script's.
SMALL = (
    "steps=2 device=cpu threads=1 mesh={} data.max_prompt_tokens=400 "
    "rollout.prompts_per_step=8 rollout.max_tokens=16"
)


def write_chat_model(folder: Path) -> None:
    """A model of a few thousand weights, whose tokenizer has a chat template."""
    texts = [row["prompt"][0]["content"] for row in verl_rows()]
    tokenizer = train_tokenizer(texts, vocab_size=400, across_words=False)
    tokenizer.chat_template = TEMPLATES["chatml"]
    shape = SHAPE | {"max_position_embeddings": 512}
    config = fresh_config("qwen3", shape, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    save_model(fresh_model(config, seed=0, dtype=torch.float32), str(folder))
    tokenizer.save_pretrained(folder)


def test_the_imported_recipe_trains_on_gsm8k_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(Path("data/gsm8k"))
    write_chat_model(Path("tiny"))
    Path("mine.yaml").write_text(imported().recipe)
    overrides = parse_overrides([*SMALL.split(), "model.path=tiny"])
    report = train(load_recipe("mine.yaml", overrides), recipe="mine", quiet=True)
    assert (report.status, report.steps, report.num_train_prompts, report.eval_size) == (
        "finished",
        2,
        50,
        10,
    )
    assert Path(report.run) == Path("checkpoints/verl_grpo_example_gsm8k/qwen3_8b_function_rm")
    rows = read_table(Path(report.run) / "rollouts" / "step-000002.parquet")
    assert len(rows) == 8 * 5
    assert {row["answer"] for row in rows} <= {row["reward_model"]["ground_truth"] for row in verl_rows()}
    records = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    assert all(
        record["policy/kl_to_reference"] >= 0 for record in records if "policy/kl_to_reference" in record
    )
    assert json.loads((Path(report.run) / "summary.json").read_text())["status"] == "finished"
