"""One GRPO step on a tiny model: millrace against TRL's GRPOTrainer, in one run on one machine.

    python benchmarks/grpo_step.py            # millrace alone
    python benchmarks/grpo_step.py --peers    # and TRL, in an environment that is made once
    python benchmarks/grpo_step.py --quick    # two steps after a first one, writes nothing

Both train the same shape (Qwen3, 0.80 M parameters, 16 prompts `a+b=` x 8 samples, 8 tokens each, float32)
from random weights. A step is sampling, scoring, loss, update, and handing over the weights. TRL runs twice:

- `trl`: its defaults without gradient checkpointing, which costs time here and saves nothing.
- `trl at its best`: compiled, too, and with MKL told to use its fast code on other processors than Intel's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.record import heading, processor, write
from peers import environments
from peers.grpo_task import MARK, PROMPTS, SAMPLES, SHAPE, STEPS, SUMS, TOKENS, WARM, Parts, tell

REWARD = '"""The same arithmetic as on the other side."""\n\n\n' + (
    "def by_letters(prompt, completion, answer, row):\n    return float(sum(map(ord, completion)) % 7)\n"
)
OURS = "millrace"
DEADLINE_S = 600.0
# The words that start a process of our side, with the steps it warms up with and those it measures.
SIDE, QUICK_SIDE = "--side", "--quick-side"
NUM_STEPS = {SIDE: (WARM, STEPS), QUICK_SIDE: (1, 2)}


def our_parts(threads: int, num_steps: int) -> tuple[Any, Any]:
    """The configuration and parts of a run in the current folder."""
    from millrace.config.recipe import validate
    from millrace.run.build import build

    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a, b in SUMS]
    Path("sums.jsonl").write_text("\n".join(rows), encoding="utf-8")
    Path("benchmark_reward.py").write_text(REWARD, encoding="utf-8")
    config = validate(
        {
            "steps": num_steps,
            "threads": threads,
            "data": {"train": "sums.jsonl"},
            "tokenizer": {"alphabet": "seen", "vocab_size": 32},
            "model": {"shape": SHAPE},
            "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_tokens": TOKENS},
            "rewards": [{"kind": "function", "function": "benchmark_reward:by_letters"}],
            "policy": {"optimizer": {"learning_rate": 1e-4}},
        },
        "benchmark",
    )
    return config, build(config, None)


def our_steps(threads: int, num_steps: int) -> list[tuple[float, dict[str, float]]]:
    """Seconds of each step, and of its parts."""
    from millrace.data.prompts import PromptStream
    from millrace.engines.in_process import InProcessBackend
    from millrace.observability.metrics import Spans
    from millrace.rollout.batches import as_sampled, rollouts_of
    from millrace.run.train_step import TrainStep, train_on

    config, built = our_parts(threads, num_steps)
    trainer = built.reinforcer(0, None, None)
    built.policy_weights.activate(trainer)
    train_step = TrainStep(trainer, built.method)
    stream = PromptStream(built.train_prompts, seed=0, shuffle=True)
    parts, spans = Parts(), Spans()
    trainer.forward_backward = parts.around("forward, backward", trainer.forward_backward)
    trainer.optim_step = parts.around("update", trainer.optim_step)
    # No stop token: every completion has full length, as on the other side.
    built.stop_token_ids = ()

    def update_weights(version: int) -> None:
        built.transport.update_weights(trainer.named_tensors(), version)

    backend = InProcessBackend(built.engine, built.reward, update_weights, spans)
    rollouts = rollouts_of(
        config.rollout,
        built,
        stream,
        backend,
        seed=config.seed,
        num_batches=num_steps,
        limit_s=config.timeouts.phase_s,
    )
    rollouts.begin(trainer.version)
    found = []
    for step in range(num_steps):
        start = time.perf_counter()
        sampled = as_sampled(rollouts.next_batch(DEADLINE_S))
        with parts("batch"):
            train_on(train_step, sampled, seed=0, step=step)
        with parts("hand over weights"):
            rollouts.update_weights(trainer.version)
            rollouts.wait_for_weights(DEADLINE_S)
        found.append((time.perf_counter() - start, spans.take() | parts.take()))
    built.close()
    return found


@dataclass(frozen=True)
class Side:
    """How one side is started."""

    python: str
    script: Path
    words: tuple[str, ...] = ()
    preload: str = ""


def sides(peers: bool, quick: bool, folder: Path, scratch: Path) -> dict[str, Side]:
    """Every side by its name."""
    found = {OURS: Side(sys.executable, Path(__file__).resolve(), (QUICK_SIDE if quick else SIDE,))}
    if peers:
        python = str(environments.ensure("trl", folder))
        script = Path(__file__).resolve().parent / "peers" / "trl_grpo.py"
        found["trl"] = Side(python, script)
        found["trl at its best"] = Side(python, script, ("compile",), without_brake(scratch))
    return found


def without_brake(scratch: Path) -> str:
    """A library that tells MKL to take its fast code; empty, and said so, where there is no C compiler.

    MKL asks this function whether the processor is Intel's, and has slower code for all others.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        print("no C compiler was found; MKL keeps its slower code for processors that are not Intel's")
        return ""
    source, library = scratch / "mkl.c", scratch / "mkl.so"
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n", encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def run_side(name: str, side: Side, threads: int) -> dict[str, Any]:
    """Measure one side in a process of its own.

    Raises:
        SystemExit: it gave no result; its last messages say why.
    """
    words = [side.python, str(side.script), str(threads), *side.words]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if side.preload:
        environment["LD_PRELOAD"] = side.preload
    # One core each, so that no library can take more than it was given.
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_setaffinity") else []
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{name} did not run:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return told


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median step of the median run, what it is made of, and sequences per second."""
    step_s = statistics.median(statistics.median(run["seconds"]) for run in runs)
    parts: dict[str, float] = {}
    for name in dict.fromkeys(name for run in runs for step in run["parts"] for name in step):
        parts[name] = statistics.median(step.get(name, 0.0) for run in runs for step in run["parts"])
    parts["rest"] = step_s - sum(parts.values())
    return {
        "step_s": step_s,
        "sequences_per_s": PROMPTS * SAMPLES / step_s,
        "runs_s": [statistics.median(run["seconds"]) for run in runs],
        "parts_s": parts,
        "versions": runs[0]["versions"],
    }


def show(name: str, found: dict[str, Any]) -> None:
    """One side's line, and where its time goes."""
    runs = ", ".join(f"{seconds * 1000:.1f}" for seconds in found["runs_s"])
    rate = f"{found['sequences_per_s']:6.0f} sequences/s"
    print(f"{name:16s} {found['step_s'] * 1000:7.1f} ms a step, {rate} (runs: {runs})")
    print(" " * 17 + ", ".join(f"{part} {spent * 1000:.1f}" for part, spent in found["parts_s"].items()))


