"""Simulated runs of a recipe on hypothetical machines, from planned or measured durations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from millrace.config.rollout_section import RolloutConfig
from millrace.errors import PlanError
from millrace.planner.durations import Quantile, constant, given_lognormal, lognormal, planned_service
from millrace.planner.fit import Refuse, choose
from millrace.planner.hardware import Gpu, parse_gpus
from millrace.planner.memory import Workload, cache_bytes_per_token
from millrace.planner.model_shape import ModelShape
from millrace.planner.step_time import step_time
from millrace.rollout.staleness import StalenessPolicy
from millrace.simulation.calibrate import NUM_FIRST, MeasuredRun
from millrace.simulation.simulate import Simulated, Work, simulate
from millrace.simulation.simulated_engine import Costs

# Default standard deviation of the logarithm of answer lengths.
SPREAD = 0.8
# The default accelerator.
USUAL = "H100"
# Number of simulations whose mean predicts a run.
NUM_SEEDS = 8


@dataclass(frozen=True, slots=True)
class Machines:
    """Accelerators, and the durations of the recipe on them.

    Attributes:
        num_gpus: total number.
        work: (staleness, number for sampling, number for training) to the run; None if training does not fit.
        source: description of where the durations come from.
    """

    num_gpus: int
    work: Callable[[int, int, int], Work | None]
    source: str


def check_simulated(rollout: RolloutConfig) -> None:
    """Reject settings that simulated engines do not support.

    Raises:
        PlanError: a setting is unsupported; the message has its name.
    """
    for name, given, plain in (
        ("rollout.partial_rollout", "false", rollout.partial_rollout),
        (
            "rollout.dynamic_sampling_rounds",
            str(rollout.dynamic_sampling_rounds),
            rollout.dynamic_sampling_rounds == 0,
        ),
    ):
        if not plain:
            raise PlanError(f"{name} {given} cannot be simulated; change it for the simulation")


def rules(rollout: RolloutConfig, staleness: int) -> StalenessPolicy:
    """Return the recipe's staleness policy with another bound, without options that have no effect there."""
    size = rollout.prompts_per_step
    if not staleness:
        order = rollout.batch_order if rollout.oversample_groups else "submission"
        return StalenessPolicy(size, 0, order, oversample_groups=rollout.oversample_groups)
    return StalenessPolicy(size, staleness, rollout.batch_order, rollout.stale_policy)


def given_lengths(text: str | None, *, max_tokens: int) -> Quantile:
    """Parse the length distribution of `--lengths`; None gives the default, a quarter of the maximum.

    Raises:
        PlanError: the text is malformed.
    """
    if text is None:
        return lognormal(max_tokens / 4, SPREAD)
    return given_lognormal("--lengths", text)


def mean_tokens(lengths: Quantile, *, max_tokens: int) -> float:
    """Return the mean length of an answer, truncated to the maximum."""
    shares = [(place + 0.5) / 1000 for place in range(1000)]
    return sum(min(lengths(share), max_tokens) for share in shares) / 1000


def planned_machines(
    rollout: RolloutConfig,
    gpus: str,
    lengths: str | None,
    *,
    num_samples: int,
    shape: ModelShape,
    work: Workload,
    refuse: Refuse,
    mfu: float,
) -> Machines:
    """Derive durations from hardware specifications, with the simplest training layout that fits.

    Rewards and weight updates take no time.

    Args:
        rollout: of the recipe.
        gpus: as for `millrace plan`, or a number only: of `USUAL`.
        lengths: of answers; see `given_lengths`.
        num_samples: number of answers to a prompt.
        shape: the model's.
        work: the workload of the recipe.
        refuse: returns why a layout is incompatible with the recipe, or None.
        mfu: fraction of peak FLOP/s that matrix products reach.

    Raises:
        PlanError: the accelerator is unknown.
    """
    taken = ""
    if re.fullmatch(r"[1-9]\d*", gpus):
        taken = f", since --gpus {gpus} names none ({gpus}xH200 does)"
        gpus = f"{gpus}x{USUAL}"
    num_gpus, gpu = parse_gpus(gpus)
    answer_lengths = given_lengths(lengths, max_tokens=rollout.max_tokens)
    mean = mean_tokens(answer_lengths, max_tokens=rollout.max_tokens)
    # Sampling and training use different accelerators, or the same ones in turns.
    whole = replace(work, colocated=True)
    usual = replace(whole, completion_tokens=max(1, round(mean)))
    planned = _Planned(rollout, num_samples, shape, gpu, whole, usual, answer_lengths, refuse, mfu)
    source = f"{num_gpus} x {gpu.name}{taken}, as millrace plan counts at {mfu:.0%} of the peak"
    return Machines(num_gpus, planned.run, f"{source}; {_length_text(mean, rollout.max_tokens)}")


