"""How well simulations foresee real runs, and what they say under conditions that others published.

    python benchmarks/simulation.py              # some minutes, writes results/simulation.json
    python benchmarks/simulation.py --quick      # two short runs; writes nothing
    python benchmarks/simulation.py --published  # the published conditions alone; writes nothing

Real runs are those of async_overlap.py: random weights, long-tailed answers, an engine in a process of its
own, one thread each for engine and trainer. Each is foreseen twice: with the durations of its parts as it had
them itself (what is tried is the controller's overlap), and with those of the synchronous run (what a user
would do before changing rollout.max_staleness).

Published ratios of verl: the seconds of a synchronous step and its parts, and those that an asynchronous one
spends on anything but waiting for samples, are those published. Answers have the mean length with which the
planner's training takes as long as the published one, and a long tail; a step of an engine takes as long as
the simulated synchronous sampling needs to take its published time. Foreseen is how long the trainer waits.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from async_overlap import QUICK_SIDES, QUICK_STEPS, train, write_recipe
from common.record import heading, processor, write

from millrace.planner.durations import constant, lognormal, planned_service
from millrace.planner.hardware import GPUS, Gpu
from millrace.planner.layout import Layout
from millrace.planner.memory import Workload, memory_per_rank
from millrace.planner.model_shape import ModelShape
from millrace.planner.step_time import step_time
from millrace.rollout.staleness import StalenessPolicy
from millrace.simulation.calibrate import MeasuredRun, read_measured
from millrace.simulation.from_plan import foreseen
from millrace.simulation.simulate import Simulated, Work, simulate
from millrace.simulation.simulated_engine import Costs

SIDES = ("sync, a core", "async 1", "async 4")
NUM_HALVINGS = 9
MFU = 0.4
GROUPS, SAMPLES, PROMPT = 512, 16, 200
# Deviation of the logarithm of lengths: one answer in twenty is ten times as long as the median.
TAIL = 1.4
# NVIDIA's figures, from memory: memory, bandwidth, bfloat16 and float32 rates.
H20 = Gpu("H20", 96e9, 4.0e12, 148e12, 44e12, "NVIDIA H20 datasheet", ())
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_1_5B = QWEN_7B | {
    "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
    "vocab_size": 151936,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """A comparison of verl's: 512 prompts, 16 answers each; seconds of a step and its parts.

    Attributes:
        name: of the comparison.
        num_gpus: of the synchronous run, which samples and trains on all of them.
        split: accelerators that sample in the asynchronous run.
        max_tokens: of an answer.
        sync_s: of a synchronous step.
        sample_s: of which it samples.
        update_s: of which it trains.
        async_s: of an asynchronous step.
        wait_s: of which it waits for samples.
    """

    name: str
    num_gpus: int
    split: int
    max_tokens: int
    sync_s: float
    sample_s: float
    update_s: float
    async_s: float
    wait_s: float


# verl docs/advance/fully_async.md (18 October 2025) and one_step_off.md (17 July 2025).
VERL = (
    Published("one step off, 16 H20, 4 sample", 16, 4, 20480, 749.0, 321.0, 286.0, 520.0, 45.0),
    Published("fully async, 32 H20, 16 sample", 32, 16, 28672, 790.10, 357.41, 313.81, 294.77, 21.26),
    Published("fully async, 64 H20, 32 sample", 64, 32, 28672, 365.28, 150.72, 133.41, 189.26, 28.46),
    Published("fully async, 128 H20, 64 sample", 128, 64, 28672, 356.30, 177.85, 113.81, 150.63, 33.14),
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """A model on accelerators of one kind, and what it is asked: 512 prompts, 16 answers each.

    Attributes:
        shape: of the model.
        gpu: the accelerator.
        max_tokens: of an answer.
        mean_tokens: of an answer.
    """

    shape: ModelShape
    gpu: Gpu
    max_tokens: int
    mean_tokens: float

    def asked(self) -> Workload:
        """For the planner."""
        mean = min(round(self.mean_tokens), self.max_tokens)
        return Workload(PROMPT, mean, GROUPS * SAMPLES, SAMPLES, 32768, 2, 2, 2, checkpointing="full")

    def train_s(self, num_ranks: int) -> float:
        """The planner's seconds of an update."""
        asked, layout = self.asked(), Layout(dp_shard=num_ranks)
        memory = memory_per_rank(self.shape, layout, asked, self.gpu.memory_bytes)
        return step_time(self.shape, layout, asked, memory, self.gpu, mfu=MFU).training

    def work(self, staleness: int, num_engines: int, step_s: float | None = None) -> Work:
        """A run; training takes no time.

        Args:
            staleness: its bound.
            num_engines: each on one accelerator.
            step_s: of an engine, instead of the planner's.
        """
        asked = self.asked()
        memory = memory_per_rank(self.shape, Layout(dp_shard=num_engines), asked, self.gpu.memory_bytes)
        service = planned_service(self.shape, asked, memory, self.gpu, mfu=MFU, num_running=1)
        if step_s is not None:
            service = replace(service, step_s=step_s)
        # The mean of a lognormal distribution is exp(spread^2 / 2) medians.
        lengths = lognormal(self.mean_tokens / math.exp(TAIL**2 / 2), TAIL)
        return Work(
            rules=StalenessPolicy(GROUPS, staleness),
            num_engines=num_engines,
            num_samples=SAMPLES,
            prompt_tokens=PROMPT,
            max_tokens=self.max_tokens,
            costs=Costs(
                service=service,
                num_tokens=lengths,
                score_s=constant(0.0),
                load_s=constant(0.0),
                recompute=True,
                slots=1024,
            ),
            train_s=lambda num_tokens, share: 0.0,
        )


