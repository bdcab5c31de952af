"""Display names of evaluation metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# eval/NAME/avg@8, and the same of pass@4, maj@4 and greedy.
_OF_SET = re.compile(r"eval/([^/]+)/((?:avg@|pass@|maj@)[0-9]+|greedy)")


def measure_words(metric: str) -> str:
    """Return the display name of the metric in `evaluation.measure`.

    `reward/mean` is "mean reward", `reward/format/mean` is "mean format reward", `accuracy` is itself, and
    `eval/aime/avg@8` is "avg@8 of aime".
    """
    if metric.startswith("eval/"):
        name, _, rest = metric.removeprefix("eval/").partition("/")
        return f"{measure_words(rest)} of {name}"
    if metric == "reward/mean":
        return "mean reward"
    if metric.startswith("reward/") and metric.endswith("/mean"):
        return f"mean {metric.removeprefix('reward/').removesuffix('/mean')} reward"
    return metric


def held_out_words(metric: str, words: str = "held-out prompts") -> str:
    """Return ` on held-out prompts`; empty for a metric of a set, whose display name has the set."""
    return "" if metric.startswith("eval/") else f" on {words}"


def set_values(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the fractions of right answers of the further sets in an evaluation's record, by set."""
    found: dict[str, dict[str, float]] = {}
    for key, value in record.items():
        if match := _OF_SET.fullmatch(key):
            found.setdefault(match[1], {})[match[2]] = float(value)
    return found


def main_metrics(values: Iterable[str]) -> list[str]:
    """Return the metrics of a set to show first: its mean, greedy, and the largest k of pass@k and maj@k."""
    names = list(values)
    shown = [metric for metric in names if metric.startswith("avg@") or metric == "greedy"]
    for kind in ("pass@", "maj@"):
        shown += [metric for metric in names if metric.startswith(kind)][-1:]
    return shown


def set_line(name: str, values: Mapping[str, float], record: Mapping[str, Any]) -> str:
    """Return the main metrics of a set: `aime: avg@8 0.413 (standard error 0.080), pass@8 0.700`."""
    words = []
    for metric in main_metrics(values):
        error = record.get(f"eval/{name}/{metric}/std_error")
        noted = f" (standard error {error:.3f})" if error is not None else ""
        words.append(f"{metric} {values[metric]:.3f}{noted}")
    return f"{name}: {', '.join(words)}"
