"""Requests for another number of engines, as the run hears them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from millrace.orchestration import wanted
from millrace.orchestration.fleet import Engines
from millrace.orchestration.run_folder import RunFolderError
from millrace.orchestration.runtime.base import Wanted
from millrace.orchestration.status import Status
from millrace.orchestration.wanted import HEAR_S, Asked, ask


def test_a_request_is_heard_once_and_the_file_read_each_second(tmp_path: Path) -> None:
    path, now_s = tmp_path / "wanted.json", [0.0]
    path.write_text(json.dumps({"id": "old", "engines": 9}))
    asked = Asked(path, lambda: now_s[0])
    # What was asked of an earlier process of the run is forgotten.
    assert not path.exists()
    found = []
    for now_s[0] in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
        if now_s[0] == 1.5:
            path.write_text(json.dumps({"id": "a", "engines": 3}))
        if now_s[0] == 3.0:
            path.write_text(json.dumps({"id": "b", "engines": 3}))
        found.append((asked.look(), asked.heard))
    nothing = [([], "")] * 3
    assert found == [*nothing, ([Wanted(3)], "a"), ([], "a"), ([Wanted(3)], "b"), ([], "b")]
    asked.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"id": "a"}', '{"id": "a", "engines": 0}', '{"engines": 2}']
)
def test_what_nobody_asked_so_ends_no_run(text: str, tmp_path: Path) -> None:
    now_s = [0.0]
    asked = Asked(tmp_path / "wanted.json", lambda: now_s[0])
    (tmp_path / "wanted.json").write_text(text)
    now_s[0] = 2.0
    assert (asked.look(), asked.heard) == ([], "")


@pytest.mark.parametrize("answers", [True, False])
def test_a_request_that_is_not_heard_in_time_is_taken_back(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").touch()
    now_s, request = [0.0], tmp_path / "wanted.json"

    def status(run: Path) -> Status:
        heard = json.loads(request.read_text())["id"] if answers and now_s[0] > HEAR_S - 1 else ""
        return Status(str(run), "running", engines=Engines(2, {}, asked=heard))

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(wanted, "engines_of", lambda run: Engines(1, {}))
    monkeypatch.setattr(wanted, "read_status", status)
    if answers:
        assert ask(tmp_path, 2, print, clock=lambda: now_s[0], sleep=sleep).wanted == 2
        return
    problem = f"run {re.escape(str(tmp_path))} did not hear within 60 s that 2 engines are wanted"
    with pytest.raises(RunFolderError, match=problem):
        ask(tmp_path, 2, print, clock=lambda: now_s[0], sleep=sleep)
    assert not request.exists() and now_s[0] > HEAR_S
