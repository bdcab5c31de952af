"""How many threads the processes of engines get, and where engines with workers cannot run."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.errors import SetupError
from millrace.run.build_engines import engine_threads, num_threads, start_engines
from tests.end_to_end.tiny import tiny_recipe

APART = {"engine.disaggregation": {"prefill": 1, "decode": 2}}


@pytest.mark.parametrize(
    ("words", "trainer", "engine"),
    [
        ({}, 16, 16),
        (APART, 16, 5),
        ({"rollout.max_staleness": 1}, 8, 8),
        ({"rollout.max_staleness": 1, **APART}, 4, 4),
        ({"rollout.max_staleness": 1, "engine.num_engines": 2, **APART}, 2, 2),
        ({"threads": 3, **APART}, 3, 3),
    ],
)
def test_cores_are_divided_among_all_that_compute_at_once(
    words: dict[str, Any], trainer: int, engine: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = tiny_recipe(tmp_path, {"threads": 0, **words})
    assert (num_threads(config), engine_threads(config)) == (trainer, engine)


def test_workers_do_not_run_on_a_gpu(tmp_path: Path) -> None:
    pieces: Any = SimpleNamespace(device=torch.device("cuda", 0), canary=None)
    with pytest.raises(SetupError) as caught, ExitStack() as stack:
        start_engines(
            tiny_recipe(tmp_path, APART),
            pieces,
            pieces,
            pieces,
            pieces,
            longest=32,
            make_environments=None,
            exit_stack=stack,
        )
    assert str(caught.value) == (
        "engine.disaggregation runs on the CPU, and the model is on cuda:0; set device: cpu, or remove it"
    )
