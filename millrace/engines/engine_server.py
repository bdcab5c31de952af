"""Program that serves the engine of a folder of `build_engine.save_engine` on a local socket, for one run.

Started by `server_worker` with the folder, the socket's path and the number of threads. The admin token is in
the environment. The weights are random until the first update.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from millrace.data.tokenizers import load_tokenizer
from millrace.engines.build_engine import SETTINGS, open_engine
from millrace.engines.server_settings import TOKEN
from millrace.inference.async_engine import AsyncEngine
from millrace.inference.engine import PagedEngine
from millrace.inference.server.http_errors import ApiError
from millrace.inference.server.limits import Limits
from millrace.inference.server.serve import Server
from millrace.inference.server.service import GenerationService, ModelService
from millrace.keeper import end_with_parent
from millrace.models.load import read_config

NAME = "policy"
# The trainer sends the places and checksums of all weights in one request.
MAX_BODY_BYTES = 1 << 26
# Requests of the canary, beside those of the run.
SPARE = 8


class NoTexts:
    """In place of the process that renders and tokenizes text: a trainer sends tokens only."""

    async def start(self) -> None:
        """Start nothing."""

    async def close(self) -> None:
        """Close nothing."""

    async def ask(self, do: str, value: Any) -> bytes:
        """Refuse a text; ApiError."""
        raise ApiError(404, "this server takes tokens only")


def service_of(engine: PagedEngine, folder: Path, *, longest: int, max_requests: int) -> GenerationService:
    """Build the service of an engine.

    Args:
        engine: to serve.
        folder: with the policy's tokenizer.
        longest: tokens of the longest sequence.
        max_requests: requests that may be unfinished at the same time.
    """
    tokenizer, settings = load_tokenizer(folder), json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    served = ModelService(
        engine=AsyncEngine(engine, max_waiting=max_requests),
        tokenizer=tokenizer,
        name=NAME,
        max_length=longest,
        vocab_size=read_config(folder).get_text_config().vocab_size,
        dtype=getattr(torch, settings["dtype"]),
        stop_token_ids=(),
    )
    return GenerationService(served, max_samples=max_requests, texts=NoTexts())


def main() -> None:
    """Serve until SIGTERM, or until the worker that started it has ended."""
    end_with_parent()
    folder, path, threads, longest, max_requests = sys.argv[1:]
    torch.set_num_threads(int(threads))
    service = service_of(
        open_engine(Path(folder)), Path(folder), longest=int(longest), max_requests=int(max_requests)
    )
    limits = Limits(
        admin_token=os.environ[TOKEN],
        max_concurrent=int(max_requests) + SPARE,
        max_body_bytes=MAX_BODY_BYTES,
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        Server(service, limits, ready=lambda url: None).run([listening])


if __name__ == "__main__":
    main()
