"""Simulation of a run on a virtual clock: the real controller, with simulated engines and trainer. No torch.

`StalenessController` and `RolloutManager` are those of a real run, and the trainer takes batches, trains and
updates weights in the order of `rollout.batches`. So the prediction has the controller's behaviour for the
given durations.

Long answers are counted in units of several tokens, so that a simulated answer has about `UNITS` units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from millrace.data.prompts import PromptStream
from millrace.planner.durations import share_of
from millrace.rollout.backend import EngineBackend
from millrace.rollout.manager import RolloutManager
from millrace.rollout.recorder import RecordingBackend
from millrace.rollout.staleness import EventCallback, StalenessController, StalenessPolicy, discard_event
from millrace.simulation.simulated_backend import SimulatedBackend
from millrace.simulation.simulated_engine import Costs
from millrace.types import Prompt, SamplingParams

DEADLINE_S = 1e12
# Maximum number of units of an answer; the error of a step's time is about one unit.
UNITS = 256
# Distance between the seeds of two simulations.
APART = 1 << 40


@dataclass(frozen=True, slots=True)
class Work:
    """A run to simulate: staleness policy, machines and durations.

    Attributes:
        rules: its staleness policy.
        num_engines: number of engines.
        num_samples: answers to a prompt.
        prompt_tokens: length of every prompt.
        max_tokens: maximum length of an answer.
        costs: of the engines and rewards, in tokens.
        train_s: (tokens of a batch's answers, a quantile level between 0 and 1) to seconds of training on it.
    """

    rules: StalenessPolicy
    num_engines: int
    num_samples: int
    prompt_tokens: int
    max_tokens: int
    costs: Costs
    train_s: Callable[[int, float], float]


class Stretch(NamedTuple):
    """A busy interval of an engine with so many running requests; 0 for a weight update."""

    engine: str
    begin_s: float
    end_s: float
    num_running: int


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The step of one batch, in seconds of the virtual clock.

    Attributes:
        begin_s: the trainer starts to wait for the batch.
        taken_s: training starts.
        trained_s: the weight update starts.
        end_s: the step ends.
        num_tokens: tokens of its answers.
        staleness: of its groups.
    """

    begin_s: float
    taken_s: float
    trained_s: float
    end_s: float
    num_tokens: int
    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulated run.

    Attributes:
        num_engines: number of engines.
        steps: in order, without the excluded first ones.
        stretches: busy intervals of all engines, in the order of recording; they may extend beyond the steps.
    """

    num_engines: int
    steps: tuple[SimulatedStep, ...]
    stretches: tuple[Stretch, ...]

    @property
    def begin_s(self) -> float:
        """Start of the first step."""
        return self.steps[0].begin_s

    @property
    def end_s(self) -> float:
        """End of the last step."""
        return self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return (self.end_s - self.begin_s) / len(self.steps)

    @property
    def wait_s(self) -> float:
        """Mean seconds of a step in which the trainer waits for the batch."""
        return fmean(step.taken_s - step.begin_s for step in self.steps)

    @property
    def train_s(self) -> float:
        """Mean seconds of a step in which it trains."""
        return fmean(step.trained_s - step.taken_s for step in self.steps)

    @property
    def weight_sync_s(self) -> float:
        """Mean seconds of a step in which it updates weights."""
        return fmean(step.end_s - step.trained_s for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Throughput: tokens of trained answers per second."""
        return sum(step.num_tokens for step in self.steps) / (self.end_s - self.begin_s)

    @property
    def staleness(self) -> tuple[float, int]:
        """Mean and maximum over all groups."""
        found = [age for step in self.steps for age in step.staleness]
        return fmean(found), max(found)

    @property
    def engines_busy(self) -> float:
        """Fraction of the engines' time with at least one running request or a weight update."""
        busy_s = sum(end_s - begin_s for _, begin_s, end_s, _ in self.within())
        return busy_s / (self.num_engines * (self.end_s - self.begin_s))

    @property
    def trainer_busy(self) -> float:
        """Fraction of the trainer's time in which it trains."""
        return self.train_s / self.step_s

    def within(self) -> Iterator[Stretch]:
        """Yield the busy intervals, clipped to the time of the steps."""
        for name, begin_s, end_s, num_running in self.stretches:
            begin_s, end_s = max(begin_s, self.begin_s), min(end_s, self.end_s)
            if begin_s < end_s:
                yield Stretch(name, begin_s, end_s, num_running)


def simulate(
    work: Work,
    *,
    num_batches: int,
    num_first: int = 0,
    ends: bool = False,
    seed: int = 0,
    log_event: EventCallback = discard_event,
) -> Simulated:
    """Simulate a run.

    Args:
        work: the run.
        num_batches: total number of batches.
        num_first: number of first batches to exclude from the result, while the engines fill up.
        ends: whether the run ends after them, so that no group starts without a place in a batch.
        seed: of all random numbers.
        log_event: receives every decision of the controller.

    Raises:
        ValueError: all batches are excluded.
    """
    if not 0 <= num_first < num_batches:
        raise ValueError(f"{num_first} of {num_batches} batches do not count, so none is left")
    unit = math.ceil(work.max_tokens / UNITS)
    stretches: list[Stretch] = []
    backend = SimulatedBackend(
        work.num_engines,
        _in_units(work, unit),
        seed=seed,
        watch=lambda *stretch: stretches.append(Stretch(*stretch)),
    )
    num_more = 0 if ends else work.rules.staleness + 1
    controller = StalenessController(work.rules, num_batches=num_batches + num_more, log_event=log_event)
    recorder = RecordingBackend(backend, log_event)
    rollouts = _rollouts(work, recorder, controller, unit, seed, log_event)
    rollouts.begin(0)
    ahead, steps = work.rules.staleness > 0, []
    for batch in range(num_batches):
        begin_s = backend.now()
        rollout_batch = rollouts.next_batch(DEADLINE_S)
        taken_s = backend.now()
        num_units = sum(t.num_actions for group in rollout_batch.groups for t in group.trajectories)
        trained_s = taken_s + work.train_s(num_units * unit, share_of(seed * APART + batch))
        while backend.now() < trained_s:
            rollouts.advance(trained_s - backend.now())
        if ahead:
            rollouts.wait_for_weights(DEADLINE_S)
        rollouts.update_weights(batch + 1)
        if not ahead:
            rollouts.wait_for_weights(DEADLINE_S)
        steps.append(
            SimulatedStep(
                begin_s, taken_s, trained_s, backend.now(), num_units * unit, rollout_batch.taken.staleness
            )
        )
    return Simulated(work.num_engines, tuple(steps[num_first:]), tuple(stretches))


def _in_units(work: Work, unit: int) -> Costs:
    """Return the costs per unit of so many tokens."""
    costs, service = work.costs, work.costs.service
    per_unit = replace(
        service,
        step_s=service.step_s * unit,
        row_s=service.row_s * unit,
        product_s=service.product_s * unit,
        prompt_token_s=service.prompt_token_s * unit,
    )
    return replace(
        costs, service=per_unit, num_tokens=lambda share: min(costs.num_tokens(share), work.max_tokens) / unit
    )


def _rollouts(
    work: Work,
    backend: EngineBackend,
    controller: StalenessController,
    unit: int,
    seed: int,
    log_event: EventCallback,
) -> RolloutManager:
    num_prompts = (work.rules.staleness + 2) * work.rules.groups_per_step
    rest, max_units = (0,) * max(0, round(work.prompt_tokens / unit) - 1), math.ceil(work.max_tokens / unit)
    prompts = [Prompt(f"p{number}", (number, *rest), "") for number in range(num_prompts)]

    def params(number: int, sample: int, turn: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_units, seed=seed * APART + number * work.num_samples + sample)

    return RolloutManager(
        controller,
        backend,
        PromptStream(prompts, seed=0, shuffle=False),
        prompts={prompt.id: prompt for prompt in prompts},
        params=params,
        num_samples=work.num_samples,
        log_event=log_event,
    )


def best_split(splits: Sequence[int], step_s: Callable[[int], float]) -> dict[int, float]:
    """Find the split with the shortest step by bisection; the step time must be unimodal in the split.

    Returns:
        seconds of the evaluated splits, including the best one.
    """
    tried: dict[int, float] = {}

    def cost(place: int) -> float:
        split = splits[place]
        if split not in tried:
            tried[split] = step_s(split)
        return tried[split]

    low, high = 0, len(splits) - 1
    while high > low:
        middle = (low + high) // 2
        if cost(middle) <= cost(middle + 1):
            high = middle
        else:
            low = middle + 1
    cost(low)
    return tried