def main() -> None:
    """Measure, print, and write results/grpo_step.json."""
    if len(sys.argv) == 3 and sys.argv[2] in NUM_STEPS:  # the process of our own side
        num_warm, num_measured = NUM_STEPS[sys.argv[2]]
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            steps = our_steps(int(sys.argv[1]), num_warm + num_measured)
            tell(steps[num_warm:], ("millrace-rl", "torch", "transformers"))
            os.chdir("/")
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", action="store_true", help="measure TRL, too; makes its environment")
    parser.add_argument("--environments", type=Path, default=environments.home(), help="where it lies")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3, help="processes of each side")
    parser.add_argument("--quick", action="store_true", help="few steps, one turn; nothing is written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        every = sides(given.peers, given.quick, given.environments, Path(scratch))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in every}
        # Turn by turn, so that a busy minute of the machine hits all sides.
        for _ in range(1 if given.quick else given.turns):
            for name, side in every.items():
                runs[name].append(run_side(name, side, given.threads))
    machine = f"{processor()}, {given.threads} of {os.cpu_count()} cores"
    result = heading("grpo_step", machine)
    result["sides"] = {name: summary(told) for name, told in runs.items()}
    for name, found in result["sides"].items():
        show(name, found)
    ours = result["sides"][OURS]["step_s"]
    result["ratios"] = {
        name: found["step_s"] / ours for name, found in result["sides"].items() if name != OURS
    }
    for name, ratio in result["ratios"].items():
        print(f"millrace is {ratio:.2f} times as fast as {name}")
    if given.quick:
        return
    write("grpo_step", result)


if __name__ == "__main__":
    main()
