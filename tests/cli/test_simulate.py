"""`millrace simulate` compares ways to share accelerators, and runs with their own simulation."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from millrace.cli.simulate import best_rows, possible_splits
from millrace.errors import PlanError
from millrace.simulation.calibrate import read_measured
from tests.close import close_fp64
from tests.planner.shapes import LLAMA_8B
from tests.rollout.written import OTHER_S, write_run

RECIPE = """steps: 3
precision: bfloat16
data: {train: none.jsonl, max_prompt_tokens: 128}
model: {path: llama}
mesh: {dp_shard: 2, activation_checkpointing: full}
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_tokens: 512}
engine: {max_num_seqs: 64}
rewards: [{kind: exact}]
"""
SHORT = "policy.tokens_per_micro_batch=1024"
ROW = re.compile(r"^([* ]) (\w[\w ]*?) +(\d+) +(\d+) +([\d.]+) +([\d,]+) +([\d.]+)x +(.+)$", re.M)


@pytest.fixture
def big(lab):
    """A recipe whose model is a config.json without weights."""
    (lab.folder / "llama").mkdir()
    (lab.folder / "llama" / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    lab.write("big.yaml", RECIPE.splitlines())
    return lab


def rows(out):
    """Star, mode, how many sample and train, seconds of a step, speed."""
    found = [match.groups() for match in ROW.finditer(out)]
    return [
        (star, mode, int(sampling), int(training), float(step), float(speed))
        for star, mode, sampling, training, step, _, speed, _ in found
    ]


def test_modes_and_splits_are_compared_and_drawn(big):
    result = big("simulate", "big.yaml", "--gpus", "8xH200", "--picture", "who.svg")
    found = rows(result.out)
    assert result.code == 0
    assert result.out.startswith("durations: 8 x H200, as millrace plan counts at 40% of the peak; ")
    assert "a batch: 8 prompts x 4 answers" in result.out
    modes = ["colocated", "synchronous", "one step off", "4 steps ahead"]
    assert list(dict.fromkeys(row[1] for row in found)) == modes
    assert found[0][:4] == ("*", "colocated", 8, 8)
    best = {mode: min((row for row in found if row[1] == mode), key=lambda row: row[4]) for mode in modes}
    assert [row[1] for row in found if row[0] == "*"] == modes
    for mode in modes:
        assert best[mode][0] == "*"
        close_fp64(best[mode][5], found[0][4] / best[mode][4], rtol=0.01)
    assert all(row[2] + row[3] == 8 for row in found[1:])
    # To sample and train at once is quicker than in turns on the same accelerators.
    assert best["4 steps ahead"][4] < best["one step off"][4] < best["synchronous"][4]
    texts = [node.text for node in ElementTree.parse("who.svg").iter("{http://www.w3.org/2000/svg}text")]
    drawn = [text for text in texts if text and "sample" in text]
    assert [text.split(":")[0] for text in drawn] == modes
    assert drawn[0] == f"colocated: 8 sample, 8 train, {found[0][4]:.3g} s a step"


def test_one_split_and_the_recipes_own_bound(big):
    result = big(
        "simulate",
        "big.yaml",
        "mesh={}",
        "rollout.max_staleness=3",
        "--gpus",
        "8xH200",
        "--split",
        "5",
        SHORT,
    )
    assert [row[1:4] for row in rows(result.out)] == [
        ("colocated", 8, 8),
        ("synchronous", 5, 3),
        ("one step off", 5, 3),
        ("3 steps ahead", 5, 3),
    ]


@pytest.mark.slow
def test_given_lengths_count(big):
    words = ("simulate", "big.yaml", "--gpus", "8xH200", "--split", "4", "--lengths")
    short, long = (big(*words, lengths) for lengths in ("50,0", "200,0"))
    assert "50 tokens an answer on average" in short.out
    assert all(one[4] < other[4] for one, other in zip(rows(short.out), rows(long.out), strict=True))


@pytest.mark.slow
def test_a_run_is_compared_with_its_own_simulation(lab, monkeypatch):
    write_run(Path("done"), monkeypatch, staleness=2, steps=40)
    result = lab("simulate", "--from", "done")
    measured = read_measured("done").step
    lines = [line.split() for line in result.out.splitlines() if line]
    assert result.code == 0
    assert result.out.startswith("done: 40 batches at staleness 2, 1 engines, 1 ranks\n")
    close_fp64(float(lines[2][3]), measured["step_s"], rtol=1e-3)
    error = float(lines[2][2]) / float(lines[2][3]) - 1
    close_fp64(float(lines[2][4].rstrip("%")) / 100, error, atol=1e-3)
    assert abs(error) < 0.1
    assert [line[0] for line in lines[2:]] == [
        "step,",
        "waiting,",
        "training,",
        "weight",
        "tokens/s",
        "staleness",
    ]


def test_more_machines_like_those_of_a_run(lab, monkeypatch):
    write_run(Path("done"), monkeypatch, steps=10)
    result = lab("simulate", "--from", "done", "--gpus", "2")
    found = rows(result.out)
    assert "durations: 2 machines like those of the run; " in result.out
    assert found[1][:4] == ("*", "synchronous", 1, 1)
    # One engine and one rank: as the run itself.
    close_fp64(found[1][4], read_measured("done").step["step_s"], rtol=0.1)
    assert OTHER_S < found[0][4] < found[1][4]


@pytest.mark.slow
def test_a_number_alone_is_of_the_usual_accelerator_and_the_first_line_says_so(big):
    named = big("simulate", "big.yaml", "--gpus", "8xH100", "--split", "4", SHORT).out.splitlines()
    alone = big("simulate", "big.yaml", "--gpus", "8", "--split", "4", SHORT).out.splitlines()
    why = (
        "durations: 8 x H100, since --gpus 8 names none (8xH200 does), as millrace plan counts at 40% of the"
    )
    assert alone[0].startswith(why)
    assert alone[1:] == named[1:]
    assert "since" not in named[0]


def test_splits_are_every_one_or_evenly_many():
    assert possible_splits(1, "search") == []
    assert possible_splits(4, "search") == [1, 2, 3]
    assert possible_splits(128, "search") == list(range(4, 128, 4))
    assert possible_splits(8, "3") == [3]
    for wrong in ("0", "8", "half", "-1"):
        with pytest.raises(PlanError, match="1 to 7 can sample, or write search"):
            possible_splits(8, wrong)


def test_one_accelerator_has_nothing_to_split(big):
    result = big("simulate", "big.yaml", "mesh={}", "--gpus", "1xH200", SHORT)
    assert result.code == 0
    assert [row[1:4] for row in rows(result.out)] == [("colocated", 1, 1)]
    assert best_rows([]) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("big.yaml", "--gpus", "1xL4", "mesh={}"), "the recipe cannot be trained on 1 accelerators; ask"),
        (("big.yaml", "--gpus", "8xL40S", "--split", "7"), "--split 7 leaves 1 to train on, where the"),
        (("big.yaml", "--gpus", "0"), "--gpus is '0'; write how many, x, and which, such as 8xH200"),
        (("--gpus", "8xH200"), "RECIPE is missing; give a recipe, or a run with --from"),
        (("big.yaml", "--gpus", "8xH200", "--lengths", "long"), "--lengths is 'long'; write the median"),
        (("big.yaml", "--gpus", "8xH200", "--mfu", "2"), "Invalid value for '--mfu'"),
        (
            ("big.yaml", "--gpus", "8xH200", "rollout.dynamic_sampling_rounds=1"),
            "rollout.dynamic_sampling_rounds 1 cannot be",
        ),
        (("big.yaml", "--from", "nowhere"), "nowhere is not a run folder"),
    ],
)
def test_mistakes_are_said(big, words, said):
    result = big("simulate", *words)
    assert result.code == 2
    assert said in result.err
    assert result.out == ""


def test_a_picture_or_a_recipe_needs_machines(big, monkeypatch):
    write_run(Path("done"), monkeypatch, steps=4)
    for words in (("big.yaml",), ("--picture", "who.svg")):
        result = big("simulate", "--from", "done", *words)
        assert result.code == 2
        assert result.err.startswith("error: --gpus is missing; with --from alone, without RECIPE and")
