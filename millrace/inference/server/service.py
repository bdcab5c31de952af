"""Common state of the routes: the served model, the in-flight samples, and the submission of requests."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from prometheus_client.registry import Collector

from millrace.data.chat import CHAT
from millrace.inference.async_engine import EngineClosed, EngineFull, Stream, TokenChunk
from millrace.inference.served_engine import ServedEngine
from millrace.inference.server.http_errors import ApiError, bad_request
from millrace.inference.server.prometheus import Meter
from millrace.inference.server.schemas import SamplingFields
from millrace.inference.server.text_process import TextProcess, TextService
from millrace.types import Completion, SamplingParams

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# A turn of a conversation may be as long as the model allows, but no longer than this.
MAX_TURN_TOKENS = 4096
NAMES = {field.name: None for field in fields(SamplingParams)}
# Fields that a body and SamplingParams have in common, value for value.
SHARED = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True, eq=False)
class ModelService:
    """The served model.

    Attributes:
        engine: generates; the server starts and stops it.
        tokenizer: the server's own instance, because it is not thread-safe.
        max_length: tokens of prompt and completion together that the model and the cache allow.
        template: prompt template: `chat` for the tokenizer's own, or text around `{prompt}`, which allows a
            single message.
        weights_root: `/update_weights` reads only below this folder; None disables it.
        tokenizer_folder: folder the tokenizer was loaded from; None if it was built in memory.
        more_metrics: collectors of metrics of this engine, beside those that every engine has.
    """

    engine: ServedEngine
    tokenizer: Tokenizer
    name: str
    max_length: int
    vocab_size: int
    dtype: torch.dtype
    stop_token_ids: tuple[int, ...]
    template: str = CHAT
    weights_root: Path | None = None
    tokenizer_folder: Path | None = None
    more_metrics: tuple[Collector, ...] = ()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Convert tokens to text without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


class ResponseStream:
    """The samples of one HTTP request. Always call `close`: it aborts unfinished samples."""

    def __init__(
        self, service: GenerationService, id: str, num_prompt_tokens: list[int], streams: list[Stream]
    ) -> None:
        self.id = id
        self.num_samples = len(streams)
        self._num_prompt_tokens = num_prompt_tokens
        self._service = service
        self._streams = streams
        self._started_s = time.monotonic()
        self._unfinished = set(range(len(streams)))

    async def events(self) -> AsyncGenerator[tuple[int, TokenChunk | Completion], None]:
        """Yield (sample index, piece) as generated, last a Completion; ApiError if the engine has stopped."""
        queue: asyncio.Queue[tuple[int, TokenChunk | Completion | ApiError]] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(i, s, queue)) for i, s in enumerate(self._streams)]
        try:
            while self._unfinished:
                index, event = await queue.get()
                if isinstance(event, ApiError):
                    raise event
                if isinstance(event, Completion):
                    self._end(index, event)
                yield index, event
        finally:
            for pump in pumps:
                pump.cancel()

    async def completions(self) -> list[Completion]:
        """Return all completions in order; ApiError at once if a sample failed."""
        ended: dict[int, Completion] = {}
        async with aclosing(self.events()) as events:
            async for index, event in events:
                if isinstance(event, Completion):
                    ended[index] = require_success(event)
        return [ended[index] for index in sorted(ended)]

    async def close(self) -> None:
        """Abort unfinished samples and remove the request from the service."""
        left = sorted(self._unfinished)
        try:
            for index, aborted in zip(left, await self._abort(left), strict=True):
                # None: the sample ended, but its completion was not read.
                self._end(index, aborted or await self._streams[index].completion())
        except (ValueError, EngineClosed):
            # The engine stopped or rejected the samples: nothing to abort, and the client has the error.
            self._unfinished.clear()
        finally:
            self._service.forget(self.id)

    async def abort(self) -> list[Completion]:
        """Abort unfinished samples; the reader, too, gets partial completions. ApiError without engine."""
        try:
            found = await self._abort(sorted(self._unfinished))
        except EngineClosed as error:
            raise _refusal(error) from None
        return [completion for completion in found if completion is not None]

    async def _abort(self, indices: Sequence[int]) -> list[Completion | None]:
        """Abort concurrently, so that all aborts fall between the same two steps."""
        engine = self._service.served.engine
        return await asyncio.gather(*(engine.abort(self._streams[index].id) for index in indices))

    async def _pump(
        self, index: int, stream: Stream, queue: asyncio.Queue[tuple[int, TokenChunk | Completion | ApiError]]
    ) -> None:
        meter, last_s = self._service.meter, None
        try:
            async for piece in stream:
                now_s = time.monotonic()
                if last_s is None:
                    meter.first_token(now_s - self._started_s)
                else:
                    meter.next_tokens(len(piece.token_ids), now_s - last_s)
                last_s = now_s
                queue.put_nowait((index, piece))
            queue.put_nowait((index, await stream.completion()))
        except (ValueError, EngineClosed) as error:
            queue.put_nowait((index, _refusal(error)))

    def _end(self, index: int, completion: Completion) -> None:
        self._unfinished.discard(index)
        self._service.meter.ended(
            self._num_prompt_tokens[index],
            completion,
            time.monotonic() - self._started_s,
            version=self._service.served.engine.version,
        )


class GenerationService:
    """The in-flight samples by request id.

    `max_samples` is what the engine can hold, running and waiting; larger requests are rejected. By
    default a child process renders and tokenizes.
    """

    def __init__(self, served: ModelService, *, max_samples: int, texts: TextService | None = None) -> None:
        self.served = served
        self.texts = texts or TextProcess(
            served.tokenizer,
            served.tokenizer_folder,
            template=served.template,
            max_length=served.max_length,
        )
        self.meter = Meter(served.name, served.engine, served.more_metrics)
        self.closing = False
        self._max_samples = max_samples
        self._running: dict[str, ResponseStream] = {}

    def refuse_new(self) -> None:
        """Reject all new requests from now on."""
        self.closing = True

    async def submit(
        self,
        id: str,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        priority: int,
    ) -> ResponseStream:
        """Start the samples of a request; each prompt is computed once for all its samples.

        The id is unique among unfinished requests; `params` are those of each sample, grouped by prompt,
        equally many for each; lower priorities run first. If a sample cannot be served, too many wait, or the
        server is closing, it raises an ApiError, and none is started.
        """
        if self.closing:
            raise ApiError(503, "the server is shutting down; ask another one")
        if id in self._running:
            raise ApiError(
                400, f"request_id {id} is taken by an unfinished request; choose another", param="request_id"
            )
        self.check_count(len(params))
        engine, streams = self.served.engine, list[Stream]()
        each = len(params) // len(prompts)
        try:
            for prompt in prompts:
                first = len(streams)
                names = [f"{id}-{first + sample}" for sample in range(each)]
                wanted = params[first : first + each]
                streams += engine.submit_siblings(prompt, wanted, ids=names, priority=priority)
        except (ValueError, EngineFull, EngineClosed) as error:
            # An engine that has stopped meanwhile has ended them itself.
            with suppress(EngineClosed):
                for stream in streams:
                    await engine.abort(stream.id)
            raise _refusal(error) from None
        lengths = [len(prompt) for prompt in prompts for _ in range(each)]
        samples = self._running[id] = ResponseStream(self, id, lengths, streams)
        return samples

    def check_count(self, num_samples: int) -> None:
        """Raise ApiError for more than `max_samples`, before any allocation for each."""
        if num_samples > self._max_samples:
            raise ApiError(
                400,
                f"the request asks for {num_samples} samples and the server holds {self._max_samples} at "
                "once; split it",
            )

    @property
    def num_requests(self) -> int:
        """Number of in-flight requests."""
        return len(self._running)

    def forget(self, id: str) -> None:
        """Remove a request, so that its id can be used again."""
        self._running.pop(id, None)

    async def abort(self, id: str) -> list[Completion]:
        """Abort a request; return its partial completions, none for an unknown id."""
        samples = self._running.get(id)
        return [] if samples is None else await samples.abort()

    async def abort_all(self) -> None:
        """Abort every request; ApiError if the engine has stopped."""
        await asyncio.gather(*(samples.abort() for samples in self._running.values()))


def _refusal(error: ValueError | EngineFull | EngineClosed) -> ApiError:
    if isinstance(error, EngineFull):
        return ApiError(429, f"{error}; ask again later", code="queue_full")
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error))
    return bad_request(error, NAMES)


def require_success(completion: Completion) -> Completion:
    """Return the completion; ApiError with the engine's reason if it failed."""
    if completion.finish_reason == "error":
        raise ApiError(500, f"the request failed: {completion.reason}", code="request_failed")
    return completion


