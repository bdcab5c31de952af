"""Check SGLang's router in front of two servers of `millrace serve`, and print a table.

It makes an environment with sglang-router beside the project's own (`.venv-router`), where there is none. The
client is OpenAI's own.

    python scripts/router.py            # a small model with random weights
    python scripts/router.py MODEL      # what `millrace serve MODEL` serves
"""

from __future__ import annotations

import argparse
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from environments import environment
from openai.types.chat import ChatCompletionUserMessageParam
from served_model import ServedModel, served_model

from millrace.data.tokenizers import train_tokenizer
from millrace.models.load import fresh_config, fresh_model

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.3.2"
START_S, REPLY_S = 300.0, 120.0
NUM_REQUESTS = 20
QUESTIONS = ("12+13=", "the wheel turns", "7")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def small_model(folder: Path) -> Path:
    """Write a model with random weights and a tokenizer with a chat template."""
    tokenizer = train_tokenizer(list(QUESTIONS), vocab_size=257, across_words=False)
    tokenizer.chat_template = TEMPLATE
    config = fresh_config("qwen3", SHAPE, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    fresh_model(config, seed=0, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Lab:
    """Two servers with a router in front of them."""

    servers: tuple[ServedModel, ServedModel]
    router: str
    token: str

    def client(self, url: str, token: str | None = None) -> openai.OpenAI:
        """Return OpenAI's client of a server or of the router."""
        return openai.OpenAI(
            base_url=f"{url}/v1", api_key=token or self.token, max_retries=0, timeout=REPLY_S
        )

    def model(self) -> str:
        """Return the name of the model, which the router has from the servers."""
        (found,) = self.client(self.router).models.list().data
        return found.id


@contextmanager
def routed(servers: Sequence[ServedModel], token: str, log: Path) -> Iterator[str]:
    """Start the router in front of servers, and yield its URL once it knows them all.

    Raises:
        RuntimeError: it does not in time; the message has the end of its log.
    """
    program = environment("router", ["install", f"sglang-router=={VERSION}"]) / "sglang-router"
    port = str(free_port())
    words = ["launch", "--host", "127.0.0.1", "--port", port, "--policy", "round_robin"]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    words += ["--health-check-interval-secs", "2", "--api-key", token]
    words += ["--worker-urls", *(server.url for server in servers)]
    url, key = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"}
    with log.open("wb") as output:
        process = subprocess.Popen([program, *words], stdout=output, stderr=output)
    try:
        if problem := _problem(process, url, key, len(servers)):
            end = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the router did not find both servers: {problem}\n{end}")
        yield url
    finally:
        process.kill()
        process.wait()


def _problem(process: subprocess.Popen[bytes], url: str, key: dict[str, str], num_servers: int) -> str:
    """Wait until the router knows all servers, and return ""; else what it answered last."""
    problem, deadline_s = "it ended", time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            problem = httpx.get(f"{url}/workers", headers=key).text
            if f'"total":{num_servers}' in problem:
                return ""
        except httpx.HTTPError as error:  # it does not listen yet
            problem = str(error)
        time.sleep(0.5)
    return problem


# ---- checks: what each returns is a line of the table; an AssertionError is a failure


def texts(lab: Lab) -> str:
    """Compare completions and conversations with those of a server."""
    name = lab.model()

    def answers(client: openai.OpenAI) -> list[Any]:
        found: list[Any] = []
        for question, seed in product(QUESTIONS, (1, 2)):
            (done,) = client.completions.create(model=name, prompt=question, seed=seed, max_tokens=20).choices
            found.append((done.text, done.finish_reason))
            (chat,) = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": question}],
                seed=seed,
                max_tokens=20,
                logprobs=True,
            ).choices
            assert chat.logprobs is not None
            found.append([(one.token, one.logprob) for one in chat.logprobs.content or ()])
        return found

    routed = answers(lab.client(lab.router))
    assert routed == answers(lab.client(lab.servers[0].url)), "the router's answers are others"
    return f"{len(routed)} completions and conversations of {name} equal, log-probabilities included"


def streams(lab: Lab) -> str:
    """Compare the pieces of a streamed conversation with its text."""
    name, create = lab.model(), lab.client(lab.router).chat.completions.create
    message: ChatCompletionUserMessageParam = {"role": "user", "content": QUESTIONS[0]}
    whole = create(model=name, messages=[message], seed=5, max_tokens=40)
    parts = create(model=name, messages=[message], seed=5, max_tokens=40, stream=True)
    pieces = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(pieces) == whole.choices[0].message.content, "the streamed text is another"
    return f"{len(pieces)} pieces joined are the whole text"


def spread(lab: Lab) -> str:
    """Count the requests that reach each server."""

    def counts() -> list[int]:
        key = {"Authorization": f"Bearer {lab.token}"}
        texts = [httpx.get(f"{one.url}/metrics", headers=key).text.splitlines() for one in lab.servers]
        return [
            int(sum(float(line.split()[-1]) for line in lines if line.startswith(COUNTER))) for lines in texts
        ]

    before, client, name = counts(), lab.client(lab.router), lab.model()
    for seed in range(NUM_REQUESTS):
        client.completions.create(model=name, prompt=QUESTIONS[0], seed=seed, max_tokens=2)
    reached = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    assert reached == [NUM_REQUESTS // 2] * 2, f"the servers had {reached} requests"
    return f"{NUM_REQUESTS} requests, {reached[0]} at each server"


def token(lab: Lab) -> str:
    """Ask with a wrong token."""
    try:
        lab.client(lab.router, "wrong").completions.create(model=lab.model(), prompt="a", max_tokens=2)
    except openai.AuthenticationError:
        return "a wrong token is refused with 401"
    raise AssertionError("a wrong token was accepted")


def killed(lab: Lab) -> str:
    """Kill a server; every later request is answered by the other one."""
    name, client = lab.model(), lab.client(lab.router)
    lab.servers[0].process.kill()
    lab.servers[0].process.wait()
    for seed in range(NUM_REQUESTS):
        client.completions.create(model=name, prompt=QUESTIONS[0], seed=seed, max_tokens=2)
    return f"{NUM_REQUESTS} requests after kill -9 of a server, all answered"


COUNTER = "vllm:request_success_total"
CHECKS: dict[str, Callable[[Lab], str]] = {
    "texts": texts,
    "streams": streams,
    "spread": spread,
    "token": token,
    "killed": killed,
}


def main() -> None:
    """Run all checks; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a run or a model folder; by default a small random model")
    given = parser.parse_args()
    failed, token = False, secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="millrace-router-") as name, ExitStack() as stack:
        folder = Path(name)
        model = given.model or str(small_model(folder / "model"))
        servers = [stack.enter_context(served_model(model, token)) for _ in range(2)]
        router = stack.enter_context(routed(servers, token, folder / "router.log"))
        lab = Lab((servers[0], servers[1]), router, token)
        for check, run in CHECKS.items():
            try:
                line, good = run(lab), True
            except (AssertionError, openai.OpenAIError, httpx.HTTPError) as error:
                line, good = f"{type(error).__name__}: {error}", False
            failed |= not good
            print(f"{'ok' if good else 'FAILED':6} {check:8} {line}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
