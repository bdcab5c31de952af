"""Accuracy of a checkpoint, for people and for programs."""

from __future__ import annotations

import json

import pytest

from millrace.cli.evaluate import as_lines, as_tree
from millrace.orchestration.evaluate import Evaluation


def row(number: int, *, right: bool, outcome: str = "score") -> dict[str, object]:
    text = f"{number}\x1b[2J" if number == 1 else str(number)
    return {"prompt": f"p{number}", "completion": text, "answer": "7", "right": right, "outcome": outcome}


ROWS = [row(0, right=True), row(1, right=False), row(2, right=False, outcome="failed")]
ROWS += [row(number, right=False, outcome="invalid") for number in range(3, 8)]
RESULT = Evaluation(accuracy=1 / 7, reward=0.25, length=2.5, truncated=0.5, failed=0.125, rows=ROWS)


def test_people_see_numbers_and_three_wrong_answers():
    assert as_lines("best", RESULT) == [
        "accuracy     0.143, 1 of 8 held-out prompts, checkpoint best",
        "mean reward  0.250",
        "mean length  2.5 tokens, 50% ran out of tokens",
        "failed       12% of the rewards failed; accuracy and reward leave them out",
        "wrong answers, for example:",
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


def test_programs_see_the_same_numbers():
    tree = as_tree("runs/a", "last", RESULT)
    assert (tree["accuracy"], tree["mean_reward"], tree["mean_length_tokens"]) == (1 / 7, 0.25, 2.5)
    assert (tree["truncated_share"], tree["failed_share"], tree["num_prompts"]) == (0.5, 0.125, 8)
    assert [wrong["prompt"] for wrong in tree["wrong"]] == ["p1", "p3", "p4"]


def test_a_long_answer_is_cut():
    long = {**row(3, right=False), "completion": "x" * 500}
    lines = as_lines("best", Evaluation(0.0, 0.0, 1.0, 0.0, 0.0, [long]))
    assert lines[-2] == f"    answered '{'x' * 200}...'"


@pytest.mark.parametrize("checkpoint", ["best", "last", "step-000002"])
def test_a_checkpoint_is_evaluated_again_with_the_same_result(lab, checkpoint):
    lab.train()
    summary = json.loads((lab.folder / "runs/tiny-1/summary.json").read_text())
    result = lab("evaluate", "runs/tiny-1", "--checkpoint", checkpoint, "--json")
    tree = json.loads(result.out)
    assert (result.code, tree["checkpoint"], tree["num_prompts"]) == (0, checkpoint, 8)
    assert tree["accuracy"] == summary["eval_best" if checkpoint == "best" else "eval_after"]
    assert lab("evaluate", "runs/tiny-1").out.startswith("accuracy     0.")
