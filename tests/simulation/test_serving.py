"""Serving is simulated on the real scheduler: the plans of the engine, and arithmetic that can be checked."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from millrace.errors import PlanError
from millrace.inference.engine_sizes import EngineSizes
from millrace.planner.durations import constant, lognormal
from millrace.planner.engine_cost import EngineCost, step_load
from millrace.planner.placement import Apart, Here, Link, Objective
from millrace.simulation.arrivals import ServingRequest, at_rate, mean_rate, random_requests, read_arrivals
from millrace.simulation.role_placement import EngineLoad, place_by_role
from millrace.simulation.serving import (
    Serving,
    ServingSimulation,
    attainment,
    roles_of,
)
from millrace.simulation.step_engines import ModelledEngine, step_seconds
from tests.close import close_fp64

COST = EngineCost(step_s=2e-3, token_s=4e-5, pair_s=2e-7, row_s=1e-4, context_s=9e-7)
SIZES = EngineSizes(
    num_blocks=256, block_size=16, max_batch_tokens=512, max_requests=64, max_length=4096, block_bytes=1000
)

OBJECTIVE = Objective(ttft_s=0.05, tpot_s=0.01)

seconds = step_seconds(COST)


def workload(num: int, seed: int = 0, rate: float = 20.0) -> list[ServingRequest]:
    lengths = lognormal(60, 0.8), lognormal(10, 0.8)
    return random_requests(num, rate=rate, burstiness=1, prompt=lengths[0], output=lengths[1], seed=seed)


def test_one_request_takes_what_its_steps_take():
    """1000 tokens are two chunks; then four tokens one by one."""
    request = ServingRequest(0, 1.0, tuple(range(1000)), 5)
    (times,) = ServingSimulation([("both", ModelledEngine(SIZES, seconds))]).run([request])
    chunks = COST.seconds(step_load(np.array([512]), np.array([0])))
    chunks += COST.seconds(step_load(np.array([488]), np.array([512])))
    tokens = [COST.seconds(step_load(np.array([1]), np.array([1000 + i]))) for i in range(4)]
    close_fp64(times.ttft_s, chunks)
    close_fp64(times.tpot_s, sum(tokens) / 4)


def test_a_prompt_travels_to_the_engine_that_decodes():
    """62 of 63 blocks travel: the last token, and the rest of its block, are computed again."""
    request = ServingRequest(0, 0.0, tuple(range(1000)), 3)
    engines = [("prefill", ModelledEngine(SIZES, seconds)), ("decode", ModelledEngine(SIZES, seconds))]
    link = Link(latency_s=0.5, bytes_per_s=1e6)
    (times,) = ServingSimulation(engines, link=link).run([request])
    again = COST.seconds(step_load(np.array([9]), np.array([992])))
    then = COST.seconds(step_load(np.array([1]), np.array([1001])))
    close_fp64(times.last_s - times.first_s, 0.5 + 62_000 / 1e6 + again + then)
    assert [engine.leases.num_blocks for _, engine in engines] == [0, 0]


def test_blocks_wait_until_the_decode_engine_has_room():
    """Two prompts fill the pool of the decode engine; the third one begins when one of them has ended."""
    tight = replace(SIZES, num_blocks=24)
    prompt = [(number, *range(1, 160)) for number in range(3)]
    requests = [ServingRequest(number, 0.0, prompt[number], 20) for number in range(3)]
    engines = [("prefill", ModelledEngine(SIZES, seconds)), ("decode", ModelledEngine(tight, seconds))]
    first, second, third = ServingSimulation(engines).run(requests)
    assert third.first_s == second.first_s < first.last_s < third.last_s - 19 * 2e-3
    assert engines[1][1].scheduler.num_preemptions == 0
    assert engines[0][1].leases.num_blocks == 0


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("policy", ["collocated", "adaptive", "1:2", "2:1"])
def test_all_requests_are_served_and_the_same_again(policy):
    serving = Serving(3, replace(SIZES, num_blocks=64), COST, Link(), OBJECTIVE)
    requests = workload(40)
    times = serving.run(policy, requests)
    assert [one.num_tokens for one in times] == [request.num_output for request in requests]
    assert all(one.ttft_s > 0 and one.tpot_s >= 0 for one in times)
    again = serving.run(policy, requests)
    assert [one.last_s for one in again] == [one.last_s for one in times]


@pytest.mark.slow
def test_goodput_is_the_rate_at_which_the_objective_is_still_met():
    serving, requests = Serving(2, SIZES, COST, Link(), OBJECTIVE), workload(30)
    rate = serving.goodput("collocated", requests)
    assert rate is not None
    good, bad = (
        attainment(serving.run("collocated", at_rate(requests, rate * factor)), OBJECTIVE)
        for factor in (1, 8)
    )
    assert bad < 0.9 <= good
    hopeless = replace(serving, objective=Objective(1e-6, 1e-6))
    assert hopeless.goodput("collocated", requests) is None


def test_arrivals_have_their_rate_and_burstiness():
    def gaps(burstiness):
        found = random_requests(
            4000, rate=5, burstiness=burstiness, prompt=constant(7), output=constant(3), seed=1
        )
        assert {(len(one.prompt), one.num_output) for one in found} == {(7, 3)}
        assert len({one.prompt for one in found}) == 4000
        return np.diff([one.arrival_s for one in found])

    for burstiness in (1.0, 3.0):
        gap_N = gaps(burstiness)
        assert abs(gap_N.mean() / 0.2 - 1) < 0.1
        assert abs(gap_N.std() / gap_N.mean() / burstiness - 1) < 0.1
    close_fp64(mean_rate(at_rate(workload(50), 3.0)), 3.0)
    with pytest.raises(PlanError, match="at a rate of 0/s"):
        random_requests(1, rate=0, burstiness=1, prompt=constant(1), output=constant(1), seed=0)


def test_traces_of_both_forms_are_read(tmp_path):
    rows = [{"timestamp": 27_000 + 500 * i, "input_length": 600, "output_length": 3 + i} for i in range(3)]
    rows[1]["hash_ids"], rows[2]["hash_ids"] = [4, 5], [4, 6]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_arrivals(tmp_path / "m.jsonl", most=10)
    assert [(one.arrival_s, len(one.prompt), one.num_output) for one in found] == [
        (0.0, 600, 3),
        (0.5, 600, 4),
        (1.0, 600, 5),
    ]
    assert found[1].prompt[:512] == found[2].prompt[:512] and found[1].prompt[512] != found[2].prompt[512]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.1805900,396,109"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    first, second = read_arrivals(tmp_path / "a.csv", most=10)
    assert (first.arrival_s, len(second.prompt), second.num_output) == (0.0, 396, 109)
    close_fp64(second.arrival_s, 3.5)
    assert len(read_arrivals(tmp_path / "m.jsonl", most=2)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]\n",
        '{"timestamp": 1, "input_length": 0, "output_length": 1}\n',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
        '{"timestamp": 1, "input_length": 1, "output_length": 1e99}\n',
        '{"timestamp": 1, "input_length": 1, "output_length": Infinity}\n',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [null]}\n',
    ],
)
def test_a_damaged_trace_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(PlanError, match="--trace .*(is no trace|has 0 requests)"):
        read_arrivals(tmp_path / "t.jsonl", most=10)


def test_roles_and_placement_are_those_of_the_policy():
    assert roles_of("collocated", 2) == ["both"] * 2 and roles_of("1:2", 3) == ["prefill", "decode", "decode"]
    for policy in ("1:1", "0:3", "x", "1:2:3"):
        with pytest.raises(PlanError, match="policy"):
            roles_of(policy, 3)
    loads = [
        EngineLoad("a", "prefill", waiting_tokens=9),
        EngineLoad("b", "prefill", waiting_tokens=5),
        EngineLoad("c", "decode", num_requests=2),
        EngineLoad("d", "decode", num_requests=1, context_tokens=500),
    ]
    assert place_by_role(100, loads) == Apart("b", "d")
    both = [EngineLoad("x", "both", context_tokens=3), EngineLoad("y", "both", context_tokens=2)]
    assert place_by_role(100, both) == Here("y")
    with pytest.raises(PlanError, match="engines of the roles prefill cannot serve a request of 100"):
        place_by_role(100, loads[:2])


def test_a_request_that_fits_no_engine_is_refused():
    serving = Serving(1, SIZES, COST, Link(), OBJECTIVE)
    with pytest.raises(PlanError, match="a request cannot be served: the prompt has 4096 tokens"):
        serving.run("collocated", [ServingRequest(0, 0.0, tuple(range(4096)), 4)])
