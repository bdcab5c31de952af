"""OpenAI's endpoints: `/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from millrace.inference.async_engine import TokenChunk
from millrace.inference.server.completion_echo import echo
from millrace.inference.server.detokenize import Detokenizer
from millrace.inference.server.http_errors import Json
from millrace.inference.server.replies import Streamed, completed, server_sent_events
from millrace.inference.server.request_prompts import check_model, conversation, texts
from millrace.inference.server.schemas import ChatBody, CompletionBody, OpenAIBody
from millrace.inference.server.service import (
    GenerationService,
    ResponseStream,
    new_id,
    require_success,
    sampling_params,
    turn_tokens,
)
from millrace.inference.server.shapes import ChatShape, Shape, TextShape, envelope, usage
from millrace.types import Completion

# OpenAI's default, where a completion of a text has no limit of its own.
DEFAULT_TOKENS = 16


class OpenAI:
    """OpenAI's endpoints over one service."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._served = service.served
        self._created_s = int(time.time())

    def router(self) -> APIRouter:
        """Its routes."""
        router = APIRouter(prefix="/v1")
        router.post("/completions")(self.completions)
        router.post("/chat/completions")(self.chat)
        router.get("/models")(self.models)
        router.get("/models/{name:path}")(self.model)
        return router

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue texts."""
        check_model(self._served, body.model)
        prompts = await texts(self._service, body.prompt, body.n)
        max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        if body.echo:
            return await echo(self._service, body, request, prompts, max_tokens)
        shape = TextShape(wants_logprobs=body.logprobs is not None)
        return await self._answer(body, request, prompts, max_tokens, shape)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Generate the assistant's next message."""
        check_model(self._served, body.model)
        prompt = await conversation(self._service, body.messages)
        wanted = body.max_completion_tokens or body.max_tokens or turn_tokens(self._served, len(prompt))
        return await self._answer(body, request, [prompt], wanted, ChatShape(wants_logprobs=body.logprobs))

    async def models(self) -> Response:
        """List the one model of this server."""
        return Json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """Describe a model by its name."""
        check_model(self._served, name)
        return Json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "millrace",
            "max_model_len": self._served.max_length,
        }

    async def _answer(
        self,
        body: OpenAIBody,
        request: Request,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        shape: Shape,
    ) -> Response:
        params = sampling_params(body, self._served, len(prompts) * body.n, max_tokens=max_tokens)
        id, created_s = body.request_id or new_id(shape.prefix), int(time.time())
        samples = await self._service.submit(id, prompts, params, priority=body.priority)
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        if body.stream:
            wants_usage = body.stream_options is not None and body.stream_options.include_usage
            counts = num_prompt_tokens if wants_usage else None
            chunks = self._chunks(samples, shape, params[0].stop, counts)
            return Streamed(samples, server_sent_events(chunks), "text/event-stream")
        generated = await completed(samples, request)
        choices = [
            shape.choice(
                index, completion.text, completion.finish_reason, self._logprobs(shape, index, completion)
            )
            for index, completion in enumerate(generated)
        ]
        counted = usage(num_prompt_tokens, sum(len(completion.token_ids) for completion in generated))
        return Json(envelope(id, shape.whole, self._served.name, created_s, choices, counted))

    async def _chunks(
        self, samples: ResponseStream, shape: Shape, stop: tuple[str, ...], num_prompt_tokens: int | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a response; the last has the usage, if `num_prompt_tokens` is given."""
        served, count = self._served, samples.num_samples
        special = frozenset(served.tokenizer.all_special_ids)
        writers = [Detokenizer(served.decode, stop, special) for _ in range(count)]
        num_tokens, created_s = 0, int(time.time())

        def chunk(choices: list[dict[str, Any]], used: Any = None) -> dict[str, Any]:
            tree = envelope(samples.id, shape.chunk, served.name, created_s, choices, used)
            if num_prompt_tokens is None:
                del tree["usage"]
            return tree

        for choice in filter(None, map(shape.opening, range(count))):
            yield chunk([choice])
        async with aclosing(samples.events()) as events:
            async for index, event in events:
                if isinstance(event, Completion):
                    text = writers[index].finish(require_success(event).text)
                    num_tokens += len(event.token_ids)
                    for choice in shape.closing(index, text, event.finish_reason):
                        yield chunk([choice])
                    continue
                text, logprobs = writers[index].push(event.token_ids), self._logprobs(shape, index, event)
                if text or logprobs:
                    yield chunk([shape.piece(index, text, logprobs)])
        if num_prompt_tokens is not None:
            yield chunk([], usage(num_prompt_tokens, num_tokens))

    def _logprobs(self, shape: Shape, index: int, generated: TokenChunk | Completion) -> Any:
        if not shape.wants_logprobs:
            return None
        texts = [str(self._served.tokenizer.decode([token])) for token in generated.token_ids]
        return shape.logprobs(index, texts, generated.logprobs.tolist())
