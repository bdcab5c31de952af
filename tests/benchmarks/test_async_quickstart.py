"""Which runs the benchmark of staleness makes, and what it tells of them; nothing here looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path

import async_quickstart
from async_quickstart import BOUNDS, Run

from millrace.config.recipe import load_recipe
from tests.close import close_fp64


def test_two_kinds_run_at_each_bound_and_the_others_at_one():
    runs = async_quickstart.wanted(2, list(BOUNDS), Path("work"))
    assert len(runs) == len({run.folder for run in runs}) == 2 * (5 + 5 + 6)
    assert {run.staleness for run in runs if run.kind == "decoupled"} == set(BOUNDS)
    assert {run.staleness for run in runs if "," in run.kind} == {4}


def test_the_ablation_has_one_kind_without_staleness_and_two_with():
    runs = async_quickstart.of_ablation(3, Path("work"))
    assert len(runs) == len({run.folder for run in runs}) == 3 * (1 + 2 + 2)
    assert {run.kind for run in runs if not run.staleness} == {"naive"}
    config = load_recipe("quickstart", async_quickstart.ABLATION["decoupled, no cap"])
    assert config.policy.correction is not None and config.policy.proximal == "recompute"
    assert (config.policy.optimizer_steps_per_batch, config.advantage.kind) == (4, "reinforce_plus_plus")


def test_a_run_comes_to_its_means_over_batches(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"eval_before": 0.5, "eval_after": 0.9}))
    records = [
        {"stage": "reinforcement", "staleness/mean": n, "staleness/max": n + 1, "time/wall_s": 10.0 * n}
        for n in range(3)
    ]
    records[1]["mismatch/k3"], records[2]["mismatch/k3"] = 1e-3, 3e-3
    records[0]["policy/clip_fraction"], records[1]["mismatch/ess"] = 0.25, 0.75
    lines = [json.dumps(record) + "\n" for record in [*records, {"stage": "evaluation"}]]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    found = async_quickstart.figures(tmp_path)
    assert list(found) == list(async_quickstart.FIGURES)
    close_fp64(list(found.values()), [0.5, 0.9, 1.0, 3.0, 2e-3, 0.25, 0.75, 20.0])


def test_table_and_picture_are_of_all_seeds():
    place = dict.fromkeys(async_quickstart.FIGURES, 0.5)
    found = {Run("plain", 4, seed, Path("work")): place | {"after": 0.8 + seed / 10} for seed in (0, 1)}
    told = async_quickstart.rows(found)
    assert [(row["kind"], row["staleness"], row["before"]) for row in told] == [("plain", 4, [0.5, 0.5])]
    assert "| plain | 4 | 0.500 | 0.850 (0.800, 0.900) |" in async_quickstart.table(told)
    found[Run("decoupled", 4, 0, Path("work"))] = place
    assert "rollout.max_staleness" in async_quickstart.picture(async_quickstart.rows(found))
