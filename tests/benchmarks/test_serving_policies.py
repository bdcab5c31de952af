"""Traces of the simulated comparison of policies."""

from __future__ import annotations

import pytest
import serving_policies

from millrace.simulation.arrivals import mean_rate


@pytest.mark.slow
def test_traces_have_their_rates_and_phases():
    found = serving_policies.traces(4, 200, 0)
    assert len(found) == 2 * (len(serving_policies.KINDS) + 1)
    assert all(len(some) == 200 for some in found.values())
    assert abs(mean_rate(found["long prompts, high"]) / 9.0 - 1) < 0.2
    changing = found["changing, medium"]
    means = [sum(len(one.prompt) for one in changing[k : k + 50]) / 50 for k in range(0, 200, 50)]
    assert min(means[0], means[2]) > 3000 > 400 > max(means[1], means[3])
    assert [one.arrival_s for one in changing] == sorted(one.arrival_s for one in changing)
    assert len({one.prompt[0] for one in changing}) == 200


def test_policies_are_quarters_of_the_engines():
    assert serving_policies.policies(16) == ["collocated", "4:12", "8:8", "12:4", "adaptive"]


@pytest.mark.slow
def test_a_batch_takes_as_long_as_its_last_request():
    wanted = serving_policies.batch("short prompts", 12, 0)
    assert {one.arrival_s for one in wanted} == {0.0}
    options = (
        serving_policies.SIZES,
        serving_policies.COST,
        serving_policies.LINK,
        serving_policies.OBJECTIVE,
    )
    serving = serving_policies.Serving(4, *options)
    found = serving_policies.batch_seconds(serving, ["collocated", "3:1", "adaptive"], wanted)
    # The step of one request alone bounds it from below.
    longest = max(one.num_output for one in wanted)
    assert all(found[name] >= longest * serving_policies.COST.step_s for name in ("collocated", "3:1"))
    assert found["over_best_static"] == min(found["collocated"], found["3:1"]) / found["makespan"]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["long prompts", "short prompts"])
def test_placed_for_its_end_a_batch_ends_as_soon_as_under_the_best_static_policy(kind, seed):
    serving = serving_policies.Serving(
        4, serving_policies.SIZES, serving_policies.COST, serving_policies.LINK, serving_policies.OBJECTIVE
    )
    wanted = serving_policies.batch(kind, 60, seed)
    found = serving_policies.batch_seconds(serving, ["collocated", "1:3", "2:2", "3:1"], wanted)
    assert found["over_best_static"] >= 0.98
