"""Two runs are the same, or the first thing that differs is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from millrace.observability.sinks import JsonlSink
from millrace.observability.tables import write_table
from millrace.replay.compare import Comparison, check_evaluations, check_weights
from millrace.replay.recorded_log import ReplayError
from millrace.run.folder import RunFolder
from millrace.training.checkpoint import write_checkpoint

RECORDS = [
    {"stage": "sft", "step": 1, "loss": 2.0, "time/step_s": 1.0},
    {"stage": "reinforcement", "step": 1, "reward/std": math.nan, "memory/train_peak_bytes": 5},
]
ROWS = [
    {"prompt_id": "a", "tokens": [1, 2], "logprob": math.nan},
    {"prompt_id": "b", "tokens": [3], "logprob": 0.5},
]


@pytest.fixture
def folders(tmp_path) -> tuple[RunFolder, RunFolder]:
    """A run with two records and a batch, and an empty one."""
    original, repeated = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "again")
    for folder, records in ((original, RECORDS), (repeated, [])):
        sink = JsonlSink(folder.metrics)
        for record in records:
            sink.write(record)
        sink.close()
        write_table(folder.rollouts / "step-000001.parquet", ROWS)
    return original, repeated


@pytest.mark.world
def test_what_is_measured_may_differ(folders):
    comparison = Comparison(*folders)
    comparison.write({**RECORDS[0], "time/step_s": 9.0})
    comparison.write({**RECORDS[1], "memory/train_peak_bytes": 6})
    with pytest.raises(ReplayError, match="^sft, step 2: the run has no such record$"):
        comparison.write({"stage": "sft", "step": 2})


def test_a_record_goes_on_where_the_repetition_stands(folders):
    sink = JsonlSink(folders[1].metrics)
    sink.write(RECORDS[0])
    sink.close()
    Comparison(*folders).write(RECORDS[1])
    with pytest.raises(ReplayError, match="^sft, step 1: stage was reinforcement in the run and is sft"):
        Comparison(*folders).write(RECORDS[0])


@pytest.mark.parametrize("change", [{"loss": 2.0000000000000004}, {"more": 1}], ids=["bit", "key"])
def test_a_value_that_differs_is_named(change, folders):
    name = next(iter(change))
    with pytest.raises(ReplayError, match=f"^sft, step 1: {name} was "):
        Comparison(*folders).write({**RECORDS[0], **change})


def test_a_reward_that_differs_is_named(folders):
    rows = [ROWS[0], {**ROWS[1], "logprob": 0.25}]
    write_table(folders[1].rollouts / "step-000001.parquet", rows)
    comparison = Comparison(*folders)
    comparison.write(RECORDS[0])
    with pytest.raises(ReplayError) as caught:
        comparison.write(RECORDS[1])
    assert str(caught.value) == (
        "rollouts/step-000001.parquet, row 1: logprob was 0.5 in the run and is 0.25 in the replay"
    )
    write_table(folders[1].rollouts / "step-000001.parquet", ROWS[:1])
    comparison = Comparison(*folders)
    comparison.write(RECORDS[0])
    with pytest.raises(ReplayError, match="had 2 rows in the run and has 1 in the replay"):
        comparison.write(RECORDS[1])


def test_held_out_answers_are_compared(folders):
    for folder in folders:
        write_table(folder.evaluations / "before.parquet", ROWS)
    check_evaluations(*folders)
    write_table(folders[1].evaluations / "before.parquet", ROWS[::-1])
    with pytest.raises(ReplayError, match="^evaluations/before.parquet, row 0: prompt_id was a in the run"):
        check_evaluations(*folders)


def checkpoint(folder: RunFolder, name: str, **contents: str) -> None:
    def fill(path: Path) -> None:
        for file, text in contents.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text(text)

    write_checkpoint(folder.checkpoints / name, fill)


def test_weights_are_compared_where_both_have_them(folders):
    original, repeated = folders
    model = {"model/model.safetensors": "1"}
    checkpoint(original, "step-000002", **model)
    for folder, position in ((original, "a"), (repeated, "b")):
        checkpoint(folder, "step-000004", **model, **{"state.json": position, "optimizer/model/0": "2"})
        checkpoint(folder, "sft-000001", **model)
    assert check_weights(*folders) == ["sft-000001", "step-000004"]
    checkpoint(original, "step-000006", **model)
    checkpoint(repeated, "step-000006", **{"model/model.safetensors": "3"})
    with pytest.raises(
        ReplayError, match="^checkpoint step-000006: model/model.safetensors is not that of the"
    ):
        check_weights(*folders)


def test_a_share_that_was_changed_since_is_named(folders):
    shares = {f"model/model-0000{rank}-of-00002.safetensors": f"{rank}" for rank in (1, 2)}
    for folder in folders:
        checkpoint(folder, "step-000002", **shares)
    assert check_weights(*folders) == ["step-000002"]
    changed = folders[0].checkpoints / "step-000002" / list(shares)[1]
    changed.write_text("3")
    with pytest.raises(ReplayError) as caught:
        check_weights(*folders)
    assert str(caught.value) == (
        f"checkpoint {changed.parents[1]} is damaged: model/model-00002-of-00002.safetensors is not what was "
        "saved"
    )
