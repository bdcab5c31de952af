from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModel, AutoModelForCausalLM, CohereConfig

from millrace.data.batch import Batch
from millrace.data.shared_prefix import common_beginnings
from millrace.distributed.fsdp import Sharding, shard
from millrace.distributed.mesh import make_mesh
from millrace.kernels.token_logprob import token_divergence, token_logprob
from millrace.models.fused import set_deterministic
from millrace.models.load import Model, fresh_model, save_model
from millrace.models.logprobs import (
    chosen_hidden,
    chosen_logprobs,
    hidden_states,
    output_head,
    packed_context,
    states,
)
from millrace.planner.layout import Layout
from millrace.training.scorer import ModelScorer
from tests.close import close_fp32
from tests.data.pieces import outside, random_tree, truncated
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, random_batch, tiny_model


def padded_numbers(model: Model, batch: Batch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, sums of squares from an ordinary padded forward: no code of ours.

    A logit outside of a support is far below all others.
    """
    length_B = batch.length_B.tolist()
    rows = batch.token_T.split(length_B)
    token_BL = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask_BL = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.long) for n in length_B], True)
    logit_BLV = model(input_ids=token_BL, attention_mask=mask_BL, use_cache=False).logits
    logprobs, entropies, squares = [], [], []
    support = batch.chosen_support
    others = None if support is None else iter(outside(support, VOCABULARY))
    for b, chosen in enumerate(batch.action_mask_T.split(length_B)):
        for t in chosen.nonzero()[:, 0].tolist():
            logit_V = logit_BLV[b, t - 1] / temperature
            logprob_V = (logit_V if others is None else logit_V.masked_fill(next(others), -1e9)).log_softmax(
                -1
            )
            logprobs.append(logprob_V[token_BL[b, t]])
            entropies.append(-(logprob_V.exp() * logprob_V).sum())
            squares.append((2 * logprob_V).exp().sum())
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(squares)


def packed_logprobs(model: Model, batch: Batch, *, temperature: float, max_tokens: int) -> Tensor:
    return ModelScorer(model, temperature=temperature, max_tokens=max_tokens).logprobs(batch)


def packed_squares(model: Model, batch: Batch, *, temperature: float, max_tokens: int) -> Tensor:
    return ModelScorer(model, temperature=temperature, max_tokens=max_tokens).squares(batch)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("drawn_among_some", [False, True])
@pytest.mark.parametrize("architecture", SHAPES)
def test_packed_equals_padded_in_logprobs_entropies_and_gradients(
    tmp_path: Path, architecture: str, drawn_among_some: bool
) -> None:
    ours = tiny_model(architecture)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for seed in range(3):
        batch = random_batch(seed)
        if drawn_among_some:
            batch = truncated(batch, VOCABULARY, seed)
        actual = chosen_logprobs(ours, batch, temperature=0.8)
        expected = padded_numbers(theirs, batch, 0.8)
        close_fp32(actual[0], expected[0], atol=1e-5)
        close_fp32(actual[1], expected[1], atol=1e-5)
        square_T = packed_squares(ours, batch, temperature=0.8, max_tokens=30)
        close_fp32(square_T[batch.action_mask_T], expected[2], atol=1e-5)
        slope_N = torch.linspace(-1, 1, len(actual[0])) / len(actual[0])
        for (logprob_N, entropy_N, *_), model in ((actual, ours), (expected, theirs)):
            model.zero_grad()
            ((logprob_N + 0.3 * entropy_N) * slope_N).sum().backward()
        pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
        for (name, one), (other_name, other) in pairs:
            assert name == other_name and one.grad is not None and other.grad is not None
            assert one.grad.abs().max() > 1e-4, name
            close_fp32(one.grad, other.grad, atol=1e-5)


def row_states(model: Model, batch: Batch, at_N: Tensor) -> Tensor:
    """The states with every token of the row computed."""
    context = packed_context(model, batch.length_B)
    return hidden_states(model, batch.token_T, batch.position_T, context)[at_N]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", SHAPES)
def test_what_segments_share_gives_the_states_and_gradients_of_every_token_computed(
    architecture: str,
) -> None:
    model = tiny_model(architecture)
    for seed in range(4):
        # Beyond and below 64 tokens, segments share rectangles in other ways.
        batch = random_tree(seed, vocab_size=VOCABULARY, longest=(20, 60, 110)[seed % 3])
        generator = torch.Generator().manual_seed(seed)
        at_N = torch.randint(batch.num_tokens, (2 * batch.num_tokens,), generator=generator)
        found = []
        for states_of in (states, row_states):
            model.zero_grad()
            state_ND = states_of(model, batch, at_N)
            slope_ND = torch.randn(state_ND.shape, generator=torch.Generator().manual_seed(seed))
            (state_ND * slope_ND).sum().backward()
            found.append((state_ND, [p.grad for p in model.base_model.parameters() if p.grad is not None]))
        (ours, our_slopes), (theirs, their_slopes) = found
        close_fp32(ours, theirs, rtol=1e-4, atol=1e-5)
        assert len(our_slopes) == len(their_slopes) > 10
        for one, other in zip(our_slopes, their_slopes, strict=True):
            close_fp32(one, other, rtol=1e-4, atol=1e-5 * float(other.norm()))


def test_shared_tokens_are_computed_once_but_never_by_a_deterministic_model() -> None:
    batch = random_tree(1, vocab_size=VOCABULARY)
    shared = common_beginnings(batch.token_T, batch.length_B)
    assert shared is not None and len(shared.kept_S) < batch.num_tokens
    every_T, seen = torch.arange(batch.num_tokens), []
    for is_deterministic in (False, True):
        model = tiny_model("qwen3")
        if is_deterministic:
            set_deterministic(model)
        embedding = model.get_input_embeddings()
        embedding.register_forward_hook(lambda module, given, output: seen.append(given[0][0]))
        ours = states(model, batch, every_T)
        if is_deterministic:
            assert torch.equal(ours, row_states(model, batch, every_T))
    assert torch.equal(seen[0], batch.token_T[shared.kept_S])
    assert torch.equal(seen[1], batch.token_T)


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_stands_behind_the_last_token_that_is_read_is_not_computed(deterministic: bool) -> None:
    model, seen = tiny_model("qwen3"), list[int]()
    if deterministic:
        set_deterministic(model)
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, output: seen.append(output.shape[1])
    )
    batch = random_batch(0)
    # Segments that have nothing in common.
    batch = replace(batch, token_T=batch.segment_T % VOCABULARY)
    size, end_B = batch.num_tokens, batch.length_B.cumsum(0)
    # Of each segment its last token but one, as when log-probabilities are read; all; one; none.
    for at_N, computed in (
        (end_B - 2, size - len(end_B)),
        (torch.arange(size), size),
        (torch.tensor([1]), 1 + len(end_B)),
        (torch.tensor([], dtype=torch.int64), size),
    ):
        ours = states(model, batch, at_N)
        assert seen.pop() == computed
        expected = row_states(model, batch, at_N)
        seen.clear()
        close_fp32(ours, expected, rtol=1e-4, atol=1e-5)
        assert not deterministic or torch.equal(ours, expected)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_segment_has_the_same_logprobs_alone(architecture: str) -> None:
    model, batch = tiny_model(architecture), truncated(random_batch(3), VOCABULARY, 3)
    whole_T = packed_logprobs(model, batch, temperature=1.0, max_tokens=10_000)
    close_fp32(packed_logprobs(model, batch, temperature=1.0, max_tokens=30), whole_T)
    alone = [
        packed_logprobs(model, batch.select([b]), temperature=1.0, max_tokens=100)
        for b in range(batch.num_segments)
    ]
    close_fp32(torch.cat(alone), whole_T)
    assert not whole_T.requires_grad
    assert whole_T[~batch.action_mask_T].eq(0).all()
    close_fp32(whole_T[batch.action_mask_T], chosen_logprobs(model, batch, temperature=1.0)[0])


def test_squares_are_0_where_no_token_was_chosen_and_carry_no_gradient() -> None:
    model, batch = tiny_model("llama"), random_batch(3)
    square_T = packed_squares(model, batch, temperature=1.3, max_tokens=10_000)
    assert torch.equal(square_T != 0, batch.action_mask_T)
    assert not square_T.requires_grad
    close_fp32(packed_squares(model, batch, temperature=1.3, max_tokens=30), square_T)


def test_hidden_states_serve_two_losses_with_one_forward() -> None:
    model, batch = tiny_model("gemma2"), random_batch(1)
    hidden_ND, target_N = chosen_hidden(model, batch)
    assert torch.equal(target_N, batch.token_T[batch.action_mask_T])
    head = output_head(model)
    logprob_N, entropy_N = token_logprob(hidden_ND, head, target_N, temperature=0.8)
    whole = chosen_logprobs(model, batch, temperature=0.8)
    assert torch.equal(logprob_N, whole[0]) and torch.equal(entropy_N, whole[1])
    other = tiny_model("llama", seed=1)
    with torch.no_grad():
        reference = chosen_hidden(other, batch)[0], output_head(other)
    divergence_N = token_divergence(hidden_ND, head, *reference, temperature=0.8)
    (logprob_N.mean() + divergence_N.mean()).backward()
    together = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    chosen_logprobs(model, batch, temperature=0.8)[0].mean().backward()
    token_divergence(chosen_hidden(model, batch)[0], head, *reference, temperature=0.8).mean().backward()
    for one, parameter in zip(together, model.parameters(), strict=True):
        close_fp32(one, parameter.grad, atol=1e-5)


def test_a_batch_without_chosen_tokens_gives_nothing_and_a_gradient_of_0() -> None:
    model, batch = tiny_model("llama"), random_batch(0)
    batch = replace(batch, action_mask_T=torch.zeros_like(batch.action_mask_T))
    logprob_N, entropy_N = chosen_logprobs(model, batch, temperature=1.0)
    assert logprob_N.shape == entropy_N.shape == (0,)
    (logprob_N + entropy_N).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.eq(0).all()
    for packed in (packed_logprobs, packed_squares):
        number_T = packed(model, batch, temperature=1.0, max_tokens=10_000)
        assert number_T.shape == (batch.num_tokens,) and number_T.eq(0).all()


@pytest.mark.parametrize("packed", [packed_logprobs, packed_squares])
def test_a_segment_longer_than_a_micro_batch_and_a_temperature_of_0_are_errors(
    packed: Callable[..., Tensor],
) -> None:
    model, batch = tiny_model("llama"), random_batch(0)
    with pytest.raises(
        ValueError, match="tokens but a micro-batch holds 3; raise policy.tokens_per_micro_batch"
    ):
        packed(model, batch, temperature=1.0, max_tokens=3)
    with pytest.raises(ValueError) as error:
        packed(model, batch, temperature=0.0, max_tokens=10_000)
    assert str(error.value) == "temperature is 0.0; it must be above 0"


def test_the_head_of_gemma_2_caps_and_that_of_cohere_scales() -> None:
    assert output_head(tiny_model("gemma2")).softcap == 3.0
    assert output_head(tiny_model("llama")).softcap is None
    cohere = fresh_model(
        CohereConfig(**SIZES, vocab_size=VOCABULARY, logit_scale=0.5, pad_token_id=0),
        seed=0,
        dtype=torch.float32,
    )
    head = output_head(cohere)
    assert head.scale == 0.5 and head.bias_V is None
    assert head.weight_VD is cohere.get_output_embeddings().weight


def test_a_head_dealt_to_data_ranks_is_refused_until_it_is_gathered() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        sharding = Sharding(precision=None, reshard_after_forward=True, offload=False, checkpointing="none")
        root = shard(tiny_model("llama"), make_mesh(Layout(dp_shard=2), "cpu"), sharding)
        with pytest.raises(ValueError) as error:
            output_head(root.model)
        assert str(error.value) == (
            "the output head of this LlamaForCausalLM is dealt to data ranks; compute within the forward of "
            "its Root, which gathers it"
        )
        with torch.no_grad():
            (weight_VD,) = root(lambda model: (output_head(model).weight_VD.clone(),))
        assert weight_VD.shape == (VOCABULARY, SIZES["hidden_size"])
    finally:
        dist.destroy_process_group()


def test_a_model_without_an_output_embedding_is_an_error(tmp_path: Path) -> None:
    save_model(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError) as error:
        output_head(AutoModel.from_pretrained(tmp_path, attn_implementation="eager"))
    assert str(error.value) == (
        "LlamaModel has no linear output embedding; a causal language model is needed"
    )