def run(one: Work, train_s: float) -> Simulated:
    """Batches, each trained on for so long."""
    wave = one.rules.staleness + 1
    return simulate(replace(one, train_s=lambda *_: train_s), num_batches=3 * wave, num_first=wave)


def halved(seconds: Callable[[float], float], wanted_s: float, low: float, high: float) -> float:
    """Where a rising function takes a value, by halving on a logarithmic scale."""
    for _ in range(NUM_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < wanted_s else (low, middle)
    return (low * high) ** 0.5


def verl(case: Published) -> dict[str, Any]:
    """What a simulation that agrees with the synchronous step says of the asynchronous one."""
    given = Conditions(ModelShape.of(QWEN_7B), H20, case.max_tokens, 1000.0)
    mean = halved(
        lambda tokens: replace(given, mean_tokens=tokens).train_s(case.num_gpus),
        case.update_s,
        50.0,
        10_000.0,
    )
    given = replace(given, mean_tokens=mean)
    step_s = halved(
        lambda seconds: run(given.work(0, case.num_gpus, seconds), 0.0).step_s, case.sample_s, 1e-3, 0.1
    )
    found = run(given.work(1, case.split, step_s), case.async_s - case.wait_s)
    return {
        "name": case.name,
        "mean_tokens": round(mean),
        "engine_step_s": step_s,
        "published_async_s": case.async_s,
        "simulated_async_s": found.step_s,
        "published_ratio": case.sync_s / case.async_s,
        "simulated_ratio": case.sync_s / found.step_s,
        "published_wait_s": case.wait_s,
        "simulated_wait_s": found.wait_s + found.weight_sync_s,
    }


def areal() -> dict[str, Any]:
    """16 nodes, R1-Distill-Qwen-1.5B: 1000 steps took 41.0 h synchronously and 14.8 h ahead.

    Its ablation has 512 prompts with 16 answers of at most 8192 tokens. Accelerators (8 of H100's figures a
    node), their split (three quarters sample), lengths and training are assumed or the planner's; an engine's
    step is as for verl.
    """
    given, sync_s = Conditions(ModelShape.of(QWEN_1_5B), GPUS["H100"], 8192, 4000.0), 41.0 * 3.6
    sample_s = sync_s - given.train_s(128)
    step_s = halved(lambda seconds: run(given.work(0, 128, seconds), 0.0).step_s, sample_s, 1e-3, 0.1)
    found = run(given.work(4, 96, step_s), given.train_s(32))
    return {
        "name": "AReaL 1.5B, 128 GPUs, 96 sample",
        "engine_step_s": step_s,
        "train_s": given.train_s(32),
        "published_async_s": 14.8 * 3.6,
        "simulated_async_s": found.step_s,
        "published_ratio": 41.0 / 14.8,
        "simulated_ratio": sync_s / found.step_s,
        "simulated_wait_s": found.wait_s + found.weight_sync_s,
    }


def calibrate(steps: int, *, quick: bool = False) -> dict[str, Any]:
    """Real runs and how far they were foreseen."""
    runs: dict[str, MeasuredRun] = {}
    for side in QUICK_SIDES if quick else SIDES:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            runs[side] = read_measured(train(write_recipe(folder, side, steps, quick=quick), folder / "runs"))
    sync, found = runs[SIDES[0]], {}
    for side, one in runs.items():
        real_s = one.step["step_s"]
        own_s, others_s = (fmean(each.step_s for each in foreseen(one, of)) for of in (one, sync))
        found[side] = {
            "measured_s": real_s,
            "own_durations_s": own_s,
            "own_error": own_s / real_s - 1,
            "sync_durations_s": others_s,
            "sync_error": others_s / real_s - 1,
        }
        print(
            f"{side:14s} measured {real_s:7.3f} s a step; with its own durations {own_s:7.3f} "
            f"({own_s / real_s - 1:+.1%}), with those of the synchronous run {others_s:7.3f} "
            f"({others_s / real_s - 1:+.1%})",
            flush=True,
        )
    return found


def published() -> list[dict[str, Any]]:
    """Every published comparison."""
    found = []
    for case in VERL:
        found.append(verl(case))
        one = found[-1]
        ratios = f"published {one['published_ratio']:.2f}x, simulated {one['simulated_ratio']:.2f}x"
        waits = f"waiting {one['published_wait_s']:.0f} s, simulated {one['simulated_wait_s']:.0f} s"
        fitted = f"{one['mean_tokens']} tokens, {1000 * one['engine_step_s']:.1f} ms an engine's step"
        print(f"{one['name']:32s} {ratios}; {waits}; {fitted}", flush=True)
    found.append(areal())
    one = found[-1]
    ratios = f"published {one['published_ratio']:.2f}x, simulated {one['simulated_ratio']:.2f}x"
    waits = f"training {one['train_s']:.0f} s, waiting {one['simulated_wait_s']:.0f} s, both simulated"
    print(f"{one['name']:32s} {ratios}; {waits}; {1000 * one['engine_step_s']:.1f} ms an engine's step")
    return found


def main() -> None:
    """Measure, print, and write results/simulation.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="two short runs, nothing published; nothing is written"
    )
    parser.add_argument("--published", action="store_true", help="no real runs; nothing is written")
    given = parser.parse_args()
    if given.published:
        published()
        return
    machine = f"{processor()}, {len(os.sched_getaffinity(0))} cores"
    print(machine)
    if given.quick:
        calibrate(QUICK_STEPS, quick=True)
        return
    runs = calibrate(30)
    written = {
        **heading("simulation", machine, "torch", "millrace-rl"),
        "runs": runs,
        "published": published(),
    }
    write("simulation", written)


if __name__ == "__main__":
    main()
