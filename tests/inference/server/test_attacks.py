"""Attacks on a running server: each must leave it answering."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from millrace.data.chat import CHAT
from millrace.inference.server import serve
from millrace.inference.server.limits import Limits
from millrace.inference.server.text_process import TextProcess
from tests.house.source import ROOT
from tests.inference.server.attacks import (
    LOOPING,
    connect,
    read_to_end,
    silent_clients,
    slow_body,
    slow_headers,
)
from tests.inference.server.running import DEADLINE_S, fake_served, running, wait_until

pytestmark = pytest.mark.world

SERVER = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.inference.server.running import running
with running() as mill:
    print(mill.url, flush=True)
    input()
"""


@pytest.mark.slow
@pytest.mark.attack("clients that send nothing, or byte by byte")
def test_silent_clients_and_other_protocols_leave_health_and_the_log_alone_at_64_descriptors():
    """80 connections that send nothing, then 100 that do not speak HTTP; the server may open 64."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = server.stdout.readline().strip()
    try:
        with silent_clients(url, 80):
            for _ in range(5):
                assert httpx.get(f"{url}/health", timeout=DEADLINE_S).json() == {"status": "ok"}
        for _ in range(100):
            with connect(url) as wire:
                wire.sendall(b"\x16\x03\x01\x1b[2J\r\n\r\n")
                assert b"the request is not HTTP/1.1" in read_to_end(wire)
    finally:
        _, errors = server.communicate("\n", timeout=60)
    assert server.returncode == 0, errors
    # One line of a kind in ten seconds, however long it took.
    assert "WARNING: Invalid HTTP request received." in errors.splitlines()
    assert errors.count("Invalid") < 10
    assert len(errors) < 1000 and "\x1b" not in errors


@pytest.mark.attack("clients that send nothing, or byte by byte")
def test_silent_clients_are_cut_off():
    """Connections that send nothing are closed without an answer."""
    with running(limits=Limits(header_timeout_s=0.2)) as mill, silent_clients(mill.url, 20) as wires:
        assert [read_to_end(wire) for wire in wires] == [b""] * 20
        assert mill.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.attack("clients that send nothing, or byte by byte")
def test_connections_beyond_the_most_take_no_descriptors(monkeypatch):
    """60 connections to a server that has descriptors for 16."""
    monkeypatch.setattr(serve, "open_descriptors", lambda: (64, 20))
    with running() as mill, silent_clients(mill.url, 60):
        assert mill.get("/health").status_code == 200
        wait_until(lambda: len(mill.server.server_state.connections) <= 16)


@pytest.mark.attack("clients that send nothing, or byte by byte")
def test_headers_sent_byte_by_byte_are_cut_off():
    """Headers that never end."""
    with running(limits=Limits(header_timeout_s=0.3)) as mill:
        answer = slow_headers(mill.url)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the request's headers did not arrive within 0.3 s" in answer


@pytest.mark.attack("clients that send nothing, or byte by byte")
def test_a_body_sent_byte_by_byte_is_cut_off():
    """A body that never ends."""
    with running(limits=Limits(body_timeout_s=0.3, header_timeout_s=0.3)) as mill:
        answer = slow_body(mill.url)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 0.3 s" in answer


@pytest.mark.attack("clients that send nothing, or byte by byte")
def test_a_body_that_goes_on_after_its_refusal_is_cut_off():
    """A body that never ends of a request that was refused at once."""
    with running(limits=Limits(token="right", header_timeout_s=0.3)) as mill:
        assert slow_body(mill.url).startswith(b"HTTP/1.1 401 ")


@pytest.mark.attack("clients that send nothing, or byte by byte")
def test_an_answer_that_nobody_reads_ends_its_request():
    """A client that asks for a long stream and does not read it."""
    served = fake_served(delay_s=0.0)
    long = replace(served, max_length=10**9)
    served.engine._max_length = 10**9
    body = b'{"prompt_token_ids": [5], "stream": true, "ignore_eos": true, "max_tokens": 100000000}'
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    # The engine of this test decodes the whole answer at each token.
    long.engine._decode = lambda tokens: ""
    # Else the system keeps megabytes of tokens for the client, which a busy machine takes long to make.
    few, limits = 4096, Limits(write_timeout_s=0.2)
    with running(long, limits=limits, send_bytes=few) as mill, connect(mill.url, receive_bytes=few) as wire:
        wire.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: mill.engine.num_live == 1)
        wait_until(lambda: mill.engine.num_live == 0)
        assert set(mill.engine.ended.values()) == {"abort"}
        assert mill.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.attack("a chat template that loops")
def test_a_looping_chat_template_stops_one_request_only():
    """A template that never ends for one message."""
    served = fake_served()
    words = copy.deepcopy(served.tokenizer)
    words.chat_template = LOOPING
    texts = TextProcess(words, None, template=CHAT, max_length=64, cpu_s=1.0)

    def chat(mill, content: str) -> httpx.Response:
        return mill.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})

    with running(replace(served, tokenizer=words), texts=texts) as mill, ThreadPoolExecutor(1) as attacker:
        assert chat(mill, "a").status_code == 200
        loop = attacker.submit(chat, mill, "loop")
        wait_until(lambda: texts._children.children[0].pending)
        assert mill.get("/health").status_code == 200
        assert mill.post("/v1/completions", {"prompt": [5], "max_tokens": 2}).status_code == 200
        answer = loop.result(DEADLINE_S)
        assert answer.status_code == 400
        assert (
            "took more than 1 s to render and tokenize and was given up" in answer.json()["error"]["message"]
        )
        assert chat(mill, "a").status_code == 200
