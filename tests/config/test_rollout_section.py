"""Settings of asynchrony that contradict each other, or have no effect."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from millrace.config.rollout_section import RolloutConfig, idle_rollout

IDLE = [
    (
        {"kv_on_update": "keep"},
        "rollout.kv_on_update has no effect with rollout.max_staleness 0, where nothing runs while weights "
        "are loaded",
    ),
    ({"partial_rollout": False}, "rollout.partial_rollout has no effect with rollout.max_staleness 0"),
    (
        {"stale_policy": "drop"},
        "rollout.stale_policy has no effect with rollout.max_staleness 0, where no group becomes stale",
    ),
    (
        {"max_staleness": 1, "stale_policy": "drop"},
        "rollout.stale_policy has no effect with rollout.batch_order submission",
    ),
    ({"oversample_groups": 1}, "rollout.oversample_groups has no effect with rollout.batch_order submission"),
    (
        {"max_staleness": 1, "batch_order": "completion", "oversample_groups": 1},
        "rollout.oversample_groups has no effect with rollout.max_staleness above 0",
    ),
    (
        {"max_staleness": 1, "partial_rollout": False, "kv_on_update": "keep"},
        "rollout.kv_on_update has no effect with rollout.partial_rollout false, where no completion "
        "outlives its weights",
    ),
    (
        {"batch_order": "completion"},
        "rollout.batch_order has no effect with rollout.max_staleness 0 and no rollout.oversample_groups",
    ),
    (
        {"max_staleness": 1, "batch_order": "completion", "stale_policy": "keep"},
        "rollout.stale_policy keep trains on tokens of any age, which the loss does not correct for",
    ),
]
USED = [
    {},
    {"max_staleness": 4},
    {"max_staleness": 1, "kv_on_update": "keep"},
    {"max_staleness": 1, "partial_rollout": False},
    {"max_staleness": 1, "batch_order": "completion"},
    {"max_staleness": 1, "batch_order": "completion", "stale_policy": "drop"},
    {"max_staleness": 2, "batch_order": "completion", "stale_policy": "withhold"},
    {"batch_order": "completion", "oversample_groups": 3},
]


@pytest.mark.parametrize(("given", "why"), IDLE)
def test_what_can_have_no_effect_is_refused_in_one_sentence(given, why):
    sentences = list(idle_rollout(RolloutConfig(**given), corrected=False))
    assert len(sentences) == 1
    assert sentences[0].startswith(why)
    assert "; " in sentences[0]


@pytest.mark.parametrize("given", USED)
def test_what_has_an_effect_is_not_refused(given):
    assert list(idle_rollout(RolloutConfig(**given), corrected=False)) == []


def test_keeping_stale_groups_needs_a_loss_that_corrects_for_it():
    kept = RolloutConfig(max_staleness=1, batch_order="completion", stale_policy="keep")
    assert list(idle_rollout(kept, corrected=True)) == []


def test_values_out_of_range_are_refused():
    for given in (
        {"max_staleness": -1},
        {"oversample_groups": -1},
        {"batch_order": "random"},
        {"stale_policy": "hide"},
    ):
        with pytest.raises(ValidationError):
            RolloutConfig(**given)
