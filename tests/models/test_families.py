"""Families with widths, pools, windows or positions of their own are what transformers makes of them."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from millrace.kernels.packed_attention import Segments
from millrace.models.alibi import COLUMNS
from millrace.models.attention import Packed
from millrace.models.facts import PoolShape, facts_of
from millrace.models.load import Model
from millrace.models.logprobs import hidden_states, output_head
from millrace.types import SamplingParams
from tests.close import close_fp32
from tests.inference.fresh import paged
from tests.models.families import (
    CHUNK,
    FAMILIES,
    VOCABULARY,
    WINDOW,
    bold_family,
    plain_logprobs,
    plain_twin,
)

# Beyond every window and chunk, and one within them.
LENGTHS = [23, 5, 17]


@lru_cache(maxsize=1)
def pair(family: str) -> tuple[Model, Model]:
    model = bold_family(family)
    return model, plain_twin(model)


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def packed_logprobs(model: Model) -> Tensor:
    position_T = torch.cat([torch.arange(length) for length in LENGTHS])
    context = Packed(Segments.of(torch.tensor(LENGTHS)))
    hidden_TD = hidden_states(model, torch.cat(rows()), position_T, context)
    return output_head(model).logits(hidden_TD).log_softmax(-1)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_are_those_of_each_sequence_alone(family: str) -> None:
    model, twin = pair(family)
    model.zero_grad()
    twin.zero_grad()
    ours_TV, theirs_TV = packed_logprobs(model), torch.cat([plain_logprobs(twin, row) for row in rows()])
    close_fp32(ours_TV, theirs_TV, rtol=1e-4, atol=1e-4)
    weight_TV = torch.randn(ours_TV.shape, generator=torch.Generator().manual_seed(2))
    (ours_TV * weight_TV).sum().backward()
    (theirs_TV * weight_TV).sum().backward()
    named = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        theirs = named[name].grad
        if parameter.grad is None or theirs is None:
            # What no token uses: experts, and keys of layers that read another's.
            assert not any(x is not None and x.abs().max() > 0 for x in (parameter.grad, theirs)), name
            continue
        close_fp32(
            parameter.grad / theirs.abs().max().clamp(min=1e-3),
            theirs / theirs.abs().max().clamp(min=1e-3),
            atol=3e-4,
        )


# Those that go a way of their own through the engine; the others' layers are like one of theirs.
QUICK = {
    "deepseek_v3",
    "diffllama",
    "gemma3n_text",
    "gemma4_text",
    "gpt_neo",
    "llama4_text",
    "mpt",
    "qwen2_moe",
    "stablelm",
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in FAMILIES],
)
def test_the_engine_draws_from_what_a_plain_forward_gives(family: str) -> None:
    """Chunks of prompts beside drawn tokens, samples of a prompt, a shared beginning, and all of it again."""
    model, twin = pair(family)
    first, short, _ = (row.tolist() for row in rows())
    prompts = [first, first, [*first[:18], 3, 4], short]
    params = [SamplingParams(max_tokens=2 * CHUNK + 3, seed=seed) for seed in range(len(prompts))]
    engine = paged(model, max_batch_tokens=11)
    for completion, again, prompt in zip(
        engine.generate(prompts, params), engine.generate(prompts, params), prompts, strict=True
    ):
        assert again.token_ids == completion.token_ids
        row = torch.tensor([*prompt, *completion.token_ids])
        with torch.no_grad():
            logprob_TV = plain_logprobs(twin, row)[len(prompt) - 1 : -1]
        drawn_T = logprob_TV.gather(1, row[len(prompt) :, None])[:, 0]
        close_fp32(torch.tensor(completion.logprobs), drawn_T, rtol=1e-4, atol=2e-4)
        close_fp32(torch.tensor(again.logprobs), drawn_T, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_windows_chunks_and_what_is_kept_are_those_of_the_model() -> None:
    layers = {
        family: facts_of(bold_family(family)) for family in ("gemma3n_text", "llama4_text", "diffllama")
    }
    gemma, llama4, diff = layers["gemma3n_text"], layers["llama4_text"], layers["diffllama"]
    assert [(layer.window, layer.pools, layer.writes) for layer in gemma.layers] == [
        (WINDOW, (0,), True),
        (None, (1,), True),
        (WINDOW, (0,), False),
        (None, (1,), False),
    ]
    assert len(gemma.pools) == 2 and gemma.token_numbers == 2 * 2 * (8 + 8) and gemma.uniform is None
    assert [layer.chunk for layer in llama4.layers] == [CHUNK, None, CHUNK, None] and llama4.asks_positions
    assert [layer.pools for layer in diff.layers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert set(facts_of(pair("deepseek_v3")[0]).pools) == {PoolShape(4, 12, 8)}
    assert facts_of(pair("stablelm")[0]).drops_context and not facts_of(pair("stablelm")[0]).asks_positions
    mpt = facts_of(pair("mpt")[0])
    assert mpt.drops_context and mpt.asks_positions and mpt.uniform == PoolShape(4, 8 + COLUMNS, 8 + COLUMNS)
    # One key head, but the biases of four.
    assert facts_of(pair("falcon@alibi_one_key")[0]).pools[0].num_heads == 4
