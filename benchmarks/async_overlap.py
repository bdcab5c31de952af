"""What sampling beside training saves, with long-tailed answers: synchronous against staleness 1 and 4.

    python benchmarks/async_overlap.py            # about 14 minutes, writes results/async_overlap.json
    python benchmarks/async_overlap.py --quick    # a short turn of two sides, writes nothing

Every run is `millrace train` with random weights and answers that end where the stop token is drawn, so that
their lengths have an exponential tail. Sides take turns, and medians over the turns are told:

- `sync`: staleness 0, the engine in a process of its own, all cores for whoever is at work.
- `sync, a core`: the same with one thread. `async n`: staleness n; sampling and training have a core each.
- `async 4, keys kept`: with `rollout.kv_on_update` keep, running completions keep their KV cache.
- `async 4, uninterrupted`: with `rollout.partial_rollout` false, new weights wait for running completions.
- `sampling`: `async 4` where nobody trains and no weights change. `training`: its seconds in `sync, a core`.
  Each has a core, and nothing else is at work.

A batch at best costs max(sampling, training). The fraction of the overlap that was reached is
`(sync - async) / (sync - max(sampling, training))`. An update in flight costs an engine the time between the
answers before and after it, less its usual time for that many steps. The first and the last batches of a run
do not count: those start together, and these are followed by none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.record import heading, processor, write

from millrace.config.recipe import load_recipe
from millrace.data.prompts import PromptStream
from millrace.eventlog.log import check_log, read_events
from millrace.observability.files import read_json_lines
from millrace.rollout.batches import rollouts_of
from millrace.run.build import build

DEADLINE_S = 600.0
GROUPS, SAMPLES, LONGEST = 8, 8, 256
# Batches of a run that do not count: at its beginning, while the engine fills up, and at its end.
FIRST, LAST = 5, 5
RECIPE: dict[str, Any] = {
    "device": "cpu",
    "loggers": [],
    "data": {"eval_size": 2},
    "tokenizer": {"vocab_size": 64, "alphabet": "seen"},
    "model": {
        "shape": {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 384,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            # Nearly the same chance for every token, the stop token among them.
            "initializer_range": 0.02,
        }
    },
    "rollout": {"prompts_per_step": GROUPS, "samples_per_prompt": SAMPLES, "max_tokens": LONGEST},
    # Half of the answers are right, whatever the policy: batches are trained on, and stay alike.
    "rewards": [{"kind": "format", "pattern": ".*[0-9a-m]"}],
    "policy": {"optimizer": {"learning_rate": 1e-7}},
    "evaluation": {"every": 10_000},
    "checkpoint": {"every": 10_000},
}
SIDES: dict[str, dict[str, Any]] = {
    "sync": {"engine": {"num_engines": 1}},
    "sync, a core": {"engine": {"num_engines": 1}, "threads": 1},
    "async 1": {"rollout": {"max_staleness": 1}, "threads": 1},
    "async 4": {"rollout": {"max_staleness": 4}, "threads": 1},
    "async 4, keys kept": {"rollout": {"max_staleness": 4, "kv_on_update": "keep"}, "threads": 1},
    "async 4, uninterrupted": {"rollout": {"max_staleness": 4, "partial_rollout": False}, "threads": 1},
}
# Of a quick run: its sides, what it changes of the recipe, its batches, and those of them that do not count.
QUICK_SIDES = ("sync, a core", "async 1")
QUICK: dict[str, Any] = {
    "model": {"shape": RECIPE["model"]["shape"] | {"hidden_size": 32, "num_hidden_layers": 2}},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 32},
}
QUICK_STEPS, QUICK_FIRST, QUICK_LAST = 5, 1, 1


def laid_over(tree: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the settings of another one; what that does not name stays."""
    below = {key: value for key, value in change.items() if isinstance(value, dict)}
    return tree | change | {key: laid_over(tree.get(key, {}), value) for key, value in below.items()}


