"""A run of two seconds: forty sums, a model of nine thousand weights, two batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.cli.main import main
from tests import forked
from tests.house.source import ROOT

RECIPE = """# Sums of one digit, for tests: nothing is learned in two batches.
steps: 2
device: cpu
threads: 1
loggers: []
data: {train: sums.jsonl, eval_size: 8}
tokenizer: {vocab_size: 270}
model:
  shape: {hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8,
          intermediate_size: 32, max_position_embeddings: 64, tie_word_embeddings: true}
rollout: {prompts_per_step: 4, samples_per_prompt: 2, max_tokens: 3}
rewards: [{kind: exact}]
"""
JUDGES = """import time

def raises(prompt, completion, answer, row):
    return row["price"]

def hangs(prompt, completion, answer, row):
    time.sleep(60)

def nan(prompt, completion, answer, row):
    return float("nan")

def slow(prompt, completion, answer, row):
    time.sleep(0.3)
    return 1.0

def varied(prompt, completion, answer, row):
    return float(sum(map(ord, completion)) % 5)
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Lab:
    """A folder with data, recipe and reward functions, where commands run as a user's would."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self._capture = capture
        patch.chdir(folder)
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(5)]
        self.lines = [json.dumps(row) for row in rows]
        self.write("sums.jsonl", self.lines)
        self.write("tiny.yaml", RECIPE.splitlines())
        self.write("judges.py", JUDGES.splitlines())

    def write(self, name: str, lines: list[str]) -> None:
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def __call__(self, *words: str) -> Result:
        """A command in this process, where torch is loaded already."""
        self._capture.readouterr()
        self.patch.setattr(sys, "argv", ["millrace", *words])
        with pytest.raises(SystemExit) as left:
            main()
        shown = self._capture.readouterr()
        return Result(left.value.code, shown.out, shown.err)

    def train(self, *overrides: str) -> Result:
        return self("train", "tiny.yaml", *overrides)

    def run_apart(self, *words: str, limit_s: float) -> Result:
        """A command in a process of its own, which starts at once, until it ends."""
        done = forked.run(words, limit_s)
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str, **options) -> subprocess.Popen[str]:
        """A command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "millrace.cli.main", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
