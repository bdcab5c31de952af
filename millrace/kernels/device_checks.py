"""Compare the Triton kernels with torch in float64 on a device, and time both.

`millrace doctor --gpu` runs this on a user's GPU; the tests run it small, in Triton's interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from millrace.kernels import linear_scan as plain_scan
from millrace.kernels.device_record import KERNELS, Kernel
from millrace.kernels.head import Head
from millrace.kernels.paged_attention import (
    PagedRows,
    new_pool,
    paged_attention_plain,
    store_kv_plain,
)
from millrace.kernels.paged_attention_torch import paged_attention_torch
from millrace.kernels.token_logprob import chunked_logprob

SLOTS, SCALE, TEMPERATURE, GAMMA, LAM = 16, 0.2, 0.7, 0.99, 0.95
# Relative and absolute difference from float64 that rounding explains, by dtype.
ROUNDING = {torch.float32: (1e-4, 1e-4), torch.float16: (1e-2, 1e-2), torch.bfloat16: (2e-2, 2e-2)}
# Of a gradient that is a sum over many tokens, the share of its norm.
GRADIENT = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}
REPEATS = 5


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """What is computed.

    Attributes:
        dtypes: of attention and log-probabilities.
        lengths: tokens of each row of attention.
        heads: query heads per key head, and width of a head.
        limits: options of attention.
        words: tokens, vocabulary and model width of each head.
        segments: lengths of packed segments of a scan.
        timed_tokens: keys of a timed decode step, in 16 rows.
        timed_words: tokens, vocabulary and model width of the timed head.
    """

    dtypes: Sequence[torch.dtype]
    lengths: Sequence[int]
    heads: Sequence[tuple[int, int]]
    limits: Sequence[dict[str, Any]]
    words: Sequence[tuple[int, int, int]]
    segments: Sequence[int]
    timed_tokens: int
    timed_words: tuple[int, int, int]


WHOLE = CheckSizes(
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    lengths=(1, 2000, 63, 257, 256, 1025, 700),
    heads=((1, 64), (3, 80), (4, 128), (8, 256), (16, 32)),
    limits=({}, {"window": 300}, {"softcap": 3.0, "window": 70}, {"chunk": 128}),
    words=((1, 300, 64), (1000, 5001, 200), (9000, 9000, 256)),
    segments=(1, 5_000, 0, 70_000, 2, 300, 1_000_000, 7),
    timed_tokens=16 * 8192,
    timed_words=(8192, 152_064, 2048),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """One comparison.

    Attributes:
        kernel: the kernel.
        case: what was computed.
        share: the largest difference as a share of what rounding explains; above 1 it is wrong.
        error: of a computation that failed, the exception; empty otherwise.
    """

    kernel: Kernel
    case: str
    share: float
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the result is right up to rounding; NaN is wrong."""
        return not self.error and self.share <= 1


@dataclass(frozen=True, slots=True)
class Timed:
    """Median seconds of a kernel, and of the torch operations that replace it."""

    kernel: Kernel
    case: str
    kernel_s: float
    torch_s: float


Case = tuple[Kernel, str, Callable[[], float]]


def num_cases(sizes: CheckSizes) -> dict[Kernel, int]:
    """Count the comparisons of each kernel."""
    names = [kernel for kernel, _, _ in _cases(torch.device("cpu"), sizes)]
    return {kernel: names.count(kernel) for kernel in KERNELS}


def check_kernels(device: torch.device, sizes: CheckSizes = WHOLE) -> Iterator[Checked]:
    """Run every comparison on a device; a computation that fails is a failed comparison."""
    for kernel, case, largest_share in _cases(device, sizes):
        try:
            yield Checked(kernel, case, largest_share())
        # Compilers and drivers raise anything; the report is what the user asked for.
        except Exception as error:
            yield Checked(kernel, case, float("nan"), f"{type(error).__name__}: {error}")


