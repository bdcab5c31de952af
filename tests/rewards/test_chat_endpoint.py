"""A reward of kind judge against a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from millrace.config.reward_sections import ChatRewardConfig
from millrace.errors import SetupError
from millrace.rewards.chat_endpoint import ChatEndpoint, Unreachable
from millrace.run.build_rewards import chat_reward
from millrace.types import Prompt

pytestmark = pytest.mark.world


class Handler(BaseHTTPRequestHandler):
    """Replies what the server's list has next: status, text, headers."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body["model"]))
        status, text, headers = self.server.replies.pop(0)
        content = {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 5}}
        data = json.dumps(content).encode() if status == 200 else text.encode()
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        made.seen, made.replies = [], []
        made.url = f"http://127.0.0.1:{made.server_port}/v1"
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def entry(url: str, **given: Any) -> ChatRewardConfig:
    return ChatRewardConfig(kind="judge", base_url=url, model="m", rubric="Be right.", **given)


def test_429_500_and_prose_are_tried_again_until_there_is_a_score(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server.replies += [(429, "slow down", {"Retry-After": "0"}), (500, "oh no", {}), (200, "Fine.", {})]
    server.replies += [(200, "Fine.\nScore: 5", {}), (200, "prose", {})]
    reward = chat_reward(entry(server.url, api_key_env="MY_KEY"))
    reward._pause = lambda seconds: None
    (found,) = reward.score([Prompt("p", (1,), "1+1=", "2")], ["2"])
    assert (found.kind, found.value, found.extras["prompt_tokens"]) == ("score", 0.5, 10.0)
    assert set(server.seen) == {("/v1/chat/completions", "Bearer secret", "m")} and len(server.seen) == 4
    reward.close()


def test_a_redirect_does_not_take_the_key_elsewhere(server):
    server.replies.append((307, "", {"Location": f"{server.url}/elsewhere"}))
    assert ChatEndpoint(server.url, "secret")(b'{"model": "m"}', 60.0).status == 307
    assert len(server.seen) == 1


def test_an_endpoint_that_is_gone_is_unreachable(server):
    url = server.url
    server.server_close()
    server.shutdown()
    with pytest.raises(Unreachable, match="Connection refused"):
        ChatEndpoint(url)(b"{}", 60.0)


def test_a_key_that_is_not_set_is_a_mistake_of_the_setup(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(SetupError, match="from the variable MY_KEY, which is not set; set it, or remove"):
        chat_reward(entry("http://localhost:1/v1", api_key_env="MY_KEY"))
    monkeypatch.setenv("MY_KEY", "sec\nret")
    with pytest.raises(SetupError) as caught:
        chat_reward(entry("http://localhost:1/v1", api_key_env="MY_KEY"))
    assert "sec" not in str(caught.value)
