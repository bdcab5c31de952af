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
