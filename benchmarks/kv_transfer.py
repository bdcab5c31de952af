"""Seconds of a KV transfer between two engines of one process, against the prefill that it replaces.

    python benchmarks/kv_transfer.py
    python benchmarks/kv_transfer.py --quick   # one short prompt, one turn; nothing is written

Qwen3's shape with 32.5 M parameters, prompts of 500, 1000 and 2000 tokens, one thread. Each turn has a
prompt that no cache has seen. `prefill` is a request of one token in the exporting engine, `export` copies
the blocks out with their checksums, `import` verifies and stores them, `first token` is the same request in
the importing engine. Medians over the turns.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time

import numpy as np
import torch
from common.record import heading, processor, write
from peers.workloads import SHAPES

from millrace.inference.engine import PagedEngine
from millrace.models.decoding import prepare
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.types import SamplingParams

LENGTHS = (500, 1000, 2000)
DTYPES = ("float32", "bfloat16")
PARTS = ("prefill", "export", "import", "first token")


def model(dtype: str) -> Model:
    """The small Qwen3 of `rollout.py` with random weights."""
    shape = {**SHAPES["rollout"], "max_position_embeddings": 4096}
    config = fresh_config("qwen3", shape, vocab_size=shape.pop("vocab_size"), eos_token_id=0)
    return fresh_model(config, seed=0, dtype=getattr(torch, dtype)).requires_grad_(False)


def engine(weights: Model, length: int) -> PagedEngine:
    """As `millrace serve` makes it, with room for two prompts: two turns touch all of its memory."""
    own = copy.deepcopy(weights)
    prepare(own)
    return PagedEngine(own, lambda tokens: "", max_cache_tokens=2 * (length + 32))


def turn(prefill: PagedEngine, decode: PagedEngine, prompt: tuple[int, ...]) -> dict[str, float]:
    """Seconds of each part for one prompt, the bytes that travelled, and the tokens computed in `decode`."""
    request, computed = [SamplingParams(max_tokens=1)], decode.stats().prompt_tokens_computed
    times = [time.perf_counter()]
    prefill.generate([prompt], request)
    times.append(time.perf_counter())
    lease = prefill.export_prefix(prompt)
    if lease is None:
        raise RuntimeError("the engine exported nothing of a prompt that it had computed")
    with lease:
        blocks = list(lease.blocks())
    times.append(time.perf_counter())
    done = decode.import_prefix(lease.prefix, blocks)
    times.append(time.perf_counter())
    decode.generate([prompt], request)
    times.append(time.perf_counter())
    if done.num_imported != len(blocks):
        raise RuntimeError(f"{done.num_imported} of {len(blocks)} blocks were imported: {done.reason}")
    found = dict(zip(PARTS, np.diff(times).tolist(), strict=True))
    found["bytes"] = sum(block.data.nbytes for block in blocks)
    found["computed"] = decode.stats().prompt_tokens_computed - computed
    return found


def summary(turns: list[dict[str, float]]) -> dict[str, float]:
    """Medians without the first two turns, and the transfer's part of the prefill."""
    median = {part: statistics.median(one[part] for one in turns[2:] or turns) for part in turns[0]}
    transfer_s = median["export"] + median["import"]
    return {f"{part.replace(' ', '_')}_s": median[part] for part in PARTS} | {
        "megabytes": median["bytes"] / 1e6,
        "tokens_computed_again": median["computed"],
        "transfer_over_prefill": transfer_s / median["prefill"],
        "gb_per_s": median["bytes"] / transfer_s / 1e9,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="prompts of each length, after two others")
    parser.add_argument("--quick", action="store_true", help="one short prompt, one turn; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers, cases = np.random.default_rng(0), {}
    for dtype in DTYPES[:1] if given.quick else DTYPES:
        weights = model(dtype)
        for length in (100,) if given.quick else LENGTHS:
            prefill, decode = engine(weights, length), engine(weights, length)
            prompts = numbers.integers(
                1, SHAPES["rollout"]["vocab_size"], (1 if given.quick else given.turns + 2, length)
            )
            found = summary([turn(prefill, decode, tuple(prompt)) for prompt in prompts.tolist()])
            cases[f"{dtype} {length}"] = found
            print(
                f"{dtype:9s} {length:5d}", "  ".join(f"{name} {value:.3g}" for name, value in found.items())
            )
    if not given.quick:
        machine = f"{processor()}, one thread, one process, load average {os.getloadavg()[1]:.1f}"
        write("kv_transfer", {**heading("kv_transfer", machine, "torch", "millrace-rl"), "cases": cases})


if __name__ == "__main__":
    main()
