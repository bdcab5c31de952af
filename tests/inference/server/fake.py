"""An engine that draws tokens by hashing: as AsyncEngine to the server, but slow, full or broken at will."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from millrace.inference.async_engine import EngineClosed, EngineFull, Stream, TokenChunk
from millrace.inference.engine import EngineStats
from millrace.types import Completion, SamplingParams, TopTokens


class FakeEngine:
    """Each request is a task that draws a token every `delay_s`, up to three of them a piece.

    Attributes:
        stopped: a request whose prompt begins with this token stops the engine after two tokens.
        broken: requests whose prompt begins with this token fail after two tokens.
        calls: the verbs that were used, in order.
        ended: how each request ended, by its id.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        vocab_size: int,
        max_length: int = 64,
        max_waiting: int = 8,
        delay_s: float = 0.0,
        broken: int | None = None,
        stopped: int | None = None,
    ) -> None:
        self.version = 3
        self.broken = broken
        self.stopped = stopped
        self.delay_s = delay_s
        self.calls: list[tuple] = []
        self.ended: dict[str, str] = {}
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.closed: str | None = None
        self._decode, self._vocab_size = decode, vocab_size
        self._max_length, self._max_waiting = max_length, max_waiting
        self._tasks: dict[str, asyncio.Task] = {}
        self._streams: dict[str, tuple[Stream, list[int]]] = {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def num_live(self) -> int:
        return len(self._streams)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_live,
            num_waiting=0,
            kv_usage=0.25,
            prefix_queries=70,
            prefix_hits=30,
            num_preemptions=2,
            prompt_tokens=11,
            generation_tokens=17,
            prompt_tokens_computed=5,
            prompt_tokens_imported=6,
            blocks_refused=1,
            leased_blocks=4,
            imported_fraction=0.75,
        )

    def submit_siblings(self, prompt, params, *, ids=None, priority=0):
        if self.closed:
            raise EngineClosed(self.closed)
        if not prompt:
            raise ValueError("the prompt is empty; a completion needs at least one token to follow")
        for wanted in params:
            if len(prompt) + wanted.max_tokens > self._max_length:
                raise ValueError(
                    f"the prompt has {len(prompt)} tokens and max_tokens is {wanted.max_tokens}; too long"
                )
        if self.num_live + len(params) > self._max_waiting:
            raise EngineFull(f"{self.num_live} requests wait; the engine queues at most {self._max_waiting}")
        loop = asyncio.get_running_loop()
        streams = []
        for id, wanted in zip(ids, params, strict=True):
            stream = Stream(id, loop)
            self._streams[id] = (stream, [])
            self.params[id] = wanted
            self.prompts[id] = tuple(prompt)
            self._tasks[id] = loop.create_task(self._draw(id, tuple(prompt), wanted))
            streams.append(stream)
        return streams

    async def abort(self, id):
        if self.closed:
            raise EngineClosed(self.closed)
        if id not in self._streams:
            return None
        self._tasks[id].cancel()
        return self._end(id, "abort")

    async def respond(self):
        if self.closed:
            raise EngineClosed(self.closed)

    async def pause(self, mode, *, timeout_s=60.0):
        await self.respond()
        self.calls.append(("pause", mode))
        if mode == "finish" and self.num_live:
            raise TimeoutError(f"pause(finish) waited {timeout_s:g} s")

    async def resume(self):
        await self.respond()
        self.calls.append(("resume",))

    async def sleep(self, tags):
        self.calls.append(("sleep", *tags))

    async def wake(self, tags):
        self.calls.append(("wake", *tags))

    async def update_weights(self, named_tensors, version, *, kv="recompute"):
        tensors = dict(named_tensors)
        if "extra" in tensors:
            raise ValueError("weight extra is not one of the engine's")
        if "asleep" in tensors:
            raise RuntimeError("the weights are asleep")
        self.calls.append(("update_weights", {name: tensor.dtype for name, tensor in tensors.items()}, kv))
        self.version = version

    async def fingerprint(self):
        return {"weight": "0123"}

    async def _draw(self, id, prompt, params):
        stream, drawn = self._streams[id]
        while True:
            await asyncio.sleep(self.delay_s)
            first = len(drawn)
            for _ in range(1 + first % 3):
                if prompt[0] == self.stopped and len(drawn) == 2:
                    self._stop()
                    return
                if prompt[0] == self.broken and len(drawn) == 2:
                    self._end(id, "error", "its logits are not finite")
                    return
                drawn.append(self.token(prompt, params.seed, len(drawn)))
                text = self._decode(drawn)
                reason = "length" if len(drawn) == params.max_tokens else None
                if drawn[-1] in params.stop_token_ids or any(stop in text for stop in params.stop):
                    reason = "stop"
                if reason:
                    break
            stream.put(self._piece(drawn, first))
            if reason:
                self._end(id, reason)
                return

    def token(self, prompt, seed, position) -> int:
        digest = hashlib.blake2b(f"{prompt} {seed} {position}".encode()).digest()
        return int.from_bytes(digest[:8]) % self._vocab_size

    def _piece(self, drawn, first) -> TokenChunk:
        count = len(drawn) - first
        return TokenChunk(
            tuple(drawn[first:]), self._logprobs(drawn)[first:], np.full(count, self.version, np.int32)
        )

    @staticmethod
    def _logprobs(drawn) -> np.ndarray:
        return -np.arange(1, len(drawn) + 1, dtype=np.float32) / 8

    def prompt_scores(self, prompt) -> tuple[np.ndarray, TopTokens]:
        """After an even number of tokens the next one of the prompt is the most likely."""
        place_N = np.arange(1, len(prompt), dtype=np.int32)
        top_N = np.where(place_N % 2, (place_N * 37 + prompt[0]) % self._vocab_size, prompt[1:])
        logprob_N = -place_N.astype(np.float32) / 4
        top = TopTokens(top_N.astype(np.int32), logprob_N + (place_N % 2) * np.float32(0.125))
        return logprob_N, top

    def _stop(self) -> None:
        self.closed = "the engine stopped: its thread failed: RuntimeError: out of memory"
        for stream, _ in self._streams.values():
            stream.put(EngineClosed(self.closed))
        self._streams.clear()

    def _end(self, id, reason, why="") -> Completion:
        stream, drawn = self._streams.pop(id)
        self.ended[id] = reason
        text = self._decode(drawn)
        found = [at for at in (text.find(stop) for stop in self.params[id].stop) if at >= 0]
        params, scores = self.params[id], self.prompt_scores(self.prompts[id])
        completion = Completion(
            token_ids=tuple(drawn),
            logprobs=self._logprobs(drawn),
            versions=np.full(len(drawn), self.version, np.int32),
            finish_reason=reason,
            text=text[: min(found)] if found else text,
            prompt_logprobs=scores[0] if params.prompt_logprobs and len(scores[0]) else None,
            prompt_top=scores[1] if params.prompt_top_tokens and len(scores[0]) else None,
            reason=why,
        )
        stream.put(completion)
        return completion
