"""A mixture of experts learns through the experts it was sampled with, and keeps them in balance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from millrace import resume, train
from millrace.errors import SetupError
from millrace.run.build import build
from millrace.run.run import Controller
from tests.close import close_fp64
from tests.end_to_end.rank_runs import numbers, run
from tests.end_to_end.runs import check_equal
from tests.end_to_end.tiny import TREE, metrics_of, tiny_recipe, write_sums

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    # A dense layer, then one whose router has a bias for its choice.
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "replay": {"policy.router_replay": True},
    "replay of the proximal policy too": {
        "policy.router_replay": True,
        "policy.proximal": "recompute",
        "policy.optimizer_steps_per_batch": 2,
        "policy.kl": {"coefficient": 0.1},
    },
    "loss": {"policy.router_aux_coefficient": 0.01},
    "bias": {"policy.router_bias_step": 0.01, "policy.router_replay": True},
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def options(case: str) -> dict[str, Any]:
    architecture = "dots1" if case == "bias" else "qwen3_moe"
    shape = {key: value for key, value in TREE["model"]["shape"].items() if key != "head_dim"}
    model = {"architecture": architecture, "shape": shape | EXPERTS[architecture]}
    # With a bonus for entropy every answer is trained on, also where all rewards are equal.
    bonus = {} if case == "loss" else {"policy.entropy_coefficient": 0.01}
    return {"model": model, "name": case.replace(" ", "_")} | bonus | CASES[case]


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("case", CASES)
def test_a_mixture_learns(case: str, tmp_path: Path) -> None:
    report = train(tiny_recipe(tmp_path, options(case)), quiet=True)
    assert (report.status, report.steps, report.skipped_steps) == ("finished", 4, 0)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    assert len(batches) == 4
    for record in batches:
        assert 1 <= record["policy/router_max_load"] <= 4
        assert 0.5 < record["policy/router_load_entropy"] <= 1
        assert record["mismatch/max"] < 1e-4
        assert all(math.isfinite(value) for key, value in record.items() if isinstance(value, float)), record


@pytest.mark.slow
def test_biases_move_with_every_optimizer_step(tmp_path: Path) -> None:
    report = train(tiny_recipe(tmp_path, options("bias") | {"checkpoint.keep": 9}), quiet=True)
    saved = [
        load_file(folder / "model" / "model.safetensors")
        for folder in sorted(Path(report.run).glob("checkpoints/step-*"))
    ]
    assert len(saved) == 3
    assert not saved[0][BIAS].any()
    # Two optimizer steps lie between two checkpoints.
    for before, after in zip(saved, saved[1:], strict=False):
        steps = ((after[BIAS] - before[BIAS]) / 0.01).tolist()
        close_fp64([round(step) for step in steps], steps, atol=1e-3)
        assert {abs(round(step)) for step in steps} <= {0, 1, 2}
        assert any(steps)


@pytest.mark.slow
def test_a_run_that_replays_and_balances_goes_on_where_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = options("bias") | {"policy.router_aux_coefficient": 0.01}
    whole = train(tiny_recipe(tmp_path, wanted), quiet=True)
    record = Controller.record

    def dying(self: Controller, *arguments: Any) -> None:
        record(self, *arguments)
        if (arguments[0], self.progress.step) == ("reinforcement", 3):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Controller, "record", dying)
        train(tiny_recipe(tmp_path, wanted | {"name": "left"}), quiet=True)
    resume(tmp_path / "runs" / "left", quiet=True)
    check_equal(tmp_path / "runs" / "left", Path(whole.run))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", ["router_replay", "router_aux_coefficient", "router_bias_step"])
def test_a_dense_policy_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        SetupError,
        match=rf"^policy\.{name} does not go with this policy: a qwen3 has no routers; only a mixture of "
        "experts has; remove it$",
    ):
        build(tiny_recipe(tmp_path, {f"policy.{name}": True if name == "router_replay" else 0.1}), None)


def test_biases_of_routers_that_have_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"^policy\.router_bias_step does not go .* has no bias e_score_corr"
    ):
        build(tiny_recipe(tmp_path, options("replay") | {"policy.router_bias_step": 0.1}), None)


@pytest.mark.slow
def test_two_ranks_with_half_of_the_experts_each_learn_what_one_process_learns(tmp_path: Path) -> None:
    data = TREE["data"] | {"train": str(write_sums(tmp_path))}
    path = tmp_path / "experts.yaml"
    path.write_text(yaml.safe_dump(TREE | {"data": data, "model": options("replay")["model"]}))
    experts = ["policy.router_replay=true", "policy.entropy_coefficient=0.01"]
    told = {}
    for name, more in (("alone", []), ("spread", ["mesh.dp_shard=2", "mesh.ep=2"])):
        where = [f"output={tmp_path / 'runs'}", f"name={name}"]
        done = run(["train", str(path), *where, *experts, *more])
        assert done.returncode == 0, done.stderr
        told[name] = [r for r in numbers(tmp_path / "runs" / name) if r["stage"] == "reinforcement"]
    assert told["alone"][0].keys() == told["spread"][0].keys()
    for key in ("policy/router_max_load", "policy/router_load_entropy", "policy/grad_norm"):
        close_fp64(told["spread"][0][key], told["alone"][0][key], rtol=1e-3)
