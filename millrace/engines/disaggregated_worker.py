"""Worker process of one engine of a run that is divided: prefill and decode workers are processes below it.

It takes the place of `engine_worker`, so that supervision, restarts and versions are those of any engine. The
loss of a worker costs no sample; the loss of this process ends its workers, and the trainer replaces it.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from millrace.config.engine_section import DisaggregationConfig
from millrace.engines.build_prefill_decode import PrefillDecodeBuilder
from millrace.engines.engine_worker import HEARTBEAT_S
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine, WorkerFailed
from millrace.engines.trainer_connection import TrainerConnection
from millrace.engines.wire import COMMANDS, Channel, Frame
from millrace.inference.async_engine import EngineClosed, Stream
from millrace.inference.engine import KvPolicy
from millrace.processes.worker import WorkerChannel
from millrace.rollout.serialization import pack_results, unpack_requests
from millrace.transport.shared_memory import MappedWeights, WeightManifest
from millrace.transport.weight_update import WeightSyncError, WeightUpdate, check_fingerprint
from millrace.types import Completion

# Builds the engine with the first weights; its workers are started afterwards.
EngineBuilder = Callable[[WeightUpdate], PrefillDecodeEngine]


def serve(channel: WorkerChannel, settings: Mapping[str, Any]) -> None:
    """Generate with workers until the trainer closes the connection; settings as in `engine_worker.serve`.

    `workers` has the fields of `DisaggregationConfig`; `threads` are those of each worker. An engine that
    fails ends the process with a sentence.
    """
    folder = Path(settings["folder"])
    try:
        build = PrefillDecodeBuilder(
            folder, DisaggregationConfig(**settings["workers"]), threads=settings["threads"]
        )
    finally:
        shutil.rmtree(folder)
    connection = Channel(channel.connection, channel.key, COMMANDS)
    weights, kv, interrupt = settings["weights"], settings["kv"], settings["interrupt"]

    async def run() -> None:
        await DisaggregatedWorker(build, connection, weights, kv=kv, interrupt=interrupt).serve()

    try:
        asyncio.run(run())
    except (EngineClosed, WorkerFailed, WeightSyncError) as error:
        sys.exit(str(error))


class DisaggregatedWorker:
    """Executes the commands of its connection, in their order, with an engine of prefill and decode workers.

    Args:
        build: builds the engine.
        channel: to the trainer.
        weights: descriptor of the trainer's shared memory.
        kv, interrupt: see `EngineSettings`.
    """

    def __init__(
        self, build: EngineBuilder, channel: Channel, weights: int, *, kv: KvPolicy, interrupt: bool
    ) -> None:
        self._build, self._kv, self._interrupt = build, kv, interrupt
        self._trainer = TrainerConnection(channel)
        self._transport = MappedWeights(weights, self._report_loaded)
        self._engine: PrefillDecodeEngine | None = None
        self._commands: asyncio.Queue[Frame] = asyncio.Queue()
        # Commands that came before the first weights.
        self._early: list[Frame] = []
        self._unfinished: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # Results that arrive during an update are reported once it is verified.
        self._held: list[tuple[str, int, int, Completion]] | None = None

    async def serve(self) -> None:
        """Execute commands until the trainer closes the connection.

        Raises:
            EngineClosed: no worker is left.
            WorkerFailed: a worker did not start.
            WeightSyncError: the workers do not hold the trainer's weights.
        """
        self._trainer.start(self._execute_commands())
        self._trainer.start(self._send_heartbeats())
        try:
            await self._trainer.serve(self._receive)
        finally:
            if self._engine is not None:
                await self._engine.close("the trainer closed the connection")

    # ---- commands

    def _receive(self, frame: Frame) -> None:
        if frame.kind == "abort" and self._engine is not None:
            # At once, even if an update waits for the requests; and in its order for those behind it.
            self._trainer.start(self._abort(self._engine, frame.metadata["ids"]))
        self._commands.put_nowait(frame)

    async def _execute_commands(self) -> None:
        while True:
            frame = await self._commands.get()
            if frame.kind == "restart_turns":
                self._restart_turns(frame)
            elif frame.kind == "update_weights":
                self._trainer.note(frame)
                await self._update_weights(cast("WeightManifest", frame.metadata))
                early, self._early = self._early, []
                for one in early:
                    await self._execute(one)
            else:
                await self._execute(frame)

    async def _execute(self, frame: Frame) -> None:
        """Execute a command for requests, for which weights must have been verified."""
        if self._engine is None:
            self._early.append(frame)
            return
        self._trainer.note(frame)
        if frame.kind == "abort":
            await self._abort(self._engine, frame.metadata["ids"])
        else:
            self._submit(self._engine, frame)

    def _restart_turns(self, frame: Frame) -> None:
        if frame.metadata["recorded"] is not None:
            raise EngineClosed("prefill and decode workers cannot repeat a recorded run")
        self._trainer.restart_turns()

    def _submit(self, engine: PrefillDecodeEngine, frame: Frame) -> None:
        for requests in frame.unpack(unpack_requests):
            ids = [request.id for request in requests]
            try:
                streams = engine.submit_siblings(
                    requests[0].prompt,
                    [request.params for request in requests],
                    ids=ids,
                    partial_outputs=[request.partial_output for request in requests],
                )
            except ValueError as error:
                self._report("refused", {"ids": ids, "reason": str(error)})
                continue
            self._unfinished.update(ids)
            self._idle.clear()
            for stream in streams:
                self._trainer.start(self._complete(stream, self._trainer.num_turns))

    async def _abort(self, engine: PrefillDecodeEngine, ids: Collection[str]) -> None:
        await asyncio.gather(*(engine.abort(id) for id in ids))

    async def _complete(self, stream: Stream, began: int) -> None:
        try:
            completion = await stream.completion()
        except ValueError as error:
            self._report("refused", {"ids": [stream.id], "reason": str(error)})
            self._forget(stream.id)
            return
        self._trainer.num_turns += 1
        result = (stream.id, began, self._trainer.num_turns, completion)
        if self._held is None:
            self._report("completed", *pack_results([result]))
        else:
            self._held.append(result)
        self._forget(stream.id)

    def _forget(self, id: str) -> None:
        self._unfinished.discard(id)
        if not self._unfinished:
            self._idle.set()

    # ---- weight updates

    async def _update_weights(self, manifest: WeightManifest) -> None:
        """Update all workers between two tokens, or after all requests that came earlier, and verify them."""
        if not self._interrupt:
            await self._idle.wait()
        self._held = []
        self._transport.expect(manifest)
        update = self._transport.take()
        if self._engine is None:
            self._engine = self._build(update)
            await self._engine.start()
        elif update.policy_version != self._engine.version:
            try:
                await self._engine.update_weights(
                    update.tensors, update.policy_version, kv=self._kv, canary=update.canary
                )
            except ValueError as error:
                raise WeightSyncError(str(error)) from error
        held = await self._engine.fingerprint()
        check_fingerprint(update.fingerprint, held, update.policy_version)
        self._transport.answer("", 0.0)
        results, self._held = self._held, None
        if results:
            self._report("completed", *pack_results(results))

    def _report_loaded(self, error: str, verify_s: float) -> None:
        self._trainer.num_turns += 1
        version = self._transport.manifest["version"]
        report = {"version": version, "at": self._trainer.num_turns, "error": error, "verify_s": verify_s}
        self._report("weights_loaded", report)

    # ---- reports

    async def _send_heartbeats(self) -> None:
        """Report that this process runs: it bounds each wait for its workers itself."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._unfinished or self._held is not None:
                self._report("heartbeat", {})

    def _report(
        self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Send a report with the counters of the engine."""
        counters = {} if self._engine is None else counters_of(self._engine)
        self._trainer.send(kind, {**metadata, "counters": counters}, arrays)


def counters_of(engine: PrefillDecodeEngine) -> dict[str, float]:
    """Return what a run records of an engine with workers; see docs/metrics.md."""
    stats = engine.stats()
    return {
        "prompt_tokens_computed": stats.prompt_tokens_computed,
        "prompt_tokens_imported": stats.prompt_tokens_imported,
        "blocks_refused": stats.blocks_refused,
        "workers_lost": sum(engine.counts.lost.values()),
        "imported_fraction": stats.imported_fraction,
    }
