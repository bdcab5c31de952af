"""`import millrace` and what the README shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import millrace
from millrace import RunConfig, RunReport, load_recipe, resume, train
from tests.end_to_end.tiny import tiny_recipe


def test_the_public_names_are_these():
    assert millrace.__all__ == ["RunConfig", "RunReport", "__version__", "load_recipe", "resume", "train"]
    assert all(getattr(millrace, name) is not None for name in millrace.__all__)
    assert [resume.__module__, train.__module__] == ["millrace.run.loop"] * 2


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'millrace' has no attribute 'tran'"):
        _ = millrace.tran


def test_a_shipped_recipe_takes_overrides():
    config = load_recipe("quickstart", {"steps": 50, "policy.optimizer.learning_rate": 3e-4})
    assert isinstance(config, RunConfig)
    assert (config.steps, config.policy.optimizer.learning_rate) == (50, 3e-4)


def test_train_gives_the_report_that_is_in_the_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = tiny_recipe(tmp_path, {"name": None, "output": "runs"})
    report = train(config, quiet=True)
    assert isinstance(report, RunReport)
    assert (report.status, report.name, report.recipe) == ("finished", "run-1", "run")
    assert report.run == str(Path("runs") / "run-1")
    written = json.loads((Path(report.run) / "summary.json").read_text())
    assert written == {field: getattr(report, field) for field in written}
    assert (Path(report.run) / "report.html").stat().st_size > 1000
    assert train(config, quiet=True).name == "run-2"
    assert train(config, recipe="mine", quiet=True).name == "mine-1"
    assert capsys.readouterr().out == ""
