"""The folder of a run that never was: a simulation, written down as a real run would be."""

from __future__ import annotations

import json

from millrace.planner.durations import StepCost, constant, exponential, lognormal
from millrace.rollout.staleness import StalenessPolicy
from millrace.simulation import simulate as simulation
from millrace.simulation.simulate import Work, simulate
from millrace.simulation.simulated_backend import SimulatedBackend
from millrace.simulation.simulated_engine import Costs
from tests.event_logs import write_events

RECIPE = """steps: {steps}
device: cpu
data: {{train: sums.jsonl, eval_size: 8}}
rollout: {{prompts_per_step: 4, samples_per_prompt: 3, max_tokens: 64, max_staleness: {staleness}}}
engine: {{num_engines: {processes}, max_num_seqs: 60}}
rewards: [{{kind: exact}}]
"""
COSTS = Costs(
    service=StepCost(step_s=0.5, row_s=0.03, prompt_token_s=0.2),
    num_tokens=lognormal(20, 0.6),
    score_s=exponential(0.4),
    load_s=constant(1.25),
    message_s=constant(0.0),
    slots=60,
)
OTHER_S = 0.25


def write_run(folder, monkeypatch, *, staleness=0, steps=30, processes=1, num_engines=1):
    """The folder of a run that a simulation went through."""
    clocks, events = [], []

    class Clocked(SimulatedBackend):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            clocks.append(self)

    def log_event(kind, /, **facts):
        events.append({"kind": kind, "time_s": clocks[-1].now(), **facts})

    work = Work(
        StalenessPolicy(4, staleness),
        num_engines,
        3,
        5,
        64,
        COSTS,
        lambda num_tokens, share: 0.1 * num_tokens,
    )
    with monkeypatch.context() as patch:
        patch.setattr(simulation, "SimulatedBackend", Clocked)
        run = simulate(work, num_batches=steps, ends=True, log_event=log_event)
    records = [{"stage": "evaluation", "during": "reinforcement", "step": 0}]
    for number, step in enumerate(run.steps, start=1):
        wait_s, train_s = step.taken_s - step.begin_s, step.trained_s - step.taken_s
        weight_sync_s = step.end_s - step.trained_s
        times = {"sample": wait_s, "train": train_s, "weight_sync": weight_sync_s, "other": OTHER_S}
        records.append(
            {"stage": "reinforcement", "step": number, "tokens/sampled": step.num_tokens}
            | {f"time/{name}_s": seconds for name, seconds in times.items()}
            | {"time/step_s": sum(times.values()), "staleness/mean": sum(step.staleness) / 4}
        )
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(
        RECIPE.format(steps=steps, processes=processes, staleness=staleness), encoding="utf-8"
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records), "utf-8")
    write_events(folder / "events.log", events)
    return run
