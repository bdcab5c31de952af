"""The paged engine: continuous batching over the trainer's own module, with weight updates, pause and sleep.

A step is: schedule, one forward, sample, commit. All work per token is vectorised over rows. Python handles a
single request only when it starts, ends, or has stop strings or prompt log-probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from millrace.distributed.collectives import local
from millrace.inference.canary_logprobs import sampler_logprobs
from millrace.inference.engine_sizes import EngineSizes
from millrace.inference.kv_blocks import KvBlock, KvImport, KvLayout, KvPrefix
from millrace.inference.kv_transfer import KvLease, KvTransfer
from millrace.inference.next_plan import next_plan
from millrace.inference.request import Request
from millrace.inference.request_check import RequestCheck
from millrace.inference.results import completion_of, ends_in_stop
from millrace.inference.runner import Runner
from millrace.inference.sampler_stage import SamplerStage
from millrace.inference.scheduler import Plan, Scheduler
from millrace.inference.weight_loading import load_in_place, release_weights, restore_weights
from millrace.models.fused import forget_packed
from millrace.models.load import Model, named_weights
from millrace.transport.fingerprint import fingerprint
from millrace.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current load of the engine, and its counters since it was built.

    `kv_usage` is the fraction of the pool's blocks held by running requests and leases, in [0, 1];
    `prefix_queries` and `prefix_hits` are prompt tokens looked up and found in the prefix cache.

    Of KV transfers: `prompt_tokens_computed` are prompt tokens that forwards computed, again after a
    preemption, `prompt_tokens_imported` those whose keys and values came from another engine.
    `blocks_refused` were offered by others and not taken; `leased_blocks` are pinned for others.
    `imported_fraction` is that of the blocks expected in the last transfers, 1 if none were; the engine
    warns when it falls below 0.99.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prompt_tokens_computed: int = 0
    prompt_tokens_imported: int = 0
    blocks_refused: int = 0
    leased_blocks: int = 0
    imported_fraction: float = 1.0


PauseMode = Literal["finish", "abort", "keep"]
Tag = Literal["weights", "kv_cache"]
KvPolicy = Literal["keep", "recompute"]
# Receives the plan of a step and its seconds.
StepWatch = Callable[[Plan, float], None]


class RequestFailed(RuntimeError):
    """A request of a `generate` call failed; the message names the request and the reason."""


class PagedEngine:
    """Continuous batching over a paged KV cache. It is not thread-safe; `AsyncEngine` serves many callers.

    It owns `model` from now on, at policy version 0. `decode` converts tokens to text without special tokens.
    `max_cache_tokens` are the slots of the KV pool, one for each token; `max_batch_tokens` the tokens of one
    forward. `clock`, in seconds, is that of leases. `sizes` are what follows from these and from the model.

    A model sharded by tensor parallelism (`distributed.tensor`) makes it one rank's part of an engine over
    several: all ranks of the group make the same calls in the same order, with equal arguments, and get the
    same tokens. Weights are this rank's shards then, and so are checksums and bytes.

    Raises:
        ValueError: `cuda_graphs` is set for a model that is not on CUDA, or `record_experts` for a dense
            model.
    """

    def __init__(
        self,
        model: Model,
        decode: Callable[[Sequence[int]], str],
        *,
        max_cache_tokens: int = 262_144,
        block_size: int = 16,
        max_batch_tokens: int = 8_192,
        max_requests: int = 1_024,
        prefix_caching: bool = True,
        cuda_graphs: bool = False,
        record_experts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_blocks = max(1, max_cache_tokens // block_size)
        self._model = model
        self._check = RequestCheck.of(model.config, num_blocks * block_size)
        self.vocab_size, max_length = self._check.vocab_size, self._check.max_length
        self._runner = Runner(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_graph_rows=max_requests if cuda_graphs else 0,
            max_length=min(max_length, num_blocks * block_size),
            record_experts=record_experts,
        )
        self._scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            max_length=max_length,
            prefix_caching=prefix_caching,
            experts_of=self._runner.experts if record_experts else None,
        )
        self.sizes = EngineSizes(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            max_length=min(max_length, num_blocks * block_size),
            block_bytes=self._runner.layout.block_bytes,
        )
        self._transfer = KvTransfer(self._runner, self._scheduler, clock)
        self._decode = decode
        self._sampler = SamplerStage(self._runner, self._scheduler.table, self.vocab_size)
        self._requests: dict[str, Request] = {}
        self._asleep: set[str] = set()
        self._shapes: dict[str, torch.Size] = {}
        self._weights_missing = False
        self._num_special = self._next_id = self._prompt_tokens = self._generation_tokens = 0
        self._prompt_tokens_computed = 0
        self._watch: StepWatch | None = None

    @property
    def version(self) -> int:
        """Policy version of the current weights."""
        return self._scheduler.allocator.version

    @property
    def kv_layout(self) -> KvLayout:
        """What a block of the pool is, for transfers."""
        return self._runner.layout

    @property
    def pools(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the pools of keys and values in memory; trials and tests inject faults into them."""
        return self._runner.pools

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """Generate one completion for each prompt, in order; see `protocols.Engine`.

        Equal prompts are computed once.

        Raises:
            ValueError: a request cannot be served; no request is started.
            RequestFailed: the model's logits are not finite; the other requests are finished first.
            RuntimeError: the engine is paused or asleep.
        """
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        self._require_awake()
        if self._scheduler.paused != "no":
            raise RuntimeError("the engine is paused; call resume() before generate()")
        pairs = list(zip(prompts, params, strict=True))
        for index, (prompt, sampling_params) in enumerate(pairs):
            try:
                self.check_request(prompt, sampling_params)
            except ValueError as error:
                raise ValueError(f"prompt {index} of {len(prompts)}: {error}") from None
        requests = [self._new(prompt, sampling_params) for prompt, sampling_params in pairs]
        self._scheduler.add(requests)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            for request in requests:
                self._scheduler.finish(request, "abort")  # of those that ended it changes nothing
            texts: dict[tuple[int, ...], str] = {}
            completions = [self.completion(request, texts) for request in requests]
        for index, completion in enumerate(completions):
            if completion.finish_reason == "error":
                raise RequestFailed(f"prompt {index} of {len(prompts)} failed: {completion.reason}")
        return completions

    def add(
        self,
        prompt: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        ids: Sequence[str] | None = None,
        partial_outputs: Sequence[Completion | None] | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """Queue samples of one prompt, which is computed once for all of them; `step` generates them.

        There is one entry of `params` for each sample, and likewise of `ids` (unique among unfinished
        requests; None generates them) and of `partial_outputs` (completions to continue; None starts from the
        prompt). A lower priority runs first.

        Raises:
            ValueError: a request cannot be served, or an id is in use; no request is queued.
        """
        names: Sequence[str | None] = ids or [None] * len(params)
        before = partial_outputs or [None] * len(params)
        taken = next((id for id in names if id in self._requests), None)
        if taken is not None or (ids and len(set(ids)) < len(ids)):
            name = repr(taken) if taken is not None else "given twice"
            raise ValueError(f"request id {name} is taken by an unfinished request; choose another")
        for sampling_params, known in zip(params, before, strict=True):
            self.check_request(prompt, sampling_params, known)
        requests = [self._new(prompt, *one, priority) for one in zip(params, names, before, strict=True)]
        self._scheduler.add(requests)
        return requests

    def completion(self, request: Request, texts: dict[tuple[int, ...], str] | None = None) -> Completion:
        """Build the completion of an ended request and remove the request from the engine.

        `texts` is a cache of decoded token sequences; a new text is added to it.
        """
        if self._requests.pop(request.id, None) is not None:
            self._num_special -= request.is_special
        return completion_of(
            request, self._decode, {} if texts is None else texts, routed=self._runner.routed
        )

    def generated(self, request: Request, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a request's generated tokens, log-probabilities and versions, from index `first` on."""
        return self._scheduler.table.generated(request, first)

    def abort(self, id: str) -> Completion | None:
        """Abort a request and return its partial completion; None if no unfinished request has this id."""
        if (request := self._requests.get(id)) is None:
            return None
        self._scheduler.finish(request, "abort")
        return self.completion(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Compute one step; return the requests that got a token or failed. RuntimeError if asleep."""
        self._require_awake()
        started_s = time.perf_counter()
        scheduler, runner = self._scheduler, self._runner
        plan = next_plan(scheduler, self._transfer.leases)
        if plan is None:
            return []
        runner.copy_blocks(plan.copy_from_M, plan.copy_to_M)
        inputs = runner.inputs(scheduler.table, plan)
        special = bool(self._num_special)
        requests, token_N, logprob_N, failed = self._sampler.sample(plan, inputs, special=special)
        left_B = scheduler.table.num_prompt_R[plan.row_B] - plan.start_B
        self._prompt_tokens_computed += int(np.minimum(plan.count_B, left_B).clip(0).sum())
        for request, why in failed:
            scheduler.finish(request, "error", why)
        scheduler.commit(plan, token_N, logprob_N)
        self._generation_tokens += len(token_N) - len(failed)
        if special:
            self._stop_at_text(requests)
        if self._watch is not None:
            self._watch(plan, time.perf_counter() - started_s)
        return requests

    def watch_steps(self, watch: StepWatch | None) -> None:
        """Call `watch` after each step that computes, with its plan and its wall seconds; None ends that."""
        self._watch = watch

    def _stop_at_text(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.params.stop or request.finish_reason not in (None, "length"):
                continue
            if ends_in_stop(request, self.generated(request)[0].tolist(), self._decode):
                self._scheduler.finish(request, "stop")
                request.finish_reason = "stop"  # not "length", where the last token completed the text

    def num_cached_blocks(self, token_ids: Sequence[int]) -> int:
        """Return how many blocks of these tokens an exporting engine can `skip`."""
        return self._transfer.num_cached(token_ids)

    def export_prefix(
        self, token_ids: Sequence[int], *, skip: int = 0, lease_s: float = 30.0
    ) -> KvLease | None:
        """Pin the cached blocks of these tokens for another engine, without the first `skip`; None if none.

        Their last token is never exported. The blocks stay in the pool until the lease is released or for
        `lease_s` seconds. A lease ends early when weights are updated, when the engine sleeps, and when a
        request could not start otherwise while none runs. All leases pin at most half of the pool.

        Raises:
            RuntimeError: the engine is asleep.
            ValueError: `skip` is negative, or `lease_s` is not above 0.
        """
        self._require_awake()
        return self._transfer.export_prefix(token_ids, skip=skip, lease_s=lease_s)

    def import_prefix(self, prefix: KvPrefix, blocks: Iterable[KvBlock]) -> KvImport:
        """Verify exported blocks, in order, and add them to the prefix cache, where requests find them.

        A block that does not prove, and all behind it, are refused: the engine computes these tokens itself.
        Blocks that it has are skipped. Running requests are not preempted for blocks.

        Raises:
            RuntimeError: the engine is asleep.
        """
        self._require_awake()
        return self._transfer.import_prefix(prefix, blocks)

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], policy_version: int, *, kv: KvPolicy = "recompute"
    ) -> None:
        """Replace every weight in place; requests may be in flight.

        Tokens sampled from now on record `policy_version`. In-flight requests `recompute` their keys and
        values or `keep` the old ones. Leases end first.

        Raises:
            RuntimeError: the weights are asleep.
            ValueError: a name is missing, unknown or given twice, or a shape or dtype differs.
        """
        if "weights" in self._asleep:
            raise RuntimeError('the weights are asleep; call wake(["weights"]) before update_weights()')
        if kv not in get_args(KvPolicy):
            raise ValueError(f"kv is {kv!r}; it must be keep or recompute")
        self._transfer.leases.end_all()
        load_in_place(self._model, tensors)
        self._weights_missing = False
        if kv == "recompute":
            self._scheduler.preempt_all()
        self._scheduler.allocator.restart(policy_version)

    def fingerprint(self) -> dict[str, str]:
        """Return a checksum of each weight in the engine; RuntimeError if the weights are asleep."""
        if "weights" in self._asleep:
            raise RuntimeError('the weights are asleep; call wake(["weights"]) before fingerprint()')
        return fingerprint((name, local(weight)) for name, weight in named_weights(self._model))

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1, for the canary."""
        return sampler_logprobs(self._model, token_ids)

    def pause(self, mode: PauseMode) -> None:
        """Stop computing until `resume`.

        Mode `finish` first runs the running requests to their end and keeps the waiting ones queued; `abort`
        ends all requests with their partial completions; `keep` freezes them. Another mode is a ValueError.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode is {mode!r}; it must be finish, abort or keep")
        if mode == "abort":
            for request in list(self._requests.values()):
                self._scheduler.finish(request, "abort")
        if mode == "finish":
            self.stop_admitting()
            while self._scheduler.num_running:
                self.step()
        self._scheduler.pause("all")

    def stop_admitting(self) -> None:
        """Admit no waiting request until `resume`; running requests continue."""
        self._scheduler.pause("new")

    def resume(self) -> None:
        """End a `pause`: admit and compute requests again."""
        self._scheduler.resume()

    def sleep(self, tags: Collection[Tag]) -> None:
        """Free the memory of `weights`, `kv_cache` or both. In-flight requests keep their tokens.

        Leases end first. After `wake`, keys and values are recomputed, and `update_weights` must load the
        weights.
        """
        self._check_tags(tags)
        self._transfer.leases.end_all()
        if "kv_cache" in tags and "kv_cache" not in self._asleep:
            self._scheduler.preempt_all()
            self._scheduler.cache.drop_all()
            self._runner.release()
        if "weights" in tags and "weights" not in self._asleep:
            self._shapes = release_weights(self._model)
            forget_packed(self._model)
            self._weights_missing = True
        self._asleep |= set(tags)

    def wake(self, tags: Collection[Tag]) -> None:
        """Allocate again the memory that `sleep` freed."""
        self._check_tags(tags)
        if "kv_cache" in tags and "kv_cache" in self._asleep:
            self._runner.restore()
        if "weights" in tags and "weights" in self._asleep:
            restore_weights(self._model, self._shapes)
            self._runner.forget_graphs()
        self._asleep -= set(tags)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        scheduler = self._scheduler
        if self._asleep or self._weights_missing or scheduler.paused == "all":
            return False
        return bool(scheduler.num_running or (scheduler.num_waiting and scheduler.paused == "no"))

    def stats(self) -> EngineStats:
        """Return the current load and the counters."""
        scheduler, counter = self._scheduler, self._transfer.counter
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=1 - scheduler.blocks.num_free / scheduler.blocks.num_blocks,
            prefix_queries=scheduler.cache.num_queries,
            prefix_hits=scheduler.cache.num_hits,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prompt_tokens_computed=self._prompt_tokens_computed,
            prompt_tokens_imported=counter.num_imported * scheduler.blocks.block_size,
            blocks_refused=counter.num_refused,
            leased_blocks=self._transfer.leases.num_blocks,
            imported_fraction=counter.fraction,
        )

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes of parameters and of the KV pool, by tag; packed copies of weights are not counted."""
        held = sum(local(parameter).untyped_storage().nbytes() for parameter in self._model.parameters())
        return {"weights": held, "kv_cache": self._runner.pool_bytes}

    def _new(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        id: str | None = None,
        partial_output: Completion | None = None,
        priority: int = 0,
    ) -> Request:
        if id is None:
            self._next_id += 1
            id = f"#{self._next_id}"
        request = Request(id, tuple(prompt), params, priority=priority)
        if partial_output is not None:
            request.resume(partial_output)
        self._requests[id] = request
        self._num_special += request.is_special
        self._prompt_tokens += len(prompt)
        return request

    def check_request(
        self, prompt: Sequence[int], params: SamplingParams, partial_output: Completion | None = None
    ) -> None:
        """Raise for a request that cannot be served.

        Raises:
            ValueError: the prompt is empty; prompt and `max_tokens` are too long for the model or the cache;
                the prompt, the parameters or the partial completion hold a token outside the vocabulary; or
                the partial completion has `max_tokens` tokens or more.
        """
        self._check(prompt, params, partial_output)

    def _check_tags(self, tags: Collection[str]) -> None:
        if not tags or set(tags) - set(get_args(Tag)):
            raise ValueError(f"tags are {list(tags)}; they may be weights, kv_cache or both")

    def _require_awake(self) -> None:
        if self._asleep:
            names = sorted(self._asleep)
            raise RuntimeError(f"the engine's {' and '.join(names)} are asleep; call wake({names})")
        if self._weights_missing:
            raise RuntimeError("the engine has no weights since it slept; call update_weights()")
