"""Further sets of questions of a run: their own data, rewards and sampling, beside the held-out ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace import resume, train
from millrace.data.rows import DataError
from millrace.errors import SetupError
from millrace.evaluation.answer_scores import by_question, summarise_answers
from millrace.observability.report import write_report
from millrace.observability.tables import read_table
from millrace.replay.replay import replay
from tests.close import close_fp64
from tests.end_to_end.runs import check_equal, interrupt_at
from tests.end_to_end.tiny import metrics_of, tiny_recipe, without_times


def sets(folder: Path) -> dict:
    rows = [
        {"problem": f"{a}+{b}=", "solution": str(a + b), "source": "low" if b < 5 else "high", "answer": "0"}
        for a in (8, 9)
        for b in range(2, 10)
    ]
    path = folder / "further.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    further = {
        "name": "further",
        "data": str(path),
        "prompt_column": "problem",
        "samples": 4,
        "temperature": 2,
    }
    further |= {"answer_column": "solution", "rewards": [{"kind": "exact"}], "k": [2, 4], "max_tokens": 2}
    other = {"name": "other", "data": str(path), "prompt_column": "problem", "every": 4, "size": 3}
    return {"evaluation.sets": [further | {"greedy": True}, other | {"template": "Add: {prompt}"}]}


def run(folder: Path, name: str, **overrides):
    return train(tiny_recipe(folder, {"name": name, "sft": None, **overrides}), quiet=True)


def evaluations(report) -> list[dict]:
    return [record for record in metrics_of(report.run) if record["stage"] == "evaluation"]


def test_sets_are_recorded_beside_the_held_out_answers_whose_numbers_stay(tmp_path):
    measure = {"evaluation.measure": "eval/further/avg@4"}
    plain, both = run(tmp_path, "plain"), run(tmp_path, "both", **sets(tmp_path), **measure)
    records = [
        [
            {key: value for key, value in record.items() if not key.startswith("eval/") and key != "measure"}
            for record in each
        ]
        for each in (without_times(metrics_of(plain.run)), without_times(metrics_of(both.run)))
    ]
    assert records[0] == records[1]
    folder = Path(both.run)
    found = {record["step"]: record for record in evaluations(both)}
    # The best checkpoint is that of the set's metric.
    values = {step: record["eval/further/avg@4"] for step, record in found.items()}
    assert (both.eval_before, both.eval_after) == (values[0], values[max(values)])
    best = json.loads((folder / "best.json").read_text())
    assert (best["measure"], best["value"]) == ("eval/further/avg@4", max(values.values()))
    page = write_report(folder).read_text(encoding="utf-8")
    assert "Avg@4 of further" in page and "Held-out avg@4" not in page
    assert [step for step, record in found.items() if "eval/other/avg@1" in record] == [0, 4]
    for step, record in found.items():
        table = read_table(folder / "evaluations" / "further" / f"step-{step:06d}.parquet")
        sampled = by_question(row for row in table if not row["greedy"])
        assert (len(sampled), len(table)) == (16, 16 * 5)
        assert {row["answer"] for row in table} == {str(n) for n in range(10, 19)}
        assert max(row["num_tokens"] for row in table) == 2
        expected = summarise_answers(sampled, num_samples=4, ks=[2, 4]).estimates
        values = {name: record[f"eval/further/{name}"] for name in expected}
        close_fp64(list(values.values()), [one.value for one in expected.values()])
        assert record["eval/further/avg@4/std_error"] == expected["avg@4"].std_error
        assert {"eval/further/greedy", "eval/further/source/low/avg@4"} <= record.keys()
    other = read_table(folder / "evaluations" / "other" / "step-000004.parquet")
    assert [row["prompt"] for row in other] == ["Add: 8+2=", "Add: 8+3=", "Add: 8+4="]
    # Samples of a question differ, and the numbers are in the report.
    answers = {row["completion"] for row in table if row["prompt"] == "9+9=" and not row["greedy"]}
    assert len(answers) > 1
    assert "At the end, further: avg@4 " in write_report(folder).read_text(encoding="utf-8")
    held_out = sorted((folder / "evaluations" / "held_out").iterdir())
    assert read_table(held_out[-1]) == read_table(folder / "evaluations" / "after.parquet")


@pytest.mark.slow
def test_a_run_with_sets_is_resumed_and_replayed_bit_for_bit(tmp_path, monkeypatch):
    given = sets(tmp_path)
    whole = run(tmp_path, "whole", **given)
    with monkeypatch.context() as patch:
        interrupt_at(patch, "reinforcement", 1)
        assert run(tmp_path, "left", **given).status == "interrupted"
    resume(tmp_path / "runs" / "left", quiet=True)
    # It saved one checkpoint more.
    check_equal(tmp_path / "runs" / "left", Path(whole.run), but=("checkpoints", "state"))
    assert replay(whole.run, quiet=True).weights[-1] == "step-000004"
    table = Path(whole.run) / "evaluations" / "further" / "step-000002.parquet"
    assert table.is_file()


def test_a_set_that_is_trained_on_or_empty_or_without_answers_is_refused(tmp_path):
    path = tmp_path / "bad.jsonl"
    for text, sentence in {
        "": f"evaluation set bad: {path} holds no rows",
        '{"question": "9+9=", "answer": "18"}\n{"question": "1+1=", "answer": "2"}\n': "evaluation set bad: "
        f"1 of its 2 questions are also trained on, the first: {path} line 2; remove them from the set, or "
        "from data.train",
        '{"question": "9+9="}\n': "evaluation set bad: a reward of kind exact compares with the "
        "reference answer, and no row has one; set data.answer_column to the answer's column, or choose "
        "another reward",
    }.items():
        path.write_text(text, encoding="utf-8")
        bad = {"name": "bad", "data": str(path)}
        with pytest.raises((DataError, SetupError)) as caught:
            run(tmp_path, "run", **{"evaluation.sets": [bad], "data.eval_size": 2})
        assert str(caught.value) == sentence
    with pytest.raises(
        SetupError, match="evaluation set bad has max_tokens 48, but model and micro-batch hold 48"
    ):
        run(tmp_path, "run", **{"evaluation.sets": [bad | {"max_tokens": 48}]})
    assert not (tmp_path / "runs" / "run").exists()