def write_recipe(folder: Path, side: str, steps: int, *, quick: bool = False) -> Path:
    """The recipe of a side, with its data beside it."""
    data = folder / "data.jsonl"
    # Every letter and digit once, so that the vocabulary is full of them.
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    rows = [{"question": letters[n:] + letters[:n], "answer": letters[n]} for n in range(len(letters))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tree = RECIPE
    for change in (QUICK if quick else {}, SIDES[side], {"steps": steps, "data": {"train": str(data)}}):
        tree = laid_over(tree, change)
    path = folder / f"{side.replace(', ', '-').replace(' ', '-')}.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def train(recipe: Path, folder: Path) -> Path:
    """Run a recipe to its end; the folder of the run."""
    command = [sys.executable, "-m", "millrace.cli.main", "train", str(recipe), f"output={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (run,) = (path for path in folder.iterdir() if (path / "summary.json").is_file())
    return run


def measure(run: Path, first: int = FIRST, last: int = LAST) -> dict[str, float]:
    """Seconds of a batch, and where they go, without so many of the first and last batches of a run."""
    records = [one for one in read_json_lines(run / "metrics.jsonl") if one["stage"] == "reinforcement"]
    counted = records[first:-last]
    found = {
        "batch_s": (counted[-1]["time/wall_s"] - counted[0]["time/wall_s"]) / (len(counted) - 1),
        **{
            part: statistics.fmean(one[f"time/{part}"] for one in counted) for part in ("sample_s", "train_s")
        },
        "tokens": statistics.fmean(one["tokens/sampled"] for one in counted),
        "staleness_mean": statistics.fmean(one.get("staleness/mean", 0.0) for one in counted),
        "staleness_max": max(one.get("staleness/max", 0) for one in records),
    }
    events = read_events(run / "events.log")
    if open_groups := check_log(events):
        raise SystemExit(f"groups {open_groups} of {run} came to no end")
    # Synchronous engines wait for the trainer between two batches, so their steps tell nothing of updates.
    return found | (updates(events) if found["staleness_max"] else {})


def updates(events: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over a run: seconds of an engine step, and those that an update costs beyond its steps.

    Answers tell when an engine had come to which step; an update lies between two of them.
    """
    told = [(e["ended"], e["time_s"]) for e in events if e["kind"] == "completed"]
    # Of answers that came together, the first was heard at once.
    heard = dict(reversed(told))
    steps = sorted(heard)
    loads = sorted(e["at"] for e in events if e["kind"] == "weights_loaded")
    spans = [(a, b, heard[b] - heard[a]) for a, b in zip(steps, steps[1:], strict=False)]
    # A step that ended at `at` or before was drawn by the weights before.
    usual = [seconds / (b - a) for a, b, seconds in spans if not any(a <= at < b for at in loads)]
    if not usual:
        return {}
    step_s = statistics.median(usual)
    lost = [seconds - step_s * (b - a) for a, b, seconds in spans if any(a <= at < b for at in loads)]
    return {"engine_step_s": step_s, "update_lost_s": statistics.median(lost), "updates": len(lost)}


def sample_alone(recipe: Path, num_batches: int) -> float:
    """Seconds of a batch where the engine never waits: batches are taken, and no weights follow."""
    config = load_recipe(recipe)
    parts = build(config, None)
    assert parts.backend is not None
    parts.policy_weights.activate(parts.reinforcer(0, None, None))
    stream = PromptStream(parts.train_prompts, seed=0, shuffle=True)
    wave, taken_s = config.rollout.max_staleness + 1, []
    try:
        # Some follow the last one that is taken, so that the engine is at work to the end.
        rollouts = rollouts_of(
            config.rollout,
            parts,
            stream,
            parts.backend,
            seed=config.seed,
            num_batches=num_batches + wave,
            limit_s=config.timeouts.phase_s,
        )
        rollouts.begin(0)
        for _ in range(num_batches):
            rollouts.next_batch(DEADLINE_S)
            taken_s.append(time.perf_counter())
            rollouts.update_weights(0)
    finally:
        parts.close()
    # All that the bound allows starts together, so batches come in waves; whole ones count, but the first.
    num_waves = num_batches // wave - 1
    return (taken_s[wave * (num_waves + 1) - 1] - taken_s[wave - 1]) / (num_waves * wave)


def turn(steps: int, *, quick: bool = False) -> dict[str, dict[str, float]]:
    """Every side once."""
    found: dict[str, dict[str, float]] = {}
    ends = (QUICK_FIRST, QUICK_LAST) if quick else (FIRST, LAST)
    for side in QUICK_SIDES if quick else SIDES:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            recipe = write_recipe(folder, side, steps, quick=quick)
            found[side] = measure(train(recipe, folder / "runs"), *ends)
            if side == ("async 1" if quick else "async 4"):
                alone_s = sample_alone(recipe, steps)
                found["sampling"] = {"batch_s": alone_s}
        print(f"  {side}: {found[side]['batch_s'] * 1000:.0f} ms a batch", flush=True)
    found["training"] = {"batch_s": found["sync, a core"]["train_s"]}
    return found


def summary(turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the turns, and the fractions of the overlap."""
    sides = {
        side: {name: statistics.median(one[side][name] for one in turns) for name in turns[0][side]}
        for side in turns[0]
    }
    at_best_s = max(sides["sampling"]["batch_s"], sides["training"]["batch_s"])
    return {
        "sides": sides,
        "at_best_s": at_best_s,
        "overlap": {
            f"{ahead} against {sync}": overlap_fraction(
                sides[sync]["batch_s"], sides[ahead]["batch_s"], at_best_s
            )
            for sync in ("sync", "sync, a core")
            for ahead in SIDES
            if ahead.startswith("async") and {sync, ahead} <= sides.keys()
        },
    }


def overlap_fraction(sync_s: float, async_s: float, at_best_s: float) -> float | None:
    """Of what could be saved; None where all cores together are faster than one each could be."""
    return (sync_s - async_s) / (sync_s - at_best_s) if sync_s > at_best_s else None


def show(found: dict[str, Any]) -> None:
    """The table."""
    for side, one in found["sides"].items():
        line = f"{side:24s} {one['batch_s'] * 1000:7.1f} ms a batch"
        if "engine_step_s" in one:
            line += f", {one['tokens'] / one['batch_s']:6.0f} tokens/s, staleness {one['staleness_mean']:.1f}"
            line += f" (at most {one['staleness_max']:.0f}), engine step {one['engine_step_s'] * 1000:.2f} ms"
            line += f", an update costs {one['update_lost_s'] * 1000:.1f} ms"
        print(line)
    print(f"{'at best':24s} {found['at_best_s'] * 1000:7.1f} ms a batch")
    for name, reached in found["overlap"].items():
        told = "all cores in turn are faster" if reached is None else f"{reached:.0%} of the overlap"
        print(f"{name:44s} {told}")


def main() -> None:
    """Measure, print, and write results/async_overlap.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of all sides")
    parser.add_argument("--steps", type=int, default=21, help="batches of a run")
    parser.add_argument("--quick", action="store_true", help="one short turn; nothing is written")
    given = parser.parse_args()
    if given.steps < FIRST + LAST + 2:
        parser.error(
            f"--steps is {given.steps}; {FIRST + LAST} do not count, so make it {FIRST + LAST + 2} or more"
        )
    machine = f"{processor()}, {len(os.sched_getaffinity(0))} cores"
    print(machine)
    if given.quick:
        show(summary([turn(QUICK_STEPS, quick=True)]))
        return
    found = summary([turn(given.steps) for _ in range(given.turns)])
    show(found)
    written = {
        **heading("async_overlap", machine, "torch", "transformers", "millrace-rl"),
        "workload": {"groups": GROUPS, "samples": SAMPLES, "max_tokens": LONGEST, "model": RECIPE["model"]},
        "steps": given.steps,
        "turns": given.turns,
        **found,
    }
    write("async_overlap", written)


if __name__ == "__main__":
    main()
