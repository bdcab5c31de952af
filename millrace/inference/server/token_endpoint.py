"""`/inference/v1/generate`: tokens in, tokens and log-probabilities out, in the form of vLLM's endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from millrace.inference.async_engine import TokenChunk
from millrace.inference.server.http_errors import Json
from millrace.inference.server.replies import Streamed, completed, server_sent_events
from millrace.inference.server.request_prompts import check_model
from millrace.inference.server.schemas import TokenBody
from millrace.inference.server.service import (
    GenerationService,
    ResponseStream,
    new_id,
    require_success,
    sampling_params,
    turn_tokens,
)
from millrace.inference.server.shapes import usage
from millrace.types import Completion

# What OpenAI and vLLM write for a token that is next to impossible; JSON has no infinity.
LEAST_LOGPROB = -9999.0


class TokenEndpoint:
    """The endpoint that trainers with their own chat templates use, such as verifiers and prime-rl."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._served = service.served

    def router(self) -> APIRouter:
        """Its route."""
        router = APIRouter(prefix="/inference/v1")
        router.post("/generate")(self.generate)
        return router

    async def generate(self, body: TokenBody, request: Request) -> Response:
        """Generate `n` samples of one prompt of tokens."""
        check_model(self._served, body.model)
        wanted = body.sampling_params
        if wanted.top_k == -1:
            wanted = wanted.model_copy(update={"top_k": 0})
        params = sampling_params(
            wanted,
            self._served,
            wanted.n,
            max_tokens=wanted.max_tokens or turn_tokens(self._served, len(body.token_ids)),
            prompt_logprobs=wanted.prompt_logprobs is not None,
        )
        id = body.request_id or new_id("tokens")
        samples = await self._service.submit(id, [body.token_ids], params, priority=body.priority)
        with_logprobs, num_prompt_tokens = wanted.logprobs is not None, len(body.token_ids)
        if body.stream:
            wants_usage = body.stream_options is not None and body.stream_options.include_usage
            chunks = self._chunks(samples, with_logprobs, num_prompt_tokens if wants_usage else None)
            return Streamed(samples, server_sent_events(chunks), "text/event-stream")
        generated = await completed(samples, request)
        return Json(
            self._envelope(id)
            | {
                "choices": [
                    _choice(index, one, with_logprobs, one.finish_reason)
                    for index, one in enumerate(generated)
                ],
                "prompt_logprobs": _prompt_logprobs(body.token_ids, generated[0]),
                "usage": usage(num_prompt_tokens, sum(len(one.token_ids) for one in generated)),
            }
        )

    def _envelope(self, id: str) -> dict[str, Any]:
        return {"request_id": id, "model": self._served.name}

    async def _chunks(
        self, samples: ResponseStream, with_logprobs: bool, num_prompt_tokens: int | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a response; the last has the usage, if `num_prompt_tokens` is given."""
        head, num_tokens = self._envelope(samples.id), 0
        async with aclosing(samples.events()) as events:
            async for index, event in events:
                if isinstance(event, Completion):
                    num_tokens += len(require_success(event).token_ids)
                    end = {"index": index, "token_ids": [], "logprobs": None, "versions": []}
                    yield head | {"choices": [end | {"finish_reason": event.finish_reason}]}
                else:
                    yield head | {"choices": [_choice(index, event, with_logprobs, None)]}
        if num_prompt_tokens is not None:
            yield head | {"choices": [], "usage": usage(num_prompt_tokens, num_tokens)}


def _choice(
    index: int, generated: TokenChunk | Completion, with_logprobs: bool, reason: str | None
) -> dict[str, Any]:
    entries = None
    if with_logprobs:
        pairs = zip(generated.token_ids, generated.logprobs.tolist(), strict=True)
        entries = {"content": [_entry(token, value) for token, value in pairs]}
    return {
        "index": index,
        "token_ids": list(generated.token_ids),
        "logprobs": entries,
        "versions": generated.versions.tolist(),
        "finish_reason": reason,
    }


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": f"token_id:{token}",
        "logprob": max(LEAST_LOGPROB, logprob),
        "bytes": None,
        "top_logprobs": [],
    }


def _prompt_logprobs(prompt: Sequence[int], completion: Completion) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt the log-probability by its id; the first has none."""
    if completion.prompt_logprobs is None:
        return None
    pairs = zip(prompt[1:], completion.prompt_logprobs.tolist(), strict=True)
    return [None, *({str(token): {"logprob": max(LEAST_LOGPROB, value)}} for token, value in pairs)]
