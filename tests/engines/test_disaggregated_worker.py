"""An engine of a run with prefill and decode workers: commands of a trainer, and workers in threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.engines.disaggregated_worker import DisaggregatedWorker
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine, WorkerFailed
from millrace.engines.wire import Channel, Frame
from millrace.inference.async_engine import EngineClosed
from millrace.models.load import Model, named_weights
from millrace.rollout.backend import GenerateRequest
from millrace.transport.canary import Canary
from millrace.transport.weight_update import WeightSyncError, WeightUpdate
from millrace.types import Completion, SamplingParams
from tests.engines.role_workers import Threads, over
from tests.engines.test_engine_worker import Steps
from tests.engines.worker_thread import Served, in_thread
from tests.inference.fresh import paged, random_requests
from tests.twins.test_deterministic import deterministic_model

PROMPT = tuple(range(1, 23))


class Engine(Served):
    """An engine, and the threads of its workers."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self.threads = threads

    def load(self, model: Model, version: int, **changed: Any) -> None:
        manifest = self.trainer.weights.write(named_weights(model), version)
        self.trainer.channel.send("update_weights", {**manifest, **changed})

    def loaded(self, num: int = 1) -> None:
        self.trainer.receive("weights_loaded", num)

    def results(self, num: int) -> dict[str, Completion]:
        return {id: completion for id, _, _, completion in self.trainer.completed(num)}


def serving(
    model: Model,
    *,
    interrupt: bool = True,
    receives: Callable[[str, Frame], Frame | None] = lambda name, frame: frame,
) -> AbstractContextManager[Engine]:
    threads = Threads(model, receives)

    def build(update: WeightUpdate) -> PrefillDecodeEngine:
        version, canary = update.policy_version, update.canary
        return over(threads, "adaptive", tensors=update.tensors, version=version, canary=canary)

    def make(channel: Channel, weights: int) -> DisaggregatedWorker:
        return DisaggregatedWorker(build, channel, weights, kv="recompute", interrupt=interrupt)

    return in_thread(Engine(threads), make, EngineClosed, WorkerFailed, WeightSyncError)


@pytest.fixture(scope="module")
def model() -> Model:
    return deterministic_model("qwen3").requires_grad_(False)


def trained(model: Model) -> Model:
    """A model with other weights."""
    newer = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    for _, weight in newer.named_parameters():
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return newer


def requests_of(prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], name: str) -> Any:
    pairs = zip(prompts, params, strict=True)
    return [GenerateRequest(f"{name}{i}", prompt, wanted) for i, (prompt, wanted) in enumerate(pairs)]


def alone(model: Model, version: int, prompts: Any, params: Any) -> list[Completion]:
    """The completions of one engine."""
    engine = paged(copy.deepcopy(model), max_cache_tokens=1024, max_requests=16)
    engine.update_weights(named_weights(model), version)
    return engine.generate(prompts, params)


def check_same(found: Completion, wanted: Completion) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.logprobs.tobytes() == wanted.logprobs.tobytes()
    assert found.versions.tolist() == wanted.versions.tolist()
    assert (found.finish_reason, found.text) == (wanted.finish_reason, wanted.text)


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_bits_are_those_of_one_engine_before_and_after_an_update(model: Model, seed: int) -> None:
    models = [model, trained(model)]
    asked = [random_requests(seed + 10 * version, 12) for version in (0, 1)]
    with serving(model, interrupt=False) as served:
        for version, (prompts, params) in enumerate(asked):
            if version:
                served.loaded()
                served.load(models[version], version)
            served.trainer.submit(*requests_of(prompts, params, f"{version}-"))
            if not version:
                served.load(models[version], version)
        found = served.results(24)
        imported = served.trainer.receive("completed")[-1].metadata["counters"]["prompt_tokens_imported"]
    for version, (prompts, params) in enumerate(asked):
        for place, wanted in enumerate(alone(models[version], version, prompts, params)):
            check_same(found[f"{version}-{place}"], wanted)
    assert imported > 0


def test_nothing_is_generated_before_all_workers_have_verified_the_weights(model: Model) -> None:
    with serving(model) as served:
        served.trainer.submit(GenerateRequest("early", PROMPT, SamplingParams(max_tokens=3)))
        served.load(model, 0)
        served.results(1)
        kinds = [frame.kind for frame in served.trainer.frames if frame.kind != "heartbeat"]
        assert kinds == ["ready", "weights_loaded", "completed"]
        sent = [worker.sent for worker in served.threads.started]
        assert [kinds[0] for kinds in sent] == ["update_weights"] * 2
        # The same version again is verified, and not loaded.
        served.load(model, 0)
        served.loaded(2)
        assert [kinds.count("update_weights") for kinds in sent] == [1, 1]


