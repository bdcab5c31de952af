"""The server over the real engine: what HTTP gives is what the engine draws."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import httpx
import pytest
import torch

from millrace.inference.async_engine import AsyncEngine
from millrace.inference.engine import PagedEngine
from millrace.inference.server.service import ModelService, sample_seed
from millrace.models.load import fresh_config, fresh_model, save_model
from millrace.transport.fingerprint import fingerprint
from millrace.types import SamplingParams
from tests.clients import openai
from tests.close import close_fp32
from tests.inference.invariants import check_async_engine
from tests.inference.server.running import DEADLINE_S, running, tokenizer, wait_until
from tests.models.tiny import SHAPES, SIZES

pytestmark = pytest.mark.world

decode = partial(tokenizer().decode, skip_special_tokens=True)


def model(seed: int):
    config = fresh_config(
        "qwen3", SIZES | SHAPES["qwen3"], vocab_size=len(tokenizer()), eos_token_id=tokenizer().eos_token_id
    )
    return fresh_model(config, seed=seed, dtype=torch.float32).requires_grad_(False)


def engine(seed: int = 0) -> PagedEngine:
    return PagedEngine(model(seed), decode, max_cache_tokens=512, block_size=4, max_requests=8)


@pytest.fixture
def mill(tmp_path):
    save_model(model(1), tmp_path / "other")
    served = ModelService(
        engine=AsyncEngine(engine(), max_waiting=32),
        tokenizer=tokenizer(),
        name="mill",
        max_length=128,
        vocab_size=len(tokenizer()),
        dtype=torch.float32,
        stop_token_ids=(tokenizer().eos_token_id,),
        weights_root=tmp_path,
    )
    with running(served) as found:
        yield found


def check_nothing_is_left(mill) -> None:
    wait_until(lambda: mill.service.num_requests == 0)
    stats = mill.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    asyncio.run(check_async_engine(mill.engine))


def test_openai_and_token_endpoints_give_what_the_engine_draws(mill):
    prompt = tokenizer()("the wheel turns")["input_ids"]
    end = tokenizer().eos_token_id
    params = [
        SamplingParams(
            max_tokens=12, temperature=0.8, top_k=20, stop_token_ids=(end,), seed=sample_seed(5, i)
        )
        for i in range(3)
    ]
    expected = engine().generate([prompt] * 3, params)
    ask = {"n": 3, "max_tokens": 12, "temperature": 0.8, "seed": 5}
    with openai.OpenAI(base_url=f"{mill.url}/v1", api_key="any", timeout=DEADLINE_S) as client:
        answer = client.completions.create(
            model="mill", prompt="the wheel turns", extra_body={"top_k": 20}, logprobs=0, **ask
        )
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    samples = mill.post("/generate", ask | {"prompt_token_ids": prompt, "top_k": 20}).json()["completions"]
    for choice, sample, one in zip(answer.choices, samples, expected, strict=True):
        assert sample["token_ids"] == list(one.token_ids)
        assert sample["versions"] == [0] * len(one.token_ids)
        close_fp32(sample["logprobs"], one.logprobs)
        close_fp32(choice.logprobs.token_logprobs, one.logprobs)
        assert sample["support"]["counts"] == [20] * len(one.token_ids)
        assert sample["support"]["token_ids"] == one.support.token_ids.tolist()
        close_fp32(sample["support"]["logprobs"], one.support.logprobs)
    check_nothing_is_left(mill)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(10))
def test_a_stream_of_random_tokens_is_the_whole_text(mill, seed):
    ask = {"prompt": "the", "n": 2, "max_tokens": 40, "seed": seed, "ignore_eos": True, "stop": ["a", "ä"]}
    whole = mill.post("/v1/completions", ask).json()["choices"]
    texts = ["", ""]
    for line in mill.post("/v1/completions", ask | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_prompt_log_probabilities_come_along(mill):
    ask = {"prompt_token_ids": [5, 6, 7], "prompt_logprobs": True, "max_tokens": 2, "seed": 1}
    (sample,) = mill.post("/generate", ask).json()["completions"]
    params = SamplingParams(max_tokens=2, prompt_logprobs=True, seed=1)
    (expected,) = engine().generate([[5, 6, 7]], [params])
    assert len(sample["prompt_logprobs"]) == 2
    close_fp32(sample["prompt_logprobs"], expected.prompt_logprobs)
    params = {"prompt_logprobs": 1, "logprobs": 1, "max_tokens": 2, "seed": 1}
    ask = {"token_ids": [5, 6, 7], "sampling_params": params}
    found = mill.post("/inference/v1/generate", ask).json()
    assert found["choices"][0]["token_ids"] == sample["token_ids"]
    entries = found["choices"][0]["logprobs"]["content"]
    close_fp32([entry["logprob"] for entry in entries], sample["logprobs"])
    first, *scores = found["prompt_logprobs"]
    assert (first, [list(score) for score in scores]) == (None, [["6"], ["7"]])
    close_fp32([score[token]["logprob"] for score in scores for token in score], expected.prompt_logprobs)


def test_new_weights_reach_a_request_in_flight(mill):
    ask = {"prompt_token_ids": [5], "max_tokens": 120, "seed": 1, "ignore_eos": True, "stream": True}
    with mill.client.stream("POST", "/generate", json=ask) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert mill.post("/pause", {"mode": "keep"}).json()["num_running"] == 1
        loaded = mill.post("/update_weights", {"path": "other", "version": 4})
        assert loaded.json()["version"] == 4
        assert mill.post("/resume").status_code == 200
        versions = [version for line in map(json.loads, lines) for version in line.get("versions", [])]
    assert set(versions) <= {0, 4}
    assert versions[-1] == 4
    assert mill.get("/fingerprint").json()["fingerprint"] == fingerprint(model(1).named_parameters())
    assert 'millrace:policy_version{model_name="mill"} 4.0' in mill.get("/metrics").text
    check_nothing_is_left(mill)


def test_a_sleeping_server_says_what_to_do_and_wakes(mill):
    assert mill.post("/sleep", {"tags": ["weights", "kv_cache"]}).status_code == 200
    for path, body in (("/update_weights", {"path": "other", "version": 1}), ("/fingerprint", None)):
        refused = mill.post(path, body) if body else mill.get(path)
        assert refused.status_code == 409
        assert "the weights are asleep" in refused.json()["error"]["message"]
    assert mill.get("/health").status_code == 200
    assert mill.post("/wake", {"tags": ["weights", "kv_cache"]}).status_code == 200
    assert mill.post("/update_weights", {"path": "other", "version": 1}).status_code == 200
    answer = mill.post("/generate", {"prompt_token_ids": [5, 6], "max_tokens": 5, "seed": 3})
    params = SamplingParams(max_tokens=5, stop_token_ids=(tokenizer().eos_token_id,), seed=3)
    (expected,) = engine(1).generate([[5, 6]], [params])
    assert answer.json()["completions"][0]["token_ids"] == list(expected.token_ids)


def test_whoever_leaves_gives_the_blocks_back(mill):
    ask = {"prompt_token_ids": [5, 6], "n": 8, "max_tokens": 100, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        mill.post("/generate", ask, timeout=0.1)
    check_nothing_is_left(mill)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt_token_ids": [10**6]}, "1000000"),
        ({"prompt_token_ids": [10**30]}, "1000000"),
        ({"prompt_token_ids": [5], "stop_token_ids": [10**30]}, "1000000"),
        ({"prompt_token_ids": [5], "priority": 10**30}, "1000000"),
        ({"prompt_token_ids": [5], "max_tokens": 10**30}, "1000000"),
        ({"prompt_token_ids": [5], "max_tokens": 128}, "128"),
        ({"prompt_token_ids": [5], "allowed_token_ids": [10**6]}, "1000000"),
        ({"prompt_token_ids": [5], "logit_bias": {"1000000": 1.0}}, "1000000"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused_with_its_numbers(mill, body, message):
    refused = mill.post("/generate", {"max_tokens": 4} | body)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize(
    "extreme",
    [
        {"presence_penalty": 1e4},
        {"presence_penalty": -1e4, "frequency_penalty": -1e4},
        {"frequency_penalty": 1e4, "temperature": 1e-5},
        {"repetition_penalty": 100.0, "temperature": 1e-5},
        {"repetition_penalty": 0.01, "presence_penalty": -1e4, "temperature": 1e-5},
        {"temperature": 100.0, "top_p": 1e-300},
        {"temperature": 1e-5, "min_p": 1.0},
        {"min_p": 5e-324, "top_p": 5e-324, "top_k": 2**31 - 1},
        {"logit_bias": {"5": 1e4, "6": -1e4}, "temperature": 1e-5},
        {"logit_bias": {"5": -1e4}, "allowed_token_ids": [5], "temperature": 1e-5},
        {"priority": -(10**9), "seed": 2**63 - 1},
    ],
)
@pytest.mark.parametrize("logprobs", ["processed", "raw"])
def test_the_most_extreme_values_that_are_taken_have_a_distribution(mill, extreme, logprobs):
    ask = {"prompt_token_ids": [5, 6, 5], "max_tokens": 12, "ignore_eos": True, "logprobs": logprobs}
    answer = mill.post("/generate", ask | extreme)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["completions"][0]["token_ids"]) == 12


def test_logits_that_are_no_numbers_fail_the_request_and_not_the_server(mill):
    broken = model(0)
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    named = list(broken.named_parameters())
    asyncio.run(mill.engine.update_weights(named, 2))
    failed = mill.post("/generate", {"prompt_token_ids": [5], "max_tokens": 4})
    assert failed.status_code == 500
    error = failed.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_failed")
    assert "not finite" in error["message"]
    asyncio.run(mill.engine.update_weights(list(model(0).named_parameters()), 3))
    (sample,) = mill.post("/generate", {"prompt_token_ids": [5], "max_tokens": 4}).json()["completions"]
    assert sample["versions"][0] == 3
    check_nothing_is_left(mill)