def new_id(prefix: str) -> str:
    """Return a random request id with this prefix."""
    return f"{prefix}-{secrets.token_hex(12)}"


def turn_tokens(served: ModelService, num_prompt_tokens: int) -> int:
    """Return the tokens of a turn whose request gives no limit."""
    return max(1, min(MAX_TURN_TOKENS, served.max_length - num_prompt_tokens))


def sample_seed(seed: int, index: int) -> int:
    """Return a sample's seed: the request's for sample 0, one derived from (seed, index) for the others."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()) >> 1


def sampling_params(
    body: SamplingFields,
    served: ModelService,
    num_samples: int,
    *,
    max_tokens: int,
    **more: object,
) -> list[SamplingParams]:
    """Build the sampling parameters of each sample of a request; ApiError if a value is out of range.

    `num_samples` is that of the whole request; `more` are `SamplingParams` fields of a single endpoint.
    """
    seed = secrets.randbits(63) if body.seed is None else body.seed
    ends = () if body.ignore_eos else served.stop_token_ids
    values = {name: getattr(body, name) for name in SHARED} | {
        "allowed_token_ids": tuple(body.allowed_token_ids),
        "forbidden_token_ids": tuple(body.forbidden_token_ids),
        "logit_bias": tuple((_token_id(key), bias) for key, bias in body.logit_bias.items()),
        "stop_token_ids": tuple(dict.fromkeys([*ends, *body.stop_token_ids])),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        **more,
    }
    try:
        return [
            SamplingParams(**values, max_tokens=max_tokens, seed=sample_seed(seed, i))
            for i in range(num_samples)
        ]
    except ValueError as error:
        raise bad_request(error, NAMES) from None


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ApiError(400, f"logit_bias names {key[:20]!r}, which is not a token id", param="logit_bias")
    return int(key)
