"""Prefill and decode workers under random faults; `scripts/serving_faults.py` runs as many as one likes."""

from __future__ import annotations

import pytest

from tests.engines.serving_schedules import run_schedule


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 160, 20))
def test_no_token_changes_whatever_happens_to_workers(first: int) -> None:
    for number in range(first, first + 20):
        counts, _ = run_schedule(number)
        assert counts.apart + counts.collocated > 0
