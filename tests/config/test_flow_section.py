"""Settings between sampling and training that contradict each other, or can have no effect."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from millrace.config.flow_section import FlowConfig, idle_flow

IDLE = [
    (
        {"kv": "keep"},
        "flow.kv has no effect with flow.staleness 0, where nothing runs while weights are loaded",
    ),
    ({"interrupt": False}, "flow.interrupt has no effect with flow.staleness 0"),
    ({"stale": "drop"}, "flow.stale has no effect with flow.staleness 0, where no group grows too old"),
    ({"staleness": 1, "stale": "drop"}, "flow.stale has no effect with flow.order submission"),
    ({"spare_groups": 1}, "flow.spare_groups has no effect with flow.order submission"),
    (
        {"staleness": 1, "order": "completion", "spare_groups": 1},
        "flow.spare_groups has no effect with flow.staleness above 0",
    ),
    (
        {"staleness": 1, "interrupt": False, "kv": "keep"},
        "flow.kv has no effect with flow.interrupt false, where no completion outlives its weights",
    ),
    ({"order": "completion"}, "flow.order has no effect with flow.staleness 0 and no flow.spare_groups"),
    (
        {"staleness": 1, "order": "completion", "stale": "keep"},
        "flow.stale keep trains on tokens of any age, which the loss does not correct for",
    ),
]
USED = [
    {},
    {"staleness": 4},
    {"staleness": 1, "kv": "keep"},
    {"staleness": 1, "interrupt": False},
    {"staleness": 1, "order": "completion"},
    {"staleness": 1, "order": "completion", "stale": "drop"},
    {"staleness": 2, "order": "completion", "stale": "withhold"},
    {"order": "completion", "spare_groups": 3},
]


@pytest.mark.parametrize(("given", "why"), IDLE)
def test_what_can_have_no_effect_is_refused_in_one_sentence(given, why):
    sentences = list(idle_flow(FlowConfig(**given), corrected=False))
    assert len(sentences) == 1
    assert sentences[0].startswith(why)
    assert "; " in sentences[0]


@pytest.mark.parametrize("given", USED)
def test_what_has_an_effect_is_not_refused(given):
    assert list(idle_flow(FlowConfig(**given), corrected=False)) == []


def test_keeping_what_is_old_needs_a_loss_that_corrects_for_it():
    kept = FlowConfig(staleness=1, order="completion", stale="keep")
    assert list(idle_flow(kept, corrected=True)) == []


def test_values_out_of_range_are_refused():
    for given in ({"staleness": -1}, {"spare_groups": -1}, {"order": "random"}, {"stale": "hide"}):
        with pytest.raises(ValidationError):
            FlowConfig(**given)
