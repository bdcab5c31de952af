"""Requests for another number of engines, as the run hears them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.rollout.backend import ScaleRequest
from millrace.run.scaling import ScaleRequestFile


def test_a_request_is_heard_once_and_the_file_read_each_second(tmp_path: Path) -> None:
    path, now_s = tmp_path / "scale.json", [0.0]
    path.write_text(json.dumps({"id": "old", "engines": 9}))
    asked = ScaleRequestFile(path, lambda: now_s[0])
    # What was asked of an earlier process of the run is forgotten.
    assert not path.exists()
    found = []
    for now_s[0] in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
        if now_s[0] == 1.5:
            path.write_text(json.dumps({"id": "a", "engines": 3}))
        if now_s[0] == 3.0:
            path.write_text(json.dumps({"id": "b", "engines": 3}))
        found.append((asked.poll(), asked.last_request))
    nothing = [([], "")] * 3
    first, second = ([ScaleRequest(3, id=id)] for id in "ab")
    assert found == [*nothing, (first, "a"), ([], "a"), (second, "b"), ([], "b")]
    asked.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"id": "a"}', '{"id": "a", "engines": 0}', '{"engines": 2}']
)
def test_what_nobody_asked_so_ends_no_run(text: str, tmp_path: Path) -> None:
    now_s = [0.0]
    asked = ScaleRequestFile(tmp_path / "scale.json", lambda: now_s[0])
    (tmp_path / "scale.json").write_text(text)
    now_s[0] = 2.0
    assert (asked.poll(), asked.last_request) == ([], "")
