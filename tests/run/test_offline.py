"""Using a trained policy: which checkpoint, how good, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace import train
from millrace.errors import CheckpointError
from millrace.observability.tables import read_table
from millrace.run.folder import RunFolder, find_checkpoint
from millrace.run.offline import answer, evaluate_checkpoint
from tests.close import close_fp64
from tests.end_to_end.runs import OVERRIDES
from tests.end_to_end.tiny import metrics_of, tiny_recipe

FEW_STOPS = OVERRIDES | {"sft.steps": 60, "evaluation.every": 5, "checkpoint.every": 20}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    return Path(train(tiny_recipe(folder, FEW_STOPS), quiet=True).run)


@pytest.mark.slow
@pytest.mark.world
def test_best_last_and_a_name_find_their_checkpoints(run):
    folder = RunFolder.open(run)
    best = json.loads((run / "best.json").read_text())["checkpoint"]
    assert find_checkpoint(folder, "best").name == best
    assert find_checkpoint(folder, "last").name == "step-000007"
    assert find_checkpoint(folder, "step-000000") == run / "checkpoints" / "step-000000"


@pytest.mark.world
def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(run):
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(RunFolder.open(run), "step-000099")
    there = ", ".join(sorted(path.name for path in (run / "checkpoints").iterdir()))
    assert str(caught.value) == f"run {run} has no checkpoint step-000099; there are: {there}"


def test_a_run_without_checkpoints_says_so(tmp_path):
    (tmp_path / "recipe.yaml").write_text("")
    folder = RunFolder.open(tmp_path)
    for name, sentence in {
        "last": "has no checkpoint yet",
        "best": "has no best checkpoint yet; use --checkpoint last",
        "step-000001": "has no checkpoint step-000001; there are: none",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(folder, name)
        assert str(caught.value) == f"run {tmp_path} {sentence}"


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    config = tiny_recipe(tmp_path, {"sft": None, "steps": 1})
    folder = RunFolder.open(train(config, quiet=True).run)
    for name in ("step-000000", "step-000001"):
        (folder.checkpoints / name / "model" / "config.json").unlink()
    damaged = "is damaged: model/config.json is missing"
    for name, number in (("step-000001", 1), ("best", 0), ("last", 1)):
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(folder, name)
        path = folder.checkpoints / f"step-00000{number}"
        hint = "restore it from a copy; no other one is whole"
        assert str(caught.value) == f"checkpoint {path} {damaged}; {hint}"


@pytest.mark.world
def test_the_last_checkpoint_evaluates_as_it_did_in_the_run(run):
    found = evaluate_checkpoint(run, "last")
    last = [record for record in metrics_of(run) if record["stage"] == "evaluation"][-1]
    close_fp64(
        [found.accuracy, found.reward, found.length],
        [last[key] for key in ("accuracy", "reward/mean", "length/mean")],
    )
    answers = read_table(run / "evaluations" / "after.parquet")
    assert [row["completion"] for row in found.rows] == [row["completion"] for row in answers]


@pytest.mark.world
def test_answers_are_those_of_the_evaluation_and_do_not_depend_on_the_company(run):
    rows = read_table(run / "evaluations" / "after.parquet")
    texts = [row["prompt"] for row in rows]
    together = answer(run, texts, checkpoint="last")
    assert [[one.text for one in each] for each in together] == [[row["completion"]] for row in rows]
    assert answer(run, texts[3:4], checkpoint="last")[0][0].token_ids == together[3][0].token_ids


@pytest.mark.world
def test_samples_have_seeds_that_count_up(run):
    options = {"checkpoint": "last", "temperature": 2.0}
    (three,) = answer(run, ["1+2="], num_samples=3, seed=5, **options)
    (second,) = answer(run, ["1+2="], seed=6, **options)
    assert three[1].token_ids == second[0].token_ids
    (many,) = answer(run, ["1+2="], num_samples=20, seed=0, **options)
    assert len({one.token_ids for one in many}) > 5


def test_prompts_the_run_left_out_as_too_long_are_left_out_again(tmp_path):
    lines = "".join(f'{{"question": "{"x " * n}{n}", "answer": "1"}}\n' for n in range(1, 41))
    (tmp_path / "long.jsonl").write_text(lines)
    more = {"data.train": str(tmp_path / "long.jsonl"), "rollout.max_tokens": 20, "sft": None, "steps": 1}
    report = train(tiny_recipe(tmp_path, more), quiet=True)
    assert 0 < report.eval_size < 8
    assert len(evaluate_checkpoint(report.run, "last").rows) == report.eval_size
