"""Old names of settings: accepted with a warning that has the new name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import format_warning
from millrace.config.explain import known_keys
from millrace.config.recipe import ConfigError, from_yaml, load_recipe
from millrace.config.renamed import RENAMED, RenamedSettingWarning, renamed, renamed_overrides

INPUTS = "data: {train: sums.jsonl}\nrewards: [{kind: exact}]\n"
OLD = """
warmup: {steps: 9, gate: [0.4, 0.6], token_weights: token_sum}
flow: {staleness: 2, order: completion, stale: drop, interrupt: false}
rollout: {refill_rounds: 1, max_tokens: 8}
engine: {processes: 2, max_requests: 64}
policy: {token_weights: token_sum, optimizer_steps_per_batch: 2, loss: {low: 0.1, high: 0.3}}
limits: {phase_s: 60.0, nonfinite_steps: 3}
trackers: []
"""
NEW = """
sft: {steps: 9, stop_accuracy: [0.4, 0.6], loss_aggregation: token_sum}
rollout: {dynamic_sampling_rounds: 1, max_tokens: 8, max_staleness: 2, batch_order: completion,
          stale_policy: drop, partial_rollout: false}
engine: {num_engines: 2, max_num_seqs: 64}
policy: {loss_aggregation: token_sum, optimizer_steps_per_batch: 2, loss: {clip_low: 0.1, clip_high: 0.3}}
limits: {nonfinite_steps: 3}
timeouts: {phase_s: 60.0}
loggers: []
"""


def test_a_recipe_of_old_names_is_the_recipe_of_new_ones(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(INPUTS + OLD)
    (tmp_path / "new.yaml").write_text(INPUTS + NEW)
    with pytest.warns(RenamedSettingWarning) as caught:
        config = load_recipe(tmp_path / "old.yaml")
    assert config == load_recipe(tmp_path / "new.yaml")
    name = tmp_path / "old.yaml"
    assert str(caught[0].message).startswith(f"recipe {name}: ")
    assert len(caught) == 15
    assert (
        f"recipe {name}: flow.staleness is now called rollout.max_staleness; the old name will be refused in "
        "the next version"
    ) in {str(one.message) for one in caught}


def test_a_run_folder_of_an_earlier_version_is_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_yaml(INPUTS + OLD, "recipe.yaml") == from_yaml(INPUTS + NEW, "recipe.yaml")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"flow.staleness": 1, "steps": 3}, {"rollout.max_staleness": 1, "steps": 3}),
        (
            {"flow": {"staleness": 1, "kv": "keep"}},
            {"rollout.max_staleness": 1, "rollout.kv_on_update": "keep"},
        ),
        ({"warmup": None}, {"sft": None}),
        ({"warmup": {"steps": 5, "gate": None}}, {"sft": {"steps": 5, "stop_accuracy": None}}),
        ({"warmup.steps": 5}, {"sft.steps": 5}),
        ({"limits": {"phase_s": 1.0, "canary": 2.0}}, {"timeouts.phase_s": 1.0, "limits.canary": 2.0}),
        (
            {"policy.loss": {"kind": "gspo", "low": 0.1}},
            {"policy.loss.kind": "gspo", "policy.loss.clip_low": 0.1},
        ),
    ],
    ids=str,
)
def test_overrides_of_old_names(given: dict[str, Any], expected: dict[str, Any]) -> None:
    with pytest.warns(RenamedSettingWarning, match="^an override: "):
        assert renamed_overrides(given) == expected


@pytest.mark.parametrize(
    "given",
    [{"steps": 3}, {"model": {"path": "x", "shape": {}}}, {"rewards.0.weight": 2}, {"sft": None}],
    ids=str,
)
def test_current_names_stay_as_they_are(given: dict[str, Any]) -> None:
    assert renamed_overrides(given) == given
    assert renamed(given, "mine") == given


def test_a_setting_under_both_names_is_refused(tmp_path: Path) -> None:
    both = "flow: {staleness: 1}\nrollout: {max_staleness: 2}\n"
    (tmp_path / "mine.yaml").write_text(INPUTS + both)
    with pytest.raises(
        ConfigError, match=r"unknown key flow\.staleness; it is now called rollout\.max_staleness"
    ):
        load_recipe(tmp_path / "mine.yaml")


def test_every_new_name_is_a_setting_and_no_old_one_is() -> None:
    known = set(known_keys())
    assert set(RENAMED.values()) <= known
    assert not known & set(RENAMED)


def test_the_command_line_prints_one_line() -> None:
    assert format_warning(RenamedSettingWarning("a is now b"), RenamedSettingWarning, "x.py", 3) == (
        "warning: a is now b\n"
    )
    assert "x.py:3: UserWarning: c" in format_warning(UserWarning("c"), UserWarning, "x.py", 3)
