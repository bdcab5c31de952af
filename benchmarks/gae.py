"""Advantages and returns by GAE: millrace against a loop over time and against matrix products of chunks.

    python benchmarks/gae.py                  # writes results/gae.json
    python benchmarks/gae.py --plot           # draws it, results/gae.svg
    python benchmarks/gae.py --device cuda    # writes results/gae_cuda.json
    python benchmarks/gae.py --quick          # a 512th of each length, one turn, writes nothing

Everything in one run, float32, gamma 0.99, lambda 0.95, medians, turn by turn, so that a busy minute of the
machine hits all sides:

- `serial`: the loop over time of most trainers, on padded [B, T]; on the packed row token by token.
- `chunk C`: chunk-scan GAE (slime, LiLei 2025): one matrix product for all chunks of C tokens, then a loop
  over chunks that hands on the carry. On padded [B, T], without flipping and with everything in place.
- `ours`: `millrace.kernels.dispatch.gae`, packed.
- `copy`: both inputs copied into both outputs, the fewest bytes that any of them could move.

All buffers are there and touched before the clock starts. What padding itself costs is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common.record import RESULTS, heading, processor, write
from torch import Tensor

from millrace.kernels.dispatch import gae

GAMMA, LAMBDA = 0.99, 0.95
CHUNKS = (64, 128, 256)
SIDES = ("serial", *(f"chunk {size}" for size in CHUNKS), "ours", "copy")
# AMD's first-level cache tells addresses apart by a hash in which 2^27 and 2^12 cancel: rows of 128 MiB that
# an allocator puts one page apart evict each other there. Seven pages apart they do not.
GAP = 7 * 1024


@dataclass
class Case:
    """One batch, packed and padded, with the buffers that each side writes into."""

    name: str
    length_B: Tensor
    packed: list[Tensor]
    padded: list[Tensor]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return len(self.packed[0])


def pool(num_rows: int, size: int, device: str) -> list[Tensor]:
    """Rows of one size, touched, a few pages apart."""
    memory = torch.zeros(num_rows * (size + GAP), device=device)
    return [memory[row * (size + GAP) :][:size] for row in range(num_rows)]


def case(name: str, lengths: list[int], device: str) -> Case:
    """Random rewards and values of segments of these lengths; padding is 0."""
    num_rows, longest = len(lengths), max(lengths)
    draw = torch.Generator().manual_seed(0)
    packed = pool(4, sum(lengths), device)
    for row in packed[:2]:
        row.copy_(torch.randn(len(row), generator=draw))
    if min(lengths) == longest:  # equal lengths: packed is padded
        return Case(name, torch.tensor(lengths), packed, [row.view(num_rows, longest) for row in packed])
    padded = [row.view(num_rows, longest) for row in pool(4, num_rows * longest, device)]
    for rows, row in zip(padded[:2], packed[:2], strict=True):
        for number, segment in enumerate(row.split(lengths)):
            rows[number, : len(segment)] = segment
    return Case(name, torch.tensor(lengths), packed, padded)


def serial(rows: list[Tensor], gamma: float, lam: float) -> None:
    """The loop over time as in slime and verl, on [B, T] or on one segment [T]."""
    reward, value, advantage, returns = rows
    length = reward.shape[-1]
    last: Any = 0.0
    for t in reversed(range(length)):
        after = value[..., t + 1] if t < length - 1 else 0.0
        delta = reward[..., t] + gamma * after - value[..., t]
        last = delta + gamma * lam * last
        advantage[..., t] = last
    torch.add(advantage, value, out=returns)


def serial_packed(rows: list[Tensor], length_B: Tensor, gamma: float, lam: float) -> None:
    """The same loop, segment by segment."""
    for segment in zip(*(row.split(length_B.tolist()) for row in rows), strict=True):
        serial(list(segment), gamma, lam)


def chunked(rows: list[Tensor], size: int, gamma: float, lam: float) -> None:
    """Chunk-scan GAE on [B, T]; what is left over of T is a shorter chunk, the last in time."""
    reward, value, advantage, returns = rows
    torch.add(reward[:, :-1], value[:, 1:], alpha=gamma, out=returns[:, :-1])
    returns[:, -1] = reward[:, -1]
    delta = returns.sub_(value)
    step = torch.arange(size, device=value.device)
    exponent = (step[:, None] - step).to(value.dtype)
    reach = torch.where(exponent >= 0, (gamma * lam) ** exponent.clamp(min=0), 0.0)
    share = (gamma * lam) ** torch.arange(size, 0, -1, device=value.device, dtype=value.dtype)
    num_rows, length = value.shape
    whole = length // size * size
    if whole == length:
        torch.mm(delta.view(-1, size), reach, out=advantage.view(-1, size))
    else:
        local = delta[:, :whole].reshape(-1, size) @ reach
        advantage[:, :whole] = local.view(num_rows, whole)
        rest = length - whole
        advantage[:, whole:] = delta[:, whole:] @ reach[:rest, :rest]
    starts = list(range(0, length, size))
    for start, after in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        advantage[:, start : start + size].addcmul_(advantage[:, after : after + 1], share)
    torch.add(advantage, value, out=returns)


def ours(one: Case, gamma: float, lam: float) -> None:
    """Packed, by the fastest scan for the device."""
    reward, value, *out = one.packed
    gae(reward, value, one.length_B, gamma=gamma, lam=lam, out=(out[0], out[1]))


def copy(one: Case) -> None:
    """As many bytes as GAE must read and write."""
    reward, value, advantage, returns = one.packed
    advantage.copy_(reward)
    returns.copy_(value)


def sides(one: Case, gamma: float, lam: float) -> dict[str, Callable[[], None]]:
    """What each side has to do."""
    calls: dict[str, Callable[[], None]] = {}
    if "packed" in one.name:
        calls["serial"] = lambda: serial_packed(one.packed, one.length_B, gamma, lam)
    else:
        calls["serial"] = lambda: serial(one.padded, gamma, lam)
    for size in CHUNKS:
        calls[f"chunk {size}"] = lambda size=size: chunked(one.padded, size, gamma, lam)
    calls["ours"] = lambda: ours(one, gamma, lam)
    calls["copy"] = lambda: copy(one)
    return calls


def seconds(call: Callable[[], None], device: str) -> float:
    """How long one call takes, until its result is there, after one that is not timed.

    Without the first, each side would pay for the cold cache and the spinning threads of the side before it.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def on_device_s(one: Case, repeats: int) -> float:
    """What `ours` takes on the GPU alone, launches recorded beforehand."""
    from millrace.kernels import linear_scan_triton

    reward, value, *out = one.packed
    length_B = one.length_B.to("cuda")
    settings = {
        "gamma": GAMMA,
        "decay_B": torch.full((len(length_B),), GAMMA * LAMBDA, dtype=torch.float64, device="cuda"),
        "bootstrap_B": torch.zeros(len(length_B), device="cuda"),
    }
    graph = torch.cuda.CUDAGraph()
    linear_scan_triton.gae(reward, value, length_B, (out[0], out[1]), **settings)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        linear_scan_triton.gae(reward, value, length_B, (out[0], out[1]), **settings)
    found = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) / 1000)
    return statistics.median(found)


