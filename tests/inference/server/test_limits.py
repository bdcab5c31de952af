"""Middleware: hosts, tokens, bodies, and how many at once."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from millrace.inference.server import limits
from millrace.inference.server.app import create_app
from millrace.inference.server.limits import Limits
from millrace.inference.server.service import GenerationService
from tests.inference.server.running import DEADLINE_S, asking, fake_served, running, wait_until

pytestmark = pytest.mark.world

TEXT = {"prompt": "the", "max_tokens": 2}


def exchange(url: str, *parts: bytes) -> bytes:
    """What a server answers to raw bytes, until it closes."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=DEADLINE_S) as wire:
        for part in parts:
            wire.sendall(part)
        answer = b""
        while more := wire.recv(4096):
            answer += more
        return answer


@pytest.mark.attack("a request without the right token, or of a web page")
def test_without_the_token_only_health_answers():
    with running(limits=Limits(token="right")) as mill:
        assert mill.get("/health").json() == {"status": "ok"}
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            answer = mill.post("/v1/completions", TEXT, headers=header)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json()["error"] == {
                "message": "the token is missing or wrong; send the header Authorization: Bearer TOKEN",
                "type": "authentication_error",
                "param": None,
                "code": "invalid_api_key",
            }
        for path in ("/metrics", "/version", "/server_info", "/v1/models", "/openapi.json", "/nothing"):
            assert mill.get(path).status_code == 401
        right = {"Authorization": "Bearer right"}
        assert mill.post("/v1/completions", TEXT, headers=right).status_code == 200
        assert mill.get("/metrics", headers=right).status_code == 200


STEERING = {
    "/abort": {"id": "gone"},
    "/pause": {"mode": "keep"},
    "/resume": None,
    "/sleep": {"tags": ["weights"]},
    "/wake": {"tags": ["weights"]},
    "/update_weights": {"path": "a", "version": 1},
    "/fingerprint": None,
}


def steer(mill, path, **headers):
    if path == "/fingerprint":
        return mill.get(path, headers=headers)
    return mill.post(path, STEERING[path], headers=headers)


def test_every_route_that_steers_is_known():
    paths = create_app(GenerationService(fake_served(), max_samples=1), Limits()).openapi()["paths"]
    asks = ("/v1/", "/inference/", "/generate", "/tokenize", "/detokenize", "/health", "/metrics", "/version")
    asks += ("/model_info", "/server_info")
    steers = {path for path in paths if not path.startswith(asks)}
    assert steers == set(limits.STEERING) == set(STEERING)


@pytest.mark.attack("a request without the right token, or of a web page")
@pytest.mark.parametrize("path", sorted(STEERING))
def test_what_steers_needs_the_admin_token(path):
    with running(limits=Limits(token="asks", admin_token="steers")) as mill:
        refused = steer(mill, path, Authorization="Bearer asks")
        assert refused.status_code == 403
        assert refused.json()["error"]["message"] == f"{path} needs the admin token; send that one"
        assert steer(mill, path, Authorization="Bearer wrong").status_code == 401
        assert steer(mill, path, Authorization="Bearer steers").status_code in (200, 403, 404)
        assert mill.engine.calls == [] or path not in ("/abort", "/update_weights", "/fingerprint")
        # It asks, too.
        both = {"Authorization": "Bearer steers"}
        assert mill.post("/v1/completions", TEXT, headers=both).status_code == 200


def test_a_server_with_one_token_says_what_is_missing():
    with running(limits=Limits(token="asks")) as mill:
        refused = steer(mill, "/pause", Authorization="Bearer asks")
        assert (refused.status_code, mill.engine.calls) == (403, [])
        assert refused.json()["error"]["message"] == (
            "/pause needs the admin token; start the server with --admin-token or the environment variable "
            "MILLRACE_ADMIN_TOKEN"
        )
    with running(limits=Limits(admin_token="steers")) as mill:
        for given, status in (("Bearer steers", 200), ("Bearer", 401), ("steers", 401)):
            headers = {"Authorization": given}
            assert mill.post("/v1/completions", TEXT, headers=headers).status_code == status
            assert steer(mill, "/pause", **headers).status_code == status


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_the_scheme_is_read_in_any_case(scheme):
    with running(limits=Limits(token="right")) as mill:
        headers = {"Authorization": f"{scheme} right"}
        assert mill.get("/v1/models", headers=headers).status_code == 200
        headers = {"Authorization": f"{scheme} RIGHT"}
        assert mill.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.attack("a request without the right token, or of a web page")
