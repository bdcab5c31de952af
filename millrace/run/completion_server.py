"""Answers of a server with OpenAI's API, for evaluations. No torch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from millrace.observability.plain import plain_text
from millrace.rewards.chat_endpoint import ChatEndpoint, HttpReply, Unreachable
from millrace.rollout.sampled_batch import completion_seed
from millrace.types import SamplingParams

# Sends a request body, or None to read, with a timeout in seconds.
Endpoint = Callable[[bytes | None, float], HttpReply]

# Statuses of a request that may succeed later, beside those from 500.
LATER = frozenset({408, 409, 425, 429})
CONCURRENCY, ATTEMPTS, MAX_PAUSE_S = 16, 5, 30.0
# What servers take as a seed.
SEEDS = 2**31


class ServerFailed(RuntimeError):
    """A server gives no answers; the message has its address and the reason."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One answer.

    Attributes:
        text: of the answer; empty if it has none.
        finish_reason: as the server named it, such as `stop` or `length`.
        num_tokens: that the server counted for the answer; 0 if it counts none.
    """

    text: str
    finish_reason: str
    num_tokens: int


class CompletionServer:
    """A model at `base_url`, which ends in /v1."""

    def __init__(
        self,
        base_url: str,
        model: str = "",
        *,
        key: str = "",
        timeout_s: float = 600.0,
        endpoint: Callable[[str], Endpoint] | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Take the address.

        Args:
            base_url: such as http://127.0.0.1:8000/v1.
            model: its name there; empty takes the only one there is.
            key: sent with requests; empty sends none.
            timeout_s: seconds that one request may take.
            endpoint: makes what sends requests to a path; None uses HTTP.
            pause: waits so many seconds between two attempts.
        """
        self.base_url, self._model, self._timeout_s, self._pause = base_url, model, timeout_s, pause
        self._endpoint = endpoint or (lambda path: ChatEndpoint(base_url, key, path=path))

    def model(self) -> str:
        """Return the name of the model; the server is asked for it once.

        Raises:
            ServerFailed: it cannot be reached, or has no model or several.
        """
        if self._model:
            return self._model
        reply = self._sent(self._endpoint("models"), None)
        try:
            names = [str(one["id"]) for one in reply["data"]]
        except (LookupError, TypeError):
            raise ServerFailed(f"{self.base_url} does not list its models; add #MODEL to the URL") from None
        if len(names) != 1:
            there = plain_text(", ".join(names), 300) or "none"
            raise ServerFailed(f"{self.base_url} has not one model but: {there}; add #MODEL to the URL")
        self._model = names[0]
        return self._model

    def answers(
        self, requests: Sequence[Mapping[str, Any]], params: SamplingParams, num_samples: int
    ) -> list[ServerAnswer]:
        """Ask for several answers to each request; those of a request follow each other.

        Each answer is a request of its own with its own seed. 16 are sent at once.

        Args:
            requests: each with `messages` for a chat, or `prompt`.
            params: of sampling; of these `max_tokens`, `temperature`, `top_p`, `stop` and the seed are sent.
            num_samples: answers to each request.

        Raises:
            ServerFailed: a request was refused, or failed five times.
        """
        model, failed = self.model(), threading.Event()
        endpoints = {path: self._endpoint(path) for path in ("chat/completions", "completions")}
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if params.stop:
            body["stop"] = list(params.stop)

        def one(number: int) -> ServerAnswer:
            if failed.is_set():
                raise ServerFailed(f"{self.base_url} failed at another request")
            request, sample = requests[number // num_samples], number % num_samples
            seed = completion_seed(params.seed, number // num_samples, sample) % SEEDS
            path = "chat/completions" if "messages" in request else "completions"
            try:
                sent = json.dumps({**body, **request, "seed": seed}).encode()
                return _read(self._sent(endpoints[path], sent), self.base_url)
            except ServerFailed:
                failed.set()
                raise

        with ThreadPoolExecutor(CONCURRENCY, "millrace-ask") as threads:
            return list(threads.map(one, range(len(requests) * num_samples)))

    def _sent(self, endpoint: Endpoint, body: bytes | None) -> Any:
        """Send a request until there is a reply; return it read from JSON."""
        problem = ""
        for attempt in range(ATTEMPTS):
            wait_s = 0.0
            try:
                reply = endpoint(body, self._timeout_s)
            except Unreachable as error:
                problem = f"cannot be reached: {plain_text(str(error), 300)}"
                if body is None:
                    break  # nothing is there at all
            else:
                wait_s = reply.retry_after_s
                text = plain_text(reply.body.decode("utf-8", "replace").strip(), 300)
                if reply.status == 200:
                    try:
                        return json.loads(reply.body)
                    except (ValueError, RecursionError):
                        problem = f"replied with no JSON: {text}"
                else:
                    problem = f"replied {reply.status}: {text}"
                if reply.status in (401, 403):
                    problem += "; give its key by --api-key-env VARIABLE"
                if 200 < reply.status < 500 and reply.status not in LATER:
                    break
            if attempt + 1 < ATTEMPTS:
                self._pause(min(MAX_PAUSE_S, max(wait_s, 2.0**attempt)))
        raise ServerFailed(f"server {self.base_url} {problem}")


def _read(reply: Any, base_url: str) -> ServerAnswer:
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        usage = reply.get("usage") or {}
        num_tokens = usage.get("completion_tokens", 0)
        return ServerAnswer(str(text or ""), str(choice.get("finish_reason") or ""), int(num_tokens or 0))
    except (LookupError, TypeError, AttributeError, ValueError):
        shown = plain_text(json.dumps(reply), 300)
        raise ServerFailed(f"server {base_url} replied without an answer: {shown}") from None
