"""Which experts tokens went to, as engines tell it: those that the trainer's own routers choose."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from millrace.inference.engine import PagedEngine
from millrace.kernels.packed_attention import Segments
from millrace.models.attention import Packed
from millrace.models.load import Model
from millrace.models.logprobs import hidden_states
from millrace.models.routing import Routers
from millrace.types import Completion, SamplingParams
from tests.inference.fresh import decode, paged, random_requests
from tests.models.mixtures import MIXTURES, NUM_CHOICES, mixture
from tests.models.tiny import tiny_model
from tests.twins.reference import ReferenceEngine

SIZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    # Rows are preempted, and computed anew.
    "crowded": {"max_cache_tokens": 60},
    "without prefixes": {"prefix_caching": False},
}


def chosen(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """What the routers choose for one sequence, [T, L, K]."""
    token_T = torch.tensor(tokens)
    context = Packed(Segments.of(torch.tensor([len(token_T)])))
    with torch.no_grad(), Routers(model).record() as record:
        hidden_states(model, token_T, torch.arange(len(token_T)), context)
    return record.expert_TLK.numpy()


def check_routes(model: Model, prompts: Sequence[tuple[int, ...]], completions: Sequence[Completion]) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = chosen(model, (*prompt, *completion.token_ids))
        # The last token was drawn and never computed.
        expected[-1] = -1
        assert completion.experts is not None
        assert completion.experts.dtype == np.int16
        assert completion.experts.tolist() == expected.tolist()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_paged_engine_tells_where_each_token_went(architecture: str, sizes: str) -> None:
    model = mixture(architecture)
    engine = paged(copy.deepcopy(model).requires_grad_(False), record_experts=True, **SIZES[sizes])
    # Prompts in chunks, equal prompts that fork, and on a second call prefixes that are cached.
    for seed in (0, 1, 0):
        prompts, params = random_requests(seed, 12)
        check_routes(model, prompts, engine.generate(prompts, params))
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (sizes == "crowded")
    assert (stats.prefix_hits > 0) == (sizes != "without prefixes")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_reference_engine_tells_the_same(architecture: str) -> None:
    model = mixture(architecture)
    engine = ReferenceEngine(
        copy.deepcopy(model), decode, max_cache_tokens=200, max_prefill_tokens=30, record_experts=True
    )
    prompts, params = random_requests(2, 12)
    check_routes(model, prompts, engine.generate(prompts, params))


def test_after_other_weights_came_the_tokens_are_where_those_send_them() -> None:
    model = mixture("qwen3_moe")
    other = mixture("qwen3_moe", seed=1)
    engine = paged(copy.deepcopy(model).requires_grad_(False), record_experts=True)
    prompt, params = (3, 1, 4, 1, 5, 9), SamplingParams(max_tokens=12, temperature=0.0)
    (request,) = engine.add(prompt, [params])
    for _ in range(5):
        engine.step()
    # Keys and values are computed again, and so is the route of each token.
    engine.update_weights(other.named_parameters(), 1)
    while request.finish_reason is None:
        engine.step()
    completion = engine.completion(request)
    assert completion.versions.tolist() == [0] * 5 + [1] * 7
    check_routes(other, [prompt], [completion])


def test_who_ended_before_it_ran_or_while_it_ran_went_nowhere_from_there() -> None:
    model = mixture("mixtral").requires_grad_(False)
    engine = paged(model, record_experts=True, max_requests=1)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    running, waiting = (engine.add((1, 2, 3), [params], ids=[name])[0] for name in ("running", "waiting"))
    engine.step()
    engine.step()
    ended = [engine.abort(request.id) for request in (running, waiting)]
    lengths = [
        len(completion.experts) for completion in ended if completion and completion.experts is not None
    ]
    assert lengths == [5, 3]
    check_routes(model, [(1, 2, 3)], [c for c in ended[:1] if c])
    assert ended[1] is not None and ended[1].experts is not None
    assert (ended[1].experts == -1).all() and ended[1].experts.shape == (3, 2, NUM_CHOICES)


def test_nothing_is_told_where_nobody_asks_and_dense_models_are_refused() -> None:
    engine = paged(mixture("mixtral").requires_grad_(False))
    (completion,) = engine.generate([(1, 2)], [SamplingParams(max_tokens=2)])
    assert completion.experts is None
    for kind in (PagedEngine, ReferenceEngine):
        with pytest.raises(ValueError, match="a llama has no routers; only a mixture of experts has"):
            kind(tiny_model("llama"), decode, max_cache_tokens=64, record_experts=True)
