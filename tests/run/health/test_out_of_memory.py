from __future__ import annotations

import json
import re
import resource
import sys
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import nn

from millrace import train
from millrace.cli.main import main
from millrace.run.health import out_of_memory
from millrace.run.health.health_checks import RunStopped
from millrace.run.health.out_of_memory import advice, explained, is_out_of_memory, sentence
from millrace.training.policy import PolicyTrainer
from tests.end_to_end.tiny import tiny_recipe
from tests.forked import Forked
from tests.run.pieces import recipe

CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 1"
)


def advise(phase: str, **sections) -> str:
    config = recipe(**sections)
    return advice(
        phase,
        engine=config.engine,
        mesh=config.mesh,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        max_staleness=config.rollout.max_staleness,
    )


def torch_on_a_cpu() -> None:
    torch.empty(1 << 50)


def numpy_array() -> None:
    np.empty(1 << 43)


def python() -> None:
    bytearray(1 << 60)


def cuda() -> None:
    raise CUDA


def cublas() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("fails", "asked"),
    [
        (torch_on_a_cpu, ", where 4503.6 TB were asked for"),
        (numpy_array, ", where 64.0 TiB were asked for"),
        (python, ""),
        (cuda, ", where 2.50 GiB were asked for"),
        (cublas, ""),
    ],
)
def test_memory_that_cannot_be_had_ends_the_run_with_a_sentence(fails, asked, monkeypatch):
    monkeypatch.setattr(out_of_memory, "NUM_SHOWN", 0)
    with pytest.raises(RunStopped) as caught, explained(advise, phase=lambda: "save"):
        fails()
    assert str(caught.value) == (
        f"out of memory in phase save{asked}. To go on, set engine.cache_tokens; set engine.colocated; or "
        "raise mesh.dp_shard (1)"
    )
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("the disk is full"), KeyError()])
def test_any_other_error_is_left_as_it_is(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, explained(advise):
        raise error
    assert caught.value is error


def test_what_to_change_depends_on_the_phase_and_on_what_is_set_already():
    spread = {"mesh": {"dp_shard": 2}, "policy": {"tokens_per_micro_batch": 99}}
    assert advise("train", **spread) == (
        "lower policy.tokens_per_micro_batch (99); set engine.cache_tokens; set engine.colocated; "
        "set mesh.activation_checkpointing: full; or raise mesh.dp_shard (2)"
    )
    done = {
        "mesh": {"dp_shard": 2, "activation_checkpointing": "full"},
        "engine": {"colocated": True, "cache_tokens": 64},
    }
    assert advise("train", **done) == (
        "lower policy.tokens_per_micro_batch (16384), engine.cache_tokens (64); or raise mesh.dp_shard (2)"
    )
    assert advise("sample", engine={"cache_tokens": 64, "max_num_seqs": 5}) == (
        "lower engine.cache_tokens (64), engine.max_num_batched_tokens (8192), engine.max_num_seqs (5); "
        "set engine.colocated; or raise mesh.dp_shard (1)"
    )
    assert advise("evaluate", engine={"colocated": True}) == (
        "lower engine.max_num_batched_tokens (8192), engine.max_num_seqs (1024); set engine.cache_tokens; "
        "or raise mesh.dp_shard (1)"
    )


def test_who_holds_how_much_and_the_largest_tensors_are_told():
    tensors = [
        ("the policy's weight a", 3_000_000),
        ("the policy's weight b", 2_000_000_000),
        ("the policy's exp_avg a", 4_000_000),
        ("float32 [7, 1000000]", 28_000_000),
        ("float32 [7, 1000000]", 28_000_000),
        ("float32 [7]", 28),
        ("the critic's weight a", 999_999),
    ]
    text = sentence(CUDA, "train", tensors, {"weights": 5_000_000, "kv_cache": 0}, "lower it")
    assert text.removesuffix(". To go on, lower it") == (
        "out of memory in phase train, where 2.50 GiB were asked for. Held then: the policy's weight 2.0 GB, "
        "the engine's weights 5.0 MB, the policy's exp_avg 4.0 MB. Largest tensors: the policy's weight b "
        "2.0 GB, float32 [7, 1000000] 28.0 MB (2 such), the policy's exp_avg a 4.0 MB"
    )


@pytest.mark.slow
def test_every_storage_counts_once_and_by_name_where_somebody_knows_it(monkeypatch):
    linear = nn.Linear(1 << 14, 1 << 10, bias=False)
    views = [linear.weight.detach()[0], torch.zeros(3, 1 << 24)]
    views += [views[1][1], torch.empty(1 << 30, device="meta"), torch.ones(1 << 22, 2).to_sparse()]
    with (
        pytest.raises(RunStopped) as caught,
        explained(advise, owners=lambda: [("the policy", linear, None)]),
    ):
        torch_on_a_cpu()
    said = str(caught.value)
    assert "Held then: the policy's weight 67.1 MB. Largest tensors: float32 [3, 16777216] 201.3 MB, " in said
    assert said.count("67.1 MB") == 2
    assert len(views) == 5


@pytest.mark.slow
def test_a_run_whose_training_fails_says_so_in_its_summary_too(tmp_path, monkeypatch):
    monkeypatch.setattr(out_of_memory, "LEAST_BYTES", 1)
    real = PolicyTrainer.forward_backward

    def fails(self, batch):
        if self.version == 4:
            torch_on_a_cpu()
        return real(self, batch)

    monkeypatch.setattr(PolicyTrainer, "forward_backward", fails)
    with pytest.raises(RunStopped) as caught:
        train(tiny_recipe(tmp_path, {"policy.kl.coefficient": 0.1}), quiet=True)
    said = str(caught.value)
    assert said.startswith("out of memory in phase train, where 4503.6 TB were asked for. Held then: the ")
    for name in ("policy's weight", "policy's exp_avg_sq", "reference's weight", "engine's kv_cache"):
        assert f"the {name} " in said
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["warnings"][-1]) == ("failed", said)


def limited(words: list[str]) -> None:
    """`millrace` in a process whose memory does not suffice for the first gradient."""

    def too_much(self: PolicyTrainer, batch: object) -> NoReturn:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
        kept = []
        while True:
            kept.append(torch.ones(4 << 20))

    PolicyTrainer.forward_backward = too_much
    sys.argv = ["millrace", *words]
    main()


@pytest.mark.world
def test_a_process_that_may_not_have_more_memory_says_why_and_still_writes_its_report(tmp_path):
    tiny_recipe(tmp_path)
    words = ["sft=null", "policy.kl.coefficient=0.1", f"output={tmp_path / 'runs'}", "--quiet"]
    process = Forked(limited, ["train", str(tmp_path / "tiny.yaml"), *words], name="command")
    said = process.communicate(100)[1].splitlines()
    assert process.returncode == 1
    assert said[0].startswith("error: out of memory in phase train, where 16.8 MB were asked for")
    assert re.search(r"Largest tensors: float32 \[4194304\] 16.8 MB \(\d+ such\)", said[0])
    assert ". To go on, lower policy.tokens_per_micro_batch (16384); set engine.cache_tokens; " in said[0]
    assert len(said) == 1
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 1
