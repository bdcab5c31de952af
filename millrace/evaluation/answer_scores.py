"""Metrics of the scored answers to a set of questions, each with its error, in all and per source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.evaluation.intervals import MeanEstimate, estimate_mean
from millrace.evaluation.paired import PairedComparison, compare_paired
from millrace.evaluation.repeated_samples import (
    best_with_replacement,
    majority_at_k,
    pass_at_k,
    pass_hat_k,
    powers_of_two,
)


@dataclass(frozen=True, slots=True)
class QuestionAnswers:
    """The scored answers to one question. An answer whose reward failed counts in `num_failed` alone.

    Attributes:
        id: of the problem, equal in any file: its `question_id`, and its number among equal ones.
        source: data set that the question is from; empty if it names none.
        cluster: questions of one cluster share something, so that their results are not independent.
        right: whether each scored answer has full marks.
        rewards: of each scored answer.
        predictions: of each scored answer, normalised; see `predictions`.
        num_failed: answers without a score.
    """

    id: str
    source: str
    cluster: str
    right: tuple[bool, ...]
    rewards: tuple[float, ...]
    predictions: tuple[str, ...]
    num_failed: int


@dataclass(frozen=True, slots=True)
class SetSummary:
    """Metrics of the answers to a set of questions.

    Attributes:
        num_questions: in the set.
        num_samples: answers to each.
        num_failed: answers without a score, over all questions.
        estimates: by name: `avg@n`, the mean of right answers; `reward/mean`; and for k of 2, 4, ... up to n
            `pass@k`, `pass^k` and `maj@k`.
        bounds: `avg@n` if all failed answers were wrong, and if all were right.
        best_with_replacement: verl's `best@k` by k.
        single: whether each question has one answer.
    """

    num_questions: int
    num_samples: int
    num_failed: int
    estimates: dict[str, MeanEstimate]
    bounds: tuple[float, float]
    best_with_replacement: dict[int, float]
    single: bool


def by_question(rows: Iterable[Mapping[str, Any]]) -> list[QuestionAnswers]:
    """Gather the rows of an answer table by question, in the order of the first answers.

    A row has `prompt_id`, `question_id`, `source`, `cluster`, `outcome`, `right`, `reward` and `prediction`.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
    found = []
    equal: Counter[str] = Counter()
    for group in groups.values():
        identity = group[0]["question_id"]
        equal[identity] += 1
        scored = [row for row in group if row["outcome"] != "failed"]
        found.append(
            QuestionAnswers(
                f"{identity}:{equal[identity]}",
                group[0]["source"],
                group[0]["cluster"],
                tuple(bool(row["right"]) for row in scored),
                tuple(float(row["reward"]) for row in scored),
                tuple(row["prediction"] for row in scored),
                len(group) - len(scored),
            )
        )
    return found


def values_of(
    questions: Sequence[QuestionAnswers], num_samples: int, ks: Sequence[int]
) -> dict[str, list[float]]:
    """Return for each metric its value per question; NaN where too few answers were scored."""
    found: dict[str, list[float]] = {
        f"avg@{num_samples}": [_mean(one.right) for one in questions],
        "reward/mean": [_mean(one.rewards) for one in questions],
    }
    ks = [k for k in ks if k > 1]
    counts = [(sum(one.right), len(one.right)) for one in questions]
    votes = [majority_at_k(one.predictions, one.right, ks) for one in questions]
    for k in ks:
        found[f"pass@{k}"] = [pass_at_k(*count, k) for count in counts]
    for k in ks:
        found[f"pass^{k}"] = [pass_hat_k(*count, k) for count in counts]
    for place, k in enumerate(ks):
        found[f"maj@{k}"] = [vote[place] for vote in votes]
    return found


def summarise_answers(
    questions: Sequence[QuestionAnswers], *, num_samples: int, ks: Sequence[int] | None = None, seed: int = 0
) -> SetSummary:
    """Compute the metrics of a set; a question counts in a metric if enough of its answers were scored.

    A metric that no question has is left out.

    Args:
        questions: with their scored answers.
        num_samples: answers that each was to get.
        ks: of pass@k, pass^k and maj@k; None takes the powers of two up to `num_samples`.
        seed: of the bootstrap.

    Raises:
        ValueError: there are no questions, or a k is above `num_samples`.
    """
    if not questions:
        raise ValueError("there are no questions to evaluate")
    ks = powers_of_two(num_samples) if ks is None else sorted(set(ks))
    check_ks(ks, num_samples)
    single = num_samples == 1
    estimates = {}
    for name, values in values_of(questions, num_samples, ks).items():
        known = [(value, one.cluster) for value, one in zip(values, questions, strict=True) if value == value]
        if known:
            estimates[name] = estimate_mean(
                [value for value, _ in known],
                [cluster for _, cluster in known],
                is_fraction=name != "reward/mean",
                is_single=single,
                resamples=name.startswith(("pass", "maj")),
                seed=seed,
            )
    num_failed = sum(one.num_failed for one in questions)
    sums = [(sum(one.right), len(one.right) + one.num_failed, one.num_failed) for one in questions]
    bounds = (
        _mean([right / count for right, count, _ in sums]),
        _mean([(right + failed) / count for right, count, failed in sums]),
    )
    best = {}
    for k in ks:
        each = [best_with_replacement(sum(one.right), len(one.right), k) for one in questions if one.right]
        best[k] = _mean(each)
    return SetSummary(len(questions), num_samples, num_failed, estimates, bounds, best, single)


def check_ks(ks: Sequence[int], num_samples: int) -> None:
    """Refuse a k that so many answers to a question cannot have.

    Raises:
        ValueError: the message has the k and the number of answers.
    """
    for k in ks:
        if k > num_samples:
            raise ValueError(
                f"k is {k}, but a question gets {num_samples} answers, which say nothing about {k}; lower k, "
                "or raise the samples"
            )


def by_source(questions: Sequence[QuestionAnswers]) -> dict[str, list[QuestionAnswers]]:
    """Group questions by their source, in the order of the first ones; empty if they have one source."""
    found: dict[str, list[QuestionAnswers]] = {}
    for one in questions:
        found.setdefault(one.source, []).append(one)
    return found if len(found) > 1 else {}


def compare_answers(
    a: Sequence[QuestionAnswers],
    b: Sequence[QuestionAnswers],
    *,
    num_samples: int,
    ks: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, PairedComparison]:
    """Compare two models metric by metric on the questions for which both have it.

    Args:
        a: questions with the answers of model A.
        b: the same for B; paired by id.
        num_samples: answers that each question was to get, from each model.
        ks: see `summarise_answers`.
        seed: of the sign-flip test.

    Raises:
        ValueError: they have no question in common.
    """
    of_b = {one.id: one for one in b}
    pairs = [(one, of_b[one.id]) for one in a if one.id in of_b]
    if not pairs:
        raise ValueError("the two models have no question in common that both answered")
    ks = powers_of_two(num_samples) if ks is None else sorted(set(ks))
    of_each = [values_of([pair[side] for pair in pairs], num_samples, ks) for side in (0, 1)]
    found = {}
    for name, values in of_each[0].items():
        known = [
            (x, y, one.cluster)
            for x, y, (one, _) in zip(values, of_each[1][name], pairs, strict=True)
            if not math.isnan(x + y)
        ]
        if known:
            x_N, y_N, cluster_N = zip(*known, strict=True)
            single = num_samples == 1 and name != "reward/mean"
            found[name] = compare_paired(x_N, y_N, cluster_N, is_single=single, seed=seed)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