def test_a_page_whose_name_leads_here_is_refused():
    with running() as mill:
        for path in ("/health", "/docs", "/v1/models"):
            answer = mill.get(path, headers={"Host": "evil.example"})
            assert answer.status_code == 421
            assert answer.json()["error"]["message"] == (
                "this server does not answer as evil.example; ask for it by its address, or start it with "
                "--allowed-host NAME"
            )
        for host in ("localhost", "localhost:80", "127.9.9.9", "[::1]:8000"):
            assert mill.get("/v1/models", headers={"Host": host}).status_code == 200
        shown = mill.get("/health", headers={"Host": "e" * 9000}).json()["error"]["message"]
        assert len(shown) < 200
    with running(limits=Limits(allowed_hosts=("mill.example",))) as mill:
        assert mill.get("/health", headers={"Host": "mill.example:8000"}).status_code == 200


@pytest.mark.slow_beyond(6)
@pytest.mark.attack("a request without the right token, or of a web page")
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""]
)
@pytest.mark.parametrize("path", ["/pause", "/v1/completions", "/generate", "/tokenize"])
def test_what_a_form_of_another_site_can_send_is_refused(path, kind):
    with running() as mill:
        answer = mill.client.post(path, content='{"mode": "keep"}', headers={"Content-Type": kind})
        assert answer.status_code == 415
        assert "send JSON with Content-Type: application/json" in answer.json()["error"]["message"]
        assert mill.engine.calls == []


@pytest.mark.attack("a request without the right token, or of a web page")
def test_a_web_page_cannot_send_what_has_no_body():
    with running() as mill:
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            answer = mill.client.post("/resume", headers={"Origin": origin})
            assert answer.status_code == 403
            assert answer.json()["error"]["message"] == (
                f"requests of web pages are refused, and this one comes from {origin}"
            )
        assert mill.engine.calls == []
        assert mill.client.post("/resume", headers={"Origin": mill.url}).status_code == 200
        assert mill.client.post("/resume").status_code == 200
        assert mill.client.post(
            "/resume", headers={"Content-Type": "application/json; charset=utf-8"}
        ).is_success


def test_a_body_may_be_as_long_as_the_limit_and_no_longer():
    with running(limits=Limits(max_body_bytes=2_000)) as mill:
        for size, status in ((2_000, 200), (2_001, 413), (12_000, 413)):
            body = b'{"prompt": "the"}'.ljust(size)
            assert mill.post("/v1/completions", content=body).status_code == status
        # Said by nobody beforehand, and found out while it is read.
        pieces = iter([b'{"prompt": "the"}', b" " * 2_000])
        answer = mill.post("/v1/completions", content=pieces)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body has more than 2000 bytes; send less at once"
        assert mill.post("/v1/completions", TEXT).status_code == 200


