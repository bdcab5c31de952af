"""Decode attention over the paged pool on a GPU: how near it comes to a plain copy of as many bytes.

    python benchmarks/paged_attention.py            # writes results/paged_attention.json
    python benchmarks/paged_attention.py --quick    # three cases, writes nothing

Everything in one run, bfloat16, blocks of 16 in random order, 8 key heads of width 128, medians, turn by
turn:

- `ours`: `millrace.kernels.paged_attention_triton.paged_decode`, one query a request, all requests of one
  length.
- `copy`: a tensor copied into another, half as large each as the keys and values: as many bytes moved.

A decode reads every key and value once, so these bytes over its time are its bandwidth. Both run from a CUDA
graph, over several pools in turn where one would fit into the second-level cache. Without CUDA the script
says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from common.record import heading, write
from torch import Tensor

from millrace.kernels.paged_attention import PagedRows

BATCHES, LENGTHS, GROUPS = (1, 8, 32, 128, 256), (512, 2048, 8192), (1, 4, 8)
KEY_HEADS, WIDTH, BLOCK_SIZE, DTYPE = 8, 128, 16, torch.bfloat16
# Several times the second-level cache of any GPU of today.
UNCACHED_BYTES = 2**30


def kv_bytes(batch: int, length: int) -> int:
    """Bytes of the keys and values that one decode reads."""
    return 2 * batch * length * KEY_HEADS * WIDTH * DTYPE.itemsize


def num_pools(batch: int, length: int) -> int:
    """Pools to go through before one comes again, so that it is no longer in the cache."""
    return -(-UNCACHED_BYTES // kv_bytes(batch, length))


def decode_rows(batch: int, length: int, device: str) -> PagedRows:
    """Requests of one length whose blocks lie in random order and fill the pool."""
    blocks = -(-length // BLOCK_SIZE)
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0))
    place_B = torch.arange(batch, device=device)
    return PagedRows(
        block_BC=order.int().view(batch, blocks).to(device),
        start_B=torch.full((batch,), length - 1, device=device),
        first_B=place_B,
        count_B=torch.ones_like(place_B),
        slot_T=torch.full((batch,), -1, device=device),
        max_count=1,
        max_length=length,
    )


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls after one another, compiled and warm."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds on the GPU of one replay."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000


def measure(batch: int, length: int, group: int, repeats: int) -> dict[str, Any]:
    """Medians of both sides for one case, and their ratio."""
    from millrace.kernels.paged_attention_triton import paged_decode

    rows, pools = decode_rows(batch, length, "cuda"), num_pools(batch, length)
    shape = (pools, 2, rows.block_BC.numel(), KEY_HEADS, BLOCK_SIZE, WIDTH)
    kv = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
    query_BHK = torch.randn(batch, KEY_HEADS * group, WIDTH, dtype=DTYPE, device="cuda")

    def decode(number: int) -> Tensor:
        return paged_decode(query_BHK, *kv[number], rows, scale=WIDTH**-0.5)

    def copy(number: int) -> None:
        key, value = kv[number]
        value.copy_(key)

    sides = {"ours": decode, "copy": copy}
    graphs = {
        side: graph_of([lambda n=n, call=call: call(n) for n in range(pools)]) for side, call in sides.items()
    }
    runs: dict[str, list[float]] = {side: [] for side in graphs}
    for turn in range(repeats + 1):
        for side, graph in graphs.items():
            took_s = replay_s(graph) / pools
            if turn > 0:  # the first wakes the GPU
                runs[side].append(took_s)
    return summary(batch, length, group, {side: statistics.median(found) for side, found in runs.items()})


def summary(batch: int, length: int, group: int, seconds: dict[str, float]) -> dict[str, Any]:
    """What is written of one case: seconds, bytes a second, and ours as a share of the copy."""
    size = kv_bytes(batch, length)
    return {
        "batch": batch,
        "length": length,
        "group": group,
        "kv_bytes": size,
        "seconds": seconds,
        "bytes_per_s": {side: size / took_s for side, took_s in seconds.items()},
        "ours_over_copy": seconds["copy"] / seconds["ours"],
    }


def show(result: dict[str, Any]) -> None:
    """One line of the table."""
    ours, copied = (result["bytes_per_s"][side] / 1e12 for side in ("ours", "copy"))
    print(
        f"{result['batch']:6d} {result['length']:7d} {result['group']:6d} {result['kv_bytes'] / 1e6:9.1f} "
        f"{result['seconds']['ours'] * 1e6:9.1f} {ours:8.3f} {copied:8.3f} {result['ours_over_copy']:7.0%}",
        flush=True,
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=21, help="turns of both sides")
    parser.add_argument("--quick", action="store_true", help="three cases; nothing is written")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/paged_attention.py needs CUDA, and this machine shows none", file=sys.stderr)
        raise SystemExit(2)
    print(f"{torch.cuda.get_device_name()}; TB/s")
    head = " ".join(f"{name:>8s}" for name in ("us", "ours", "copy"))
    print(f"{'batch':>6s} {'length':>7s} {'group':>6s} {'MB':>9s}  {head} {'ratio':>7s}")
    cases = [(8, 512, 8), (32, 2048, 4), (128, 2048, 4)] if given.quick else product(BATCHES, LENGTHS, GROUPS)
    written: dict[str, Any] = {
        **heading("paged_attention", torch.cuda.get_device_name(), "torch", "triton", "millrace-rl"),
        "cases": [],
    }
    for batch, length, group in cases:
        written["cases"].append(measure(batch, length, group, given.repeats))
        show(written["cases"][-1])
    if not given.quick:
        write("paged_attention", written)


if __name__ == "__main__":
    main()
