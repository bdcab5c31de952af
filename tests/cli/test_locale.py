"""Names that are not ASCII, in a locale that knows no other letters; and names that are no text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.cli.main import in_utf8
from tests.house.source import ROOT

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
DEADLINE_S = 120


def in_c(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli.main", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **C_LOCALE},
        capture_output=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.slow
def test_a_run_lives_in_a_folder_with_an_umlaut_in_the_c_locale(lab):
    done = in_c("train", "tiny.yaml", "output=grün", "--quiet")
    assert (done.returncode, done.stderr) == (0, b"")
    run = Path("grün") / "tiny-1"
    assert (run / "report.html").is_file()
    seen = in_c("evaluate", str(run))
    assert (seen.returncode, seen.stderr) == (0, b"")
    assert seen.stdout.startswith(b"mean reward ") and b"\naccuracy " in seen.stdout


def test_a_command_starts_again_in_utf8_once_and_only_where_it_must():
    words = ["python", "-m", "millrace.cli.main", "status", "gr\udcc3\udcbcn"]
    again = in_utf8("ascii", words)
    assert again == [sys.executable, "-X", "utf8", *words[1:]]
    assert in_utf8("ascii", again) is None
    assert in_utf8("utf-8", words) is None


def test_a_name_that_is_not_utf8_is_refused(lab):
    result = lab("status", "gr\udcfcn")
    assert (result.code, result.err) == (1, "error: the name gr\\udcfcn is not UTF-8; choose another one\n")


@pytest.mark.slow
def test_control_characters_of_a_name_are_escaped(lab):
    lab.train()
    run = Path("runs", "tiny-1").rename("runs/a\nb\x1b[2J")
    result = lab("status", str(run))
    assert (result.code, result.out.splitlines()[0]) == (0, "run runs/a\\nb\\x1b[2J: finished")
    assert lab("resume", str(run)).err.startswith("error: run runs/a\\nb\\x1b[2J is finished; ")
