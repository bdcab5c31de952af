"""What the benchmark of log-probabilities counts; nothing here looks at a clock."""

from __future__ import annotations

from functools import partial

import logprob
import pytest
import torch
from torch import Tensor

from millrace.kernels.token_logprob import rows_per_chunk
from tests.close import close_fp32


def test_gradients_are_not_counted_as_extra_memory() -> None:
    seconds, peaks = {"products": 2.0, "ours": 2.5}, {"ours": 4 * 8 * 110 + 300}
    case = logprob.summary((10, 100, 8), 4, seconds, peaks)
    assert case["logits_bytes"] == 4000
    assert case["extra_bytes"] == {"ours": 300}
    assert case["extra_over_logits"] == {"ours": 0.075}
    assert case["time_over_products"] == {"products": 1.0, "ours": 1.25}


def test_the_default_ends_at_16k_tokens_and_the_first_case_has_the_width_of_a_real_model() -> None:
    short = logprob.cases("cpu", full=False)
    assert short == [
        (4096, 32_000, 1024),
        (4096, 152_064, 128),
        (16_384, 32_000, 128),
        (16_384, 152_064, 128),
    ]
    assert logprob.cases("cpu", full=False, quick=True) == [(128, 4000, 64)]
    assert logprob.cases("cuda", full=True)[-1] == (65_536, 152_064, 4096)


@pytest.mark.slow
def test_all_sides_that_fit_compute_the_same_gradients(monkeypatch) -> None:
    calls = logprob.sides(30, 50, 8, "cpu")
    assert list(calls) == list(logprob.SIDES)
    found: list[tuple[Tensor, Tensor]] = [call() for side, call in calls.items() if side != "products"]
    for other in found[1:]:
        for one, its in zip(found[0], other, strict=True):
            close_fp32(its, one, atol=1e-5)
    monkeypatch.setitem(logprob.LARGEST_LOGITS_BYTES, "cpu", 30 * 50 * 4 - 1)
    assert list(logprob.sides(30, 50, 8, "cpu")) == list(logprob.SIDES[:3])
    monkeypatch.setattr(logprob, "MANY_LOGITS", 1499)
    assert list(logprob.sides(30, 50, 8, "cpu")) == list(logprob.SIDES[:2])


def test_bare_products_make_the_logits_twice_and_each_gradient_once(monkeypatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(logprob, "product", lambda x, weight: partial(made.append, len(x)))
    monkeypatch.setattr(logprob, "quickest", lambda calls: calls[0])
    weight_VD = torch.ones(1_000_000, 1)
    assert rows_per_chunk(weight_VD) == 7
    call = logprob.bare_products(torch.ones(24, 1), weight_VD)
    call()
    assert made == [7, 7] * 3 + [3, 3]


def test_memory_that_a_call_held_is_seen() -> None:
    took_s, peak = logprob.run_on_cpu(lambda: torch.ones(30 << 20))
    assert took_s > 0
    assert 110 << 20 < peak < 160 << 20
