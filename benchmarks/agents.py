"""What episodes with environments cost: controller, tools with a tail, cache, sandbox and event log.

    python benchmarks/agents.py            # some minutes, writes results/agents.json
    python benchmarks/agents.py --quick    # a fraction of it, writes nothing

- `controller`: microseconds of the processor for a turn of an episode, with 10, 100 and 1,000 episodes in
  flight. Engines and environments are simulated on a virtual clock, and their own time is left out: it is a
  fraction of the wall time, which the processor's time of the whole is divided by, since a reading of the
  processor's clock may take longer than a turn. The event log goes to a file; its part of that time and its
  bytes stand beside it.
- `tools`: 1,000 episodes of 5 turns, tools that take 1 s on average with a long tail (virtual clock). The
  bound is the longer of two: the same run with tools that take no time, and the longest chain of tools and
  tokens of one episode that has an engine of its own.
- `idle`: the fraction of the time in which an engine runs no request, and the mean fraction of its slots
  without one, where twice as many episodes are in flight as it has slots, and a tool takes as long as a turn
  (virtual clock, 1,024 slots as in the quickstart's recipes).
- `prefill`: prompt tokens that the paged engine computes over those that no turn before has computed, with
  observations of several lengths. The engine is real.
- `sandbox`: programs per second, each with an empty work folder, and their 99th percentile; see sandbox.py.

Each figure has its aim beside it. Figures that miss it stay as they are.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import sandbox
import torch
from common.record import heading, processor, write

from millrace.data.prompts import PromptStream
from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment
from millrace.environments.sandbox.execution import SandboxError
from millrace.eventlog.log import EventLog, check_log, read_events
from millrace.inference.engine import PagedEngine
from millrace.models.decoding import prepare
from millrace.models.load import fresh_config, fresh_model
from millrace.planner.durations import Quantile, StepCost, constant, exponential, lognormal
from millrace.rollout.episodes import EpisodeRules
from millrace.rollout.manager import RolloutManager
from millrace.rollout.recorder import RecordingBackend
from millrace.rollout.staleness import EventCallback, StalenessController, StalenessPolicy, discard_event
from millrace.simulation.simulated_backend import SimulatedBackend
from millrace.simulation.simulated_engine import Costs
from millrace.types import Prompt, SamplingParams

NUM_TURNS, NUM_SAMPLES, DEADLINE_S = 5, 10, 1e6
TOKENS, OBSERVED = 20, 12  # of a completion, and of a reply
IN_FLIGHT = (10, 100, 1000)
RULES = EpisodeRules(
    seed=0,
    max_turns=NUM_TURNS,
    max_tokens=4096,
    ends_at_length=False,
    attempts=2,
    invalid_score=0.0,
    scored=False,
)
# exp(0.5) medians are the mean of a lognormal distribution of spread 1; one tool in a thousand takes 13 s.
TOOL_SPREAD = 1.0
TOOL_S = lognormal(math.exp(-(TOOL_SPREAD**2) / 2), TOOL_SPREAD)
SERVICE = StepCost(step_s=0.01, row_s=1e-4)
AIMS = {
    "controller_us_per_turn": "at most 300, the same from 10 to 1,000 episodes in flight",
    "tools_fraction_of_bound": "at least 0.9",
    "idle_fraction": "at most 0.1",
    "prefill_computed_over_new": "at most 1.05",
    "sandbox": "at least 500 starts per second, at most 3 ms at the 99th percentile",
}
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 384, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "initializer_range": 0.08,
}  # fmt: skip


def reply(step: StepEnvironment) -> EnvironmentReply:
    """An environment of `NUM_TURNS` turns."""
    turn = len(step.actions)
    if turn == 0:
        return EnvironmentReply(step.id, step.prompt.token_ids)
    return EnvironmentReply(step.id, (turn,) * OBSERVED, done=turn == NUM_TURNS, score=float(turn % 2))


def manager(
    backend: Any, num_groups: int, num_batches: int, log_event: EventCallback, *, staleness: int = 0
) -> RolloutManager:
    """The controller of a run with episodes, over any backend."""
    rules = StalenessPolicy(groups_per_step=num_groups, staleness=staleness)
    prompts = [Prompt(f"train:{i}", (i, *range(39)), "") for i in range(5000)]
    controller = StalenessController(rules, num_batches=num_batches, log_event=log_event)
    params = SamplingParams(max_tokens=TOKENS)
    return RolloutManager(
        controller,
        backend,
        PromptStream(prompts, seed=0, shuffle=False),
        prompts={prompt.id: prompt for prompt in prompts},
        params=lambda number, sample, turn: replace(
            params, seed=(number * NUM_SAMPLES + sample) * NUM_TURNS + turn
        ),
        num_samples=NUM_SAMPLES,
        episode_rules=RULES,
        log_event=log_event,
    )


class Stopwatch:
    """Wall seconds spent in functions that it wraps."""

    seconds = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def call(*given: Any, **named: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.seconds += time.perf_counter() - begun_s

        return call


def controller(num_flying: int, num_turns: int, folder: Path) -> dict[str, Any]:
    """What a turn costs: so many episodes in flight, and about so many turns in all."""
    num_groups = num_flying // NUM_SAMPLES
    num_batches = max(2, num_turns // (num_flying * NUM_TURNS))
    costs = Costs(num_tokens=constant(TOKENS), environment_s=exponential(1.0))
    backend, simulated, logged = SimulatedBackend(4, costs, environment=reply), Stopwatch(), Stopwatch()
    for command in ("execute", "wait", "poll"):
        setattr(backend, command, simulated(getattr(backend, command)))
    path = folder / f"{num_flying}.log"
    log = EventLog(path, backend.now)
    add = logged(log.add)
    rules = StalenessPolicy(groups_per_step=num_groups, staleness=0)
    log.add("begin", rules=asdict(rules), num_batches=num_batches)
    rollouts = manager(RecordingBackend(backend, add), num_groups, num_batches, add)
    num_done = num_tokens = 0
    begun_s, wall_s = time.process_time(), time.perf_counter()
    rollouts.begin(0)
    for batch in range(num_batches):
        for group in rollouts.next_batch(DEADLINE_S).groups:
            turns = [turn for one in group.trajectories for turn in one.turns]
            num_done += len(turns)
            num_tokens += sum(len(turn.completion.token_ids) for turn in turns)
        rollouts.update_weights(batch + 1)
        rollouts.wait_for_weights(DEADLINE_S)
    cpu_s, wall_s = time.process_time() - begun_s, time.perf_counter() - wall_s
    controller_s = wall_s - simulated.seconds
    log.close()
    assert check_log(read_events(path)) == []
    return {
        "in_flight": num_flying,
        "turns": num_done,
        "us_per_turn": 1e6 * cpu_s * controller_s / wall_s / num_done,
        "log_fraction": logged.seconds / controller_s,
        "log_bytes_per_turn": path.stat().st_size / num_done,
        "log_bytes_per_token": path.stat().st_size / num_tokens,
    }


def play(tool_s: Quantile, num_episodes: int) -> tuple[float, float]:
    """Seconds until all episodes have ended, and of the longest chain of one of them alone."""
    tools: dict[str, float] = defaultdict(float)
    playing = [""]

    def step(command: StepEnvironment) -> EnvironmentReply:
        playing[0] = command.episode
        return reply(command)

    def tool(fraction: float) -> float:
        # The begin of an episode is no tool.
        seconds = tool_s(fraction)
        tools[playing[0]] += seconds
        return seconds

    costs = Costs(service=SERVICE, num_tokens=constant(TOKENS), environment_s=tool)
    backend = SimulatedBackend(4, costs, environment=step)
    rollouts = manager(backend, num_episodes // NUM_SAMPLES, 1, discard_event)
    rollouts.begin(0)
    begun_s = backend.now()
    rollouts.next_batch(DEADLINE_S)
    alone_s = NUM_TURNS * TOKENS * SERVICE.token_s(1)
    return backend.now() - begun_s, max(tools.values()) + alone_s


def tools(num_episodes: int) -> dict[str, Any]:
    """How near to its bound a batch of episodes is, whose tools have a long tail."""
    seconds, chain_s = play(TOOL_S, num_episodes)
    engine_s, _ = play(constant(0.0), num_episodes)
    bound_s = max(engine_s, chain_s)
    return {
        "episodes": num_episodes,
        "engine_s": engine_s,
        "longest_chain_s": chain_s,
        "seconds": seconds,
        "fraction_of_bound": bound_s / seconds,
    }


def idle(num_slots: int, over: int, num_batches: int) -> dict[str, Any]:
    """How much of an engine's time and slots is unused while tools run."""
    stretches: list[tuple[float, float, int]] = []
    # With full slots a turn takes so long, and so does a tool.
    turn_s = TOKENS * SERVICE.token_s(num_slots)
    costs = Costs(
        service=SERVICE,
        num_tokens=constant(TOKENS),
        environment_s=exponential(turn_s),
        slots=num_slots,
        load_s=constant(0.0),
    )
    backend = SimulatedBackend(
        1, costs, environment=reply, watch=lambda _, begin_s, end_s, n: stretches.append((begin_s, end_s, n))
    )
    num_groups = num_slots * over // NUM_SAMPLES // 2
    # The trainer takes no time: at staleness 1 two batches are in flight.
    rollouts = manager(backend, num_groups, num_batches, discard_event, staleness=1)
    rollouts.begin(0)
    taken_s = []
    for batch in range(num_batches):
        rollouts.next_batch(DEADLINE_S)
        taken_s.append(backend.now())
        rollouts.update_weights(batch + 1)
    # The last two batches have none behind them.
    first_s, last_s = taken_s[0], taken_s[-3]
    busy_s = slots_s = 0.0
    for begin_s, end_s, num_running in stretches:
        seconds = max(0.0, min(end_s, last_s) - max(begin_s, first_s))
        busy_s += seconds * (num_running > 0)
        slots_s += seconds * num_running
    span_s = last_s - first_s
    return {
        "slots": num_slots,
        "over_subscription": over,
        "idle_fraction": max(0.0, 1 - busy_s / span_s),
        "unused_slots_fraction": 1 - slots_s / (span_s * num_slots),
    }


