"""The report of a run that goes on costs little, and says that the run is not finished."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from millrace import train
from millrace.run.live_report import LiveReport
from millrace.run.run import Controller
from tests.end_to_end.tiny import tiny_recipe


@pytest.mark.parametrize(("cost_s", "gap_s"), [(0.1, 30.0), (3.0, 150.0)])
def test_it_is_written_at_once_and_then_so_seldom_that_it_takes_a_fiftieth(cost_s, gap_s):
    now, written = [100.0], []

    def write() -> None:
        written.append(now[0])
        now[0] += cost_s

    live = LiveReport(write, clock=lambda: now[0])
    live.update()
    live.update()
    now[0] = 100.0 + cost_s + gap_s - 0.01
    live.update()
    assert written == [100.0]
    now[0] += 0.01
    live.update()
    assert written == [100.0, 100.0 + cost_s + gap_s]


@pytest.mark.slow
def test_a_run_that_is_gone_without_a_word_leaves_a_report_of_what_it_did(tmp_path, monkeypatch):
    """As kill -9 would: nothing is written any more once batch 3 is done."""

    class Gone(BaseException):
        pass

    reported, real = [], Controller.report

    def report(self):
        self.live = LiveReport(self._report_now)
        real(self)
        page = (self.folder.path / "report.html").read_text(encoding="utf-8")
        reported.append(re.sub("<[^>]*>", " ", page))
        if self.progress.stage == "reinforcement" and self.progress.step == 3:
            raise Gone

    monkeypatch.setattr(Controller, "report", report)
    with pytest.raises(Gone):
        train(tiny_recipe(tmp_path, {"sft": None}), quiet=True)
    folder = tmp_path / "runs" / "run"
    page = re.sub("<[^>]*>", " ", (folder / "report.html").read_text(encoding="utf-8"))
    assert page == reported[-1]
    assert "not finished" in page and "in 3 batches; the run has taken" in page and "so far." in page
    assert f"`millrace status {folder}` shows whether the run goes on." in page
    assert "evaluate" in page and "start" in page
    assert "at the start; no step has been recorded yet." in reported[0]
    assert not (folder / "summary.json").exists()
    assert json.loads((folder / "best.json").read_text())["measure"] == "reward/mean"
    assert Path(folder / "checkpoints" / "step-000002").is_dir()
