"""Display name of the evaluation metric."""

from __future__ import annotations


def measure_words(metric: str) -> str:
    """Return the display name of the metric in `evaluation.measure`.

    `reward/mean` is "mean reward", `reward/format/mean` is "mean format reward", `accuracy` is itself.
    """
    if metric == "reward/mean":
        return "mean reward"
    if metric.startswith("reward/") and metric.endswith("/mean"):
        return f"mean {metric.removeprefix('reward/').removesuffix('/mean')} reward"
    return metric
