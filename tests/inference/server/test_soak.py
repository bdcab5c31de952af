"""The soak of the server, for some seconds, and what it would find."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest

from millrace.inference.engine import EngineStats
from tests.house.scripts import load_script
from tests.house.source import ROOT

SECONDS = 8
IDLE = EngineStats(
    num_running=0,
    num_waiting=0,
    kv_usage=0.0,
    prefix_queries=9,
    prefix_hits=4,
    num_preemptions=1,
    prompt_tokens=9,
    generation_tokens=9,
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("soak")


@pytest.mark.slow
def test_nothing_is_left_over_after_some_seconds():
    command = [sys.executable, "-W", "error", str(ROOT / "scripts" / "soak.py"), "--seconds", str(SECONDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"soak of {SECONDS} s: ")
    assert done.stdout.endswith("; nothing is left over\n")
    assert int(done.stdout.split()[4]) > 20


def test_each_thing_that_is_left_over_is_found(script):
    good = Counter({200: 5, 429: 1})
    assert script.faults(IDLE, good, [100, 100 + (64 << 20)], 0) == []
    held = replace(IDLE, num_running=1, num_waiting=2, kv_usage=0.125)
    assert script.faults(held, Counter({429: 1, 500: 2}), [0, (66 << 20)], 3) == [
        "2 answers had status 500",
        "no request succeeded",
        "1 requests still run and 2 wait",
        "12.5% of the blocks are held by nobody's requests",
        "the server still knows 3 requests",
        "the memory grew by 66 MiB in the second half",
    ]
