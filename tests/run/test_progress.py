"""Where a run stands."""

from __future__ import annotations

import json

from millrace.run.progress import Progress


def test_progress_goes_through_json_and_unknown_keys_are_ignored():
    progress = Progress(
        stage="reinforcement", step=3, eval_best=0.25, stream={"epoch": 1}, warnings=["a"], sft_done=True
    )
    tree = json.loads(json.dumps(progress.to_json())) | {"of a later version": 1}
    assert Progress.from_json(tree) == progress


def test_progress_of_an_older_version_is_read_under_todays_names():
    tree = {"stage": "warmup", "step": 3, "warmup_steps": 7, "gate_open": True}
    assert Progress.from_json(tree) == Progress(stage="sft", step=3, sft_steps=7, sft_done=True)
    assert Progress.from_json({"stage": "reinforcement", "warmup_steps": 7}).sft_steps == 7


def test_a_checkpoint_is_named_by_stage_and_step():
    assert Progress(step=12).checkpoint_name == "sft-000012"
    assert Progress(stage="reinforcement", step=1234567).checkpoint_name == "step-1234567"
