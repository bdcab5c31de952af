"""Worker processes behind the methods of `AsyncEngine`: prefill workers compute prompts for decode workers.

All state belongs to one event loop, which also reads the workers' sockets; only the end of a process is
awaited in a thread. A family is the samples of one prompt; one worker at a time owns it. A transfer is a
family on its way from a prefill to a decode worker; it holds a slot, which is shared memory for its blocks,
from the first command to the end of the import. A worker that is lost costs no tokens: once its process has
ended, another one goes on behind those that were reported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from millrace.engines.prefill_decode_handle import ROLES, Role, RoleHandle, RoleStarter
from millrace.engines.prefill_decode_route import RoutePolicy
from millrace.engines.wire import Frame, FrameError
from millrace.inference.async_engine import EngineClosed, EngineFull, Stream, TokenChunk, request_ids
from millrace.inference.engine import EngineStats, KvPolicy, PauseMode, Tag
from millrace.inference.kv_blocks import KvImport, TransferCounter
from millrace.planner.placement import Here
from millrace.planner.request_tracker import RequestTracker, WorkerFacts
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import pack_requests, unpack_completions
from millrace.transport.canary import Canary
from millrace.transport.shared_memory import SharedWeights, WeightManifest
from millrace.types import Completion, SamplingParams, Support

LOG = logging.getLogger("millrace.engines.prefill_decode_engine")
# Transfers of one prefill worker at a time; further prompts are computed where their tokens are generated.
TRANSFERS_PER_WORKER = 4
# Startup timeout: import torch, build the model, load compiled kernels.
START_S = 300.0
# Timeout for a message of a busy worker, and for its reply to a command; a long prompt is one step.
REPLY_S = 300.0
LOAD_S = 600.0
WATCH_S = 1.0
# Workers of a role that may be lost one after the other without a completed sample or prompt.
MAX_RESTARTS = 3
# Counters of `EngineStats`; the other fields are of the moment.
COUNTERS = (
    "prefix_queries",
    "prefix_hits",
    "num_preemptions",
    "generation_tokens",
    "prompt_tokens_computed",
    "prompt_tokens_imported",
)
IDLE = EngineStats(0, 0, 0.0, 0, 0, 0, 0, 0)


class WorkerLost(RuntimeError):
    """A worker process was lost while a reply of it was due; the message names worker and reason."""


class WorkerFailed(RuntimeError):
    """A worker process could not be started; the message names worker and reason."""


@dataclass(slots=True, eq=False)
class _Sample:
    """An unfinished sample, its stream, and the tokens that were reported of it."""

    stream: Stream
    params: SamplingParams
    family: _Family
    known: list[Completion] = field(default_factory=list)
    aborted: bool = False

    @property
    def num_known(self) -> int:
        return sum(len(piece.token_ids) for piece in self.known)

    def partial_output(self, text: str = "") -> Completion | None:
        """Return what is known of it as one completion; None without tokens."""
        if not self.known:
            return None
        supports = [piece.support for piece in self.known if piece.support is not None]
        return Completion(
            token_ids=tuple(token for piece in self.known for token in piece.token_ids),
            logprobs=np.concatenate([piece.logprobs for piece in self.known]),
            versions=np.concatenate([piece.versions for piece in self.known]),
            finish_reason="abort",
            text=text,
            support=Support.joined(supports) if supports else None,
        )


@dataclass(slots=True, eq=False)
class _Family:
    """The unfinished samples of one prompt, by id, and the worker that has them."""

    prompt: tuple[int, ...]
    priority: int
    samples: dict[str, _Sample] = field(default_factory=dict)
    worker: _Worker | None = None


@dataclass(slots=True, eq=False)
class _Transfer:
    """A family on its way.

    Attributes:
        slot: which no other transfer has meanwhile.
        prefill: the worker where it began, whose bound it counts for.
        holder: the worker that may write or read the slot now.
        decode: the worker that is to go on, if that was decided already.
        num_exported: blocks in the memory of the slot, once they are exported.
    """

    slot: int
    family: _Family
    prefill: _Worker
    holder: _Worker
    decode: _Worker | None = None
    num_exported: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker process.

    Attributes:
        started, loaded: futures of its start, and of its last weights.
        waits: futures of other replies that are due, by number.
        ready: whether it has verified weights and takes requests.
        ending: result of `_kill`, once it is lost; then nothing more is sent to it or read of it.
        lost: message of its loss, once the end of its process has given the reason.
        families: those that it owns.
        watched: registered descriptors, with their events of `select.poll`.
        num_completed: samples that ended at it, and prompts that it computed for others.
        num_failed: consecutive predecessors that were lost before they had completed one.
        drift: factor of actual over predicted seconds of its steps, 1 without a cost model.
    """

    name: str
    role: Role
    handle: RoleHandle
    last_message_s: float
    started: asyncio.Future[None]
    lost: asyncio.Future[str]
    num_failed: int = 0
    loaded: asyncio.Future[None] | None = None
    ready: bool = False
    ending: asyncio.Future[str] | None = None
    families: set[_Family] = field(default_factory=set)
    waits: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    watched: dict[int, int] = field(default_factory=dict)
    num_completed: int = 0
    drift: float = 1.0
    stats: EngineStats = IDLE

    @property
    def num_samples(self) -> int:
        return sum(len(family.samples) for family in self.families)