def passed(checks: Sequence[Checked]) -> dict[Kernel, bool]:
    """Which kernels gave the right result in every comparison; one without a comparison did not."""
    of_kernel = {kernel: [one for one in checks if one.kernel == kernel] for kernel in KERNELS}
    return {kernel: bool(found) and all(one.passed for one in found) for kernel, found in of_kernel.items()}


def time_kernels(device: torch.device, sizes: CheckSizes = WHOLE) -> Iterator[Timed]:
    """Time attention and log-probabilities against what replaces them."""
    from millrace.kernels import paged_attention_triton, token_logprob_triton

    dtype = sizes.dtypes[0]
    lengths = [sizes.timed_tokens // 16] * 16
    inputs = _attention_inputs(device, dtype, lengths, [length - 1 for length in lengths], (4, 128))
    sides = [
        partial(function, *inputs, scale=SCALE)
        for function in (paged_attention_triton.paged_attention, paged_attention_torch)
    ]
    yield Timed("paged_attention", f"decode, {sizes.timed_tokens:,} keys", *_seconds(device, sides))
    hidden_ND, head, target_N = _head_inputs(device, dtype, sizes.timed_words, None)

    def step(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        function(hidden_ND, head, target_N, temperature=TEMPERATURE)[0].sum().backward()

    steps = [partial(step, function) for function in (token_logprob_triton.token_logprob, chunked_logprob)]
    case = "forward and backward, {:,} tokens, {:,} words".format(*sizes.timed_words)
    yield Timed("token_logprob", case, *_seconds(device, steps))


def as_json(checks: Sequence[Checked], times: Sequence[Timed]) -> dict[str, Any]:
    """Return what a report has of the results."""
    return {
        "checks": [{**asdict(one), "passed": one.passed} for one in checks],
        "times": [asdict(one) for one in times],
    }


def _cases(device: torch.device, sizes: CheckSizes) -> Iterator[Case]:
    for dtype in sizes.dtypes:
        for heads in sizes.heads:
            for limits in sizes.limits:
                name = f"{_short(dtype)}, {heads[0]} queries a key, width {heads[1]}, {limits or 'no limits'}"
                yield (
                    "paged_attention",
                    name,
                    partial(_attention, device, dtype, sizes.lengths, heads, limits),
                )
        yield "paged_attention", f"{_short(dtype)}, stored tokens", partial(_stored, device, dtype)
        yield (
            "paged_attention",
            f"{_short(dtype)}, the same bits in any chunks",
            partial(_same_bits, device, dtype, sizes.lengths, sizes.heads[-1]),
        )
        for words in sizes.words:
            for softcap in (None, 5.0):
                name = f"{_short(dtype)}, {words[0]} x {words[1]} x {words[2]}, soft cap {softcap}"
                yield "token_logprob", name, partial(_logprobs, device, dtype, words, softcap)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for reverse in (True, False):
            name = f"{_short(dtype)}, {'backward' if reverse else 'forward'}"
            yield "linear_scan", name, partial(_scan, device, dtype, sizes.segments, reverse)
        yield "linear_scan", f"{_short(dtype)}, GAE", partial(_gae, device, dtype, sizes.segments)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _share(found: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The largest difference as a share of what is allowed."""
    relative, absolute = ROUNDING[dtype]
    exact = exact.detach().double()
    difference = (found.detach().double() - exact).abs()
    return float((difference / (absolute + relative * exact.abs())).max()) if exact.numel() else 0.0


def _attention_inputs(
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int],
    starts: Sequence[int],
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Queries from position `starts` on of rows of these lengths, a full pool in random order, the tables."""
    group, width = heads
    length_B, start_B = torch.tensor(lengths), torch.tensor(starts)
    num_blocks_B = -(-length_B // SLOTS)
    order = torch.randperm(int(num_blocks_B.sum()), generator=torch.Generator().manual_seed(1)).int()
    block_BC = torch.zeros(len(lengths), int(num_blocks_B.max()), dtype=torch.int32)
    for b, blocks in enumerate(order.split(num_blocks_B.tolist())):
        block_BC[b, : len(blocks)] = blocks
    count_B = length_B - start_B
    pool = new_pool(len(order), 2, SLOTS, width, dtype=dtype, device=device)
    for seed, part in enumerate(pool):
        part.copy_(_normal(device, dtype, *part.shape, seed=seed))
    rows = PagedRows(
        block_BC.to(device),
        start_B.to(device),
        (count_B.cumsum(0) - count_B).to(device),
        count_B.to(device),
        torch.full((int(count_B.sum()),), -1, dtype=torch.int64, device=device),
        int(count_B.max()),
        int(length_B.max()),
    )
    query_THK = _normal(device, dtype, int(count_B.sum()), 2 * group, width, seed=2)
    return query_THK, *pool, rows


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int],
    heads: tuple[int, int],
    limits: dict[str, Any],
) -> float:
    """A decode step, and a prefill of the last third of each row."""
    from millrace.kernels import paged_attention_triton

    largest = 0.0
    for starts in ([length - 1 for length in lengths], [length * 2 // 3 for length in lengths]):
        query_THK, key, value, rows = _attention_inputs(device, dtype, lengths, starts, heads)
        found = paged_attention_triton.paged_attention(query_THK, key, value, rows, scale=SCALE, **limits)
        exact = paged_attention_plain(
            query_THK.double(), key.double(), value.double(), rows, scale=SCALE, **limits
        )
        largest = _larger(largest, _share(found, exact, dtype))
    return largest


def _stored(device: torch.device, dtype: torch.dtype) -> float:
    from millrace.kernels import paged_attention_triton

    pools = [new_pool(8, 2, SLOTS, 64, dtype=dtype, device=device) for _ in range(2)]
    key_TJK, value_TJK = (_normal(device, dtype, 40, 2, 64, seed=seed) for seed in (0, 1))
    order = torch.randperm(8 * SLOTS, generator=torch.Generator().manual_seed(0))[:40]
    order[::7] = -1
    slot_T = order.to(device)
    paged_attention_triton.store_kv(key_TJK, value_TJK, *pools[0], slot_T)
    store_kv_plain(key_TJK, value_TJK, *pools[1], slot_T)
    return 0.0 if all(map(torch.equal, *pools)) else float("inf")


def _same_bits(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int], heads: tuple[int, int]
) -> float:
    from millrace.kernels.paged_attention_triton import paged_prefill

    whole = _attention_inputs(device, dtype, lengths, [0] * len(lengths), heads)
    whole_THV = paged_prefill(*whole, scale=SCALE)
    starts = [length // 3 for length in lengths]
    _, key, value, rows = _attention_inputs(device, dtype, lengths, starts, heads)
    begins = [sum(lengths[:b]) for b in range(len(lengths))]
    index_T = torch.cat(
        [
            torch.arange(begin + start, begin + length)
            for begin, start, length in zip(begins, starts, lengths, strict=True)
        ]
    ).to(device)
    part_THV = paged_prefill(whole[0][index_T], key, value, rows, scale=SCALE)
    return 0.0 if torch.equal(part_THV, whole_THV[index_T]) else float("inf")


def _head_inputs(
    device: torch.device, dtype: torch.dtype, words: tuple[int, int, int], softcap: float | None
) -> tuple[Tensor, Head, Tensor]:
    num_tokens, num_words, width = words
    weight_VD = _normal(device, dtype, num_words, width, seed=1) / width**0.5
    target_N = torch.arange(num_tokens, device=device) * 7919 % num_words
    hidden_ND = _normal(device, dtype, num_tokens, width).requires_grad_()
    return hidden_ND, Head(weight_VD.requires_grad_(), softcap=softcap), target_N


def _logprobs(
    device: torch.device, dtype: torch.dtype, words: tuple[int, int, int], softcap: float | None
) -> float:
    """Values, and gradients of the hidden states and the head."""
    from millrace.kernels import token_logprob_triton

    hidden_ND, head, target_N = _head_inputs(device, dtype, words, softcap)
    found = token_logprob_triton.token_logprob(hidden_ND, head, target_N, temperature=TEMPERATURE)
    wide_ND, wide_VD = (x.detach().double().requires_grad_() for x in (hidden_ND, head.weight_VD))
    logit_NV = wide_ND @ wide_VD.T
    if softcap is not None:
        logit_NV = softcap * torch.tanh(logit_NV / softcap)
    all_NV = (logit_NV / TEMPERATURE).log_softmax(1)
    exact = all_NV.gather(1, target_N[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(1)
    largest = 0.0
    for one_N, exact_N in zip(found, exact, strict=True):
        # Logits are computed from inputs in the dtype, sums and results in float32.
        largest = _larger(largest, _share(one_N, exact_N, torch.float32))
    slope_N = torch.linspace(-1, 2, len(target_N), device=device)

    def gradients(result: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad((result[0] * slope_N - 0.7 * result[1] * slope_N.flip(0)).sum(), inputs)

    ours, theirs = gradients(found, [hidden_ND, head.weight_VD]), gradients(exact, [wide_ND, wide_VD])
    for one, other in zip(ours, theirs, strict=True):
        share = (one.double() - other).norm() / other.norm() / GRADIENT[dtype]
        largest = _larger(largest, float(share))
    return largest


def _scan_rows(
    device: torch.device, dtype: torch.dtype, segments: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    length_B = torch.tensor(segments)
    num_tokens = int(length_B.sum())
    w_T = _normal(device, torch.float32, num_tokens, seed=1).sigmoid()
    w_T[(length_B.cumsum(0) - 1)[length_B > 0].to(device)] = 0
    return _normal(device, dtype, num_tokens), w_T.to(dtype), length_B


def _scan(device: torch.device, dtype: torch.dtype, segments: Sequence[int], reverse: bool) -> float:
    from millrace.kernels import linear_scan_triton

    x_T, w_T, _ = _scan_rows(device, dtype, segments)
    out_T = torch.empty_like(x_T)
    linear_scan_triton.linear_scan(x_T, w_T, out_T, reverse=reverse)
    exact_T = plain_scan.loop(x_T.double(), w_T.double(), reverse=reverse).to(device)
    return _share(out_T, exact_T, torch.float32 if dtype == torch.float64 else dtype)


def _gae(device: torch.device, dtype: torch.dtype, segments: Sequence[int]) -> float:
    from millrace.kernels import linear_scan_triton

    reward_T, _, length_B = _scan_rows(device, dtype, segments)
    value_T = _normal(device, dtype, len(reward_T), seed=3)
    # A number that float32 has: the kernel takes gamma in it.
    gamma = float(torch.tensor(GAMMA))
    options: dict[str, Any] = {
        "gamma": gamma,
        "decay_B": torch.full((len(length_B),), gamma * LAM, dtype=torch.float64),
        "bootstrap_B": value_T.new_zeros(len(length_B)),
    }
    outs = [(torch.empty_like(value_T), torch.empty_like(value_T)) for _ in range(2)]
    lengths = length_B.to(device)
    linear_scan_triton.gae(reward_T, value_T, lengths, outs[0], **options)
    plain_scan.gae(reward_T, value_T, lengths, outs[1], **options, scan=plain_scan.loop)
    allowed = torch.float32 if dtype == torch.float64 else dtype
    return _larger(*(_share(one, other, allowed) for one, other in zip(*outs, strict=True)))


def _larger(one: float, other: float) -> float:
    """The larger number; NaN if one is."""
    return one if one != one or one > other else other


def _seconds(device: torch.device, sides: Sequence[Callable[[], Any]]) -> list[float]:
    """Median seconds of each side, in turns, after a call that compiles."""
    taken: list[list[float]] = [[] for _ in sides]
    for turn in range(REPEATS + 1):
        for side, of_side in zip(sides, taken, strict=True):
            _wait(device)
            begin = time.perf_counter()
            side()
            _wait(device)
            if turn:
                of_side.append(time.perf_counter() - begin)
    return [statistics.median(of_side) for of_side in taken]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
