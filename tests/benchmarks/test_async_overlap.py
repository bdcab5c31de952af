"""What the benchmark of sampling beside training makes of its records; nothing here looks at a clock."""

from __future__ import annotations

import async_overlap

from millrace.config.recipe import load_recipe
from tests.close import close_fp64


def arrive(ended: int, time_s: float) -> dict[str, object]:
    return {"kind": "completed", "ended": ended, "time_s": time_s}


def test_an_update_costs_what_the_steps_around_it_do_not_explain():
    events = [arrive(n, 0.5 * n) for n in range(1, 5)]
    # Answers of one step come one by one; the load is between step 4 and step 6, which take 1 s without it.
    events += [arrive(4, 2.2), {"kind": "weights_loaded", "at": 4, "time_s": 2.3}]
    events += [arrive(n, 0.5 * n + 3.0) for n in range(6, 10)]
    found = async_overlap.updates(events)
    close_fp64(found["engine_step_s"], 0.5)
    close_fp64(found["update_lost_s"], 3.0)
    assert found["updates"] == 1


def test_the_fraction_of_the_overlap_is_of_what_could_be_saved():
    sides = {name: {"batch_s": 3.0} for name in (*async_overlap.SIDES, "training")}
    sides |= {"sync": {"batch_s": 1.9}, "sync, a core": {"batch_s": 4.0}, "sampling": {"batch_s": 2.0}}
    sides["training"] = {"batch_s": 1.5}
    sides["async 4"] = {"batch_s": 2.2}
    found = async_overlap.summary([sides, sides])
    close_fp64(found["at_best_s"], 2.0)
    close_fp64(found["overlap"]["async 4 against sync, a core"], 0.9)
    close_fp64(found["overlap"]["async 1 against sync, a core"], 0.5)
    # All cores in turn take less than one core each would at best.
    assert found["overlap"]["async 4 against sync"] is None


def test_every_side_is_a_recipe(tmp_path):
    read = {side: load_recipe(async_overlap.write_recipe(tmp_path, side, 20)) for side in async_overlap.SIDES}
    assert [config.rollout.max_staleness for config in read.values()] == [0, 0, 1, 4, 4, 4]
    assert [config.threads for config in read.values()] == [0, 1, 1, 1, 1, 1]  # 0 takes all cores
    assert read["sync"].engine.num_engines == 1
    assert not read["async 4, uninterrupted"].rollout.partial_rollout
