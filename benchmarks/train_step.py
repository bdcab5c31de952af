"""Tokens per second of one policy update: millrace against TRL and plain loops over transformers' model.

    python benchmarks/train_step.py            # millrace alone, and the bare matrix products
    python benchmarks/train_step.py --peers    # and the others; TRL in an environment that is made once
    python benchmarks/train_step.py --quick    # float32 on one core, one turn, a small model; writes nothing

An update is forward, clipped loss of the drawn tokens, backward, gradient clipped to a norm, AdamW. All sides
have the same weights (Qwen3's shape, 32.5 M) and the same 16 samples in groups of 8 with lengths of a long
tail: the longest has 256 tokens, four times the mean. Tokens that fill rows up are not counted.

- `products`: the floor. Each weight's product and both its gradients, by the quickest of torch's ways, and
  nothing else; for those tokens, but once where samples begin with them together.
- `packed`: the loop with all samples in one row, kept apart by the mask that transformers makes of positions.
- `padded`: the loop with a row for each sample, filled up to the longest.
- `trl`: GRPOTrainer's own loss, backward and optimizer; defaults without gradient checkpointing.
- `... at its best`: compiled, and MKL told to use its fast code on other processors than Intel's, as for the
  products.

Each side has a process of its own; they take turns, and medians are told. Before a clock is read, every side
makes two updates whose losses and gradient norms must agree. Weights are float32, then bfloat16 throughout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.record import heading, processor, write
from grpo_step import without_brake
from peers import environments
from peers.update_task import QUICK_SHAPE, SHAPE, batch
from peers.workers import Command, Worker
from rollout import save_model

OURS, PRODUCTS = "millrace", "products"
# Relative; two steps from the same weights differ by rounding alone.
AGREEMENT = {"float32": 1e-3, "bfloat16": 5e-2}


def commands(peers: bool, folder: Path, scratch: Path) -> dict[str, Command]:
    """The process of each side."""
    ours, loop = "update_ours.py", "update_hugging_face.py"
    brake = without_brake(scratch)
    preload = (brake,) if brake else ()
    found = {
        OURS: Command(ours, sys.executable),
        PRODUCTS: Command(ours, sys.executable, (PRODUCTS,), preload),
    }
    if peers:
        python = str(environments.ensure("trl", folder))
        found |= {
            "packed": Command(loop, sys.executable, ("packed",)),
            "padded": Command(loop, sys.executable, ("padded",)),
            "padded at its best": Command(loop, sys.executable, ("padded", "compile"), preload),
            "trl": Command("update_trl.py", python),
            "trl at its best": Command("update_trl.py", python, ("compile",), preload),
        }
    return found


def check_agreement(told: dict[str, dict[str, Any]], dtype: str) -> None:
    """Refuse to compare sides that do not compute the same.

    Args:
        told: what each side answered for one step.
        dtype: of the weights.

    Raises:
        SystemExit: a loss or a gradient norm differs from ours by more than rounding.
    """
    ours = told[OURS]
    for name, answer in told.items():
        if name == PRODUCTS:
            continue
        for what in ("loss", "norm"):
            # The loss is a mean of advantages of both signs, so its own size says nothing of its rounding.
            error = abs(answer[what] - ours[what]) / (ours[what] if what == "norm" else 1.0)
            if not error <= AGREEMENT[dtype]:
                raise SystemExit(f"{name} has {what} {answer[what]}, {OURS} {ours[what]}, in {dtype}")


def result(turns: list[dict[str, dict[str, Any]]], num_tokens: int) -> dict[str, Any]:
    """Medians of one case.

    Args:
        turns: what each side answered, turn by turn.
        num_tokens: of one step, those that fill rows up not counted.

    Returns:
        tokens per second of each side, how many times as fast as each we are, the fraction we reach of
        what the bare products allow, the most memory held, and the seconds of all steps.
    """
    seconds = {name: [turn[name]["seconds"] for turn in turns] for name in turns[0]}
    rates = {name: num_tokens / statistics.median(found) for name, found in seconds.items()}
    return {
        "tokens_per_s": rates,
        "ratios": {name: rates[OURS] / rate for name, rate in rates.items() if name not in (OURS, PRODUCTS)},
        "fraction_of_products": rates[OURS] / rates[PRODUCTS],
        "peak_bytes": {name: turns[-1][name]["peak_bytes"] for name in seconds},
        "runs_s": seconds,
    }


@dataclass
class Run:
    """What all cases share, and what they find out on the way."""

    commands: dict[str, Command]
    turns: int
    cores: list[int]
    shape: str = SHAPE
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def measure(self, dtype: str, threads: int, num_tokens: int) -> dict[str, Any]:
        """One dtype on so many cores, shown when it is done."""
        if self.cores:  # those started from here on have so many cores, whatever their libraries think
            os.sched_setaffinity(0, self.cores[:threads])
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            save_model(self.shape, dtype, folder / "model")
            words = [str(folder / "model"), dtype, str(threads)]
            workers = {
                name: Worker(command, words, threads, folder / f"{number}.log")
                for number, (name, command) in enumerate(self.commands.items())
            }
            self.versions |= {name: worker.versions for name, worker in workers.items()}
            for _ in range(2):
                check_agreement({name: worker.ask({}) for name, worker in workers.items()}, dtype)
            turns = []
            for turn in range(self.turns):
                names = list(workers)
                start = turn % len(names)
                turns.append({name: workers[name].ask({}) for name in names[start:] + names[:start]})
            for worker in workers.values():
                worker.close()
        told = {"dtype": dtype, "threads": threads, "tokens": num_tokens} | result(turns, num_tokens)
        show(told)
        return told


def show(told: dict[str, Any]) -> None:
    """The table of one case."""
    print(f"\n{told['dtype']}, {told['threads']} of {os.cpu_count()} cores: {told['tokens']} tokens")
    for name, rate in told["tokens_per_s"].items():
        ratio = f"ours is {told['ratios'][name]:5.2f}x" if name in told["ratios"] else ""
        print(f"  {name:20s} {rate:8.0f} tokens/s  {ratio:15s} peak {told['peak_bytes'][name] / 1e9:5.2f} GB")
    if told["ratios"]:
        name, ratio = min(told["ratios"].items(), key=lambda one: one[1])
        print(f"  the fastest of the others is {name}: ours is {ratio:.2f}x (aim: above 1)")
    print(f"  ours reaches {told['fraction_of_products']:.0%} of the floor, its bare products", flush=True)


def main() -> None:
    """Measure, print, and write results/train_step.json."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--peers", action="store_true", help="measure the others, too; makes TRL's environment"
    )
    parser.add_argument("--environments", type=Path, default=environments.home(), help="where it lies")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(cores) or 1}))
    parser.add_argument("--dtypes", nargs="+", choices=list(AGREEMENT), default=list(AGREEMENT))
    parser.add_argument("--turns", type=int, default=3, help="measured updates of each side")
    parser.add_argument("--quick", action="store_true", help="a small model, one turn; nothing is written")
    given = parser.parse_args()
    if given.quick:
        given.threads, given.dtypes, given.turns = [1], ["float32"], 1
    lengths = [len(sample.tokens) for sample in batch()]
    machine = f"{processor()}, {os.cpu_count()} cores"
    print(f"{machine}; {len(lengths)} samples, {sum(lengths)} tokens, the longest has {max(lengths)}")
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        sides = commands(given.peers, given.environments, Path(scratch))
        run = Run(sides, given.turns, cores, QUICK_SHAPE if given.quick else SHAPE)
        for dtype in given.dtypes:
            cases += [run.measure(dtype, threads, sum(lengths)) for threads in given.threads]
    if given.quick:
        return
    told = heading("train_step", machine)
    told |= {"versions": run.versions, "turns": given.turns, "lengths": lengths, "cases": cases}
    write("train_step", told)


if __name__ == "__main__":
    main()