def measure(one: Case, device: str, repeats: int) -> dict[str, Any]:
    """Medians of every side, and their ratios."""
    calls = sides(one, GAMMA, LAMBDA)
    runs: dict[str, list[float]] = {side: [] for side in calls}
    for side, call in calls.items():
        if side != "serial":
            call()  # compiles, and wakes the threads
    for turn in range(repeats):
        for side, call in calls.items():
            # Minutes of a loop need no median; it takes its turns with the first.
            if side != "serial" or turn < (1 if "packed" in one.name else 3):
                runs[side].append(seconds(call, device))
    took = {side: statistics.median(found) for side, found in runs.items()}
    best_chunk = min(took[f"chunk {size}"] for size in CHUNKS)
    result: dict[str, Any] = {
        "case": one.name,
        "tokens": one.tokens,
        "padded_over_packed": one.padded[0].numel() / one.tokens,
        "seconds": took,
        "num_runs": {side: len(found) for side, found in runs.items()},
        "serial_over_ours": took["serial"] / took["ours"],
        "chunk_over_ours": best_chunk / took["ours"],
        "ours_over_copy": took["ours"] / took["copy"],
    }
    if device == "cuda":
        result["ours_on_device_s"] = on_device_s(one, repeats)
    return result


def errors(one: Case) -> dict[str, float]:
    """Largest error of an advantage against float64 at gamma = lambda = 1, where nothing is forgotten."""
    reward, value, advantage, _ = (
        row.view_as(rows) for row, rows in zip(one.packed, one.padded, strict=True)
    )
    exact = reward.double().flip(1).cumsum(1).flip(1) - value
    found = {}
    for side, call in sides(one, 1.0, 1.0).items():
        if side != "copy":
            call()
            found[side] = float((advantage - exact).abs().max())
    found["largest advantage"] = float(exact.abs().max())
    return found