@dataclass(slots=True)
class RoleCounts:
    """Counters of an engine with roles, since it was started.

    `complete` transfers brought all blocks that the decode worker did not have, `partial` ones a part, and
    `failed` ones none; the rest of the prompt was computed again. `apart` and `collocated` are prompts.
    """

    complete: int = 0
    partial: int = 0
    failed: int = 0
    apart: int = 0
    collocated: int = 0
    lost: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))


class PrefillDecodeEngine:
    """Engines in worker processes, an asynchronous context manager; see `AsyncEngine` for the methods.

    Args:
        start: starts a worker.
        tensors: the weights; the shared memory keeps a copy for workers that replace lost ones.
        check: raises ValueError for a request that no worker can serve.
        decode: converts tokens to text; called in the event loop.
        block_size: tokens of a block of the workers' engines.
        num_workers: of each role; without prefill workers all prompts are computed where their tokens are.
        route: which prompts are computed apart.
        max_samples: unfinished samples that are accepted.
        tracker: places prompts by a cost model, in place of `route`; then any worker may do either part.
        capacity: tokens of the KV cache of a worker, for the tracker.
        version: policy version of the weights.
        canary: of a trainer, which every worker verifies; None for no check.
        reply_s: timeout for a message of a busy worker.
        clock: monotonic time in seconds.
        closing: called when the engine is closed, to end starts of workers that wait.

    Raises:
        WeightSyncError: there is no memory for the weights.
    """

    def __init__(
        self,
        start: RoleStarter,
        tensors: Iterable[tuple[str, Tensor]],
        check: Callable[[Sequence[int], SamplingParams], None],
        decode: Callable[[Sequence[int]], str],
        *,
        block_size: int,
        num_workers: dict[Role, int],
        route: RoutePolicy,
        max_samples: int,
        tracker: RequestTracker | None = None,
        capacity: int = 0,
        version: int = 0,
        canary: Canary | None = None,
        reply_s: float = REPLY_S,
        clock: Callable[[], float] = time.monotonic,
        closing: Callable[[], None] | None = None,
    ) -> None:
        self._closing = closing
        self._start_process, self._check, self._decode = start, check, decode
        self._block_size, self._num_workers, self._route = block_size, num_workers, route
        self._max_samples, self._reply_s, self._clock = max_samples, reply_s, clock
        self._tracker, self._capacity = tracker, capacity
        self.version = version
        self.counts = RoleCounts()
        self._weights = SharedWeights()
        manifest = self._weights.write(tensors, version, _maker(canary))
        self._places = manifest["tensors"]
        # Of the weights in the memory; None while they are incomplete.
        self._manifest: WeightManifest | None = manifest
        num_senders = num_workers["prefill"] if tracker is None else sum(num_workers.values())
        self._slots = [os.memfd_create("millrace-kv") for _ in range(TRANSFERS_PER_WORKER * num_senders)]
        self._workers: list[_Worker] = []
        self._live: dict[str, _Sample] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._counter = TransferCounter()
        self._past = IDLE  # counters of lost workers
        self._prompt_tokens = self._num_submitted = self._num_started = self._number = 0
        self._paused = False
        self._closed: str | None = "it was not started; use `async with`"
        self._last_loss = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._updating = asyncio.Lock()

    async def __aenter__(self) -> PrefillDecodeEngine:
        if not self._workers:
            await self.start()
        return self

    async def start(self) -> None:
        """Start the workers, as `__aenter__` does otherwise; WorkerFailed if one does not start."""
        self._closed = None
        roles = [role for role in ROLES for _ in range(self._num_workers[role])]
        starts = [asyncio.ensure_future(self._start_worker(role)) for role in roles]
        try:
            await asyncio.gather(*starts)
        except (WorkerLost, OSError) as error:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close("a worker did not start")
            raise WorkerFailed(str(error)) from None
        self._spawn(self._watch())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close("it was closed")

    async def close(self, reason: str) -> None:
        """End all requests with EngineClosed, kill the workers and release the memory."""
        if self._closed is not None:
            return
        self._closed = reason
        if self._closing is not None:
            self._closing()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sample in list(self._live.values()):
            self._end(sample, EngineClosed(f"the engine stopped: {reason}"))
        for worker in self._workers:
            self._abandon(worker, reason)
            worker.lost.set_result(reason)
        endings = [worker.ending for worker in self._workers if worker.ending is not None]
        self._workers.clear()
        await asyncio.gather(*endings)
        self._weights.close()
        for slot in self._slots:
            os.close(slot)

    # ---- requests

    def submit_siblings(
        self,
        prompt: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        ids: Sequence[str] | None = None,
        partial_outputs: Sequence[Completion | None] | None = None,
        priority: int = 0,
    ) -> list[Stream]:
        """Queue samples of one prompt; see `AsyncEngine.submit_siblings`, and `PagedEngine.add`.

        Their streams have the tokens behind `partial_outputs`, and their completions all.
        """
        for wanted in params:
            self._check(prompt, wanted)
        self._require_open()
        names = request_ids(ids, len(params), self._num_submitted + 1, self._live)
        if len(self._live) + len(params) > self._max_samples:
            raise EngineFull(
                f"{len(self._live)} samples are unfinished; the workers take at most {self._max_samples}"
            )
        if not self._ready():
            raise EngineClosed(self._no_worker())
        self._num_submitted += 1
        self._prompt_tokens += len(prompt) * len(params)
        family, loop = _Family(tuple(prompt), priority), asyncio.get_running_loop()
        family.samples = {
            name: _Sample(Stream(name, loop), wanted, family)
            for name, wanted in zip(names, params, strict=True)
        }
        for sample, partial in zip(
            family.samples.values(), partial_outputs or (), strict=bool(partial_outputs)
        ):
            if partial is not None and partial.token_ids:
                sample.known.append(partial)
        self._live.update(family.samples)
        streams = [sample.stream for sample in family.samples.values()]
        self._place(family)
        return streams

    async def abort(self, id: str) -> Completion | None:
        """Abort a request and return its partial completion; None if no unfinished request has this id."""
        self._require_open()
        if (sample := self._live.get(id)) is None:
            return None
        sample.aborted = True
        assert sample.family.worker is not None
        self._send(sample.family.worker, "abort", {"ids": [id]})
        # The deadline of its worker's messages bounds the wait.
        return await sample.stream.completion()

    def _ready(self, role: Role | None = None) -> list[_Worker]:
        return [one for one in self._workers if one.ready and (role is None or one.role == role)]

    def _no_worker(self) -> str:
        return f"no worker is left to compute: {self._last_loss}; ask again later"

    def _place(self, family: _Family) -> None:
        """Send a family to a worker: to a prefill worker first if it is to be computed apart."""
        for sample in [sample for sample in family.samples.values() if sample.aborted]:
            self._end_aborted(sample)
        if not family.samples:
            return
        if not self._ready():
            for sample in list(family.samples.values()):
                self._end(sample, EngineClosed(self._no_worker()))
            return
        worker, prefill = (
            self._by_role(family) if self._tracker is None else self._by_cost(family, self._tracker)
        )
        if prefill is None:
            self.counts.collocated += 1
            self._submit(family, worker, None)
            return
        self.counts.apart += 1
        slot = self._free_slots()[0]
        decode = None if self._tracker is None else worker
        self._transfers[slot] = _Transfer(slot, family, prefill, prefill, decode)
        self._give(family, prefill, "prefill", {"priority": family.priority, "slot": slot})

    def _by_role(self, family: _Family) -> tuple[_Worker, _Worker | None]:
        """Return the worker that generates, and the one that computes the prompt if it is another one."""
        worker = min(self._ready("decode") or self._ready("prefill"), key=lambda one: one.num_samples)
        return worker, self._prefill_worker(family) if worker.role == "decode" else None

    def _by_cost(self, family: _Family, tracker: RequestTracker) -> tuple[_Worker, _Worker | None]:
        """Return the same by the cost model."""
        workers = {one.name: one for one in self._ready()}
        begun, is_free = Counter(one.prefill for one in self._transfers.values()), bool(self._free_slots())
        facts = [
            WorkerFacts(name, self._capacity, one.drift, is_free and begun[one] < TRANSFERS_PER_WORKER)
            for name, one in workers.items()
        ]
        found = tracker.place(
            list(family.samples),
            family.prompt,
            [sample.params.max_tokens for sample in family.samples.values()],
            facts,
            self._clock(),
            can_split=_can_split(family),
        )
        LOG.debug("a prompt of %d tokens: %s", len(family.prompt), found)
        if isinstance(found, Here):
            return workers[found.engine], None
        return workers[found.decode], workers[found.prefill]

    def _prefill_worker(self, family: _Family) -> _Worker | None:
        """Return the worker that is to compute the prompt; None if the decode worker is."""
        if not self._route.is_apart(len(family.prompt), self._block_size):
            return None
        if not _can_split(family):
            return None
        begun = Counter(one.prefill for one in self._transfers.values())
        free = [one for one in self._ready("prefill") if begun[one] < TRANSFERS_PER_WORKER]
        # Transfers that began at a lost worker may still hold slots.
        return min(free, key=begun.__getitem__) if free and self._free_slots() else None

    def _free_slots(self) -> list[int]:
        return [slot for slot in range(len(self._slots)) if slot not in self._transfers]

    def _submit(self, family: _Family, worker: _Worker, transfer: dict[str, Any] | None) -> None:
        self._give(family, worker, "submit", {"priority": family.priority, "transfer": transfer})

    def _give(self, family: _Family, worker: _Worker, kind: str, more: dict[str, Any]) -> None:
        family.worker = worker
        if not worker.families:
            worker.last_message_s = self._clock()
        worker.families.add(family)
        requests = [
            GenerateRequest(id, family.prompt, sample.params, sample.partial_output())
            for id, sample in family.samples.items()
        ]
        fields, arrays = pack_requests(requests)
        self._send(worker, kind, {**fields, **more}, arrays)

    def _end_aborted(self, sample: _Sample) -> None:
        """End an aborted sample that no worker has, with the tokens so far."""
        empty = np.empty(0, np.float32)
        known = sample.partial_output() or Completion((), empty, empty.astype(np.int32), "abort", "")
        self._end(sample, replace(known, text=self._decode(known.token_ids)))

    def _end(self, sample: _Sample, end: Completion | Exception) -> None:
        family = sample.family
        del self._live[sample.stream.id], family.samples[sample.stream.id]
        if not family.samples and family.worker is not None:
            family.worker.families.discard(family)
        if self._tracker is not None:
            reason = end.finish_reason if isinstance(end, Completion) else ""
            self._tracker.ended(sample.stream.id, truncated={"stop": False, "length": True}.get(reason))
        sample.stream.put(end)

    # ---- reports

    def _readable(self, worker: _Worker) -> None:
        try:
            frames = worker.handle.receive()
            for frame in frames:
                if worker.ending is not None:
                    return
                worker.last_message_s = self._clock()
                self._note(worker, frame)
                self._handle(worker, frame)
        except FrameError as error:
            self._lose(worker, str(error))
            return
        if worker.handle.ended:
            self._lose(worker)
        elif worker.ending is None:
            self._register(worker)

    def _note(self, worker: _Worker, frame: Frame) -> None:
        """Take what all reports have."""
        if "stats" in frame.metadata:
            worker.stats = EngineStats(**frame.metadata["stats"])
        worker.drift = frame.metadata.get("drift", 1.0)
        if warning := frame.metadata.get("warning"):
            LOG.warning(f"{worker.name}: {warning}")

    def _handle(self, worker: _Worker, frame: Frame) -> None:
        match frame.kind:
            case "ready":
                worker.started.set_result(None)
            case "pieces":
                self._take_pieces(worker, frame)
            case "prefilled":
                self._prefilled(worker, frame)
            case "imported":
                self._imported(frame)
            case "refused":
                self._refused(worker, frame)
            case "weights_loaded" if worker.loaded is not None and not worker.loaded.done():
                if frame.metadata["error"]:
                    self._lose(worker, f"it could not load the weights: {frame.metadata['error']}")
                else:
                    worker.loaded.set_result(None)
            case "answered":
                wait = worker.waits.pop(frame.metadata["number"], None)
                if wait is None or wait.done():
                    return
                if frame.metadata["error"]:
                    wait.set_exception(RuntimeError(frame.metadata["error"]))
                else:
                    wait.set_result(frame.metadata["result"])

    def _take_pieces(self, worker: _Worker, frame: Frame) -> None:
        fields = {"completions": frame.metadata["completions"]}
        ids = frame.metadata["ids"]
        first_ended = len(ids) - frame.metadata["num_ended"]
        for place, (id, piece) in enumerate(zip(ids, unpack_completions(fields, frame.arrays), strict=True)):
            sample = self._live.get(id)
            if sample is None or sample.family.worker is not worker:
                continue
            if self._tracker is not None:
                num_new = len(piece.token_ids) - (sample.num_known if place >= first_ended else 0)
                self._tracker.sampled(id, num_new, self._clock())
            if place < first_ended:
                sample.known.append(piece)
                sample.stream.put(TokenChunk.behind(0, piece))
                continue
            if len(piece.token_ids) > sample.num_known:
                sample.stream.put(TokenChunk.behind(sample.num_known, piece))
            worker.num_completed += 1
            self._end(sample, piece)

    def _prefilled(self, worker: _Worker, frame: Frame) -> None:
        """Send a family whose prompt is computed to a decode worker, with its blocks."""
        transfer = self._transfers[frame.metadata["slot"]]
        family, manifest = transfer.family, frame.metadata["manifest"]
        worker.families.discard(family)
        worker.num_completed += 1
        for sample in [sample for sample in family.samples.values() if sample.aborted]:
            self._end_aborted(sample)
        if not family.samples:
            del self._transfers[transfer.slot]
            return
        workers = self._ready("decode" if self._tracker is None else None)
        if manifest is None or not workers:
            why = frame.metadata["reason"] or "no decode worker is left"
            self._count(transfer, KvImport(0, 0, 0, f"missing: {why}"))
            del self._transfers[transfer.slot]
            self._place(family)
            return
        transfer.num_exported = len(manifest["digests"])
        planned = transfer.decode
        if planned is not None and planned.ready:
            transfer.holder = planned
        else:
            transfer.holder = min(workers, key=lambda one: one.num_samples)
            if self._tracker is not None:
                self._tracker.moved(family.samples, transfer.holder.name)
        self._submit(family, transfer.holder, {"slot": transfer.slot, "manifest": manifest})

    def _imported(self, frame: Frame) -> None:
        transfer = self._transfers[frame.metadata["slot"]]
        self._count(transfer, KvImport(**frame.metadata["done"]))
        del self._transfers[transfer.slot]

    def _refused(self, worker: _Worker, frame: Frame) -> None:
        found = [sample for id in frame.metadata["ids"] if (sample := self._live.get(id)) is not None]
        families = {sample.family for sample in found}
        for transfer in [one for one in self._transfers.values() if one.family in families]:
            # A decode worker has reported the import before.
            del self._transfers[transfer.slot]
        for sample in found:
            self._end(sample, ValueError(frame.metadata["reason"]))

    def _count(self, transfer: _Transfer, done: KvImport) -> None:
        """Count what became of a transfer, against all whole blocks of its prompt; warn of a silent loss."""
        whole = (len(transfer.family.prompt) - 1) // self._block_size
        num_here = transfer.num_exported - done.num_expected
        expected = max(done.num_imported, whole - num_here)
        why = done.reason or f"missing: only {transfer.num_exported} of {whole} blocks were exported"
        full = done.num_imported == expected
        warning = self._counter.add(replace(done, num_expected=expected, reason="" if full else why))
        if full:
            self.counts.complete += 1
        elif done.num_imported:
            self.counts.partial += 1
        else:
            self.counts.failed += 1
        if warning:
            LOG.warning(warning)

    # ---- control

    async def respond(self) -> None:
        """Return once every worker has handled a command; EngineClosed if none is left."""
        await self._call_all("ping", self._reply_s)

    async def pause(self, mode: PauseMode, *, timeout_s: float = 600.0) -> None:
        """Stop computing until `resume`; see `AsyncEngine.pause`."""
        self._require_open()
        self._paused = True
        if mode == "abort":
            for sample in self._live.values():
                sample.aborted = True  # some may be between two workers
        if mode != "finish":
            await self._call_all("pause", self._reply_s, mode=mode)
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._call_all("pause", timeout_s + self._reply_s, mode=mode)
        except TimeoutError:
            num = self.stats().num_running
            await self.resume()
            raise TimeoutError(
                f"pause(finish) waited {timeout_s:g} s for {num} running requests to end; they go on"
            ) from None

    async def resume(self) -> None:
        """End a `pause`: admit and compute requests again."""
        self._paused = False
        for worker in self._workers:
            worker.last_message_s = self._clock()
        await self._call_all("resume", self._reply_s)

    async def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        policy_version: int,
        *,
        kv: KvPolicy = "recompute",
        canary: Canary | None = None,
    ) -> None:
        """Replace every weight of every worker, and return once all have verified them, and the canary.

        A worker that does not is lost.

        Raises:
            ValueError: the version is not above the current one, which tells blocks in flight apart; or a
                weight is missing, unknown or given twice, or has another shape or dtype. Nothing is changed.
            EngineClosed: no worker is left.
        """
        self._require_open()
        sent = list(tensors)
        async with self._updating:
            self._check_weights(sent, policy_version)
            self._manifest = None
            manifest = await asyncio.to_thread(self._weights.write, sent, policy_version, _maker(canary))
            self._manifest, self.version = manifest, policy_version
            # One that is lost meanwhile is replaced by one with these weights.
            loads = [self._load(worker, manifest, kv) for worker in self._ready()]
            await asyncio.gather(*loads, return_exceptions=True)
            if not self._ready():
                raise EngineClosed(self._no_worker())

    async def fingerprint(self) -> dict[str, str]:
        """Return a checksum of each weight, which all workers have; RuntimeError if they do not agree."""
        found = await self._call_all("fingerprint", self._reply_s)
        first: dict[str, str] = found[0]
        if any(one != first for one in found):
            raise RuntimeError("the workers hold different weights; update them with a higher version")
        return first

    async def sleep(self, tags: Collection[Tag]) -> None:
        """Refuse: the shared memory keeps the weights for workers that replace lost ones. RuntimeError."""
        raise RuntimeError(
            "a server with --prefill and --decode does not sleep; serve the model without them, or end it"
        )

    async def wake(self, tags: Collection[Tag]) -> None:
        """Refuse; see `sleep`. RuntimeError."""
        raise RuntimeError("a server with --prefill and --decode does not sleep, so there is nothing to wake")

    def stats(self) -> EngineStats:
        """Return the load and the counters of all workers, those of lost ones included."""
        each = [worker.stats for worker in self._workers]
        return EngineStats(
            num_running=sum(one.num_running for one in each),
            num_waiting=sum(one.num_waiting for one in each),
            kv_usage=sum(one.kv_usage for one in each) / max(1, len(each)),
            prompt_tokens=self._prompt_tokens,
            blocks_refused=self._counter.num_refused,
            leased_blocks=sum(one.leased_blocks for one in each),
            imported_fraction=self._counter.fraction,
            **{name: sum(getattr(one, name) for one in (self._past, *each)) for name in COUNTERS},
        )

    def drifts(self) -> dict[str, float]:
        """Return the factor of actual over predicted seconds of each worker's steps, with a cost model."""
        return {} if self._tracker is None else {worker.name: worker.drift for worker in self._ready()}

    def num_ready(self, role: Role) -> int:
        """Return the number of workers of a role that take requests."""
        return len(self._ready(role))

    async def _call_all(self, kind: str, timeout_s: float, **metadata: Any) -> list[Any]:
        """Return the results of a command of all workers; EngineClosed if none is left."""
        self._require_open()
        calls = [self._call(worker, kind, timeout_s, metadata) for worker in self._ready()]
        found = await asyncio.gather(*calls, return_exceptions=True)
        results = [one for one in found if not isinstance(one, WorkerLost)]
        if not results:
            raise EngineClosed(self._no_worker())
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return results

    async def _call(self, worker: _Worker, kind: str, timeout_s: float, metadata: dict[str, Any]) -> Any:
        self._number += 1
        number, wait = self._number, asyncio.get_running_loop().create_future()
        worker.waits[number] = wait
        self._send(worker, kind, {"number": number, **metadata})
        try:
            return await self._within(worker, wait, timeout_s, f"to answer {kind}")
        finally:
            worker.waits.pop(number, None)

    async def _within(self, worker: _Worker, wait: asyncio.Future[Any], timeout_s: float, what: str) -> Any:
        """Wait for a reply; a worker that is late is lost. WorkerLost if it is."""
        await asyncio.wait([wait, worker.lost], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not wait.done():
            self._lose(worker, f"waited {timeout_s:g} s for it {what}")
            raise WorkerLost(await asyncio.shield(worker.lost))
        return wait.result()

    def _check_weights(self, sent: Sequence[tuple[str, Tensor]], version: int) -> None:
        if version <= self.version:
            raise ValueError(
                f"version {version} is not above {self.version}, the current one; with --prefill and "
                "--decode versions must rise, since they tell blocks in flight from those of older weights"
            )
        held, given = self._places, set[str]()
        for name, tensor in sent:
            if name not in held:
                raise ValueError(f"weight {name} is not one of the engine's")
            if name in given:
                raise ValueError(f"weight {name} was sent twice")
            given.add(name)
            theirs = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            if theirs != tuple(held[name][:2]):
                raise ValueError(f"weight {name} was sent as {theirs}; the engine holds {held[name][:2]}")
        if missing := held.keys() - given:
            raise ValueError(f"{len(missing)} weights were not sent, the first being {min(missing)}")

    def _require_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(f"the engine takes no requests: {self._closed}")

    # ---- workers

    async def _start_worker(self, role: Role, num_failed: int = 0) -> None:
        """Start a worker and give it the weights; WorkerLost if it does not come up."""
        name = f"{role}-{self._num_started}"
        self._num_started += 1
        handle = await self._start_handle(name)
        loop = asyncio.get_running_loop()
        started, lost = loop.create_future(), loop.create_future()
        worker = _Worker(name, role, handle, self._clock(), started, lost, num_failed)
        self._workers.append(worker)
        self._register(worker)
        await self._within(worker, started, START_S, "to start")
        async with self._updating:
            if self._manifest is None:
                self._lose(worker, "the shared memory has no weights since an update failed; send one")
                raise WorkerLost(await asyncio.shield(worker.lost))
            await self._load(worker, self._manifest, "recompute")
            paused = False
            while paused != self._paused:  # it may change meanwhile
                paused = not paused
                kind = "pause" if paused else "resume"
                await self._call(worker, kind, self._reply_s, {"mode": "keep"})
        if worker.ending is not None:
            raise WorkerLost(await asyncio.shield(worker.lost))
        worker.ready = True

    async def _start_handle(self, name: str) -> RoleHandle:
        start = asyncio.ensure_future(
            asyncio.to_thread(self._start_process, name, self._weights.handle, self._slots)
        )
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            with suppress(OSError):
                (await start).kill()
            raise

    async def _load(self, worker: _Worker, manifest: WeightManifest, kv: KvPolicy) -> None:
        worker.loaded = asyncio.get_running_loop().create_future()
        self._send(worker, "update_weights", {"manifest": manifest, "kv": kv})
        await self._within(worker, worker.loaded, LOAD_S, f"to load version {manifest['version']}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self.check_deadlines()

    def check_deadlines(self) -> None:
        """Lose the workers that have requests and sent no message in time."""
        now_s = self._clock()
        for worker in list(self._workers):
            silent = now_s > worker.last_message_s + self._reply_s
            if worker.ready and worker.families and silent and not self._paused:
                num = worker.num_samples
                self._lose(worker, f"it had {num} samples and sent no message for {self._reply_s:g} s")

    def _lose(self, worker: _Worker, reason: str = "") -> None:
        """Use a worker no more, and replace it. Without a reason the end of its process gives one."""
        if worker.ending is not None or self._closed is not None:
            return
        was_ready = worker.ready
        self._abandon(worker, reason)
        self._last_loss = f"{worker.name} was lost: {reason or 'its connection ended'}"
        if was_ready:
            self.counts.lost[worker.role] += 1
        self._spawn(self._bury(worker, replace=was_ready))

    def _abandon(self, worker: _Worker, reason: str) -> None:
        """Send nothing more to a worker, read nothing more of it, and begin to end its process."""
        if worker.ending is not None:
            return
        worker.ready = False
        loop = asyncio.get_running_loop()
        for descriptor in worker.watched:
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)
        worker.ending = asyncio.ensure_future(asyncio.to_thread(_kill, worker.handle, reason))

    async def _bury(self, worker: _Worker, *, replace: bool) -> None:
        """Wait for the end of a lost worker, give its requests to others, and start another one.

        Only after the end nothing writes or reads the slots of its transfers.
        """
        assert worker.ending is not None
        (ended,) = await asyncio.gather(asyncio.shield(worker.ending), return_exceptions=True)
        self._workers.remove(worker)
        self._past = _added(self._past, worker.stats)
        self._last_loss = f"{worker.name} was lost: {ended}"
        worker.lost.set_result(self._last_loss)
        if replace:
            LOG.warning(f"{self._last_loss}; prompts that go on elsewhere: {len(worker.families)}")
        for transfer in [one for one in self._transfers.values() if one.holder is worker]:
            why = f"missing: {worker.name} was lost"
            self._count(transfer, KvImport(transfer.num_exported, 0, 0, why))
            if not isinstance(ended, BaseException):
                del self._transfers[transfer.slot]
        for family in list(worker.families):
            self._place(family)
        if replace:
            await self._replace(worker)

    async def _replace(self, worker: _Worker) -> None:
        num_failed = 0 if worker.num_completed else worker.num_failed + 1
        while num_failed <= MAX_RESTARTS:
            try:
                await self._start_worker(worker.role, num_failed)
            except (WorkerLost, OSError) as error:
                LOG.warning(f"a {worker.role} worker could not be started: {error}")
                num_failed += 1
            else:
                return
        LOG.error(
            f"{num_failed} {worker.role} workers were lost one after the other before they had completed "
            f"anything; none is started any more: {worker.lost.result()}"
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(
        self,
        worker: _Worker,
        kind: str,
        metadata: dict[str, Any],
        arrays: dict[str, np.ndarray] | None = None,
    ) -> None:
        if worker.ending is not None:
            return
        worker.handle.send(kind, metadata, arrays)
        self._register(worker)

    def _register(self, worker: _Worker) -> None:
        """Have the event loop watch what the worker's handle waits for."""
        loop, wanted = asyncio.get_running_loop(), dict(worker.handle.watch())
        for descriptor in worker.watched.keys() - wanted.keys():
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)
        for descriptor, events in wanted.items():
            before = worker.watched.get(descriptor, 0)
            if events & select.POLLIN and not before & select.POLLIN:
                loop.add_reader(descriptor, self._readable, worker)
            if events & select.POLLOUT and not before & select.POLLOUT:
                loop.add_writer(descriptor, self._register, worker)
            if before & select.POLLOUT and not events & select.POLLOUT:
                loop.remove_writer(descriptor)
        worker.watched = wanted


def _can_split(family: _Family) -> bool:
    """Whether its prompt may be computed apart: log-probabilities of it are reported at the end."""
    return not any(sample.known or sample.params.prompt_logprobs for sample in family.samples.values())


def _maker(canary: Canary | None) -> Callable[[], Canary] | None:
    return None if canary is None else lambda: canary


def _kill(handle: RoleHandle, reason: str) -> str:
    """Kill a worker; return the reason, by default why it had ended before, with the tail of its log."""
    reason = reason or handle.exit_reason()
    handle.kill()
    return reason + handle.log_tail()


def _added(one: EngineStats, other: EngineStats) -> EngineStats:
    """Add the counters of two; the fields of the moment stay those of the first."""
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in COUNTERS})
