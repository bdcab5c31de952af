"""Scoring functions that run in a worker process, and the conversion of their results to outcomes.

A scoring function takes the prompt's text, the completion, the reference answer and the source row. It
returns a number, or `Invalid` if it cannot parse an answer. Any exception makes the outcome a failure.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

from millrace.data.functions import FunctionError, explain, imported
from millrace.observability.plain import plain_text
from millrace.rewards.foreign_functions import (
    NAMES,
    ForeignSignature,
    arguments_of,
    foreign_signature,
    single_score,
)
from millrace.rewards.reward_errors import RewardError

_ANCHORS = ("$", "\\boxed", "\\(", "\\[")


@dataclass(frozen=True, slots=True)
class Invalid:
    """No answer could be parsed from the completion."""

    reason: str


# Takes prompt, completion, answer and row, and the episode if it sees those; that of an `async def` returns
# an awaitable.
ScoringFunction = Callable[..., Any]
# Kind, value, reason and extras of an `Outcome`; a failure has the value 0, as JSON has no NaN.
Verdict = tuple[str, float, str, dict[str, float | str]]
# How much a reward may return beside its score.
_MAX_EXTRAS, _MAX_TEXT = 16, 1000
_EXTRA_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,39}")
# Metrics of the score itself.
_TAKEN = frozenset({"mean", "failed_fraction"})


def make_scoring_function(spec: Mapping[str, Any]) -> ScoringFunction:
    """Build the scoring function of a spec (for its form see `isolated.IsolatedReward`).

    Raises RewardError, which names the cause, if the task, pattern or function cannot be used.
    """
    makers: dict[str, Callable[..., ScoringFunction]] = {
        "number": number_scoring,
        "task": task_scoring,
        "format": format_scoring,
        "function": function_scoring,
    }
    return makers[spec["kind"]](**{key: value for key, value in spec.items() if key != "kind"})


def verdict(score: ScoringFunction, *given: object) -> Verdict:
    """Score one completion, given what the function takes."""
    try:
        return _read(score(*given))
    except BaseException as error:  # a user's function may also raise SystemExit, and that is a failure too
        return _failed(f"raised {explain(error)}")


async def verdict_async(score: ScoringFunction, *given: object) -> Verdict:
    """Score one completion with an `async def` function."""
    try:
        return _read(await score(*given))
    except BaseException as error:  # SystemExit would end the event loop, a cancellation the other calls
        return _failed(f"raised {explain(error)}")


def _read(found: object) -> Verdict:
    extras: dict[str, float | str] = {}
    if isinstance(found, Mapping):
        if "score" not in found:
            return _failed(f"returned {reprlib.repr(found)}, a mapping without a score")
        if problem := _take_extras(found, extras):
            return _failed(problem)
        found = found["score"]
    if isinstance(found, Invalid):
        return "invalid", 0.0, plain_text(found.reason), extras
    if not isinstance(found, Real):
        return _failed(f"returned {reprlib.repr(found)} ({type(found).__name__}), which is not a number")
    number = float(found)
    if not math.isfinite(number):
        return _failed(f"returned {number}, which is not a finite number")
    return "score", number, "", extras


def _take_extras(found: Mapping[object, object], extras: dict[str, float | str]) -> str:
    """Read what a mapping has beside the score; return what is wrong with it, or nothing."""
    if len(found) > _MAX_EXTRAS + 1:
        return f"returned {len(found) - 1} values beside its score; {_MAX_EXTRAS} are possible"
    for name, value in found.items():
        if name == "score":
            continue
        if not isinstance(name, str) or not _EXTRA_NAME.fullmatch(name) or name in _TAKEN:
            return f"returned a value named {reprlib.repr(name)}; names have letters, digits and _"
        if isinstance(value, str):
            extras[name] = plain_text(value, _MAX_TEXT)
        elif isinstance(value, Real) and math.isfinite(number := float(value)):
            extras[name] = number
        else:
            return f"returned {name} {reprlib.repr(value)}, which is neither a finite number nor a text"
    return ""


def _failed(reason: str) -> Verdict:
    return "failed", 0.0, plain_text(reason), {}


def number_scoring() -> ScoringFunction:
    """Score 1 if math-verify finds the completion's final expression equal to the answer, else 0."""
    import math_verify.parser
    import sympy
    from math_verify import parse, verify

    from millrace.rewards.expressions import disarm_sympy

    disarm_sympy()
    # math-verify imported SymPy's original function by name, so its reference is replaced too.
    math_verify.parser.parse_expr = sympy.parse_expr
    # The parent process enforces the deadline; math-verify would warn that its own timeout is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    @lru_cache(maxsize=1024)
    def parse_answer(answer: str) -> list[Any]:
        # Math-verify takes the last number of plain text, so (1, 2) would be read as 2; within dollars it
        # reads the whole, but takes prose for products of letters.
        bare = not any(anchor in answer for anchor in _ANCHORS)
        prose = re.search("[A-Za-z]{2}", answer) and not any(sign in answer for sign in "\\^{")
        return list(parse(f"${answer}$" if bare and not prose else answer, parsing_timeout=None))

    def score(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> object:
        expected = parse_answer(answer.strip())
        if not expected:
            raise ValueError(
                f"math-verify reads no expression in the answer {answer!r}; put it into $ signs if it is one"
            )
        if completion.strip() == answer.strip():
            return 1.0
        found = parse(completion, parsing_timeout=None)
        error: Exception | None = None
        for one in expected:
            for other in found:
                try:
                    if verify(one, other, timeout_seconds=None, raise_on_error=True):
                        return 1.0
                except Exception as raised:  # another pair may still be equal; otherwise it is raised below
                    error = error or raised
        if error is not None:
            raise error
        if all(isinstance(other, str) for other in found):
            return Invalid("math-verify reads no expression in the completion")
        return 0.0

    return score


def task_scoring(name: str, options: Mapping[str, Any]) -> ScoringFunction:
    """Score the completion, stripped of surrounding white space, with a reasoning-gym task."""
    from millrace.rewards.scorers import open_scorer

    scorer = open_scorer(name, options)

    def score(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> object:
        if "answer" not in row:
            raise KeyError("answer")
        try:
            return scorer(completion.strip(), row)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            return Invalid(f"reasoning-gym's scorer of {name} cannot read the completion: {explain(error)}")

    return score


def format_scoring(pattern: str) -> ScoringFunction:
    """Score 1 if the pattern matches the whole completion (a dot matches line breaks too), else 0."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"reward format: {pattern!r} is not a regular expression: {error}") from error

    def score(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> object:
        return compiled.fullmatch(completion) is not None

    return score


def function_scoring(function: str) -> ScoringFunction:
    """Score with a user's `module:function`, called as `f(prompt=, completion=, answer=, row=)`.

    With a parameter `episode` it also gets the whole episode, a `types.Episode`. A result of None makes the
    outcome invalid. That of an `async def` is a coroutine function. A function with the signature of another
    trainer is called as that does (`foreign_functions`).
    """
    name = function.partition(":")[2]
    try:
        found = imported(function)
    except FunctionError as error:
        raise RewardError(f"reward function {function}: {error}") from error
    episode = {"episode": None} if _sees_episode(found) else {}
    if not episode and (foreign := foreign_signature(found)) is not None:
        return _foreign_scoring(function, found, foreign)
    try:
        inspect.signature(found).bind(prompt="", completion="", answer="", row={}, **episode)
    except TypeError as error:
        raise RewardError(
            f"reward function {function}: {name} cannot be called with prompt, completion, answer and row "
            f"({error}); give it these four parameters, or those of {NAMES}"
        ) from error

    names = ("prompt", "completion", "answer", "row", *episode)

    def score(*given: object) -> object:
        return read(found(**dict(zip(names, given, strict=True))))

    async def score_async(*given: object) -> object:
        return read(await found(**dict(zip(names, given, strict=True))))

    def read(value: object) -> object:
        return _with_reason(function, value)

    return score_async if is_async(found) else score


def _foreign_scoring(function: str, found: Callable[..., Any], foreign: ForeignSignature) -> ScoringFunction:
    try:
        arguments_of(found, foreign, ("", "", "", {}))
    except TypeError as error:
        # Columns are not known here; a parameter that no row has fails where it is called.
        if not foreign.takes_columns:
            raise RewardError(
                f"reward function {function}: it has the signature of {foreign.trainer}, and {error}; give "
                "that parameter a default"
            ) from error

    def score(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> object:
        given = arguments_of(found, foreign, (prompt, completion, answer, row))
        return _with_reason(function, single_score(found(**given)))

    async def score_async(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> object:
        given = arguments_of(found, foreign, (prompt, completion, answer, row))
        return _with_reason(function, single_score(await found(**given)))

    return score_async if is_async(found) else score


def _with_reason(function: str, value: object) -> object:
    """What a function returned; a score of None becomes Invalid with a reason."""
    if isinstance(value, Mapping) and value.get("score", 0) is None:
        return {**value, "score": Invalid(f"{function} returned the score None")}
    return Invalid(f"{function} returned None") if value is None else value


def sees_episodes(spec: Mapping[str, Any]) -> bool:
    """Return whether the scoring function of a spec takes the episode, too."""
    return spec["kind"] == "function" and _sees_episode(imported(spec["function"]))


def _sees_episode(function: Callable[..., Any]) -> bool:
    return "episode" in inspect.signature(function).parameters


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine: an `async def`, or an object with such a `__call__`."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
