"""Log-probabilities of chosen tokens, forward and backward: memory and time against full logits.

    python benchmarks/logprob.py                  # T = 4k and 16k on the CPU, ten minutes
    python benchmarks/logprob.py --quick          # a small case, to see that it works; nothing is written
    python benchmarks/logprob.py --full           # up to T = 64k
    python benchmarks/logprob.py --device cuda    # bfloat16, width 4096; the Triton kernels

Everything in one run, after a small call of each side to warm up: medians of three turns, each of which
begins with another side; the last two sides leave turns out once they have taken 5 s. Gradients of the hidden
states and of the head:

- `products`: the floor, the bare matrix products that must be made where logits are not kept: the logits
  twice, and both gradients, so many tokens at a time as `ours` takes, each by the quickest of torch's ways.
- `ours`: `millrace.kernels.token_logprob.token_logprob`; log-probability and entropy, the former in the loss.
- `torch chunked`: `torch.nn.functional.linear_cross_entropy` with its default `LinearCrossEntropyOptions`. It
  makes gradients in its forward, so it needs one product less, and takes a loss that is summed or averaged
  alone: neither a weight for each token, as reinforcement learning needs, nor temperature nor entropy. Left
  out where torch has no such options (2.11), and on the CPU beyond 2 * 10^8 logits, where it takes minutes.
- `full logits`: `F.linear` and `F.cross_entropy`; left out where the logits take more than 1 GiB on the CPU,
  8 GiB on a GPU.

Peak extra memory is what the process (on CUDA, torch) holds at most during a call beyond what it held before
and the two gradients. On the CPU one thread runs and the seconds are those of the processor, since others may
share the machine; the width is small (1024 in the first case, that of Qwen3-0.6B, otherwise 128), so that a
run ends, which makes the share of the products smaller than it is in a real model.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common.record import heading, processor, write
from peers.products import product, quickest
from torch import Tensor

from millrace.kernels.token_logprob import Head, rows_per_chunk, token_logprob

SIDES = ("products", "ours", "torch chunked", "full logits")
TOKENS, WORDS = (4096, 16_384, 65_536), (32_000, 152_064)
LARGEST_LOGITS_BYTES = {"cpu": 2**30, "cuda": 2**33}
# Beyond so many logits torch's chunks take minutes on one thread.
MANY_LOGITS = 2 * 10**8
# A side beside `products` and `ours` that has run for so long is not run again.
ENOUGH_S = 5.0
# What `ours` should take at most, in times of the products.
AIM = 1.3
WARM_TOKENS = 64


def cases(device: str, full: bool, quick: bool = False) -> list[tuple[int, int, int]]:
    """Tokens, words and width."""
    if quick:
        return [(128, 4000, 64)]
    sizes = [(tokens, words) for tokens in (TOKENS if full else TOKENS[:2]) for words in WORDS]
    if device == "cuda":
        return [(tokens, words, 4096) for tokens, words in sizes]
    return [(tokens, words, 1024 if place == 0 else 128) for place, (tokens, words) in enumerate(sizes)]


def sides(tokens: int, words: int, width: int, device: str) -> dict[str, Callable[[], object]]:
    """One forward and backward of every side that fits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    normal: dict[str, Any] = {"generator": generator, "device": device}
    hidden_ND = torch.randn(tokens, width, **normal).to(dtype).requires_grad_()
    weight_VD = torch.randn(words, width, **normal).mul_(width**-0.5).to(dtype).requires_grad_()
    target_N = torch.randint(0, words, (tokens,), **normal)
    inputs = [hidden_ND, weight_VD]

    def ours() -> object:
        logprob_N, _ = token_logprob(hidden_ND, Head(weight_VD), target_N, temperature=1.0)
        return torch.autograd.grad(logprob_N.sum().neg(), inputs)

    def torch_chunked() -> object:
        options = torch.nn.LinearCrossEntropyOptions()
        loss = F.linear_cross_entropy(hidden_ND, weight_VD, target_N, reduction="sum", options=options)
        return torch.autograd.grad(loss, inputs)

    def full_logits() -> object:
        loss = F.cross_entropy(F.linear(hidden_ND, weight_VD).float(), target_N, reduction="sum")
        return torch.autograd.grad(loss, inputs)

    calls = [bare_products(hidden_ND.detach(), weight_VD.detach()), ours, torch_chunked, full_logits]
    found = dict(zip(SIDES, calls, strict=True))
    if logits_bytes(tokens, words) > LARGEST_LOGITS_BYTES[device]:
        del found["full logits"]
    many = device == "cpu" and tokens * words > MANY_LOGITS
    if many or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        del found["torch chunked"]
    return found


