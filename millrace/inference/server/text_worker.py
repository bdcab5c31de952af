"""The child process that renders chat templates, tokenizes and detokenizes; `text_process` starts it.

A template is a program that came with the model and runs on what a client sent, so it may loop or allocate
without end. The tokenizer is loaded once, by a parent that answers nothing; each worker is a fork of it. A
worker that exceeds its CPU time or its memory dies alone, and the next fork takes its place in milliseconds.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millrace.processes.worker import WorkerChannel, limit_resources

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# First byte of a reply; JSON follows.
DONE, REFUSED, DIED = b"\0", b"\1", b"\2"
# A tokenizer with 250,000 entries and a text of 4 MiB take a half.
MEMORY_BYTES = 2 << 30
# Limit of each file that it writes.
FILE_BYTES = 1 << 16
# Workers that die without a request, one after another, before the process gives up.
MAX_IDLE_DEATHS = 3
# Special tokens that the tokenizer puts in front, the text as it is, and no end token behind.
PLAIN = "{prompt}"
# Of an error's sentence; a library may put the whole text into it.
MAX_MESSAGE = 1000
# The field of the request's body that a failure is about.
FIELDS = {
    "prompts": "prompt",
    "messages": "messages",
    "echo": "prompt",
    "tokenize": None,
    "detokenize": "tokens",
}


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

        `do` is `prompts` (texts), `messages`, the bodies of the endpoints `tokenize` and `detokenize`, or
        `echo`: the texts of prompts of tokens, and of each of their tokens, where these are requested.
        """
        answers: dict[str, Callable[[Any], Any]] = {
            "prompts": lambda texts: [self._bounded(tokens) for tokens in self._prompts(texts)],
            "messages": lambda messages: self._bounded(self._conversation(messages), "messages"),
            "echo": self._echo,
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

    def _echo(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompts, decode = asked["prompts"], self._tokenizer.decode
        tokens = {token for prompt in prompts for token in prompt} if asked["pieces"] else set()
        return {
            "texts": [str(decode(prompt)) for prompt in prompts] if asked["texts"] else [],
            "pieces": {token: str(decode([token])) for token in tokens},
        }

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


def serve(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Answer requests until the server closes the channel."""
    from millrace.data.rows import DataError
    from millrace.data.tokenizers import load_tokenizer

    try:
        tokenizer = load_tokenizer(settings["folder"])
    except DataError as error:
        channel.refuse(str(error))
        return
    texts = Texts(tokenizer, settings["template"], settings["max_length"])
    limit_resources(MEMORY_BYTES, FILE_BYTES)
    channel.started()
    # The id of the request a worker is at, 0 between two; its parent reads it when the worker has died.
    current = mmap.mmap(-1, 8)
    idle_deaths = 0
    while idle_deaths < MAX_IDLE_DEATHS:
        current[:] = bytes(8)
        worker = os.fork()
        if worker == 0:
            _work(channel, texts, settings["cpu_s"], current)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        code = os.waitstatus_to_exitcode(status)
        id = int.from_bytes(current[:])
        if code == 0:
            return
        idle_deaths = 0 if id else idle_deaths + 1
        if id:
            channel.reply(id, DIED + json.dumps(code).encode())


def _work(channel: WorkerChannel, texts: Texts, cpu_s: float, current: mmap.mmap) -> None:
    """Serve requests one by one; the kernel kills this process if a request exceeds its CPU limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def set_current(id: int) -> None:
        current[:] = id.to_bytes(8)

    while (received := channel.receive(set_current)) is not None:
        id, body = received
        request = json.loads(body)
        signal.setitimer(signal.ITIMER_PROF, allowed_s(cpu_s, len(body)))
        try:
            reply = DONE + texts.answer(request["do"], request["value"])
        except Refused as error:
            message = str(error)[:MAX_MESSAGE]
            reply = REFUSED + json.dumps({"message": message, "param": error.param}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        # From here on this worker sends its own reply.
        set_current(0)
        channel.reply(id, reply)
