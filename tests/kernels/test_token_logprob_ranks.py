"""Shards of a vocabulary on real processes; what threads can show stands in `test_token_logprob_parts`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.close import close_fp32
from tests.kernels.heads import CASES, CUTS, gradients, random_case, shard
from tests.ranks import run_ranks

pytestmark = pytest.mark.world

TEMPERATURE = 0.7
LEANS = ((1.0, 0.0), (0.0, 1.0), (1.0, -0.7))


def case_of(name: str) -> tuple[Any, ...]:
    quirks = {key: value for key, value in CASES[name].items() if key != "temperature"}
    return random_case(5, torch.float32, **quirks)


def of_rank(rank: int) -> dict[str, Tensor]:
    """Numbers and gradients of every case, over two ranks and over all, by torch and by the interpreter."""
    from millrace.kernels import token_logprob_triton as gpu
    from millrace.kernels.token_logprob import token_logprob

    pair = dist.new_group([0, 1])
    found = {}
    for num_ranks, group in ((2, pair), (3, dist.group.WORLD)):
        if rank >= num_ranks:
            continue
        for name in CASES:
            for function in (
                (token_logprob, gpu.token_logprob) if name in ("plain", "all") else (token_logprob,)
            ):
                for lean in LEANS:
                    hidden_ND, head, target_N = case_of(name)
                    part = shard(head, CUTS[num_ranks], rank, group)
                    result = function(hidden_ND, part, target_N, temperature=TEMPERATURE)
                    slopes = gradients(result, hidden_ND, part, lean=lean)
                    key = f"{num_ranks} {name} {function.__module__} {lean}"
                    found |= {f"{key} {k}": x for k, x in enumerate([*result, *slopes])}
    return found


@pytest.mark.slow
def test_shards_on_gloo_equal_the_whole_in_values_and_gradients() -> None:
    from tests.kernels.slow_twins import token_logprob_whole

    ranks = run_ranks(3, of_rank)
    assert sorted(map(len, ranks)) == [len(ranks[2]), 2 * len(ranks[2]), 2 * len(ranks[2])]
    for key in ranks[0]:
        num_ranks, name, _, *lean, k = key.split(" ")
        of_key = [found[key] for found in ranks[: int(num_ranks)]]
        hidden_ND, head, target_N = case_of(name)
        result = token_logprob_whole(hidden_ND, head, target_N, temperature=TEMPERATURE)
        first, second = (float(share.strip("(),")) for share in lean)
        expected = [*result, *gradients(result, hidden_ND, head, lean=(first, second))][int(k)]
        if int(k) < 3:  # the numbers and the hidden states are everybody's, the rest is a shard's own
            for one in of_key:
                close_fp32(one, expected, rtol=1e-5, atol=3e-6)
        else:
            close_fp32(torch.cat(of_key), expected, rtol=1e-5, atol=3e-6)
