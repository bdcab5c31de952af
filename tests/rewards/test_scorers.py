"""No scorer of reasoning-gym evaluates what a model writes, and none gives full marks to a wrong answer."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sympy
from sympy.parsing import sympy_parser

from millrace.data.tasks import load_reasoning_gym
from millrace.rewards import scorers
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.scorers import PARSERS, REVIEWED, check_reviewed, open_scorer
from millrace.rewards.verifiers import Invalid, task_scoring
from tests.close import close_fp64

# A package of one of the tasks leaves files open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
factory = load_reasoning_gym()
DATASETS, create_dataset = factory.DATASETS, factory.create_dataset
# Their problems cannot be generated where a package that only a C compiler installs is missing.
NEEDS_PYCOSAT = {"zebra_puzzles"}
MISSING = set() if find_spec("pycosat") else NEEDS_PYCOSAT
NAMES = sorted(set(DATASETS) - {"composite"})
TASKS = [
    pytest.param(name, marks=pytest.mark.skipif(name in MISSING, reason="needs pycosat: pip install pycosat"))
    for name in NAMES
]
# What takes the place of a problem that cannot be generated: its scorer can be attacked all the same.
MADE = {"question": "Who lives in House 1?", "answer": "ada", "metadata": {"source_dataset": "zebra_puzzles"}}
ALGEBRA = ["intermediate_integration", "polynomial_multiplication", "simple_integration"]
EVALUATING = [
    name for name in sorted(DATASETS) if DATASETS[name][0].__module__.partition(".")[2] in PARSERS
] + ALGEBRA
# Before anything puts ours in its place.
SYMPYS_OWN = importlib.reload(sympy_parser).parse_expr
# Python that leaves a file behind, in the forms in which scorers look for an answer.
CODE = "__import__('pathlib').Path('canary').touch()"
PAYLOADS = [
    CODE,
    f"[{CODE}]",
    f"[[{CODE}]]",
    f"{{'a': {CODE}}}",
    f"x + {CODE}",
    f"A={CODE},B=1",
    f"({CODE}) or '24'",
    f"{CODE}\n{CODE}",
    f"f'{{{CODE}}}'",
    f"$\\frac{{{CODE}}}{{1}}$",
    f"@(lambda f: {CODE})\nclass X: pass",
    "().__class__.__base__.__subclasses__()",
    "!!python/object/apply:os.system ['touch canary']",
    "cos\nsystem\n(S'touch canary'\ntR.",
]
# What a model that has learned nothing writes.
POOR = [
    "x",
    "junk answer",
    "0",
    "1",
    "-1",
    "[]",
    "[[]]",
    "{}",
    "No",
    "True",
    "False",
    "A",
    "nan",
    "inf",
    "1,2,3",
    "((",
]
evaluated: list[str] = []
listening = False


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        listening
        and event == "compile"
        and str(arguments[1]) != "<unknown>"
        and str(arguments[1]).startswith("<")
    ):
        evaluated.append(str(arguments[0])[:200])


@cache
def add_listener() -> None:
    """Not before it is needed: every other test of this process would be slower."""
    sys.addaudithook(listen)


@contextmanager
def watched() -> Iterator[None]:
    """Where text must not be evaluated."""
    global listening
    add_listener()
    evaluated.clear()
    listening = True
    try:
        yield
    finally:
        listening = False
    assert evaluated == []


def rows_of(task: str, num: int) -> list[dict[str, Any]]:
    dataset = create_dataset(task, size=num, seed=7)
    return [dataset[number] for number in range(num)]


def right_answer(row: dict[str, Any]) -> str | None:
    """One of the right answers, where the row names one."""
    names = ("example_correct_answer", "example_answer", "possible_answer")
    found = row["answer"] or next((row["metadata"][name] for name in names if name in row["metadata"]), None)
    return found if found is None or isinstance(found, str) else json.dumps(found)


def equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one.lower() == other.strip().lower()


@pytest.mark.slow_beyond(5)
@pytest.mark.attack("a completion is code, for every task of reasoning-gym")
@pytest.mark.parametrize("task", NAMES)
def test_no_scorer_evaluates_a_completion(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = [MADE] if task in MISSING else rows_of(task, 1)
    scoring = task_scoring(task, {"size": 1, "seed": 7})
    with watched():
        for payload in [*PAYLOADS, str(row["answer"])]:
            scoring("", payload, row["answer"], deepcopy(row))
    assert list(tmp_path.iterdir()) == []


def test_the_watch_sees_what_is_evaluated():
    """With the scorer as it comes."""
    task = create_dataset("n_queens", size=1, seed=7)
    module = sys.modules[type(task).__module__]
    given = vars(module).pop("eval", None)
    try:
        with pytest.raises(AssertionError, match="1 \\+ 1"), watched():
            task.score_answer("[1 + 1]", task[0])
    finally:
        if given is not None:
            module.eval = given


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("task", TASKS)
def test_a_right_answer_earns_full_marks_and_a_poor_one_does_not(task):
    scoring = task_scoring(task, {"size": 3, "seed": 7})
    for row in rows_of(task, 3):
        answer = right_answer(row)
        # Some reference answers hold integrals that were not solved; an integral of the question is none.
        if answer is not None and not (task == "intermediate_integration" and "Integral" in answer):
            close_fp64(scoring("", answer, answer, deepcopy(row)), 1.0)
        for poor in POOR:
            if answer is None or not equal(poor, answer):
                score = scoring("", poor, answer or "", deepcopy(row))
                assert isinstance(score, Invalid) or score < 0.7, poor


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("task", EVALUATING)
def test_what_stands_in_for_evaluation_gives_the_same_scores(task, monkeypatch):
    """On answers and on what resembles them; with the scorer as it comes."""
    dataset = create_dataset(task, size=4, seed=3)
    asked = []
    for row in (dataset[number] for number in range(4)):
        answer = str(row["answer"])
        lines = [line.split() for line in answer.split("\n")]
        texts = [
            answer,
            f"[{answer}]",
            str(list(answer)),
            str(lines),
            str(answer.split()),
            "1/2",
            f"({answer})",
        ]
        texts += [answer.replace("1", "2"), answer.replace(" ", ""), f"{answer} + C"]
        asked += [(text, row) for text in texts if "Integral" not in text]
    module = sys.modules[type(dataset).__module__]
    kept = {name: value for name, value in vars(module).items() if name in ("eval", "parse_expr")}
    vars(module).pop("eval", None)
    monkeypatch.setattr(sympy, "parse_expr", SYMPYS_OWN)
    if "parse_expr" in kept:
        module.parse_expr = SYMPYS_OWN
    theirs = [dataset.score_answer(text, deepcopy(row)) for text, row in asked]
    vars(module).update(kept)
    score = open_scorer(task, {"size": 4, "seed": 3})
    ours = [score(text, deepcopy(row)) for text, row in asked]
    assert ours == theirs


@pytest.mark.parametrize(
    ("task", "answer", "completion", "value"),
    [
        ("coin_flip", "0.003173828125", "0", 0.9 / 14),
        ("coin_flip", "0.5", "1/2", 1.0),
        ("coin_flip", "0.5", "0.50004", 1.0),
        ("coin_flip", "0.75", "0.7", 0.9 * 3 / 4),
        ("coin_flip", "0.75", "1/0", 0.0),
        ("game_of_life_halting", "False", "false", 1.0),
        ("game_of_life_halting", "False", "True", 0.0),
    ],
)
def test_scores_of_our_own(task, answer, completion, value):
    (row,) = rows_of(task, 1)
    score = open_scorer(task, {"size": 1, "seed": 7})
    close_fp64(score(completion, row | {"answer": answer}), value)


def test_four_other_numbers_do_not_solve_a_puzzle_of_24():
    score = open_scorer("puzzle24", {})
    row = {"answer": "4*6*(2-1)", "metadata": {"source_dataset": "puzzle24", "numbers": [4, 6, 2, 1]}}
    assert score("(2 - 1) * 6 * 4", row) == 1.0
    for wrong in ("3*8*1/1", "6*4*2/2", "4*6+2-1", "4*6 + 0.9*(2-1)", "4*6", "junk"):
        assert score(wrong, row) == 0.01


@pytest.mark.attack("a scorer that nobody has reviewed")
def test_a_scorer_that_was_not_reviewed_is_refused(monkeypatch):
    monkeypatch.setattr(scorers, "reviewed", lambda: {})
    with pytest.raises(RewardError, match="scorer of n_queens is not among those that millrace has reviewed"):
        open_scorer("n_queens", {})


@pytest.mark.attack("a scorer that nobody has reviewed")
def test_a_scorer_that_has_changed_is_refused(monkeypatch):
    monkeypatch.setattr(scorers, "reviewed", lambda: {"n_queens": "0" * 32})
    with pytest.raises(RewardError, match=r"differs from the one .* install reasoning_gym==0.1.25"):
        check_reviewed("n_queens")


def test_every_task_was_reviewed():
    assert set(json.loads(REVIEWED.read_text())) == set(DATASETS)
    assert Path(REVIEWED).parent.name == "rewards"
