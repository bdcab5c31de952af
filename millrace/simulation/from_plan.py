"""A recipe on machines that are not there: its run for simulations, from planned or measured durations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from millrace.config.settings import RunConfig
from millrace.planner.errors import PlanError
from millrace.planner.fit import Refuse, choose
from millrace.planner.hardware import Gpu, parse_gpus
from millrace.planner.memory import Workload, cache_bytes_per_token
from millrace.planner.model_shape import ModelShape
from millrace.planner.simulate import Quantile, constant, lognormal, planned_service
from millrace.planner.step_time import step_time
from millrace.rollout.staleness import FlowRules
from millrace.simulation.calibrate import NUM_FIRST, Measured
from millrace.simulation.engine import Costs
from millrace.simulation.simulate import Simulated, Work, simulate

# Deviation of the logarithm of answers' lengths, where nothing else is known.
SPREAD = 0.8
# The accelerators that are meant where nobody says which.
USUAL = "H100"
# Simulations of a run that is compared with them: their mean is foreseen.
NUM_SEEDS = 8


@dataclass(frozen=True, slots=True)
class Machines:
    """Accelerators, and the durations of the recipe on them.

    Attributes:
        num_gpus: of all.
        work: (staleness, how many sample, how many train) to the run; None where it cannot be trained.
        source: where durations come from, in words.
    """

    num_gpus: int
    work: Callable[[int, int, int], Work | None]
    source: str


def check_simulated(config: RunConfig) -> None:
    """Refuse what the virtual engines do not do.

    Raises:
        PlanError: with the setting.
    """
    flow, rollout = config.flow, config.rollout
    for name, given, plain in (
        ("flow.interrupt", "false", flow.interrupt),
        ("rollout.refill_rounds", str(rollout.refill_rounds), rollout.refill_rounds == 0),
    ):
        if not plain:
            raise PlanError(f"{name} {given} cannot be simulated; change it for the simulation")


def rules(config: RunConfig, staleness: int) -> FlowRules:
    """The recipe's flow at another bound; what has no meaning there is left out."""
    flow, size = config.flow, config.rollout.prompts_per_step
    if not staleness:
        order = flow.order if flow.spare_groups else "submission"
        return FlowRules(size, 0, order, spare_groups=flow.spare_groups)
    return FlowRules(size, staleness, flow.order, flow.stale)


def num_samples(config: RunConfig) -> int:
    """Answers to a prompt, a greedy one among them where the recipe compares with it."""
    return config.rollout.samples_per_prompt + (config.advantage.kind == "greedy_baseline")


def given_lengths(config: RunConfig, text: str | None) -> Quantile:
    """The distribution of `--lengths`, or the one that is taken without.

    Raises:
        PlanError: it is not of that form.
    """
    if text is None:
        return lognormal(config.rollout.max_tokens / 4, SPREAD)
    try:
        median, spread = (float(word) for word in text.split(","))
        return lognormal(median, spread)
    except ValueError:
        raise PlanError(
            f"--lengths is {text!r}; write the median and the deviation of the logarithm, such as 3000,0.8"
        ) from None


def mean_tokens(config: RunConfig, lengths: Quantile) -> float:
    """Of an answer, cut at the longest."""
    shares = [(place + 0.5) / 1000 for place in range(1000)]
    return sum(min(lengths(share), config.rollout.max_tokens) for share in shares) / 1000


def planned_machines(
    config: RunConfig,
    gpus: str,
    lengths: str | None,
    *,
    shape: ModelShape,
    work: Workload,
    refuse: Refuse,
    mfu: float,
) -> Machines:
    """Durations from the figures of the hardware; the layout of those that train is the simplest that fits.

    Rewards and the hand-over of weights take no time.

    Args:
        config: the recipe.
        gpus: as for `millrace plan`, or how many alone: of `USUAL`.
        lengths: of answers; see `given_lengths`.
        shape: the model's.
        work: what the recipe asks for.
        refuse: why the recipe does not go with a layout; None where it does.
        mfu: the share of the peak that products reach.

    Raises:
        PlanError: there is no such accelerator.
    """
    taken = ""
    if re.fullmatch(r"[1-9]\d*", gpus):
        taken = f", since --gpus {gpus} names none ({gpus}xH200 does)"
        gpus = f"{gpus}x{USUAL}"
    num_gpus, gpu = parse_gpus(gpus)
    drawn = given_lengths(config, lengths)
    mean = mean_tokens(config, drawn)
    # Sampling and training are on different accelerators, or there one after the other.
    whole = replace(work, take_turns=True)
    usual = replace(whole, completion_tokens=max(1, round(mean)))
    planned = _Planned(config, shape, gpu, whole, usual, drawn, refuse, mfu)
    source = f"{num_gpus} x {gpu.name}{taken}, as millrace plan counts at {mfu:.0%} of the peak"
    return Machines(num_gpus, planned.run, f"{source}; {_told(config, mean)}")


