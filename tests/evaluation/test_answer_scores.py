"""Metrics of a table of answers: per question, per source, and of two models."""

from __future__ import annotations

import math

import numpy as np
import pytest

from millrace.evaluation.answer_scores import (
    by_question,
    by_source,
    compare_answers,
    summarise_answers,
    values_of,
)
from millrace.evaluation.predictions import normalised, prediction_of
from millrace.evaluation.repeated_samples import pass_at_k
from tests.close import close_fp64


def rows(id: str, marks: str, *, source: str = "s", cluster: str | None = None, problem: str | None = None):
    """One answer for each letter: r right, w wrong, f without a score."""
    return [
        {
            "prompt_id": id,
            "question_id": problem or id,
            "source": source,
            "cluster": cluster or id,
            "outcome": "failed" if mark == "f" else "score",
            "right": mark == "r",
            "reward": {"r": 1.0, "w": 0.25, "f": math.nan}[mark],
            "prediction": "7" if mark == "r" else "8",
        }
        for mark in marks
    ]


def test_failed_answers_are_neither_right_nor_wrong_and_bound_what_is_known():
    found = summarise_answers(
        by_question(rows("a", "rrww") + rows("b", "rwff") + rows("c", "ffff")), num_samples=4
    )
    assert (found.num_questions, found.num_failed) == (3, 6)
    # c has no score, so two questions are known; b has two answers, which say nothing about 4.
    assert found.estimates["avg@4"].num_questions == 2
    close_fp64(found.estimates["avg@4"].value, 0.5)
    close_fp64(found.bounds, [(0.5 + 0.25) / 3, (0.5 + 0.75 + 1) / 3])
    close_fp64(found.estimates["pass@2"].value, (pass_at_k(2, 4, 2) + 1) / 2)
    assert found.estimates["pass@4"].num_questions == 1
    close_fp64(found.estimates["pass^2"].value, (1 / 6 + 0) / 2)
    close_fp64(found.estimates["reward/mean"].value, 0.625)
    # With a tie, each prediction is as likely.
    close_fp64(found.estimates["maj@4"].value, 0.5)
    close_fp64(found.best_with_replacement[2], 0.75)
    assert list(found.estimates) == [
        *("avg@4", "reward/mean", "pass@2", "pass@4", "pass^2", "pass^4", "maj@2", "maj@4")
    ]


def test_a_k_above_the_samples_is_refused():
    with pytest.raises(ValueError, match="k is 8, but a question gets 4 answers, which say nothing about 8"):
        summarise_answers(by_question(rows("a", "rrww")), num_samples=4, ks=[2, 8])
    with pytest.raises(ValueError, match="there are no questions"):
        summarise_answers([], num_samples=1)


def test_errors_are_by_cluster_and_sources_apart():
    table = [
        rows(f"q{i}", "r" if i < 6 else "w", source="xy"[i % 2], cluster=f"p{i // 3}") for i in range(12)
    ]
    questions = by_question(row for each in table for row in each)
    found = summarise_answers(questions, num_samples=1).estimates["avg@1"]
    assert (found.num_questions, found.num_clusters) == (12, 4)
    close_fp64(found.std_error, math.sqrt(4 / 3 * 4 * 1.5**2) / 12)
    assert {name: len(each) for name, each in by_source(questions).items()} == {"x": 6, "y": 6}
    assert by_source(by_source(questions)["x"]) == {}


def test_two_models_are_compared_on_the_questions_that_both_answered():
    a = by_question(rows("a", "rr") + rows("b", "rw") + rows("c", "ff") + rows("d", "rr"))
    b = by_question(rows("b", "ww") + rows("a", "rw") + rows("c", "rr"))
    found = compare_answers(a, b, num_samples=2)
    assert found["avg@2"].num_questions == 2
    close_fp64(found["avg@2"].difference, 0.5)
    close_fp64(found["pass@2"].difference, 0.5)
    with pytest.raises(ValueError, match="no question in common"):
        compare_answers(a, by_question(rows("z", "r")), num_samples=2)


def test_questions_are_paired_by_problem_whatever_their_place_in_a_file():
    a = by_question(
        rows("eval:0", "r", problem="x") + rows("eval:1", "w", problem="y") + rows("eval:2", "r", problem="x")
    )
    b = by_question(
        rows("aime:0", "w", problem="z") + rows("aime:1", "r", problem="y") + rows("aime:2", "w", problem="x")
    )
    found = compare_answers(a, b, num_samples=1)["avg@1"]
    assert (found.num_questions, found.difference) == (2, 0)


def test_random_tables_have_the_mean_over_questions():
    rng = np.random.default_rng(5)
    table = [rows(str(i), "".join(rng.choice(list("rw"), 8))) for i in range(25)]
    questions = by_question(row for each in table for row in each)
    values = values_of(questions, 8, [1, 2, 4, 8])
    found = summarise_answers(questions, num_samples=8)
    for name, each in values.items():
        close_fp64(found.estimates[name].value, np.mean(each))
    close_fp64(np.mean(values["avg@8"]), np.mean([row["right"] for each in table for row in each]))


@pytest.mark.parametrize(
    ("text", "prediction"),
    [
        ("so \\boxed{\\frac{1}{2}} and \\boxed{ \\text{ 1,024.50} }.", "1024.5"),
        ("thus \\boxed{\\frac{3}{4}}", "3/4"),
        ("3 apples\n#### 1,234", "1234"),
        ("The answer is 7.0.\nIt was 8 before.", "7"),
        ("First 3.\nThen it is 12 in all", "12"),
        ("Paris  ", "paris"),
        ("\\boxed{open", "\\boxed{open"),
        ("", ""),
    ],
)
def test_predictions_are_normalised(text, prediction):
    assert prediction_of(text, {}, whole=False) == prediction


def test_a_reward_gives_its_own_prediction_and_an_exact_one_compares_the_text():
    assert prediction_of("x", {"acc": 1.0, "mine/pred": "$ 2.50"}, whole=True) == "2.5"
    assert prediction_of("The  answer is 7\n", {}, whole=True) == "The answer is 7"
    numbers = {"-0.50": "-0.5", "+03.00": "3", "-0.0": "0", ".25": "0.25", "1" * 40: "1" * 40}
    assert [normalised(text) for text in numbers] == list(numbers.values())
