"""Engines of a real model as the processes that they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millrace.config.engine_section import EngineConfig
from millrace.data.tokenizers import train_tokenizer
from millrace.engines.build_engine import open_engine, save_engine
from millrace.engines.handle import EngineSettings, read_files
from millrace.engines.subprocesses import SubprocessBackend
from millrace.inference.engine import PagedEngine
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.rollout.backend import (
    EngineJoined,
    EngineLost,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    Submit,
    WeightsLoaded,
)
from millrace.types import SamplingParams
from tests.engines.test_subprocesses import Judge, load, pids, until
from tests.models.tiny import SIZES


def saved(folder: Path) -> list[Model]:
    """An engine's folder, and two models that fit it."""
    tokenizer = train_tokenizer(["0 1 2 3"], vocab_size=257, across_words=False)
    config = fresh_config(
        "qwen3",
        {**SIZES, "head_dim": 16, "max_position_embeddings": 800},
        vocab_size=len(tokenizer),
        eos_token_id=0,
    )
    models = [fresh_model(config, seed=seed, dtype=torch.float32) for seed in (1, 2)]
    options = EngineConfig(cache_tokens=8192, max_num_seqs=8, max_num_batched_tokens=64)
    save_engine(options, models[0], tokenizer, folder, longest=800)
    return models


@contextmanager
def real(folder: Path) -> Iterator[tuple[SubprocessBackend, PagedEngine, list[Model]]]:
    """An engine's process, its twin in this one, and the models that it may load, the newest last."""
    models = saved(folder)
    newest = [models[0]]
    settings = EngineSettings(read_files(folder), 1)
    with SubprocessBackend(settings, Judge(), lambda: newest[-1].named_parameters()) as backend:
        load(backend, "engine-0", 0)
        assert until(backend, WeightsLoaded) == [WeightsLoaded("engine-0", 0, 0)]
        newest.append(models[1])
        yield backend, open_engine(folder), models


PROMPTS = [(1, 2, 3)] * 4
PARAMS = [SamplingParams(max_tokens=30, seed=seed) for seed in range(4)]
ENDLESS = GenerateRequest("endless", (4,), SamplingParams(max_tokens=700, seed=9))


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(300)
def test_a_real_process_draws_what_its_twin_draws(tmp_path: Path) -> None:
    with real(tmp_path) as (backend, twin, models):
        twin.update_weights(models[0].named_parameters(), 0)
        ours, theirs = backend.generate(PROMPTS, PARAMS), twin.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        # Weights that come too late, as on a busy machine, are sent once more.
        assert any(0 < weights_in_flight(backend, version) < 1 for version in range(1, 11))


def weights_in_flight(backend: SubprocessBackend, version: int) -> float:
    """Send weights while a long draw is under way; the share of its tokens that were drawn before."""
    backend.execute(Submit("engine-0", [replace(ENDLESS, id=f"endless-{version}")]))
    # Once these are drawn beside it, it has begun.
    backend.generate(PROMPTS[:1], [SamplingParams(max_tokens=2)])
    load(backend, "engine-0", version)
    events = until(backend, WeightsLoaded)
    events += (
        [] if any(isinstance(event, GenerateResult) for event in events) else until(backend, GenerateResult)
    )
    (loaded,) = (event for event in events if isinstance(event, WeightsLoaded))
    (completed,) = (event for event in events if isinstance(event, GenerateResult))
    num_old = min(loaded.at - completed.began, 700)
    assert completed.completion.versions.tolist() == [version - 1] * num_old + [version] * (700 - num_old)
    return num_old / 700


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_with_a_real_process(tmp_path: Path) -> None:
    with real(tmp_path) as (backend, twin, models):
        requests = [GenerateRequest(f"{i}", PROMPTS[i], PARAMS[i]) for i in range(4)]
        backend.execute(Submit("engine-0", [ENDLESS, *requests]))
        # Once these are drawn beside them, they have begun.
        backend.generate(PROMPTS[:1], [SamplingParams(max_tokens=2)])
        (pid,) = pids(backend)
        os.kill(pid, signal.SIGKILL)
        events = until(backend, EngineJoined)
        assert any(isinstance(event, EngineLost) for event in events)
        done = [event for event in events if isinstance(event, GenerateResult) and event.id != "endless"]
        backend.execute(LoadWeights("engine-1", 0))
        until(backend, WeightsLoaded)
        ended = {one.id for one in done}
        backend.execute(Submit("engine-1", [request for request in requests if request.id not in ended]))
        while len(done) < 4:
            done += [event for event in until(backend, GenerateResult) if isinstance(event, GenerateResult)]
        twin.update_weights(models[0].named_parameters(), 0)
        ours = {one.id: one.completion.token_ids for one in done}
        assert ours == {f"{i}": c.token_ids for i, c in enumerate(twin.generate(PROMPTS, PARAMS))}
