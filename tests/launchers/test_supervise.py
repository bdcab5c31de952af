from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.launchers import supervise as watching
from millrace.launchers.supervise import (
    GRACE_S,
    INTERRUPTED,
    LOST,
    SHOWN_LINES,
    TELLING_S,
    failure,
    watch,
)

LOOK_S = 0.25  # a sum of such numbers is exact


@pytest.fixture(autouse=True)
def look_at_exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WATCH_S", LOOK_S)


def seen(*looks: dict[int, int], num_ranks: int = 3) -> tuple[int | None, float]:
    """Which rank failed, of ranks that end as each look says, and when; the last look stays."""
    now_s = [0.0]

    def one_by_one() -> Iterator[dict[int, int]]:
        yield from looks
        while True:
            yield looks[-1]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    each = one_by_one()
    return watch(lambda: next(each), num_ranks, clock=lambda: now_s[0], sleep=sleep), now_s[0]


@pytest.mark.parametrize(
    ("looks", "failed", "after_s"),
    [
        pytest.param([{}, {1: 0}, {1: 0, 0: 0, 2: INTERRUPTED}], None, 2 * LOOK_S, id="all ended"),
        pytest.param([{}, {2: 1}], 2, TELLING_S + 2 * LOOK_S, id="one failed and the others stay"),
        pytest.param(
            [{1: LOST}, {1: LOST, 2: -9}], 2, TELLING_S + LOOK_S, id="one that lost the others is not blamed"
        ),
        pytest.param([{1: LOST}], 1, GRACE_S + LOOK_S, id="but where no other rank ends, it is"),
        pytest.param([{0: LOST, 1: LOST, 2: LOST}], 0, 0.0, id="all lost each other"),
        pytest.param(
            [{1: INTERRUPTED}, {1: INTERRUPTED, 0: LOST, 2: LOST}], None, LOOK_S, id="one left at once"
        ),
        pytest.param([{1: INTERRUPTED, 2: 1}], 2, TELLING_S + LOOK_S, id="one left at once and one failed"),
        pytest.param([{1: 2}, {1: 2, 0: 2}], 0, LOOK_S, id="the first rank reports what all of them found"),
        pytest.param([{0: 1}], 0, 0.0, id="the first rank failed"),
        pytest.param([{0: LOST, 1: 1, 2: LOST}], 1, 0.0, id="one failed and the others have ended"),
    ],
)
def test_the_rank_that_failed_first_is_found(
    looks: list[dict[int, int]], failed: int | None, after_s: float
) -> None:
    assert seen(*looks) == (failed, after_s)


def test_the_end_of_what_a_rank_said_is_shown() -> None:
    said = "\n".join(f"line {number}" for number in range(100))
    lines = str(failure("rank 1 of 2 failed", said)).splitlines()
    assert lines[0] == "rank 1 of 2 failed"
    assert lines[1:] == [f"line {number}" for number in range(100 - SHOWN_LINES, 100)]
