"""Weight sync within a process and between two: both ways of recipes against a plain copy of the same bytes.

    python benchmarks/weight_sync.py              # 128 MB of weights, half a minute
    python benchmarks/weight_sync.py --size-mb 2048
    python benchmarks/weight_sync.py --quick      # 8 MB, one turn, writes nothing

A trainer (this process) hands weights to a sampler, which copies them into its own tensors: in this process,
or in another one through shared memory. Everything in one run, turn by turn, medians; each process has one
torch thread.

- `copy`: the bytes copied from one set of tensors to another in this process.
- `put`: until all bytes lie where the sampler can read them. Its rate over that of the copy is what the
  transport costs; in one process the sampler has copied them by then.
- `whole`: until the sampler has loaded them, has proved it, and the trainer knows. It holds at least one copy
  more, the sampler's own.
- `verify`: seconds that both sides spend on fingerprints, as a fraction of `whole`. Between processes the
  trainer takes its own within `put`, of what was just copied.

After that the delta: a policy in bfloat16 takes optimizer steps by imitation at several learning rates, and
what must travel after each of them is counted, as a fraction of all bytes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from common.record import heading, processor, write
from torch import Tensor

from millrace.data.packing import pack
from millrace.models.load import fresh_config, fresh_model
from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyTrainer, imitation
from millrace.transport.canary import Canary
from millrace.transport.fingerprint import fingerprint
from millrace.transport.shared_memory import MappedWeights, SharedWeights
from millrace.transport.weight_update import LocalTransport, WeightReceiver
from millrace.types import Completion, Outcome, Trajectory, Turn

SIDES = ("in process", "shared memory")
# Of one weight: a matrix of 1024 by 1024 in float32.
WEIGHT_BYTES = 1 << 22
LEARNING_RATES = (1e-6, 1e-5, 1e-4)


def weights(size_mb: int) -> dict[str, Tensor]:
    """Matrices of 4 MB each."""
    generator = torch.Generator().manual_seed(0)
    count = size_mb * 2**20 // WEIGHT_BYTES
    return {f"layers.{place}.weight": torch.randn(1024, 1024, generator=generator) for place in range(count)}


class Loader:
    """A sampler's tensors."""

    def __init__(self, size_mb: int) -> None:
        """All zero."""
        self._held = {name: torch.zeros_like(weight) for name, weight in weights(size_mb).items()}
        self.load_s = 0.0

    def load(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy what comes."""
        start = time.perf_counter()
        for name, tensor in named_tensors:
            self._held[name].copy_(tensor)
        self.load_s = time.perf_counter() - start

    def fingerprint(self) -> dict[str, str]:
        """Of what is held."""
        return fingerprint(self._held.items())


def sample(pipe: Connection, size_mb: int, rounds: int) -> None:
    """The other process: a receiver, which loads what the trainer says lies in the memory."""
    torch.set_num_threads(1)
    memory = MappedWeights(recv_handle(pipe), lambda *answer: pipe.send_bytes(json.dumps(answer).encode()))
    held = Loader(size_mb)
    receiver = WeightReceiver(memory, held.load, held.fingerprint)
    for _ in range(rounds):
        memory.expect(json.loads(pipe.recv_bytes()))
        receiver.update_weights()


def through_memory(
    weights: SharedWeights, pipe: Connection, sent: Mapping[str, Tensor], version: int
) -> dict[str, float]:
    """Seconds of one weight update as `engines.subprocesses` does it."""
    start = time.perf_counter()
    manifest = weights.write(sent.items(), version)
    put_s = time.perf_counter() - start
    pipe.send_bytes(json.dumps(manifest).encode())
    error, verify_s = json.loads(pipe.recv_bytes())
    whole_s = time.perf_counter() - start
    if error:
        raise RuntimeError(error)
    # What the trainer's own fingerprints take is not told; alone they take no less.
    start = time.perf_counter()
    fingerprint(sent.items())
    return {"whole": whole_s, "put": put_s, "verify": time.perf_counter() - start + verify_s}


def in_process(held: Loader, sent: Mapping[str, Tensor], version: int) -> dict[str, float]:
    """Seconds of one weight update of a sampler of this process."""
    # There is no model here that could judge tokens.
    canary = Canary((0, 0), (0.0,), 0.0)
    transport = LocalTransport(held.load, held.fingerprint, lambda token_ids: canary.logprobs, lambda: canary)
    start = time.perf_counter()
    transport.update_weights(sent.items(), version)
    whole_s = time.perf_counter() - start
    return {"whole": whole_s, "put": held.load_s, "verify": whole_s - held.load_s}


def measure(size_mb: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds but the first, in which memory is taken: seconds, and what they come to."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=sample, args=(theirs, size_mb, rounds + 1))
    process.start()
    memory = SharedWeights()
    send_handle(pipe, memory.handle, process.pid)
    sent, held = weights(size_mb), Loader(size_mb)
    copied = {name: torch.zeros_like(weight) for name, weight in sent.items()}
    seconds: dict[str, list[dict[str, float]]] = {side: [] for side in ("copy", *SIDES)}
    for version in range(rounds + 1):
        start = time.perf_counter()
        for name, weight in sent.items():
            copied[name].copy_(weight)
        seconds["copy"].append({"whole": time.perf_counter() - start})
        seconds["in process"].append(in_process(held, sent, version))
        seconds["shared memory"].append(through_memory(memory, pipe, sent, version))
    process.join()
    memory.close()
    return summary(seconds, size_mb * 2**20)


def summary(seconds: dict[str, list[dict[str, float]]], num_bytes: int) -> dict[str, dict[str, float]]:
    """Medians without the first round, rates in 10^9 bytes per second, and ratios to the copy's rate."""
    medians = {
        side: {part: statistics.median(turn[part] for turn in turns[1:]) for part in turns[0]}
        for side, turns in seconds.items()
    }
    copy_s = medians["copy"]["whole"]
    found = {"copy": {"whole_s": copy_s, "gb_per_s": num_bytes / copy_s / 1e9}}
    for side in SIDES:
        of = medians[side]
        found[side] = {f"{part}_s": value for part, value in of.items()} | {
            "gb_per_s": num_bytes / of["put"] / 1e9,
            "put_over_copy": copy_s / of["put"],
            "whole_over_copy": copy_s / of["whole"],
            "verify_fraction": of["verify"] / of["whole"],
        }
    return found


def policy(learning_rate: float) -> tuple[PolicyTrainer, Any]:
    """A fresh Qwen3 of 1.3M parameters in bfloat16, and 16 answers of 32 tokens to imitate."""
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    config = fresh_config("qwen3", shape, vocab_size=2048, eos_token_id=0)
    model = fresh_model(config, seed=0, dtype=torch.bfloat16)
    numbers = np.random.default_rng(0)
    drawn = [tuple(numbers.integers(1, 2048, 32).tolist()) for _ in range(16)]
    batch = pack(
        [
            Trajectory(
                (Turn((1, 2, 3), Completion(ids, np.zeros(32), np.zeros(32, int), "length", "")),),
                Outcome("score", 0.0),
            )
            for ids in drawn
        ]
    )
    batch = replace(batch, weight_T=batch.action_mask_T / batch.action_mask_T.sum())
    trainer = PolicyTrainer(
        model,
        imitation,
        adamw(model, betas=(0.9, 0.999), weight_decay=0.0),
        learning_rate=lambda step: learning_rate,
        temperature=1.0,
        max_tokens=1 << 14,
        max_grad_norm=1.0,
    )
    return trainer, batch


def payload_fractions(learning_rate: float, num_steps: int) -> Iterator[float]:
    """What must travel after each optimizer step, as a fraction of all bytes."""
    trainer, batch = policy(learning_rate)
    with closing(SharedWeights(delta=True)) as shared:
        for version in range(num_steps + 1):
            shared.write(trainer.named_tensors(), version)
            if version:
                yield shared.metrics["weight_sync/payload_fraction"]
            trainer.forward_backward(batch)
            trainer.optim_step()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size-mb", type=int, default=128, help="of all weights, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=7, help="turns of all sides")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each learning rate")
    parser.add_argument("--quick", action="store_true", help="8 MB, one turn; nothing is written")
    given = parser.parse_args()
    if given.quick:
        given.size_mb, given.rounds, given.steps = 8, 1, 1
    torch.set_num_threads(1)
    sides = measure(given.size_mb, given.rounds)
    for side, found in sides.items():
        print(f"{side:14s}", "  ".join(f"{name} {value:.3g}" for name, value in found.items()))
    fractions = {}
    for rate in LEARNING_RATES:
        fractions[str(rate)] = list(payload_fractions(rate, given.steps))
        print(f"delta at learning rate {rate:g}: {statistics.mean(fractions[str(rate)]):.3f} of the bytes")
    if given.quick:
        return
    written = {
        **heading("weight_sync", f"{processor()}, one thread a process", "torch", "xxhash", "millrace-rl"),
        "size_mb": given.size_mb,
        "sides": sides,
        "payload_fractions": fractions,
    }
    write("weight_sync", written)


if __name__ == "__main__":
    main()
