"""The judges themselves, called in this process; `test_isolated` runs them where they belong."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from millrace.rewards.reward_errors import RewardError
from millrace.rewards.verifiers import (
    ScoringFunction,
    format_scoring,
    function_scoring,
    number_scoring,
    task_scoring,
    verdict,
)
from tests.close import close_fp64


def judged(
    scoring: ScoringFunction, completion: str, answer: str = "", row: dict[str, Any] | None = None
) -> tuple[str, float]:
    kind, value, *_ = verdict(scoring, "prompt", completion, answer, row or {})
    return kind, value


@pytest.fixture(scope="module")
def number() -> ScoringFunction:
    return number_scoring()


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("1/2", "The answer is $\\frac{1}{2}$.", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("0.5", "so \\boxed{\\frac{2}{4}}", 1.0),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{3}}", 0.0),
        ("42", "6 * 7 = 42", 1.0),
        ("42", "first 42, but finally 41", 0.0),
        ("1,234", "\\boxed{1234}", 1.0),
        ("-3", "$-3$", 1.0),
        ("-3", "$3$", 0.0),
        ("2^{10}", "$1024$", 1.0),
        ("2^{10}", "$2$", 0.0),
        ("\\sqrt{2}", "\\boxed{2^{1/2}}", 1.0),
        ("\\sqrt{2}", "\\sqrt{2}", 1.0),
        ("x^2+1", "$1+x^2$", 1.0),
        ("(1, 2)", "$(1,2)$", 1.0),
        ("(1, 2)", "$2$", 0.0),
        ("12 apples", "12", 1.0),
        ("0.25", "$1/4$", 1.0),
        ("-1/2", "-0.5", 1.0),
        ("50%", "\\boxed{50\\%}", 1.0),
        ("B", "\\boxed{B}", 1.0),
        ("$\\pi/2$", "\\boxed{\\frac{\\pi}{2}}", 1.0),
    ],
)
def test_number_compares_expressions(number, answer, completion, value):
    assert judged(number, completion, answer) == ("score", value)


@pytest.mark.parametrize("completion", ["", "I do not know", "$\\frac{$", "?!"])
def test_number_calls_a_completion_without_an_expression_invalid(number, completion):
    kind, value, reason, _ = verdict(number, "", completion, "42", {})
    assert (kind, value, reason) == ("invalid", 0.0, "math-verify reads no expression in the completion")


@pytest.mark.parametrize("answer", ["", "the answer", "No"])
def test_number_fails_where_the_answer_holds_no_expression(number, answer):
    kind, _, reason, _ = verdict(number, "", "42", answer, {})
    assert kind == "failed"
    assert f"no expression in the answer {answer!r}; put it into $ signs if it is one" in reason


def test_an_error_of_the_comparison_is_a_failure_and_not_a_zero(number, monkeypatch):
    def broken(*_: object, **__: object) -> bool:
        raise TypeError("cannot compare")

    monkeypatch.setattr("math_verify.verify", broken)
    kind, _, reason, _ = verdict(number_scoring(), "", "41", "42", {})
    assert kind == "failed" and "TypeError: cannot compare" in reason


def test_basic_arithmetic_gives_partial_credit():
    scoring = task_scoring("basic_arithmetic", {})
    row = {"question": "Calculate 5 - 3 - 6.", "answer": "-4", "metadata": {}}
    assert judged(scoring, " -4\n", row=row) == ("score", 1.0)
    assert judged(scoring, "4", row=row) == ("score", 0.0)
    kind, value = judged(scoring, "it is -4", row=row)
    assert kind == "score"
    close_fp64(value, 2 / 8)
    assert judged(scoring, "", row=row) == ("score", 0.0)


def test_a_task_that_raises_is_a_failure():
    kind, _, reason, _ = verdict(
        task_scoring("basic_arithmetic", {}), "", "4", "4", {"question": "no answer here"}
    )
    assert kind == "failed" and reason.startswith("raised KeyError: 'answer' (")


def test_an_unknown_task_is_refused():
    with pytest.raises(RewardError, match="reasoning-gym has no task arithmetics; correct data.train"):
        task_scoring("arithmetics", {})


def test_an_option_the_task_does_not_have_is_refused():
    with pytest.raises(
        RewardError, match=r"basic_arithmetic refuses its options: .*num_terms.* correct data.task"
    ):
        task_scoring("basic_arithmetic", {"num_terms": 3})


@pytest.mark.parametrize(
    ("completion", "value"),
    [("<a>1</a>", 1.0), ("<a>1\n2</a>", 1.0), ("<a>1</a> ", 0.0), ("x<a>1</a>", 0.0), ("", 0.0)],
)
def test_format_matches_the_whole_completion(completion, value):
    assert judged(format_scoring("<a>.*</a>"), completion) == ("score", value)


def test_a_pattern_that_does_not_compile_is_refused():
    with pytest.raises(RewardError, match=r"reward format: '\(' is not a regular expression: missing \)"):
        format_scoring("(")


@pytest.mark.parametrize("value", [1, True, 0.25, Fraction(1, 4), np.float32(0.25), np.int64(3)])
def test_any_real_number_is_a_score(value):
    assert verdict(lambda *_: value, "", "", "", {}) == ("score", float(value), "", {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1.0", "returned '1.0' (str), which is not a number"),
        ([1.0], "returned [1.0] (list), which is not a number"),
        (1j, "returned 1j (complex), which is not a number"),
        (float("nan"), "returned nan, which is not a finite number"),
        (float("-inf"), "returned -inf, which is not a finite number"),
        ({"a": 1.0}, "returned {'a': 1.0}, a mapping without a score"),
        ({"score": "1"}, "returned '1' (str), which is not a number"),
        ({"score": 1, "mean": 2}, "returned a value named 'mean'; names have letters, digits and _"),
        ({"score": 1, "a/b": 2}, "returned a value named 'a/b'; names have letters, digits and _"),
        ({"score": 1, 3: 2}, "returned a value named 3; names have letters, digits and _"),
        ({"score": 1, "a": [2]}, "returned a [2], which is neither a finite number nor a text"),
        ({"score": 1, "a": float("nan")}, "returned a nan, which is neither a finite number nor a text"),
        (
            {"score": 1} | {f"a{n}": 1 for n in range(17)},
            "returned 17 values beside its score; 16 are possible",
        ),
    ],
)
def test_anything_else_is_a_failure(value, reason):
    assert verdict(lambda *_: value, "", "", "", {}) == ("failed", 0.0, reason, {})


def test_values_beside_the_score_are_numbers_and_clean_texts():
    found = {"score": np.float32(0.5), "correct": True, "steps": 3, "note": "a\x1b[2J\n" + "x" * 2000}
    kind, value, reason, extras = verdict(lambda *_: found, "", "", "", {})
    assert (kind, value, reason) == ("score", 0.5, "")
    note = extras.pop("note")
    assert extras == {"correct": 1.0, "steps": 3.0}
    assert note.startswith("a\\x1b[2J\\nxxx") and len(note) < 1100


def test_an_integer_beyond_any_float_is_a_failure():
    kind, _, reason, _ = verdict(lambda *_: 10**400, "", "", "", {})
    assert kind == "failed" and "OverflowError" in reason


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "there is no module absent_judge_a in "),
        (
            "import no_such_package_b",
            "importing NAME raised ModuleNotFoundError: No module named 'no_such_package_b'",
        ),
        (
            "x = 1\nraise RuntimeError('on import')",
            "importing NAME raised RuntimeError: on import (NAME.py line 2)",
        ),
        ("raise SystemExit(3)", "importing NAME raised SystemExit: 3 (NAME.py line 1)"),
        ("def f(:", "importing NAME raised "),
        ("g = 1", "module NAME does not have a function f; correct it"),
        ("f = 1", "module NAME cannot call a function f; correct it"),
        (
            "def f(prompt, answer): pass",
            "f cannot be called with prompt, completion, answer and row (got an unexpected",
        ),
        (
            "def f(prompt, completion, answer, row, x): pass",
            "(missing a required argument: 'x'); give it these four",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(body, message, tmp_path, monkeypatch, request):
    name = "absent_judge_a" if body is None else f"judge_{abs(hash(body))}"
    if body is not None:
        (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewardError) as refused:
        function_scoring(f"{name}:f")
    assert str(refused.value).startswith(f"reward function {name}:f: ")
    assert message.replace("NAME", name) in str(refused.value)
