"""Requests that go on from what was drawn of them before, in another engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.models.load import Model
from millrace.types import Completion
from tests.close import close_fp32
from tests.inference.fresh import paged, random_requests, same
from tests.inference.invariants import check_engine
from tests.inference.test_engine import DRAW, drain, weights
from tests.models.tiny import VOCABULARY, tiny_model


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny_model("llama")


def in_part(llama: Model, prompts: Any, params: Any, num_steps: int) -> list[Completion | None]:
    """What an engine has drawn of each after so many steps; None where nothing is missing."""
    engine = paged(llama, max_requests=64, max_cache_tokens=4096, max_batch_tokens=1024)
    requests = [engine.add(prompt, [wanted])[0] for prompt, wanted in zip(prompts, params, strict=True)]
    for _ in range(num_steps):
        engine.step()
    return [engine.abort(r.id) if r.finish_reason is None else None for r in requests]


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_a_request_goes_on_from_what_was_drawn_elsewhere(llama: Model, num_steps: int) -> None:
    prompts, params = random_requests(6, 24)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 3}, {"stop": ("1",)}, {"repetition_penalty": 1.3}]
    params = [replace(p, max_tokens=14, **kinds[i % 4]) for i, p in enumerate(params)]
    expected = paged(llama).generate(prompts, params)
    begun = in_part(llama, prompts, params, num_steps)
    assert sum(drawn is not None and len(drawn.token_ids) == num_steps for drawn in begun) > 6
    engine = paged(llama)
    engine.update_weights(weights(llama), 3)
    for prompt, wanted, drawn, whole in zip(prompts, params, begun, expected, strict=True):
        if drawn is None:
            continue
        (completion,) = drain(engine, engine.add(prompt, [wanted], partial_outputs=[drawn]))
        assert same([completion], [whole])
        close_fp32(completion.logprobs, whole.logprobs, atol=1e-5)
        assert np.array_equal(completion.logprobs[:num_steps], drawn.logprobs)
        num_new = len(whole.token_ids) - num_steps
        assert completion.versions.tolist() == [0] * num_steps + [3] * num_new
        if whole.support is None:
            assert completion.support is None
        else:
            assert completion.support is not None
            assert completion.support.counts.tolist() == whole.support.counts.tolist()
            assert completion.support.token_ids.tolist() == whole.support.token_ids.tolist()
            close_fp32(completion.support.logprobs, whole.support.logprobs, atol=1e-5)


def test_siblings_that_go_on_stand_beside_those_that_begin(llama: Model) -> None:
    params = [replace(DRAW, seed=seed) for seed in range(5)]
    prompts = [(4, 5, 6, 7, 8)] * 5
    expected = paged(llama).generate(prompts, params)
    begun = in_part(llama, prompts, params, 5)
    begun[1] = begun[4] = None
    engine = paged(llama)
    assert same(drain(engine, engine.add(prompts[0], params, partial_outputs=begun)), expected)
    check_engine(engine)


def test_what_nothing_can_follow_is_refused_and_nothing_is_queued(llama: Model) -> None:
    (whole,) = paged(llama).generate([(1, 2)], [DRAW])
    engine = paged(llama)
    for drawn, why in (
        (whole, "12 tokens are generated and max_tokens is 12; raise it"),
        (
            replace(whole, token_ids=(999,), logprobs=np.zeros(1), versions=np.zeros(1)),
            f"^the partial completion holds token 999; the vocabulary has {VOCABULARY}",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            engine.add((1, 2), [DRAW, DRAW], ids=["a", "b"], partial_outputs=[None, drawn])
    assert not engine.has_work
    assert same(drain(engine, engine.add((1, 2), [DRAW], ids=["a"])), [whole])


@pytest.mark.slow
def test_what_goes_on_at_once_finds_its_blocks(llama: Model) -> None:
    engine = paged(llama)
    wanted, prompt = replace(DRAW, max_tokens=30), (4, 5, 6, 7, 8)
    (whole,) = paged(llama).generate([prompt], [wanted])
    engine.add(prompt, [wanted], ids=["a"])
    for _ in range(20):
        engine.step()
    drawn = engine.abort("a")
    assert drawn is not None and engine.stats().prefix_hits == 0
    assert same(drain(engine, engine.add(prompt, [wanted], partial_outputs=[drawn])), [whole])
    # Every full block of the 24 tokens that had been computed.
    assert engine.stats().prefix_hits == 24
