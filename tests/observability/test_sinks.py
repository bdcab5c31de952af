from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from millrace.observability.files import read_json_lines
from millrace.observability.sink_mlflow import MlflowSink
from millrace.observability.sink_tensorboard import TensorBoardSink
from millrace.observability.sink_wandb import WandbSink
from millrace.observability.sinks import JsonlSink, TrackedRun, TrackerError, read_records, tagged

STEP = {"stage": "reinforcement", "step": 3, "reward/mean": 0.5, "time/wall_s": 1.25}
EVALUATION = {"stage": "evaluation", "during": "sft", "step": 20, "accuracy": 0.25}


def test_what_was_written_is_read_back(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(STEP)
    sink.write({**EVALUATION, "note": "Grüße\n"})
    assert read_json_lines(path) == [STEP, {**EVALUATION, "note": "Grüße\n"}], "flushed before it is closed"
    sink.close()
    assert path.read_bytes().count(b"\n") == 2


def test_numbers_that_are_not_finite_become_null_and_every_line_stays_json(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(
        {"a": math.nan, "b": -math.inf, "c": np.float32("inf"), "d": np.int64(7), "e": np.float32(0.5)}
    )
    sink.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line == {"a": None, "b": None, "c": None, "d": 7, "e": 0.5}


def test_a_value_that_is_neither_number_nor_text_is_refused_by_name(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError, match="metric reward/mean is a list; a record holds numbers and text only"):
        sink.write({"reward/mean": [1.0]})  # type: ignore[dict-item]
    assert sink.position == 0, "nothing of the record was written"
    sink.close()


def test_rewind_forgets_what_was_written_since(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write({"step": 1})
    position = sink.position
    sink.write({"step": 2})
    sink.close()
    with path.open("ab") as torn:
        torn.write(b'{"step": 3, "rew')
    resumed = JsonlSink(path)
    resumed.rewind(position)
    assert resumed.position == position
    resumed.write({"step": 22})
    resumed.close()
    assert read_json_lines(path) == [{"step": 1}, {"step": 22}]


def test_records_of_older_versions_are_read_under_todays_names(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"stage": "warmup", "step": 1, "loss": 2.0, "gradient_norm": 0.5, "time/sync_s": 3.0},
        {"stage": "evaluation", "during": "warmup", "step": 1, "reward/failed_share": 0.25},
        {
            **STEP,
            "group/equal_share": 0.125,
            "group/refill_rounds": 2,
            "policy/bounded_share": 0.1,
            "critic/gradient_norm_vectors": 4.0,
            "mismatch/effective_share": 0.75,
            "bias/dropped_share": 0.2,
            "bias/length": None,
        },
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert read_records(path) == [
        {"stage": "sft", "step": 1, "loss": 2.0, "grad_norm": 0.5, "time/weight_sync_s": 3.0},
        {"stage": "evaluation", "during": "sft", "step": 1, "reward/failed_fraction": 0.25},
        {
            **STEP,
            "group/zero_std_fraction": 0.125,
            "group/dynamic_sampling_rounds": 2,
            "policy/correction_clip_fraction": 0.1,
            "critic/grad_norm_vectors": 4.0,
            "mismatch/ess": 0.75,
            "selection_bias/dropped_fraction": 0.2,
            "selection_bias/length": None,
        },
    ]


@pytest.mark.parametrize("stage", [7, ["warmup"], None, "warm"])
def test_a_record_of_no_stage_is_refused(tmp_path: Path, stage: object):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"stage": stage, "step": 1}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is damaged: its stage is none that there is"):
        read_records(path)


def test_rewind_to_the_start_empties_the_file(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(STEP)
    sink.rewind(0)
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_rewind_beyond_the_end_says_that_the_file_was_cut(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"step": 1})
    with pytest.raises(
        ValueError, match=r"metrics.jsonl has 12 bytes but the checkpoint was saved after 99; it was"
    ):
        sink.rewind(99)
    assert sink.position == 12
    sink.close()


@pytest.mark.parametrize("position", [5, -1])
def test_rewind_into_a_record_is_refused(tmp_path: Path, position: int):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"step": 1})
    with pytest.raises(ValueError, match=f"no record of .* ends at byte {position}; the file was edited"):
        sink.rewind(position)
    sink.close()
    assert read_json_lines(tmp_path / "metrics.jsonl") == [{"step": 1}], "the refusal left the file alone"


def test_a_torn_last_line_is_left_out_and_never_glued_to_the_next_record(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2')
    assert read_json_lines(path) == [{"step": 1}]
    sink = JsonlSink(path)
    sink.write({"step": 3})
    sink.close()
    assert read_json_lines(path) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize(("bad", "why"), [(b'{"step": ', "is not JSON"), (b"[1]", "is not a JSON object")])
def test_a_broken_line_before_the_last_is_an_error_with_its_number(tmp_path: Path, bad: bytes, why: str):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=rf"metrics.jsonl line 2 {why}.*; mend or remove that line"):
        read_json_lines(path)


