"""`/inference/v1/generate`: the request of a trainer's client, and each token with its log-probability."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from millrace.inference.server.app import create_app
from millrace.inference.server.limits import Limits
from millrace.inference.server.service import GenerationService
from tests.inference.server.running import LocalTexts, fake_served, tokenizer

# What verifiers' client sends for a turn.
TURN = {
    "model": "mill",
    "token_ids": [5, 6],
    "sampling_params": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 7,
        "seed": 9,
        "stop_token_ids": [289],
        "logprobs": 1,
        "skip_special_tokens": False,
    },
    "cache_salt": "step 3",
    "priority": 0,
}


class Application:
    """Its requests, without a port."""

    def __init__(self, runner: asyncio.Runner, limits: Limits) -> None:
        served = fake_served()
        self.engine = served.engine
        self._runner = runner
        self._app = create_app(GenerationService(served, max_samples=8, texts=LocalTexts(served)), limits)

    def post(self, body, **headers) -> httpx.Response:
        self.engine.params.clear()
        return self._runner.run(self._post(body, headers))

    async def _post(self, body, headers) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/inference/v1/generate", json=body, headers=headers)


@pytest.fixture(scope="module")
def mill():
    with asyncio.Runner() as runner:
        yield Application(runner, Limits())


def sampling(**more) -> dict:
    return TURN | {"sampling_params": TURN["sampling_params"] | more}


def test_each_token_comes_with_its_log_probability_and_version(mill):
    answer, engine = mill.post(TURN), mill.engine
    token_ids = [engine.token((5, 6), 9, position) for position in range(7)]
    body = answer.json()
    assert answer.status_code == 200
    assert body.pop("request_id").startswith("tokens-")
    assert body == {
        "model": "mill",
        "choices": [
            {
                "index": 0,
                "token_ids": token_ids,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": -n / 8, "bytes": None, "top_logprobs": []}
                        for n, token in enumerate(token_ids, start=1)
                    ]
                },
                "versions": [3] * 7,
                "finish_reason": "length",
            }
        ],
        "prompt_logprobs": None,
        "usage": {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9},
    }
    (params,) = engine.params.values()
    assert params.top_k == 0
    assert params.stop_token_ids == (tokenizer().eos_token_id, 289)


def test_without_limits_a_turn_takes_what_the_model_allows(mill):
    answer = mill.post({"token_ids": [5, 6], "sampling_params": {"ignore_eos": True, "n": 2}})
    assert [len(one["token_ids"]) for one in answer.json()["choices"]] == [62, 62]
    assert [one["logprobs"] for one in answer.json()["choices"]] == [None, None]
    assert mill.engine.num_live == 0


def test_a_stream_has_the_same_tokens(mill):
    whole = mill.post(sampling(n=2)).json()["choices"]
    streamed = mill.post(sampling(n=2) | {"stream": True, "stream_options": {"include_usage": True}})
    *events, end = streamed.text.removesuffix("\n\n").split("\n\n")
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    assert end == "data: [DONE]"
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 14, "total_tokens": 16}
    for index, choice in enumerate(whole):
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == index]
        assert sum((piece["token_ids"] for piece in pieces), []) == choice["token_ids"]
        assert sum((piece["versions"] for piece in pieces), []) == choice["versions"]
        entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [
            choice["finish_reason"]
        ]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"sampling_params": {}}, "token_ids", "token_ids is missing; add it"),
        ({"token_ids": [5]}, "sampling_params", "sampling_params is missing; add it"),
        (TURN | {"model": "other"}, "model", "there is no model other; this server has mill"),
        (TURN | {"features": {"mm_hashes": {}}}, "features", "features is not supported by this server"),
        (TURN | {"token_ids": [-1]}, "token_ids.0", "token_ids.0 is -1: "),
        (TURN | {"stream_options": {}}, "stream_options", "stream_options has no effect without stream"),
        (sampling(max_token=3), "max_token", "there is no field max_token; did you mean max_tokens?"),
        (sampling(stream=True), "stream", "there is no field stream"),
        (sampling(top_k=-2), "top_k", "top_k is -2; it must be 0 (off) or more"),
        (sampling(logprobs=3), "logprobs", "logprobs is 3, but only the log-probability of the sampled"),
        (sampling(prompt_logprobs=2), "prompt_logprobs", "prompt_logprobs is 2, but only"),
        (sampling(structured_outputs={"json": {}}), "structured_outputs", "structured_outputs is not"),
        (sampling(max_tokens=99), None, "the prompt has 2 tokens and max_tokens is 99; too long"),
    ],
)
def test_a_mistake_gets_a_sentence(mill, body, param, message):
    answer = mill.post(body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert error["param"] == param
    assert error["message"].startswith(message)
    assert not mill.engine.params


def test_it_needs_the_token_and_counts_as_a_request():
    with asyncio.Runner() as runner:
        full = Application(runner, Limits(token="asks", max_concurrent=0))
        assert full.post(TURN).status_code == 401
        assert full.post(TURN, Authorization="Bearer asks").status_code == 429


def test_a_failed_request_says_why(mill, monkeypatch):
    monkeypatch.setattr(mill.engine, "broken", 5)
    answer = mill.post(TURN)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the request failed: its logits are not finite"