def mixed_lengths(tokens: int, longest: int) -> list[int]:
    """Lengths from 1 to `longest`, evenly spread in their logarithm, that add up to `tokens`."""
    draw = torch.Generator().manual_seed(1)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(longest ** torch.rand(1, generator=draw).item())))
    return lengths


def skews(longest: int) -> dict[str, list[int]]:
    """256 answers of at most `longest` tokens, from all equal to one long among short ones."""
    draw = torch.Generator().manual_seed(2)
    share = torch.rand(256, generator=draw)
    normal = torch.randn(256, generator=draw)
    shares = {
        "equal": torch.ones(256),
        "half to all": 0.5 + 0.5 * share,
        "uniform": share,
        "exponential": -0.25 * share.log(),
        "log-normal": (0.7 * normal - 2).exp(),
        "half long": torch.where(share < 0.5, 1.0, 0.05),
        "one in 16 long": torch.where(share < 1 / 16, 1.0, 0.05),
        "one long": torch.full((256,), 0.01),
    }
    lengths = {}
    for name, share in shares.items():
        longest_B = (share * longest).int().clamp(1, longest)
        longest_B[0] = longest
        lengths[f"skew: {name}"] = longest_B.tolist()
    return lengths


def cases(quick: bool) -> dict[str, list[int]]:
    """Lengths of the segments of each case."""
    part = QUICK_PART if quick else 1
    shapes = {f"{rows}x{length // part}": [length // part] * rows for rows, length in SHAPES}
    packed = {f"packed {2**20 // part}": mixed_lengths(2**20 // part, 2**16 // part)}
    return shapes | packed | skews(2**15 // part)


QUICK_PART = 512
SHAPES = ((256, 131072), (128, 65536), (16, 131072))


def show(result: dict[str, Any]) -> None:
    """One line of the table."""
    took = " ".join(f"{result['seconds'][side] * 1000:10.2f}" for side in SIDES)
    on_device = result.get("ours_on_device_s")
    ratios = f"{result['serial_over_ours']:7.0f}x {result['chunk_over_ours']:6.1f}x"
    print(
        f"{result['case']:22s} {result['padded_over_packed']:6.2f} {took}   {ratios} "
        f"{result['ours_over_copy']:6.2f}" + (f"   {on_device * 1e6:.1f} us" if on_device else ""),
        flush=True,
    )


def plot(results: Path) -> None:
    """Bars of every side for every case, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gae"
    from matplotlib import pyplot

    told = json.loads(results.read_text(encoding="utf-8"))
    figure, axes = pyplot.subplots(figsize=(11, 5), layout="constrained")
    for place, side in enumerate(SIDES):
        heights = [row["seconds"][side] * 1000 for row in told["cases"]]
        axes.bar([x + (place - 2.5) / 7 for x in range(len(heights))], heights, 1 / 7, label=side)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds")
    names = [row["case"].removeprefix("skew: ") for row in told["cases"]]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_title(f"GAE in float32, {told['machine']}")
    axes.legend(ncols=len(SIDES), loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(results.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    """Measure, print and write, or draw what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=11, help="turns of everything but the loop over time")
    parser.add_argument("--quick", action="store_true", help="short lengths, one turn; nothing is written")
    parser.add_argument("--plot", action="store_true", help="draw the results that were written")
    given = parser.parse_args()
    results = "gae" if given.device == "cpu" else "gae_cuda"
    if given.plot:
        plot(RESULTS / f"{results}.json")
        return
    torch.set_num_threads(given.threads)
    repeats = 1 if given.quick else given.repeats
    if given.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{processor()}, {given.threads} of {os.cpu_count()} cores"
    print(f"{machine}; milliseconds")
    head = " ".join(f"{side:>10s}" for side in SIDES)
    print(f"{'':22s} {'padded':>6s} {head}   {'serial':>8s} {'chunk':>7s} {'copy':>6s}")
    written: dict[str, Any] = {
        **heading("gae", machine, "torch", "numba", "triton", "millrace-rl"),
        "cases": [],
    }
    for name, lengths in cases(given.quick).items():
        one = case(name, lengths, given.device)
        written["cases"].append(measure(one, given.device, repeats))
        show(written["cases"][-1])
        if not written.get("errors"):
            written["errors"] = {"case": name} | errors(one)
    print(f"error against float64 at gamma = lambda = 1: {written['errors']}")
    if not given.quick:
        write(results, written)


if __name__ == "__main__":
    main()
