"""Calibration of simulations: durations of a run, from its metrics and its event log.

An engine counts its steps, and each result has the steps at which it began and ended. The time between two
moments with a known count is

    seconds = step_s * steps + row_s * sequences in each of them + prompt_s * prompts + load_s * updates

and the four coefficients are the least-squares fit over all such spans, with none below 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from millrace.config.recipe import load_recipe
from millrace.config.rollout_section import RolloutConfig
from millrace.config.settings import num_answers
from millrace.errors import PlanError
from millrace.eventlog.log import read_events
from millrace.observability.files import FileError
from millrace.observability.plain import plain_text
from millrace.observability.sinks import read_records
from millrace.planner.durations import Quantile, StepCost, constant, measured
from millrace.simulation.simulated_engine import Costs

Event = Mapping[str, Any]
# The first batch has one-time costs: kernels are compiled, caches are empty.
NUM_FIRST = 1
LEAST_SPANS = 8
# Sanity bound on the step count of an engine.
MAX_STEPS = 1 << 27


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Measured durations of a run, by component and per step.

    `num_samples` is the number of answers to a prompt. Of an engine's `costs`, a prompt counts as one token.
    `train_token_s` are seconds of training for each token of a batch's answers, on all ranks; `rest_s` those
    of a batch in which the trainer neither trains nor waits. `step` has the means of `step_s`, `wait_s`,
    `train_s` (all work between a batch and its weight update), `weight_sync_s`, `tokens_per_s` and
    `staleness`, without the first batch.
    """

    rollout: RolloutConfig
    num_samples: int
    num_engines: int
    num_ranks: int
    num_batches: int
    costs: Costs
    train_token_s: Quantile
    rest_s: Quantile
    step: dict[str, float]

    def train_s(self, num_ranks: int, num_tokens: int, share: float) -> float:
        """Return the seconds between taking a batch and its weight update, on `num_ranks` similar ranks."""
        return self.train_token_s(share) * num_tokens * self.num_ranks / num_ranks + self.rest_s(share)


def read_measured(run: str | Path) -> MeasuredRun:
    """Measure the durations of a run with engines in worker processes.

    Raises PlanError if the path is not a run folder, a file is damaged, or the run has too few finished
    batches or lacks required data.
    """
    folder = Path(run)
    if not (folder / "recipe.yaml").is_file():
        raise PlanError(f"{run} is not a run folder (it has no recipe.yaml)")
    config = load_recipe(str(folder / "recipe.yaml"))
    records = _lines(read_records, folder / "metrics.jsonl")
    records = [one for one in records if one["stage"] == "reinforcement"]
    if len(records) <= NUM_FIRST:
        raise PlanError(
            f"run {run} has finished {len(records)} of the {NUM_FIRST + 1} batches of reinforcement that "
            "durations need at least; the first does not count"
        )
    if not (config.rollout.max_staleness or config.engine.num_engines):
        raise PlanError(
            f"run {run} generated its answers in the trainer's process, so no event times a step of an "
            "engine; run the recipe with engine.num_engines=1"
        )
    events = _lines(read_events, folder / "events.log")
    try:
        return _measured(
            run,
            records,
            events,
            rollout=config.rollout,
            num_samples=num_answers(config),
            num_ranks=config.mesh.num_ranks,
            slots=config.engine.max_num_seqs,
        )
    except (KeyError, TypeError, StopIteration, ZeroDivisionError) as error:
        # Undamaged files of an older millrace may lack fields.
        reason = plain_text(f"{type(error).__name__}: {error}", 200)
        raise PlanError(
            f"run {run}: its metrics.jsonl and events.log do not tell together how long things took "
            f"({reason}); measure another run"
        ) from None


def _measured(
    run: str | Path,
    records: Sequence[Event],
    events: Sequence[Event],
    *,
    rollout: RolloutConfig,
    num_samples: int,
    num_ranks: int,
    slots: int,
) -> MeasuredRun:
    counted = records[NUM_FIRST:]
    if not any(event["kind"] == "dispatch" for event in events):
        raise PlanError(f"run {run}: its event log has no dispatch; it is not whole")
    completed = [event for event in events if event["kind"] == "completed"]
    taken = next(event["time_s"] for event in events if event["kind"] == "take")
    spans = [span for engine in _by_engine(events).values() for span in _spans(*engine, since_s=taken)]
    if len(spans) < LEAST_SPANS:
        raise PlanError(
            f"run {run} tells {len(spans)} times how long its engines took from one answer to the next; "
            f"durations need {LEAST_SPANS} at least, so let it sample more"
        )
    step_s, row_s, prompt_s, load_s = _fitted(spans)
    step = _means(counted)
    ahead = rollout.max_staleness > 0
    if not ahead:
        # Between batches no request is in flight, and the trainer waits for the whole weight update.
        load_s = step["weight_sync_s"]
    seconds = [one["time/train_s"] / one["tokens/sampled"] for one in counted]
    # With staleness the wait includes the update before, which the simulation predicts: take the minimum.
    own_s = min(one["time/weight_sync_s"] for one in counted) if ahead else 0.0
    return MeasuredRun(
        rollout,
        num_samples,
        num_engines=len({event["engine"] for event in completed}),
        num_ranks=num_ranks,
        num_batches=len(records),
        costs=Costs(
            service=StepCost(step_s, row_s, prompt_s),
            num_tokens=measured(_lengths(events)),
            score_s=measured(_score_seconds(events)),
            load_s=constant(load_s),
            slots=slots,
            message_s=constant(0.0),
        ),
        train_token_s=measured(seconds),
        rest_s=measured([one["time/other_s"] + own_s for one in counted]),
        step=step,
    )


