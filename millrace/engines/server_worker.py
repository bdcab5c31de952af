"""Worker process of one inference server: frames of the trainer on one side, HTTP on the other.

It takes the place of `engine_worker`, so that supervision, restarts and versions are those of any engine. It
starts its server or connects to a given one. A server that does not reply, sends a completion without
log-probabilities or cannot verify a weight update ends this process with a sentence, and the supervisor
starts another one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from millrace.data.tokenizers import load_tokenizer
from millrace.engines.http_client import RequestRefused, ServerError
from millrace.engines.server_dialect import Dialect, joined, progress, remaining
from millrace.engines.server_settings import ServerSettings
from millrace.engines.server_start import connect
from millrace.engines.trainer_connection import TrainerConnection
from millrace.engines.wire import COMMANDS, Channel, Frame
from millrace.processes.worker import WorkerChannel
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import pack_results, unpack_requests
from millrace.transport.canary import Canary
from millrace.transport.shared_memory import WeightManifest
from millrace.transport.weight_update import WeightSyncError, check_canary
from millrace.types import Completion

HEARTBEAT_S = 1.0
# Wait before a request is repeated that the server had no room for.
BUSY_S = 0.2
ABORT_S = 0.5
NOTHING = Completion((), np.empty(0, np.float32), np.empty(0, np.int32), "abort", "")


def serve(channel: WorkerChannel, settings: Mapping[str, Any]) -> None:
    """Generate with a server until the trainer closes the connection; settings as in `engine_worker.serve`.

    `server` has the fields of `ServerSettings`. A server that fails ends the process with a sentence.
    """
    connection = Channel(channel.connection, channel.key, COMMANDS)
    server, folder = ServerSettings(**settings["server"]), Path(settings["folder"])
    try:
        asyncio.run(_serve(connection, server, folder, settings))
    except ServerError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(channel: Channel, server: ServerSettings, folder: Path, settings: Mapping[str, Any]) -> None:
    tokenizer = load_tokenizer(folder)

    def text_of(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async with connect(server, folder, kv=settings["kv"], decode=text_of) as (dialect, ended):
        sample = list(range(0, len(tokenizer), max(1, len(tokenizer) // 8)))
        # A server that was started here has the tokenizer of the same folder.
        await dialect.probe(sample, str(tokenizer.decode(sample)) if server.url else None)
        weights, interrupt = settings["weights"], settings["interrupt"]
        worker = ServerWorker(dialect, channel, weights, server, text_of, interrupt=interrupt)
        await worker.serve(ended)


class _InvalidRequest(Exception):
    """The server refuses a request, which is the caller's error."""


