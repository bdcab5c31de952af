"""What an evaluation is judged by, in words."""

from __future__ import annotations


def measure_words(metric: str) -> str:
    """What a person calls the metric that `evaluation.measure` names.

    `reward/mean` is "mean reward", `reward/format/mean` is "mean format reward", `accuracy` is itself.
    """
    if metric == "reward/mean":
        return "mean reward"
    if metric.startswith("reward/") and metric.endswith("/mean"):
        return f"mean {metric.removeprefix('reward/').removesuffix('/mean')} reward"
    return metric
