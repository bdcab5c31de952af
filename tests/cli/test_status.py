"""`millrace status` says what a run is at."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_a_finished_run_says_so_and_leaves_no_status_behind(lab):
    lab.train()
    result = lab("status", "runs/tiny-1")
    best = "  mean reward on held-out prompts: 0.000, best 0.000 (step-000000)"
    assert (result.code, result.err, result.out) == (0, "", f"run runs/tiny-1: finished\n{best}\n")
    told = json.loads(lab("status", "runs/tiny-1", "--json").out)
    assert (told["state"], told["waits"], told["pid"]) == ("finished", [], None)


def test_what_is_no_run_is_an_error(lab):
    result = lab("status", "nowhere")
    assert (result.code, result.err) == (1, "error: nowhere is not a run folder (it has no recipe.yaml)\n")
