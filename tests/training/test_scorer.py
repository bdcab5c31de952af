"""The reference policy: frozen, and the same numbers as the trainer's."""

from __future__ import annotations

import torch

from millrace.models.logprobs import chosen_logprobs
from millrace.training.scorer import ReferenceScorer
from tests.close import close_fp32
from tests.training.pieces import random_batch, tiny_model


def test_it_gives_the_log_probability_of_chosen_tokens_and_zero_elsewhere():
    batch, model = random_batch(4), tiny_model(3)
    expected_N = chosen_logprobs(model, batch, temperature=0.8)[0].detach()
    scorer = ReferenceScorer(model, temperature=0.8, max_tokens=1000)
    found_T = scorer.logprobs(batch)
    assert found_T.shape == batch.token_T.shape
    assert found_T[~batch.action_mask_T].abs().max() == 0
    close_fp32(found_T[batch.action_mask_T], expected_N)


def test_the_size_of_a_forward_changes_nothing():
    batch = random_batch(4)
    whole = ReferenceScorer(tiny_model(3), temperature=1.0, max_tokens=1000).logprobs(batch)
    small = ReferenceScorer(tiny_model(3), temperature=1.0, max_tokens=int(batch.length_B.max()))
    close_fp32(small.logprobs(batch), whole)


def test_its_weights_are_frozen_and_no_graph_is_kept():
    model = tiny_model()
    found_T = ReferenceScorer(model, temperature=1.0, max_tokens=1000).logprobs(random_batch(0))
    assert not found_T.requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert isinstance(found_T, torch.Tensor)
