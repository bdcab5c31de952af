"""Token generation and engine control endpoints for RL training."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from safetensors import SafetensorError, safe_open

from millrace.inference.async_engine import EngineClosed, TokenChunk
from millrace.inference.server.http_errors import ApiError, Json, encode, shown
from millrace.inference.server.placed_weights import SHARED, read_placed
from millrace.inference.server.replies import Streamed, completed
from millrace.inference.server.schemas import (
    AbortBody,
    GenerateBody,
    PauseBody,
    TagsBody,
    UpdateWeightsBody,
)
from millrace.inference.server.service import (
    GenerationService,
    ResponseStream,
    new_id,
    require_success,
    sampling_params,
)
from millrace.models.load import ModelError, check_folder
from millrace.transport.weight_update import WeightSyncError
from millrace.types import Completion
from millrace.version import __version__

DEFAULT_TOKENS = 128
T = TypeVar("T")


class Verbs:
    """The endpoints for a trainer."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._served = service.served
        self._engine = service.served.engine

    def router(self) -> APIRouter:
        """Its routes."""
        router = APIRouter()
        router.post("/generate")(self.generate)
        router.post("/abort")(self.abort)
        router.post("/pause")(self.pause)
        router.post("/resume")(self.resume)
        router.post("/sleep")(self.sleep)
        router.post("/wake")(self.wake)
        router.post("/update_weights")(self.update_weights)
        router.get("/fingerprint")(self.fingerprint)
        router.get("/version")(self.version)
        for path in ("/model_info", "/server_info"):
            router.get(path)(self.model_info)
        return router

    async def generate(self, body: GenerateBody, request: Request) -> Response:
        """Generate `n` samples of one prompt."""
        params = sampling_params(
            body,
            self._served,
            body.n,
            max_tokens=body.max_tokens or DEFAULT_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            prompt_top_tokens=body.prompt_top_tokens,
        )
        id = body.request_id or new_id("gen")
        samples = await self._service.submit(id, [body.prompt_token_ids], params, priority=body.priority)
        if body.stream:
            return Streamed(samples, _lines(samples), "application/x-ndjson")
        generated = await completed(samples, request)
        return Json({"id": id, "completions": [_tree(i, one) for i, one in enumerate(generated)]})

    async def abort(self, body: AbortBody) -> Response:
        """Abort a request; its partial completions go to the waiting client and to this caller."""
        ended = await self._service.abort(body.id)
        if not ended:
            raise ApiError(404, f"there is no unfinished request {shown(body.id)}", param="id")
        return Json({"id": body.id, "completions": [_tree(i, one) for i, one in enumerate(ended)]})

    async def pause(self, body: PauseBody) -> Response:
        """Pause generation: after running requests finish, after aborting them, or at once."""
        try:
            await self._refusable(self._engine.pause(body.mode, timeout_s=body.timeout_s))
        except TimeoutError as error:
            raise ApiError(504, str(error) or f"the pause took longer than {body.timeout_s:g} s") from None
        return self._state()

    async def resume(self) -> Response:
        """Resume generation."""
        await self._refusable(self._engine.resume())
        return self._state()

    async def sleep(self, body: TagsBody) -> Response:
        """Free memory of weights or KV cache."""
        await self._refusable(self._engine.sleep(body.tags))
        return self._state()

    async def wake(self, body: TagsBody) -> Response:
        """Allocate the freed memory again."""
        await self._refusable(self._engine.wake(body.tags))
        return self._state()

    async def update_weights(self, body: UpdateWeightsBody) -> Response:
        """Update every weight in place, from a model folder or from a file of raw bytes."""
        root = self._served.weights_root
        if body.tensors is not None and body.fingerprint is not None:
            if not SHARED.fullmatch(body.path):
                allowed_folder(root, body.path)
            read = partial(read_placed, body.path, body.tensors, body.fingerprint, root)
        else:
            read = partial(read_tensors, allowed_folder(root, body.path), self._served.dtype)
        try:
            tensors = await asyncio.to_thread(read)
        except (ModelError, SafetensorError, WeightSyncError, OSError) as error:
            raise ApiError(400, f"the weights cannot be read: {error}", param="path") from None
        await self._refusable(self._engine.update_weights(tensors, body.version, kv=body.kv))
        return self._state()

    async def fingerprint(self) -> Response:
        """Return a checksum of each weight."""
        found = await self._refusable(self._engine.fingerprint())
        return Json({"version": self._engine.version, "fingerprint": found})

    async def version(self) -> Response:
        """Return the version of millrace and the policy version."""
        return Json({"millrace": __version__, "version": self._engine.version})

    async def model_info(self) -> Response:
        """Return the name of the model and the policy version, in SGLang's form, which its router reads."""
        version = str(self._engine.version)
        return Json(
            {"served_model_name": self._served.name, "is_generation": True, "weight_version": version}
        )

    def _state(self) -> Json:
        stats = self._engine.stats()
        counts = {"num_running": stats.num_running, "num_waiting": stats.num_waiting}
        return Json({"version": self._engine.version, **counts})

    async def _refusable(self, verb: Coroutine[Any, Any, T]) -> T:
        """Return the result of an engine command; ApiError with the engine's reason if it is rejected."""
        try:
            return await verb
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except EngineClosed as error:
            raise ApiError(503, str(error)) from None
        except RuntimeError as error:
            raise ApiError(409, str(error)) from None


