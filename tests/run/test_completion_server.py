"""Answers of a server: what is sent, what is read, and what its failures are called."""

from __future__ import annotations

import json

import pytest

from millrace.rewards.chat_endpoint import HttpReply, Unreachable
from millrace.rollout.sampled_batch import completion_seed
from millrace.run.completion_server import SEEDS, CompletionServer, ServerAnswer, ServerFailed
from millrace.types import SamplingParams

URL = "http://host/v1"


def server(reply, model="mill"):
    """A server whose replies `reply` returns, the bodies that it got by path, and the pauses."""
    sent, pauses = [], []

    def endpoint(path):
        def send(body, timeout_s):
            sent.append((path, None if body is None else json.loads(body)))
            return reply(*sent[-1])

        return send

    return CompletionServer(URL, model, endpoint=endpoint, pause=pauses.append), sent, pauses


def ok(tree) -> HttpReply:
    return HttpReply(200, json.dumps(tree).encode())


def answer(path, body):
    text = (
        {"message": {"content": None}}
        if path.startswith("chat")
        else {"text": body["prompt"] + str(body["seed"])}
    )
    return ok({"choices": [text | {"finish_reason": "length"}], "usage": {"completion_tokens": 3}})


def test_each_answer_is_a_request_with_its_own_seed():
    asked, sent, _ = server(answer)
    params = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, stop=("x",), seed=7)
    chat = [{"role": "user", "content": "hello"}]
    found = asked.answers([{"prompt": "a"}, {"messages": chat}], params, 2)
    seeds = [completion_seed(7, number, sample) % SEEDS for number in (0, 1) for sample in (0, 1)]
    assert found == [
        ServerAnswer(f"a{seeds[0]}", "length", 3),
        ServerAnswer(f"a{seeds[1]}", "length", 3),
        ServerAnswer("", "length", 3),
        ServerAnswer("", "length", 3),
    ]
    common = {"model": "mill", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x"]}
    expected = [("completions", {**common, "prompt": "a", "seed": seed}) for seed in seeds[:2]]
    expected += [("chat/completions", {**common, "messages": chat, "seed": seed}) for seed in seeds[2:]]
    assert sorted(sent, key=str) == sorted(expected, key=str)


def test_the_only_model_is_taken_and_several_are_named():
    asked, sent, _ = server(lambda path, body: ok({"data": [{"id": "mill"}]}), model="")
    assert asked.model() == asked.model() == "mill" and len(sent) == 1
    asked, *_ = server(lambda path, body: ok({"data": [{"id": "a"}, {"id": "b"}]}), model="")
    with pytest.raises(
        ServerFailed, match="http://host/v1 has not one model but: a, b; add #MODEL to the URL"
    ):
        asked.model()


def test_a_busy_server_is_asked_again_and_a_refusal_ends_it():
    replies = iter(
        [HttpReply(429, b"busy", 7.0), HttpReply(503, b""), answer("completions", {"prompt": "", "seed": 1})]
    )
    asked, sent, pauses = server(lambda path, body: next(replies))
    assert asked.answers([{"prompt": "a"}], SamplingParams(), 1)[0].text == "1"
    assert pauses == [7.0, 2.0]
    for reply, sentence in (
        (HttpReply(400, b"too long"), "server http://host/v1 replied 400: too long"),
        (HttpReply(401, b""), "server http://host/v1 replied 401: ; give its key by --api-key-env VARIABLE"),
        (ok({"choices": []}), 'server http://host/v1 replied without an answer: {"choices": []}'),
    ):
        asked, sent, _ = server(lambda path, body, reply=reply: reply)
        with pytest.raises(ServerFailed) as caught:
            asked.answers([{"prompt": "a"}], SamplingParams(), 1)
        assert (str(caught.value), len(sent)) == (sentence, 1)

    def gone(path, body):
        raise Unreachable("refused")

    asked, sent, _ = server(gone)
    with pytest.raises(ServerFailed, match="server http://host/v1 cannot be reached: refused"):
        asked.answers([{"prompt": "a"}], SamplingParams(), 1)
    assert len(sent) == 5
