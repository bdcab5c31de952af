"""Cost model of an engine step, fitted to measured steps. No torch.

    t(step) = c0 + c1 sum(q) + c2 sum(q (context + q / 2)) + c3 B + c4 sum(context)

over the B requests that compute in the step, of which each computes q tokens behind the context that it has
in the KV cache. No coefficient is negative, so more work never costs less. Prefill has no cost of its own: a
token of a prompt and a sampled token cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from millrace.errors import PlanError

# Coefficients, and the fewest steps that they are fitted to.
NUM_COEFFICIENTS = 5
LEAST_STEPS = 2 * NUM_COEFFICIENTS


class StepLoad(NamedTuple):
    """The sums of the model for one step; medians of several steps have fractions.

    Attributes:
        tokens: sum(q), tokens that are computed.
        attention: sum(q (context + q / 2)), pairs of a computed token and a token before it.
        rows: B, requests that compute.
        context: sum(context), tokens whose keys and values are read.
    """

    tokens: float
    attention: float
    rows: float
    context: float


def step_load(count_B: np.ndarray, start_B: np.ndarray) -> StepLoad:
    """Return the load of a plan: tokens and context of each request that computes, integers [B]."""
    return StepLoad(
        tokens=float(count_B.sum()),
        attention=float((count_B * (start_B + count_B / 2)).sum()),
        rows=float(len(count_B)),
        context=float(start_B.sum()),
    )


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Coefficients of the model, in seconds, in the order of the formula.

    Attributes:
        step_s: for the step itself.
        token_s: for each token.
        pair_s: for each pair of a computed token and a token before it.
        row_s: for each request.
        context_s: for each token of the contexts.
    """

    step_s: float
    token_s: float
    pair_s: float
    row_s: float
    context_s: float

    def seconds(self, load: StepLoad) -> float:
        """Predict the seconds of a step."""
        return (
            self.step_s
            + self.token_s * load.tokens
            + self.pair_s * load.attention
            + self.row_s * load.rows
            + self.context_s * load.context
        )


def fit_engine_cost(loads: Sequence[StepLoad], seconds: Sequence[float]) -> EngineCost:
    """Fit the coefficients: non-negative least squares on the relative error of each step.

    Raises:
        PlanError: there are fewer than LEAST_STEPS steps, or a step took no time.
    """
    # A fit alone needs it, and its import takes a second.
    from scipy.optimize import nnls

    if len(loads) < LEAST_STEPS or min(seconds) <= 0:
        raise PlanError(
            f"{len(loads)} measured steps were given; a cost model needs {LEAST_STEPS}, each above 0 s"
        )
    table_NC = np.array([(1.0, *load) for load in loads]) / np.array(seconds)[:, None]
    # Columns differ by orders of magnitude, and a column without an entry stays at 0.
    scale_C = np.maximum(table_NC.max(0), np.finfo(float).tiny)
    found_C, _ = nnls(table_NC / scale_C, np.ones(len(loads)))
    return EngineCost(*(found_C / scale_C).tolist())


def relative_errors(cost: EngineCost, loads: Sequence[StepLoad], seconds: Sequence[float]) -> list[float]:
    """Return predicted over measured seconds, less 1, of each step."""
    return [cost.seconds(load) / actual - 1 for load, actual in zip(loads, seconds, strict=True)]


class ErrorSummary(NamedTuple):
    """Median and 90th percentile of the relative error of a step, without signs."""

    median: float
    p90: float
    num_steps: int


def error_summary(errors: Sequence[float]) -> ErrorSummary:
    """Summarise relative errors, of which there must be one at least."""
    median, p90 = np.quantile(np.abs(errors), [0.5, 0.9]).tolist()
    return ErrorSummary(median, p90, len(errors))
