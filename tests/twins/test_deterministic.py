"""In deterministic mode the engine's log-probabilities are the trainer's, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.data.packing import pack
from millrace.models.fused import fuse, set_deterministic
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.models.logprobs import chosen_logprobs
from millrace.types import Completion, Outcome, SamplingParams, Trajectory, Turn
from tests.close import close_fp64
from tests.inference.fresh import paged, random_requests
from tests.inference.invariants import check_engine
from tests.models.families import bold_family
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, tiny_model

# MiniCPM 3 has values narrower than keys; the others have ALiBi.
FURTHER = ["minicpm3", "bloom", "mpt"]
DENSE = [name for name in SHAPES if name not in ("qwen3_moe", "mixtral")] + FURTHER
DTYPES = [torch.float32, torch.float64]
TEMPERATURE = 0.7


def deterministic_model(architecture: str, dtype: torch.dtype = torch.float32) -> Model:
    model = (
        bold_family(architecture).to(dtype)
        if architecture in FURTHER
        else tiny_model(architecture, dtype=dtype)
    )
    fuse(model)
    set_deterministic(model)
    return model


def drawn(model: Model, seed: int, **sizes: Any) -> tuple[list[tuple[int, ...]], list[Completion]]:
    prompts, params = random_requests(seed, 30)
    params = [replace(wanted, temperature=TEMPERATURE) for wanted in params]
    engine = paged(copy.deepcopy(model).requires_grad_(False), **sizes)
    completions = engine.generate(prompts, params)
    check_engine(engine)
    return prompts, completions


def recomputed(
    model: Model,
    prompts: list[tuple[int, ...]],
    completions: list[Completion],
    temperature: float = TEMPERATURE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's log-probabilities and the engine's, of all drawn tokens."""
    pairs = zip(prompts, completions, strict=True)
    batch = pack([Trajectory((Turn(prompt, said),), Outcome("score", 1.0)) for prompt, said in pairs])
    logprob_N, _ = chosen_logprobs(model, batch, temperature=temperature)
    return logprob_N.detach().float(), batch.sampler_logprob_T[batch.action_mask_T]


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", DENSE)
def test_the_trainer_finds_every_bit_of_the_engines_log_probabilities(
    architecture: str, dtype: torch.dtype
) -> None:
    model = deterministic_model(architecture, dtype)
    ours_N, theirs_N = recomputed(model, *drawn(model, 1))
    assert len(ours_N) > 200
    assert torch.equal(ours_N, theirs_N)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "limits",
    [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 1.7])
def test_the_trainer_finds_every_bit_where_sampling_is_truncated(
    limits: dict[str, Any], temperature: float
) -> None:
    model = deterministic_model("qwen3")
    prompts, params = random_requests(3, 60)
    params = [
        SamplingParams(max_tokens=20, seed=one.seed, temperature=temperature, **limits) for one in params
    ]
    completions = paged(copy.deepcopy(model).requires_grad_(False)).generate(prompts, params)
    assert all(one.support is not None for one in completions)
    ours_N, theirs_N = recomputed(model, prompts, completions, temperature)
    assert len(ours_N) > 1000
    assert torch.equal(ours_N, theirs_N)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_batch_chunks_prefixes_and_preemptions_change_no_bit(seed: int) -> None:
    model = deterministic_model("qwen3")
    _, expected = drawn(model, seed, max_cache_tokens=4096, max_batch_tokens=4096, max_requests=64)
    numbers = np.random.default_rng(seed)
    for _ in range(4):
        sizes = {
            "block_size": int(numbers.choice([1, 4, 8, 16])),
            "max_cache_tokens": int(numbers.choice([64, 96, 1024])),
            "max_batch_tokens": int(numbers.choice([1, 5, 40])),
            "max_requests": int(numbers.choice([1, 4, 32])),
            "prefix_caching": bool(numbers.integers(2)),
        }
        _, completions = drawn(model, seed, **sizes)
        for one, other in zip(completions, expected, strict=True):
            assert one.token_ids == other.token_ids, sizes
            assert np.array_equal(one.logprobs, other.logprobs), sizes


@pytest.mark.slow
def test_a_model_that_writes_over_its_products_trains() -> None:
    shape = {**SIZES, "clip_qkv": 0.5}
    model = fresh_model(
        fresh_config("olmo", shape, vocab_size=VOCABULARY, eos_token_id=0), seed=0, dtype=torch.float32
    )
    fuse(model)
    set_deterministic(model)
    prompts, completions = drawn(model, 1)
    ours_N, theirs_N = recomputed(model, prompts, completions)
    assert torch.equal(ours_N, theirs_N)
    batch = pack([Trajectory((Turn(prompts[0], completions[0]),), Outcome("score", 1.0))])
    chosen_logprobs(model, batch, temperature=TEMPERATURE)[0].sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
def test_without_it_bits_differ() -> None:
    model = tiny_model("qwen3")
    ours_N, theirs_N = recomputed(model, *drawn(model, 1))
    assert not torch.equal(ours_N, theirs_N)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_ordinary_model() -> None:
    plain = tiny_model("qwen3", dtype=torch.float64)
    model = deterministic_model("qwen3", torch.float64)
    prompts, completions = drawn(model, 2)
    pairs = zip(prompts, completions, strict=True)
    batch = pack([Trajectory((Turn(prompt, said),), Outcome("score", 1.0)) for prompt, said in pairs])
    # Tokens that segments share have their slopes added before the norms, which round to float32.
    alone = [batch.select([b]) for b in range(batch.num_segments)]
    for each, parts in ((plain, alone), (model, [batch])):
        for part in parts:
            logprob_N, entropy_N = chosen_logprobs(each, part, temperature=TEMPERATURE)
            (logprob_N.sum() - 0.1 * entropy_N.sum()).backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        close_fp64(parameter.grad, theirs[name].grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_mixture_of_experts_is_refused_by_name(architecture: str) -> None:
    model = tiny_model(architecture)
    fuse(model)
    with pytest.raises(ValueError, match="whose rows are not known to be independent of the batch"):
        set_deterministic(model)
