"""Build engines of prefill and decode workers: of `millrace serve --prefill --decode`, and of a run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config.engine_section import DisaggregationConfig, EngineConfig
from millrace.data.tokenizers import load_tokenizer
from millrace.engines.build_engine import SETTINGS, save_engine
from millrace.engines.handle import EngineSettings, read_files
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
from millrace.engines.prefill_decode_handle import Role, start_role
from millrace.engines.prefill_decode_route import SHARED_MEMORY, RoutePolicy
from millrace.engines.remote_workers import RemoteWorkers
from millrace.errors import SetupError
from millrace.inference.engine import PagedEngine
from millrace.inference.request_check import RequestCheck
from millrace.inference.step_probes import engine_identity
from millrace.models.load import Model, named_weights, read_config
from millrace.planner.engine_cost_file import CostMeasurement, MeasuredEngine, read_cost
from millrace.planner.placement import Objective, ServingModel
from millrace.planner.request_tracker import RequestTracker
from millrace.transport.weight_update import WeightUpdate

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


def build_prefill_decode(
    model: Model,
    tokenizer: Tokenizer,
    options: EngineConfig,
    *,
    max_length: int,
    num_workers: dict[Role, int],
    route: RoutePolicy,
    max_waiting: int,
    hosts: Sequence[tuple[str, int]] = (),
    token: str = "",
) -> PrefillDecodeEngine:
    """Build the engine of a model, whose workers start with it; the shared memory has a copy of the weights.

    Args:
        model: to serve; it is not needed afterwards.
        tokenizer: used in the event loop of the server.
        options: of the engine of each worker, with `cache_tokens`.
        max_length: tokens of prompt and completion together that the model allows.
        num_workers: of each role.
        route: which prompts are computed apart.
        max_waiting: samples that are accepted beyond those that all decode workers run at once.
        hosts: where `millrace serve-worker` listens on other machines, which have the workers then.
        token: of all those.

    Raises:
        PlanError: the route's cost model is not that of such a worker.
        SetupError: the model is not on a CPU.
        WeightSyncError: there is no memory for the weights.
    """
    _require_cpu(model)
    assert options.cache_tokens is not None
    with tempfile.TemporaryDirectory(prefix="millrace-serve-") as name:
        save_engine(options, model, tokenizer, Path(name), longest=max_length)
        files = read_files(Path(name))
    # Threads of torch that share a core wait for each other.
    threads = max(1, len(os.sched_getaffinity(0)) // sum(num_workers.values()))
    num_slots = options.cache_tokens - options.cache_tokens % options.block_size
    tracker = None
    if (by := route.cost) is not None:
        tracker = _tracker(read_cost(by.file, worker_identity(model, options, threads)), by.objective)
    cost = None if tracker is None else tracker.model.cost
    remote = RemoteWorkers(hosts, token, files) if hosts else None
    return PrefillDecodeEngine(
        remote or partial(start_role, EngineSettings(files, threads), cost),
        named_weights(model),
        RequestCheck(
            max_length=max_length,
            num_slots=num_slots,
            vocab_size=int(model.config.get_text_config().vocab_size),
        ),
        partial(tokenizer.decode, skip_special_tokens=True),
        block_size=options.block_size,
        num_workers=num_workers,
        route=route,
        max_samples=options.max_num_seqs * num_workers["decode"] + max_waiting,
        tracker=tracker,
        capacity=num_slots,
        closing=None if remote is None else remote.close,
    )


def _require_cpu(model: Model) -> None:
    if model.device.type != "cpu":
        raise SetupError(
            f"--prefill and --decode run on the CPU, and the model is on {model.device}; add --device cpu, "
            "or serve it without them"
        )


def worker_identity(model: Model, options: EngineConfig, threads: int) -> MeasuredEngine:
    """Return what a cost model of a worker with these options must have been measured on."""
    # An engine of one block has the identity of a worker's, but for the threads.
    engine = PagedEngine(
        model,
        lambda tokens: "",
        max_cache_tokens=options.block_size,
        block_size=options.block_size,
        max_batch_tokens=options.max_num_batched_tokens,
    )
    return replace(engine_identity(model, engine), num_threads=threads)


def _tracker(measured: CostMeasurement, objective: Objective | None) -> RequestTracker:
    """Return what places requests by a cost model of the workers."""
    return RequestTracker(
        ServingModel(
            measured.cost,
            measured.engine.max_batch_tokens,
            measured.engine.block_size,
            measured.engine.block_bytes,
            SHARED_MEMORY,
            objective,
        )
    )


class PrefillDecodeBuilder:
    """Builds the engine of a run, once the first weights are there.

    `folder` is one of `save_engine`, with the `cache_tokens` of each worker, and is read here; `threads` are
    those of each worker.
    """

    def __init__(self, folder: Path, workers: DisaggregationConfig, *, threads: int) -> None:
        saved = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        self._options, self._workers = EngineConfig(**saved["options"]), workers
        assert self._options.cache_tokens is not None
        self._num_slots = self._options.cache_tokens - self._options.cache_tokens % self._options.block_size
        self._check = RequestCheck.of(read_config(folder), self._num_slots)
        self._tokenizer = load_tokenizer(folder)
        self._settings = EngineSettings(read_files(folder), threads)

    def __call__(self, update: WeightUpdate) -> PrefillDecodeEngine:
        """Build the engine with these weights; WeightSyncError if there is no memory for them."""
        options, workers = self._options, self._workers
        # The trainer has compared the file with the workers.
        tracker = None if workers.cost is None else _tracker(read_cost(Path(workers.cost)), None)
        return PrefillDecodeEngine(
            partial(start_role, self._settings, None if tracker is None else tracker.model.cost),
            update.tensors,
            self._check,
            partial(self._tokenizer.decode, skip_special_tokens=True),
            block_size=options.block_size,
            num_workers={"prefill": workers.prefill, "decode": workers.decode},
            route=RoutePolicy("adaptive", workers.apart_above),
            max_samples=sys.maxsize,
            tracker=tracker,
            capacity=self._num_slots,
            version=update.policy_version,
            canary=update.canary,
        )
