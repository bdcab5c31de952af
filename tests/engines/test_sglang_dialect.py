"""SGLang's HTTP interface, by a twin: our engine behind SGLang's verbs. What each fault of it is called."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from millrace.engines import sglang_command
from millrace.engines.http_client import RequestRefused, ServerError
from millrace.engines.server_dialect import progress
from millrace.engines.sglang_checksums import unchanged
from millrace.engines.sglang_dialect import TESTED, SglangDialect, check_params
from millrace.inference.async_engine import AsyncEngine
from millrace.transport.shared_memory import SharedWeights
from millrace.types import SamplingParams
from tests.close import close_fp32
from tests.engines.completions import same_completions
from tests.engines.sglang_twin import DROPPED, RECORDED, Refused, Twin, TwinClient
from tests.engines.test_millrace_dialect import decode, engine, model
from tests.engines.worker_settings import SETTINGS
from tests.inference.server.running import tokenizer

CANARY = (5, 6, 7, 8)
# Built once: that takes longer than any of these tests.
the_engine, the_model = cache(engine), cache(model)
EOS = tokenizer().eos_token_id


class Lab:
    """The dialect of a twin, and what changes its weights."""

    def __init__(self, twin: Twin, kv: Any, longest: int) -> None:
        self.twin, self.client = twin, TwinClient(twin)
        self.dialect = SglangDialect(
            self.client,
            timeout_s=60,
            load_s=60,
            kv=kv,
            longest=longest,
            decode=decode,
            dtype="float32",
        )
        self.folder = ""

    async def probe(self) -> None:
        await self.dialect.probe([5, 6], tokenizer().decode([5, 6]))

    async def load(self, source: Any, version: int) -> list[float]:
        """Do what the worker does; return the scores of the canary."""
        shared = SharedWeights()
        manifest = shared.write(source.named_parameters(), version)
        try:
            async with self.dialect.weights_at(shared.handle, manifest, self.folder) as path:
                await self.dialect.update_weights(path, manifest)
        finally:
            shared.close()
        assert await self.dialect.version() == version, "another version is reported"
        return await self.dialect.verify(CANARY)


def with_twin(
    use: Callable[[Lab], Awaitable[Any]], *, kv: Any = "recompute", longest: int = 100, **options: Any
) -> Any:
    async def run() -> Any:
        the_engine().resume()
        async with AsyncEngine(the_engine()) as made:
            twin = Twin(made, tokenizer(), context=longest + 8, eos=EOS, **options)
            return await use(Lab(twin, kv, longest))

    return asyncio.run(run())


def test_it_samples_what_the_engine_samples() -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, seed=(1 << 63) + 1, top_k=20, stop_token_ids=(EOS, 0)),
        SamplingParams(max_tokens=12, temperature=0.0, stop=("a",)),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, top_p=0.9),
        SamplingParams(max_tokens=3, seed=4),
    ]
    prompt, source = (5, 6, 7), the_model(3)
    ours = the_engine()
    ours.resume()
    ours.update_weights(source.named_parameters(), 7)
    expected = ours.generate([prompt] * 4, [replace(one, seed=one.seed % (1 << 63)) for one in params])

    async def use(lab: Lab) -> Any:
        await lab.probe()
        scores = await lab.load(source, 7)
        made = [lab.dialect.generate(f"{i}", prompt, one) for i, one in enumerate(params)]
        assert await progress(lab.client, 60.0) > 0
        return await asyncio.gather(*made), scores

    wanted = torch.tensor(ours.logprobs_of(CANARY))
    found, scores = with_twin(use)
    same_completions(found, expected, 7)
    close_fp32(torch.tensor(scores), wanted)


def test_a_stop_token_of_the_model_that_is_none_of_the_request() -> None:
    # Flat, so that the greedy token repeats; SGLang would end at it.
    async def use(lab: Lab) -> Any:
        wanted = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(1,))
        first = await lab.dialect.generate("a", (5, 6), wanted)
        lab.twin.eos = first.token_ids[1]
        begun = len(lab.client.calls)
        again = await lab.dialect.generate("a", (5, 6), wanted)
        assert (again.token_ids, again.finish_reason) == (first.token_ids, first.finish_reason)
        assert len(lab.client.calls) - begun > 1
        lab.twin.eos = first.token_ids[0]
        one = await lab.dialect.generate("a", (5, 6), replace(wanted, max_tokens=1))
        assert (one.token_ids, one.finish_reason) == (first.token_ids[:1], "length")

    async def loaded(lab: Lab) -> Any:
        await lab.load(the_model(3), 1)
        return await use(lab)

    with_twin(loaded)


def test_an_abort_ends_no_other_request() -> None:
    async def use(lab: Lab) -> Any:
        await lab.load(the_model(3), 1)
        wanted = SamplingParams(max_tokens=30)
        tasks = [asyncio.ensure_future(lab.dialect.generate(id, (5,), wanted)) for id in ("r1", "r10")]
        while lab.twin.num_requests < 4:  # two of them are of the update
            await asyncio.sleep(0)
        await lab.dialect.abort(["r1", "unknown"])
        await asyncio.gather(*tasks)
        short, long = (
            lab.twin.aborted[0],
            next(b["rid"] for p, b in lab.client.calls if p == "/generate" and "r10" in b["rid"]),
        )
        assert not long.startswith(short)

    with_twin(use)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dropped", f"holds older weights after version 2 was loaded, the first being {DROPPED}"),
        ("refused", "status 400: Failed to get weights iterator"),
        ("unsuccessful", "did not load version 2: no CUDA memory is left"),
        ("prose", "is no JSON: 'The weights were updated.'"),
        ("version", "another version is reported"),
        ("stale", "uses keys and values of older weights after version 2 was loaded"),
        ("cached", "took 97 tokens from its prefix cache, which is of older weights than version 2"),
        ("no_logprobs", "sent 1 tokens and 0 log-probabilities"),
    ],
)
def test_a_faulty_update_is_named(fault: str, message: str) -> None:
    async def use(lab: Lab) -> None:
        await lab.probe()
        await lab.load(the_model(3), 1)
        await lab.load(the_model(4), 2)

    with pytest.raises((ServerError, AssertionError), match=message):
        with_twin(use, fault=fault)


def test_the_canary_shows_a_weight_that_no_checksum_does() -> None:
    async def use(lab: Lab) -> Any:
        await lab.probe()
        await lab.load(the_model(3), 1)
        return await lab.load(the_model(4), 2)

    ours = the_engine()
    ours.resume()
    ours.update_weights(the_model(4).named_parameters(), 2)
    expected = torch.tensor(ours.logprobs_of(CANARY))
    close_fp32(torch.tensor(with_twin(use)), expected)
    assert (torch.tensor(with_twin(use, fault="dropped_unchecked")) - expected).abs().max() > 0.01


def test_a_completion_that_is_cut() -> None:
    async def use(lab: Lab) -> None:
        await lab.load(the_model(3), 1)
        lab.twin.num_updates = 2
        await lab.dialect.generate("a", (5,), SamplingParams(max_tokens=3))

    with pytest.raises(ServerError, match="for its length after 2 tokens, and 3 were requested"):
        with_twin(use, fault="few")


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({}, "xy", "has another tokenizer than the policy"),
        ({"longest": 140}, None, "engine.kind|takes sequences|tokens"),
        ({"fault": "original_logprobs"}, None, "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"seeded": False}, None, "start it with --enable-deterministic-inference"),
    ],
)
def test_the_probe_names_the_missing_option(options: Any, text: str | None, message: str) -> None:
    async def use(lab: Lab) -> None:
        if "longest" in options:
            lab.twin.context = 147
        await lab.dialect.probe([5, 6], text)

    with pytest.raises(ServerError, match=message):
        with_twin(use, **options)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/model_info", 404, "is no SGLang server; correct engine.kind or engine.urls"),
        ("/continue_generation", 404, f"has no /continue_generation; it needs SGLang {TESTED}"),
        ("/metrics", 404, "start it with --enable-metrics"),
        ("/generate", 401, "replied with status 401"),
    ],
)
def test_the_probe_names_the_missing_verb(path: str, status: int, message: str) -> None:
    async def use(lab: Lab) -> None:
        reply = lab.twin.reply

        async def without(method: str, where: str, body: Any) -> Any:
            if where == path:
                raise Refused(status, {"detail": "Not Found"})
            return await reply(method, where, body)

        with patch.object(lab.twin, "reply", without):
            await lab.probe()

    with pytest.raises(ServerError, match=message):
        with_twin(use)


META = {
    "finish_reason": {"type": "length", "length": 2},
    "weight_versions": [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}],
    "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]],
    "output_token_sampling_mask": [[3], [9, 4]],
    "output_token_sampling_logprobs": [0.0, -0.125],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"weight_versions": None}, "a token without its weight version"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "which are no numbers"),
        ({"output_token_logprobs": [[-0.5, 3, None], [None, 4, None]]}, "without a finite log-probability"),
        ({"output_token_logprobs": [[-0.5, 3, None], [-0.5, 5, None]]}, "log-probability of another token"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "'NaN happened'}, which is unknown"),
        ({"finish_reason": {"type": "stop", "matched": 9}}, "with a stop token that it does not hold"),
        ({"finish_reason": None}, "has no finish_reason"),
        ({"output_token_sampling_mask": [[3], [9, 8]]}, "a token that is none of its own candidates"),
        ({"output_token_sampling_mask": [[3]]}, "sent 2 tokens and the candidates of 1"),
        ({"output_token_sampling_logprobs": None}, "no log-probabilities of candidates"),
    ],
)
def test_a_completion_without_what_training_needs(changes: Any, message: str) -> None:
    async def use(lab: Lab) -> Any:
        async def made(method: str, path: str, body: Any) -> Any:
            return {"text": "", "output_ids": [3, 4], "meta_info": {**META, **changes}}

        with patch.object(lab.twin, "reply", made):
            return await lab.dialect.generate("a", (1, 2), SamplingParams(max_tokens=2, top_p=0.9))

    if message:
        with pytest.raises(ServerError, match=message):
            with_twin(use)
    else:
        made = with_twin(use)
        assert made.versions.tolist() == [6, 7]
        assert (made.support.token_ids.tolist(), made.support.counts.tolist()) == ([3, 4, 9], [1, 2])


def test_requests_that_sglang_refuses() -> None:
    async def use(lab: Lab, status: int, reason: str) -> None:
        async def refused(*_: Any) -> Any:
            raise Refused(status, {"error": {"message": reason}})

        with patch.object(lab.twin, "reply", refused):
            await lab.dialect.generate("a", (1, 2), SamplingParams())

    with pytest.raises(ValueError, match="longer than the model's context length"):
        with_twin(lambda lab: use(lab, 400, "The input is longer than the model's context length"))
    with pytest.raises(RequestRefused) as busy:
        with_twin(lambda lab: use(lab, 503, "The request queue is full."))
    assert busy.value.status == 429
    for params, message in (
        (SamplingParams(presence_penalty=1.0), "presence_penalty is not supported with engine.kind sglang"),
        (SamplingParams(logit_bias=((1, 1.0),)), "logit_bias is not supported"),
        (SamplingParams(min_p=0.1), "min_p is not supported with engine.kind sglang"),
        (SamplingParams(top_p=0.9, top_k=5), "top_k and top_p together mean something else"),
        (SamplingParams(logprobs="raw", temperature=0.7), "raw log-probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            check_params(params)


def test_an_update_through_a_shared_folder(tmp_path: Path) -> None:
    async def use(lab: Lab) -> None:
        lab.folder = str(tmp_path)
        await lab.load(the_model(3), 1)
        assert list(tmp_path.iterdir()) == []
        lab.folder = str(tmp_path / "none")
        with pytest.raises(ServerError, match=r"engine.weights_folder: \[Errno 2\]"):
            await lab.load(the_model(3), 2)

    with_twin(use)


def test_weights_that_the_trainer_did_not_write() -> None:
    async def use(lab: Lab) -> None:
        shared = SharedWeights()
        manifest = shared.write([("b", torch.ones(3, dtype=torch.bfloat16)), ("a", torch.arange(4.0))], 7)
        os.pwrite(shared.handle, b"\x01", manifest["tensors"]["a"][2])
        with pytest.raises(ServerError, match="weight a did not arrive with the bits"):
            async with lab.dialect.weights_at(shared.handle, manifest, ""):
                pass
        shared.close()

    with_twin(use)


def test_which_tensors_must_change() -> None:
    names = [f"l.self_attn.{one}_proj.weight" for one in "qkvo"]
    last, sent = dict.fromkeys(names, "old"), dict.fromkeys(names, "new")
    before = {"l.self_attn.qkv_proj.weight": ("1", "2"), names[3]: ("3",), "l.rotary.cache": ("4",)}
    assert unchanged(before, before, last, sent) == [
        "l.self_attn.o_proj.weight",
        "l.self_attn.qkv_proj.weight",
    ]
    # One shard of a tensor is enough, and a weight that is as it was may be in it.
    after = {**before, "l.self_attn.qkv_proj.weight": ("1", "5")}
    assert unchanged(before, after, last, {**sent, names[3]: "old"}) == []
    assert unchanged(before, before, last, {**sent, names[0]: "old", names[3]: "old"}) == []


def test_the_command_has_options_of_sglang(tmp_path: Path) -> None:
    config = sglang_command.write_config(tmp_path / "server.yaml", "a-token")
    assert config.stat().st_mode & 0o077 == 0
    settings = replace(SETTINGS, python="python", top_k=5000, arguments=("--disable-cuda-graph",))
    words = sglang_command.command(settings, tmp_path, 30000, config)
    assert words[:4] == ["python", "-P", "-m", "sglang.launch_server"]
    assert words[-1] == "--disable-cuda-graph"
    assert "a-token" not in words
    options = {word.removeprefix("--").replace("-", "_") for word in words[4:-1] if word.startswith("--")}
    assert options - {"config"} <= set(RECORDED["options"])
    assert words[words.index("--context-length") + 1] == "72"
    assert words[words.index("--sampling-mask-max-tokens") + 1] == "10000"
    found = sglang_command.environment(3, {sglang_command.ORIGINAL_LOGPROB: "1", "OMP_NUM_THREADS": "2"})
    assert (found["OMP_NUM_THREADS"], found[sglang_command.ORIGINAL_LOGPROB]) == ("2", "false")
    assert set(found) - {"OMP_NUM_THREADS"} <= set(RECORDED["environment"])
