"""Start the server of a worker, or connect to a given one."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.engines import sglang_command, vllm_command
from millrace.engines.http_client import UNIX, HttpClient, RequestRefused, ServerError
from millrace.engines.millrace_dialect import MillraceDialect
from millrace.engines.server_dialect import Dialect
from millrace.engines.server_process import ServerProcess
from millrace.engines.server_settings import TOKEN, ServerSettings
from millrace.engines.sglang_dialect import SglangDialect
from millrace.engines.vllm_dialect import VllmDialect

if TYPE_CHECKING:
    from millrace.inference.engine import KvPolicy

ENTRY = ("-P", "-m", "millrace.engines.engine_server")


@asynccontextmanager
async def connect(
    settings: ServerSettings, folder: Path, *, kv: KvPolicy, decode: Callable[[Sequence[int]], str]
) -> AsyncIterator[tuple[Dialect, Callable[[], Awaitable[None]] | None]]:
    """Yield the dialect of a server that replies, and what waits for the end of a started one.

    Args:
        settings: of the worker.
        folder: written by `build_engine.save_engine`.
        kv: see `PagedEngine.update_weights`.
        decode: converts tokens to text without special tokens.

    Raises:
        ServerError: the server does not start, or does not reply.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-server-") as private:
        token = settings.token if settings.url else secrets.token_hex(24)
        port = sglang_command.free_port() if settings.kind == "sglang" and not settings.url else 0
        own = f"http://{sglang_command.LOOPBACK}:{port}" if port else f"{UNIX}{private}/http"
        client = HttpClient(settings.url or own, token)
        process = None
        if not settings.url:
            process = _start(settings, folder, Path(private), token, port)
        dialect = _dialect(settings, client, kv, decode)
        try:
            await _wait_until_up(settings, client, process)
            yield dialect, None if process is None else process.ended
        except RequestRefused as error:
            if error.status in (401, 403):
                raise ServerError(
                    f"{error}; set engine.api_key_env to the variable with the token of the server (for "
                    "millrace serve its admin token)"
                ) from None
            raise
        except ServerError as error:
            # The connection breaks before the end of the process is noticed.
            if process is None:
                raise
            reason = await process.end_reason(wait=True)
            if str(error) == reason:
                raise
            raise ServerError(
                f"{reason} ({error})" if reason else f"{error}{process.first_error()}"
            ) from None
        finally:
            await client.close()
            if process is not None:
                process.kill()


def _dialect(
    settings: ServerSettings, client: HttpClient, kv: KvPolicy, decode: Callable[[Sequence[int]], str]
) -> Dialect:
    deadlines = {"timeout_s": settings.timeout_s, "load_s": settings.load_s}
    if settings.kind == "server":
        return MillraceDialect(client, **deadlines, kv=kv, longest=settings.longest)
    kind = VllmDialect if settings.kind == "vllm" else SglangDialect
    return kind(client, **deadlines, kv=kv, longest=settings.longest, decode=decode, dtype=settings.dtype)


def _start(settings: ServerSettings, folder: Path, private: Path, token: str, port: int) -> ServerProcess:
    if settings.kind == "sglang":
        config = sglang_command.write_config(private / "server.yaml", token)
        command = sglang_command.command(settings, folder, port, config)
        return ServerProcess(command, sglang_command.environment(settings.threads, os.environ))
    if settings.kind == "vllm":
        plugin = vllm_command.write_plugin(private / "plugin")
        environment = vllm_command.environment(plugin, settings.threads, os.environ)
        return ServerProcess(vllm_command.command(settings, folder, f"{private}/http"), environment)
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
    rest = (settings.threads, settings.longest, settings.max_requests)
    command = [settings.interpreter, *ENTRY, str(folder), f"{private}/http", *map(str, rest)]
    if not settings.python:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return ServerProcess(command, {**environment, TOKEN: token})


async def _wait_until_up(settings: ServerSettings, client: HttpClient, process: ServerProcess | None) -> None:
    if process is None:
        # SGLang's /health fails while it is paused, as a killed trainer may leave it.
        await client.get_text("/v1/models", timeout_s=settings.timeout_s)
        return
    try:
        async with asyncio.timeout(settings.start_s):
            await process.wait_until_up(client)
    except TimeoutError:
        raise ServerError(
            f"the server did not reply within {settings.start_s:g} s (timeouts.phase_s){process.log_tail()}"
        ) from None
