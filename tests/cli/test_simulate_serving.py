"""`millrace simulate-serving` compares policies with a measured cost model."""

from __future__ import annotations

import json
import re

import pytest

from millrace.planner.engine_cost_file import write_cost
from tests.planner.costs import measurement

ROW = re.compile(
    r"^(collocated|adaptive|\d:\d) +([\d.e+-]+) +([\d.e+-]+) +([\d.e+-]+) +([\d.e+-]+) +(\d+)% +(\S+)$", re.M
)
FEW = ["--requests", "20", "--prompt", "60,0.5", "--output", "5,0.5"]


@pytest.fixture
def measured(lab):
    write_cost(measurement(), lab.folder / "cost.json")
    return lab


@pytest.mark.slow
def test_policies_are_compared(measured):
    result = measured("simulate-serving", "cost.json", "--rate", "20", *FEW)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("steps: qwen3, 0.001 M parameters, float32, on AMD EPYC\n20 requests, ")
    rows = [match.groups() for match in ROW.finditer(result.out)]
    assert [row[0] for row in rows] == ["collocated", "adaptive", "1:1"]
    assert all(float(row[1]) <= float(row[2]) and float(row[5]) == 100 for row in rows)
    again = measured("simulate-serving", "cost.json", "--rate", "20", *FEW, "--policy", "1:1")
    assert [match.groups() for match in ROW.finditer(again.out)] == rows[2:]


def test_a_trace_has_its_own_rate(measured):
    lines = [json.dumps({"timestamp": 500 * i, "input_length": 50, "output_length": 4}) for i in range(21)]
    measured.write("trace.jsonl", lines)
    result = measured("simulate-serving", "cost.json", "--trace", "trace.jsonl", "--policy", "collocated")
    assert result.code == 0 and "21 requests, 2.1 a second; on average 50 tokens" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--rate is missing; give requests a second, or a --trace"),
        (["--rate", "-1"], "--rate is -1; it must be above 0"),
        (["--rate", "1", "--latency", "nan"], "--latency is nan; it must be 0 or more and finite"),
        (["--trace", "none.jsonl", "--output", "9,1"], "--output has no effect with --trace; leave one"),
        (["--rate", "1", "--ttft", "0"], "--ttft is 0; it must be above 0"),
        (
            ["--rate", "1", "--burstiness", "0"],
            "200 requests at a rate of 1/s with burstiness 0 cannot",
        ),
        (["--rate", "1", "--prompt", "5"], "--prompt is '5'; write the median and the deviation"),
        (["--rate", "1", "--policy", "3:3"], "policy 3:3 has 6 engines; there are 2"),
        (["--rate", "1", "--cache-tokens", "64"], "a request cannot be served: the prompt has"),
        (["--trace", "none.jsonl"], "--trace none.jsonl: No such file or directory"),
    ],
)
def test_mistakes_are_one_sentence(measured, words, message):
    result = measured("simulate-serving", "cost.json", *words)
    assert result.code == 2 and result.err.startswith(f"error: {message}") and result.err.count("\n") == 1


def test_a_file_that_is_no_cost_model_is_refused(measured):
    result = measured("simulate-serving", "sums.jsonl", "--rate", "1")
    assert result.code == 2 and result.err.startswith("error: sums.jsonl holds no cost model of this version")
