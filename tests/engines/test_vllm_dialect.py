"""vLLM's HTTP interface: replies as vLLM 0.32 sends them, and what each fault of one is called."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.engines import vllm_command
from millrace.engines.http_client import RequestRefused, ServerError
from millrace.engines.vllm_dialect import VllmDialect, check_params
from millrace.transport.shared_memory import SharedWeights
from millrace.types import SamplingParams
from tests.engines.test_server_worker import decode
from tests.engines.worker_settings import SETTINGS

# Of vLLM 0.32 with --logprobs-mode processed_logprobs.
CHOICE: dict[str, Any] = {
    "index": 0,
    "finish_reason": "length",
    "stop_reason": None,
    "token_ids": [3, 1, 4],
    "routed_experts": None,
    "sampling_mask": None,
    "weight_versions": [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3}],
    "logprobs": {
        "content": [
            {
                "token_id": token,
                "logprob": -0.5,
                "rank": 1,
                "top_logprobs": [
                    {"token_id": token, "logprob": -0.5, "rank": 1},
                    {"token_id": 9, "logprob": -1.5, "rank": 2},
                    {"token_id": 8, "logprob": -9999.0, "rank": 3},
                ],
            }
            for token in (3, 1, 4)
        ]
    },
}
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 64}]}
PROMPT_LOGPROBS = [None, {"2": {"logprob": -1.0, "rank": 3}}, {"3": {"logprob": -2.0, "rank": 5}}]
REPLIES: dict[str, Any] = {
    "/v1/models": MODELS,
    "/detokenize": {"prompt": "bc"},
    "/is_paused": {"is_paused": False},
    "/resume": {"status": "resumed"},
    "/init_weight_transfer_engine": {"message": "Weight transfer initialized"},
    "/pause?mode=keep&clear_cache=true": {"status": "paused"},
    "/start_weight_update": {"message": "Weight update started"},
    "/update_weights": {"message": "Weights updated"},
    "/finish_weight_update": {"message": "Weight update finished"},
    "/weight_info": {"weight_version": "7"},
    "/inference/v1/abort_requests": None,
}


class Recorded:
    """A client with recorded replies, by path; an exception is raised, and a function gets the body."""

    url = "http://test"

    def __init__(self, **replies: Any) -> None:
        self.replies = {**REPLIES, "/inference/v1/generate": self.generated}
        self.calls: list[tuple[str, Any]] = []
        self.choice: dict[str, Any] = copy.deepcopy(CHOICE)
        self.prefix = -2.0

    async def get(self, path: str, *, timeout_s: float) -> Any:
        return await self.post(path, timeout_s=timeout_s)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        self.calls.append((path, body))
        # What is sent must be JSON.
        reply = self.replies[path]
        found = reply(json.loads(json.dumps(body))) if callable(reply) else reply
        if isinstance(found, Exception):
            raise found
        return found

    def generated(self, body: Any) -> Any:
        params = body["sampling_params"]
        if "prompt_logprobs" in params:
            scores = [None] + [
                {str(token): {"logprob": -float(n)}} for n, token in enumerate(body["token_ids"])
            ][1:]
            scores[-1] = {key: {"logprob": -2.0} for key in scores[-1]}
            return {"choices": [self.choice], "prompt_logprobs": scores}
        if params["max_tokens"] == 1:
            one = {"token_id": 3, "logprob": 0.0 if "logit_bias" in params else self.prefix}
            return {"choices": [{**self.choice, "token_ids": [3], "logprobs": {"content": [one]}}]}
        return {"choices": [self.choice]}


def asked(client: Any, use: Callable[[VllmDialect], Any]) -> Any:
    async def run() -> Any:
        dialect = VllmDialect(
            client,
            timeout_s=60,
            load_s=60,
            kv="recompute",
            longest=64,
            decode=decode,
            dtype="float32",
        )
        return await use(dialect)

    return asyncio.run(run())


def refusal(status: int, reason: str = "no") -> RequestRefused:
    return RequestRefused("POST http://test", status, reason)


def test_a_completion() -> None:
    client, params = Recorded(), SamplingParams(max_tokens=3, temperature=0.7, seed=1 << 63, stop=("e",))
    made = asked(client, lambda dialect: dialect.generate("a", (1, 2), params))
    assert (made.token_ids, made.text, made.finish_reason) == ((3, 1, 4), "db", "length")
    assert made.versions.tolist() == [6, 6, 7]
    assert made.logprobs.tolist() == [-0.5] * 3
    assert made.support is None
    ((_, body),) = client.calls
    assert body["token_ids"] == [1, 2] and body["cache_salt"].endswith("-0")
    sent = body["sampling_params"]
    assert (sent["ignore_eos"], sent["logprobs"], sent["seed"], sent["stop"]) == (True, 0, 0, ["e"])


def test_the_candidates_of_a_truncated_distribution() -> None:
    client, params = Recorded(), SamplingParams(max_tokens=3, top_k=3, top_p=0.9)
    made = asked(client, lambda dialect: dialect.generate("a", (1, 2), params))
    assert client.calls[0][1]["sampling_params"]["logprobs"] == 3
    # The one of probability 0 is none.
    assert made.support.token_ids.tolist() == [3, 9, 1, 9, 4, 9]
    assert made.support.counts.tolist() == [2, 2, 2]
    assert made.support.logprobs.tolist() == [-0.5] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "sent 3 tokens and 0 log-probabilities"),
        ({"logprobs": {"content": CHOICE["logprobs"]["content"][:2]}}, "sent 3 tokens and 2 log-prob"),
        (
            {"logprobs": {"content": [{"token_id": 3, "logprob": None}] * 3}},
            "without a finite log-probability",
        ),
        (
            {"logprobs": {"content": [{"token_id": 5, "logprob": -1.0}] * 3}},
            "log-probability of another token",
        ),
        ({"weight_versions": None}, "a token without its weight version"),
        ({"weight_versions": CHOICE["weight_versions"][:1]}, "a token without its weight version"),
        (
            {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
            "'default'.* which are no numbers",
        ),
        ({"token_ids": "abc"}, "a completion that is no list of token ids"),
        ({"finish_reason": None}, "has no finish_reason"),
        ({"finish_reason": "tool_calls"}, "the finish reason 'tool_calls', which is unknown"),
    ],
)
def test_a_completion_without_what_training_needs(changes: Any, message: str) -> None:
    client = Recorded()
    client.choice |= changes
    with pytest.raises(ServerError, match=message):
        asked(client, lambda dialect: dialect.generate("a", (1, 2), SamplingParams(max_tokens=3)))


def test_requests_that_vllm_refuses() -> None:
    client = Recorded()
    client.replies["/inference/v1/generate"] = refusal(400, "the prompt is too long")
    with pytest.raises(ValueError, match="the prompt is too long"):
        asked(client, lambda dialect: dialect.generate("a", (1, 2), SamplingParams()))
    for params, message in (
        (SamplingParams(presence_penalty=1.0), "presence_penalty is not supported with engine.kind vllm"),
        (SamplingParams(min_tokens=2), "min_tokens is not supported"),
        (SamplingParams(top_p=0.9), "top_p and min_p need top_k"),
        (SamplingParams(logprobs="raw", temperature=0.7), "raw log-probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            check_params(params)


def test_the_probe_names_the_missing_option() -> None:
    asked(Recorded(), lambda dialect: dialect.probe([1, 2], "bc"))
    entry = {"token_id": 1, "logprob": -4.2}
    raw = {"choices": [{**CHOICE, "token_ids": [1], "logprobs": {"content": [entry]}}]}
    for path, reply, message in (
        ("/detokenize", {"prompt": "xy"}, "has another tokenizer than the policy"),
        ("/v1/models", {"data": [{"max_model_len": 32}]}, "larger --max-model-len"),
        ("/v1/models", {"data": []}, "no max_model_len"),
        ("/is_paused", refusal(404), "environment variable VLLM_SERVER_DEV_MODE=1"),
        ("/init_weight_transfer_engine", refusal(500), '--weight-transfer-config \'{"backend": "millrace"}'),
        ("/inference/v1/generate", refusal(403), "start the server with --enable-scale-out"),
        ("/inference/v1/generate", raw, "start it with --logprobs-mode processed_logprobs"),
    ):
        client = Recorded()
        client.replies[path] = reply
        with pytest.raises(ServerError, match=message):
            asked(client, lambda dialect: dialect.probe([1, 2], "bc"))


def test_an_update_and_its_verification() -> None:
    client, shared = Recorded(), SharedWeights()
    manifest = shared.write([("a", torch.arange(4.0)), ("b", torch.ones(2, 2))], 7)
    path = f"/proc/self/fd/{shared.handle}"

    async def use(dialect: VllmDialect) -> Any:
        await dialect.update_weights(path, manifest)
        assert await dialect.version() == 7
        return await dialect.verify((1, 2, 3))

    assert asked(client, use) == [-1.0, -2.0]
    steps = [call for call, _ in client.calls][:5]
    assert steps == [
        "/pause?mode=keep&clear_cache=true",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    sent = client.calls[2][1]["update_info"]
    assert sent["tensors"]["b"] == ("float32", [2, 2], 64)
    assert len(sent["sha256"]["a"]) == 64
    assert client.calls[3][1] == {"weight_version": "7"}

    client.prefix = -2.5
    with pytest.raises(ServerError, match="of older weights after version 7 was loaded.* 0.5"):
        asked(client, use)
    client.prefix = -2.0
    client.replies["/update_weights"] = refusal(500, "weight a did not arrive")
    with pytest.raises(ServerError, match="weight a did not arrive"):
        asked(client, use)
    fewer = {**manifest, "tensors": {"a": manifest["tensors"]["a"]}}

    async def again(dialect: VllmDialect) -> Any:
        await dialect.update_weights(path, manifest)
        await dialect.update_weights(path, {**fewer, "version": 8})

    client.replies["/update_weights"] = {}
    with pytest.raises(ServerError, match="version 8 has other weights than the last one; the first is b"):
        asked(client, again)
    other = {**manifest, "fingerprint": {**manifest["fingerprint"], "b": "0" * 32}}
    with pytest.raises(ServerError, match="weight b did not arrive with the bits"):
        asked(client, lambda dialect: dialect.update_weights(path, other))
    shared.close()


def test_the_command_and_the_plugin(tmp_path: Any) -> None:
    own = {"python": "python", "arguments": ("--enforce-eager",)}
    settings = replace(SETTINGS, **own, top_k=50, longest=96, max_batch_tokens=64)
    words = vllm_command.command(settings, tmp_path, "/tmp/socket")
    assert words[:4] == ["python", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[-1] == "--enforce-eager"
    assert words[words.index("--max-logprobs") + 1] == "50"
    assert "--no-enable-chunked-prefill" in words
    tokens = "--max-num-batched-tokens"
    assert words[words.index(tokens) + 1] == "96"
    words = vllm_command.command(replace(settings, on_gpu=True), tmp_path, "/tmp/socket")
    assert "--no-enable-chunked-prefill" not in words
    assert words[words.index(tokens) + 1] == "64"
    folder = vllm_command.write_plugin(tmp_path / "plugin")
    (about,) = folder.glob("*.dist-info")
    assert "millrace = millrace_vllm:register" in (about / "entry_points.txt").read_text()
    found = vllm_command.environment(folder, 3, {"PYTHONPATH": "/mine", "OMP_NUM_THREADS": "2"})
    assert found["PYTHONPATH"] == f"{folder}:/mine"
    assert (found["OMP_NUM_THREADS"], found["VLLM_SERVER_DEV_MODE"]) == ("2", "1")
    compile((folder / "millrace_vllm.py").read_text(), "plugin", "exec")