def test_no_tag_holds_the_numbers_of_two_stages():
    assert tagged(STEP) == (3, {"reward/mean": 0.5, "time/wall_s": 1.25})
    assert tagged({"stage": "sft", "step": 1, "loss": 2}) == (1, {"sft/loss": 2.0})
    assert tagged(EVALUATION) == (20, {"sft_evaluation/accuracy": 0.25})
    assert tagged({**EVALUATION, "during": "reinforcement"}) == (20, {"evaluation/accuracy": 0.25})


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_the_steps_that_a_resumed_run_writes_again(tmp_path: Path):
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write({"stage": "sft", "step": step, "loss": 1.0})
    first.write({**STEP, "step": 1, "reward/mean": 0.125})
    first.close()
    resumed = TensorBoardSink(tmp_path, purge_step=3)
    resumed.write({"stage": "sft", "step": 3, "loss": 0.5})
    resumed.write({**STEP, "step": 1, "reward/mean": 0.75})
    resumed.close()
    assert scalars(tmp_path / "sft", "sft/loss") == [(1, 1.0), (2, 1.0), (3, 0.5)]
    assert scalars(tmp_path / "reinforcement", "reward/mean") == [(1, 0.75)]


def test_wandb_gets_each_number_against_the_step_of_its_stage_and_resumes_the_same_run(tmp_path, monkeypatch):
    fake = MagicMock()
    fake.init.return_value.id = "abc123"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink(TrackedRun(tmp_path, {"seed": 0}))
    assert fake.init.call_args.kwargs["id"] is None
    assert fake.init.call_args.kwargs["config"] == {"seed": 0}
    run = fake.init.return_value
    sink.write(STEP)
    sink.write(STEP)
    sink.write(EVALUATION)
    sink.close()
    defined = {call.args[0]: call.kwargs["step_metric"] for call in run.define_metric.call_args_list}
    assert defined == {
        "reward/mean": "step/reinforcement",
        "time/wall_s": "step/reinforcement",
        "sft_evaluation/accuracy": "step/sft",
    }
    assert run.define_metric.call_count == 3, "each tag is defined once"
    assert run.log.call_args_list[0].args == (
        {"step/reinforcement": 3, "reward/mean": 0.5, "time/wall_s": 1.25},
    )
    assert run.log.call_args_list[2].args == ({"step/sft": 20, "sft_evaluation/accuracy": 0.25},)
    run.finish.assert_called_once_with()
    WandbSink(TrackedRun(tmp_path, {"seed": 0}))
    assert fake.init.call_args.kwargs["id"] == "abc123"


def test_mlflow_gets_each_number_at_its_step_and_resumes_the_same_run(tmp_path, monkeypatch):
    fake = MagicMock()
    fake.start_run.return_value = SimpleNamespace(info=SimpleNamespace(run_id="f00"))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    sink = MlflowSink(TrackedRun(tmp_path, {"seed": 0}))
    sink.write(EVALUATION)
    sink.close()
    fake.set_experiment.assert_called_once_with("millrace")
    fake.start_run.assert_called_once_with(run_name=tmp_path.name)
    fake.log_params.assert_called_once_with({"seed": 0})
    fake.log_metrics.assert_called_once_with({"sft_evaluation/accuracy": 0.25}, step=20)
    fake.end_run.assert_called_once_with()
    MlflowSink(TrackedRun(tmp_path, {"seed": 0}))
    assert fake.start_run.call_args.kwargs == {"run_id": "f00"}
    assert fake.log_params.call_count == 1, "parameters of a resumed run are there already"


def test_trackers_get_the_project_and_the_group_of_the_recipe(tmp_path, monkeypatch):
    wandb, mlflow = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    WandbSink(TrackedRun(tmp_path, {}, "sums", "seeds"))
    MlflowSink(TrackedRun(tmp_path, {}, "sums", "seeds"))
    given = wandb.init.call_args.kwargs
    assert (given["project"], given["group"]) == ("sums", "seeds")
    mlflow.set_experiment.assert_called_once_with("sums")
    mlflow.start_run.assert_called_once_with(run_name=tmp_path.name, tags={"group": "seeds"})


@pytest.mark.parametrize(("name", "sink"), [("wandb", WandbSink), ("mlflow", MlflowSink)])
def test_a_tracker_whose_package_is_missing_says_what_to_install(tmp_path, monkeypatch, name, sink):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        TrackerError, match=rf"run `pip install 'millrace-rl\[{name}\]'` or take {name} out of loggers"
    ):
        sink(TrackedRun(tmp_path, {}))
