"""What an engine says of tokens that nobody draws."""

from __future__ import annotations

import pytest
import torch

from millrace.data.packing import pack_demonstrations
from millrace.inference.canary_logprobs import sampler_logprobs
from millrace.models.decoding import prepare
from millrace.models.load import Model
from millrace.models.logprobs import chosen_logprobs
from millrace.types import SamplingParams
from tests.close import close_fp32
from tests.inference.fresh import paged
from tests.models.tiny import SHAPES, tiny_model
from tests.twins.reference import ReferenceEngine

TOKENS = tuple(range(3, 40, 2))


def trainers(model: Model) -> torch.Tensor:
    batch = pack_demonstrations([(TOKENS[:1], TOKENS[1:])], lambda mask_T, _: mask_T.float())
    with torch.no_grad():
        return chosen_logprobs(model, batch, temperature=1.0)[0]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", list(SHAPES))
def test_a_model_that_is_prepared_to_sample_says_what_the_trainers_does(architecture: str) -> None:
    model = tiny_model(architecture)
    expected = trainers(model)
    prepare(model)
    found = torch.tensor(sampler_logprobs(model, TOKENS))
    close_fp32(found, expected)


def test_engines_say_it_of_the_weights_they_loaded_last() -> None:
    newest = tiny_model("qwen3", seed=2)
    reference = ReferenceEngine(tiny_model("qwen3", seed=1), str)
    for engine in (paged(tiny_model("qwen3", seed=1)), reference):
        before = torch.tensor(engine.logprobs_of(TOKENS))
        engine.update_weights(newest.named_parameters(), 1)
        after = torch.tensor(engine.logprobs_of(TOKENS))
        close_fp32(after, trainers(newest))
        assert (after - before).abs().mean() > 1e-3


def test_requests_in_flight_notice_nothing() -> None:
    drawn = []
    for asks in (False, True):
        engine = paged(tiny_model("qwen3"))
        (request,) = engine.add((5, 6, 7), [SamplingParams(max_tokens=12, seed=3)])
        while request.finish_reason is None:
            engine.step()
            if asks:
                engine.logprobs_of(TOKENS)
        drawn.append(engine.completion(request))
    assert drawn[0].token_ids == drawn[1].token_ids
    assert drawn[0].logprobs.tobytes() == drawn[1].logprobs.tobytes()
