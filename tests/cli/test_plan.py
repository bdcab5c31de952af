"""`millrace plan` says whether a recipe fits, what to change, and how long a step takes."""

from __future__ import annotations

import json
import re

import pytest

from millrace.planner.hardware import GPUS
from millrace.planner.layout import Split
from millrace.planner.memory import Workload, memory_per_rank
from millrace.planner.model_shape import ModelShape
from tests.close import close_fp64
from tests.planner.shapes import LLAMA_8B

RECIPE = """steps: 3
precision: bfloat16
data: {train: none.jsonl, max_prompt_tokens: 512}
model: {path: llama}
rollout: {prompts_per_step: 16, samples_per_prompt: 4, max_tokens: 1536}
engine: {max_requests: 16}
rewards: [{kind: exact}]
"""
WORK = Workload(
    prompt_tokens=512,
    completion_tokens=1536,
    num_sequences=64,
    samples_per_prompt=4,
    micro_batch_tokens=16384,
    weight_bytes=2,
    compute_bytes=2,
    moment_bytes=2,
    max_requests=16,
)


@pytest.fixture
def big(lab):
    """A recipe whose model is a config.json without weights."""
    (lab.folder / "llama").mkdir()
    (lab.folder / "llama" / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    lab.write("big.yaml", RECIPE.splitlines())
    return lab


def shown(out: str) -> dict[str, float]:
    """Every line that is a name and a number."""
    rows = re.findall(r"^  (\w[\w ]*?)  +([\d.e+-]+)(?:  .*)?$", out, re.M)
    return {name: float(number) for name, number in rows}


def test_a_plan_shows_the_memory_of_the_fullest_rank(big):
    result = big("plan", "big.yaml", "--gpus", "2xH200", "--layout", "dp_shard=2", "--checkpointing", "full")
    work = Workload(**{name: getattr(WORK, name) for name in WORK.__slots__} | {"checkpointing": "full"})
    memory = memory_per_rank(ModelShape.of(LLAMA_8B), Split(dp_shard=2), work, GPUS["H200"].memory_bytes)
    rows = shown(result.out)
    assert result.code == 0
    assert result.out.startswith(
        "2 x H200, layout dp_shard=2 (as --layout asks for)\nmodel: 8,030,261,248 weights\n"
    )
    for name in ("weights", "moments", "activations", "cache"):
        close_fp64(rows[name], memory.parts()[name] / 1e9, atol=0.05)
    close_fp64(rows["while training"], memory.training / 1e9, atol=0.05)
    assert "critic" not in rows and "frozen" not in rows
    assert f"it fits: {memory.peak / 1e9:.1f} of 133.9 GB" in result.out


def test_a_step_is_timed_at_the_share_that_is_given(big):
    words = ("plan", "big.yaml", "--gpus", "2xH200", "--checkpointing", "full", "--mfu")
    slow, quick = (shown(big(*words, mfu).out) for mfu in ("0.2", "0.4"))
    close_fp64(slow["training"], 2 * quick["training"], rtol=0.02)
    assert slow["decode"] == quick["decode"]
    total = quick["prefill"] + quick["decode"] + quick["scoring"] + quick["training"]
    close_fp64(quick["one after another"], total, rtol=0.02)


def test_what_does_not_fit_leaves_with_1_and_says_what_helps(big):
    result = big("plan", "big.yaml", "--gpus", "1xH100")
    assert result.code == 1
    assert "layout dp_shard=1 (none of 1 layouts fits, this one takes least)" in result.out
    advice = result.out.partition("what helps, each on top of the ones before\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in advice] == [
        "--checkpointing full",
        "policy.tokens_per_micro_batch=2048",
        "--offload",
    ]
    words = ["--checkpointing", "full", "policy.tokens_per_micro_batch=2048", "--offload"]
    assert big("plan", "big.yaml", "--gpus", "1xH100", *words).code == 0
    assert "seconds of a step" not in result.out


def test_where_nothing_helps_more_accelerators_are_asked_for(big):
    result = big("plan", "big.yaml", "precision=float32", "--gpus", "1x4090")
    assert result.code == 1
    assert result.out.splitlines()[-1] == "  more accelerators, or larger ones"
    assert "--compute bfloat16: " in result.out


def test_a_model_that_only_scores_and_a_critic_are_counted(big):
    options = ["--gpus", "8xH200", "--layout", "dp_shard=8", "--checkpointing", "full"]
    plain = shown(big("plan", "big.yaml", *options).out)
    scored = shown(big("plan", "big.yaml", "policy.kl.coefficient=0.1", *options).out)
    assert scored["frozen"] == scored["weights"] == plain["weights"]
    assert (plain["scoring"], scored["scoring"] > 0) == (0, True)
    valued = shown(big("plan", "big.yaml", "advantage.kind=gae", "critic={}", *options).out)
    close_fp64(valued["critic"], plain["weights"] + plain["moments"], atol=0.1)


def test_a_fresh_model_is_planned_with_its_architectures_defaults(lab):
    result = lab("plan", "tiny.yaml", "--gpus", "1xL4")
    assert result.code == 0
    # 270 tokens and two layers of width 16, as `tiny.yaml` has them; Qwen3's own defaults for the rest.
    assert "model: 9,040 weights" in result.out
    assert "it fits" in result.out


def test_nothing_is_run_and_nothing_is_written(big):
    before = sorted(path.name for path in big.folder.rglob("*"))
    assert big("plan", "big.yaml", "--gpus", "8xB200").code == 0
    assert sorted(path.name for path in big.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "8xH201"], "there is no accelerator H201 in the table; did you mean H200?"),
        (
            ["--gpus", "8xH200", "--layout", "dp_shard=4"],
            "--layout dp_shard=4 needs 4 ranks, but --gpus says 8",
        ),
        (["--gpus", "16xH200", "--layout", "tp=16"], "tp 16 does not divide the model's key heads, 8"),
        (
            ["--gpus", "2xH200", "--sampler-tp", "3"],
            "--sampler-tp 3 does not divide the 2 accelerators of --gpus",
        ),
        (
            ["precision=float64", "--gpus", "1xH200"],
            "precision float64 is for tests; plan float32 or bfloat16",
        ),
        (
            ["steps=0", "warmup.steps=2", "--gpus", "1xH200"],
            "steps is 0 (supervised training alone); a plan is of reinforcement, so set steps",
        ),
        (["model.path=gone", "--gpus", "1xH200"], "gone/config.json cannot be read: "),
    ],
)
def test_a_request_that_cannot_be_planned_is_refused(big, words, sentence):
    result = big("plan", "big.yaml", *words)
    assert result.code == 2
    assert result.err.startswith("error: ") and sentence in result.err
    assert result.err.count("\n") == 1
