"""`/v1/completions` with `echo`: the prompt comes back, with the log-probabilities that lm-eval reads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from millrace.inference.server import completion_echo
from millrace.inference.server.app import create_app
from millrace.inference.server.limits import Limits
from millrace.inference.server.service import GenerationService
from millrace.types import TopTokens
from tests.inference.server.running import LocalTexts, fake_served, tokenizer

# Requests of lm-eval 0.4.13 (`local-completions`), and the answers of `millrace serve` to them.
RECORDED = json.loads(Path(__file__).with_name("lm_eval_requests.json").read_text(encoding="utf-8"))
SCORED = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1, "seed": 1234}


class EchoApplication:
    """Its requests, without a port."""

    def __init__(self, runner: asyncio.Runner) -> None:
        served = fake_served()
        self.engine = served.engine
        self._runner = runner
        service = GenerationService(served, max_samples=8, texts=LocalTexts(served))
        self._app = create_app(service, Limits())

    def post(self, body) -> httpx.Response:
        return self._runner.run(self._post(body))

    async def _post(self, body) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/v1/completions", json=body)

    def choices(self, **body) -> list[dict]:
        answer = self.post(body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]


@pytest.fixture(scope="module")
def mill():
    with asyncio.Runner() as runner:
        yield EchoApplication(runner)


def lm_eval_scores(choice, num_context: int) -> tuple[float, bool]:
    """What lm-eval reads: `LocalCompletionsAPI.parse_logprobs`."""
    values = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def form(value):
    """The keys and kinds of a JSON value; the names of tokens are no keys."""
    if isinstance(value, dict):
        if value and all(isinstance(one, float) for one in value.values()):
            return "log-probabilities by token"
        return {key: form(one) for key, one in value.items()}
    if isinstance(value, list):
        return [form(one) for one in value]
    return type(value).__name__


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_requests_of_lm_eval_get_the_form_that_it_read(mill, name):
    recorded = RECORDED[name]
    answer = mill.post(recorded["request"] | {"model": "mill"})
    assert answer.status_code == 200, answer.text
    found, expected = form(answer.json()), form(recorded["answer"])
    if not recorded["request"].get("echo"):
        assert found == expected
        return
    assert {**found, "choices": None} == {**expected, "choices": None}
    for choice, prompt in zip(answer.json()["choices"], recorded["request"]["prompt"], strict=True):
        assert form(choice).keys() == expected["choices"][0].keys()
        columns, num_tokens = choice["logprobs"], len(tokens_of(prompt)) + 1
        assert columns.keys() == expected["choices"][0]["logprobs"].keys()
        assert [len(column) for column in columns.values()] == [num_tokens] * 4
        for column, kinds in columns.items():
            wanted = expected["choices"][0]["logprobs"][column]
            assert form(kinds)[:2] == wanted[:2] and set(form(kinds)[1:]) == set(wanted[1:])


def tokens_of(prompt) -> list[int]:
    return tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else prompt


def test_prompt_tokens_come_with_log_probability_and_most_likely_token(mill):
    prompts = [[7, 8, 9, 10], [5]]
    first, second = mill.choices(prompt=prompts, **SCORED)
    texts = [tokenizer().decode([token]) for token in prompts[0]]
    logprob_N, top = mill.engine.prompt_scores((7, 8, 9, 10))
    generated = mill.engine.token((7, 8, 9, 10), 1234, 0)
    assert first["text"] == "".join(texts) + tokenizer().decode([generated])
    columns = first["logprobs"]
    assert columns["tokens"] == [*texts, tokenizer().decode([generated])]
    assert columns["token_logprobs"] == [None, *logprob_N.tolist(), -0.125]
    assert columns["top_logprobs"][0] is None
    for place, found in enumerate(columns["top_logprobs"][1:4]):
        best = tokenizer().decode([int(top.token_ids[place])])
        assert found == {texts[place + 1]: logprob_N[place], best: top.logprobs[place]}
    assert columns["top_logprobs"][4] == {columns["tokens"][4]: -0.125}
    assert columns["text_offset"] == [0, 1, 2, 3, 4]
    # lm-eval: token 9 is the most likely one after two tokens, tokens 8 and 10 are not.
    assert lm_eval_scores(first, 1) == (-1.5, False)
    assert lm_eval_scores({"logprobs": {name: c[:4] for name, c in columns.items()}}, 2) == (-0.5, True)
    assert (second["index"], second["logprobs"]["token_logprobs"]) == (1, [None, -0.125])


def test_of_two_tokens_with_one_text_the_more_likely_stays(mill, monkeypatch):
    halves = [token for token in range(290) if tokenizer().decode([token]) == "\N{REPLACEMENT CHARACTER}"]
    top = TopTokens(np.array(halves[1:2], np.int32), np.array([-0.5], np.float32))
    scores = np.array([-2.0], np.float32), top
    monkeypatch.setattr(mill.engine, "prompt_scores", lambda prompt: scores)
    (choice,) = mill.choices(prompt=[7, halves[0]], **SCORED)
    assert choice["logprobs"]["top_logprobs"][1] == {"\N{REPLACEMENT CHARACTER}": -0.5}
    assert lm_eval_scores(choice, 1) == (-2.0, False)


def test_without_generation_the_text_is_the_prompt(mill):
    answer = mill.post({"prompt": ["the wheel", "käse"], "n": 2, "echo": True, "max_tokens": 0}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["the wheel"] * 2 + ["käse"] * 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(len(tokens_of(text)) for text in ("the wheel", "käse"))
    (choice,) = mill.choices(prompt=[7, 8], echo=True, max_tokens=0, logprobs=0, temperature=0.7)
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert choice["logprobs"]["top_logprobs"] is None


def test_a_text_comes_back_as_it_was_and_goes_on(mill):
    (plain,) = mill.choices(prompt="the wheel", seed=3, max_tokens=5)
    (choice,) = mill.choices(prompt="the wheel", seed=3, max_tokens=5, echo=True, logprobs=0)
    assert choice["text"] == "the wheel" + plain["text"]
    assert len(choice["logprobs"]["tokens"]) == len(tokens_of("the wheel")) + 5
    assert choice["finish_reason"] == plain["finish_reason"]


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        (
            {"max_tokens": 0, "echo": False, "logprobs": None},
            "max_tokens",
            "max_tokens is 0, which is for echo",
        ),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1: "),
        ({"stream": True}, "echo", "echo is not supported with stream: true; leave one of them out"),
        ({"logprobs": 2}, "logprobs", "logprobs is 2, but of a prompt only the most likely token"),
        (
            {"temperature": 0.5},
            "logprobs",
            "logprobs is 1, which gives the most likely token of generated ones",
        ),
        ({"logit_bias": {"5": 1.0}}, "logprobs", "logprobs is 1, which gives the most likely"),
        ({"echo": 1}, "echo", "echo is 1: input should be a valid boolean"),
        (
            {"prompt": [[7] * 33]},
            "prompt",
            "prompt has 33 tokens in all samples, but log-probabilities of at most",
        ),
        ({"prompt": [7] * 11, "n": 3}, "prompt", "prompt has 33 tokens in all samples"),
        ({"prompt": [[]]}, None, "the prompt is empty"),
        ({"prompt": [7] * 9, "max_tokens": 56}, None, "the prompt has 9 tokens and max_tokens is 56"),
    ],
)
def test_a_mistake_gets_a_sentence_and_nothing_runs(mill, monkeypatch, more, param, message):
    monkeypatch.setattr(completion_echo, "MAX_SCORED_TOKENS", 32)
    answer = mill.post({"prompt": [[7, 8]], **SCORED} | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(message)
    assert mill.engine.num_live == 0
