"""The tables of `millrace evaluate`: metrics with their errors, and the comparison with another model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from millrace.data.rows import DataError
from millrace.evaluation.answer_scores import QuestionAnswers, SetSummary, by_source, compare_answers
from millrace.evaluation.intervals import MeanEstimate
from millrace.evaluation.paired import PairedComparison, detectable_difference, holm

if TYPE_CHECKING:
    from millrace.run.answer_table import AnsweredSet
    from millrace.run.evaluation import SamplingPlan

# Fewer questions are a small sample, which is noted.
FEW = 100
LEVEL_P = 0.05
# The questions of a model with their sampled and with their greedy answers.
Pairs = tuple[Sequence[QuestionAnswers], Sequence[QuestionAnswers]]
# By metric; and the first metric by source, with its adjusted p-value.
Compared = tuple[Mapping[str, PairedComparison], Mapping[str, tuple[PairedComparison, float]]]


def summary_tree(
    plan: SamplingPlan, summary: SetSummary, sources: Mapping[str, SetSummary]
) -> dict[str, Any]:
    """Return the metrics for programs."""
    return {
        "num_samples": plan.num_samples,
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "metrics": {name: _plain(asdict(one)) for name, one in summary.estimates.items()},
        "num_failed": summary.num_failed,
        "bounds": dict(zip(("failed_wrong", "failed_right"), summary.bounds, strict=True)),
        "verl_best": {f"best@{k}": _number(value) for k, value in summary.best_with_replacement.items()},
        "sources": {
            source: {name: _plain(asdict(one)) for name, one in each.estimates.items()}
            for source, each in sources.items()
        },
    }


def summary_lines(summary: SetSummary, sources: Mapping[str, SetSummary]) -> list[str]:
    """Return the metrics for people, and what the number of questions allows."""
    rows: list[tuple[str, ...]] = [("metric", "value", "95% interval", "questions")]
    rows += [_row(name, one) for name, one in summary.estimates.items() if _varies(name, summary)]
    first = next(iter(summary.estimates))
    rows += [
        _row(f"{first}, {source or 'no source'}", each.estimates[first])
        for source, each in sources.items()
        if first in each.estimates
    ]
    lines = table_lines(rows)
    if summary.num_failed:
        low, high = summary.bounds
        lines.append(
            f"{summary.num_failed} answers have no score: {first} is between {low:.3f} (all wrong) and "
            f"{high:.3f} (all right)"
        )
    main = summary.estimates[first]
    if main.num_clusters < 2:
        return [*lines, "one question, or one cluster of them, has no error; give more"]
    if not main.std_error:
        return [
            *lines,
            "all questions have the same value, so that the standard error is not known; give more",
        ]
    # Of two models with errors of this size, not paired.
    least = detectable_difference(math.sqrt(2) * main.std_error, main.num_clusters)
    few = "only " * (main.num_clusters < FEW)
    lines.append(
        f"{few}{main.num_clusters} {'questions' if main.num_clusters == main.num_questions else 'clusters'}: "
        f"the standard error is {main.std_error:.3f}, and two models must differ by {least:.2f} for this to "
        "show; --against compares question by question, which shows smaller differences"
    )
    return lines


def compare_sets(other: str, found: AnsweredSet, theirs: Pairs, ks: Sequence[int] | None) -> Compared:
    """Compare the answers of two models.

    Raises:
        DataError: no question has scored answers of both.
    """
    scored = [{one.id for one in each if one.right} for each in (found.questions, theirs[0])]
    if scored[0].isdisjoint(scored[1]):
        raise DataError(
            f"{other} has scored answers to none of these questions; give answers to the same ones"
        )
    num_samples, seed = found.plan.num_samples, found.seed
    ours = found.questions
    compared = compare_answers(ours, theirs[0], num_samples=num_samples, ks=ks, seed=seed)
    if found.greedy is not None and theirs[1]:
        greedy = compare_answers(found.greedy_questions, theirs[1], num_samples=1, seed=seed)
        if "avg@1" in greedy:
            compared["greedy"] = greedy["avg@1"]
    first, ids = f"avg@{num_samples}", {one.id for one in theirs[0]}
    by_name = {
        source: compare_answers(each, theirs[0], num_samples=num_samples, ks=[], seed=seed)
        for source, each in by_source(ours).items()
        if any(one.id in ids for one in each)
    }
    known = {source: each[first] for source, each in by_name.items() if first in each}
    adjusted = holm([one.p_value for one in known.values()])
    return compared, {source: (one, p) for (source, one), p in zip(known.items(), adjusted, strict=True)}


def comparison_tree(other: str, comparison: Compared) -> dict[str, Any]:
    """Return the comparison with another model for programs."""
    compared, sources = comparison
    return {
        "model": other,
        "metrics": {name: _plain(asdict(one)) for name, one in compared.items()},
        "sources": {source: _plain(asdict(one) | {"p_holm": p}) for source, (one, p) in sources.items()},
    }


def comparison_lines(target: str, other: str, comparison: Compared) -> list[str]:
    """Return the comparison with another model for people."""
    compared, sources = comparison
    rows: list[tuple[str, ...]] = [("difference", "value", "95% interval", "p", "shown from", "questions")]
    first = next(iter(compared))
    rows += [
        _difference_row(name, one, one.p_value)
        for name, one in compared.items()
        if name != "reward/mean" or one.difference != compared[first].difference
    ]
    rows += [
        _difference_row(f"{first}, {source or 'no source'}", one, p) for source, (one, p) in sources.items()
    ]
    main = compared[first]
    p_value = main.p_value if main.p_mcnemar is None else main.p_mcnemar
    test = "the paired test" if main.p_mcnemar is None else "McNemar's test"
    verdict = "is shown" if p_value < LEVEL_P else "is not shown"
    lines = ["", f"{target} minus {other}, question by question:", *table_lines(rows)]
    if sources:
        lines.append("p of sources is adjusted for their number (Holm)")
    conclusion = f"a difference in {first} {verdict} (p = {p_value:.3f} by {test})"
    if not math.isnan(main.detectable):
        least = f"{main.num_questions} questions show one of {main.detectable:.3f} or more"
        conclusion += f"; {least} in four cases of five"
    return [*lines, conclusion]


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _varies(name: str, summary: SetSummary) -> bool:
    """Whether a metric has a line of its own; the mean reward of right or wrong answers is that of avg@n."""
    first = next(iter(summary.estimates))
    return name != "reward/mean" or summary.estimates[name].value != summary.estimates[first].value


def _row(name: str, one: MeanEstimate) -> tuple[str, ...]:
    interval = "unknown" if math.isnan(one.low) else f"{one.low:.3f} to {one.high:.3f}"
    return name, f"{one.value:.3f}", interval, str(one.num_questions)


def _difference_row(name: str, one: PairedComparison, p_value: float) -> tuple[str, ...]:
    interval = "unknown" if math.isnan(one.low) else f"{one.low:+.3f} to {one.high:+.3f}"
    least = "unknown" if math.isnan(one.detectable) else f"{one.detectable:.3f}"
    return name, f"{one.difference:+.3f}", interval, f"{p_value:.3f}", least, str(one.num_questions)


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _number(value) if isinstance(value, float) else value for key, value in tree.items()}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
