from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, CohereConfig

from millrace.data.batch import Batch
from millrace.models.load import Model, fresh_model, save_model
from millrace.models.logprobs import chosen_logprobs, output_head, packed_logprobs
from tests.close import close_fp32
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, random_batch, tiny_model


def padded_logprobs(model: Model, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """The same numbers from an ordinary padded forward: no packing, no code of ours."""
    length_B = batch.length_B.tolist()
    rows = batch.token_T.split(length_B)
    token_BL = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask_BL = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.long) for n in length_B], True)
    logit_BLV = model(input_ids=token_BL, attention_mask=mask_BL, use_cache=False).logits
    logprobs, entropies = [], []
    for b, chosen in enumerate(batch.action_mask_T.split(length_B)):
        for t in chosen.nonzero()[:, 0].tolist():
            logprob_V = (logit_BLV[b, t - 1] / temperature).log_softmax(-1)
            logprobs.append(logprob_V[token_BL[b, t]])
            entropies.append(-(logprob_V.exp() * logprob_V).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("architecture", SHAPES)
def test_packed_equals_padded_in_logprobs_entropies_and_gradients(tmp_path: Path, architecture: str) -> None:
    ours = tiny_model(architecture)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for seed in range(3):
        batch = random_batch(seed)
        actual = chosen_logprobs(ours, batch, temperature=0.8)
        expected = padded_logprobs(theirs, batch, 0.8)
        close_fp32(actual[0], expected[0], atol=1e-5)
        close_fp32(actual[1], expected[1], atol=1e-5)
        slope_N = torch.linspace(-1, 1, len(actual[0])) / len(actual[0])
        for logprob_N, model in ((actual[0], ours), (expected[0], theirs)):
            model.zero_grad()
            (logprob_N * slope_N).sum().backward()
        pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
        for (name, one), (other_name, other) in pairs:
            assert name == other_name and one.grad is not None and other.grad is not None
            assert one.grad.abs().max() > 1e-4, name
            close_fp32(one.grad, other.grad, atol=1e-5)


@pytest.mark.parametrize("architecture", SHAPES)
def test_a_segment_has_the_same_logprobs_alone(architecture: str) -> None:
    model, batch = tiny_model(architecture), random_batch(3)
    whole_T = packed_logprobs(model, batch, temperature=1.0, max_tokens=10_000)
    close_fp32(packed_logprobs(model, batch, temperature=1.0, max_tokens=30), whole_T)
    alone = [
        packed_logprobs(model, batch.select([b]), temperature=1.0, max_tokens=100)
        for b in range(batch.num_segments)
    ]
    close_fp32(torch.cat(alone), whole_T)
    assert not whole_T.requires_grad
    assert torch.equal(whole_T != 0, batch.action_mask_T)
    close_fp32(whole_T[batch.action_mask_T], chosen_logprobs(model, batch, temperature=1.0)[0])


def test_a_segment_longer_than_a_micro_batch_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="tokens but a micro-batch holds 3; raise policy.tokens_per_micro_batch"
    ):
        packed_logprobs(tiny_model("llama"), random_batch(0), temperature=1.0, max_tokens=3)


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


def test_a_model_without_an_output_embedding_is_an_error(tmp_path: Path) -> None:
    save_model(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError) as error:
        output_head(AutoModel.from_pretrained(tmp_path, attn_implementation="eager"))
    assert str(error.value) == (
        "LlamaModel has no linear output embedding; a causal language model is needed"
    )