def allowed_folder(root: Path | None, path: str) -> Path:
    """Resolve a client's path and its links; ApiError for a folder outside the root, or without a root."""
    if root is None:
        raise ApiError(403, "this server loads no weights; start it with --weights-root FOLDER")
    outside = ApiError(
        403, f"{shown(path)} is not below the server's weights root; put the folder there", param="path"
    )
    if "\0" in path:
        raise outside
    try:
        folder = (root / path).resolve()
    except (OSError, RuntimeError):  # its links go in a circle
        raise outside from None
    if not folder.is_relative_to(root.resolve()):
        raise outside
    return folder


def read_tensors(folder: Path, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """Read all tensors of a folder's safetensors files, floating ones as `dtype`.

    Raises:
        ModelError, OSError, SafetensorError: a file is missing or damaged.
    """
    tensors = []
    for file in sorted(check_folder(folder).glob("*.safetensors")):
        # A link in the folder could lead out of the root.
        if file.is_symlink():
            raise ModelError(f"{file.name} is a symbolic link; put the file itself into the folder")
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                tensors.append((name, tensor.to(dtype) if tensor.is_floating_point() else tensor))
    return tensors


async def _lines(samples: ResponseStream) -> AsyncGenerator[bytes, None]:
    """JSON lines: pieces of all samples as generated; the last line of a sample has its finish reason."""
    async with aclosing(samples.events()) as events:
        try:
            async for index, event in events:
                head = {"id": samples.id, "index": index}
                if isinstance(event, Completion):
                    yield encode(head | _end(require_success(event))) + b"\n"
                else:
                    yield encode(head | _tokens(event)) + b"\n"
        except ApiError as error:
            yield encode({"id": samples.id} | error.body()) + b"\n"


def _tree(index: int, completion: Completion) -> dict[str, Any]:
    return {"index": index} | _tokens(completion) | _end(completion)


def _tokens(generated: TokenChunk | Completion) -> dict[str, Any]:
    return {
        "token_ids": generated.token_ids,
        "logprobs": _numbers(generated.logprobs),
        "versions": generated.versions.tolist(),
    }


def _end(completion: Completion) -> dict[str, Any]:
    support, scores, top = completion.support, completion.prompt_logprobs, completion.prompt_top
    return {
        "finish_reason": completion.finish_reason,
        "reason": completion.reason,
        "text": completion.text,
        "support": support and {name: value.tolist() for name, value in asdict(support).items()},
        "prompt_logprobs": None if scores is None else _numbers(scores),
        "prompt_top": top and {"token_ids": top.token_ids.tolist(), "logprobs": _numbers(top.logprobs)},
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """For JSON, which has no NaN and no infinity: those are null."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
