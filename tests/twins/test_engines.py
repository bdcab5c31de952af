"""The paged engine is the reference engine, for every architecture, whatever its sizes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.close import close_fp32
from tests.inference.fresh import decode, paged, random_requests, same
from tests.inference.invariants import check_engine
from tests.models.families import bold_family
from tests.models.tiny import SHAPES, tiny_model
from tests.twins.reference import ReferenceEngine

# Values narrower than keys; two calls of attention in a layer; keys of other layers; chunks and positions;
# ALiBi.
FURTHER = ("minicpm3", "diffllama", "gemma3n_text", "llama4_text", "mpt")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", [*SHAPES, *FURTHER])
def test_the_paged_engine_draws_what_the_reference_engine_draws(architecture: str) -> None:
    model = bold_family(architecture) if architecture in FURTHER else tiny_model(architecture)
    prompts, params = random_requests(5, 24)
    theirs = ReferenceEngine(model, decode).generate(prompts, params)
    ours = paged(model).generate(prompts, params)
    assert same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        close_fp32(one.logprobs, other.logprobs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2)), 1])
def test_sizes_change_nothing(seed: int) -> None:
    model = tiny_model("qwen3")
    prompts, params = random_requests(seed, 30)
    theirs = ReferenceEngine(model, decode).generate(prompts, params)
    numbers = np.random.default_rng(seed)
    for _ in range(3):
        sizes = {
            "block_size": int(numbers.choice([1, 3, 4, 16])),
            "max_cache_tokens": int(numbers.choice([64, 128, 1024])),
            "max_batch_tokens": int(numbers.choice([1, 7, 64, 512])),
            "max_requests": int(numbers.choice([1, 3, 16, 64])),
            "prefix_caching": bool(numbers.integers(2)),
        }
        engine = paged(model, **sizes)
        assert same(engine.generate(prompts, params), theirs), sizes
        check_engine(engine)
        assert engine.stats().num_running == engine.stats().num_waiting == 0
