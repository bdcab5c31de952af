"""Chosen steps leave a Chrome trace that names what was computed; the others leave nothing."""

from __future__ import annotations

import json

import torch

from millrace.observability.profile import profiled


def test_a_chosen_step_leaves_a_trace_of_its_operations(tmp_path):
    a_33 = torch.ones(3, 3)
    for step in (1, 2, 3):
        with profiled(step, [2], tmp_path / "profile"):
            a_33 = a_33 @ a_33
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step-000002.json"
    names = {event.get("name") for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]}
    assert "aten::mm" in names


def test_without_chosen_steps_there_is_no_folder(tmp_path):
    with profiled(1, [], tmp_path / "profile"):
        pass
    assert list(tmp_path.iterdir()) == []
