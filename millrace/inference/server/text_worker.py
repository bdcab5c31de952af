"""The child process that renders chat templates, tokenizes and detokenizes; `text_process` starts this file.

A template is a program that came with the model and runs on what a client sent, so it may loop or allocate
without end. The tokenizer is loaded once, by a parent that answers nothing; each worker is a fork of it. A
worker that exceeds its CPU time or its memory dies alone, and the next fork takes its place in milliseconds.

Both sides send frames: a header, then JSON. Only the standard library is imported before the server has sent
`sys.path`.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# Length of the JSON, number of the request, and of a reply its kind.
REQUEST = struct.Struct(">II")
REPLY = struct.Struct(">IIB")
READY, DONE, REFUSED, DIED = range(4)
# A tokenizer with 250,000 entries and a text of 4 MiB take a half.
MEMORY_BYTES = 2 << 30
# What it may print into the file that the server reads when it fails.
PRINTED_BYTES = 1 << 16
# Workers that die without a request, one after another, before the process gives up.
MAX_IDLE_DEATHS = 3
# Special tokens that the tokenizer puts in front, the text as it is, and no end token behind.
PLAIN = "{prompt}"
# Of an error's sentence; a library may put the whole text into it.
MAX_MESSAGE = 1000
# The field of the request's body that a failure is about.
FIELDS = {"prompts": "prompt", "messages": "messages", "tokenize": None, "detokenize": "tokens"}


class Refused(ValueError):
    """The client's text is rejected; `param` is the field of the request's body."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class Texts:
    """Converts text to tokens and back; a prompt above `max_length` tokens is rejected before they are sent.

    The template is `chat` for the tokenizer's own, or text around `{prompt}`.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length

    def answer(self, do: str, value: Any) -> bytes:
        """Return the reply to a request, as JSON; raise Refused if the text is rejected.

        `do` is `prompts` (texts), `messages`, or the bodies of the endpoints `tokenize` and `detokenize`.
        """
        answers: dict[str, Callable[[Any], Any]] = {
            "prompts": lambda texts: [self._bounded(tokens) for tokens in self._prompts(texts)],
            "messages": lambda messages: self._bounded(self._conversation(messages), "messages"),
            "tokenize": self._tokenize,
            "detokenize": lambda tokens: {"prompt": str(self._tokenizer.decode(tokens))},
        }
        try:
            return json.dumps(answers[do](value), separators=(",", ":")).encode("ascii")
        except Refused:
            raise
        except MemoryError:
            raise Refused(
                f"the text needs more than {MEMORY_BYTES >> 30} GiB of memory", FIELDS[do]
            ) from None
        except Exception as error:
            # Whatever a template's expression can raise: a division by zero, a missing attribute.
            what = f"{type(error).__name__}: {error}"
            raise Refused(f"the chat template or the tokenizer failed with {what}", FIELDS[do]) from error

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            tokens = self._conversation(body["messages"])
        else:
            (tokens,) = self._prompts([body["prompt"]])
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._max_length}

    def _prompts(self, texts: Sequence[str]) -> list[Sequence[int]]:
        names = ["prompt"] if len(texts) == 1 else [f"prompt {n}" for n in range(len(texts))]
        return [self._tokens(PLAIN, text, name) for text, name in zip(texts, names, strict=True)]

    def _conversation(self, messages: list[dict[str, str]]) -> Sequence[int]:
        from millrace.data.chat import CHAT

        if self._template == CHAT:
            return self._tokens(CHAT, messages, "messages")
        return self._tokens(self._template, messages[0]["content"], "messages")

    def _tokens(self, template: str, prompt: object, where: str) -> Sequence[int]:
        from millrace.data.chat import render
        from millrace.data.rows import DataError

        try:
            return render(self._tokenizer, template, prompt, where)[1]
        except DataError as error:
            raise Refused(str(error), where.split()[0]) from None

    def _bounded(self, tokens: Sequence[int], where: str = "prompt") -> Sequence[int]:
        if len(tokens) > self._max_length:
            raise Refused(
                f"{where} has {len(tokens)} tokens, but prompt and answer have at most {self._max_length} "
                "together; send less",
                where,
            )
        return tokens


def allowed_s(cpu_s: float, num_bytes: int) -> float:
    """Return the CPU limit of a request in seconds: `cpu_s`, plus `cpu_s` for each MiB."""
    return cpu_s * (1 + num_bytes / (1 << 20))


def main() -> None:
    """Answer requests from descriptor 0 until the server closes its end."""
    channel = socket.socket(fileno=os.dup(0))
    hello = json.loads(_receive(channel, *REQUEST.unpack(_exactly(channel, REQUEST.size))[:1]))
    sys.path[:] = hello["path"]
    from millrace.data.rows import DataError
    from millrace.data.tokenizers import load_tokenizer

    try:
        tokenizer = load_tokenizer(hello["folder"])
    except DataError as error:
        _send(channel, 0, DIED, json.dumps(str(error)).encode())
        return
    texts = Texts(tokenizer, hello["template"], hello["max_length"])
    limit_resources()
    _send(channel, 0, READY, b"null")
    # The number of the request a worker is at, 0 between two; its parent reads it when the worker has died.
    current = mmap.mmap(-1, 4)
    idle_deaths = 0
    while idle_deaths < MAX_IDLE_DEATHS:
        current[:] = bytes(4)
        worker = os.fork()
        if worker == 0:
            _work(channel, texts, hello["cpu_s"], current)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        code = os.waitstatus_to_exitcode(status)
        number = int.from_bytes(current[:])
        if code == 0:
            return
        idle_deaths = 0 if number else idle_deaths + 1
        if number:
            _send(channel, number, DIED, json.dumps(code).encode())


def limit_resources() -> None:
    """Set resource limits: 2 GiB of memory, little output, no core dump."""
    for kind, most in (
        (resource.RLIMIT_DATA, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, PRINTED_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def _work(channel: socket.socket, texts: Texts, cpu_s: float, current: mmap.mmap) -> None:
    """Serve requests one by one; the kernel kills this process if a request exceeds its CPU limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while head := _exactly(channel, REQUEST.size):
        length, number = REQUEST.unpack(head)
        current[:] = number.to_bytes(4)
        request = json.loads(_receive(channel, length))
        signal.setitimer(signal.ITIMER_PROF, allowed_s(cpu_s, length))
        try:
            kind, reply = DONE, texts.answer(request["do"], request["value"])
        except Refused as error:
            message = str(error)[:MAX_MESSAGE]
            kind, reply = REFUSED, json.dumps({"message": message, "param": error.param}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        # From here on this worker sends its own reply.
        current[:] = bytes(4)
        _send(channel, number, kind, reply)


def _exactly(channel: socket.socket, size: int) -> bytes:
    """Receive `size` bytes; returns none if the other side has closed."""
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _receive(channel: socket.socket, length: int) -> bytes:
    body = _exactly(channel, length)
    if len(body) < length:
        os._exit(0)  # the server is gone
    return body


def _send(channel: socket.socket, number: int, kind: int, body: bytes) -> None:
    channel.sendall(REPLY.pack(len(body), number, kind) + body)


if __name__ == "__main__":
    main()
