"""A sampler that is not the trainer's policy is found in the first batch, and rounding is no such thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace import train
from millrace.rollout import batches as source
from millrace.rollout.sampled_batch import sampling
from millrace.run.health.health_checks import RunStopped, check_current
from millrace.run.rounding import rounding
from millrace.run.train_step import Compared
from millrace.transport.weight_update import LocalTransport
from tests.close import close_fp32, close_fp64
from tests.end_to_end.test_mixtures import options
from tests.end_to_end.tiny import metrics_of, tiny_recipe
from tests.training.pieces import random_batch

# With a bonus for entropy every answer is trained on.
SHORT = {"steps": 2, "sft": None, "policy.entropy_coefficient": 0.01}
WRONG = "the sampler does not sample from the trainer's policy: their log-probabilities of "
HEALTHY: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16 at a low temperature": {"precision": "bfloat16", "rollout.temperature": 0.2},
    "float64, corrected": {
        "precision": "float64",
        "policy.proximal": "recompute",
        "policy.correction": {"high": 5.0},
    },
    "bit for bit": {"deterministic": True},
    "an adapter": {"precision": "bfloat16", "model.adapter": {"rank": 4}},
    "a mixture without replay": options("loss") | {"precision": "bfloat16"},
    "two tokens a batch": {
        "precision": "bfloat16",
        "rollout.prompts_per_step": 1,
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 1,
    },
    "two steps a batch": {"policy.optimizer_steps_per_batch": 2},
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("mode", HEALTHY)
def test_rounding_is_no_news(mode: str, tmp_path: Path):
    config = tiny_recipe(tmp_path, {**SHORT, **HEALTHY[mode]})
    report = train(config, quiet=True)
    batches = [record for record in metrics_of(report.run) if record["stage"] == "reinforcement"]
    # And by far: a tenth of what would be told.
    most = rounding(config.precision, config.mesh.compute_dtype, config.rollout.temperature) / 40
    assert len(batches) == 2 and max(record["mismatch/current"] for record in batches) < most
    assert not [line for line in report.warnings if line.startswith(WRONG)]
    assert not (Path(report.run) / "evidence").exists()


def perturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's weights change after they were verified."""
    real = LocalTransport._try_update

    def try_update(self: LocalTransport, sent: Any, canary: Any, version: int) -> None:
        real(self, sent, canary, version)
        generator = torch.Generator().manual_seed(0)
        noisy = [
            (name, t + 0.3 * torch.randn(t.shape, generator=generator, dtype=t.dtype)) for name, t in sent
        ]
        self._update_engine(noisy, version)

    monkeypatch.setattr(LocalTransport, "_try_update", try_update)


def wrong_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine samples at another temperature than the recipe's."""

    def hotter(rollout: Any, stops: Any) -> Any:
        return sampling(rollout.model_copy(update={"temperature": 1.1}), stops)

    monkeypatch.setattr(source, "sampling", hotter)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("fault", [perturbed, wrong_temperature])
@pytest.mark.parametrize("equal", [False, True])
def test_a_fault_is_caught_in_the_first_batch(fault, equal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    # Where all rewards are equal, nothing is trained on.
    more = {"policy.entropy_coefficient": 0.0} if equal else {}
    config = tiny_recipe(tmp_path, {**SHORT, "model.shape.initializer_range": 0.5, **more})
    with pytest.raises(RunStopped) as caught:
        train(config, quiet=True)
    told, run = str(caught.value), tmp_path / "runs" / "run"
    assert told.startswith(WRONG)
    assert "(mismatch/current), and limits.mismatch is 0.0014; the batch is in" in told
    assert told.endswith("or raise limits.mismatch where the sampler differs on purpose")
    (record,) = [record for record in metrics_of(run) if record["stage"] == "reinforcement"]
    assert (record["tokens/trained"] == 0) == equal
    kept = load_file(run / "evidence" / "mismatch.safetensors")
    sampler_N = kept["sampler_logprob_T"][kept["action_mask_T"]]
    close_fp32(float((kept["trainer_logprob_N"] - sampler_N).abs().max()), record["mismatch/max"])
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["warnings"]) == ("failed", [told])
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000"]


def test_a_limit_that_is_raised_lets_the_run_go_on_and_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wrong_temperature(monkeypatch)
    report = train(
        tiny_recipe(tmp_path, {**SHORT, "limits.mismatch": 9.0, "limits.mismatch_warning": 1e-3}), quiet=True
    )
    first, *_ = [line for line in report.warnings if line.startswith(WRONG)]
    assert "limits.mismatch_warning is 0.001" in first
    assert (report.status, report.steps) == ("finished", 2)


def judged(found: float, folder: Path, *, warning: float = 0.1, limit: float = 0.4) -> str | None:
    compared = Compared(random_batch(1), torch.zeros(3), 7)
    record = {"mismatch/current": found, "policy/loss": 1.0}
    return check_current(record, compared, warning=warning, limit=limit, folder=folder)


def test_between_the_limits_a_run_is_warned_and_above_them_it_stops(tmp_path: Path):
    assert judged(0.1, tmp_path) is None
    assert judged(float("nan"), tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    told = judged(0.3, tmp_path)
    assert told == (
        f"{WRONG}7 tokens that the current weights sampled differ by 0.3 nats in the mean "
        f"(mismatch/current), and limits.mismatch_warning is 0.1; the batch is in "
        f"{tmp_path}/mismatch.safetensors. Run millrace doctor --numerics RECIPE, which names what differs"
    )
    assert json.loads((tmp_path / "mismatch.json").read_text()) == {"mismatch/current": "0.3"}
    with pytest.raises(RunStopped, match=r"limits\.mismatch is 0\.4; .*, or raise limits\.mismatch where"):
        judged(0.5, tmp_path)
    # Ahead of training.
    assert "limits.mismatch_warning is 0.1" in str(judged(3.0, tmp_path, limit=float("inf")))
    assert check_current({}, None, warning=0.1, limit=0.4, folder=tmp_path) is None


@pytest.mark.parametrize(
    ("dtypes", "temperature", "most"),
    [
        (("float32", None), 1.0, 4 * 2**-11.5),
        (("float64", None), 1.0, 4 * 2**-11.5),
        (("bfloat16", None), 2.0, 4 * 2**-3.5),
        (("bfloat16", None), 0.5, 8 * 2**-3.5),
        (("float32", "bfloat16"), 1.0, 4 * 2**-3.5),
    ],
)
def test_what_rounding_explains_follows_from_dtype_and_temperature(dtypes, temperature, most):
    close_fp64(rounding(*dtypes, temperature), most)
