"""Shards of a vocabulary, each with a thread for a rank; processes come in `test_token_logprob_ranks`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.kernels import token_logprob as kernel
from millrace.kernels.head import Head
from millrace.kernels.token_logprob import (
    token_divergence,
    token_logprob,
    token_squares,
)
from millrace.kernels.token_logprob_parts import add_product, at_least_float32, merged, zeros
from tests.close import close_bf16, close_fp32, close_fp64
from tests.kernels.heads import CASES, CUTS, Made, gradients, random_case, shard, support_of
from tests.kernels.slow_twins import token_logprob_whole


@dataclass(frozen=True)
class Rank:
    """A group as one thread sees it; `exchange` stands in for torch's all-reduce."""

    number: int
    told: list[Tensor]
    barrier: threading.Barrier

    @staticmethod
    def exchange(x: Tensor, *, op: dist.ReduceOp.RedOpType, group: Rank) -> None:
        group.told[group.number] = x.clone()
        group.barrier.wait(timeout=20)
        all_x = torch.stack(group.told)
        x.copy_(all_x.amax(0) if op == dist.ReduceOp.MAX else all_x.sum(0))
        group.barrier.wait(timeout=20)


def in_threads(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, function: Callable[[int, Any], Any]
) -> list[Any]:
    """What `function(rank, group)` gives on each rank."""
    monkeypatch.setattr(dist, "all_reduce", Rank.exchange)
    barrier, told = threading.Barrier(num_ranks), [torch.empty(0)] * num_ranks

    def one(number: int) -> Any:
        try:
            return function(number, Rank(number, told, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("num_ranks", CUTS)
@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_shards_equal_the_whole_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, seed: int, case: str, rows: int, num_ranks: int
) -> None:
    # Shards of several sizes, so that ranks cut the tokens at different places.
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 9)
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    hidden_ND, head, target_N = random_case(seed, torch.float64, **options)
    expected = token_logprob_whole(hidden_ND, head, target_N, temperature=temperature)
    for lean in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.7)):

        def of_rank(rank: int, group: Any, lean: tuple[float, float] = lean) -> tuple[Any, ...]:
            mine_ND, part = (
                hidden_ND.detach().clone().requires_grad_(),
                shard(head, CUTS[num_ranks], rank, group),
            )
            result = token_logprob(mine_ND, part, target_N, temperature=temperature)
            return result, gradients(result, mine_ND, part, lean=lean)

        found = in_threads(monkeypatch, num_ranks, of_rank)
        again = token_logprob_whole(hidden_ND, head, target_N, temperature=temperature)
        theirs = gradients(again, hidden_ND, head, lean=lean)
        for numbers, ours in found:
            close_fp64(numbers[0], expected[0])
            close_fp64(numbers[1], expected[1])
            close_fp64(ours[0], theirs[0])
            assert torch.equal(torch.stack(numbers), torch.stack(found[0][0]))
        for k in range(1, len(theirs)):
            close_fp64(torch.cat([ours[k] for _, ours in found]), theirs[k])


def test_a_logit_shared_by_all_leaves_entropy_and_gradients_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_ND, head, target_N = random_case(2, torch.float32)
    raised = replace(head, bias_V=torch.full((17,), 512.0, requires_grad=True))
    wide_ND, wide = (
        hidden_ND.detach().double().requires_grad_(),
        replace(head, weight_VD=head.weight_VD.detach().double().requires_grad_()),
    )
    expected = token_logprob_whole(wide_ND, wide, target_N, temperature=1.0)
    exact = gradients(expected, wide_ND, wide)

    def of_rank(rank: int, group: Any) -> tuple[Any, ...]:
        part = shard(raised, CUTS[2], rank, group)
        result = token_logprob(hidden_ND, part, target_N, temperature=1.0)
        return result[1], gradients(result, hidden_ND, part, inputs=[hidden_ND])[0]

    for entropy_N, gradient_ND in in_threads(monkeypatch, 2, of_rank):
        close_fp32(entropy_N, expected[1], atol=1e-4)
        close_fp32(gradient_ND, exact[0], atol=5e-4)


