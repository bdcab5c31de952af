"""What a model says of tokens drawn before: the same numbers as the trainer's, without a graph."""

from __future__ import annotations

import pytest
import torch

from millrace.models.logprobs import chosen_logprobs
from millrace.training.scorer import ModelScorer
from tests.close import close_fp32
from tests.data.pieces import outside, truncated
from tests.training.pieces import VOCAB_SIZE, plain_logits, random_batch, tiny_model


def scorer(seed: int = 3, *, temperature: float = 0.8, max_tokens: int = 1000) -> ModelScorer:
    return ModelScorer(tiny_model(seed), temperature=temperature, max_tokens=max_tokens)


def test_it_gives_the_log_probability_of_chosen_tokens_and_zero_elsewhere():
    batch = random_batch(4)
    expected_N = chosen_logprobs(tiny_model(3), batch, temperature=0.8)[0].detach()
    found_T = scorer().logprobs(batch)
    assert found_T.shape == batch.token_T.shape
    assert found_T[~batch.action_mask_T].abs().max() == 0
    close_fp32(found_T[batch.action_mask_T], expected_N)


def test_squares_are_those_of_the_distribution_each_chosen_token_was_drawn_from():
    batch, model = random_batch(4), tiny_model(3)
    found_T = scorer().squares(batch)
    assert found_T[~batch.action_mask_T].abs().max() == 0
    model.set_attn_implementation("eager")
    expected = []
    for b in range(batch.num_segments):
        here = batch.segment_T == b
        with torch.no_grad():
            share_SV = (model(batch.token_T[here][None], use_cache=False).logits[0] / 0.8).softmax(-1)
        chosen = batch.action_mask_T[here].nonzero()[:, 0]
        expected += share_SV[chosen - 1].square().sum(-1).tolist()
    close_fp32(found_T[batch.action_mask_T], expected, rtol=1e-4)
    assert 1 / 23 < min(expected) < max(expected) < 1


def test_hidden_states_and_head_give_the_log_probabilities():
    batch, one = random_batch(4), scorer()
    with torch.no_grad():
        hidden_ND, head = one.hidden(batch)
        logprob_NV = (head.logits(hidden_ND) / 0.8).log_softmax(-1)
    found_N = logprob_NV.gather(1, batch.token_T[batch.action_mask_T][:, None])[:, 0]
    close_fp32(found_N, one.logprobs(batch)[batch.action_mask_T])


def test_the_size_of_a_forward_changes_nothing():
    batch = random_batch(4)
    small = scorer(max_tokens=int(batch.length_B.max()))
    close_fp32(small.logprobs(batch), scorer().logprobs(batch))
    close_fp32(small.squares(batch), scorer().squares(batch))


def test_numbers_are_over_what_each_token_was_drawn_among():
    batch, one = truncated(random_batch(4), VOCAB_SIZE, 4), scorer(max_tokens=12)
    mask_T = batch.action_mask_T
    logprob_NV = (
        plain_logits(tiny_model(3), batch, 0.8)
        .masked_fill(outside(batch.chosen_support, VOCAB_SIZE), -1e9)
        .log_softmax(-1)
    )
    expected_N = logprob_NV.gather(1, batch.token_T[mask_T][:, None])[:, 0]
    close_fp32(one.logprobs(batch)[mask_T], expected_N)
    close_fp32(one.squares(batch)[mask_T], logprob_NV.exp().square().sum(-1), rtol=1e-4)
    assert (expected_N - scorer().logprobs(random_batch(4))[mask_T]).max() > 1.0
    wrong = truncated(random_batch(4), VOCAB_SIZE, 4)
    wrong.support.token_M[:] = 0
    with pytest.raises(ValueError, match=r"the support of target_N\[\d+\] lacks the target itself"):
        one.logprobs(wrong)


def test_no_graph_is_kept():
    model = tiny_model()
    one = ModelScorer(model, temperature=1.0, max_tokens=1000)
    assert not one.logprobs(random_batch(0)).requires_grad
    assert not one.squares(random_batch(0)).requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    # The weights are looked at when it is asked, so the policy's own scorer follows its updates.
    before_T = one.logprobs(random_batch(0))
    with torch.no_grad():
        model.lm_head.weight[3].add_(0.5)
    assert not torch.equal(before_T, one.logprobs(random_batch(0)))