def test_a_body_that_does_not_arrive_is_not_waited_for():
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with running(limits=Limits(body_timeout_s=0.1)) as mill:
        answer = exchange(mill.url, head + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 0.1 s" in answer


def test_too_many_at_once_are_told_to_come_back_and_the_verbs_get_through():
    served = fake_served(delay_s=60.0)
    with running(served, limits=Limits(max_concurrent=2)) as mill:
        with asking(mill), asking(mill):
            wait_until(lambda: mill.engine.num_live == 2)
            refused = mill.post("/generate", {"prompt_token_ids": [5]})
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["message"] == (
                "2 requests are being answered already; ask again later"
            )
            assert mill.post("/pause", {"mode": "keep"}).status_code == 200
            assert mill.get("/health").status_code == 200
        mill.engine.delay_s = 0.0
        wait_until(lambda: mill.post("/v1/completions", TEXT).status_code == 200)


def test_a_full_queue_is_told_to_come_back_and_nothing_of_the_request_stays():
    served = fake_served(delay_s=60.0, max_waiting=5)
    with running(served) as mill, asking(mill, n=2):
        refused = mill.post("/v1/completions", {"prompt": [[5], [6], [7]], "n": 2})
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"] == {
            "message": "4 requests wait; the engine queues at most 5; ask again later",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        assert mill.engine.num_live == 2


def test_a_stopped_engine_is_not_healthy():
    with running() as mill:
        mill.engine.closed = "the engine stopped: its thread failed: RuntimeError: out of memory"
        posts = {"/v1/completions": TEXT, "/pause": {"mode": "keep"}, "/resume": None}
        for answer in (mill.get("/health"), *(mill.post(path, body) for path, body in posts.items())):
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == mill.engine.closed


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_stops_meanwhile_tells_whoever_waits(stream):
    with running(fake_served(stopped=7)) as mill, ThreadPoolExecutor(2) as crowd:
        ask = {"n": 2, "max_tokens": 9, "stream": stream, "ignore_eos": True}
        paths = {"/generate": {"prompt_token_ids": [7]}, "/v1/completions": {"prompt": [7]}}
        answers = list(crowd.map(lambda item: mill.post(item[0], item[1] | ask), paths.items()))
        for answer in answers:
            assert answer.status_code in ((200, 503) if stream else (503,))
            assert (
                '"message":"the engine stopped: its thread failed: RuntimeError: out of memory"'
                in answer.text
            )
        assert mill.post("/abort", {"id": "gone"}).status_code == 404
        # A stream's samples are closed after its last line, which is all that the client waits for.
        wait_until(lambda: mill.service.num_requests == 0)


def test_an_engine_that_stops_between_two_prompts_of_a_request_is_told():
    served = fake_served()
    submit = served.engine.submit_siblings

    def submit_until_closed(prompt, *given, **named):
        if prompt == [6]:
            served.engine.closed = "the engine stopped: its thread failed"
        return submit(prompt, *given, **named)

    served.engine.submit_siblings = submit_until_closed
    with running(served) as mill:
        answer = mill.post("/v1/completions", {"prompt": [[5], [6]], "max_tokens": 3})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the engine stopped: its thread failed"
        assert mill.service.num_requests == 0


def test_whoever_leaves_while_waiting_is_forgotten():
    served = fake_served(delay_s=60.0)
    with running(served) as mill:
        place = urlsplit(mill.url)
        body = b'{"prompt": "the", "n": 3, "request_id": "gone"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection((place.hostname, place.port)) as wire:
            wire.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: mill.engine.num_live == 3)
        wait_until(lambda: mill.engine.num_live == 0)
        assert mill.engine.ended == {f"gone-{n}": "abort" for n in range(3)}
        assert mill.get("/health").status_code == 200


@pytest.mark.parametrize("delay_s", [0.01, 60.0])
def test_whoever_leaves_a_stream_is_forgotten(delay_s):
    served = fake_served(delay_s=delay_s)
    with running(served) as mill:
        with asking(mill, n=2, request_id="gone") as answer:
            if delay_s < 1:
                next(answer.iter_lines())
        wait_until(lambda: mill.engine.num_live == 0)
        assert mill.engine.ended == {"gone-0": "abort", "gone-1": "abort"}
        text = mill.get("/metrics").text
        assert 'vllm:request_success_total{finished_reason="abort",model_name="mill"} 2.0' in text


def test_many_at_once_are_all_answered():
    served = fake_served(max_waiting=1000, delay_s=0.001)
    with running(served) as mill, ThreadPoolExecutor(16) as crowd:
        bodies = [TEXT | {"seed": seed, "n": 2} for seed in range(64)]
        answers = list(crowd.map(lambda body: mill.post("/v1/completions", body), bodies))
        assert [answer.status_code for answer in answers] == [200] * 64
        again = list(crowd.map(lambda body: mill.post("/v1/completions", body), bodies))
        assert [a.json()["choices"] for a in again] == [a.json()["choices"] for a in answers]
