"""What runs on a GPU must be what runs on the CPU, up to rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace import load_recipe, train
from tests.close import close_fp32


@pytest.mark.gpu
def test_a_run_on_cuda_starts_where_one_on_the_cpu_starts_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    losses = {}
    for device in ("cpu", "cuda"):
        changes = {"device": device, "name": device, "steps": 2, "sft.steps": 20, "loggers": []}
        report = train(load_recipe("quickstart", changes), quiet=True)
        assert report.status == "finished" and report.device.startswith(device)
        records = map(json.loads, (Path(report.run) / "metrics.jsonl").read_text().splitlines())
        losses[device] = [record["loss"] for record in records if record["stage"] == "sft"]
    close_fp32(losses["cuda"][0], losses["cpu"][0])
    assert losses["cuda"][-1] < 0.8 * losses["cuda"][0]