@dataclass(frozen=True, slots=True)
class _Planned:
    """What planned durations follow from: `longest` with the longest answers, `usual` with the mean ones."""

    config: RunConfig
    shape: ModelShape
    gpu: Gpu
    longest: Workload
    usual: Workload
    lengths: Quantile
    refuse: Refuse
    mfu: float

    def run(self, staleness: int, num_sampling: int, num_training: int) -> Work | None:
        """The recipe where so many sample and so many train."""
        shape, gpu, usual = self.shape, self.gpu, self.usual
        try:
            fit = choose(shape, self.longest, num_training, gpu.memory_bytes, refuse=self.refuse)
        except PlanError:
            # The recipe goes with no layout of so few; others may do.
            return None
        if not fit.fits:
            return None
        room = fit.memory.cache // cache_bytes_per_token(shape, usual.weight_bytes) // usual.longest
        slots = max(1, min(usual.max_requests, room))
        at_once = max(1, min(slots, (staleness + 1) * usual.num_sequences // num_sampling))
        times = step_time(shape, fit.layout, usual, fit.memory, gpu, mfu=self.mfu)
        token_s = (times.training + times.scoring) / (usual.num_sequences * usual.completion_tokens)
        return Work(
            rules=rules(self.config, staleness),
            num_engines=num_sampling,
            num_samples=num_samples(self.config),
            prompt_tokens=usual.prompt_tokens,
            max_tokens=self.longest.completion_tokens,
            costs=Costs(
                service=planned_service(shape, usual, fit.memory, gpu, mfu=self.mfu, num_running=at_once),
                num_tokens=self.lengths,
                judge_s=constant(0.0),
                load_s=constant(0.0),
                recompute=self.config.flow.kv == "recompute",
                slots=slots,
            ),
            train_s=lambda num_tokens, share: num_tokens * token_s,
        )


def measured_machines(config: RunConfig, found: Measured, gpus: str, lengths: str | None) -> Machines:
    """So many machines as those that the run had, each with an engine or a rank.

    Raises:
        PlanError: `--gpus` is not a number.
    """
    if not gpus.isdecimal() or int(gpus) < 1:
        raise PlanError(f"--gpus is {gpus!r}; with --from the machines are those of the run: say how many")
    costs = found.costs
    if lengths is not None:
        costs = replace(costs, num_tokens=given_lengths(config, lengths))
    mean = mean_tokens(config, costs.num_tokens)
    source = f"{gpus} machines like those of the run; {_told(config, mean)}"
    return Machines(int(gpus), partial(measured_work, config, replace(found, costs=costs)), source)


def _told(config: RunConfig, mean: float) -> str:
    return f"{mean:,.0f} tokens an answer on average, {config.rollout.max_tokens:,} at most"


def measured_work(
    config: RunConfig, found: Measured, staleness: int, num_engines: int, num_ranks: int
) -> Work:
    """The recipe with the durations of a run, on so many engines and ranks as that had."""
    return Work(
        rules=rules(config, staleness),
        num_engines=num_engines,
        num_samples=num_samples(config),
        prompt_tokens=1,
        max_tokens=config.rollout.max_tokens,
        costs=found.costs,
        train_s=partial(found.train_s, num_ranks),
    )


def foreseen(run: Measured, durations: Measured) -> list[Simulated]:
    """Simulations of a run, with the durations of its own parts or of another run's."""
    staleness = run.config.flow.staleness
    work = measured_work(run.config, durations, staleness, run.num_engines, run.num_ranks)
    return [
        simulate(work, num_batches=run.num_batches, num_first=NUM_FIRST, ends=True, seed=seed)
        for seed in range(NUM_SEEDS)
    ]