def bare_products(hidden_ND: Tensor, weight_VD: Tensor) -> Callable[[], object]:
    """Logits twice and both gradients, chunk by chunk."""
    num_rows = 4096 if hidden_ND.is_cuda else rows_per_chunk(weight_VD)
    slope_NV = hidden_ND.new_zeros(num_rows, len(weight_VD))
    weight_gradient_VD = torch.zeros_like(weight_VD)
    calls: list[Callable[[], object]] = []
    for size, count in Counter(len(part) for part in hidden_ND.split(num_rows)).items():
        part_ND, part_NV = hidden_ND[:size], slope_NV[:size]
        logits = product(part_ND, weight_VD)
        hidden_gradient = quickest([partial(torch.mm, part_NV, weight_VD), product(part_NV, weight_VD.T)])
        weight_gradient = partial(weight_gradient_VD.addmm_, part_NV.T, part_ND)
        calls += [logits, logits, hidden_gradient, weight_gradient] * count

    def call() -> None:
        for each in calls:
            each()

    return call


def logits_bytes(tokens: int, words: int) -> int:
    """Bytes of all logits in float32."""
    return 4 * tokens * words


def held_bytes(name: str) -> int:
    """Memory of this process: VmRSS is held now, VmHWM was held at most since the mark was set back."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no line {name}; on the CPU this script needs Linux")


def run_on_cpu(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the processor, and the most memory beyond what was held before."""
    # What the C library keeps for later would hide what the call takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = held_bytes("VmRSS")
    start_s = time.process_time()
    call()
    return time.process_time() - start_s, held_bytes("VmHWM") - before


def run_on_cuda(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the most memory beyond what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s, torch.cuda.max_memory_allocated() - before


def measure(size: tuple[int, int, int], device: str, repeats: int) -> dict[str, Any]:
    """Medians of all sides for one case."""
    tokens, words, width = size
    calls = sides(tokens, words, width, device)
    run = run_on_cuda if device == "cuda" else run_on_cpu
    # On a GPU kernels are compiled for the very sizes.
    warm = calls if device == "cuda" else sides(WARM_TOKENS, words, width, device)
    for side in calls:
        warm[side]()
    runs: dict[str, list[tuple[float, int]]] = {side: [] for side in calls}
    for turn in range(repeats):
        names = list(calls)
        start = turn % len(names)
        for side in names[start:] + names[:start]:
            if side in SIDES[:2] or sum(took_s for took_s, _ in runs[side]) < ENOUGH_S:
                runs[side].append(run(calls[side]))
    seconds = {side: statistics.median(took_s for took_s, _ in found) for side, found in runs.items()}
    peaks = {side: max(peak for _, peak in found) for side, found in runs.items() if side != "products"}
    return summary(size, 2 if device == "cuda" else 4, seconds, peaks)


def summary(
    size: tuple[int, int, int],
    bytes_each: int,
    seconds: dict[str, float],
    peaks: dict[str, int],
) -> dict[str, Any]:
    """What is written of one case; extra memory is the peak without the gradients that are asked for."""
    tokens, words, width = size
    gradients = bytes_each * width * (tokens + words)
    extra = {side: peak - gradients for side, peak in peaks.items()}
    return {
        "tokens": tokens,
        "words": words,
        "width": width,
        "logits_bytes": logits_bytes(tokens, words),
        "seconds": seconds,
        "extra_bytes": extra,
        "time_over_products": {side: took_s / seconds["products"] for side, took_s in seconds.items()},
        "extra_over_logits": {side: size / logits_bytes(tokens, words) for side, size in extra.items()},
    }


def show(result: dict[str, Any]) -> None:
    """One line for each side."""
    for side, took_s in result["seconds"].items():
        memory = f"{'':21s}"
        if side in result["extra_bytes"]:
            memory = f"{result['extra_bytes'][side] / 1e6:11.0f} {result['extra_over_logits'][side]:9.4f}"
        print(
            f"{result['tokens']:6d} {result['words']:7d} {result['width']:6d} {side:>14s} "
            f"{took_s:10.4f} {result['time_over_products'][side]:9.2f} {memory}",
            flush=True,
        )
    ratio = result["time_over_products"]["ours"]
    print(f"{'':22s} ours takes {ratio:.2f} of the products' time (aim: at most {AIM})")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="turns of all sides")
    parser.add_argument("--full", action="store_true", help="up to 65,536 tokens")
    parser.add_argument("--quick", action="store_true", help="a small case, one turn; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if given.device == "cuda" else f"{processor()}, one thread"
    print(f"{machine}; seconds, and MB beyond the gradients")
    columns = f"{'seconds':>10s} {'/products':>9s} {'extra MB':>11s} {'/logits':>9s}"
    print(f"{'T':>6s} {'V':>7s} {'D':>6s} {'':14s} {columns}")
    written: dict[str, Any] = {
        **heading("logprob", machine, "torch", "triton", "millrace-rl"),
        "dtype": "bfloat16" if given.device == "cuda" else "float32",
        "repeats": given.repeats,
        "aim_over_products": AIM,
        "cases": [],
    }
    name = "logprob_cuda" if given.device == "cuda" else "logprob"
    for size in cases(given.device, given.full, given.quick):
        written["cases"].append(measure(size, given.device, 1 if given.quick else given.repeats))
        show(written["cases"][-1])
        if given.quick:
            continue
        # After each case, so that a run that is cut short keeps what it measured.
        write(name, written)


if __name__ == "__main__":
    main()