class ServerWorker:
    """Executes the commands of its connection with a server."""

    def __init__(
        self,
        dialect: Dialect,
        channel: Channel,
        weights: int,
        settings: ServerSettings,
        decode: Callable[[Sequence[int]], str],
        *,
        interrupt: bool,
    ) -> None:
        """Prepare to serve; generation starts after the first weights are loaded and verified.

        `weights` is a descriptor of the trainer's shared memory, `decode` converts tokens to text without
        special tokens; see `EngineSettings` for `interrupt`.
        """
        self._decode = decode
        self._dialect, self._trainer, self._weights = dialect, TrainerConnection(channel), weights
        self._settings, self._interrupt = settings, interrupt
        self._room = asyncio.Semaphore(settings.max_requests)
        # Unfinished requests, with the turn in which each was received; ids to abort before they are sent.
        self._requests: dict[str, tuple[asyncio.Task[None], int]] = {}
        self._sent: set[str] = set()
        self._aborted: set[str] = set()
        # Set while requests may be sent: weights are verified, and no update is due.
        self._open = asyncio.Event()
        # Results that arrive during an update are reported once it is verified.
        self._held: list[tuple[str, int, int, Completion]] | None = None
        self._pending: WeightManifest | None = None
        self._deferred: list[Frame] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._prefix = f"{os.getpid()}-{os.urandom(4).hex()}-"
        self._handlers: dict[str, Callable[[Frame], None]] = {
            "restart_turns": self._restart_turns,
            "submit": self._submit,
            "blocking_submit": self._submit,
            "abort": self._abort,
            "update_weights": self._request_update,
        }

    async def serve(self, ended: Callable[[], Any] | None = None) -> None:
        """Execute commands until the trainer closes the connection.

        `ended` waits for the end of a server that was started here.

        Raises:
            ServerError: the server failed.
        """
        self._trainer.start(self._watch())
        if ended is not None:
            self._trainer.start(ended())
        await self._trainer.serve(self._handle)

    def _handle(self, frame: Frame) -> None:
        self._trainer.note(frame)
        self._handlers[frame.kind](frame)

    # ---- commands

    def _restart_turns(self, frame: Frame) -> None:
        if frame.metadata["recorded"] is not None:
            raise ServerError("a server cannot repeat a recorded run: its turns are not known")
        self._trainer.restart_turns()

    def _submit(self, frame: Frame) -> None:
        if self._pending is not None and not self._interrupt:
            self._deferred.append(frame)
            return
        for request in (one for group in frame.unpack(unpack_requests) for one in group):
            self._idle.clear()
            self._requests[request.id] = self._trainer.start(self._complete(request)), self._trainer.num_turns

    def _abort(self, frame: Frame) -> None:
        if self._deferred:
            self._deferred.append(frame)
        ids = [id for id in frame.metadata["ids"] if id in self._requests]
        self._aborted.update(ids)
        for id in ids:
            if id not in self._sent:
                self._requests[id][0].cancel()
        if sent := [id for id in ids if id in self._sent]:
            self._trainer.start(self._abort_sent(sent))

    async def _abort_sent(self, ids: Sequence[str]) -> None:
        """Abort requests until they have ended: the first abort may overtake a request."""
        while left := [id for id in ids if id in self._requests]:
            await self._dialect.abort([self._prefix + id for id in left])
            await asyncio.sleep(ABORT_S)

    def _request_update(self, frame: Frame) -> None:
        self._pending = cast("WeightManifest", frame.metadata)
        self._trainer.start(self._update_weights(self._pending))

    # ---- requests

    async def _complete(self, request: GenerateRequest) -> None:
        began = self._trainer.num_turns
        try:
            completion = await self._generate(request)
        except _InvalidRequest as error:
            self._forget(request.id)
            self._trainer.send("refused", {"ids": [request.id], "reason": str(error)})
            return
        except asyncio.CancelledError:
            if request.id not in self._aborted:
                raise
            completion = request.partial_output or NOTHING
            completion = replace(completion, finish_reason="abort")
        self._forget(request.id)
        self._trainer.num_turns += 1
        result = (request.id, began, self._trainer.num_turns, completion)
        if self._held is None:
            self._trainer.send("completed", *pack_results([result]))
        else:
            self._held.append(result)

    def _forget(self, id: str) -> None:
        self._requests.pop(id, None)
        self._sent.discard(id)
        self._aborted.discard(id)
        if not self._requests:
            self._idle.set()

    async def _generate(self, request: GenerateRequest) -> Completion:
        partial, params, prompt = request.partial_output, request.params, request.prompt
        if partial is not None and partial.token_ids:
            try:
                params = replace(params, **remaining(params, len(partial.token_ids)))
            except ValueError as error:
                raise _InvalidRequest(str(error)) from None
            prompt = (*prompt, *partial.token_ids)
        while True:
            async with self._room:
                await self._open.wait()
                self._sent.add(request.id)
                try:
                    completion = await self._dialect.generate(self._prefix + request.id, prompt, params)
                    break
                except RequestRefused as error:
                    if error.status != 429:
                        raise
                    self._sent.discard(request.id)
                except ValueError as error:
                    raise _InvalidRequest(str(error)) from None
            await asyncio.sleep(BUSY_S)
        if partial is None:
            return completion
        return joined(partial, completion, params.stop, self._decode)

    # ---- weight updates

    async def _update_weights(self, manifest: WeightManifest) -> None:
        """Update and verify the server between two tokens, or after all requests that came earlier."""
        if not self._interrupt and self._open.is_set():
            await self._idle.wait()
        self._open.clear()
        self._held = []
        version, canary = manifest["version"], manifest["canary"]
        folder = self._settings.weights_folder
        async with self._dialect.weights_at(self._weights, manifest, folder) as path:
            await self._dialect.update_weights(path, manifest)
        found = await self._dialect.version()
        if found != version:
            raise ServerError(
                f"{self._dialect.client.url} has version {found} after version {version} was loaded"
            )
        if canary is not None:
            expected = Canary.of(canary)
            logprobs = await self._dialect.verify(expected.token_ids)
            try:
                check_canary(expected, lambda token_ids: logprobs, version)
            except WeightSyncError as error:
                raise ServerError(f"{self._dialect.client.url}: {error}") from None
        held, self._held = self._held, None
        self._trainer.num_turns += 1
        self._trainer.send(
            "weights_loaded",
            {"version": version, "at": self._trainer.num_turns, "error": "", "verify_s": 0.0},
        )
        if held:
            self._trainer.send("completed", *pack_results(held))
        self._pending = None
        self._open.set()
        deferred, self._deferred = self._deferred, []
        for frame in deferred:
            self._handlers[frame.kind](frame)

    # ---- supervision

    async def _watch(self) -> None:
        """Report a heartbeat while the server makes progress; ServerError once it replies no more."""
        last = -1.0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            found = await progress(self._dialect.client, self._settings.timeout_s)
            if found != last and (self._requests or self._pending is not None):
                self._trainer.send("heartbeat")
            last = found
