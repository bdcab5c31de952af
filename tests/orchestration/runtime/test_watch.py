from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from millrace.orchestration.runtime import watch as watching
from millrace.orchestration.runtime.watch import INTERRUPTED, LOST, SHOWN_LINES, failure, watch


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WATCH_S", 0.001)
    monkeypatch.setattr(watching, "TELLING_S", 0.05)
    monkeypatch.setattr(watching, "GRACE_S", 0.2)


def seen(*looks: dict[int, int], num_ranks: int = 3) -> int | None:
    """What becomes of ranks that end as each look says; the last look stays."""

    def one_by_one() -> Iterator[dict[int, int]]:
        yield from looks
        while True:
            yield looks[-1]

    each = one_by_one()
    return watch(lambda: next(each), num_ranks)


@pytest.mark.world
@pytest.mark.parametrize(
    ("looks", "failed"),
    [
        pytest.param([{}, {1: 0}, {1: 0, 0: 0, 2: INTERRUPTED}], None, id="all ended"),
        pytest.param([{}, {2: 1}], 2, id="one failed and the others stay"),
        pytest.param([{1: LOST}, {1: LOST, 2: -9}], 2, id="who lost the others is not to blame"),
        pytest.param([{1: LOST}], 1, id="but where nobody else ends, it is"),
        pytest.param([{0: LOST, 1: LOST, 2: LOST}], 0, id="all lost each other"),
        pytest.param([{1: INTERRUPTED}, {1: INTERRUPTED, 0: LOST, 2: LOST}], None, id="one left at once"),
        pytest.param([{1: INTERRUPTED, 2: 1}], 2, id="one left at once and one failed"),
        pytest.param([{1: 2}, {1: 2, 0: 2}], 0, id="the first says itself what all of them found"),
    ],
)
def test_the_rank_that_failed_first_is_found(looks: list[dict[int, int]], failed: int | None) -> None:
    assert seen(*looks) == failed


def test_the_first_rank_and_the_last_to_end_need_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "TELLING_S", 60.0)
    monkeypatch.setattr(watching, "GRACE_S", 60.0)
    started_s = time.monotonic()
    assert seen({0: 1}) == 0
    assert seen({0: LOST, 1: 1, 2: LOST}) == 1
    assert time.monotonic() - started_s < 10


def test_the_end_of_what_a_rank_said_is_shown() -> None:
    said = "\n".join(f"line {number}" for number in range(100))
    lines = str(failure("rank 1 of 2 failed", said)).splitlines()
    assert lines[0] == "rank 1 of 2 failed"
    assert lines[1:] == [f"line {number}" for number in range(100 - SHOWN_LINES, 100)]