def test_weights_that_are_not_the_trainers_end_the_process(model: Model) -> None:
    with serving(model) as served:
        manifest = served.trainer.weights.write(named_weights(model), 0)
        name = min(manifest["fingerprint"])
        served.load(model, 0, fingerprint={**manifest["fingerprint"], name: "0" * 32})
        assert served.fails().endswith(f"weights differ between trainer and sampler, the first being {name}")
    with serving(model) as served:
        served.load(model, 0, canary=Canary((1, 2, 3), (-90.0, -90.0), 0.1).fields())
        assert "the sampler holds version 0 and computes something else" in served.fails()
    with serving(model) as served:
        served.load(model, 4)
        served.loaded()
        served.load(model, 3)
        assert served.fails().startswith("version 3 is not above 4")


@pytest.mark.slow
def test_a_partial_completion_goes_on_with_the_same_tokens(model: Model) -> None:
    params = SamplingParams(max_tokens=12, seed=7)
    (whole,) = alone(model, 0, [PROMPT], [params])
    begun = replace(
        whole, token_ids=whole.token_ids[:5], logprobs=whole.logprobs[:5], versions=whole.versions[:5]
    )
    with serving(model) as served:
        served.load(model, 0)
        served.trainer.submit(GenerateRequest("rest", PROMPT, params, begun))
        check_same(served.results(1)["rest"], whole)


def test_an_abort_does_not_wait_for_an_update_that_waits_for_its_request(model: Model) -> None:
    with serving(model, interrupt=False) as served:
        served.load(model, 0)
        served.loaded()
        (decode,) = served.threads.named("decode")
        steps = Steps(decode.engine)
        served.trainer.submit(GenerateRequest("long", PROMPT, SamplingParams(max_tokens=90)))
        steps.allow(3)
        served.load(model, 1)
        served.trainer.submit(GenerateRequest("next", PROMPT, SamplingParams(max_tokens=2)))
        served.trainer.channel.send("abort", {"ids": ["long"]})
        served.wait_until(lambda: "abort" in decode.sent)
        steps.let_go()
        found = served.results(2)
        kinds = [frame.kind for frame in served.trainer.frames if frame.kind != "heartbeat"]
    assert found["long"].finish_reason == "abort"
    assert 3 <= len(found["long"].token_ids) < 90
    assert set(found["long"].versions.tolist()) == {0}
    assert found["next"].versions.tolist() == [1, 1]
    assert kinds == ["ready", "weights_loaded", "completed", "weights_loaded", "completed"]


def test_requests_behind_an_update_can_be_aborted(model: Model) -> None:
    with serving(model, interrupt=False) as served:
        served.trainer.submit(GenerateRequest("one", PROMPT, SamplingParams(max_tokens=90)))
        served.trainer.channel.send("abort", {"ids": ["one"]})
        served.load(model, 0)
        assert served.results(1)["one"].finish_reason == "abort"


def test_a_request_that_no_engine_can_serve_is_refused(model: Model) -> None:
    with serving(model) as served:
        served.load(model, 0)
        served.trainer.submit(GenerateRequest("bad", (*PROMPT, 10_000), SamplingParams(max_tokens=3)))
        (refused,) = served.trainer.receive("refused")
        assert refused.metadata["ids"] == ["bad"]
        assert "the prompt holds token 10000" in refused.metadata["reason"]
        served.trainer.submit(GenerateRequest("good", PROMPT, SamplingParams(max_tokens=3)))
        assert served.results(1)["good"].finish_reason == "length"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("role", "kind"), [("prefill", "prefilled"), ("decode", "pieces")])
def test_a_lost_worker_costs_no_sample_and_is_counted(model: Model, role: str, kind: str) -> None:
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(3)]
    wanted = alone(model, 0, [PROMPT] * 3, params)
    dies = iter([True])

    def receives(name: str, frame: Frame) -> Frame | None:
        lost = name.startswith(role) and frame.kind == kind and next(dies, False)
        return None if lost else frame

    with serving(model, receives=receives) as served:
        served.load(model, 0)
        served.trainer.submit(*requests_of([PROMPT] * 3, params, ""))
        found = served.results(3)
        counters = served.trainer.receive("completed")[-1].metadata["counters"]
    for place in range(3):
        check_same(found[str(place)], wanted[place])
    assert counters["workers_lost"] == 1
    assert counters["prompt_tokens_computed"] >= len(PROMPT)
    assert np.isfinite(list(counters.values())).all()