def test_a_target_in_no_shard_has_log_probability_minus_infinity_and_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden_ND, head, target_N = random_case(1, torch.float64)
    expected = token_logprob_whole(hidden_ND, head, target_N, temperature=1.0)
    target_N[[2, 5]] = torch.tensor([17, -1])
    clean = torch.tensor([n not in (2, 5) for n in range(13)])

    def of_rank(rank: int, group: Any) -> tuple[Any, ...]:
        part = shard(head, CUTS[3], rank, group)
        return token_logprob(hidden_ND, part, target_N, temperature=1.0)

    for logprob_N, entropy_N in in_threads(monkeypatch, 3, of_rank):
        assert logprob_N[[2, 5]].tolist() == [-torch.inf] * 2
        close_fp64(logprob_N[clean], expected[0][clean])
        close_fp64(entropy_N, expected[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_of_one_shard_that_is_not_finite_spoils_its_own_token_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    hidden_ND = hidden_ND.detach()
    hidden_ND[4] = torch.tensor([bad, 0, 0, 0, 0])
    weight_VD = head.weight_VD.detach().clone()
    weight_VD[:6, 0] = 1.0
    weight_VD[6:, 0] = 0.5

    def of_rank(rank: int, group: Any) -> tuple[Any, ...]:
        part = shard(Head(weight_VD), CUTS[2], rank, group)
        return token_logprob(hidden_ND, part, target_N, temperature=1.0)

    for numbers in in_threads(monkeypatch, 2, of_rank):
        for number_N in numbers:
            assert number_N.isnan().tolist() == [n == 4 for n in range(13)]


def test_logits_far_apart_give_an_entropy_of_0_and_finite_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(torch.tensor([[-1e4], [1e4], [0.0], [1.0]]))
    target_N = torch.tensor([1, 0])

    def of_rank(rank: int, group: Any) -> tuple[Any, ...]:
        part = shard(head, (0, 2, 4), rank, group)
        logprob_N, entropy_N = token_logprob(torch.ones(2, 1), part, target_N, temperature=1.0)
        (logprob_N + entropy_N).sum().backward()
        return logprob_N, entropy_N, part.weight_VD.grad

    for rank, (logprob_N, entropy_N, gradient_VD) in enumerate(in_threads(monkeypatch, 2, of_rank)):
        close_fp32(logprob_N, [0.0, -2e4])
        close_fp32(entropy_N, [0.0, 0.0])
        close_fp32(gradient_VD, [[[1.0], [-1.0]], [[0.0], [0.0]]][rank])


def test_no_token_gives_empty_results_and_a_gradient_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    _, head, _ = random_case(0, torch.float64)
    nothing_ND, nothing_N = torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)

    def of_rank(rank: int, group: Any) -> tuple[Any, ...]:
        part = shard(head, CUTS[2], rank, group)
        logprob_N, entropy_N = token_logprob(nothing_ND, part, nothing_N, temperature=1.0)
        (logprob_N.sum() + entropy_N.sum()).backward()
        return logprob_N.shape, entropy_N.shape, part.weight_VD.grad

    for one, other, gradient_VD in in_threads(monkeypatch, 2, of_rank):
        assert one == other == (0,)
        assert gradient_VD.eq(0).all()


def test_a_shard_holds_one_chunk_of_its_own_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 120)
    hidden_ND = torch.linspace(-1, 1, 64)[:, None].requires_grad_()
    head = Head(torch.linspace(-1, 1, 100)[:, None].requires_grad_(), None, 0.5, 3.0)
    target_N = torch.zeros(64, dtype=torch.long)

    def of_rank(rank: int, group: Any) -> int:
        part = shard(head, (0, 60, 100), rank, group)
        with Made() as made:
            sum(token_logprob(hidden_ND, part, target_N, temperature=0.9)).sum().backward()
        return made.largest

    # What is exchanged is [2, N] and [3, N], and four numbers of the parts.
    assert in_threads(monkeypatch, 2, of_rank) == [256, 256]
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 600)
    assert in_threads(monkeypatch, 2, of_rank) == [600, 600]


def test_a_shard_is_for_log_probabilities_without_a_support_alone() -> None:
    group: Any = object()
    hidden_ND, head, target_N = random_case(0, torch.float64)
    part = shard(head, CUTS[2], 1, group)
    calls: list[Callable[[], Any]] = [
        lambda: token_logprob(hidden_ND, part, target_N, temperature=1.0, support=support_of(*[[]] * 13)),
        lambda: token_squares(hidden_ND, part, temperature=1.0),
        lambda: token_divergence(hidden_ND, part, hidden_ND, part, temperature=1.0),
        lambda: token_divergence(hidden_ND, head, hidden_ND, part, temperature=1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == (
            "head is a shard of the vocabulary, for which there is only token_logprob without a support; "
            "gather the weight and leave out the group"
        )


def test_parts_of_one_rank_are_merged_like_one() -> None:
    z_NV = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    target_N = torch.tensor([0, 3, 8, 5])
    columns = []
    for start, stop in ((0, 3), (3, 4), (4, 9)):
        x_NV = z_NV[:, start:stop]
        highest_N = x_NV.amax(1)
        low_NV = x_NV - highest_N[:, None]
        here_NV = torch.arange(start, stop) == target_N[:, None]
        target_z_N = x_NV.masked_fill(~here_NV, -torch.inf).amax(1)
        columns.append([highest_N, target_z_N, low_NV.exp().sum(1), (low_NV.exp() * low_NV).sum(1)])
    part_4SN = torch.stack([torch.stack(column) for column in zip(*columns, strict=True)])
    (logprob_N, entropy_N), (highest_N, log_total_N, mean_N) = merged(part_4SN, None)
    log_p_NV = z_NV.log_softmax(1)
    close_fp64(logprob_N, log_p_NV[torch.arange(4), target_N])
    close_fp64(entropy_N, -(log_p_NV.exp() * log_p_NV).sum(1))
    close_fp64(highest_N, z_NV.amax(1))
    close_fp64(highest_N + log_total_N, z_NV.logsumexp(1))
    close_fp64(highest_N + mean_N, (log_p_NV.exp() * z_NV).sum(1))


def test_products_are_added_in_the_width_of_the_total() -> None:
    left, right = torch.full((2, 3), 2.0), torch.full((3, 4), 5.0)
    for narrow in (torch.float32, torch.bfloat16):
        total = zeros(torch.ones(2, 4, dtype=narrow))
        assert total.dtype == at_least_float32(left.to(narrow)) == torch.float32
        for _ in range(2):
            add_product(total, left.to(narrow), right.to(narrow))
        close_bf16(total, [[60.0] * 4] * 2)
    with Made(size=8) as made:
        add_product(torch.zeros(2, 4), left, right)
    assert made.count == 2  # the total, and the total again, but no product on its own
    assert at_least_float32(left.double()) == torch.float64
