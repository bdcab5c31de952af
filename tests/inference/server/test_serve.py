"""How a server listens and ends."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from tests.inference.server.running import asking, fake_served, running, wait_until

pytestmark = pytest.mark.world


def test_at_its_end_running_requests_get_some_seconds_and_new_ones_none():
    with running(fake_served(delay_s=0.05), grace_s=5.0) as mill, asking(mill, max_tokens=8) as answer:
        lines = answer.iter_lines()
        next(lines)
        mill.server.should_exit = True
        wait_until(lambda: mill.service.closing)
        last = [json.loads(line) for line in lines][-1]
        assert last["finish_reason"] == "length"
        mill.thread.join(5.0)
        assert not mill.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            mill.get("/health")


def test_what_is_not_done_by_then_is_ended_with_what_there_is():
    with running(fake_served(delay_s=0.1), grace_s=0.3) as mill:
        with asking(mill, max_tokens=60, n=2) as answer:
            lines = answer.iter_lines()
            next(lines)
            start = time.monotonic()
            mill.server.should_exit = True
            heard = [json.loads(line) for line in lines]
            assert [line["finish_reason"] for line in heard if "finish_reason" in line] == ["abort", "abort"]
        mill.thread.join(5.0)
        assert not mill.thread.is_alive()
        assert time.monotonic() - start < 3.0
        assert set(mill.engine.ended.values()) == {"abort"}


def test_a_request_on_an_old_connection_is_refused_at_the_end():
    with running(fake_served(delay_s=0.05), grace_s=5.0) as mill, httpx.Client(base_url=mill.url) as client:
        client.get("/health")
        mill.service.refuse_new()
        answer = client.post("/generate", json={"prompt_token_ids": [5]})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["message"] == "the server is shutting down; ask another one"


def test_the_address_that_was_asked_for_is_the_one_that_is_told():
    with running() as mill:
        assert mill.url.startswith("http://127.0.0.1:")
        assert mill.get("/health").json() == {"status": "ok"}
        assert "server" not in mill.get("/health").headers
    assert threading.active_count() < 10
