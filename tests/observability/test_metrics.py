from __future__ import annotations

import pytest

from millrace.observability.metrics import Spans


def ticking(*moments: float):
    remaining = iter(moments)
    return lambda: next(remaining)


def test_spans_of_one_name_add_up():
    spans = Spans(clock=ticking(0.0, 2.0, 10.0, 10.5, 20.0, 23.0))
    for name in ("sample", "train", "sample"):
        with spans(name):
            pass
    assert spans.take() == {"sample": 5.0, "train": 0.5}


def test_seconds_that_passed_outside_of_a_block_can_be_added():
    spans = Spans(clock=ticking(0.0, 2.0))
    spans.add("start", 5.0)
    with spans("start"):
        pass
    assert spans.take() == {"start": 7.0}


def test_what_no_span_of_a_block_accounts_for_has_a_name_too():
    spans = Spans(clock=ticking(0.0, 2.0, 5.0, 6.0))
    spans.add("sample", 7.0)
    with spans.rest("bookkeeping"), spans("sample"):
        pass
    assert spans.take() == {"sample": 10.0, "bookkeeping": 3.0}
    with pytest.raises(KeyError, match="lost"), Spans(clock=ticking(0.0, 1.0)).rest("bookkeeping"):
        raise KeyError("lost")


def test_take_starts_over():
    spans = Spans(clock=ticking(0.0, 1.0))
    with spans("weight_sync"):
        pass
    spans.take()
    assert spans.take() == {}


def test_a_span_that_raises_still_counts_and_lets_the_error_through():
    spans = Spans(clock=ticking(0.0, 4.0, 5.0, 6.0))
    with pytest.raises(KeyError, match="lost"), spans("score"):
        raise KeyError("lost")
    with spans("score"):
        pass
    assert spans.take() == {"score": 5.0}


def test_a_span_inside_a_span_is_refused_because_its_seconds_would_count_twice():
    spans = Spans()
    with (
        pytest.raises(RuntimeError, match="span train was opened inside span sample; close sample first"),
        spans("sample"),
        spans("train"),
    ):
        pass
    assert set(spans.take()) == {"sample"}


def test_the_span_that_an_error_went_through_is_known():
    spans = Spans()
    with spans("train"):
        pass
    assert spans.failed is None
    with pytest.raises(KeyError), spans("score"):
        raise KeyError
    with spans("train"):
        pass
    assert spans.failed == "score"


def test_parts_of_a_span_are_counted_in_it_and_under_their_own_names():
    ends = []
    spans = Spans(clock=ticking(0.0, 1.0, 4.0, 5.0, 7.0, 9.0))
    spans.report_ends(lambda name, seconds: ends.append((name, seconds)))
    with spans("train"):
        for _ in range(2):
            with spans.part("policy"):
                pass
    assert spans.take() == {"train": 9.0, "train/policy": 5.0}
    assert ends == [("train/policy", 3.0), ("train/policy", 2.0), ("train", 9.0)]
    assert spans.take() == {}
    with pytest.raises(RuntimeError, match="part policy was opened outside a span"), spans.part("policy"):
        pass
    spans = Spans()
    with (
        pytest.raises(RuntimeError, match="part values was opened inside part policy"),
        spans("train"),
        spans.part("policy"),
        spans.part("values"),
    ):
        pass


def test_the_rest_of_a_loop_has_a_name_although_its_records_are_taken_inside():
    now = [0.0]

    def work(seconds: float) -> None:
        now[0] += seconds

    spans = Spans(clock=lambda: now[0])
    taken: dict[str, float] = {}
    for _ in range(20):
        with spans.rest("bookkeeping"):
            work(0.5)
            with spans.rest("bookkeeping"):
                work(0.25)
                with spans("train"):
                    work(6.0)
                    with spans.part("policy"):
                        work(3.0)
            for name, seconds in spans.take().items():
                taken[name] = taken.get(name, 0.0) + seconds
            work(1.0)
            with spans("save"):
                work(2.0)
    named = sum(seconds for name, seconds in taken.items() if "/" not in name)
    # All but what follows the last record.
    assert named == now[0] - 3.5
    assert taken == {"train": 180.0, "train/policy": 60.0, "save": 38.0, "bookkeeping": 34.0 - 0.5}


def test_seconds_can_be_renamed():
    spans = Spans()
    spans.add("weight_sync", 2.0)
    spans.add("start", 1.0)
    spans.rename("weight_sync", "start")
    spans.rename("none", "start")
    assert spans.take() == {"start": 3.0}
