"""`millrace plan` says whether a recipe fits, what to change, and how long a step takes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from millrace.cli.plan import workload
from millrace.config.recipe import load_recipe
from millrace.planner.hardware import GPUS
from millrace.planner.layout import Layout
from millrace.planner.memory import Workload, memory_per_rank
from millrace.planner.model_shape import ModelShape
from tests.close import close_fp64
from tests.planner.shapes import LLAMA_8B

RECIPE = """steps: 3
precision: bfloat16
data: {train: none.jsonl, max_prompt_tokens: 512}
model: {path: llama}
rollout: {prompts_per_step: 16, samples_per_prompt: 4, max_tokens: 1536}
engine: {max_num_seqs: 16}
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
    result = big(
        "plan", "big.yaml", "--gpus", "2xH200", "--layout", "dp_shard=2", "mesh.activation_checkpointing=full"
    )
    work = replace(WORK, checkpointing="full")
    memory = memory_per_rank(ModelShape.of(LLAMA_8B), Layout(dp_shard=2), work, GPUS["H200"].memory_bytes)
    rows = shown(result.out)
    assert result.code == 0
    assert result.out.startswith(
        "2 x H200, layout dp_shard=2 (as the recipe's mesh asks for)\nmodel: 8,030,261,248 weights\n"
    )
    for name in ("weights", "moments", "activations", "cache"):
        close_fp64(rows[name], memory.parts()[name] / 1e9, atol=0.05)
    close_fp64(rows["while training"], memory.training / 1e9, atol=0.05)
    assert "critic" not in rows and "frozen" not in rows
    assert f"it fits: {memory.peak / 1e9:.1f} of 133.9 GB" in result.out


def test_a_step_is_timed_at_the_mfu_that_is_given(big):
    words = (
        "plan",
        "big.yaml",
        "--gpus",
        "2xH200",
        "mesh.dp_shard=2",
        "mesh.activation_checkpointing=full",
        "--mfu",
    )
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
        "policy.tokens_per_micro_batch=2048",
        "engine.max_num_seqs=4 engine.cache_tokens=8192",
        "mesh.activation_checkpointing=full",
        "policy.optimizer.kind=adamw_8bit",
    ]
    assert "seconds of a step" not in result.out


def test_advice_in_the_words_of_settings_leads_to_a_plan_that_fits(big):
    result = big("plan", "big.yaml", "--gpus", "2xH100", "engine.cache_tokens=20480")
    lines = result.out.partition("what helps, each on top of the ones before\n")[2].splitlines()
    words = [line.split(":")[0].strip() for line in lines]
    assert result.code == 1 and words[0] == "mesh.activation_checkpointing=full"
    layout = lines[-1].split()[-1]
    again = big(
        "plan", "big.yaml", "--gpus", "2xH100", "--layout", layout, "engine.cache_tokens=20480", *words
    )
    assert again.code == 0
    assert f"layout {layout} (as the recipe's mesh asks for)" in again.out


def test_weights_in_the_hosts_memory_are_told(big):
    words = (
        "plan",
        "big.yaml",
        "--gpus",
        "4xH200",
        "--layout=dp_shard=4",
        "mesh.activation_checkpointing=full",
    )
    plain, moved = shown(big(*words).out), shown(big(*words, "mesh.offload=true").out)
    # In bfloat16 a gradient is as large as its weight.
    close_fp64(moved["in the host"], 2 * plain["weights"] + plain["moments"], atol=0.1)
    assert not {"weights", "moments", "gradients"} & set(moved) and "in the host" not in plain


def test_where_nothing_helps_more_accelerators_are_asked_for(big):
    result = big("plan", "big.yaml", "precision=float32", "--gpus", "2x4090")
    assert result.code == 1
    assert result.out.splitlines()[-1] == "  more accelerators, or larger ones"
    assert "mesh.compute_dtype=bfloat16: " in result.out


def test_a_model_that_only_scores_and_a_critic_are_counted(big):
    options = ["--gpus", "8xH200", "mesh.dp_shard=8", "mesh.activation_checkpointing=full"]
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


def test_what_the_ranks_do_is_what_the_recipe_says(big):
    shared = {"dp_shard": 2, "tp": 2, "pp": 2, "pp_chunks": 2, "sequence_parallel": True}
    saving = {"compute_dtype": "bfloat16", "activation_checkpointing": "selective", "offload": True}
    mesh = shared | saving | {"reshard_after_forward": False}
    config = load_recipe("big.yaml", {"precision": "float32", "mesh": mesh})
    wide = replace(WORK, weight_bytes=4, moment_bytes=4, checkpointing="selective", offload=True)
    assert workload(config) == replace(wide, reshard_after_forward=False, sequence=True, num_chunks=2)
    config = load_recipe("big.yaml", {"policy.kl": {"coefficient": 0.1, "estimator": "full"}})
    assert workload(config) == replace(WORK, num_frozen=1, num_scorings=1, frozen_beside=True)
    config = load_recipe("big.yaml", {"engine.colocated": True})
    assert workload(config) == replace(WORK, colocated=True)
    config = load_recipe("big.yaml", {"policy.optimizer.kind": "adamw_8bit"})
    assert workload(config) == replace(WORK, moment_bytes=1 + 4 / 256)


def test_a_layout_that_the_recipe_does_not_go_with_is_not_chosen(big):
    words = ("plan", "big.yaml", "--gpus", "8xH200")
    assert "layout dp_shard=4,tp=2 (the simplest" in big(*words).out
    # Drawing among few tokens asks for all logits on one rank.
    assert "layout dp_shard=4,cp=2 (the simplest" in big(*words, "rollout.top_k=5").out


def test_ranks_that_exchange_keys_need_not_divide_the_heads(big):
    words = ("plan", "big.yaml", "--gpus", "3xH200", "--layout", "cp=3", "mesh.activation_checkpointing=full")
    assert big(*words, "mesh.cp_kind=ring").code == 0


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
            "the layout dp_shard=4 needs 4 ranks, and there are 8",
        ),
        (["--gpus", "16xH200", "--layout", "tp=16"], "does not divide the model's 8 key heads"),
        (
            ["--gpus", "8xH200", "--layout", "pp=8", "mesh.pp_chunks=5"],
            "mesh.pp 8 x mesh.pp_chunks 5 is 40 stages, but the model has 32 layers",
        ),
        (
            ["--gpus", "3xH200", "--layout", "cp=3"],
            "mesh.cp is 3, which does not divide the 32 attention heads of a rank",
        ),
        (["--gpus", "2xH200", "mesh.offload=true"], "mesh.offload has no effect with one rank"),
        (
            ["--gpus", "2xH200", "--layout", "tp=2", "model.adapter={}"],
            "model.adapter does not go with mesh.tp above 1; set that to 1, or remove model.adapter",
        ),
        (
            ["precision=float64", "--gpus", "1xH200"],
            "precision float64 is for tests; plan float32 or bfloat16",
        ),
        (
            ["steps=0", "sft.steps=2", "--gpus", "1xH200"],
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
