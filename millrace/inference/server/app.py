"""The application: every route over one model, behind the middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from millrace.inference.async_engine import EngineClosed
from millrace.inference.server.endpoints_page import endpoints_page
from millrace.inference.server.http_errors import ApiError, Json, install
from millrace.inference.server.limits import AccessControl, Limits
from millrace.inference.server.openai import OpenAI
from millrace.inference.server.request_prompts import check_model, checked_turns
from millrace.inference.server.rl import Verbs
from millrace.inference.server.schemas import DetokenizeBody, TokenizeBody
from millrace.inference.server.service import GenerationService
from millrace.inference.server.token_endpoint import TokenEndpoint
from millrace.version import __version__

HEALTH_TIMEOUT_S = 30.0


def create_app(service: GenerationService, limits: Limits) -> FastAPI:
    """Create the application of a service; its lifespan starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with service.served.engine:
            await service.texts.start()
            try:
                yield
            finally:
                await service.texts.close()

    app = FastAPI(
        title="millrace",
        version=__version__,
        lifespan=lifespan,
        # FastAPI's pages load scripts from elsewhere; ours is `endpoints_page`.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install(app)
    app.add_middleware(AccessControl, limits=limits)
    app.include_router(OpenAI(service).router())
    app.include_router(TokenEndpoint(service).router())
    app.include_router(Verbs(service).router())
    tools = _Tools(service)
    app.get("/health")(tools.health)
    app.get("/metrics")(tools.metrics)
    app.post("/tokenize")(tools.tokenize)
    app.post("/detokenize")(tools.detokenize)
    app.get("/docs", include_in_schema=False)(endpoints_page(app))
    return app


class _Tools:
    """Endpoints that generate no tokens."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._served = service.served

    async def health(self) -> Response:
        """Return whether the engine responds."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._served.engine.respond()
        except EngineClosed as error:
            raise ApiError(503, str(error)) from None
        except TimeoutError:
            raise ApiError(503, f"the engine has not answered for {HEALTH_TIMEOUT_S:g} s") from None
        return Json({"status": "ok"})

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self._service.meter.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Tokenize a text or a conversation."""
        check_model(self._served, body.model)
        if body.messages is not None:
            value: dict[str, Any] = {"messages": checked_turns(self._served, body.messages)}
        else:
            value = {"prompt": body.prompt}
        return _json(await self._service.texts.ask("tokenize", value))

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Convert tokens to text, special tokens included."""
        check_model(self._served, body.model)
        most = max(body.tokens, default=0)
        if most >= self._served.vocab_size:
            raise ApiError(
                400,
                f"tokens holds {most}, but the vocabulary ends at {self._served.vocab_size - 1}",
                param="tokens",
            )
        return _json(await self._service.texts.ask("detokenize", body.tokens))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
