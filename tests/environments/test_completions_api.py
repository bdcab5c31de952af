"""Text completions: what is read of a request, and what is refused."""

from __future__ import annotations

import json

import pytest

from millrace.environments.agent_protocol import AgentError
from millrace.environments.completions_api import TextRequest, check_vocabulary, read_completion


def read(**body) -> TextRequest:
    return read_completion(json.dumps({"model": "policy", **body}).encode(), "policy")


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("ab", "ab"), (["ab"], "ab"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))],
)
def test_a_prompt_is_a_text_or_tokens(given, prompt):
    assert read(prompt=given, temperature=0.5, n=1, best_of=1, echo=False) == TextRequest(prompt)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is missing"),
        ({"prompt": ""}, "prompt is missing, empty"),
        ({"prompt": []}, "prompt is missing, empty"),
        ({"prompt": [1, -2]}, "neither a text nor a list of tokens"),
        ({"prompt": [True]}, "neither a text nor a list of tokens"),
        ({"prompt": ["a", "b"]}, "prompt has 2 prompts; send one request for each"),
        ({"prompt": "a", "n": 2}, "n is 2"),
        ({"prompt": "a", "echo": True}, "echo is not supported"),
        ({"prompt": "a", "logprobs": 5}, "logprobs is 5; .* ask for logprobs: 0"),
        ({"prompt": "a", "stream_options": {}}, "stream_options has no effect"),
        ({"prompt": "a", "return_token_ids": 1}, "return_token_ids is true or false"),
        ({"prompt": "a", "messages": []}, "there is no field messages"),
    ],
)
def test_what_is_not_served_is_refused(body, message):
    with pytest.raises(AgentError, match=message) as refused:
        read(**body)
    assert refused.value.status == 400


def test_tokens_beyond_the_vocabulary_are_refused():
    check_vocabulary(read(prompt=[0, 60]), 61)
    with pytest.raises(AgentError, match="prompt has the token 61; the vocabulary has 61"):
        check_vocabulary(read(prompt=[61, 0]), 61)
