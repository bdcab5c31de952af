"""A server on a loopback port, and what it serves."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import httpx
import torch

from millrace.data.tokenizers import train_tokenizer
from millrace.inference.server.address import bind
from millrace.inference.server.http_errors import ApiError
from millrace.inference.server.limits import Limits
from millrace.inference.server.serve import Server
from millrace.inference.server.service import GenerationService, ModelService
from millrace.inference.server.text_process import TextService
from millrace.inference.server.text_worker import Refused, Texts
from tests.inference.server.fake import FakeEngine

TEXTS = ["the wheel turns, the water runs; käse, naïve, 水車 and 🛞"] * 3
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
DEADLINE_S = 20.0


@cache
def tokenizer():
    made = train_tokenizer(TEXTS, vocab_size=290, across_words=False)
    made.chat_template = TEMPLATE
    return made


def fake_served(**options) -> ModelService:
    words = tokenizer()
    engine = FakeEngine(
        lambda tokens: words.decode(list(tokens), skip_special_tokens=True), vocab_size=len(words), **options
    )
    return ModelService(
        engine=engine,
        tokenizer=words,
        name="mill",
        max_length=64,
        vocab_size=len(words),
        dtype=torch.float32,
        stop_token_ids=(words.eos_token_id,),
    )


class LocalTexts:
    """What the text process does, in the server's own process: a start takes no second."""

    def __init__(self, served: ModelService) -> None:
        self._texts = Texts(served.tokenizer, served.template, served.max_length)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def ask(self, do: str, value: object) -> bytes:
        try:
            return self._texts.answer(do, value)
        except Refused as error:
            raise ApiError(400, str(error), param=error.param) from None


@dataclass
class Running:
    url: str
    service: GenerationService
    server: Server
    thread: threading.Thread
    client: httpx.Client

    @property
    def engine(self) -> FakeEngine:
        return self.service.served.engine

    def post(self, path: str, body=None, **options) -> httpx.Response:
        # As json writes it: httpx itself cannot send half a character.
        content = {} if body is None else {"content": json.dumps(body)}
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.client.post(path, headers=headers, **content, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(path, **options)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@contextmanager
def asking(mill: Running, **body) -> Iterator[httpx.Response]:
    """A streamed `/generate` that has begun and is left at the end of the block."""
    body = {"prompt_token_ids": [5], "stream": True, "ignore_eos": True, "max_tokens": 60, **body}
    with mill.client.stream("POST", "/generate", json=body) as answer:
        wait_until(lambda: mill.engine.stats().num_running)
        yield answer


@contextmanager
def running(
    served: ModelService | None = None,
    *,
    limits: Limits | None = None,
    grace_s=0.2,
    texts: TextService | None = None,
    clock=time.monotonic,
    send_bytes: int | None = None,
    limit_s=DEADLINE_S,
    **changes,
) -> Iterator[Running]:
    """Serve in a thread; with `send_bytes` the system keeps about so many that a client has not read."""
    served = replace(served or fake_served(), **changes)
    service = GenerationService(served, max_samples=8, texts=texts or LocalTexts(served))
    urls: list[str] = []
    server = Server(service, limits or Limits(), grace_s=grace_s, ready=urls.append, clock=clock)
    listening = bind("127.0.0.1", 0)
    if send_bytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    wait_until(lambda: bool(urls) or not thread.is_alive(), limit_s)
    with httpx.Client(base_url=urls[0], timeout=limit_s) as client:
        found = Running(urls[0], service, server, thread, client)
        try:
            yield found
        finally:
            found.stop()


def wait_until(condition, limit_s=DEADLINE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
