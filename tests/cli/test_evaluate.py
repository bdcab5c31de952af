"""What answers of a checkpoint, or of any model, are worth, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from millrace.cli.evaluate import as_lines, as_tree
from millrace.cli.serve import open_served
from millrace.observability.tables import read_table
from millrace.run.evaluation import Evaluation
from tests.inference.server.running import running


def row(number: int, *, right: bool, outcome: str = "score") -> dict[str, object]:
    text = f"{number}\x1b[2J" if number == 1 else str(number)
    given = {"prompt": f"p{number}", "completion": text, "answer": "7", "reward": 0.25, "reason": "it hung"}
    return {**given, "right": right, "outcome": outcome}


ROWS = [row(0, right=True), row(1, right=False), row(2, right=False, outcome="failed")]
ROWS += [row(number, right=False, outcome="invalid") for number in range(3, 8)]
RESULT = Evaluation(accuracy=1 / 7, reward=0.25, length=2.5, truncated=0.5, failed=0.125, rows=ROWS)


def test_people_see_the_measure_first_and_three_answers_without_full_marks():
    assert as_lines("checkpoint best", "accuracy", RESULT) == [
        "accuracy     0.143 on 8 questions, checkpoint best",
        "mean reward  0.250",
        "answers      1 with full marks, 6 with less (5 of them could not be read)",
        "failed       1 have no score, and no mean counts them; the first: it hung",
        "mean length  2.5 tokens, 50% ran out of tokens",
        "answers without full marks, for example:",
        "  'p1'",
        "    answered '1\\x1b[2J'",
        "    expected '7'",
        "  'p3'",
        "    answered '3'",
        "    expected '7'",
        "  'p4'",
        "    answered '4'",
        "    expected '7'",
    ]


def test_graded_rewards_are_told_with_each_example():
    parts = {"reward/near/mean": 0.5, "reward/near/failed_fraction": 0.0, "reward/exact/mean": 0.125}
    result = replace(RESULT, parts=parts, rows=ROWS[:2], left_out=3)
    assert as_lines("m", "reward/near/mean", result) == [
        "mean near reward   0.500 on 2 questions (3 too long), m",
        "accuracy           0.143",
        "mean reward        0.250",
        "mean exact reward  0.125",
        "answers            1 with full marks, 1 with less",
        "mean length        2.5 tokens, 50% ran out of tokens",
        "answers without full marks, for example:",
        "  'p1'",
        "    answered '1\\x1b[2J'",
        "    expected '7'",
        "    reward   0.250",
    ]


def test_programs_see_the_same_numbers():
    tree = as_tree("accuracy", RESULT)
    assert (tree["measure"], tree["value"], tree["num_left_out"]) == ("accuracy", 1 / 7, 0)
    assert (tree["accuracy"], tree["mean_reward"], tree["mean_length_tokens"]) == (1 / 7, 0.25, 2.5)
    assert (tree["truncated_fraction"], tree["failed_fraction"], tree["num_prompts"]) == (0.5, 0.125, 8)
    assert [wrong["prompt"] for wrong in tree["wrong"]] == ["p1", "p3", "p4"]


def test_a_long_answer_is_cut():
    long = {**row(3, right=False), "completion": "x" * 500}
    lines = as_lines("m", "accuracy", Evaluation(0.0, 0.0, 1.0, 0.0, 0.0, [long]))
    assert lines[-2] == f"    answered '{'x' * 200}...'"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("checkpoint", ["best", "last", "step-000002"])
def test_a_checkpoint_is_evaluated_again_with_the_same_result(lab, checkpoint):
    lab.train()
    summary = json.loads((lab.folder / "runs/tiny-1/summary.json").read_text())
    result = lab("evaluate", "runs/tiny-1", "--checkpoint", checkpoint, "--json")
    tree = json.loads(result.out)
    assert (result.code, tree["checkpoint"], tree["num_prompts"]) == (0, checkpoint, 8)
    assert tree["measure"] == summary["measure"] == "reward/mean"
    assert tree["value"] == summary["eval_best" if checkpoint == "best" else "eval_after"]
    if checkpoint == "best":
        assert lab("evaluate", "runs/tiny-1").out.startswith("mean reward  0.")


def model(lab) -> str:
    lab.train("steps=1")
    return "runs/tiny-1/checkpoints/step-000001/model"


@pytest.mark.slow
def test_any_model_folder_answers_every_question_of_any_file(lab):
    folder = model(lab)
    lab.write("mine.jsonl", ['{"problem": "1+1=", "answer": "2"}', '{"problem": "2+3=", "answer": "5"}'])
    words = (
        "--data",
        "mine.jsonl",
        "--reward",
        "exact",
        "data.prompt_column=problem",
        "rollout.max_tokens=3",
    )
    result = lab("evaluate", folder, *words)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"mean reward  0.000 on 2 questions, {folder}\naccuracy     0.000\n")
    tree = json.loads(lab("evaluate", folder, *words, "--json").out)
    assert (tree["model"], tree["num_prompts"]) == (folder, 2)
    assert [wrong["prompt"] for wrong in tree["wrong"]] == ["1+1=", "2+3="]
    # Drawn, by seed.
    drawn = [
        json.loads(lab("evaluate", folder, *words, *more, "--json").out)["wrong"]
        for more in (("--temperature", "2"), ("--temperature", "2"), ("--temperature", "2", "seed=7"))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_model_folder_is_evaluated_as_a_recipe_says_and_a_run_on_other_data(lab):
    folder = model(lab)
    as_recipe = json.loads(lab("evaluate", folder, "--recipe", "tiny.yaml", "--json").out)
    as_run = json.loads(lab("evaluate", "runs/tiny-1", "--checkpoint", "last", "--json").out)
    assert {"run", "checkpoint"} < as_run.keys()
    assert {key: as_recipe[key] for key in as_recipe if key not in ("model", "answers")} == {
        key: as_run[key] for key in as_run if key not in ("run", "checkpoint", "answers")
    }
    lab.write("mine.jsonl", lab.lines[:3])
    result = lab("evaluate", "runs/tiny-1", "--data", "mine.jsonl", "evaluation.measure=accuracy")
    assert result.out.startswith("accuracy     0.000 on 3 questions, checkpoint best\n")


def varied_rows(lab) -> None:
    rows = [json.loads(line) for line in lab.lines]
    lab.write("mine.jsonl", [json.dumps(row | {"source": "ab"[n % 2]}) for n, row in enumerate(rows[:12])])


@pytest.mark.slow
@pytest.mark.world
def test_several_answers_have_metrics_with_errors_and_are_compared_with_another_checkpoint(lab):
    lab.train("steps=1")
    varied_rows(lab)
    words = ("evaluate", "runs/tiny-1", "rewards=[{kind: function, function: judges:varied}]", "--data")
    words += ("mine.jsonl", "--samples", "4", "--temperature", "2", "--greedy")
    shown = lab(*words, "--against", "runs/tiny-1/checkpoints/step-000001")
    lines = shown.out.splitlines()
    assert shown.code == 0, shown.err
    assert lines[0].endswith("on 12 questions x 4 answers, checkpoint best")
    starts = [
        "metric ",
        "avg@4 ",
        "reward/mean ",
        "pass@2 ",
        "pass@4 ",
        "pass^2 ",
        "pass^4 ",
        "maj@2 ",
        "maj@4 ",
    ]
    starts += ["greedy ", "avg@4, a ", "avg@4, b ", "only 12 questions: the standard error is 0."]
    starts += [
        "answers are in evaluations/tiny-1-step-0000",
        "the run trained on ",
        "",
        "runs/tiny-1 minus runs/",
    ]
    at = next(n for n, line in enumerate(lines) if line.startswith("metric"))
    assert [line[: len(start)] for line, start in zip(lines[at:], starts, strict=False)] == starts
    assert lines[-1].startswith("a difference in avg@4 is ")
    # The table holds every answer with its question, and stands in for the model afterwards.
    found = json.loads(lab(*words, "--json", "--against", lines[at + 13].split()[-1]).out)
    table = read_table(lab.folder / found["answers"])
    assert len(table) == 12 * 5 and {row["sample"] for row in table} == {0, 1, 2, 3}
    assert len({row["question_id"] for row in table}) == 12
    assert {row["source"] for row in table} == {"a", "b"}
    right = [row["right"] for row in table if not row["greedy"]]
    assert found["metrics"]["avg@4"]["value"] == sum(right) / 48 == found["accuracy"]
    assert found["verl_best"]["best@4"] <= found["metrics"]["pass@4"]["value"]
    assert found["against"]["metrics"]["avg@4"]["difference"] == 0
    assert set(found["against"]["sources"]) == {"a", "b"}
    assert found["num_trained_on"] + sum(row["prompt_id"].startswith("eval") for row in table) > 60


@pytest.mark.world
def test_a_server_answers_as_the_folder_that_it_serves(lab):
    folder = model(lab)
    varied_rows(lab)
    options = {
        "name": "sums",
        "max_concurrent": 4,
        "max_waiting": 99,
        "precision": "float32",
        "device": "cpu",
    }
    served = open_served(folder, None, cache_tokens=2000, weights_root=None, **options)
    words = ("--data", "mine.jsonl", "--reward", "exact", "rollout.max_tokens=3", "--json")
    with running(served) as mill:
        result = lab("evaluate", folder, *words, "--against", f"{mill.url}/v1#sums")
        assert result.code == 0, result.err
        wrong = lab("evaluate", f"{mill.url}/v1#other", *words)
        assert wrong.code == 1 and "error: server http://127.0.0.1" in wrong.err
    assert json.loads(result.out)["against"]["metrics"]["avg@1"]["difference"] == 0
    tables = [read_table(path) for path in sorted((lab.folder / "evaluations").iterdir())]
    assert [row["completion"] for row in tables[0]] == [row["completion"] for row in tables[1]]
    assert [row["num_tokens"] for row in tables[0]] == [row["num_tokens"] for row in tables[1]]


def test_options_without_effect_and_sets_without_answers_are_told_in_a_sentence(lab):
    folder = model(lab)
    lab.write("none.jsonl", [])
    lab.write("bare.jsonl", ['{"question": "1+1="}'])
    for words, sentence in {
        "--samples 4 --k 8": "k is 8, but a question gets 4 answers, which say nothing about 8; "
        "lower k, or raise the samples by --samples",
        "--samples 4 --temperature 0": "--samples 4 has no effect at temperature 0, where all answers to a "
        "question are equal; give a --temperature above 0",
        "--greedy": "--greedy has no effect where the one answer is greedy; add --samples 8, or remove it",
        "--top-p 0.9": "--top-p has no effect where the one answer is greedy; add --samples 8, or remove it",
        "--samples 2 --against gone.parquet": "gone.parquet does not exist here; give a table that millrace "
        "evaluate wrote",
        "--data none.jsonl": "none.jsonl holds no rows",
        "--data bare.jsonl": "a reward of kind exact compares with the reference answer, and no row "
        "has one; set data.answer_column to the answer's column, or choose another reward",
    }.items():
        given = [] if "--data" in words else ["--data", "sums.jsonl"]
        result = lab("evaluate", folder, "--reward", "exact", "rollout.max_tokens=3", *given, *words.split())
        assert (result.out, result.err) == ("", f"error: {sentence}\n")


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            [".", "--data", "sums.jsonl", "--reward", "bleu"],
            2,
            "--reward bleu is none of exact, gsm8k, number, task and module:function; give one of these, or "
            "rewards='[{kind: ...}]'",
        ),
        (
            [".", "--data", "sums.jsonl", "--reward", "task"],
            2,
            "recipe of the command: a reward of kind task needs data.train to be a reasoning-gym: task; "
            "choose another reward",
        ),
        (["gone", "--data", "sums.jsonl", "--reward", "exact"], 1, "model folder gone does not exist"),
        (
            [".", "--data", "gone.jsonl", "--reward", "exact"],
            1,
            "gone.jsonl does not exist here; give the path of .jsonl, .json or .csv, also with .gz or .zst "
            "behind it, .parquet, a folder of such files, a pattern such as 'data/*.parquet', or a folder "
            "written by datasets.save_to_disk",
        ),
        (
            [".", "--data", "sums.jsonl", "--reward", "exact", "--checkpoint", "last"],
            2,
            ". is not a run, so --checkpoint has no effect; remove it",
        ),
        (
            [
                "MODEL",
                "--data",
                "sums.jsonl",
                "--reward",
                "exact",
                "rollout.max_tokens=3",
                "data.prompt_column=q",
            ],
            1,
            "sums.jsonl line 1: there is no column q; there are: question, answer",
        ),
        (
            ["runs/tiny-1", "--recipe", "tiny.yaml"],
            2,
            "runs/tiny-1 is a run, which has a recipe of its own; remove --recipe",
        ),
    ],
)
def test_what_is_wrong_with_an_evaluation_is_told_in_a_sentence(words, code, sentence, lab):
    if words[0] in ("MODEL", "runs/tiny-1"):
        folder = model(lab)
        words = [folder if word == "MODEL" else word for word in words]
    result = lab("evaluate", *words)
    assert (result.code, result.out, result.err) == (code, "", f"error: {sentence}\n")
