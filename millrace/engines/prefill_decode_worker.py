"""Prefill or decode worker, a process: one engine that streams its tokens.

Every worker can do everything: generate, compute a prompt for another worker and export its keys and values
(`prefill`), and import those of another one before it goes on with its samples (`submit` with a `transfer`).
A role is what the serving process sends it. `prefill_decode_handle.start_role` starts it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from millrace.engines.engine_worker import HEARTBEAT_S, add_samples, open_worker
from millrace.engines.kv_network import KvNetwork, KvNetworkError
from millrace.engines.prefill_decode_handle import ROLE_COMMANDS
from millrace.engines.wire import Channel, Frame
from millrace.inference.engine import PagedEngine
from millrace.inference.kv_blocks import KvImport
from millrace.inference.kv_transfer import KvLease
from millrace.inference.request import Request
from millrace.inference.results import joined
from millrace.inference.scheduler import Plan
from millrace.inference.shared_blocks import BlockMemoryError, KvManifest, MappedBlocks, SharedBlocks
from millrace.planner.engine_cost import EngineCost, step_load
from millrace.planner.step_drift import StepDrift
from millrace.processes.worker import WorkerChannel
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import pack_completions, unpack_requests
from millrace.transport.shared_memory import MappedWeights
from millrace.transport.weight_update import WeightReceiver, WeightSyncError
from millrace.types import Completion

# The blocks are copied at once; the lease only guards the copy.
LEASE_S = 60.0


def serve(channel: WorkerChannel, settings: Mapping[str, Any]) -> None:
    """Run an engine until the serving process closes the connection.

    The settings are those of `EngineSettings`, whose files are in `folder` until they are read, and the
    inherited descriptors `weights` and `slots`, and the coefficients of a `cost` model or None.
    """
    engine, connection = open_worker(channel, settings, ROLE_COMMANDS)
    cost = None if settings["cost"] is None else EngineCost(**settings["cost"])
    worker = PrefillDecodeWorker(engine, connection, settings["weights"], settings["slots"], cost=cost)
    worker.serve()


@dataclass(slots=True, eq=False)
class _Prefill:
    """A prompt that is computed for another worker, and those of its samples without a first token."""

    slot: int
    prompt: tuple[int, ...]
    missing: set[str]


@dataclass(slots=True, eq=False)
class _Arriving:
    """Samples whose blocks are fetched from another machine; `aborted` are those that end at once."""

    manifest: KvManifest
    families: list[list[GenerateRequest]]
    priority: int
    aborted: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [request.id for family in self.families for request in family]


class PrefillDecodeWorker:
    """An engine that executes the commands of its connection.

    Args:
        engine: has random weights until the first update.
        channel: to the serving process.
        weights: descriptor of the shared memory for weight updates.
        slots: descriptors of the shared memory of each transfer, by slot.
        cost: model of a step; if there is one, all reports have the drift of the steps from it.
        network: by which blocks travel, where the memory of the transfers is not that of the other workers.
        clock: monotonic time in seconds, for heartbeats.
    """

    def __init__(
        self,
        engine: PagedEngine,
        channel: Channel,
        weights: int,
        slots: Sequence[int],
        *,
        cost: EngineCost | None = None,
        network: KvNetwork | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._channel, self._clock = engine, channel, clock
        self._transport = MappedWeights(weights, self._report_loaded)
        self._shared = [SharedBlocks(os.dup(slot)) for slot in slots]
        self._mapped = [MappedBlocks(os.dup(slot)) for slot in slots]
        self._verified, self._last_message_s = False, 0.0
        self._cost, self._drift, self._warning = cost, StepDrift(), ""
        if cost is not None:
            engine.watch_steps(partial(self._add_step, cost))
        # Number of tokens that were reported, of each unfinished request.
        self._num_given: dict[str, int] = {}
        self._prefills: dict[str, _Prefill] = {}
        self._network = network
        self._arriving: dict[int, _Arriving] = {}
        # The pause that waits until no request runs.
        self._finishing: int | None = None
        self._handlers: dict[str, Callable[[Frame], None]] = {
            "submit": self._submit,
            "prefill": self._prefill,
            "abort": self._abort,
            "update_weights": self._update_weights,
            "pause": self._pause,
            "resume": self._resume,
            "fingerprint": self._fingerprint,
            "ping": lambda frame: self._answer(frame, None),
        }

    def _add_step(self, cost: EngineCost, plan: Plan, seconds: float) -> None:
        predicted_s = cost.seconds(step_load(plan.count_B, plan.start_B))
        self._warning = self._drift.add(seconds, predicted_s) or self._warning

    def serve(self) -> None:
        """Execute commands and engine steps until the serving process closes the connection."""
        self._send("ready")
        also = () if self._network is None else (self._network,)
        while not self._channel.ended:
            for frame in self._channel.wait(0 if self._busy else None, also):
                self._handlers[frame.kind](frame)
            self._take_arrived()
            if self._finishing is not None and not self._engine.stats().num_running:
                self._engine.pause("keep")
                self._send("answered", {"number": self._finishing, "error": "", "result": None})
                self._finishing = None
            if self._busy:
                self._step()
        for shared, mapped in zip(self._shared, self._mapped, strict=True):
            shared.close()
            mapped.close()
        if self._network is not None:
            self._network.close()

    @property
    def _busy(self) -> bool:
        return self._verified and self._engine.has_work

    # ---- commands

    def _submit(self, frame: Frame) -> None:
        families, priority = frame.unpack(unpack_requests), frame.metadata["priority"]
        if (transfer := frame.metadata["transfer"]) is not None:
            slot, manifest = transfer["slot"], transfer["manifest"]
            if self._network is not None:
                self._fetch(self._network, slot, _Arriving(manifest, families, priority))
                return
            self._import(slot, manifest)
        for requests in families:
            self._add(requests, priority)

    def _fetch(self, network: KvNetwork, slot: int, arriving: _Arriving) -> None:
        manifest = arriving.manifest
        num_bytes = len(manifest["checksums"]) * int(manifest["layout"]["block_bytes"])
        self._arriving[slot] = arriving
        try:
            network.fetch(slot, manifest["sender"], self._shared[slot].memory(num_bytes))
        except BlockMemoryError as error:
            self._arrived(slot, str(error))

    def _take_arrived(self) -> None:
        if self._network is not None and self._arriving:
            for slot, problem in self._network.ended():
                self._arrived(slot, problem)

    def _arrived(self, slot: int, problem: str) -> None:
        """Import the blocks that have come, or none, and add the samples that waited for them."""
        arriving = self._arriving.pop(slot)
        if problem:
            num_blocks = len(arriving.manifest["digests"])
            self._report_import(slot, KvImport(num_blocks, 0, 0, f"missing: {problem}"))
        else:
            self._import(slot, arriving.manifest)
        for requests in arriving.families:
            self._add(requests, arriving.priority)
        if arriving.aborted:
            self._abort(Frame("abort", {"ids": arriving.aborted}, {}))

    def _prefill(self, frame: Frame) -> None:
        for requests in frame.unpack(unpack_requests):
            if self._add(requests, frame.metadata["priority"]):
                ids = {request.id for request in requests}
                prefill = _Prefill(frame.metadata["slot"], requests[0].prompt, ids)
                self._prefills.update(dict.fromkeys(ids, prefill))

    def _add(self, requests: Sequence[GenerateRequest], priority: int) -> bool:
        """Add the samples of one prompt to the engine; report why if it refuses them."""
        ids = [request.id for request in requests]
        if reason := add_samples(self._engine, requests, priority=priority):
            self._send("refused", {"ids": ids, "reason": reason})
            return False
        known = [request.partial_output for request in requests]
        given = [0 if one is None else len(one.token_ids) for one in known]
        self._num_given.update(zip(ids, given, strict=True))
        return True

    def _import(self, slot: int, manifest: KvManifest) -> None:
        try:
            prefix, blocks = self._mapped[slot].read(manifest)
            with warnings.catch_warnings():
                # The serving process raises the alarm, since it sees prefixes that never came, too.
                warnings.simplefilter("ignore")
                done = self._engine.import_prefix(prefix, blocks)
        except BlockMemoryError as error:
            num_blocks = len(manifest["digests"])
            done = KvImport(num_blocks, 0, num_blocks, f"memory: {error}")
        self._report_import(slot, done)

    def _report_import(self, slot: int, done: KvImport) -> None:
        self._send("imported", {"slot": slot, "done": asdict(done)})

    def _abort(self, frame: Frame) -> None:
        for arriving in self._arriving.values():
            arriving.aborted += set(arriving.ids).intersection(frame.metadata["ids"])
        found = [(id, self._engine.abort(id)) for id in frame.metadata["ids"]]
        self._report([], [(id, completion) for id, completion in found if completion is not None])

    def _update_weights(self, frame: Frame) -> None:
        self._transport.expect(frame.metadata["manifest"])
        update = partial(self._engine.update_weights, kv=frame.metadata["kv"])
        self._verified = False
        # The reply holds the error; nothing is generated until an update is verified.
        with suppress(WeightSyncError):
            receiver = WeightReceiver(
                self._transport, update, self._engine.fingerprint, self._engine.logprobs_of
            )
            receiver.update_weights()
            self._verified = True

    def _report_loaded(self, error: str, verify_s: float) -> None:
        self._send("weights_loaded", {"version": self._transport.manifest["version"], "error": error})

    def _pause(self, frame: Frame) -> None:
        if frame.metadata["mode"] == "finish":
            self._engine.stop_admitting()
            self._finishing = frame.metadata["number"]
            return
        self._engine.pause(frame.metadata["mode"])
        if frame.metadata["mode"] == "abort":
            ids = [*self._num_given, *(id for one in self._arriving.values() for id in one.ids)]
            self._abort(Frame("abort", {"ids": ids}, {}))
        self._answer(frame, None)

    def _resume(self, frame: Frame) -> None:
        if self._finishing is not None:
            why = "the engine was resumed before its running requests had ended"
            self._send("answered", {"number": self._finishing, "error": why, "result": None})
            self._finishing = None
        self._engine.resume()
        self._answer(frame, None)

    def _fingerprint(self, frame: Frame) -> None:
        self._answer(frame, self._engine.fingerprint())

    def _answer(self, frame: Frame, result: Any) -> None:
        self._send("answered", {"number": frame.metadata["number"], "error": "", "result": result})

    # ---- steps

    def _step(self) -> None:
        pieces: list[tuple[str, Completion]] = []
        ended: list[tuple[str, Completion]] = []
        texts: dict[tuple[int, ...], str] = {}
        for request in self._engine.step():
            if request.finish_reason is not None:
                ended.append((request.id, self._engine.completion(request, texts)))
            elif request.id in self._prefills:
                # Another worker goes on behind its first token.
                first = self._engine.abort(request.id)
                assert first is not None
                pieces.append((request.id, first))
            else:
                pieces.append((request.id, self._piece(request)))
        self._report(pieces, ended)
        if self._clock() > self._last_message_s + HEARTBEAT_S and not self._channel.unsent:
            self._send("heartbeat")

    def _piece(self, request: Request) -> Completion:
        """Return the tokens of a running request since the last report."""
        first = self._num_given[request.id]
        token_L, logprob_L, version_L = self._engine.generated(request, first)
        self._num_given[request.id] += len(token_L)
        return Completion(
            token_ids=tuple(token_L.tolist()),
            logprobs=logprob_L,
            versions=version_L,
            finish_reason="abort",
            text="",
            support=joined(request.supports[first:]),
        )

    def _report(
        self, pieces: Sequence[tuple[str, Completion]], ended: Sequence[tuple[str, Completion]]
    ) -> None:
        """Report new tokens of samples, whole completions of `ended` ones, and prompts that are computed."""
        if pieces or ended:
            reported = [*pieces, *ended]
            fields, columns = pack_completions([completion for _, completion in reported])
            ids = [id for id, _ in reported]
            self._send("pieces", {"ids": ids, "num_ended": len(ended), **fields}, columns)
        for id, _ in ended:
            self._num_given.pop(id, None)
        for id, _ in (*pieces, *ended):
            if (prefill := self._prefills.pop(id, None)) is None:
                continue
            self._num_given.pop(id, None)
            prefill.missing.discard(id)
            if not prefill.missing:
                self._export(prefill)

    def _export(self, prefill: _Prefill) -> None:
        """Copy the blocks of a prompt into the memory of its transfer, and report where they are."""
        manifest, reason = None, "no whole block of the prompt is in the cache, or leases have no room"
        lease = self._engine.export_prefix(prefill.prompt, lease_s=LEASE_S)
        if lease is not None:
            with lease:
                try:
                    manifest, reason = self._offered(prefill.slot, lease), ""
                except (BlockMemoryError, KvNetworkError) as error:
                    reason = str(error)
        self._send("prefilled", {"slot": prefill.slot, "manifest": manifest, "reason": reason})

    def _offered(self, slot: int, lease: KvLease) -> KvManifest:
        """Copy the blocks of a lease; return where they are."""
        shared = self._shared[slot]
        manifest = shared.write(lease)
        if self._network is not None:
            num_bytes = len(manifest["checksums"]) * lease.prefix.layout.block_bytes
            manifest["sender"] = self._network.offer(shared.memory(num_bytes))
        return manifest

    def _send(
        self,
        kind: str,
        metadata: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._last_message_s = self._clock()
        more: dict[str, Any] = {"stats": asdict(self._engine.stats())}
        if self._cost is not None:
            more |= {"drift": self._drift.factor, "warning": self._warning}
            self._warning = ""
        self._channel.send(kind, {**(metadata or {}), **more}, arrays)
