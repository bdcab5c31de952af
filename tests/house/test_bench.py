"""`make bench`: every script runs, the table says how each ended, and quick runs write nothing."""

from __future__ import annotations

import re

import pytest

from tests.house.scripts import load_script
from tests.house.source import ROOT, write

bench = load_script("bench")
ENDS = {
    "benchmarks/good.py": "import sys\nprint(sys.argv[1:])\n",
    "benchmarks/lacking.py": "raise SystemExit(2)\n",
    "benchmarks/peers/part.py": "raise SystemExit(1)\n",
    "examples/own/reward.py": "def reward(): ...\n",
}


def test_scripts_are_those_of_both_folders():
    names = set(bench.scripts(ROOT))
    assert {"gae", "grpo_step", "own_task/make_data"} <= names
    assert not {"own_task/my_reward", "serve", "ours"} & names


def test_an_eighth_rounded_up_is_drawn_and_each_script_sometimes():
    names = [f"script{number}" for number in range(13)]
    draws = [bench.drawn(names, str(salt)) for salt in range(100)]
    assert {len(one) for one in draws} == {2}
    assert {name for one in draws for name in one} == set(names)
    assert bench.drawn(names, "7") == draws[7]


def test_the_table_says_how_each_ended():
    outcomes = [
        bench.Outcome("gae", 2.4, ""),
        bench.Outcome("paged_attention", 1.0, "", skipped=True),
        bench.Outcome("rollout", 12.0, "exit code 1"),
    ]
    assert bench.table(outcomes).splitlines() == [
        "script           seconds  result",
        "gae                    2  passed",
        "paged_attention        1  skipped, as it says above",
        "rollout               12  exit code 1",
    ]


@pytest.mark.world
def test_one_that_lacks_something_is_no_failure_and_words_are_handed_on(tmp_path, capfd):
    write(tmp_path, ENDS)
    assert bench.main(["--quick", "--turns=3"], tmp_path) == 0
    out = capfd.readouterr().out
    assert "['--quick', '--turns=3']" in out
    assert re.search(r"^good +\d+  passed\nlacking +\d+  skipped", out, re.M)


@pytest.mark.world
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise RuntimeError('no such optimizer')", "exit code 1"),
        ("open('benchmarks/results/bad.json', 'w')", "wrote benchmarks/results/bad.json"),
    ],
)
def test_one_that_fails_or_writes_in_quick_mode_fails_the_whole(text, problem, tmp_path, capfd):
    write(tmp_path, {**ENDS, "benchmarks/bad.py": text, "benchmarks/results/gae.json": "{}"})
    assert bench.main(["--quick"], tmp_path) == 1
    assert re.search(rf"^bad +\d+  {re.escape(problem)}\ngood", capfd.readouterr().out, re.M)


def test_every_script_has_a_quick_mode():
    """The gate runs an eighth of them; this holds for all at once."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in bench.scripts(ROOT).items()}
    assert [name for name, text in texts.items() if '"--quick", action="store_true"' not in text] == []
