"""How many workers should compute prompts alone: violations that the cost model predicts. No torch.

One request sees only the requests that are there. That prompts to come will stop the tokens of a worker shows
in the rate and the lengths of the last requests alone, so the division of the workers follows from those:

- Prompts wait in a queue with as many servers as workers compute them (Allen and Cunneen's approximation),
  with an exponential tail.
- Requests that decode are as many as arrive while one does (Little), and a step takes longer the more they
  are.
- Where a worker does both, a request of L tokens is stopped by the prompts of that time: a compound Poisson
  number of seconds, of which a Gamma distribution has the mean and the variance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import gammaincc

from millrace.planner.placement import DELAY_WEIGHT, HYSTERESIS, Objective, ServingModel, violation

# A division is changed only for a gain of so many of all requests, and by HYSTERESIS of the violations.
LEAST_GAIN = 0.01
# Beyond so many workers not each division is predicted.
MOST_DIVISIONS = 16
# Load that is reported where a queue grows without end.
ENDLESS = 10.0


class RecentRequests(NamedTuple):
    """The last requests: how many a second, squared variation of the times between them, and their tokens.

    `output_NQ` has quantiles of the expected length of each.
    """

    rate: float
    variation: float
    prompt_N: np.ndarray
    output_NQ: np.ndarray


def choose_division(
    workload: RecentRequests,
    num_workers: int,
    model: ServingModel,
    objective: Objective,
    previous: int = 0,
) -> int:
    """Return how many workers should compute prompts alone; 0 if each should serve whole requests."""
    step = -(-num_workers // MOST_DIVISIONS)
    candidates = sorted({0, previous, *range(step, num_workers, step)} & set(range(num_workers)))
    score = {one: predicted_violations(workload, num_workers, one, model, objective) for one in candidates}
    best = min(candidates, key=score.__getitem__)
    kept = score.get(previous, math.inf)
    return best if kept - score[best] > max(LEAST_GAIN, HYSTERESIS * kept) else previous


def predicted_violations(
    workload: RecentRequests, num_workers: int, num_prefill: int, model: ServingModel, objective: Objective
) -> float:
    """Predict the fraction of requests outside the objective, and a little more the higher the load is.

    With `num_prefill` 0 every worker serves whole requests.
    """
    cost = model.cost
    prompt_N, output_NQ = workload.prompt_N, workload.output_NQ
    own_N = cost.token_s * prompt_N + cost.row_s
    own_N = own_N + (cost.pair_s + cost.context_s / model.max_batch_tokens) * prompt_N**2 / 2
    output_N = output_NQ.mean(1)
    num_decode = num_workers - num_prefill
    rate = workload.rate / num_decode
    # Fraction of its time that a worker's tokens wait for prompts.
    busy = 0.0 if num_prefill else rate * own_N.mean()
    context = ((prompt_N + output_N / 2) * output_N).sum() / output_N.sum()
    row_s = cost.token_s + cost.row_s + (cost.pair_s + cost.context_s) * context
    left = 1 - busy - row_s * rate * output_N.mean() if busy < 1 else 0.0
    if left <= 0:
        return 1 + DELAY_WEIGHT * ENDLESS
    step_s = cost.step_s * (1 - busy) / left
    late_NQ = violation(np.full(output_NQ.shape, step_s), objective.tpot_s)
    if num_prefill:
        link_N = (
            model.link.seconds(1.0) + prompt_N / model.block_size * model.block_bytes / model.link.bytes_per_s
        )
        each_NQ = step_s + (link_N[:, None] + step_s) / output_NQ
        late_NQ = violation(each_NQ, objective.tpot_s)
    elif busy:
        span_NQ = output_NQ * step_s / (1 - busy)
        mean_NQ, variance_NQ = busy * span_NQ, rate * (own_N**2).mean() * span_NQ
        slack_NQ = np.maximum(0.0, output_NQ * (objective.tpot_s - step_s))
        stopped_NQ = gammaincc(mean_NQ**2 / variance_NQ, slack_NQ * mean_NQ / variance_NQ)
        late_NQ = 1 - (1 - late_NQ) * (1 - stopped_NQ)
    beside_s = cost.step_s if num_prefill else step_s
    first_N, load = _late_first(workload, num_prefill or num_workers, own_N, beside_s, model, objective)
    late = float(np.mean(1 - (1 - first_N[:, None]) * (1 - late_NQ)))
    return late + DELAY_WEIGHT * load


def _late_first(
    workload: RecentRequests,
    num_servers: int,
    own_N: np.ndarray,
    step_s: float,
    model: ServingModel,
    objective: Objective,
) -> tuple[np.ndarray, float]:
    """P(first token after its target) of each request, and the load of the servers."""
    # Short prompts share a step.
    service_N = own_N + workload.prompt_N / model.max_batch_tokens * step_s
    load = float(workload.rate * service_N.mean() / num_servers)
    if load >= 1:
        return np.ones(len(own_N)), min(load, ENDLESS)
    variation = (workload.variation + (service_N.std() / service_N.mean()) ** 2) / 2
    waits = load ** (math.sqrt(2 * (num_servers + 1)) - 1)
    # Mean seconds of a request that waits.
    wait_s = service_N.mean() * variation / (num_servers * (1 - load))
    slack_N = objective.ttft_s - service_N
    return np.where(slack_N > 0, waits * np.exp(-np.maximum(slack_N, 0.0) / wait_s), 1.0), load
