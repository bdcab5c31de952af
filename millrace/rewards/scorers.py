"""reasoning-gym's scorers: the allowlist, and safe parsers for those that would evaluate a completion.

Some scorers call `eval` or SymPy's `parse_expr` on the completion, which executes any Python code in it. In
their modules these functions are replaced by parsers that evaluate nothing (`expressions`). scorers.json
lists the digest of every reviewed scorer; a scorer with another digest is refused.
"""

from __future__ import annotations

import cmath
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.data.functions import explain
from millrace.data.tasks import load_reasoning_gym
from millrace.rewards.expressions import (
    UnreadableError,
    disarm_sympy,
    read_expression,
    read_integers,
    read_literal,
)
from millrace.rewards.reward_errors import RewardError

Scorer = Callable[[str, dict[str, Any]], float]

PACKAGE = "reasoning_gym"
_FRACTION = re.compile(r"[-+]?[0-9.]{1,40}(?:e[-+]?[0-9]{1,3}|/[0-9]{1,40})?", re.IGNORECASE)
REVIEWED = Path(__file__).with_name("scorers.json")
# By scorer module: the names to replace, and their replacements.
PARSERS: Mapping[str, Mapping[str, Any]] = {
    "algorithmic.binary_matrix": {"eval": read_literal},
    "algorithmic.number_sorting": {"eval": read_literal},
    "algorithmic.spiral_matrix": {"eval": read_literal},
    "algorithmic.string_insertion": {"eval": read_literal},
    "arithmetic.bitwise_arithmetic": {"eval": read_integers},
    "games.countdown": {"parse_expr": read_expression},
    "games.n_queens": {"eval": read_literal},
}


def open_scorer(name: str, options: Mapping[str, Any]) -> Scorer:
    """The scorer of a task; RewardError for an unknown task, a refused option or an unreviewed scorer."""
    factory = load_reasoning_gym()
    if name not in factory.DATASETS:
        raise RewardError(f"reward task: reasoning-gym has no task {name}; correct data.train")
    try:
        dataset = factory.create_dataset(name, **options)
    except Exception as error:
        raise RewardError(
            f"reward task: {name} refuses its options: {explain(error)}; correct data.task"
        ) from error
    check_reviewed(name)
    disarm_sympy()
    replace_parsers(factory.DATASETS[name][0].__module__)
    return SCORERS.get(name) or dataset.score_answer


def check_reviewed(task: str) -> None:
    """Raise RewardError if the source of a task's scorer is not the reviewed one, or was not reviewed."""
    known = reviewed().get(task)
    if known == digest(load_reasoning_gym().DATASETS[task][0]):
        return
    state = "is not among those" if known is None else "differs from the one"
    raise RewardError(
        f"reward task: reasoning-gym's scorer of {task} {state} that millrace has reviewed and found to "
        "evaluate nothing; install reasoning_gym==0.1.25, or write a reward of kind function"
    )


@cache
def reviewed() -> Mapping[str, str]:
    """Return the digest of every reviewed scorer, by task."""
    digests: dict[str, str] = json.loads(REVIEWED.read_text(encoding="utf-8"))
    return digests


def digest(kind: type) -> str:
    """Hash the source of a task's scorer: its module, and the reasoning-gym modules it imports names from."""
    home = sys.modules[kind.__module__]
    names = [value for value in vars(home).values() if not isinstance(value, ModuleType)]
    modules = {getattr(value, "__module__", None) for value in (*kind.__mro__, *names)}
    sources = hashlib.sha256()
    for module in sorted(name for name in modules if name and name.split(".")[0] == PACKAGE):
        sources.update(inspect.getsource(sys.modules[module]).encode())
    return sources.hexdigest()[:32]


def replace_parsers(module: str) -> None:
    """Replace the parsers of a reasoning-gym module so that it does not evaluate completions."""
    home = importlib.import_module(module)
    for name, parser in PARSERS.get(module.removeprefix(f"{PACKAGE}."), {}).items():
        setattr(home, name, parser)


def _halting(completion: str, row: dict[str, Any]) -> float:
    """Score 1 for the correct one of True and False; reasoning-gym's own scorer accepts any text."""
    return float(completion.strip().lower() == str(row["answer"]).lower())


def _puzzle24(completion: str, row: dict[str, Any]) -> float:
    """Score 1 if the given four numbers make 24; reasoning-gym's own scorer accepts any four, and 24.9."""
    try:
        value = read_expression(completion)
    except UnreadableError:
        return 0.01
    used = sorted(int(number) for number in re.findall(r"\b\d+\b", completion))
    return 1.0 if value == 24 and used == sorted(row["metadata"]["numbers"]) else 0.01


def _complex_arithmetic(completion: str, row: dict[str, Any]) -> float:
    """Score exp(-distance to the correct number); reasoning-gym's own scorer gives 1 to `nan`."""
    from reasoning_gym.algebra.complex_arithmetic import ComplexArithmeticDataset

    found = ComplexArithmeticDataset.parse_string_to_complex(completion)
    if found is None or not cmath.isfinite(found):
        return 0.0
    return math.exp(-abs(found - complex(*row["metadata"]["result"])))


def _coin_flip(completion: str, row: dict[str, Any]) -> float:
    """Score 1 for the probability within 1e-4, as a decimal or fraction, else 0.9 times the digit match.

    The digit match is the length of the common prefix over the longer of both texts. reasoning-gym's own
    scorer gives 1 to `0` for every probability below 1, since it divides by the shorter of the two.
    """
    answer, expected = (text.replace(",", "").strip() for text in (completion, str(row["answer"])))
    if not _FRACTION.fullmatch(answer):
        return 0.0
    try:
        found, right = float(Fraction(answer)), float(Fraction(expected))
    except (ZeroDivisionError, OverflowError):
        return 0.0
    if abs(found - right) <= 1e-4:
        return 1.0
    ours, theirs = f"{found:.10g}", f"{right:.10g}"
    agree = len(os.path.commonprefix([ours, theirs]))
    return 0.9 * agree / max(len(ours), len(theirs))


# Replacements for scorers that give 1 to wrong answers.
SCORERS: Mapping[str, Scorer] = {
    "coin_flip": _coin_flip,
    "complex_arithmetic": _complex_arithmetic,
    "game_of_life_halting": _halting,
    "puzzle24": _puzzle24,
}
