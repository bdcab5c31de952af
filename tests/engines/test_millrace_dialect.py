"""Our own server as an engine of a run: over HTTP it samples what it samples in a process of the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engines.engine_server import NoTexts
from millrace.engines.http_client import HttpClient, RequestRefused, ServerError
from millrace.engines.millrace_dialect import MillraceDialect
from millrace.engines.server_dialect import progress
from millrace.engines.server_settings import ServerSettings
from millrace.engines.server_start import connect
from millrace.inference.async_engine import AsyncEngine
from millrace.inference.engine import PagedEngine
from millrace.inference.server.limits import Limits
from millrace.inference.server.service import ModelService
from millrace.models.load import fresh_config, fresh_model
from millrace.transport.shared_memory import SharedWeights, WeightManifest
from millrace.types import SamplingParams
from tests.close import close_fp32
from tests.engines.completions import same_completions
from tests.engines.worker_settings import SETTINGS
from tests.inference.server.running import Running, running, tokenizer
from tests.models.tiny import SHAPES, SIZES

pytestmark = pytest.mark.world

TOKEN = "of-an-admin"
decode = partial(tokenizer().decode, skip_special_tokens=True)


def model(seed: int, **changes: Any) -> Any:
    shape = SIZES | SHAPES["qwen3"] | changes
    config = fresh_config("qwen3", shape, vocab_size=len(tokenizer()), eos_token_id=tokenizer().eos_token_id)
    return fresh_model(config, seed=seed, dtype=torch.float32).requires_grad_(False)


def engine() -> PagedEngine:
    return PagedEngine(model(0), decode, max_cache_tokens=512, block_size=4, max_requests=8)


@contextmanager
def served(**changes: Any) -> Iterator[Running]:
    service = ModelService(
        engine=AsyncEngine(engine(), max_waiting=32),
        tokenizer=tokenizer(),
        name="mill",
        max_length=128,
        vocab_size=len(tokenizer()),
        dtype=torch.float32,
        stop_token_ids=(tokenizer().eos_token_id,),
    )
    with running(service, limits=Limits(admin_token=TOKEN, token="of-a-client"), **changes) as mill:
        yield mill


def asked(url: str, use: Callable[[MillraceDialect], Awaitable[Any]], token: str = TOKEN, longest=100) -> Any:
    """What the dialect of a server returns."""

    async def run() -> Any:
        client = HttpClient(url, token)
        try:
            return await use(
                MillraceDialect(client, timeout_s=60, load_s=60, kv="recompute", longest=longest)
            )
        finally:
            await client.close()

    return asyncio.run(run())


@contextmanager
def written(source: Any, version: int) -> Iterator[tuple[str, WeightManifest]]:
    """Weights in shared memory: the file and the manifest."""
    shared = SharedWeights()
    manifest = shared.write(source.named_parameters(), version)
    yield f"/proc/{os.getpid()}/fd/{shared.handle}", manifest
    shared.close()


def test_it_samples_what_the_engine_samples() -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, seed=(1 << 63) + seed, top_k=20, stop_token_ids=(0,))
        for seed in range(4)
    ]
    params[1] = SamplingParams(max_tokens=12, temperature=0.0, stop=("a",), logit_bias=((5, 1.0),))
    prompt, source = (5, 6, 7), model(3)
    twin = engine()
    twin.update_weights(source.named_parameters(), 7)
    expected = twin.generate([prompt] * 4, params)

    async def use(dialect: MillraceDialect) -> Any:
        await dialect.probe([5, 6], tokenizer().decode([5, 6]))
        with written(source, 7) as (path, manifest):
            await dialect.update_weights(path, manifest)
        assert await dialect.version() == 7
        made = await asyncio.gather(*(dialect.generate(f"{i}", prompt, one) for i, one in enumerate(params)))
        await dialect.abort(["0", "unknown"])
        assert await progress(dialect.client, 60.0) > 0
        return made, await dialect.verify((5, 6, 7, 8))

    with served() as mill:
        found, scores = asked(mill.url, use)
    same_completions(found, expected, 7)
    close_fp32(torch.tensor(scores), torch.tensor(twin.logprobs_of((5, 6, 7, 8))))


def test_weights_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with served() as mill, written(model(3), 7) as (path, manifest):
        names = sorted(manifest["tensors"])
        less = {name: place for name, place in manifest["tensors"].items() if name != names[0]}
        digests = {name: manifest["fingerprint"][name] for name in less}
        other = {**manifest["fingerprint"], names[1]: "0" * 32}
        short = {**manifest["tensors"], names[0]: ("float32", [4], manifest["bytes"])}
        (tmp_path / "weights").write_bytes(b"")
        hidden = f"/proc/{os.getpid()}/fd/{os.open(tmp_path / 'weights', os.O_RDONLY)}"
        for where, changes, message in (
            (path, {"fingerprint": other}, f"weight {names[1]} did not arrive with the bits that were sent"),
            (path, {"tensors": less}, f"weight {names[0]} has no place or no checksum"),
            (path, {"tensors": less, "fingerprint": digests}, "1 weights were not sent, the first being"),
            (path, {"tensors": short}, "which is not in the"),
            (str(tmp_path / "weights"), {}, "start it with --weights-root FOLDER"),
            (hidden, {}, "is not the shared memory of a trainer"),
            ("/proc/1234567/fd/3", {}, "trainer and server must be on one machine, or share the folder"),
        ):
            with pytest.raises(RequestRefused, match=message):
                asked(mill.url, lambda d, p=where, m=changes: d.update_weights(p, {**manifest, **m}))
        assert asked(mill.url, lambda dialect: dialect.version()) == 0
        # An unknown place that comes with weights of another shape.
        other = model(3, intermediate_size=32)
        with written(other, 8) as (path, wrong), pytest.raises(RequestRefused, match="was sent as"):
            asked(mill.url, lambda dialect: dialect.update_weights(path, wrong))


def test_a_server_that_is_not_the_policys() -> None:
    with served() as mill:
        text = tokenizer().decode([5, 6])
        with pytest.raises(ServerError, match="has another tokenizer than the policy: it decodes"):
            asked(mill.url, lambda dialect: dialect.probe([5, 6], text + "!"))
        with pytest.raises(ServerError, match="of 128 tokens, and the recipe's have up to 200"):
            asked(mill.url, lambda dialect: dialect.probe([5, 6], text), longest=200)
        for token, status in (("", 401), ("of-a-client", 403)):
            with pytest.raises(RequestRefused) as refused:
                asked(mill.url, lambda dialect: dialect.probe([5, 6], text), token)
            assert refused.value.status == status
        with pytest.raises(ValueError, match="too long|too many|tokens"):
            asked(mill.url, lambda dialect: dialect.generate("x", (1,), SamplingParams(max_tokens=5000)))
    with served(texts=NoTexts()) as mill, pytest.raises(RequestRefused, match="takes tokens only"):
        asked(mill.url, lambda dialect: dialect.probe([5, 6], "text"))


def opened(settings: ServerSettings) -> Any:
    async def run() -> Any:
        async with connect(settings, Path("/nowhere"), kv="recompute", decode=decode) as (dialect, ended):
            await dialect.probe([1], "text")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "got no reply: 0 bytes read|the server closed the connection"),
        (b"hello\r\n\r\n", "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "is no JSON: 'hello'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "is no millrace server; correct engine.kind"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            "is no millrace server",
        ),
        (b"HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\n{}", "set engine.api_key_env to the variable"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "within 0.3 s"),
        (None, "within 0.3 s"),
    ],
)
def test_a_server_that_is_none(reply: bytes | None, message: str) -> None:
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
                if path == b"/v1/models" and b" 200 " in (reply or b""):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                elif reply is None or reply.endswith(b"9\r\n\r\n{}"):
                    writer.write(reply or b"")
                    await asyncio.sleep(5)
                else:
                    writer.write(reply)
            finally:
                writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            hangs = "within" in message
            settings = replace(SETTINGS, url=f"http://127.0.0.1:{port}", timeout_s=0.3 if hangs else 60)
            async with connect(settings, Path("/x"), kv="recompute", decode=decode) as (dialect, _):
                await dialect.probe([1], "text")

    with pytest.raises(ServerError, match=message):
        asyncio.run(run())


@pytest.mark.slow
def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="127.0.0.1:1/v1/models got no reply"):
        opened(replace(SETTINGS, url="http://127.0.0.1:1"))
    with pytest.raises(ServerError, match=r"cannot be started \(No such file or directory\); correct engine"):
        opened(replace(SETTINGS, python="/nowhere/python"))
    program = tmp_path / "python"
    # What it leaves behind holds its output open.
    program.write_text("#!/bin/sh\nsleep 60 &\necho no such model; exit 3\n")
    program.chmod(0o755)
    with pytest.raises(ServerError, match="ended with exit code 3; the last it printed: no such model"):
        opened(replace(SETTINGS, python=str(program)))
    program.write_text("#!/bin/sh\necho still loading; exec sleep 60\n")
    with pytest.raises(ServerError, match=r"did not reply within 3 s \(timeouts.phase_s\); the last"):
        opened(replace(SETTINGS, python=str(program), start_s=3.0))