def prefill(num_groups: int, num_samples: int, num_observed: int, block_size: int) -> dict[str, Any]:
    """Prompt tokens computed over new ones, in episodes on the real engine."""
    fields = dict(SHAPE)
    model = fresh_model(
        fresh_config("qwen3", fields, vocab_size=256, eos_token_id=0), seed=0, dtype=torch.float32
    )
    model.requires_grad_(False)
    prepare(model)
    engine = PagedEngine(model, lambda tokens: "", max_cache_tokens=131_072, block_size=block_size)
    rng, num_new = random.Random(0), 0
    prompts = [[rng.randrange(1, 256) for _ in range(64)] for _ in range(num_groups)]
    contexts = [list(prompt) for prompt in prompts for _ in range(num_samples)]
    num_new += sum(map(len, prompts))
    for turn in range(NUM_TURNS):
        params = [
            SamplingParams(max_tokens=TOKENS, seed=turn * len(contexts) + place)
            for place in range(len(contexts))
        ]
        done = engine.generate(contexts, params)
        if turn + 1 == NUM_TURNS:
            break
        for context, completion in zip(contexts, done, strict=True):
            length = rng.randint(num_observed // 2, num_observed * 3 // 2)
            context += [*completion.token_ids, *(rng.randrange(1, 256) for _ in range(length))]
            # The last token of a completion was sampled, and not computed.
            num_new += length + 1
    stats = engine.stats()
    computed = stats.prefix_queries - stats.prefix_hits
    return {
        "mean_observed_tokens": num_observed,
        "block_size": block_size,
        "computed": computed,
        "new": num_new,
        "computed_over_new": computed / num_new,
        "hit_fraction": stats.prefix_hits / stats.prefix_queries,
    }


def sandboxes(num_runs: int) -> dict[str, Any]:
    """Each kind that this machine has, and the names of the others; see sandbox.py."""
    found: dict[str, Any] = {"lacking": []}
    for kind in sandbox.KINDS:
        try:
            found[kind] = sandbox.measure(kind, num_runs)
        except SandboxError as error:
            print(f"{kind}: {error}")
            found["lacking"].append(kind)
    return found


def shown(name: str, measured: Callable[[], Any]) -> Any:
    """Measure, and print it with the seconds it took."""
    begun_s = time.perf_counter()
    found = measured()
    rows = found if isinstance(found, list) else [found]
    print(f"{name} ({time.perf_counter() - begun_s:.0f} s)")
    for row in rows:
        print("   ", ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return found


def measure(*, quick: bool) -> dict[str, Any]:
    """Every figure."""
    num_turns, num_runs, num_episodes = (1000, 50, 100) if quick else (20_000, 1000, 1000)
    sizes = IN_FLIGHT[:2] if quick else IN_FLIGHT
    lengths = ((12, 16),) if quick else ((12, 16), (128, 16), (12, 4), (128, 4))
    num_groups = 2 if quick else 16
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "controller": shown(
                "controller", lambda: [controller(size, num_turns, Path(folder)) for size in sizes]
            )
        }
    found["tools"] = shown("tools", lambda: tools(num_episodes))
    found["idle"] = shown(
        "idle", lambda: [idle(100 if quick else 1024, over, 5 if quick else 10) for over in (1, 2)]
    )
    found["prefill"] = shown("prefill", lambda: [prefill(num_groups, 8, *length) for length in lengths])
    found["sandbox"] = shown("sandbox", lambda: sandboxes(num_runs))
    return found


def main() -> None:
    """Measure and write; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fraction of it; nothing is written")
    given = parser.parse_args()
    load = f", load {os.getloadavg()[0]:.0f}"
    found = measure(quick=given.quick)
    if not given.quick:
        about = heading("agents", f"{processor()}, {os.cpu_count()} cores{load}")
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "millrace": metadata.version("millrace-rl"),
        }
        write("agents", {**about, "versions": versions, "aims": AIMS, **found})


if __name__ == "__main__":
    main()