@dataclass(frozen=True, slots=True)
class _Planned:
    """Inputs of planned durations: `longest` is the workload of maximum length, `usual` of mean length."""

    rollout: RolloutConfig
    num_samples: int
    shape: ModelShape
    gpu: Gpu
    longest: Workload
    usual: Workload
    lengths: Quantile
    refuse: Refuse
    mfu: float

    def run(self, staleness: int, num_sampling: int, num_training: int) -> Work | None:
        """Return the run with these numbers of accelerators; None if training does not fit."""
        shape, gpu, usual = self.shape, self.gpu, self.usual
        try:
            fit = choose(shape, self.longest, num_training, gpu.memory_bytes, refuse=self.refuse)
        except PlanError:
            # No layout of this size is compatible with the recipe; another size may be.
            return None
        if not fit.fits:
            return None
        room = fit.memory.cache // cache_bytes_per_token(shape, usual.weight_bytes) // usual.longest
        slots = max(1, min(usual.max_requests, room))
        at_once = max(1, min(slots, (staleness + 1) * usual.num_sequences // num_sampling))
        times = step_time(shape, fit.layout, usual, fit.memory, gpu, mfu=self.mfu)
        token_s = (times.training + times.scoring) / (usual.num_sequences * usual.completion_tokens)
        return Work(
            rules=rules(self.rollout, staleness),
            num_engines=num_sampling,
            num_samples=self.num_samples,
            prompt_tokens=usual.prompt_tokens,
            max_tokens=self.longest.completion_tokens,
            costs=Costs(
                service=planned_service(shape, usual, fit.memory, gpu, mfu=self.mfu, num_running=at_once),
                num_tokens=self.lengths,
                score_s=constant(0.0),
                load_s=constant(0.0),
                recompute=self.rollout.kv_on_update == "recompute",
                slots=slots,
            ),
            train_s=lambda num_tokens, share: num_tokens * token_s,
        )


def measured_machines(
    rollout: RolloutConfig, found: MeasuredRun, gpus: str, lengths: str | None, *, num_samples: int
) -> Machines:
    """Return machines like those of a measured run, each with an engine or a rank.

    Args:
        rollout: of the recipe.
        found: durations of the measured run.
        gpus: number of machines.
        lengths: of answers; see `given_lengths`; None keeps the measured ones.
        num_samples: number of answers to a prompt.

    Raises:
        PlanError: `--gpus` is not a number.
    """
    if not gpus.isdecimal() or int(gpus) < 1:
        raise PlanError(f"--gpus is {gpus!r}; with --from the machines are those of the run: say how many")
    costs = found.costs
    if lengths is not None:
        costs = replace(costs, num_tokens=given_lengths(lengths, max_tokens=rollout.max_tokens))
    mean = mean_tokens(costs.num_tokens, max_tokens=rollout.max_tokens)
    source = f"{gpus} machines like those of the run; {_length_text(mean, rollout.max_tokens)}"
    work = partial(measured_work, rollout, num_samples, replace(found, costs=costs))
    return Machines(int(gpus), work, source)


def _length_text(mean: float, max_tokens: int) -> str:
    return f"{mean:,.0f} tokens an answer on average, {max_tokens:,} at most"


def measured_work(
    rollout: RolloutConfig,
    num_samples: int,
    found: MeasuredRun,
    staleness: int,
    num_engines: int,
    num_ranks: int,
) -> Work:
    """Return the recipe's run with measured durations, on so many similar engines and ranks."""
    return Work(
        rules=rules(rollout, staleness),
        num_engines=num_engines,
        num_samples=num_samples,
        prompt_tokens=1,
        max_tokens=rollout.max_tokens,
        costs=found.costs,
        train_s=partial(found.train_s, num_ranks),
    )


def foreseen(run: MeasuredRun, durations: MeasuredRun) -> list[Simulated]:
    """Simulate a run `NUM_SEEDS` times, with its own durations or those of another run."""
    rollout, num_samples = run.rollout, run.num_samples
    work = measured_work(
        rollout, num_samples, durations, rollout.max_staleness, run.num_engines, run.num_ranks
    )
    return [
        simulate(work, num_batches=run.num_batches, num_first=NUM_FIRST, ends=True, seed=seed)
        for seed in range(NUM_SEEDS)
    ]