def _lines(read: Callable[[Path], list[dict[str, Any]]], path: Path) -> list[dict[str, Any]]:
    try:
        return read(path)
    except FileError as error:
        raise PlanError(str(error)) from None


def _means(records: Sequence[Event]) -> dict[str, float]:
    seconds = {
        name: fmean(one[f"time/{name}_s"] for one in records) for name in ("step", "sample", "weight_sync")
    }
    tokens = fmean(one["tokens/sampled"] for one in records)
    return {
        "step_s": seconds["step"],
        "wait_s": seconds["sample"],
        "train_s": seconds["step"] - seconds["sample"] - seconds["weight_sync"],
        "weight_sync_s": seconds["weight_sync"],
        "tokens_per_s": tokens / seconds["step"],
        "staleness": fmean(one.get("staleness/mean", 0.0) for one in records),
    }


def _score_seconds(events: Iterable[Event]) -> list[float]:
    submitted: dict[int, float] = {}
    found = []
    for event in events:
        if event["kind"] == "score":
            submitted |= dict.fromkeys(event["numbers"], event["time_s"])
        elif event["kind"] == "finish":
            found.append(event["time_s"] - submitted[event["number"]])
    return found


def _lengths(events: Iterable[Event]) -> list[float]:
    """Return the number of tokens of each turn, summed over its partial outputs."""
    found: dict[tuple[int, int, int], float] = defaultdict(float)
    for event in events:
        if event["kind"] in ("partial", "completed"):
            place = event["number"], event["sample"], event["turn"]
            found[place] += event["ended"] - event["began"]
    return list(found.values())


def _by_engine(events: Iterable[Event]) -> dict[str, tuple[list[Event], list[int]]]:
    """Return for each engine its results with their submission times, and the steps of its weight updates."""
    results: dict[str, list[Event]] = defaultdict(list)
    loads: dict[str, list[int]] = defaultdict(list)
    submitted: dict[tuple[int, int], float] = {}
    for event in events:
        match event["kind"]:
            case "dispatch":
                submitted |= {(event["number"], sample): event["time_s"] for sample in event["samples"]}
            case "completed" | "partial":
                submitted_s = submitted[event["number"], event["sample"]]
                results[event["engine"]].append({**event, "submitted_s": submitted_s})
            case "weights_loaded" if event["step"] and event.get("at") is not None:
                loads[event["engine"]].append(event["at"])
    return {name: (of_engine, loads[name]) for name, of_engine in results.items()}


def _spans(
    answers: Sequence[Event], loads: Sequence[int], *, since_s: float
) -> list[tuple[float, int, int, int, int]]:
    """Return spans without idle time since `since_s`: seconds, steps, rows over steps, prompts, updates."""
    last = max(event["ended"] for event in answers)
    if last > MAX_STEPS or any(not 0 <= event["began"] <= event["ended"] for event in answers):
        raise PlanError(
            f"the event log counts steps of an engine that cannot be, up to {last}; measure another run"
        )
    change, new = np.zeros((2, last + 1), np.int64)
    received: dict[int, float] = {}
    started: dict[int, float] = {}
    prompts: dict[int, set[int]] = defaultdict(set)
    for event in answers:
        began, ended = event["began"], event["ended"]
        change[began] += 1
        new[began] += 1
        change[ended] -= 1
        received.setdefault(ended, event["time_s"])
        started[began] = max(started.get(began, 0.0), event["submitted_s"])
        prompts[began].add(event["number"])
    running = np.cumsum(change)
    rows = np.concatenate([[0], np.cumsum(running)])
    # An idle engine does not count steps: if all requests are new, the engine may have been idle before.
    resumed = {step for step in started if running[step] == new[step]}
    places = sorted({*received, *resumed})
    found = []
    for first, then in zip(places, places[1:], strict=False):
        from_s = max(started[first] if first in resumed else 0.0, received.get(first, 0.0))
        if then not in received or from_s < since_s:
            continue
        num_prompts = sum(len(prompts[step]) for step in range(first, then) if step in prompts)
        updates = sum(first <= at < then and not (at == first and first in resumed) for at in loads)
        found.append(
            (received[then] - from_s, then - first, int(rows[then] - rows[first]), num_prompts, updates)
        )
    return found


def _fitted(spans: Sequence[tuple[float, int, int, int, int]]) -> list[float]:
    """Fit the seconds of a step, a row in it, a prompt and an update; 0 for what never occurs."""
    table = np.array(spans, float)
    seconds, counts = table[:, 0], table[:, 1:]
    kept = [column for column in range(counts.shape[1]) if counts[:, column].any()]
    while True:
        fit, *_ = np.linalg.lstsq(counts[:, kept], seconds, rcond=None)
        if min(fit) >= 0:
            break
        del kept[int(np.argmin(fit))]
    found = [0.0] * counts.shape[1]
    for column, value in zip(kept, fit, strict=True):
        found[column] = float(value)
    return found
